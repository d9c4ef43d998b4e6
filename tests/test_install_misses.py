"""What tells programs apart under ``install()``: all that lowering or compiling reads, and nothing less."""

import contextlib
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_traps_captures
import test_traps_context
from installs import XS, X, arr, check, check_missed, check_saved, look, outcome, result
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import loopjit
from counting import counting

ROWS = arr(np.arange(12.0).reshape(3, 4))
_NAN = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)


def _mesh(count=2, name="a"):
    return Mesh(np.array(jax.devices()[:count]), (name,))


def _bits(x):
    return lax.bitcast_convert_type(x, np.int32)


def _deleted(donate):
    x = jax.device_put(np.arange(4.0, dtype=np.float32))
    f = jax.jit(lambda x: x * 2 + 1, donate_argnums=(0,) if donate else ())
    return f(x), x.is_deleted()


# By name: a function that is given one of the values, makes everything anew, and runs it.
JITTED = {
    "shape of an argument": (lambda n: jax.jit(lambda x: x * 2)(arr(np.ones(n))), 1, 2, (1, 1)),
    "dtype of an argument": (
        lambda d: jax.jit(lambda x: x * 2)(arr(1, d)),
        *(np.float32, np.int32, np.float16, np.bool_, np.uint32, np.complex64),
    ),
    "weak type of an argument": (
        lambda s: jax.jit(lambda x, s: (s, x.astype(np.float16) * s))(X, s),
        *(2.0, np.float32(2), 2, np.int32(2), True, 2j),
    ),
    "shape of a const": (lambda n: (lambda w: jax.jit(lambda x: x * w))(arr([2.0] * n))(X), 1, 3),
    "dtype of a const": (
        lambda d: (lambda w: jax.jit(lambda x: (x * w, w)))(arr(1, d))(X),
        *(np.float32, np.int32, np.float16, np.bool_),
    ),
    "weak type of a const": (
        lambda w: jax.jit(lambda x: x.astype(np.float16) * w)(X),
        *(arr(2), jnp.asarray(2.0), arr(2, np.int32), jnp.asarray(2)),
    ),
    "static argument": (
        lambda n: jax.jit(lambda x, n: (x * n, jnp.asarray(n)), static_argnums=1)(X, n),
        *(1, True, 1.0, 2),
    ),
    "in_shardings": (
        lambda s: jax.jit(lambda x: x * 2, in_shardings=NamedSharding(_mesh(), s))(ROWS),
        *(P(), P(None, "a")),
    ),
    "out_shardings": (
        lambda s: jax.jit(lambda x: x * 2, out_shardings=NamedSharding(_mesh(), s))(ROWS),
        *(P(), P(None, "a")),
    ),
    "in_layouts": (
        lambda order: jax.jit(
            lambda x: x * 2,
            in_shardings=Format(Layout(order), SingleDeviceSharding(jax.devices()[0])),
        )(
            jax.device_put(
                np.ones((3, 4), np.float32),
                Format(Layout(order), SingleDeviceSharding(jax.devices()[0])),
            )
        ),
        *((0, 1), (1, 0)),
    ),
    "out_layouts": (
        lambda order: jax.jit(
            lambda x: x * 2,
            out_shardings=Format(Layout(order), SingleDeviceSharding(jax.devices()[0])),
        )(ROWS),
        *((0, 1), (1, 0)),
    ),
    "compiler_options": (
        lambda on: jax.jit(lambda x: x * 2, compiler_options={"xla_embed_ir_in_executable": on})(X),
        *(True, False),
    ),
    "keep_unused": (lambda on: jax.jit(lambda x, y: x * 2, keep_unused=on)(X, X), True, False),
    "sharding of an argument": (
        lambda s: jax.jit(lambda x: x * 2)(jax.device_put(ROWS, NamedSharding(_mesh(), s))),
        *(P(), P(None, "a")),
    ),
    "device of an argument": (
        lambda n: jax.jit(lambda x: x * 2)(jax.device_put(X, jax.devices()[n])),
        *(1, 2),
    ),
    "constraint": (
        lambda s: jax.jit(lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(_mesh(), s)))(
            ROWS
        ),
        *(P(), P(None, "a")),
    ),
    "zero": (lambda v: jax.jit(lambda x: x * v)(X), 0.0, -0.0),
    "zero of numpy": (lambda v: jax.jit(lambda x: x + v * x)(-X), np.float32(0), np.float32(-0.0)),
    "returned zero": (lambda v: jax.jit(lambda x: (x, v))(X), 0.0, -0.0, 0, False, 0j),
    "returned one": (lambda v: jax.jit(lambda x: (x, v))(X), 1.0, 1, True, np.float32(1)),
    "nan": (lambda v: jax.jit(lambda x: _bits(jnp.where(x > 0, v, x)))(X), *_NAN),
    "axis": (lambda i: jax.jit(lambda x: x.sum(i))(ROWS[:, :3]), 0, 1),
    "order": (lambda r: jax.jit(lambda x: lax.cumsum(x, reverse=r))(X), True, False),
    "primitive": (lambda op: jax.jit(lambda x: op(x))(X), jnp.sin, jnp.cos),
    "order of operands": (
        lambda r: jax.jit(lambda x, y: x - y if r else y - x)(X, ROWS[0, :3]),
        *(True, False),
    ),
    "order of outputs": (
        lambda r: jax.jit(lambda x: (x + 1, x * 2)[:: 1 if r else -1])(X),
        *(True, False),
    ),
    "precision": (
        lambda p: jax.jit(lambda x: jnp.dot(x, x, precision=p))(ROWS[:, :3]),
        *("highest", "default"),
    ),
    "branches": (
        lambda r: jax.jit(lambda x: lax.cond(x[0] > 0, *(jnp.sin, jnp.cos)[:: 1 if r else -1], x))(
            X
        ),
        *(True, False),
    ),
    "body of a loop": (
        lambda k: jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: c * k, x))(X),
        *(2.0, 3.0),
    ),
    "reducer": (
        lambda k: jax.jit(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + k * b, (0,)))(X),
        *(2.0, 3.0),
    ),
    "which of two arrays": (
        lambda pair: (lambda ws: jax.jit(lambda x: x * ws[pair[0]] - ws[pair[1]]))(
            [arr(2.0), arr(3.0)]
        )(X),
        *((0, 1), (0, 0)),
    ),
    "names of checkpoints": (
        lambda name: jax.jit(lambda x: checkpoint_name(x * 2, name))(X),
        *("a", "b"),
    ),
}


