"""Functions that need the values of some of their arguments, and which these are.

``CASES`` are solved by making exactly the leaves ``needed`` static; ``HOPELESS`` are not solved by any: an
array decides, or something else than the call (an inner ``jax.jit``, a loop) traces the leaf.
What a case says is checked against JAX without loopjit (``test_statics.py``). A *path* is what the user
calls a leaf: ``n``, ``cfg['n']``, ``sizes[1]`` (of ``*sizes``), ``opts.size``.
"""

from __future__ import annotations

import cmath
import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

X = jnp.asarray(np.array([0.5, -1.0, 2.0, 1.5, -0.25, 3.0], np.float32))
M = jnp.asarray(np.arange(12, dtype=np.float32).reshape(3, 4))
KEY = jax.random.key(7)
MASK = np.array([True, False, True, True, False, False])


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
      name: of the function.
      function: what is called.
      args: positional arguments; kwargs: the others.
      needed: paths of the leaves that are static in the end; also those that JAX cannot trace.
      warns: paths of floats (and complex numbers) that decide a condition: the user is warned.
      error: of JAX, where nothing helps.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needed: frozenset[str]
    warns: frozenset[str] = frozenset()
    error: type[Exception] | None = None


CASES: list[Case] = []
HOPELESS: list[Case] = []


def case(*args: Any, needs: str = "", warns: str = "", **kwargs: Any) -> Callable[[Any], Any]:
    """Adds a call of the decorated function; ``needs`` and ``warns`` are paths with spaces between."""

    def add(f: Any) -> Any:
        count = sum(c.function is f for c in CASES)
        name = f"{f.__name__}_{count + 1}" if count else f.__name__
        paths = frozenset(needs.split()), frozenset(warns.split())
        CASES.append(Case(name, f, args, kwargs, *paths))
        return f

    return add


