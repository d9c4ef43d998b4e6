"""``install()`` and ``uninstall()`` leave JAX as it was, whatever happens between them."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref

import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import numpy as np
import pytest
from installs import XS, X, arr
from jax import lax
from jax._src import pjit
from test_threads_memory import in_threads

import loopjit
from counting import counting

module = sys.modules["loopjit.install"]  # the name in the package is that of the function

LOOPS = (
    primitives.while_p,
    primitives.scan_p,
    primitives.cond_p,
    primitives.reduce_p,
    primitives.reduce_window_p,
)
LAX = ("while_loop", "fori_loop", "scan", "map", "cond", "switch", "associative_scan")
RUNNER = "_pjit_call_impl_python"


def places():
    """What stands in all places that are hooked."""
    return [
        *[p.impl for p in LOOPS],
        getattr(pjit, RUNNER, None),
        *[getattr(lax, name) for name in LAX],
    ]


STOCK = places()


def hooked():
    """Which of the places hold something else than JAX put there: loops, jit, lax."""
    changed = [now is not then for now, then in zip(places(), STOCK, strict=True)]
    loops, jit, names = changed[: len(LOOPS)], changed[len(LOOPS)], changed[len(LOOPS) + 1 :]
    assert len(set(loops)) == len(set(names)) == 1
    return loops[0], jit, names[0]


NOTHING, LOOPS_ONLY, BOTH = (False,) * 3, (True, False, False), (True, True, False)


@pytest.fixture(autouse=True)
def _all_is_as_it_was():
    assert hooked() == NOTHING
    yield
    try:
        assert hooked() == NOTHING and not module._layers
    finally:
        for place, stock in zip(LOOPS, STOCK, strict=False):
            place.def_impl(stock)
        setattr(pjit, RUNNER, STOCK[len(LOOPS)])
        module._layers.clear()
        module._settle()


def jitted(k=2.0):
    return jax.jit(lambda x: jnp.sin(x) * k)(X)


def looped(k=2.0):
    return lax.fori_loop(0, 2, lambda i, c: jnp.sin(c) * k, X)


def compiles(run, *args):
    """How often a second, equal call compiles."""
    run(*args)
    with counting() as n:
        run(*args)
    return n.compiles


# --------------------------------------------------------------------------------------------
# In and out
# --------------------------------------------------------------------------------------------


def test_once():
    assert (compiles(jitted), compiles(looped)) == (1, 1)
    assert loopjit.install() is None
    assert hooked() == BOTH
    assert (compiles(jitted), compiles(looped)) == (0, 0)
    assert loopjit.uninstall() is None
    assert hooked() == NOTHING
    assert (compiles(jitted), compiles(looped)) == (1, 1)


@pytest.mark.parametrize(("jit", "lax_"), [(True, False), (False, False), (False, True)])
def test_what_is_hooked(jit, lax_):
    with loopjit.installed(jit=jit, lax=lax_):
        assert hooked() == (True, jit, lax_)
        assert compiles(looped) == 0
        assert compiles(jitted) == (0 if jit else 1)


def test_installs_count():
    for _ in range(3):
        loopjit.install()
        ours = places()
    for _ in range(2):
        loopjit.uninstall()
        assert all(a is b for a, b in zip(places(), ours, strict=True))
        assert compiles(jitted) == compiles(looped) == 0
    loopjit.uninstall()
    assert hooked() == NOTHING


def test_uninstall_without_install():
    loopjit.uninstall()
    loopjit.uninstall()
    loopjit.install()
    assert hooked() == BOTH
    loopjit.uninstall()
    assert hooked() == NOTHING
    loopjit.uninstall()


def test_each_takes_back_its_own():
    loopjit.install(jit=False)
    loopjit.install()
    assert hooked() == BOTH
    loopjit.uninstall()
    assert hooked() == LOOPS_ONLY
    loopjit.uninstall()


def test_contexts_that_overlap():
    a, b = loopjit.installed(), loopjit.installed(jit=False)
    a.__enter__()
    b.__enter__()
    assert hooked() == BOTH
    a.__exit__(None, None, None)
    assert hooked() == LOOPS_ONLY
    with loopjit.installed(lax=True):
        assert hooked() == (True, True, True)
    assert hooked() == LOOPS_ONLY
    loopjit.install()
    b.__exit__(None, None, None)
    assert hooked() == BOTH
    loopjit.uninstall()


def test_an_error_in_the_body():
    @loopjit.installed()
    def fail():
        assert hooked() == BOTH
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hooked() == NOTHING


def test_an_error_of_a_program_that_runs():
    def fail(x):
        raise KeyError("no")

    with loopjit.installed(), pytest.raises(KeyError):
        jax.jit(fail)(X)
    assert hooked() == NOTHING


def test_uninstalled_once_too_often():
    loopjit.install()
    with loopjit.installed(jit=False):
        loopjit.uninstall()  # takes back the latest one
        assert hooked() == BOTH
    assert hooked() == BOTH
    with loopjit.installed():
        loopjit.uninstall()
        loopjit.uninstall()
        assert hooked() == NOTHING
    assert hooked() == NOTHING


def test_as_a_decorator():
    @loopjit.installed()
    def f():
        return hooked()

    assert f() == f() == BOTH
    assert hooked() == NOTHING


def test_in_many_threads():
    def work(i):
        for n in range(20):
            if (i + n) % 2:
                with loopjit.installed(jit=bool(n % 3), lax=i == 0):
                    assert hooked()[0]
            else:
                loopjit.install()
                assert hooked()[:2] == (True, True)
                loopjit.uninstall()
        return True

    assert in_threads(work) == [True] * 8


def test_while_others_run():
    stop = threading.Event()

    def work(i):
        if i == 0:
            for _ in range(30):
                with loopjit.installed():
                    stop.wait(0.005)
            stop.set()
            return True
        k = float(i)
        while not stop.is_set():
            np.testing.assert_allclose(jitted(k), np.sin(X) * k, rtol=1e-5)
            np.testing.assert_allclose(looped(k), np.sin(np.sin(X) * k) * k, rtol=1e-5)
        return True

    assert in_threads(work, count=4) == [True] * 4


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"jit": 1}, TypeError, "jit"),
        ({"jit": None}, TypeError, "jit"),
        ({"jit": "yes"}, TypeError, "jit"),
        ({"lax": 0}, TypeError, "lax"),
        ({"max_programs": "3"}, TypeError, "max_programs"),
        ({"max_programs": 3.0}, TypeError, "max_programs"),
        ({"max_programs": True}, TypeError, "max_programs"),
        ({"max_programs": 0}, ValueError, "max_programs"),
        ({"max_programs": -1}, ValueError, "max_programs"),
    ],
)
def test_wrong_arguments(options, error, name):
    for make in (loopjit.install, lambda **o: loopjit.installed(**o).__enter__()):
        with pytest.raises(error, match=f"^{name}: expected .*{[*options.values()][0]}") as info:
            make(**options)
        assert isinstance(info.value, loopjit.LoopJitError)
    assert hooked() == NOTHING


def test_options_have_names():
    with pytest.raises(TypeError):
        loopjit.install(True)


# --------------------------------------------------------------------------------------------
# With others
# --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def another_hook(calls):
    """Another library counts calls in the same places."""
    before = [*[p.impl for p in LOOPS], getattr(pjit, RUNNER)]

    def over(inner):
        @functools.wraps(inner)
        def theirs(*args, **kwargs):
            calls.append(1)
            return inner(*args, **kwargs)

        return theirs

    for p in LOOPS:
        p.def_impl(over(p.impl))
    setattr(pjit, RUNNER, over(getattr(pjit, RUNNER)))
    try:
        yield
    finally:
        for p, rule in zip(LOOPS, before, strict=False):
            p.def_impl(rule)
        setattr(pjit, RUNNER, before[-1])


@pytest.mark.parametrize("run", [jitted, looped])
def test_another_hook_on_top(run):
    want, calls = np.asarray(run()), []
    loopjit.install()
    with another_hook(calls):
        assert compiles(run) == 0 and calls
        loopjit.uninstall()
        # Ours is below theirs, and does nothing.
        assert compiles(run) == 1
        del calls[:]
        np.testing.assert_array_equal(run(), want)
        once = len(calls)
        assert once > 0
        # Again: now ours stands above theirs and a dead one of ours.
        loopjit.install()
        loopjit.cache_clear()
        run()
        del calls[:]
        np.testing.assert_array_equal(run(), want)
        assert len(calls) <= once and compiles(run) == 0
        info = loopjit.cache_info()
        run()
        if run is jitted:  # an operation with a rule of theirs is not counted
            assert loopjit.cache_info().interned == info.interned + 1
        loopjit.uninstall()
        assert compiles(run) == 1
    # They have put back our dead hook.
    assert hooked()[:2] == (True, True)
    assert compiles(run) == 1
    np.testing.assert_array_equal(run(), want)
    for p, rule in zip(LOOPS, STOCK, strict=False):
        p.def_impl(rule)
    setattr(pjit, RUNNER, STOCK[len(LOOPS)])


@pytest.mark.parametrize("run", [jitted, looped])
def test_another_hook_that_is_taken_out_first(run):
    calls = []
    loopjit.install()
    with another_hook(calls):
        run()
    assert calls and compiles(run) == 0
    loopjit.uninstall()


@pytest.mark.parametrize("run", [jitted, looped])
def test_another_hook_below(run):
    calls = []
    with another_hook(calls):
        loopjit.install()
        assert compiles(run) == 0 and calls
        loopjit.uninstall()
        del calls[:]
        assert compiles(run) == 1 and calls


def test_another_loop_on_top():
    loopjit.install(lax=True)
    ours, calls, want = lax.map, [], X * 7
    lax.map = lambda f, xs: (calls.append(1), ours(f, xs))[1]
    try:
        with counting() as n:
            for _ in range(3):
                lax.map(lambda x: x * 7, X)
        assert (len(calls), n.compiles) == (3, 1) and loopjit.cache_info().hits == 2
        loopjit.uninstall()
        with counting() as n:
            for _ in range(2):
                np.testing.assert_array_equal(lax.map(lambda x: x * 7, X), want)
        assert (len(calls), n.compiles) == (5, 2) and loopjit.cache_info().hits == 2
    finally:
        lax.map = STOCK[len(LOOPS) + 1 + LAX.index("map")]


def test_another_hook_below_that_is_taken_out_first():
    other = another_hook([])
    other.__enter__()
    loopjit.install()
    other.__exit__(None, None, None)
    assert hooked() == NOTHING  # with what stood there before, ours has gone too
    assert compiles(jitted) == compiles(looped) == 1
    loopjit.uninstall()


def test_clearing_while_installed():
    for clear in (jax.clear_caches, loopjit.cache_clear):
        with loopjit.installed():
            for run in (jitted, looped):
                assert compiles(run) == 0
                clear()
                assert loopjit.cache_info().currsize == 0
                np.testing.assert_allclose(run(), run(), rtol=0)
                assert compiles(run) == 0


def test_a_function_that_outlives_a_clearing():
    w = arr(2.0)
    f = jax.jit(lambda x: jnp.sin(x) * w)
    with loopjit.installed():
        for clear in (jax.clear_caches, loopjit.cache_clear, lambda: None):
            np.testing.assert_allclose(f(X), np.sin(X) * 2, rtol=1e-6)
            clear()
    np.testing.assert_allclose(f(X), np.sin(X) * 2, rtol=1e-6)


# --------------------------------------------------------------------------------------------
# A JAX that is not known
# --------------------------------------------------------------------------------------------


def _no_runner(patch):
    patch.delattr(pjit, RUNNER)


def _other_parameters(patch):
    runner = getattr(pjit, RUNNER)
    patch.setattr(pjit, RUNNER, lambda *args, jaxpr, name: runner(*args, jaxpr=jaxpr, name=name))


def _one_parameter_more(patch):
    def runner(
        *args,
        jaxpr,
        in_shardings,
        out_shardings,
        in_layouts,
        out_layouts,
        donated_invars,
        ctx_mesh,
        name,
        keep_unused,
        inline,
        compiler_options_kvs,
        more=None,
    ): ...

    patch.setattr(pjit, RUNNER, runner)


def _renamed_parameter(patch):
    def runner(
        *args,
        jaxpr,
        in_shardings,
        out_shardings,
        in_layouts,
        out_layouts,
        donated_invars,
        mesh,
        name,
        keep_unused,
        inline,
        compiler_options_kvs,
    ): ...

    patch.setattr(pjit, RUNNER, runner)


def _called_from_elsewhere(patch):
    patch.setattr(pjit, "_run_python_pjit", lambda *args: None)


def _no_place_for_arrays(patch):
    patch.setattr(module.compat, "_shard_argument", None)


def _no_signature(patch):
    patch.setattr(pjit, RUNNER, min)


UNKNOWN_JIT = [
    _no_runner,
    _other_parameters,
    _one_parameter_more,
    _renamed_parameter,
    _called_from_elsewhere,
    _no_place_for_arrays,
    _no_signature,
]


def _no_loop(patch):
    patch.delattr(primitives, "while_p")


def _no_rule(patch):
    patch.setattr(primitives.cond_p, "impl", None)


def _older(patch):
    patch.setattr(jax, "__version__", "0.9.2")


def _newer(patch):
    patch.setattr(jax, "__version__", "0.13.0.dev20270101")


UNKNOWN_LOOPS = [_no_loop, _no_rule, _older, _newer]


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(module, "_warned", False)


@pytest.mark.usefixtures("not_warned")
@pytest.mark.parametrize("unknown", [*UNKNOWN_JIT, *UNKNOWN_LOOPS])
def test_an_unknown_jax_is_left_alone(unknown):
    with pytest.MonkeyPatch.context() as patch:
        unknown(patch)
        before = places()
        with pytest.warns(loopjit.LoopJitWarning, match="does not know this version") as seen:
            loopjit.install()
        assert len(seen) == 1 and seen[0].filename == __file__
        with loopjit.installed():  # and no other warning: it would be an error here
            loopjit.install()
            assert all(a is b for a, b in zip(places(), before, strict=True))
            loopjit.uninstall()
        loopjit.uninstall()
        assert all(a is b for a, b in zip(places(), before, strict=True))
    with loopjit.installed():
        assert hooked() == BOTH
        assert compiles(jitted) == 0


@pytest.mark.usefixtures("not_warned")
def test_the_warning_of_a_context_names_the_caller():
    with pytest.MonkeyPatch.context() as patch:
        _no_runner(patch)
        with pytest.warns(loopjit.LoopJitWarning) as seen, loopjit.installed():
            pass
        assert seen[0].filename == __file__


@pytest.mark.usefixtures("not_warned")
@pytest.mark.parametrize("unknown", UNKNOWN_JIT)
def test_loops_are_shared_where_jit_is_not_known(unknown):
    with pytest.MonkeyPatch.context() as patch:
        unknown(patch)
        runner = getattr(pjit, RUNNER, None)
        with loopjit.installed(jit=False):
            assert getattr(pjit, RUNNER, None) is runner
            assert primitives.while_p.impl is not STOCK[0]
            if unknown is _no_place_for_arrays:
                assert compiles(looped) == 0
        assert primitives.while_p.impl is STOCK[0]


@pytest.mark.usefixtures("not_warned")
def test_known_and_unknown_installs():
    with loopjit.installed(jit=False), pytest.MonkeyPatch.context() as patch:
        _no_place_for_arrays(patch)
        with pytest.warns(loopjit.LoopJitWarning):
            loopjit.install()
        assert hooked() == LOOPS_ONLY
        loopjit.uninstall()
        assert hooked() == LOOPS_ONLY


# --------------------------------------------------------------------------------------------
# The environment
# --------------------------------------------------------------------------------------------

_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import jit
from counting import counting
import loopjit
{before}
x = jnp.asarray(np.ones(3, np.float32))
def once():
    jit(lambda x: jnp.sin(x) * 2)(x)
    jax.lax.fori_loop(0, 2, lambda i, c: c * 2, x)
once()
with counting() as n:
    once()
print(n.compiles)
loopjit.uninstall()
with counting() as n:
    once()
print(n.compiles)
"""


