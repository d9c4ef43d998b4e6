"""The table of canonical programs: bounded, thread-safe, and it keeps nobody's arrays alive."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopjit import compat
from loopjit.programs import intern
from loopjit.programs.intern import Interner

MODES = ("full", "exec")


def trace(function, *args):
    return compat.open_jaxpr(jax.make_jaxpr(function)(*(args or (jnp.ones(3),))))[0]


def times(number, count=1):
    """A program of `count` equations."""

    def function(x):
        for _ in range(count):
            x = x * number
        return x

    return trace(function)


def run(canonical, *args):
    return compat.jaxpr_as_fun(canonical.jaxpr)(*args)[0]


@pytest.mark.parametrize("mode", MODES)
def test_equal_programs_are_one(mode):
    interner = Interner(mode)
    first, second, other = (interner.intern(times(n)) for n in (2.0, 2.0, 3.0))
    assert first is second
    assert first is not other
    assert first.serial != other.serial
    assert first.programs == {}
    assert first.equations == 1
    info = interner.info()
    assert (info.hits, info.misses, info.refused, info.size) == (1, 2, 0, 2)
    np.testing.assert_array_equal(run(other, jnp.ones(3)), np.full(3, 3.0))


def test_the_canonical_program_is_one_with_itself():
    interner = Interner("full")
    canonical = interner.intern(times(2.0))
    assert interner.intern(canonical.jaxpr) is canonical


def test_nested_equations_are_counted():
    interner = Interner("full")
    jaxpr = trace(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * 2, x))
    assert interner.intern(jaxpr).equations > len(jaxpr.eqns)
    assert interner.info().equations == interner.intern(jaxpr).equations


def test_consts_become_inputs():
    interner = Interner("full")
    canonicals = []
    for scale in (2.0, 3.0):
        array = jnp.full(3, scale)
        closed = jax.make_jaxpr(lambda x: x * array)(jnp.ones(3))
        opened, consts = compat.open_jaxpr(closed)
        canonicals.append(interner.intern(opened))
        np.testing.assert_array_equal(run(canonicals[-1], *consts, jnp.ones(3)), np.full(3, scale))
        # An open jaxpr with constvars, or one that carries its consts, is as good.
        assert (
            interner.intern(closed if compat.JAXPR_CARRIES_CONSTS else closed.jaxpr)
            is (canonicals[-1])
        )
    assert canonicals[0] is canonicals[1]
    assert not getattr(canonicals[0].jaxpr, "consts", ())
    assert not canonicals[0].jaxpr.constvars


@pytest.mark.parametrize("nested", [False, True])
def test_literals_are_owned(nested):
    """A 0-d NumPy array in a jaxpr is the user's, who may write to it."""
    interner, array = Interner("full"), np.array(2.0, np.float32)

    def function(x):
        if nested:
            return lax.fori_loop(0, 1, lambda i, c: jax.jit(lambda y: y * array)(c), x)
        return x * array

    canonical = interner.intern(trace(function))
    array[...] = 5.0
    np.testing.assert_array_equal(run(canonical, jnp.ones(3)), np.full(3, 2.0))
    changed = interner.intern(trace(lambda x: function(x)))
    assert changed is not canonical
    np.testing.assert_array_equal(run(changed, jnp.ones(3)), np.full(3, 5.0))
    array[...] = 2.0
    assert interner.intern(trace(lambda x: function(x))) is canonical


HELD = {
    "array": lambda: [np.array(2.0, np.float32)] * 2,
    "view": lambda: [a := np.full(3, 2.0, np.float32)[:1].reshape(()), a],
    "array of the view": lambda: [(a := np.full((), 2.0, np.float32))[...], a],
    "memory": lambda: [
        np.frombuffer(m := bytearray(np.float32(2.0).tobytes()), "f4")[0:1].reshape(()),
        m,
    ],
    "memoryview": lambda: [a := np.array(2.0, np.float32), memoryview(a)],
}


