"""Which leaves become static: exactly those whose values are needed, at the price of few traces."""

import concurrent.futures
import contextlib
import copy
import enum
import itertools
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import statics_cases
from jax import lax
from statics_cases import CASES, HOPELESS, M, X, by_hand, leaves_of, same_values, types_of

import loopjit
from counting import counting
from loopjit import LoopJitWarning, StrictError, loop_jit

_PACKAGE = os.path.dirname(loopjit.__file__)


class Runs:
    """How often loopjit ran the body of a function; recursion inside of it does not count."""

    count = 0


@contextlib.contextmanager
def runs_of(function):
    """Counts from outside: a function that counts by itself writes to what it captures."""
    runs, code = Runs(), function.__code__

    def listen(frame, event, arg):
        if event == "call" and frame.f_code is code:
            callers = []
            while frame.f_back is not None:
                frame = frame.f_back
                callers.append(frame.f_code)
            staged = any(caller.co_filename.startswith(_PACKAGE) for caller in callers)
            runs.count += staged and code not in callers

    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        yield runs
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def costs_nothing(function):
    """Nothing is traced or compiled, and nobody is warned (warnings are errors here)."""
    with counting() as n, runs_of(function) as runs:
        yield
    assert (runs.count, n.traces, n.compiles) == (0, 0, 0)