@pytest.mark.parametrize(
    ("env", "before", "want"),
    [
        ({"LOOPJIT_INSTALL": "1"}, "", ["0", "2"]),
        ({"LOOPJIT_INSTALL": "0"}, "", ["2", "2"]),
        ({"LOOPJIT_INSTALL": "1", "LOOPJIT_DISABLE": "1"}, "loopjit.install()", ["2", "2"]),
    ],
)
def test_the_environment(env, before, want):
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here)])
    out = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(before=before)],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == want


# --------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("run", [jitted, looped])
def test_what_is_beyond_the_bound_goes(run, jit):
    if run is jitted and not jit:
        return
    with loopjit.installed(jit=jit, max_programs=3):
        for k in range(8):
            want = np.sin(X) * k if run is jitted else np.sin(np.sin(X) * k) * k
            for _ in range(2):
                np.testing.assert_allclose(run(float(k)), want, rtol=1e-5, atol=1e-7)
            assert loopjit.cache_info().currsize <= 3
        assert loopjit.cache_info().currsize == 3
        with counting() as n:
            run(7.0)
        assert n.compiles == 0
        with counting() as n:
            run(0.0)
        assert n.compiles == 1
        np.testing.assert_allclose(run(0.0), X * 0)


def test_what_has_gone_is_not_remembered():
    with loopjit.installed(max_programs=2):
        for k in range(10):
            jitted(float(k)), looped(float(k))
        gc.collect()
        assert len(module.SHARED.programs._known) <= 6
        assert len(module.SHARED._bodies._known) <= 12