@pytest.mark.parametrize("held", HELD)
def test_literals_that_somebody_else_holds_are_copied(held):
    def traced():
        literal, holder = HELD[held]()
        return trace(lambda x: x * literal), holder

    jaxpr, holder = traced()
    canonical = Interner("exec").intern(jaxpr)
    assert canonical.jaxpr is not jaxpr
    np.frombuffer(holder, np.float32)[...] = 5.0
    np.testing.assert_array_equal(run(canonical, jnp.ones(3)), np.full(3, 2.0))


def test_literals_that_nobody_else_holds_stay_where_they_are():
    jaxpr = trace(
        lambda x: jnp.where(x > 0.5, x * 3.21, np.float32(2.0)) + np.array(4.0, np.float32)
    )
    assert Interner("exec").intern(jaxpr).jaxpr is jaxpr


def test_programs_that_are_not_wanted():
    interner = Interner("exec", accepts=lambda key: key.equations < 2)
    assert interner.intern(times(1.5)) is not None
    assert interner.intern(trace(lambda x: x * 2.0 + 1.0)) is None
    assert interner.info().size == 1


def test_another_bound():
    interner = Interner("full")
    for factor in (1.5, 2.5, 3.5):
        interner.intern(times(factor))
    interner.limit(2)
    newest = interner.intern(times(4.5))
    assert interner.info().size == 2
    assert interner.intern(times(4.5)) is newest


def test_owning_literals_keeps_types_and_sharing():
    two, three = np.array(2, np.float32), np.array(3.0, np.float32)

    def shared(x):
        inner = jax.jit(lambda y: y * two)
        return inner(inner(x)) * three

    jaxpr = trace(shared)
    canonical = Interner("full").intern(jaxpr)
    nested = [e.params["jaxpr"] for e in canonical.jaxpr.eqns if "jaxpr" in e.params]
    assert len(nested) == 2
    assert nested[0] is nested[1]
    assert str(canonical.jaxpr) == str(jaxpr)
    for equation in canonical.jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, compat.Literal):
                assert not atom.val.flags.writeable
                assert atom.val.flags.owndata or not atom.val.base.flags.writeable


def test_refused():
    interner, array = Interner("full"), jnp.arange(3.0)
    assert interner.intern(trace(lambda x: jax.jit(lambda y: y * array)(x))) is None
    assert interner.info().refused == 1
    assert interner.info().size == 0


def test_eviction_by_entries():
    interner = Interner("full", max_entries=2)
    one, two = interner.intern(times(1.5)), interner.intern(times(2.5))
    assert interner.intern(times(1.5)) is one  # now the other is the oldest
    three = interner.intern(times(3.5))
    info = interner.info()
    assert (info.size, info.evicted, info.max_entries) == (2, 1, 2)
    assert interner.intern(times(1.5)) is one
    assert interner.intern(times(3.5)) is three
    again = interner.intern(times(2.5))
    assert again is not two
    assert again.serial != two.serial
    # What was evicted still works for those who hold it.
    np.testing.assert_array_equal(run(two, jnp.ones(3)), np.full(3, 2.5))


def test_eviction_by_equations():
    interner = Interner("full", max_equations=10)
    small = interner.intern(times(1.5, count=4))
    interner.intern(times(2.5, count=4))
    assert interner.info().equations == 8
    interner.intern(times(3.5, count=4))
    info = interner.info()
    assert (info.size, info.equations, info.evicted, info.max_equations) == (2, 8, 1, 10)
    assert interner.intern(times(1.5, count=4)) is not small


def test_a_program_that_is_too_large_is_refused():
    interner = Interner("full", max_equations=10)
    kept = interner.intern(times(1.5))
    assert interner.intern(times(1.5, count=11)) is None
    assert interner.intern(times(1.5)) is kept


def test_impossible_bounds():
    with pytest.raises(ValueError, match="at least one"):
        Interner("full", max_entries=0)


def test_clear():
    interner = Interner("full")
    before = interner.intern(times(2.0))
    interner.intern(times(2.0))
    interner.clear()
    assert interner.info()[:6] == (0, 0, 0, 0, 0, 0)
    after = interner.intern(times(2.0))
    assert after is not before
    assert interner.intern(times(2.0)) is after


