"""Runs a function through the entry points of loopjit, and compares with plain Python.

A *difference* is a factory ``make(v)``: functions made from two values of ``v`` are equal but for
one thing. Each of them must give what Python gives, whatever was called before (a wrong hit is the
worst bug there is), and a fresh function that is equal must be found again.

A *change* is a factory of a function and of something that alters what the function reads: whoever
calls after the change must see it.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import loopjit
from counting import counting
from loopjit import loop_jit

X = jnp.asarray(np.array([1.0, 2.0, 3.0], np.float32))
XS = jnp.asarray(np.array([[1.0, 2.0, 3.0]], np.float32))
ZERO = jnp.asarray(np.int32(0))
TRUE = jnp.asarray(np.bool_(True))


class Entry(NamedTuple):
    run: Callable[[Any], Any]
    pick: Callable[[Any], Any]


def _while(f):
    return loopjit.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (ZERO, X))


ENTRIES = {
    "loop_jit": Entry(lambda f: loop_jit(f)(X), lambda out: out),
    "map": Entry(lambda f: loopjit.lax.map(f, XS), lambda out: jax.tree.map(lambda a: a[0], out)),
    "while": Entry(_while, lambda out: out[1]),
}


class Difference(NamedTuple):
    make: Callable[[Any], Callable[..., Any]]
    values: tuple[Any, ...]
    hits: str
    entries: tuple[str, ...]


def aligned(values: Any) -> np.ndarray:
    """NumPy memory that JAX can share instead of copying it."""
    raw = np.zeros(len(values) + 32, np.float32)
    start = (-raw.ctypes.data // 4) % 16
    out = raw[start : start + len(values)]
    out[:] = values
    return out


def same(got: Any, want: Any) -> None:
    """The same tree, dtypes and values."""
    got, want = jax.tree.map(jnp.asarray, (got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        # Signs of zeros count; rounding does not.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
        if np.issubdtype(a.dtype, np.floating):
            np.testing.assert_array_equal(np.signbit(np.asarray(a)), np.signbit(np.asarray(b)))


def differs(got: Any, other: Any) -> bool:
    """Whether two results differ (a test of the test)."""
    try:
        same(got, other)
    except AssertionError:
        return True
    return False


def difference(
    table: dict[str, Any], *values: Any, hits: str = "L1", entries: tuple[str, ...] = tuple(ENTRIES)
):
    """Notes a factory; ``hits``: L1 (no trace), L2 (no compile) or "" (nothing is claimed)."""

    def note(make):
        assert make.__name__ not in table
        table[make.__name__] = Difference(make, values, hits, entries)
        return make

    return note


def change(table: dict[str, Any]):
    """Notes a factory of a function and what changes it."""

    def note(make):
        assert make.__name__ not in table
        table[make.__name__] = make
        return make

    return note


def cases(table: dict[str, Any]):
    """(name, entry): loop_jit, and the loops in turn."""
    out = []
    for number, (name, case) in enumerate(table.items()):
        loop = ("map", "while")[number % 2]
        entries = getattr(case, "entries", tuple(ENTRIES))
        out += [(name, entry) for entry in entries if entry in ("loop_jit", loop)]
    return out


def check_difference(case: Difference, entry: str) -> None:
    """Each value gives its own result, forwards and backwards, and no result is another's."""
    run, pick = ENTRIES[entry]
    wants = []
    for value in (*case.values, *reversed(case.values)):
        f = case.make(value)
        got = pick(run(f))
        want = jax.tree.map(np.asarray, case.make(value)(X))
        same(got, want)
        wants.append(want)
    for a, b in itertools.combinations(wants[: len(case.values)], 2):
        assert differs(a, b), "the case does not differ where it should"


def check_hit(case: Difference, entry: str) -> None:
    """A fresh equal function hits, and gives the right result."""
    run, pick = ENTRIES[entry]
    for value in case.values:
        run(case.make(value))
        f = case.make(value)
        with counting() as n:
            out = jax.block_until_ready(run(f))
        same(pick(out), case.make(value)(X))
        assert n.compiles == 0
        if case.hits == "L1":
            assert n.traces == 0


def check_change(make: Callable[[], Any], entry: str) -> None:
    """Whoever calls after a change sees it: the same object, warm as it is, and a new one."""
    f, alter = make()
    run, pick = ENTRIES[entry]
    if entry == "loop_jit":
        jitted = loop_jit(f)
        run = lambda f: jitted(X)
    before = [jax.tree.map(np.asarray, pick(run(f))) for _ in range(3)]
    jax.clear_caches()  # where stock JAX itself is stale
    want = jax.tree.map(np.asarray, f(X))
    for got in before:
        same(got, want)
    for _ in range(2):
        jax.block_until_ready(run(f))  # warm again
    alter()
    after = [jax.tree.map(np.asarray, pick(run(f))) for _ in range(2)]
    after.append(jax.tree.map(np.asarray, ENTRIES["loop_jit"].run(f)))
    jax.clear_caches()
    new = jax.tree.map(np.asarray, f(X))
    assert differs(want, new), "the case does not change anything"
    for got in after:
        same(got, new)


def module(name: str, source: str, **content: Any) -> types.ModuleType:
    """A module of the user."""
    new = types.ModuleType(name)
    vars(new).update(jnp=jnp, jax=jax, np=np, lax=jax.lax, **content)
    exec(compile(source, f"/nowhere/{name}.py", "exec"), vars(new))
    return new


def function(source: str, **content: Any) -> Callable[..., Any]:
    """The function ``f`` of a source, in globals of its own."""
    return module("user_source", source, **content).f