def test_single_operations_take_no_places():
    with loopjit.installed():
        for n in range(5):
            lax.sin(np.ones(n + 2, np.float32))
        assert loopjit.cache_info().currsize == 0


def test_bodies_of_loops_are_bounded_too():
    with loopjit.installed(max_programs=2):
        for k in range(20):
            looped(float(k))
        assert len(module.SHARED._bodies) <= 8


def test_bounds_of_nested_installs():
    def size():
        for k in range(9):
            jitted(float(k))
        return loopjit.cache_info().currsize

    with loopjit.installed(max_programs=4):
        assert size() == 4
        with loopjit.installed():
            assert size() == 4
            with loopjit.installed(max_programs=6):
                assert size() == 6
        assert size() == 4
    with loopjit.installed():
        assert size() == 9


class Box:
    """Something that a function captures and that can be watched."""

    k = 2.0


def _watched_jit(w, box):
    f = jax.jit(lambda x: jnp.sin(x) * w * box.k)
    f(X)
    f(X)
    jax.grad(lambda x: f(x).sum())(X)
    return f


def _watched_loop(w, box):
    step = lambda i, c: jnp.sin(c) * w * box.k
    lax.fori_loop(0, 2, step, X)
    jax.vmap(lambda x: lax.fori_loop(0, 2, step, x))(XS)
    return step