def test_ids_are_not_reused():
    interner, result = Interner("full"), jax.ShapeDtypeStruct((3,), jnp.float32)
    serials = set()
    for _ in range(50):
        callback = lambda v: v
        canonical = interner.intern(trace(lambda x, f=callback: jax.pure_callback(f, result, x)))
        serials.add(canonical.serial)
        del callback, canonical
        gc.collect()
    assert len(serials) == 50


def test_eight_threads_get_one_program():
    interner, barrier = Interner("full"), threading.Barrier(8)
    jaxprs = [times(2.0, count=50) for _ in range(8)]
    found = [None] * 8

    def work(index):
        barrier.wait()
        found[index] = interner.intern(jaxprs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert all(canonical is found[0] for canonical in found)
    info = interner.info()
    assert (info.hits, info.misses, info.size) == (7, 1, 1)


def test_two_threads_that_miss_at_the_same_time(monkeypatch):
    interner, barrier, made = Interner("full"), threading.Barrier(2, timeout=20), intern.Canonical

    def slow(*arguments):
        barrier.wait()  # both have looked, and neither has inserted
        return made(*arguments)

    monkeypatch.setattr(intern, "Canonical", slow)
    jaxprs, found = [times(2.0), times(2.0)], []
    threads = [
        threading.Thread(target=lambda jaxpr=jaxpr: found.append(interner.intern(jaxpr)))
        for jaxpr in jaxprs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1]
    assert interner.info()[:2] == (1, 1)


def test_many_threads_and_evictions():
    interner = Interner("full", max_entries=3)
    errors = []

    def work(seed):
        try:
            for index in range(40):
                number = float((seed + index) % 6) + 0.5
                canonical = interner.intern(times(number))
                np.testing.assert_array_equal(run(canonical, jnp.ones(3)), np.full(3, number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    info = interner.info()
    assert info.size == 3
    assert info.hits + info.misses == 320


class Watched:
    """Something that can be watched, and captured by a rule."""


@pytest.mark.parametrize("function", [jnp.sin, jax.nn.relu, jax.nn.softmax])
@pytest.mark.parametrize("mode", MODES)
def test_captured_arrays_are_not_kept_alive(function, mode):
    interner = Interner(mode)

    def intern():
        array = jnp.arange(3.0)
        jaxpr = trace(lambda x: lax.fori_loop(0, 3, lambda i, c: function(c * array), x))
        return interner.intern(jaxpr), weakref.ref(array)

    canonical, array = intern()
    gc.collect()
    assert canonical is not None
    assert interner.info().size == 1
    assert array() is None


def test_evicted_programs_are_freed():
    interner = Interner("full", max_entries=1)
    canonical = weakref.ref(interner.intern(times(2.5)))
    interner.intern(times(3.5))
    gc.collect()
    assert canonical() is None


def test_functions_of_evicted_programs_are_freed():
    interner = Interner("full", max_entries=1)
    result = jax.ShapeDtypeStruct((3,), jnp.float32)

    def intern():
        watched = Watched()
        callback = lambda v: (watched, v)[1]
        interner.intern(trace(lambda x: jax.pure_callback(callback, result, x)))
        return weakref.ref(watched)

    watched = intern()
    interner.intern(times(3.5))
    jax.clear_caches()
    gc.collect()
    assert watched() is None


def test_interning_gives_jax_one_program():
    """What it is for: jax compiles once for all."""
    interner = Interner("full")
    compiled = []
    for _ in range(3):
        canonical = interner.intern(trace(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x)))
        program = canonical.programs.setdefault(
            "jit", jax.jit(compat.jaxpr_as_fun(canonical.jaxpr))
        )
        compiled.append(program)
        np.testing.assert_array_equal(program(jnp.ones(3))[0], np.full(3, 8.0))
    assert compiled[0] is compiled[1] is compiled[2]
    assert compiled[0]._cache_size() == 1