@contextlib.contextmanager
def warned():
    """Collects the messages of loopjit's warnings; others are errors."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", LoopJitWarning)
        yield messages
    messages += [str(w.message) for w in caught]


def again(f):
    """A fresh function that is equal."""
    new = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    new.__kwdefaults__ = f.__kwdefaults__
    return new


def static_paths(f):
    """Of the leaves that were given; an argument that is left out is its default, whichever way."""
    return {row.path for row in f.statics if row.static and "default" not in row.reason}


def others(leaf):
    """Other values of a leaf, the likeliest to work first."""
    if isinstance(leaf, (bool, np.bool_)):
        return [type(leaf)(not leaf)]
    if isinstance(leaf, int):
        return [leaf + 1, leaf - 1]
    if isinstance(leaf, (float, complex)):
        return [leaf + 1.0]
    if isinstance(leaf, (np.generic, np.ndarray, jax.Array)) and leaf.ndim == 0:
        other = ~leaf if leaf.dtype == bool else leaf + leaf.dtype.type(1)
        return [np.asarray(other) if type(leaf) is np.ndarray else other]
    return []


# What these capture cannot be compared: fresh functions are not recognised.
OPAQUE = {
    "recursion",
    "error_is_suppressed",
    "beside_string_in_dict",
    "in_dataclass",
    "in_dataclass_in_dataclass",
}


def ids(cases):
    return [c.name for c in cases]


# ------------------------------------------------------------------------------------------------
# The set
# ------------------------------------------------------------------------------------------------


def test_the_set_is_right():
    """A test of the test, without loopjit."""
    assert len({c.function for c in CASES}) >= 150 and len({*ids(CASES)}) == len(CASES)
    for c in CASES:
        run, traced = by_hand(c, c.needed)
        shape = jax.eval_shape(run, traced)
        for path in c.needed:
            run, traced = by_hand(c, c.needed - {path})
            with contextlib.suppress(Exception):
                assert jax.eval_shape(run, traced) != shape, (c.name, path)
    for c in HOPELESS:
        numbers = {p for p, leaf in leaves_of(c).items() if not isinstance(leaf, jax.Array)}
        for static in (frozenset(), frozenset(numbers)):
            run, traced = by_hand(c, static)
            with pytest.raises(c.error):
                jax.eval_shape(run, traced)


@pytest.mark.parametrize("c", CASES, ids=ids(CASES))
def test_case(c):
    leaves = leaves_of(c)
    f = loop_jit(c.function)
    with warned() as messages:
        out = f(*c.args, **c.kwargs)
    same_values(out, c.function(*c.args, **c.kwargs))
    left_out = statics_cases.left_out(c)
    assert types_of(out) == types_of(jax.eval_shape(*by_hand(c, c.needed)))
    assert {row.path for row in f.statics} | left_out == set(leaves)
    assert static_paths(f) == c.needed - left_out
    read = {path for path in c.needed if isinstance(leaves[path], jax.Array)}
    assert len(messages) == len(read | c.warns)
    assert all(any(f"`{path}`" in text for text in messages) for path in read | c.warns)

    with costs_nothing(c.function):
        same_values(f(*c.args, **c.kwargs), out)
    if c.name not in OPAQUE:
        with costs_nothing(c.function):
            same_values(loop_jit(again(c.function))(*c.args, **c.kwargs), out)
    for path, leaf in leaves.items():
        if path not in c.needed and type(leaf) in (bool, int, float, complex):
            value = others(leaf)[0]
            if path in left_out:  # to give it is another call; that its value changes is not
                other = statics_cases.with_leaves(c, {path: value})
                f(*other.args, **other.kwargs)
                value = others(value)[0]
            other = statics_cases.with_leaves(c, {path: value})
            with costs_nothing(c.function):
                got = f(*other.args, **other.kwargs)
            same_values(got, c.function(*other.args, **other.kwargs))

    for path in c.needed:
        for value in others(leaves[path]):
            other = statics_cases.with_leaves(c, {path: value})
            try:
                want = c.function(*other.args, **other.kwargs)
            except Exception:
                continue
            g = f if c.name in OPAQUE else loop_jit(again(c.function))
            with warned():
                with runs_of(c.function) as runs:
                    got = g(*other.args, **other.kwargs)
                same_values(got, want)
                same_values(f(*other.args, **other.kwargs), want)
            # Of a value it may depend whether another leaf is needed: that has to be seen again. And a
            # default that is left out has not been needed yet.
            most = len(c.needed) + isinstance(value, bool) + (path in left_out)
            assert 1 <= runs.count <= most
            break
    same_values(f(*c.args, **c.kwargs), out)


def test_exactly_the_needed_leaves_in_few_traces():
    exact, total, seen = 0, 0, {}
    with warned():
        for c in CASES:
            loopjit.cache_clear()
            f = loop_jit(c.function)
            with runs_of(c.function) as runs:
                f(*c.args, **c.kwargs)
            exact += static_paths(f) == c.needed - statics_cases.left_out(c)
            total += runs.count
            seen[c.name] = runs.count
    assert exact >= 0.95 * len(CASES)
    assert total <= 2.5 * len(CASES), sorted(seen.items(), key=lambda item: -item[1])[:20]


@pytest.mark.parametrize("c", HOPELESS, ids=ids(HOPELESS))
def test_hopeless_case(c):
    f = loop_jit(c.function)
    for _ in range(2):
        with pytest.raises(c.error) as failure:
            f(*c.args, **c.kwargs)
        assert isinstance(failure.value, c.error)
        [note] = [text for text in failure.value.__notes__ if "loopjit" in text]
        assert "test_statics" not in note and "jax.lax" in note
    with pytest.raises(c.error) as stock:
        jax.jit(again(c.function))(*c.args, **c.kwargs)
    assert type(failure.value) is type(stock.value)


# ------------------------------------------------------------------------------------------------
# Decisions
# ------------------------------------------------------------------------------------------------


def test_fresh_lambdas_share_the_decision():
    make = lambda: lambda x, n, a: jnp.tile(x, n) * a
    with runs_of(make()) as runs:
        loop_jit(make())(X, 2, 0.5)
    assert 2 <= runs.count <= 3
    for n, traces in ((2, 0), (3, 1), (4, 1), (3, 0)):
        with runs_of(make()) as runs:
            same_values(loop_jit(make())(X, n, 1.5), jnp.tile(X, n) * 1.5)
        assert runs.count == traces
    with costs_nothing(make()):
        loop_jit(make())(X, 4, 7.5)


def test_a_decision_that_depends_on_a_flag():
    def f(x, first, n, m):
        return x[:n] * m if first else x[:m] * n

    g = loop_jit(f)
    for first, n, m in [(True, 2, 3), (False, 2, 3), (True, 2, 3), (True, 4, 5), (False, 1, 2)]:
        same_values(g(X, first, n, m), f(X, first, n, m))
    with costs_nothing(f):
        one, two = g(X, True, 2, 7), g(X, False, 7, 3)
    same_values((one, two), (f(X, True, 2, 7), f(X, False, 7, 3)))
    assert {row.path for row in g.statics if row.static} >= {"first"}


def test_a_leaf_that_is_needed_for_some_values_only():
    def f(x, k, n):
        if k > 2:
            return x[:n]
        return x * n

    g = loop_jit(f)
    for k, n in itertools.product((1, 3, 2, 4), (2, 3)):
        same_values(g(X, k, n), f(X, k, n))
    with costs_nothing(f):
        out = g(X, 1, 9)
    same_values(out, X * 9)


def test_trees_and_types_decide_apart():
    def f(x, cfg):
        if isinstance(cfg, dict):
            return x[: cfg["n"]] * cfg.get("a", 1.0)
        return x * cfg

    g = loop_jit(f)
    calls = [{"n": 2}, 3, {"n": 2, "a": 0.5}, 2.0, {"n": 3}, X]
    for cfg in (*calls, *reversed(calls)):
        same_values(g(X, cfg), f(X, cfg))
    for cfg in (5, 7.5, {"n": 2, "a": 0.25}):
        with costs_nothing(f):
            out = g(X, cfg)
        same_values(out, f(X, cfg))


def test_numbers_arrays_and_none_in_one_place():
    def f(x, n=None):
        return x if n is None else jnp.zeros(n) + x.sum()

    g = loop_jit(f)
    with warned():
        for n in (3, None, np.int64(3), jnp.int32(3), 4, np.array(2), None, jnp.int32(5), 3):
            same_values(g(X, n), f(X, n))
    for n in (3, None, np.int64(3), 4, np.array(2)):
        with costs_nothing(f):
            g(X, n)


def test_another_context():
    def f(x, n, a):
        return jnp.zeros(n) + x.sum() * a

    g = loop_jit(f)
    for _ in range(2):
        assert g(X, 2, 0.5).dtype == jnp.float32
        with jax.enable_x64(True):
            assert g(X, 2, 0.5).dtype == jax.jit(lambda x, a: f(x, 2, a))(X, 0.5).dtype
        with jax.disable_jit():
            same_values(g(X, 2, 0.5), f(X, 2, 0.5))
        with jax.default_matmul_precision("highest"):
            same_values(g(X, 2, 0.5), f(X, 2, 0.5))


def test_errors_of_the_user():
    def index(x, i):
        return [x, x * 2.0][i]

    def refuses(x, n):
        if n > 3:
            raise ValueError(f"too many: {n}")
        return x * n

    g, h = loop_jit(index), loop_jit(refuses)
    for _ in range(2):
        same_values(g(X, 1), X * 2.0)
        with pytest.raises(IndexError):
            g(X, 2)
        with pytest.raises(ValueError, match="too many: 4"):
            h(X, 4)
        same_values(h(X, 3), X * 3.0)


def test_an_error_at_the_first_call():
    def refuses(x, n):
        if n > 3:
            raise ValueError(f"too many: {n}")
        return x * n

    with pytest.raises(ValueError, match="too many: 4"):
        loop_jit(refuses)(X, 4)
    with pytest.raises(KeyError):
        loop_jit(lambda x, n: {1: x}[n])(X, 2)


def test_side_effects_do_not_retrace_each_call():
    log = []

    def f(x, n):
        log.append(n)
        return x[:n]

    g = loop_jit(f)
    g(X, 2)
    g(X, 2)
    before = len(log)
    for _ in range(4):
        same_values(g(X, 2), X[:2])
    assert len(log) == before <= 4


def test_many_threads():
    make = lambda: lambda x, n, k: jnp.tile(x, n) * k if n else x
    counted = []

    def body(x, n, k):
        counted.append(threading.get_ident())
        return jnp.tile(x, n) * k

    f, start = loop_jit(body), threading.Barrier(8)

    def work(i):
        start.wait()
        got = [f(X, n, 0.5 * i) for n in (2, 3, 2)]
        got += [loop_jit(make())(X, n, 0.5 * i) for n in (2, 3, 2)]
        return got, i

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got, i in pool.map(work, range(8)):
            same_values(got, [jnp.tile(X, n) * (0.5 * i) for n in (2, 3, 2)] * 2)
    assert len(counted) <= 24


def test_a_method():
    class Model:
        def __init__(self, w):
            self.w = w

        @loop_jit
        def run(self, x, n=2, *, flag=True):
            return x[:n] * self.w if flag else x

    model = Model(2.0)
    for n, flag in itertools.product((2, 3), (True, False)):
        want = X[:n] * model.w if flag else X
        same_values(model.run(X, n, flag=flag), want)
        same_values(model.run(X, flag=flag, n=n), want)
        same_values(Model.run(model, X, n=n, flag=flag), want)
    model.w = 3.0
    same_values(model.run(X), X[:2] * 3.0)


def test_without_calling():
    f = loop_jit(lambda x, n: x[:n])
    assert f.eval_shape(X, 2).shape == (2,)
    assert f.lower(X, 3).out_info.shape == (3,)
    same_values(f.lower(X, 3).compile()(X), X[:3])
    assert f.trace(X, 4).jaxpr.out_avals[0].shape == (4,)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x, n: jax.vmap(f, in_axes=(0, None))(x, n),
        lambda f: lambda x, n: jax.vmap(lambda row: f(row, n))(x),
        lambda f: lambda x, n: jax.grad(lambda x, n: f(x, n).sum())(x[0], n),
        lambda f: lambda x, n: jax.jacfwd(f)(x[0], n),
        lambda f: lambda x, n: jax.jit(lambda x: f(x[0], n))(x),
        lambda f: lambda x, n: jax.jit(lambda x, n: f(x[0], n), static_argnums=1)(x, n),
        lambda f: lambda x, n: jax.checkpoint(f, static_argnums=1)(x[0], n),
        lambda f: lambda x, n: lax.scan(lambda c, row: (c, f(row, n)), 0, x)[1],
        lambda f: lambda x, n: loop_jit(lambda x, n: f(x[0], n))(x, n),
        lambda f: lambda x, n: loop_jit(lambda x, n: jax.vmap(lambda r: f(r, n))(x))(x, n),
    ],
)
def test_promotion_under_transformations(transform):
    def f(x, n, a=0.5):
        return sum(x**i * a for i in range(n))

    g = transform(loop_jit(f))
    for n in (3, 2, 3):
        same_values(g(M, n), transform(f)(M, n))


def test_a_leaf_that_jax_jit_has_traced():
    f = loop_jit(lambda x, n: jnp.zeros(n) + x.sum())
    with pytest.raises(TypeError, match="concrete") as failure:
        jax.jit(lambda x, n: f(x, n))(X, 2)
    assert "`n`" in "".join(failure.value.__notes__)
    assert f(X, 2).shape == (2,)


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------


def test_numbers_that_compare_equal_differ():
    def f(x, s):
        return jnp.asarray(s), x * s if s else x, jnp.asarray([s] * 2)

    g = loop_jit(f)
    values = [1, True, 1.0, np.int8(1), np.float32(1), np.bool_(True), 0, False, 0.0, 1 + 0j]
    with warned():
        for s in (*values, *reversed(values)):
            got = g(X, s)
            want = jax.jit(lambda x: f(x, s))(X)
            same_values(got, want)
            assert types_of(got) == types_of(want)
            same_values(loop_jit(again(f))(X, s), want)


def test_zeros_of_both_signs():
    def f(x, a):
        return x * math.copysign(1.0, a)

    g = loop_jit(f)
    for a in (0.0, -0.0, 0.0, -0.0):
        same_values(g(X, a), f(X, a))


def test_nan():
    def f(x, a):
        return x * 2.0 if math.isnan(a) else x * math.sqrt(a)

    g = loop_jit(f)
    same_values(g(X, float("nan")), X * 2.0)
    same_values(g(X, 4.0), X * 2.0)
    with costs_nothing(f):
        out = g(X, float("nan"))
    same_values(out, X * 2.0)


@pytest.mark.parametrize(
    "n",
    [2, np.int8(2), np.int32(2), np.float16(2), np.float32(2), np.float64(2), 2.0, np.array(2)],
    ids=lambda n: type(n).__name__ + str(getattr(n, "dtype", "")),
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32"])
def test_dtype_promotion_is_that_of_the_value(n, dtype):
    def f(x, n):
        return x * n, jnp.zeros(int(n)) + x[0]

    x = jnp.ones(3, dtype)
    got, want = loop_jit(f)(x, n), jax.jit(lambda x: f(x, n))(x)
    same_values(got, want)
    assert types_of(got) == types_of(want)


def test_ints_out_of_range():
    def f(x, n):
        return x * (n >> 38) + len(str(abs(n))) if abs(n) < 2**50 else x * (n % 7)

    g = loop_jit(f)
    for n in (2**40, -(2**40), 2**70, 2**39, 2**31, 2**40):
        same_values(g(X, n), f(X, n))
    with costs_nothing(f):
        g(X, 2**40)

    h = loop_jit(lambda x, cfg: x * (cfg["n"] % 7) * cfg["a"])
    for n in (3, 2**40, 5, 2**33, 3):
        same_values(h(X, {"n": n, "a": 0.5}), X * (n % 7) * 0.5)


def test_a_large_int_that_is_traced_raises_as_jax_does():
    f = lambda x, n: x + n
    with pytest.raises(OverflowError):
        jax.jit(f)(X, 2**40)
    with pytest.raises(OverflowError):
        loop_jit(f)(X, 2**40)
    same_values(loop_jit(f)(X, 4), X + 4)


class ByIdentity:
    """Hashable, and equal to nothing else."""

    def __init__(self, k):
        self.k = k


class HashOnly:
    def __init__(self, k):
        self.k = k

    def __hash__(self):
        return 7


class Liar(HashOnly):
    def __eq__(self, other):
        return True

    __hash__ = HashOnly.__hash__


class Unhashable:
    __hash__ = None

    def __init__(self, k):
        self.k = k


@pytest.mark.parametrize("kind", [ByIdentity, HashOnly, Liar, Unhashable])
@pytest.mark.parametrize("options", [{}, {"static_argnames": "s"}], ids=["found", "declared"])
def test_objects_beside_numbers(kind, options):
    def f(x, n, s):
        return x[: n * s.k]

    g = loop_jit(f, **options)
    kept = kind(1)
    for k, n in itertools.product((1, 2, 1), (1, 2, 3)):
        same_values(g(X, n, kind(k)), X[: n * k])
        kept.k = k
        same_values(g(X, n, kept), X[: n * k])


@pytest.mark.parametrize(
    "value",
    [[1, 2], {"a": 1}, {1, 2}, np.array([1, 2]), jnp.array([1, 2]), (1, [2]), bytearray(b"ab")],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("options", [{"static_argnames": "s"}, {"static_argnums": 2}])
def test_unhashable_values_may_be_declared_static(value, options):
    def f(x, n, s):
        items = s if not hasattr(s, "shape") else np.asarray(s).tolist()
        return x[:n] * len(s) + sum(int(k) for k in items if not isinstance(k, (str, list)))

    g = loop_jit(f, **options)
    want = f(X, 2, value)
    with warned():
        same_values(g(X, 2, value), want)
        same_values(g(X, s=value, n=2), want)
        same_values(g(X, n=3, s=value), f(X, 3, value))
    with costs_nothing(f):
        out = g(X, 2, s=value)
    same_values(out, want)


# ------------------------------------------------------------------------------------------------
# Arrays that are read, floats in conditions, and who is told
# ------------------------------------------------------------------------------------------------


def size(x, n):
    return jnp.zeros(n) + x.sum()


def test_one_warning_for_an_array():
    f = loop_jit(size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(X, jnp.int32(3))
    [warning] = caught
    assert issubclass(warning.category, UserWarning) and warning.category is LoopJitWarning
    assert "`n`" in str(warning.message) and warning.filename == __file__
    for n in (3, 4, 5, 3):
        n = jnp.int32(n)
        same_values(f(X, n), size(X, n))  # a warning would be an error
    n = jnp.int32(5)
    with costs_nothing(size):
        f(X, n)


def test_a_warning_for_each_array():
    f = loop_jit(lambda x, shape: jnp.zeros((shape["h"], shape["w"])) + x.sum())
    h, w = jnp.int32(2), jnp.int32(3)
    with warned() as messages:
        assert f(X, {"h": h, "w": w}).shape == (2, 3)
    assert len(messages) == 2
    assert all(sum(f"`shape['{k}']`" in text for text in messages) == 1 for k in "hw")


def test_no_warning_for_values_on_the_host():
    f = loop_jit(size)
    for n in (3, np.int64(3), np.array(3), True):
        f(X, n)


def test_an_array_changes_its_value():
    def f(x, n, flag):
        return x[: int(n)] if flag else -x

    g = loop_jit(f)
    with warned() as messages:
        for n, flag in itertools.product((2, 3, 2), (True, False, True)):
            n, flag = jnp.int32(n), jnp.bool_(flag)
            same_values(g(X, n, flag), f(X, n, flag))
    assert len(messages) == 2


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_transfer_guard_is_respected(level, warm):
    def make():
        return lambda x, n: jnp.zeros(n) + x.sum()

    f, n, x = loop_jit(make()), jnp.int32(3), jnp.ones(2)
    if warm:
        with warned():
            f(x, n)
    with jax.transfer_guard_device_to_host(level):
        for g in (f, loop_jit(make())):
            with pytest.raises(TypeError) as failure:
                g(x, n)
            assert isinstance(failure.value, jax.errors.JAXTypeError) or "JitTracer" in str(
                failure.value
            )
            notes = "".join(failure.value.__notes__)
            assert "`n`" in notes and "loopjit" in notes
        assert f(x, 4).shape == (4,)
    with warned():
        assert f(x, n).shape == (3,)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_small_arrays_may_decide_and_large_ones_may_not(kind):
    f = loop_jit(lambda x, mask: x[mask])
    with warned() as messages:
        small = jnp.arange(64.0)
        same_values(f(small, kind(np.arange(64) > 60)), small[61:])
        same_values(f(small, kind(np.arange(64) > 50)), small[51:])
    assert len(messages) == (kind is jnp.asarray)
    for mask in (np.arange(65) > 60, np.arange(65) > 70):
        with pytest.raises(jax.errors.NonConcreteBooleanIndexError) as failure:
            f(jnp.arange(65.0), kind(mask))
        assert "`mask`" in "".join(failure.value.__notes__)


def test_an_array_that_is_only_used_is_not_read():
    f = loop_jit(lambda x, n: lax.fori_loop(0, n, lambda i, v: v * 0.5, x))
    n = jnp.int32(3)
    with jax.transfer_guard_device_to_host("disallow"):
        out = f(X, n)
    same_values(out, X / 8.0)


def test_strict():
    f = loop_jit(size, strict=True)
    assert f(X, 3).shape == (3,) and f(X, np.array(3)).shape == (3,)
    for _ in range(2):
        with pytest.raises(StrictError, match="`?n`?"):
            f(X, jnp.int32(3))
    assert f(X, 4).shape == (4,)


def test_notes_name_the_leaf_and_what_to_do():
    def f(x, opts):
        return x if opts["w"] > 0 else -x

    for _ in range(2):
        with pytest.raises(jax.errors.TracerBoolConversionError) as failure:
            loop_jit(f)(X, {"w": jnp.float32(1.0), "n": 2})
        notes = "".join(failure.value.__notes__)
        assert "`opts['w']`" in notes and "jax.lax.cond" in notes
        assert "test_statics.py:" in notes and "opts['n']" not in notes


def test_one_warning_for_a_float_in_a_condition():
    def f(x, a, b):
        return x if a > b else -x

    g = loop_jit(f)
    with warned() as messages:
        for a in (0.5, 1.5, 2.5):
            same_values(g(X, a, 1), f(X, a, 1))
    assert len(messages) == 1 and "`a`" in messages[0]


def test_no_warning_for_a_float_that_is_converted():
    f = loop_jit(lambda x, a: x * math.sqrt(a))
    same_values(f(X, 4.0), X * 2.0)


def test_many_values_of_one_leaf():
    def f(x, cfg, a):
        return jnp.zeros(cfg["n"]) + a

    g = loop_jit(f)
    with warned() as messages:
        for n in range(1, 20):
            g(X, {"n": n}, 0.5 * n)
            g(X, {"n": n}, 1.5)
        assert not messages
        for n in range(20, 30):
            g(X, {"n": n}, 0.5)
    assert len(messages) == 1
    assert "`cfg['n']`" in messages[0] and "20" in messages[0]


def test_many_values_in_fresh_functions():
    with warned() as messages:
        for n in range(1, 26):
            loop_jit(lambda x, n: jnp.zeros(n) + x.sum())(X, n)
    assert len(messages) == 1 and "`n`" in messages[0]


# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------


def test_the_table():
    def f(x, cfg, mode, *sizes, flag):
        y = x * cfg["a"]
        for _ in range(cfg["n"]):
            y = y + 1.0
        return jnp.zeros(sizes[1]) + y.sum() + sizes[0] if flag else y

    g = loop_jit(f)
    assert g.statics == () and isinstance(g.statics, tuple) and isinstance(str(g.statics), str)
    g(X, {"a": 0.5, "n": 2}, "mode", 1.0, 3, flag=True)
    rows = {row.path: row for row in g.statics}
    assert set(rows) == {"x", "cfg['a']", "cfg['n']", "mode", "sizes[0]", "sizes[1]", "flag"}
    static = {path for path, row in rows.items() if row.static is True}
    assert static == {"cfg['n']", "mode", "sizes[1]", "flag"}
    assert all(isinstance(row.reason, str) and row.reason for row in rows.values())
    first = f.__code__.co_firstlineno
    assert rows["cfg['n']"].line == f'test_statics.py:{first + 2}: range(cfg["n"])'
    assert rows["sizes[1]"].line == f"test_statics.py:{first + 4}: jnp.zeros(sizes[1])"
    assert rows["flag"].line.startswith(f"test_statics.py:{first + 4}: ")
    assert rows["x"].line is None and rows["mode"].line is None
    text = str(g.statics)
    for path, row in rows.items():
        [line] = [line for line in text.splitlines() if line.startswith(path + " ")]
        assert ("static" in line) == row.static and (row.line or "") in line


def test_the_table_names_the_line_of_a_callee():
    f = loop_jit(lambda x, n: statics_cases.callee(x, n, 2.0))
    f(X, 2)
    [row] = [row for row in f.statics if row.static]
    assert row.path == "n" and row.line.startswith("statics_cases.py:")
    assert row.line.endswith("jnp.zeros(size)")


def test_tables_of_fresh_functions():
    make = lambda: lambda x, n: x[:n]
    assert static_paths(loop_jit(make())) == set()
    f = loop_jit(make())
    f(X, 2)
    g = loop_jit(make())
    g(X, 2)
    assert static_paths(f) == static_paths(g) == {"n"}
    assert [row.line for row in g.statics] == [row.line for row in f.statics]


def test_tables_after_clearing():
    f = loop_jit(lambda x, n: x[:n])
    f(X, 2)
    f.clear_cache()
    same_values(f(X, 3), X[:3])
    assert static_paths(f) == {"n"}
    loopjit.cache_clear()
    same_values(f(X, 2), X[:2])
    assert static_paths(f) == {"n"}


# ------------------------------------------------------------------------------------------------
# Options
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["n", ("n",), ["n"]])
def test_traced_argnames(names):
    def f(x, n, m=1):
        return jnp.zeros(n)[:m] + x.sum()

    g = loop_jit(f, traced_argnames=names)
    with pytest.raises(TypeError) as stock:
        jax.jit(lambda x, n: f(x, n))(X, 2)
    for call in (lambda: g(X, 2), lambda: g(X, n=2, m=1)):
        with pytest.raises(type(stock.value)) as failure:
            call()
        notes = "".join(failure.value.__notes__)
        assert "`n`" in notes and "traced_argnames" in notes


def test_traced_argnames_are_no_burden():
    def f(x, n, m, cfg):
        return lax.fori_loop(0, n, lambda i, v: v * cfg["a"], x)[:m]

    g = loop_jit(f, traced_argnames=("n", "cfg"))
    same_values(g(X, 3, 2, {"a": 0.5}), f(X, 3, 2, {"a": 0.5}))
    assert static_paths(g) == {"m"}
    with costs_nothing(f):
        out = g(X, n=4, m=2, cfg={"a": 1.5})
    same_values(out, f(X, 4, 2, {"a": 1.5}))
    with pytest.raises(jax.errors.JAXTypeError) as failure:
        loop_jit(lambda x, cfg: x * len(range(cfg["n"])), traced_argnames="cfg")(X, {"n": 2})
    assert "`cfg['n']`" in "".join(failure.value.__notes__)


def _zeros(x, n):
    return jnp.zeros(n) + x.sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: loop_jit(traced_argnames="n")(_zeros),
        lambda: pickle.loads(pickle.dumps(loop_jit(_zeros, traced_argnames="n"))),
        lambda: copy.copy(loop_jit(_zeros, traced_argnames="n")),
    ],
    ids=["decorator", "pickled", "copied"],
)
def test_traced_argnames_last(make):
    assert loop_jit(_zeros)(X, 2).shape == (2,)
    with pytest.raises(TypeError) as failure:
        make()(X, 2)
    assert "traced_argnames" in "".join(failure.value.__notes__)


def test_traced_argnames_of_a_method():
    class Model:
        @loop_jit(traced_argnames="n")
        def run(self, x, n, m):
            return x[:m] * n if isinstance(n, jax.core.Tracer) else jnp.zeros(n)

    for n, m in ((3, 2), (4, 2), (4, 3)):
        same_values(Model().run(X, n, m), X[:m] * n)


def test_disabled(tmp_path):
    code = """
        import jax
        from loopjit import loop_jit
        f = loop_jit(lambda x, n, k: x[:n] * k, static_argnames="n", traced_argnames="k")
        assert f(jax.numpy.ones(3), 2, 3).shape == (2,) and f.statics == ()
        try:
            loop_jit(lambda x, n: x[:n])(jax.numpy.ones(3), 2)
        except (TypeError, IndexError):
            print("as jax.jit")
        """
    env = {**os.environ, "LOOPJIT_DISABLE": "1"}
    run = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(run, env=env, capture_output=True, text=True)
    assert out.stdout == "as jax.jit\n", out.stderr


def test_traced_argnames_forbid_static_trip_counts():
    f = lambda x, n: lax.fori_loop(0, n, lambda i, v: v * jnp.cos(v), x)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(loop_jit(f, traced_argnames="n"))(0.5, 3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"static_argnames": "nn"}, "nn"),
        ({"static_argnames": ("n", "other")}, "other"),
        ({"traced_argnames": "nn"}, "nn"),
        ({"traced_argnames": ["x", "other"]}, "other"),
        ({"traced_argnames": "n", "static_argnames": "n"}, "n"),
        ({"traced_argnames": ("x", "n"), "static_argnums": 1}, "n"),
        ({"static_argnames": "n", "donate_argnames": "n"}, "n"),
        ({"static_argnums": 1, "donate_argnums": (0, 1)}, "n"),
        ({"static_argnums": 1, "donate_argnames": "n"}, "n"),
        ({"static_argnums": -1, "donate_argnames": "n"}, "n"),
    ],
)
def test_bad_options(options, named):
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        loop_jit(lambda x, n: x * n, **options)


def test_unknown_names_where_any_name_goes():
    f = loop_jit(lambda x, **rest: x[: rest["n"]], static_argnames="n", traced_argnames="a")
    same_values(f(X, n=2, a=1.0), X[:2])


@pytest.mark.parametrize(
    "options", [{}, {"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": ["n"]}]
)
def test_spellings_of_static_arguments(options):
    def f(x, n=3):
        return x[:n]

    g = loop_jit(f, **options)
    same_values(g(X), X[:3])
    for call in (lambda n: g(X, n), lambda n: g(X, n=n), lambda n: g(n=n, x=X)):
        with costs_nothing(f):
            out = call(3)
        same_values(out, X[:3])
        same_values(call(2), X[:2])
    with costs_nothing(f):
        g(X, n=2)


@pytest.mark.parametrize("options", [{"donate_argnums": 1}, {"donate_argnames": "x"}])
@pytest.mark.parametrize("spell", [lambda g, n, x: g(n, x), lambda g, n, x: g(x=x, n=n)])
def test_spellings_of_donated_arguments(options, spell):
    g = loop_jit(lambda n, x: x * len(range(n)), **options)
    for n in (2, 3, 2):
        x = jnp.arange(4.0)
        same_values(spell(g, n, x), jnp.arange(4.0) * n)
        assert x.is_deleted()


@pytest.mark.parametrize("needed", [False, True])
def test_spellings_with_a_default(needed):
    def traced(x, n=3):
        return x * n

    def static(x, n=3):
        return x[:n]

    f = static if needed else traced
    g = loop_jit(f)
    same_values(g(X), f(X))
    with costs_nothing(f):
        outs = g(X, 3), g(X, n=3), g(n=3, x=X), g(x=X), g(x=X, n=3)
    for out in outs:
        same_values(out, f(X))
    same_values(g(x=X, n=2), f(X, 2))
    with costs_nothing(f):
        outs = g(X, 2), g(X, n=2), g(n=2, x=X)
    for out in outs:
        same_values(out, f(X, 2))
    assert len(g.signatures) == 2


def test_spellings_of_all_kinds_of_parameters():
    def f(x, /, n, *rest, a=0.5, mode="up", **named):
        y = x[:n] if mode == "up" else x[-n:]
        return y * a + sum(rest) + sum(named.values())

    g = loop_jit(f)
    same_values(g(X, 2), f(X, 2))
    with costs_nothing(f):
        g(X, n=2)
        g(X, 2, a=0.5)
        g(X, mode="up", n=2)
    g(X, 2, 3, 4, b=1, c=2)
    with costs_nothing(f):
        one = g(X, 2, 5, 6, b=1, mode="up", c=2)
        two = g(X, 2, 3, 4, b=2, c=1, a=0.5)
    same_values((one, two), (f(X, 2, 5, 6, b=1, c=2), f(X, 2, 3, 4, b=2, c=1)))
    for wrong in (
        lambda f: f(),
        lambda f: f(X),
        lambda f: f(x=X, n=2),
        lambda f: f(X, 2, n=2),
    ):
        with pytest.raises(TypeError) as want:
            wrong(f)
        with pytest.raises(TypeError) as got:
            wrong(g)
        assert str(got.value) == str(want.value)


def test_defaults_that_change():
    def f(x, n=2, *, a=0.5):
        return x[:n] * a

    g = loop_jit(f)
    same_values(g(X), X[:2] * 0.5)
    f.__defaults__ = (3,)
    same_values(g(X), X[:3] * 0.5)
    f.__kwdefaults__ = {"a": 2.0}
    same_values(g(X), X[:3] * 2.0)
    same_values(g(X, 2, a=0.5), X[:2] * 0.5)


def test_defaults_that_are_arrays_or_mutable():
    def f(x, w=jnp.ones(6) * 3.0, sizes=[2], n=np.int64(3)):
        return x[: sizes[0]] * w[: sizes[0]] * n

    g = loop_jit(f)
    for _ in range(2):
        same_values(g(X), f(X))
        same_values(g(X, n=4), f(X, n=4))
        same_values(g(X, X, [3]), f(X, X, [3]))
        f.__defaults__[1][0] += 1


# ------------------------------------------------------------------------------------------------
# Trip counts
# ------------------------------------------------------------------------------------------------


def power(x, n):
    return lax.fori_loop(0, n, lambda i, v: v * jnp.cos(x), jnp.float32(1.0))


def slope(n, x=0.7):
    return -n * math.cos(x) ** (n - 1) * math.sin(x)


ONES = jnp.full(2, 0.7)
GRADIENTS = {
    "grad": lambda: jax.grad(loop_jit(power)),
    "value_and_grad": lambda: lambda x, n: jax.value_and_grad(loop_jit(power))(x, n)[1],
    "jacrev": lambda: jax.jacrev(loop_jit(power)),
    "jacfwd": lambda: jax.jacfwd(loop_jit(power)),
    "vjp": lambda: lambda x, n: jax.vjp(lambda x: loop_jit(power)(x, n), x)[1](1.0)[0],
    "linearize": lambda: lambda x, n: jax.linearize(lambda x: loop_jit(power)(x, n), x)[1](1.0),
    "vmap of grad": lambda: lambda x, n: jax.vmap(jax.grad(loop_jit(power)), (0, None))(ONES, n)[0],
    "grad of vmap": lambda: (
        lambda x, n: jax.grad(lambda xs: jax.vmap(loop_jit(power), (0, None))(xs, n).sum())(ONES)[1]
    ),
    "loop_jit of grad": lambda: loop_jit(jax.grad(power)),
    "loop_jit of value_and_grad": lambda: lambda x, n: loop_jit(jax.value_and_grad(power))(x, n)[1],
    "loop_jit of jacrev": lambda: loop_jit(jax.jacrev(power)),
    "loop_jit of vmap of grad": lambda: (
        lambda x, n: loop_jit(jax.vmap(jax.grad(power), (0, None)))(ONES, n)[0]
    ),
    "loop_jit of a function with grad": lambda: loop_jit(lambda x, n: jax.grad(power)(x, n)),
    "jit, closed over": lambda: lambda x, n: jax.jit(lambda x: jax.grad(loop_jit(power))(x, n))(x),
    "jit, static": lambda: jax.jit(jax.grad(loop_jit(power)), static_argnums=1),
    "jit, static by name": lambda: (
        lambda x, n: jax.jit(jax.grad(loop_jit(power)), static_argnames="n")(x, n=n)
    ),
    "nested": lambda: loop_jit(lambda x, n: jax.grad(loop_jit(power))(x, n)),
    "nested below": lambda: jax.grad(loop_jit(lambda x, n: loop_jit(power)(x, n))),
    "in a checkpoint": lambda: (
        lambda x, n: jax.grad(jax.checkpoint(lambda x: loop_jit(power)(x, n)))(x)
    ),
    "by name": lambda: lambda x, n: jax.grad(loop_jit(power))(x, n=n),
    "in a scan": lambda: (
        lambda x, n: jax.grad(
            lambda x: lax.scan(lambda c, _: (c, loop_jit(power)(x, n)), 0, None, length=2)[1].mean()
        )(x)
    ),
    "in a dict": lambda: (
        lambda x, n: jax.grad(loop_jit(lambda x, c: power(x, c["n"])))(x, {"n": n, "a": 0.5})
    ),
    "derived": lambda: lambda x, n: jax.grad(loop_jit(lambda x, n: power(x, 2 * n - n)))(x, n),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_trip_counts(name):
    g = GRADIENTS[name]()
    for n in (3, 5, 3):
        np.testing.assert_allclose(np.asarray(g(0.7, n)), slope(n), rtol=1e-4)
        np.testing.assert_allclose(np.asarray(loop_jit(power)(0.7, n)), math.cos(0.7) ** n, 1e-4)


@pytest.mark.parametrize(
    "make", [lambda: jax.grad(loop_jit(power)), lambda: loop_jit(jax.grad(power))]
)
def test_gradients_again_cost_nothing(make):
    g = make()
    g(0.7, 3)
    g(0.7, 3)
    with counting() as n:
        g(0.9, 3)
        make()(0.8, 3)
    assert (n.compiles, n.traces) == (0, 0)


def test_one_program_for_all_trip_counts():
    f = loop_jit(power)
    f(0.7, 3)
    with costs_nothing(power):
        for n in range(8):
            np.testing.assert_allclose(f(0.7, n), math.cos(0.7) ** n, rtol=1e-4)
    assert static_paths(f) == set()
    assert len(f.signatures) == 1
    jax.grad(f)(0.7, 3)
    with costs_nothing(power):
        f(0.7, 9)


def test_forward_mode_leaves_trip_counts_traced():
    f = loop_jit(jax.jacfwd(power))
    f(0.7, 3)
    with counting() as n:
        np.testing.assert_allclose(f(0.7, 5), slope(5), rtol=1e-4)
    assert (n.compiles, n.traces) == (0, 0)


def test_an_int_that_bounds_no_loop_stays_traced_under_a_gradient():
    def f(x, n):
        return jnp.sin(x) * n

    g = jax.grad(loop_jit(f))
    g(0.7, 2)
    with runs_of(f) as runs, counting() as n:
        np.testing.assert_allclose(g(0.7, 5), math.cos(0.7) * 5, rtol=1e-5)
    assert (runs.count, n.compiles) == (0, 0)


def test_a_trip_count_that_jax_jit_has_traced():
    # JAX raises it when our call is over; where it is not, it comes with a note.
    with pytest.raises(ValueError, match="Reverse-mode differentiation"):
        jax.jit(jax.grad(loop_jit(power)))(0.7, 3)
    with pytest.raises(ValueError, match="Reverse-mode differentiation") as failure:
        jax.jit(lambda x, n: loop_jit(jax.grad(power))(x, n))(0.7, 3)
    assert "trip count" in "".join(failure.value.__notes__)


def newton(a):
    return lax.while_loop(
        lambda s: (jnp.abs(s[0] * s[0] - a) > 1e-3) & (s[1] < 40),
        lambda s: (0.5 * (s[0] + a / s[0]), s[1] + 1),
        (a, 0),
    )[0]


def test_while_loops_cannot_be_differentiated():
    for g in (jax.grad(loop_jit(newton)), loop_jit(jax.grad(newton))):
        for _ in range(2):
            with pytest.raises(ValueError, match="Reverse-mode differentiation") as failure:
                g(2.0)
    notes = "".join(failure.value.__notes__)
    assert "loopjit" in notes and "while_loop" in notes
    np.testing.assert_allclose(loop_jit(newton)(2.0), math.sqrt(2.0), rtol=1e-3)
    np.testing.assert_allclose(jax.jacfwd(loop_jit(newton))(2.0), 0.5 / math.sqrt(2.0), rtol=1e-2)


def test_arrays_of_a_size_that_is_a_trip_count():
    def history(x, n):
        buffer = jnp.zeros(n + 1).at[0].set(x)
        return lax.fori_loop(0, n, lambda i, h: h.at[i + 1].set(h[i] * 0.5), buffer)

    f = loop_jit(history)
    for n in (4, 2, 4):
        same_values(f(1.0, n), 0.5 ** np.arange(n + 1.0))
        same_values(jax.grad(lambda x: f(x, n).sum())(1.0), 2.0 - 0.5**n)


# ------------------------------------------------------------------------------------------------
# Weak types
# ------------------------------------------------------------------------------------------------

STEPS = {
    "weak stays weak": lambda s, x: s * 2.0,
    "becomes strong": lambda s, x: s + x.sum(),
    "loop": lambda s, x: lax.fori_loop(0, 3, lambda i, v: v * 0.5 + x[0], s),
    "tree": lambda s, x: jax.tree.map(lambda v: v + x[0], s),
    "constant": lambda s, x: x,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_fed_its_own_output(name):
    def make():
        step = STEPS[name]
        return lambda s, x: step(s, x)

    start = {"a": 1.0, "b": [2.0]} if name == "tree" else 1.0
    f, g = loop_jit(make()), jax.jit(make())
    s, t = start, start
    for k in range(4):
        with counting() as n:
            s = f(s, X)
        assert n.compiles == (k == 0 or (name == "constant" and k == 1))
        t = g(t, X)
        same_values(s, t)
        assert types_of(s) == types_of(t)
    assert n.traces == 0


@pytest.mark.parametrize("start", [1, 1.0, True, 1j, np.float32(1), jnp.asarray(1), jnp.float32(1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int32"])
@pytest.mark.parametrize("twice", [lambda s, x: (s * 2, s * x), lambda s, x: (s, x + 1)])
def test_weak_types_are_those_of_jax_jit(start, dtype, twice):
    def make():
        return lambda s, x: twice(s, x)

    x = jnp.ones(2, dtype)
    f, g = loop_jit(make()), jax.jit(make())
    strong = jnp.asarray(np.asarray(jnp.asarray(start)))
    for s in (start, strong, jnp.asarray(start), start):
        got, want = f(s, x), g(s, x)
        same_values(got, want)
        assert types_of(got) == types_of(want)
        fresh = loop_jit(make())(s, x)
        assert types_of(fresh) == types_of(want)
    s, t = start, start
    for _ in range(3):
        s, t = f(s, x)[0], g(t, x)[0]
        assert types_of(s) == types_of(t)


# ------------------------------------------------------------------------------------------------
# Nested
# ------------------------------------------------------------------------------------------------


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Flags(enum.IntFlag):
    UP = 1
    DOWN = 2


def test_members_of_an_int_enum_are_numbers():
    f = loop_jit(lambda x, n: x[:n])
    for n in (Size.SMALL, Size.LARGE, 1):
        same_values(f(X, n), X[: int(n)])
    g = loop_jit(lambda x, m: x if m == Size.LARGE else -x)
    h = loop_jit(lambda x, m: x if m & Flags.UP else -x)
    for _ in range(2):
        same_values(g(X, Size.LARGE), X)
        same_values(g(X, Size.SMALL), -X)
        same_values(h(X, Flags.UP | Flags.DOWN), X)
        same_values(h(X, Flags.DOWN), -X)
    k = loop_jit(lambda x, n: x * n)
    same_values(k(X, Size.LARGE), X * 2)
    assert static_paths(g) == {"m"} and static_paths(k) == set()


def test_shardings_of_arguments_that_become_static():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = lambda x, n, m=2: x * len(range(n)) * m
    for shardings in (here, (here, None), (here, here)):
        same_values(loop_jit(f, in_shardings=shardings)(X, 3), X * 6)
    same_values(loop_jit(f, in_shardings=(here, None, None))(X, 3, 2), X * 6)
    same_values(loop_jit(f, out_shardings=here)(X, m=3, n=3), X * 9)


def test_a_static_array_beside_captured_ones():
    """The arrays that a static function captures become inputs; one that is static itself does not."""

    def make(scale):
        return lambda y: y * scale

    f = lambda x, n, fun: fun(x[:n]) + n
    g = lambda x, options: options["fun"](x[: options["n"]]) + options["n"]
    for _ in range(2):
        for n, scale in ((2, 5.0), (3, 5.0), (2, 7.0)):
            n, fun = jnp.int32(n), make(jnp.float32(scale))
            with warned():
                same_values(loop_jit(f)(X, n, fun), f(X, n, fun))
                same_values(loop_jit(g)(X, {"fun": fun, "n": n}), g(X, {"fun": fun, "n": n}))
    n, fun = jnp.int32(2), make(jnp.float32(9.0))
    with counting() as counts:
        outs = loop_jit(f)(X, n, fun), loop_jit(g)(X, {"fun": fun, "n": n})
    assert (counts.compiles, counts.traces) == (0, 0)  # the array of a function is an input still
    for out in outs:
        same_values(out, X[:2] * 9.0 + 2)


def test_an_array_keeps_the_rules_of_jax_where_its_own_value_is_enough():
    def f(x, n):
        scale = n * 1.5  # weak in JAX, a float64 in NumPy
        for _ in range(n):
            x = x * scale
        return x

    x = jnp.ones(2, jnp.bfloat16)
    with warned():
        out = loop_jit(f)(x, jnp.int32(2))
    same_values(out, f(x, jnp.int32(2)))
    assert out.dtype == jnp.bfloat16


def test_a_static_array_may_be_deleted_later():
    f = loop_jit(lambda x, n: x[:n] * n)
    n = jnp.int32(2)
    with warned():
        f(X, n)
        n.delete()
        same_values(f(X, jnp.int32(2)), X[:2] * 2)


def test_once_static_and_once_traced():
    def either(x, m):
        if jnp.issubdtype(m.dtype, jnp.integer) and m[0] > 0:
            return x * 2.0
        return x + m.sum()

    def choose(x, options):
        return x * options["w"] if "w" in options else x[: options["n"]]

    f, g = loop_jit(either), loop_jit(choose)
    whole, real = jnp.array([1, 2]), jnp.array([1.0, 2.0])
    with warned():
        for _ in range(3):
            f(X, whole), f(X, real), g(X, {"w": 2.0}), g(X, {"n": 2})
    with counting() as n:
        for _ in range(3):
            outs = f(X, whole), f(X, real), g(X, {"w": 2.0}), g(X, {"n": 2})
    assert (n.compiles, n.traces) == (0, 0)
    wants = either(X, whole), either(X, real), X * 2.0, X[:2]
    for out, want in zip(outs, wants, strict=True):
        same_values(out, want)


def test_an_argument_that_is_called_self():
    same_values(loop_jit(lambda x, *, self: x[:self])(X, self=2), X[:2])
    same_values(loop_jit(lambda self, n: self[:n])(n=2, self=X), X[:2])
    assert loop_jit(lambda **named: named["self"] * 2.0).eval_shape(self=X).shape == X.shape


@pytest.mark.parametrize("n", [True, Size.LARGE, np.int8(2), np.bool_(True), jnp.int32(2)])
def test_trip_counts_of_other_kinds(n):
    f = lambda x, n: lax.fori_loop(0, n + 1, lambda i, y: y * x, x)
    g = loop_jit(f)
    with warned():
        for _ in range(2):
            assert float(jax.grad(g)(2.0, n)) == float(jax.grad(f)(2.0, n))


def test_a_trip_count_and_a_captured_tracer():
    def loss(w, n):
        return loop_jit(lambda x, n: lax.fori_loop(0, n, lambda i, y: y * w, x))(1.5, n)

    for n in (3, np.int32(3), jnp.int32(3)):
        with warned():
            assert float(loss(jnp.float32(2.0), n)) == 12.0
            assert float(jax.grad(loss)(jnp.float32(2.0), n)) == 18.0


def test_a_keyword_that_was_left_out_as_the_default():
    f = loop_jit(lambda x, *, k=5: x * k)
    g = loop_jit(lambda x, a, b=2, *, k=5: x * a + b * 10.0 + k * 100.0)
    for k in (5, 5, 6, 6, 7, 5):
        same_values(f(X, k=k), X * k)
        for b in (2, 3):
            same_values(g(X, b=b, a=2, k=k), X * 2 + b * 10.0 + k * 100.0)


class Counter:
    def __init__(self):
        self.calls, self.scale = 0, 0.5

    @loop_jit
    def run(self, x, n):
        self.calls += 1
        return x[:n] * self.scale


def test_a_function_that_writes_to_a_static_argument():
    counter = Counter()
    for n in (2, 2, 3):
        same_values(counter.run(X, n), X[:n] * 0.5)


class Mute:
    def __init__(self, value):
        self.value = value

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def test_a_program_runs_once_whatever_its_arguments_are():
    ran = []

    @loop_jit
    def f(x, s):
        jax.debug.callback(lambda v: ran.append(float(v)), x)
        return x * s.value

    for number in (1.0, 2.0, 3.0):
        f(number, Mute(2.0))
    jax.effects_barrier()
    assert ran == [1.0, 2.0, 3.0]


def test_constants_that_no_traced_int_can_meet():
    cases = (
        lambda x, n: x + (1.0 if n > 2**35 else 0.0),
        lambda x, n: x * ((n & (2**40 - 1)) % 7),
        lambda x, n: jax.random.uniform(jax.random.key(n % 2**32)) * x,
    )
    for f in cases:
        same_values(loop_jit(f)(X, 5), f(X, 5))


def test_signed_zeros_are_not_the_default():
    f = loop_jit(lambda x, k=0.0, *, m=0.0: jnp.stack([x * k, x * m]))
    for _ in range(2):
        for k, m in ((0.0, 0.0), (-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0)):
            signs = np.signbit(f(jnp.float32(1.0), k, m=m))
            assert list(signs) == [np.signbit(k), np.signbit(m)]


def test_several_static_values_by_type():
    """Warm, so that the shortest way is taken: equal values of other types are other programs."""

    def f(x, flag, n):
        return (x if flag else -x) * len([0] * n), flag, n

    g = loop_jit(f)
    for _ in range(3):
        for flag, n in ((1, 1), (True, 1), (1, True), (True, True), (False, 0), (0, 0)):
            for _ in range(2):
                got, want = g(X, flag, n), jax.jit(lambda x, flag=flag, n=n: f(x, flag, n))(X)
                assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
                same_values(got, want)


def test_many_flags():
    def f(x, *flags):
        for flag in flags:
            x = x + 1.0 if flag else x
        return x

    same_values(loop_jit(f)(X, *[1] * 120), X + 120.0)


def test_plain_values_stay_plain_inside_beside_arrays():
    inner = loop_jit(lambda x, n: (x * n, n + 1))

    def outer(x, n):
        y, m = inner(x, n)
        return y.sum() + jnp.zeros(m)

    g = loop_jit(outer)
    same_values(g(X, 3), (X * 3).sum() + jnp.zeros(4))
    same_values(g(X, 2), (X * 2).sum() + jnp.zeros(3))
    assert static_paths(g) == {"n"}


def test_a_traced_trip_count_does_not_spoil_a_static_one():
    f = loop_jit(lambda x, n: lax.fori_loop(0, n, lambda i, y: y * x, 1.0))
    for _ in range(2):
        with pytest.raises(ValueError, match="Reverse-mode") as failure:
            jax.jit(jax.grad(f))(2.0, 3)
        assert any("outer jax.jit" in note for note in failure.value.__notes__)
        assert jax.grad(f)(2.0, 3) == 12.0


def test_plain_values_stay_plain_inside():
    @loop_jit
    def padded(n):
        return n + 1

    @loop_jit
    def both(n, a):
        return {"n": n * 2, "a": a / 2, "big": n > 3}

    seen = []

    def total(x, k):
        m = padded(k)
        rest = both(m, 0.5)
        seen.append((m, rest))
        return jnp.zeros(rest["n"]) + x[: padded(2)].sum() * rest["a"] + m

    f = loop_jit(total)
    for k in (5, 5, 3, 5):
        same_values(f(X, k), np.full(2 * k + 2, float(X[:3].sum()) * 0.25 + k + 1, np.float32))
    m, rest = seen[-1]
    assert type(m) is int and {type(v) for v in rest.values()} == {int, float, bool}
    assert float(jax.jit(lambda x: x * (type(padded(3)) is int))(1.0)) == 1.0


def test_outside_of_traces_results_are_arrays():
    padded = loop_jit(lambda n: n + 1)
    out = padded(3)
    assert isinstance(out, jax.Array) and out.weak_type and int(out) == 4


def test_nested_functions_decide_alike():
    inner = loop_jit(lambda x, n, a: x[:n] * a)

    def outer(x, n, a):
        return inner(x, n + 1, a)

    f = loop_jit(outer)
    for n in (2, 3, 2):
        same_values(f(X, n, 0.5), X[: n + 1] * 0.5)
    with costs_nothing(outer):
        out = f(X, 3, 1.5)
    same_values(out, X[:4] * 1.5)
    assert static_paths(f) == {"n"}