@pytest.mark.parametrize("array", [arr, lambda v: np.full(3, v, np.float32)])
@pytest.mark.parametrize("use", [_watched_jit, _watched_loop])
def test_nothing_that_was_captured_is_kept(use, array):
    with loopjit.installed():
        use(array(2.0), Box())
        w, box = array(3.0), Box()
        f = use(w, box)
        watched = [weakref.ref(o) for o in (w, box, f)]
        gc.collect()
        before = len(jax.live_arrays())
        del w, box, f
        gc.collect()
        assert [ref() for ref in watched] == [None] * 3
        assert len(jax.live_arrays()) < before or array is not arr


def test_many_fresh_functions_keep_no_arrays():
    with loopjit.installed():
        for i in range(20):
            w = arr([i, 1, 2])
            jax.jit(lambda x: jnp.sin(x) * w)(X)
            lax.fori_loop(0, 2, lambda i, c: c * w, X)
            if i == 5:
                gc.collect()
                before = len(jax.live_arrays())
        gc.collect()
        assert len(jax.live_arrays()) <= before
        assert loopjit.cache_info().currsize <= 3


# --------------------------------------------------------------------------------------------
# Threads
# --------------------------------------------------------------------------------------------


def _captures(i):
    w = arr(float(i))
    return jax.jit(lambda x: jnp.sin(x) * w)(X), np.sin(X) * i


