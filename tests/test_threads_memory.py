"""Many threads compile once and do not block each other; many functions leave nothing behind."""

import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopjit
from counting import counting
from loopjit import loop_jit

ONE = np.float32(1.0)


def in_threads(work, count=8, timeout=60):
    """Runs ``work(i)`` in threads that start together; returns the results or the first error."""
    barrier = threading.Barrier(count)
    results, errors = [None] * count, []

    def run(i):
        try:
            barrier.wait(timeout)
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]
    return results


# ------------------------------------------------------------------------------------------------
# Threads
# ------------------------------------------------------------------------------------------------


def _one_object():
    f = loop_jit(lambda x: jnp.sin(x) * 2.0)
    return lambda i: f


def _fresh_equal():
    return lambda i: loop_jit(lambda x: jnp.sin(x) * 2.0)


def _one_object_with_captures():
    a = jnp.float32(2.0)
    f = loop_jit(lambda x: jnp.sin(x) * a)
    return lambda i: f


def _fresh_equal_with_captures():
    arrays = [jnp.float32(2.0) for _ in range(8)]
    return lambda i: (lambda a: loop_jit(lambda x: jnp.sin(x) * a))(arrays[i])


def _fresh_loops():
    def run(x):
        return loopjit.lax.fori_loop(0, 1, lambda i, c: jnp.sin(c) * 2.0, x)

    return lambda i: run


def _private_state():
    numbers = iter(range(1000))
    f = loop_jit(lambda x: jnp.sin(x) * 2.0 + 0.0 * next(numbers))
    return lambda i: f


@pytest.mark.parametrize(
    "make",
    [
        _one_object,
        _fresh_equal,
        _one_object_with_captures,
        _fresh_equal_with_captures,
        _fresh_loops,
    ],
)
def test_eight_threads_compile_once(make):
    get = make()
    x = jnp.float32(0.5)
    want = float(np.sin(np.float32(0.5)) * 2)
    with counting() as alone:
        get(0)(x)
    for _ in range(3):
        loopjit.cache_clear()
        with counting() as n:
            results = in_threads(lambda i: float(get(i)(x)))
        assert results == pytest.approx([want] * 8, rel=1e-6)
        assert n.compiles == 1 and n.traces <= alone.traces
        with counting() as n:
            in_threads(lambda i: float(get(i)(x)))
        assert n.compiles == 0


def test_eight_threads_and_a_private_state():
    get = _private_state()
    results = in_threads(lambda i: float(get(i)(jnp.float32(0.5))))
    assert results == pytest.approx([float(np.sin(np.float32(0.5)) * 2)] * 8, rel=1e-6)


def test_threads_with_other_shapes_and_captures_get_their_own_answers():
    arrays = [jnp.full(3, float(i)) for i in range(8)]
    inputs = [jnp.arange(i + 1.0) for i in range(8)]

    def work(i):
        a = arrays[i]
        out = []
        for _ in range(30):
            out.append(float(loop_jit(lambda x: x.sum() + a[0])(inputs[i])))
            out.append(float(loop_jit(lambda x: x + a[0])(ONE)))
        return out

    for i, out in enumerate(in_threads(work)):
        assert out == [sum(range(i + 1)) + i, i + 1.0] * 30


def test_threads_under_different_contexts():
    def work(i):
        out = set()
        for _ in range(10):
            f = loop_jit(lambda x: x + 1)
            if i % 2:
                with jax.enable_x64(True):
                    out.add(str(f(np.arange(3)).dtype))
            else:
                out.add(str(f(np.arange(3)).dtype))
        return out

    assert in_threads(work) == [{"int32"}, {"int64"}] * 4


def test_threads_with_different_functions_do_not_block_each_other():
    def work(i):
        f = loop_jit(functools.partial(lambda k, x: jnp.cos(x) * k, float(i)))
        return float(f(jnp.float32(0.0)))

    assert in_threads(work) == [float(i) for i in range(8)]


def test_nested_functions_in_opposite_order():
    for _ in range(5):
        loopjit.cache_clear()
        first = loop_jit(lambda x, other: jnp.sin(x) + (other(x, None) if other else 0.0))
        second = loop_jit(lambda x, other: jnp.cos(x) - (other(x, None) if other else 0.0))

        def work(i):
            x = jnp.float32(0.25)
            return float(first(x, second) if i % 2 else second(x, first))

        a, b = float(np.sin(0.25)), float(np.cos(0.25))
        assert in_threads(work) == pytest.approx([b - a, a + b] * 4, rel=1e-5)


def test_a_function_that_starts_a_thread_and_waits_for_it():
    def make():
        return loop_jit(lambda x: x * 3.0 + 1.0)

    def outer(x):
        out = []
        thread = threading.Thread(target=lambda: out.append(float(make()(2.0))), daemon=True)
        thread.start()
        thread.join(20)
        assert out, "deadlock"
        return x + out[0]

    def work(i):
        return float(loop_jit(outer)(ONE)) if i % 2 else float(make()(ONE))

    assert in_threads(work, count=4) == [4.0, 8.0] * 2


def test_a_callback_that_calls_a_loop_jit_function():
    def inner(x):
        return np.asarray(loop_jit(lambda y: y * 2.0)(np.float32(x)))

    def outer(x):
        return jax.pure_callback(inner, jax.ShapeDtypeStruct((), jnp.float32), x) + 1.0

    f = loop_jit(outer)
    assert in_threads(lambda i: float(f(jnp.float32(i))), count=4) == [1.0, 3.0, 5.0, 7.0]