@pytest.mark.parametrize("name", JITTED)
def test_jit(name):
    run, *values = JITTED[name]
    check_missed(run, *values, exact=False)


def test_donation():
    check_missed(_deleted, True, False)


def test_one_array_twice_or_two():
    def run(one):
        a = arr([1.0, 2.0, 3.0])
        b = a if one else arr([1.0, 2.0, 5.0])
        f = jax.jit(lambda x: (x * a, x + b, jax.jit(lambda y: y * b - a)(x)))
        return f(X), lax.scan(lambda c, y: (c * a[0] + b[2], c * y), X[0], X)

    wants = [result(run, one) for one in (True, False)]
    with loopjit.installed():
        for one in (True, False, True, False):
            check(outcome(run, one), wants[not one], exact=False)


def test_two_arrays_in_another_order():
    def run(swap):
        a, b = arr(2.0), arr(3.0)
        if swap:
            a, b = b, a
        return jax.jit(lambda x: (x * a - b, b))(X)

    check_saved(run, True, False, exact=False)


LOOPS = {
    "shape of a carry": (
        lambda n: lax.fori_loop(0, 2, lambda i, c: c * 2, arr(np.ones(n))),
        *(1, 2),
    ),
    "dtype of a carry": (
        lambda d: lax.fori_loop(0, 2, lambda i, c: c + c, arr(1, d)),
        *(np.float32, np.int32, np.float16),
    ),
    "weak type of a carry": (
        lambda c: lax.while_loop(lambda c: c < 9, lambda c: c + c, c),
        *(1.0, np.float32(1), 1, np.int32(1)),
    ),
    "length": (lambda n: lax.fori_loop(0, n, lambda i, c: c * 2, X), 2, 3),
    "reverse": (
        lambda r: lax.scan(lambda c, x: (c * 2 + x, c), 0.0, X, reverse=r),
        *(True, False),
    ),
    "unroll": (lambda n: lax.scan(lambda c, x: (c * 2 + x, c), 0.0, X, unroll=n), 1, 2, True),
    "condition": (
        lambda k: lax.while_loop(lambda c: c[0] < k, lambda c: c * 2, X),
        *(5.0, 50.0),
    ),
    "body": (lambda k: lax.while_loop(lambda c: c[0] < 9, lambda c: c * k, X), 2.0, 3.0),
    "zero": (lambda k: lax.map(lambda x: x * k, X), 0.0, -0.0),
    "branches": (
        lambda r: lax.cond(True, *(jnp.sin, jnp.cos)[:: 1 if r else -1], X),
        *(True, False),
    ),
    "number of branches": (
        lambda n: lax.switch(1, [jnp.sin, jnp.cos, jnp.tan][:n], X),
        *(2, 3),
    ),
    "order of consts": (
        lambda r: (lambda a, b: lax.map(lambda x: x * a - b if r else x * b - a, X))(
            arr(2.0), arr([3.0, 4.0])
        ),
        *(True, False),
    ),
    "reducer": (
        lambda k: lax.reduce(X, np.float32(0), lambda a, b: a + k * b, (0,)),
        *(2.0, 3.0),
    ),
    "window": (
        lambda n: lax.reduce_window(X, np.float32(0), lambda a, b: a + 2 * b, (n,), (1,), "VALID"),
        *(1, 2),
    ),
    "dimensions": (
        lambda i: lax.reduce(ROWS[:, :3], np.float32(0), lambda a, b: a + 2 * b, (i,)),
        *(0, 1),
    ),
    "device": (
        lambda n: lax.map(lambda x: x * 2, jax.device_put(X, jax.devices()[n])),
        *(1, 2),
    ),
    "sharding": (
        lambda s: lax.fori_loop(
            0, 2, lambda i, c: c * 2, jax.device_put(ROWS, NamedSharding(_mesh(), s))
        ),
        *(P(), P(None, "a")),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name):
    run, *values = LOOPS[name]
    check_missed(run, *values)


# --------------------------------------------------------------------------------------------
# Functions that run on the host
# --------------------------------------------------------------------------------------------

SHAPE = jax.ShapeDtypeStruct((3,), np.float32)


def _pure(cb):
    return lambda x: jax.pure_callback(cb, SHAPE, x)


def _io(cb):
    return lambda x: io_callback(cb, SHAPE, x)


def _io_ordered(cb):
    return lambda x: io_callback(cb, SHAPE, x, ordered=True)


def _debug(cb):
    return lambda x: (jax.debug.callback(cb, x), x * 2)[1]


def _debug_ordered(cb):
    return lambda x: (jax.debug.callback(cb, x, ordered=True), x * 2)[1]


RUNS = {
    "jit": lambda f: jax.jit(f)(X),
    "map": lambda f: lax.fori_loop(0, 1, lambda i, c: f(c), X),
    "grad": lambda f: jax.grad(lambda x: jax.jit(lambda x: (f(x) * 0 + x).sum())(x))(X),
    "jit of a loop": lambda f: jax.jit(lambda x: lax.fori_loop(0, 2, lambda i, c: f(c), x))(X),
}


@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("kind", [_pure, _io, _io_ordered, _debug, _debug_ordered])
def test_each_callback_is_called(kind, way):
    if way == "grad" and kind in (_pure, _io, _io_ordered):
        pytest.skip("JAX cannot differentiate them")

    def run(k, log):
        def cb(v):
            log.append(np.asarray(v).tolist())
            return np.asarray(v) * np.float32(k)

        out = jax.block_until_ready(RUNS[way](kind(cb)))
        jax.effects_barrier()
        return out

    stock, ours = [[] for _ in range(4)], [[] for _ in range(4)]
    wants = [look(run(k, log)) for k, log in zip((2, 3, 2, 4), stock, strict=True)]
    with loopjit.installed():
        for k, log, want in zip((2, 3, 2, 4), ours, wants, strict=True):
            check(look(run(k, log)), want)
    assert ours == stock and all(stock)


CALLS = []
FACTOR = 2.0


def _on_host(v):
    CALLS.append(1)
    return np.asarray(v) * np.float32(FACTOR)


def test_a_callback_that_captures_nothing_is_found_again(monkeypatch):
    with loopjit.installed():
        for kind in (_pure, _io):
            jax.jit(kind(_on_host))(X)
            with counting() as n:
                f = jax.jit(kind(_on_host))
                out = jax.block_until_ready((f(X), f(X)))
            jax.effects_barrier()
            assert n.compiles == 0
            np.testing.assert_array_equal(out[1], X * 2)
        assert len(CALLS) == 6
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        np.testing.assert_array_equal(jax.jit(_io(_on_host))(X), X * 3)
        np.testing.assert_array_equal(f(X), X * 3)
    CALLS.clear()


@pytest.mark.parametrize("way", ["jit", "map"])
@pytest.mark.parametrize("kind", [_pure, _io, _debug])
def test_a_callback_that_captures_something_is_not_kept(kind, way):
    class Captured:
        k = np.float32(2)

    def make(o):
        return kind(lambda v: np.asarray(v) * o.k)

    with loopjit.installed():
        o = Captured()
        jax.block_until_ready(RUNS[way](make(o)))
        jax.effects_barrier()
        ref = weakref.ref(o)
        before = loopjit.cache_info()
        del o
        assert before.currsize == 0
    jax.clear_caches()
    gc.collect()
    assert ref() is None


def test_order_of_effects():
    def run(ordered):
        log = []
        f = jax.jit(
            lambda x: [
                jax.debug.callback(lambda v, i=i: log.append(i), x, ordered=ordered)
                for i in range(3)
            ][:0]
        )
        f(X), f(X)
        jax.effects_barrier()
        return log if ordered else sorted(log)

    wants = [run(True), run(False)]
    with loopjit.installed():
        for _ in range(2):
            assert [run(True), run(False)] == wants


def test_prints(capfd):
    def run(text):
        def f(x):
            jax.debug.print(text + " {v}", v=x[0], ordered=True)
            return x

        jax.jit(f)(X)
        lax.map(f, XS)
        jax.effects_barrier()
        return capfd.readouterr().out

    wants = {text: run(text) for text in ("left", "right")}
    with loopjit.installed():
        for text in ("left", "right", "left"):
            assert run(text) == wants[text]


def test_foreign_functions():
    def run(target):
        return jax.jit(lambda x: jax.ffi.ffi_call(target, SHAPE)(x))(X)

    targets = ("one_target", "other_target")
    wants = [outcome(run, t) for t in targets]
    with loopjit.installed():
        for t, want in [*zip(targets, wants, strict=True)] * 2:
            assert t in want[1]
            check(outcome(run, t), want)


# --------------------------------------------------------------------------------------------
# Rules, which count before the program is run
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", test_traps_captures.RULES)
def test_equal_primals_with_other_rules(make):
    def run(k, w):
        w = w and arr(w)
        f = lambda: make(k, w)
        return (
            jax.jit(f())(X),
            jax.grad(jax.jit(f()))(X),
            jax.jit(jax.grad(f()))(X),
            jax.grad(lambda x: lax.scan(lambda c, _: (c + f()(x), None), 0.0, XS[:2, 0])[0])(X),
        )

    values = [(2.0, None), (3.0, None), (2.0, 3.0)]
    wants = [result(run, *v) for v in values]
    with loopjit.installed():
        for v, want in [*zip(values, wants, strict=True)] * 2:
            check(outcome(run, *v), want, exact=False)


def test_rules_do_not_count_where_nothing_is_transformed():
    with loopjit.installed():
        jax.jit(test_traps_captures._vjp(2.0))(X)
        with counting() as n:
            jax.jit(test_traps_captures._vjp(3.0))(X)
            jax.jit(test_traps_captures._vjp_of_the_forward_rule(3.0))(X)
    assert n.compiles == 0


def test_batching_rules():
    def run(k):
        @jax.custom_batching.custom_vmap
        def act(x):
            return x * 1.0

        act.def_vmap(lambda size, batched, x: (x * k, True))
        f = jax.jit(lambda x: act(x))
        return f(X), jax.vmap(f)(X), jax.vmap(lambda x: lax.map(act, x))(XS)

    wants = [result(run, k) for k in (2.0, 3.0)]
    with loopjit.installed():
        for i in (0, 1, 0, 1):
            check(outcome(run, (2.0, 3.0)[i]), wants[i], exact=False)


def test_policies_of_checkpoints():
    def run(names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        @functools.partial(jax.checkpoint, policy=policy)
        def f(x):
            y = checkpoint_name(jnp.sin(x), "a")
            return jnp.sin(checkpoint_name(y * 2, "b")).sum()

        return jax.grad(jax.jit(lambda x: f(x)))(X), jax.jit(jax.grad(lambda x: f(x)))(X)

    values = ((), ("a",), ("b",), ("a", "b"))
    wants = [result(run, v) for v in values]
    with loopjit.installed():
        for v, want in [*zip(values, wants, strict=True)] * 2:
            check(outcome(run, v), want, exact=False)


# --------------------------------------------------------------------------------------------
# Contexts
# --------------------------------------------------------------------------------------------


def _metadata(k):
    from jax.experimental.xla_metadata import set_xla_metadata

    return set_xla_metadata(k=k)


def _compute_on():
    from jax.experimental.compute_on import compute_on

    return compute_on("device_host")


CONTEXTS = {
    **test_traps_context.CONTEXTS,
    "precision": (
        lambda: jax.default_matmul_precision("highest"),
        lambda: lambda x: jnp.dot(jnp.outer(x, x), jnp.outer(x, x)),
    ),
    "mesh": (lambda: jax.set_mesh(_mesh()), lambda: lambda x: x * 2),
    "metadata": (lambda: _metadata("1"), lambda: lambda x: jnp.sin(x) * 2),
    "promotion": (lambda: jax.numpy_dtype_promotion("strict"), lambda: lambda x: x * np.float32(2)),
}
NUMBERS = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.mark.parametrize("way", ["jit", "loop"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(name, way):
    context, make = CONTEXTS[name]

    def run(within):
        f = make()
        args = (NUMBERS,) if f.__code__.co_argcount else ()
        with context() if within else contextlib.nullcontext():
            if way == "jit":
                return jax.jit(lambda *args: f(*args))(*args)
            return lax.scan(lambda c, _: (c, f(*args)), np.float32(0), None, length=2)

    wants = [result(run, within) for within in (False, True)]
    with loopjit.installed():
        for within in (False, True, True, False):
            check(outcome(run, within), wants[within], exact=False)
        with counting() as n:
            run(False), run(True)
        assert n.compiles == 0
        loopjit.cache_clear()
        for within in (True, False, True):
            check(outcome(run, within), wants[within], exact=False)


EXTRA = {
    "jax_optimization_level": "O1",
    "jax_compiler_enable_remat_pass": False,
    "jax_exec_time_optimization_effort": 0.5,
}


@pytest.mark.parametrize("name", [name for name in EXTRA if hasattr(jax.config, name)])
def test_settings_that_jax_leaves_out_of_its_keys(name):
    """With other settings an equal program is another one; which one is what stock JAX forgets, too."""
    before = getattr(jax.config, name)

    def runs():
        with counting() as n:
            jax.jit(lambda x: jnp.sin(x) * 2)(X)
            lax.fori_loop(0, 2, lambda i, c: jnp.sin(c) * 2, X)
        return n.compiles

    with loopjit.installed():
        assert runs() == 2 and runs() == 0
        jax.config.update(name, EXTRA[name])
        try:
            assert runs() == 2 and runs() == 0
        finally:
            jax.config.update(name, before)
        assert runs() == 0


def test_a_function_that_was_traced_under_another_setting():
    """JAX would give its old program for the same trace, to whoever is equal."""
    if not hasattr(jax.config, "jax_compiler_enable_remat_pass"):
        pytest.skip("a JAX without it")
    make = lambda: jax.jit(lambda x: jnp.sin(x) * 7)
    with loopjit.installed():
        f = make()
        f(X)
        jax.config.update("jax_compiler_enable_remat_pass", False)
        try:
            f(jax.device_put(X, jax.devices()[3]))
            with counting() as n:
                make()(X)
        finally:
            jax.config.update("jax_compiler_enable_remat_pass", True)
    assert n.compiles == 1


@pytest.mark.parametrize("run", [lambda f: jax.jit(f)(X), lambda f: lax.map(f, X)])
def test_modes_in_which_nothing_is_shared(run):
    with loopjit.installed():
        for _ in range(2):
            run(lambda x: x / (x - x) * 2)
        for mode in (jax.debug_nans, jax.debug_infs):
            with mode(True), pytest.raises(FloatingPointError):
                run(lambda x: x / (x - x) * (2 if mode is jax.debug_infs else 0))
        size = loopjit.cache_info()
        with jax.disable_jit():
            kinds = []
            run(lambda x: (kinds.append(type(x)), x * 3)[1])
            assert not any(issubclass(kind, jax.core.Tracer) for kind in kinds)
        with jax.checking_leaks():
            run(lambda x: x * 4)
            leaked = []
            with pytest.raises(Exception, match="[Ll]eak"):
                run(lambda x: (leaked.append(x), x * 5)[1])
            leaked.clear()
        assert loopjit.cache_info() == size


def test_compute_on():
    try:
        with _compute_on():
            pass
    except TypeError:
        pytest.skip("since 0.12 it decorates functions")

    def run(host):
        def f(x):
            with _compute_on() if host else contextlib.nullcontext():
                return jnp.sin(x) * 2

        return jax.jit(f)(X)

    wants = [result(run, host) for host in (False, True)]
    with loopjit.installed():
        for host in (False, True, False, True):
            check(outcome(run, host), wants[host], exact=False)