def _plain(i):
    return jitted(), np.sin(X) * 2


def _loop(i):
    w = arr(float(i))
    return lax.fori_loop(0, 2, lambda j, c: c * w, X), X * (i * i)


def _loop_in_jit(i):
    w = arr(float(i))
    return jax.jit(lambda x: lax.fori_loop(0, 2, lambda j, c: c * w, x))(X), X * (i * i)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("run", [_captures, _plain, _loop, _loop_in_jit])
def test_eight_threads_compile_once(run, jit):
    if run is not _loop and not jit:
        return
    with loopjit.installed(jit=jit):
        run(1)  # for what is compiled once in the process
        for _ in range(3):
            loopjit.cache_clear()
            with counting() as n:
                results = in_threads(run)
            for got, want in results:
                np.testing.assert_allclose(got, want, rtol=1e-5)
            assert n.compiles == 1
            with counting() as n:
                in_threads(run)
            assert n.compiles == 0


@pytest.mark.parametrize("captures", [True, False])
def test_eight_threads_with_one_function(captures):
    def make():
        w = arr(2.0)
        return jax.jit((lambda x: jnp.sin(x) * w) if captures else (lambda x: jnp.sin(x) * 2))

    with loopjit.installed():
        for want in (1, 0, 0):
            f = make()
            with counting() as n:
                for got in in_threads(lambda i: f(X)):
                    np.testing.assert_allclose(got, np.sin(X) * 2, rtol=1e-5)
            assert n.compiles == want