def test_an_error_in_one_thread_leaves_the_others_alone():
    lock, failed = threading.Lock(), []

    def f(x):
        with lock:
            fail = not failed
            failed.append(1)
        if fail:
            raise KeyError("first")
        return x + 1.0

    g = loop_jit(f)

    def work(i):
        try:
            return float(g(ONE))
        except KeyError:
            return "failed"

    results = in_threads(work)
    assert results.count("failed") <= 1 and set(results) <= {2.0, "failed"}


def test_clearing_while_others_call():
    stop = threading.Event()

    def work(i):
        if i == 0:
            for _ in range(20):
                loopjit.cache_clear()
                stop.wait(0.01)
            stop.set()
            return True
        k = float(i)
        while not stop.is_set():
            assert float(loop_jit(lambda x: x + k)(ONE)) == 1.0 + k
            assert int(loopjit.lax.fori_loop(0, i, lambda j, c: c + j, 0)) == sum(range(i))
        return True

    assert in_threads(work, count=4) == [True] * 4


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


def _collect():
    for _ in range(3):
        gc.collect()


class Owner:
    """Something of the user's that is seen to die."""

    def __init__(self, k=1.0):
        self.k = k

    def method(self, x):
        return x * self.k


def test_captured_arrays_are_freed():
    def run(k):
        a = jnp.full(1000, k)
        assert float(loop_jit(lambda x: (x * a).sum())(ONE)) == 1000.0 * k
        loopjit.lax.fori_loop(0, 2, lambda i, c: c + a.sum(), jnp.float32(0))
        jax.grad(loop_jit(lambda x: (x * a).sum()))(ONE)
        return weakref.ref(a)

    refs = [run(float(k)) for k in range(20)]
    _collect()
    assert [r() for r in refs] == [None] * 20


def test_arguments_and_results_are_freed():
    f = loop_jit(lambda x, t: (x * 2.0, t["a"] + 1.0))
    x, t = jnp.ones(1000), {"a": jnp.ones(1000)}
    out = f(x, t)
    refs = [weakref.ref(v) for v in (x, t["a"], *out)]
    del x, t, out
    _collect()
    assert [r() for r in refs] == [None] * 4


@pytest.mark.parametrize(
    "use",
    [
        lambda o: loop_jit(lambda x: x * o.k),
        lambda o: loop_jit(o.method),
        lambda o: loop_jit(functools.partial(lambda o, x: x * o.k, o)),
        lambda o: loop_jit(lambda x, o=o: x * o.k),
        lambda o: loop_jit(lambda x: [x * o.k, [o]][0]),
        lambda o: lambda x: loop_jit(lambda x, s: x * s.k)(x, o),
        lambda o: lambda x: loopjit.lax.fori_loop(0, 2, lambda i, c: c * o.k, x),
    ],
    ids=["attribute", "method", "partial", "default", "escapes", "static argument", "loop"],
)
def test_captured_objects_are_freed(use):
    owner = Owner(2.0)
    ref = weakref.ref(owner)
    f = use(owner)
    f(ONE), f(ONE)
    del owner, f
    _collect()
    assert ref() is None


def test_functions_are_freed():
    def run(k):
        a = jnp.float32(k)
        f = lambda x: jnp.sin(x) * a
        jitted = loop_jit(f)
        jitted(ONE)
        jax.grad(jitted)(ONE)
        return weakref.ref(f), weakref.ref(jitted), weakref.ref(a)

    refs = [r for k in range(5) for r in run(float(k))]
    _collect()
    # one set may be alive: the program that was traced first remembers where it comes from
    assert sum(r() is not None for r in refs) <= 1
    loopjit.cache_clear()
    jax.clear_caches()
    _collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_private_programs_die_with_their_function():
    refs = []
    for _ in range(10):
        seen = []
        f = loop_jit(lambda x: (seen.append(1), x * 2.0)[1])
        f(ONE), f(ONE)
        refs.append(weakref.ref(f.__wrapped__))
        del f
    _collect()
    assert sum(r() is not None for r in refs) <= 1


def test_deleting_a_captured_array():
    def make(a):
        return loop_jit(lambda x: x + a)

    a = jnp.float32(1.0)
    f = make(a)
    assert float(f(ONE)) == 2.0
    a.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        f(ONE)
    assert float(make(jnp.float32(2.0))(ONE)) == 3.0


PROGRAM = """
    import gc, sys
    sys.path[:0] = sys.argv[1:]
    import jax, jax.numpy as jnp
    import loopjit
    from loopjit import loop_jit

    def resident():
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmRSS"):
                    return int(line.split()[1]) / 1024

    x = jnp.ones(8)

    def once(i):
        a, k = jnp.full(8, 1.0 + i), i % 7
        loop_jit(lambda x: jnp.sin(x * a) + k)(x)
        loopjit.lax.while_loop(lambda c: c.sum() < 3.0, lambda c: c + a, x)
        if i % 10 == 0:
            seen = []
            loop_jit(lambda x: (seen.append(i), x * a)[1])(x)

    for i in range(300):
        once(i)
    gc.collect()
    before, objects = resident(), len(gc.get_objects())
    for i in range(3000):
        once(i)
    gc.collect()
    print(resident() - before, len(gc.get_objects()) - objects, len(jax.live_arrays()))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_many_fresh_functions_leave_memory_flat():
    here = os.path.dirname(__file__)
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), here, os.path.dirname(here)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    megabytes, objects, arrays = map(float, out.stdout.split())
    assert megabytes < 20, out.stdout
    assert objects < 5000, out.stdout
    assert arrays < 50, out.stdout


def test_many_shapes_and_statics_of_one_function():
    f = loop_jit(lambda x, s: x.sum() * len(s), max_programs=8)
    for _ in range(2):
        for i in range(1, 15):
            assert float(f(np.ones(i, np.float32), "s" * (i % 3))) == i * (i % 3)
    assert len(f.signatures) == f.cache_info().currsize <= 8