def hopeless(error: type[Exception], *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Adds a call of the decorated function that no static leaf can help."""

    def add(f: Any) -> Any:
        HOPELESS.append(Case(f.__name__, f, args, kwargs, frozenset(), error=error))
        return f

    return add


# ------------------------------------------------------------------------------------------------
# The leaves of a call, and calls with some of them fixed: what a user of jax.jit writes by hand
# ------------------------------------------------------------------------------------------------


def leaves_of(c: Case) -> dict[str, Any]:
    """The leaves by their paths, defaults included."""
    bound = inspect.signature(c.function).bind(*c.args, **c.kwargs)
    bound.apply_defaults()
    found = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            parts = [(f"{name}[{i}]", v) for i, v in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            parts = list(value.items())
        else:
            parts = [(name, value)]
        for start, part in parts:
            for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
                found[start + jax.tree_util.keystr(path)] = leaf
    return found


def left_out(c: Case) -> set[str]:
    """The arguments that a call leaves at their defaults."""
    bound = inspect.signature(c.function).bind(*c.args, **c.kwargs)
    empty = inspect.Parameter.empty
    parameters = bound.signature.parameters.values()
    return {p.name for p in parameters if p.default is not empty and p.name not in bound.arguments}


def with_leaves(c: Case, new: dict[str, Any]) -> Case:
    """The call with other leaves in some places, spelled alike (defaults that change by name)."""
    bound = inspect.signature(c.function).bind(*c.args, **c.kwargs)
    given = set(bound.arguments)
    bound.apply_defaults()
    parameters = bound.signature.parameters

    def replaced(start: str, value: Any) -> Any:
        pairs, tree = jax.tree_util.tree_flatten_with_path(value)
        leaves = [new.get(start + jax.tree_util.keystr(path), leaf) for path, leaf in pairs]
        return jax.tree_util.tree_unflatten(tree, leaves)

    kwargs = {}
    values = dict(bound.arguments)
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values[name] = tuple([replaced(f"{name}[{i}]", v) for i, v in enumerate(value)])
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values[name] = {k: replaced(k, v) for k, v in value.items()}
        else:
            values[name] = replaced(name, value)
            if name not in given and name in new:
                kwargs[name] = values[name]
    for name in given:
        bound.arguments[name] = values[name]
    for name in set(bound.arguments) - given:
        del bound.arguments[name]
    return dataclasses.replace(c, args=bound.args, kwargs={**bound.kwargs, **kwargs})


def fixed(value: Any) -> Any:
    """What a user passes who makes a leaf static by hand: a value on the host."""
    if not isinstance(value, jax.Array):
        return value
    host = np.asarray(value)
    return host.item() if value.weak_type else host


def by_hand(c: Case, static: frozenset[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of the traced leaves only, as a dict; the others are fixed."""
    leaves = leaves_of(c)
    values = {path: fixed(leaf) for path, leaf in leaves.items() if path in static}

    def run(traced: dict[str, Any]) -> Any:
        call = with_leaves(c, {**values, **traced})
        return call.function(*call.args, **call.kwargs)

    return run, {path: leaf for path, leaf in leaves.items() if path not in static}


def same_values(got: Any, want: Any) -> None:
    """The same tree, shapes and values; dtypes are another matter."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


def types_of(out: Any) -> list[tuple[Any, bool]]:
    """Dtype and weak type of each result."""
    return [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(out)]


# ------------------------------------------------------------------------------------------------
# Shapes and sizes
# ------------------------------------------------------------------------------------------------


@case(X, 3, needs="n")
def zeros(x, n):
    return jnp.zeros(n) + x.sum()


@case(2, 3, 1.5, needs="n m")
def full(n, m, value):
    return jnp.full((n, m), value)


@case(X, 3, needs="n")
def arange(x, n):
    return jnp.arange(n) * x[0]


@case(0.25, needs="step")
def arange_step(step):
    return jnp.arange(0.0, 1.0, step)


@case(0.0, 2.0, 5, needs="n")
def linspace(start, stop, n):
    return jnp.linspace(start, stop, n)


@case(X, 3, needs="n")
def eye(x, n):
    return jnp.eye(n) * x.sum()


@case(X, 3, needs="n")
def tile(x, n):
    return jnp.tile(x, n)


@case(X, 3, needs="n")
def repeat(x, n):
    return jnp.repeat(x, n)


@case(X, 3, needs="n")
def split(x, n):
    return jnp.split(x, n)[1]


@case(X, 3, needs="n")
def one_hot(x, n):
    return jax.nn.one_hot(jnp.int32(x), n)


@case(X, 3, needs="k")
def top_k(x, k):
    return lax.top_k(x, k)[0]


@case(X, 2, 1.0, needs="width")
def pad(x, width, value):
    return jnp.pad(x, width, constant_values=value)


@case(M, 1, 0, needs="axis")
def roll_axis(x, shift, axis):
    return jnp.roll(x, shift, axis=axis)


@case(X, 3, needs="n")
def reshape(x, n):
    return x.reshape(n, -1)


@case(X, 3, needs="n")
def reshape_by_int(x, n):
    return x.reshape(int(n), -1)


@case(X, 2, needs="n")
def slice_stop(x, n):
    return x[:n]


@case(X, 1, 2, needs="start step")
def slice_start_and_step(x, start, step):
    return x[start::step]


@case(X, 2, 3, needs="size")
def dynamic_slice_size(x, start, size):
    return lax.dynamic_slice_in_dim(x, start, size)


@case(M, 1, needs="axis")
def sum_axis(x, axis):
    return x.sum(axis=axis)


@case(M, 0, True, needs="axis keep")
def mean_keepdims(x, axis, keep):
    return jnp.mean(x, axis=axis, keepdims=keep)


@case(M, 1, needs="axis")
def concatenate_axis(x, axis):
    return jnp.concatenate([x, x + 1.0], axis)


@case(M, 0, 1, needs="a b")
def swap_axes(x, a, b):
    return jnp.swapaxes(x, a, b)


@case(M, 0, True, needs="axis down")
def sort_axis(x, axis, down):
    return jnp.sort(x, axis=axis, descending=down)


@case(M, 1, needs="axis")
def softmax_axis(x, axis):
    return jax.nn.softmax(x, axis=axis)


@case(M, 1, 2, needs="axis")
def take_axis(x, axis, index):
    return jnp.take(x, index, axis=axis)


@case(X, 4, needs="n")
def broadcast(x, n):
    return jnp.broadcast_to(x, (n, x.shape[0]))


@case(X, 4, needs="n")
def nonzero_size(x, n):
    return jnp.nonzero(x > 0, size=n)[0]


@case(X, 4, 10.0, needs="length")
def bincount(x, length, scale):
    return jnp.bincount(jnp.int32(jnp.abs(x)), length=length) * scale


@case(X, 5, needs="n")
def segments(x, n):
    return jax.ops.segment_sum(x, jnp.int32(jnp.abs(x)), num_segments=n)


@case(M, 1, needs="k")
def triangle(x, k):
    return jnp.tril(x, k)


@case(X, 2, needs="n")
def differences(x, n):
    return jnp.diff(x, n)


@case(X, 2, needs="decimals")
def rounded_array(x, decimals):
    return jnp.round(x * 1.2345, decimals)


@case(X, 4, needs="n")
def fourier(x, n):
    return jnp.abs(jnp.fft.rfft(x, n))


@case(M, 3, needs="power")
def matrix_power(x, power):
    return jnp.linalg.matrix_power(x[:, :3] * 0.1, power)


@case(M, 2, 5, needs="h w")
def resize(x, h, w):
    return jax.image.resize(x, (h, w), "linear")


@case(X, 3, needs="n")
def scan_length(x, n):
    return lax.scan(lambda c, _: (c * 1.5, c.sum()), x, None, length=n)


@case(X, 2, 0.5, needs="unroll")
def scan_unroll(x, unroll, rate):
    return lax.scan(lambda c, v: (c * rate + v, c), jnp.float32(0), x, unroll=unroll)


@case(X, True, needs="reverse")
def scan_reverse(x, reverse):
    return lax.scan(lambda c, v: (c * 0.5 + v, c), jnp.float32(0), x, reverse=reverse)


@case(KEY, 3, 2.0, needs="n")
def random_shape(key, n, scale):
    return jax.random.normal(key, (n,)) * scale


@case(KEY, 2, 0, 10, needs="n")
def random_ints(key, n, low, high):
    return jax.random.randint(key, (n, 3), low, high)


@case(X, 2, needs="k")
def window(x, k):
    return jnp.convolve(x, jnp.ones(k) / k, mode="valid")


# ------------------------------------------------------------------------------------------------
# Conditions
# ------------------------------------------------------------------------------------------------


@case(X, True, needs="flag")
def if_flag(x, flag):
    if flag:
        return x * 2.0
    return -x


@case(X, 3, needs="n")
def if_comparison(x, n):
    if n > 2:
        return x * n
    return -x


@case(X, 1.5, needs="a", warns="a")
def if_float(x, a):
    if a > 1.0:
        return x * a
    return -x


@case(X, 4, needs="n")
def while_count(x, n):
    while n > 0:
        x, n = x + n, n - 1
    return x


@case(X, 100.0, needs="tolerance", warns="tolerance")
def while_float(x, tolerance):
    while tolerance > 1.0:
        x, tolerance = x * 1.5, tolerance / 4.0
    return x


@case(X, False, True, needs="a")
def and_stops(x, a, b):
    return x if a and b else -x


@case(X, True, False, needs="a b")
def and_goes_on(x, a, b):
    return x if a and b else -x


@case(X, True, False, needs="a")
def or_stops(x, a, b):
    return x if a or b else -x


@case(X, 0, needs="n")
def or_default(x, n):
    return x * (n or 3)


@case(X, False, needs="flag")
def negation(x, flag):
    return x if not flag else -x


@case(X, 3, 0.5, needs="n")
def ternary(x, n, rate):
    return x * (rate if n % 2 else 1.0)


@case(X, 1, 2, needs="low n")
def chained(x, low, n):
    return x * 2.0 if low < n < 4 else x


@case(X, 2, needs="n")
def asserts(x, n):
    assert n > 1
    return x / n


@case(X, 3, needs="n")
def matches(x, n):
    match n:
        case 1:
            return x
        case 3:
            return x * 3.0
        case _:
            return -x


@case(X, 3, needs="n")
def is_in_tuple(x, n):
    return x * 2.0 if n in (1, 3) else x


@case(X, 3, needs="n")
def is_in_set(x, n):
    return x * 2.0 if n in {1, 3} else x


@case(X, 2, 5, needs="n m")
def greatest(x, n, m):
    return x[: max(n, m)]


@case(X, 3, 1, 2, needs="a b c")
def in_order(x, a, b, c):
    return jnp.stack([x * k for k in sorted([a, b, c])])


@case(X, 3, needs="n")
def any_of(x, n):
    return x if any(k == n for k in (1, 2, 3)) else -x


@case(X, True, 2, 3, needs="flag n")
def flag_decides_first(x, flag, n, m):
    if flag:
        return x[:n] * m
    return x[:m] * n


@case(X, False, 2, 3, needs="flag m")
def flag_decides_second(x, flag, n, m):
    if flag:
        return x[:n] * m
    return x[:m] * n


@case(X, 1j, needs="c", warns="c")
def if_complex(x, c):
    return x * 2.0 if c == 1j else x


# ------------------------------------------------------------------------------------------------
# Python: loops, containers, conversions
# ------------------------------------------------------------------------------------------------


@case(X, 3, needs="n")
def range_loop(x, n):
    for i in range(n):
        x = x * 1.5 + i
    return x


@case(X, 1, 6, 2, needs="start stop step")
def range_of_three(x, start, stop, step):
    for i in range(start, stop, step):
        x = x + i
    return x


@case(X, 2, needs="n")
def derived(x, n):
    m = n * 2 + 1
    for _ in range(m):
        x = x + 1.0
    return x + n


@case(X, 3, 2, 0.5, needs="n m")
def two_at_one_place(x, n, m, rate):
    for _ in range(n + m):
        x = x * rate
    return x


@case(X, 3, 2, needs="n m")
def two_at_two_places(x, n, m):
    for _ in range(n):
        x = x + 1.0
    return x if m > 1 else -x


@case(X, 2, needs="i")
def list_index(x, i):
    return [x, x + 1.0, x * 2.0][i]


@case(X, 1, 3, needs="i j")
def tuple_slice(x, i, j):
    return sum((x, x * 2.0, x * 3.0, x * 4.0)[i:j])


@case(X, 3, needs="n")
def dict_lookup(x, n):
    return {3: x, 4: -x}[n]


@case(X, 1, needs="i")
def string_index(x, i):
    return {"a": x, "b": -x}["ab"[i]]


@case(X, 2, needs="n")
def repeated_list(x, n):
    return jnp.stack([x] * n)


@case(X, 2, needs="n")
def comprehension(x, n):
    return jnp.stack([x * i for i in range(4) if i < n])


@case(X, 3, needs="n")
def generator(x, n):
    return sum(x * i for i in range(n))


@case(X, 3, needs="n")
def reduced(x, n):
    return functools.reduce(lambda a, b: a + b, [x] * int(n))


@case(X, 2, needs="n")
def first_of_many(x, n):
    return sum(itertools.islice([x, x * 2.0, x * 3.0], n))


@case(X, 2, needs="n")
def last_of_many(x, n):
    return sum(collections.deque([x, x * 2.0, x * 3.0], maxlen=n))


@case(X, 5, needs="start")
def counted_from(x, start):
    return sum(v * i for i, v in enumerate([x, x], start))


@case(X, 4, needs="n")
def recursion(x, n):
    return x if n == 0 else x + recursion(x * 0.5, n - 1)


@case(X, 2.0, needs="a")
def to_int(x, a):
    return x[: int(a)]


@case(X, 2, needs="n")
def to_float(x, n):
    return x * float(n)


@case(X, 1, needs="n")
def to_bool(x, n):
    return x * bool(n)


@case(X, 2.0, needs="a")
def to_complex(x, a):
    return jnp.abs(x * complex(a, 1.0))


@case(X, 2.6, needs="a")
def rounded(x, a):
    return x[: round(a)] if isinstance(round(a), int) else x[: int(round(a))]


@case(X, 2, needs="n")
def as_index(x, n):
    return x[: operator.index(n)]


@case(X, 2.0, needs="a")
def square_root(x, a):
    return x * math.sqrt(a)


@case(X, 5, 2, 3.0, needs="n k")
def binomial(x, n, k, scale):
    return x * math.comb(n, k) * scale


@case(X, 2.5, needs="a")
def floor(x, a):
    return x[: math.floor(a)]


@case(X, 1 + 1j, needs="c")
def complex_phase(x, c):
    return x * cmath.phase(c)


@case(X, 2.0, needs="a")
def numpy_function(x, a):
    return x * np.sin(a)


@case(X, 3, needs="n")
def numpy_array(x, n):
    return x[:3] + np.linspace(0.0, 1.0, n, dtype=np.float32)


@case(X, 2, needs="n")
def numpy_item(x, n):
    return x * np.array([1.0, 2.0, 3.0], np.float32)[n]


@case(X, 3, needs="n")
def formatted(x, n):
    return x * len(f"{'a':>{n}}")


@case(X, 7, needs="n")
def percent_d(x, n):
    return x * len("%03d" % n)


@case(X, 12, needs="n")
def in_hex(x, n):
    return x * len(hex(n))


# ------------------------------------------------------------------------------------------------
# Where the value is needed
# ------------------------------------------------------------------------------------------------


@case(X, 3, needs="n")
def inner_jit(x, n):
    return jax.jit(lambda y: y * 2.0 if n > 1 else y)(x)


@case(X, 3, 4, needs="n")
def inner_jit_twice(x, n, m):
    inner = jax.jit(lambda y, k: jnp.zeros(n) + y.sum() * k)
    return jax.jit(lambda y, k: inner(y, k + 1))(x, m)


@case(X, 3, needs="n")
def inner_jit_with_statics(x, n):
    return jax.jit(lambda y, k: y[:k], static_argnums=1)(x, n)


@case(X, 0.5, 2, needs="n")
def scan_body(x, a, n):
    return lax.scan(lambda c, _: ((c * 2.0 if n > 1 else c * a), None), x, None, length=3)[0]


@case(X, 0.5, 2, needs="n")
def scan_carry(x, a, n):
    def body(carry, _):
        v, k = carry
        return ((v * 2.0 if n > 1 else v * a), k + 1), None

    return lax.scan(body, (x, n), None, length=4)[0]


@case(X, 3, 2, needs="m")
def while_body(x, n, m):
    def body(c):
        return c[0] + 1, c[1] + sum(range(m))

    return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


@case(X, 3, True, needs="flag")
def while_condition(x, n, flag):
    return lax.while_loop(
        lambda c: c[0] < (n if flag else 2 * n), lambda c: (c[0] + 1, c[1] * 0.5), (0, x)
    )[1]


@case(X, 2, needs="n")
def cond_branch(x, n):
    return lax.cond(x.sum() > 0, lambda v: v * len(range(n)), lambda v: v, x)


@case(X, 0.5, 2, needs="n")
def fori_body(x, a, n):
    return lax.fori_loop(0, 3, lambda i, v: v * a + jnp.arange(n).sum(), x)


def _helper(x, size):
    return _second_helper(x, size + 1)


def _second_helper(x, size):
    return jnp.zeros(size) + x.sum()


@case(X, 2, 2.0, needs="n")
def callee(x, n, a):
    return _helper(x * a, n)


@case(M, 2, needs="n")
def inside_vmap(x, n):
    return jax.vmap(lambda row: row[:n].sum())(x)


@case(M, 2, needs="n")
def given_to_vmap(x, n):
    return jax.vmap(lambda row, k: jnp.tile(row, n) * k, in_axes=(0, None))(x, n)


@case(M, 1, needs="axis")
def vmap_axis(x, axis):
    return jax.vmap(jnp.sum, in_axes=axis)(x)


@case(X, 3, needs="n")
def inside_grad(x, n):
    return jax.grad(lambda v: sum((v**i).sum() for i in range(n)))(x)


@case(X, 2, 0.5, needs="n")
def inside_checkpoint(x, n, a):
    return jax.checkpoint(lambda v: jnp.sin(v)[:n] * a)(x)


@jax.custom_jvp
def _scaled(x):
    return x * 2.0


_scaled.defjvp(lambda primals, tangents: (_scaled(*primals), tangents[0] * 3.0))


@case(X, 2, needs="n")
def beside_custom_jvp(x, n):
    return jax.grad(lambda v: _scaled(v)[:n].sum())(x)


class _Layer:
    def __init__(self, width):
        self.width = width

    def run(self, x):
        return x[: self.width]


@case(X, 2, 1.5, needs="n")
def in_an_object(x, n, a):
    return _Layer(n).run(x) * a


@case(X, 2, needs="n")
def in_a_partial(x, n):
    return functools.partial(lambda k, v: v[:k], n)(x)


@case(X, 2, needs="n")
def in_a_closure(x, n):
    def inner():
        return x[:n]

    return inner()


@case(X, 2, needs="n")
def error_is_caught(x, n):
    try:
        return x[:n]
    except Exception:
        return x


@case(X, 2, 1.5, needs="n")
def error_is_suppressed(x, n, a):
    out = x * a
    with contextlib.suppress(TypeError, IndexError):
        out = out[:n]
    return out


# ------------------------------------------------------------------------------------------------
# Where the leaf stands
# ------------------------------------------------------------------------------------------------


class Shape(typing.NamedTuple):
    size: int
    scale: float


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["size", "scale", "extra"], meta_fields=[]
)
@dataclasses.dataclass
class Options:
    size: int
    scale: float
    extra: Any = None


@case(X, {"n": 2, "a": 0.5}, needs="cfg['n']")
def in_dict(x, cfg):
    return x[: cfg["n"]] * cfg["a"]


@case(X, {"outer": [1.5, {"n": 2}], "m": 4}, needs="cfg['outer'][1]['n']")
def in_nested_dict(x, cfg):
    return x[: cfg["outer"][1]["n"]] * cfg["m"]


@case(X, [[2, 0.5], [3, 1.5]], needs="rows[0][0] rows[1][0]")
def in_nested_lists(x, rows):
    return [x[:n] * a for n, a in rows]


@case(X, (3, 0.5), needs="pair[0]")
def in_tuple(x, pair):
    n, a = pair
    for _ in range(n):
        x = x * a
    return x


@case(X, Shape(2, 0.5), needs="shape.size")
def in_named_tuple(x, shape):
    return x[: shape.size] * shape.scale


@case(X, Options(2, 0.5), needs="opts.size")
def in_dataclass(x, opts):
    return x[: opts.size] * opts.scale


@case(X, Options(2, 0.5, {"on": True}), needs="opts.extra['on']")
def in_dataclass_in_dataclass(x, opts):
    return x * opts.scale if opts.extra["on"] else x * opts.size


@case(X, 2, 3, 0.5, needs="sizes[0] sizes[1]")
def in_star_args(x, *sizes):
    return jnp.zeros((sizes[0], sizes[1])) + x.sum() * sizes[2]


@case(X, n=2, a=0.5, needs="n")
def in_star_kwargs(x, **options):
    return x[: options["n"]] * options["a"]


@case(X, needs="n")
@case(X, 3, needs="n")
@case(X, n=3, needs="n")
def with_default(x, n=2, a=0.5):
    return x[:n] * a


@case(X, n=3, needs="n")
def keyword_only(x, *, n=2, a=0.5):
    return x[:n] * a


@case(X, needs="n")
def keyword_only_default(x, *, n=2, a=0.5):
    return x[:n] * a


@case(X, 3, 0.5, needs="n")
def positional_only(x, n, /, a):
    return x[:n] * a


@case(X, 2, None, "up", needs="n mode")
def beside_string_and_none(x, n, norm, mode):
    y = x[:n] if mode == "up" else x[-n:]
    return y if norm is None else norm(y)


@case(X, 2, jnp.tanh, needs="n activation")
def beside_function(x, n, activation):
    return activation(x)[:n]


@case(X, {"mode": "relu", "n": 2, "a": 0.5}, needs="cfg['mode'] cfg['n']")
def beside_string_in_dict(x, cfg):
    return getattr(jax.nn, cfg["mode"])(x)[: cfg["n"]] * cfg["a"]


@case(X, *range(2, 14), needs="n3")
def one_of_twelve(x, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11):
    total = n0 + n1 + n2 + n4 + n5 + n6 + n7 + n8 + n9 + n10 + n11
    return x[:n3] * total


@case(
    X,
    {f"p{i:02}": i + 1 for i in range(30)},
    needs="params['p07'] params['p21']",
)
def two_of_thirty(x, params):
    total = sum(params.values())
    return jnp.zeros(params["p07"]) + x.sum() * total if params["p21"] > 5 else x


# ------------------------------------------------------------------------------------------------
# Nothing is needed
# ------------------------------------------------------------------------------------------------


@case(X, 3, 0.5, True)
def arithmetic(x, n, a, flag):
    return (x * n + a) ** 2 - x**n + flag


@case(X, 3)
def where(x, n):
    return jnp.where(n > 2, x, -x)


@case(X, True, 2)
def lax_cond(x, flag, n):
    return lax.cond(flag, lambda v: v * n, lambda v: v, x)


@case(X, 1)
def lax_switch(x, i):
    return lax.switch(i, [lambda v: v, lambda v: v * 2.0], x)


@case(X, 4, 0.5)
def fori_bound(x, n, a):
    return lax.fori_loop(0, n, lambda i, v: v * a + i, x)


@case(X, 1, 4)
def while_bound(x, start, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 0.5), (start, x))


@case(X, 2)
def roll_shift(x, n):
    return jnp.roll(x, n)


@case(X, 2)
def dynamic_index(x, n):
    return lax.dynamic_slice_in_dim(x, n, 2)


@case(X, 2)
def array_index(x, n):
    return x[n]


@case(X, 2, 9.0)
def array_update(x, n, v):
    return x.at[n].set(v)


@case(X, 0.0, 1.0)
def clip(x, low, high):
    return jnp.clip(x, low, high)


@case(3, 0.0, 2.0)
def random_numbers(seed, low, high):
    return jax.random.uniform(jax.random.key(seed), (2,), minval=low, maxval=high)


@case(X, 3, {"a": 2})
def not_used(x, n, cfg):
    return x + 1.0


@case(1, 2.5, True, 1j)
def returned(n, a, flag, c):
    return n, a, flag, c


@case(X, {"w": 0.5, "k": [1, 2, 3]})
def sums_of_a_tree(x, params):
    return x * sum(jax.tree.leaves(params))


# ------------------------------------------------------------------------------------------------
# Arrays and NumPy scalars
# ------------------------------------------------------------------------------------------------


@case(X, np.int64(3), needs="n")
@case(X, np.int8(3), needs="n")
@case(X, np.array(3), needs="n")
@case(X, jnp.int32(3), needs="n")
@case(X, jnp.asarray(3), needs="n")
@case(X, jnp.uint8(3), needs="n")
def size_of_some_kind(x, n):
    return jnp.zeros(n) + x.sum()


@case(X, np.bool_(True), needs="flag")
@case(X, np.array(False), needs="flag")
@case(X, jnp.bool_(True), needs="flag")
def flag_of_some_kind(x, flag):
    return x * 2.0 if flag else -x


@case(X, np.float32(2.0), needs="a")
@case(X, np.float64(2.0), needs="a")
def numpy_float(x, a):
    return x * math.sqrt(a)


@case(X, jnp.int32(2), needs="n")
def derived_from_array(x, n):
    m = 2 * n + 1
    return jnp.zeros(m) + x.sum()


@case(X, jnp.int32(2), 3, jnp.float32(0.5), needs="n")
def array_beside_numbers(x, n, k, a):
    return x[: int(n)] * k * a


@case(X, np.array([2, 3]), needs="shape")
@case(X, jnp.array([2, 3]), needs="shape")
def shape_array(x, shape):
    return x.reshape(tuple(int(s) for s in shape))


@case(X, MASK, needs="mask")
@case(X, jnp.asarray(MASK), needs="mask")
def boolean_mask(x, mask):
    return x[mask]


@case(X, np.array([1, 0, 2, 1, 0, 3]), 0.5, needs="counts")
@case(X, jnp.array([1, 0, 2, 1, 0, 3]), 0.5, needs="counts")
def repeats(x, counts, a):
    return jnp.repeat(x * a, counts)


@case(X, jnp.array([2, 4]), needs="at")
def split_at(x, at):
    return [part.sum() for part in jnp.split(x, at)]


@case(X, np.array([0, 2]), jnp.bool_(True), np.int64(3))
def arrays_that_stay(x, index, flag, n):
    return jnp.where(flag, x[index], 0.0) * n


# ------------------------------------------------------------------------------------------------
# Nothing helps
# ------------------------------------------------------------------------------------------------


@hopeless(jax.errors.TracerBoolConversionError, X)
def if_float_array(x):
    return x if x.sum() > 0 else -x


@hopeless(jax.errors.TracerBoolConversionError, X, jnp.float32(2.0))
def if_float_scalar_array(x, a):
    return x if a > 0 else -x


@hopeless(jax.errors.TracerBoolConversionError, X, 3)
def number_and_array(x, n):
    return x if n > 2 and x.sum() > 0 else -x


@hopeless(jax.errors.ConcretizationTypeError, X)
def float_of_array(x):
    return x * float(x.sum())


@hopeless(jax.errors.TracerArrayConversionError, X, 2)
def numpy_of_array(x, n):
    return np.sin(x) * n


@hopeless(jax.errors.NonConcreteBooleanIndexError, X, 2)
def mask_of_data(x, n):
    return x[x > 0] * n


@hopeless(jax.errors.NonConcreteBooleanIndexError, jnp.ones(100), jnp.arange(100) > 3)
def large_mask(x, mask):
    return x[mask]


@hopeless(jax.errors.ConcretizationTypeError, X, jnp.float32(3.0))
def size_from_float_array(x, a):
    return jnp.zeros(int(a))


@hopeless(jax.errors.ConcretizationTypeError, X)
def nonzero_of_data(x):
    return jnp.nonzero(x)[0]


@hopeless(jax.errors.TracerBoolConversionError, X, 3)
def traced_by_an_inner_jit(x, n):
    return jax.jit(lambda y, k: y * 2.0 if k > 1 else y)(x, n)


@hopeless(jax.errors.TracerIntegerConversionError, X)
def range_of_loop_index(x):
    return lax.fori_loop(0, 3, lambda i, v: v + sum(range(i)), x)