def test_threads_with_other_programs():
    def work(i):
        for n in range(6):
            k = float((i + n) % 5)
            np.testing.assert_allclose(jitted(k), np.sin(X) * k, rtol=1e-5)
            np.testing.assert_allclose(looped(k), np.sin(np.sin(X) * k) * k, rtol=1e-5)
        return True

    with loopjit.installed():
        assert in_threads(work) == [True] * 8
        assert loopjit.cache_info().misses == 10


def test_a_callback_that_runs_what_is_running():
    def make(depth):
        def on_host(v):
            if depth:
                return np.asarray(make(depth - 1)(arr(v)))
            return np.asarray(lax.fori_loop(0, 2, lambda i, c: c * 2, arr(v)))

        def f(x):
            return jax.pure_callback(on_host, jax.ShapeDtypeStruct((), np.float32), x) + 1

        return jax.jit(f)

    with loopjit.installed():
        for _ in range(2):
            assert float(make(2)(arr(1.0))) == 7.0
        assert in_threads(lambda i: float(make(1)(arr(float(i)))), count=4) == [2, 6, 10, 14]


def test_one_callback_that_runs_its_own_program():
    depth = []

    def on_host(v):
        depth.append(1)
        return np.asarray(run(v)) if len(depth) < 4 else np.asarray(v)

    shape = jax.ShapeDtypeStruct((), np.float32)

    def run(x):  # a fresh function with one callback: the same program each time
        return jax.jit(lambda x: jax.pure_callback(on_host, shape, x) + 1)(np.float32(x))

    with loopjit.installed():
        assert float(run(0.0)) == 4.0


DEPTH = [0]


def _once_more(v):
    DEPTH[0] += 1
    return np.asarray(RUN[0](v) if DEPTH[0] % 3 else v)


def _call(x):
    return jax.pure_callback(_once_more, jax.ShapeDtypeStruct((), np.float32), x) + 1


def _jit_that_calls(x):
    return jax.jit(lambda x: _call(x))(np.float32(x))


def _loop_that_calls(x):
    return lax.fori_loop(0, 1, lambda i, c: _call(c), np.float32(x))


RUN = [_jit_that_calls]


@pytest.mark.parametrize("run", [_jit_that_calls, _loop_that_calls])
def test_a_program_whose_callback_runs_an_equal_one(run, monkeypatch):
    """It captures nothing, so that the programs are one."""
    monkeypatch.setitem(globals(), "RUN", [run])
    with loopjit.installed():
        for _ in range(3):
            DEPTH[0] = 0
            assert in_threads(lambda i: float(run(0.0)), count=1) == [3.0]


_during = []


def _listen(event, duration, **_):
    if _during:
        _during.pop()()


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.mark.parametrize("run", [jitted, looped])
def test_an_equal_program_runs_while_one_compiles(run):
    """In the same thread, as finalizers do, or whoever listens to JAX."""
    want = np.asarray(run())
    with loopjit.installed():
        for skipped in range(4):
            loopjit.cache_clear()
            seen = []
            _during.append(lambda: seen.append(run()))
            _during.extend([lambda: None] * skipped)
            np.testing.assert_array_equal(run(), want)
            del _during[:]
            for got in seen:
                np.testing.assert_array_equal(got, want)
            assert seen or skipped > 2


def test_programs_that_run_while_others_are_traced():
    seen = []

    def f(x):
        with jax.ensure_compile_time_eval():
            seen.append(float(jax.jit(lambda: jnp.sin(arr(0.0)) + 2)()))
            seen.append(float(lax.fori_loop(0, 2, lambda i, c: c * 2, arr(1.0))))
        return jax.jit(lambda x: x * seen[0])(x)

    with loopjit.installed():
        for _ in range(2):
            np.testing.assert_array_equal(jax.jit(lambda x: f(x))(X), X * 2)
    assert seen == [2.0, 4.0] * 2


def test_loops_that_cannot_be_compared_are_left_to_jax(monkeypatch):
    """After two tries, and only where JAX finds its programs by itself."""
    ours, staged = sys.modules["loopjit.lax"], []

    class Job(ours.Job):
        def __init__(self, *args):
            staged.append(1)
            super().__init__(*args)

    monkeypatch.setattr(ours, "Job", Job)
    monkeypatch.setattr(ours, "_private", ours.LRU(4))

    def run(while_loop):
        limit = arr(8.0)  # its value is needed
        out = while_loop(lambda x: x[0] < int(limit), lambda x: x * 2, arr([1.0, 2.0]))
        np.testing.assert_array_equal(out, [8.0, 16.0])
        return len(staged)

    assert [run(loopjit.lax.while_loop) for _ in range(3)] == [1, 2, 3]
    ours._private.clear()
    with loopjit.installed(lax=True):
        assert [run(jax.lax.while_loop) for _ in range(4)] == [4, 5, 5, 5]
    assert run(loopjit.lax.while_loop) == 6
