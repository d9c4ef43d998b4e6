"""Runs things with and without ``loopjit.install()``, and compares all that can be seen of the results.

A *run* is a function of one value that makes everything it calls anew: functions, jitted functions,
captured arrays. What it gives without install is what it has to give with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loopjit
from counting import Counts, counting

X = jnp.asarray(np.array([1.0, 2.0, 3.0], np.float32))
XS = jnp.asarray(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32))


def arr(v: Any, dtype: Any = np.float32) -> jax.Array:
    """An array of JAX, made without compiling anything."""
    return jnp.asarray(np.asarray(v, dtype))


def look(out: Any) -> Any:
    """What can be seen of a result: for arrays more than their values."""
    return jax.tree.structure(out), [_look(leaf) for leaf in jax.tree.leaves(out)]


def _look(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return type(leaf), leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype, leaf.shape, *_look(jax.random.key_data(leaf))
    seen = (leaf.dtype, leaf.shape, leaf.weak_type, type(leaf.sharding), leaf.sharding)
    return (*seen, leaf.committed, str(leaf.format.layout), np.asarray(leaf))


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    """What can be seen of a result or of an error."""
    try:
        out = jax.block_until_ready(run(*args))
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "0x", str(error))
    return look(out)


def result(run: Callable[..., Any], *args: Any) -> Any:
    """What can be seen of a result; an error is a mistake of the test."""
    seen = outcome(run, *args)
    assert not isinstance(seen[0], type), seen
    return seen


def check(got: Any, want: Any, exact: bool = True) -> None:
    """Compares what was seen: values bitwise, or to rounding."""
    if isinstance(want[0], type) or isinstance(got[0], type):
        assert got == want
        return
    assert got[0] == want[0] and len(got[1]) == len(want[1])
    for a, b in zip(got[1], want[1], strict=True):
        assert a[:-1] == b[:-1]
        a, b = a[-1], b[-1]
        if not isinstance(b, np.ndarray):
            assert a == b
        elif exact or b.dtype.kind not in "fcV":
            assert a.tobytes() == b.tobytes(), (a, b)
        else:
            np.testing.assert_allclose(
                a.astype(np.result_type(b.dtype, np.float32)),
                b.astype(np.result_type(b.dtype, np.float32)),
                rtol=1e-6,
            )


def check_saved(
    run: Callable[..., Any],
    *values: Any,
    exact: bool = True,
    jit: bool = True,
) -> Counts:
    """After the first of several calls nothing is compiled, and results are those without install."""
    values = values or (2.0, 3.0)
    wants = [result(run, values[0])]
    with counting() as n:
        wants += [result(run, v) for v in values[1:]]
    assert n.compiles > 0, "nothing can be saved here"
    with loopjit.installed(jit=jit):
        gots = [outcome(run, values[0])]
        with counting() as n:
            gots += [outcome(run, v) for v in (*values[1:], values[0])]
    for got, want in zip(gots, (*wants, wants[0]), strict=True):
        check(got, want, exact)
    assert (n.compiles, n.lowers) == (0, 0)
    return n


def check_missed(
    run: Callable[..., Any], *values: Any, exact: bool = True, again: bool = True
) -> None:
    """Each value has a program of its own, and the results that it has without install.

    ``again``: whether it is found again.
    """
    wants = [result(run, v) for v in values]
    with loopjit.installed():
        for v, want in zip(values, wants, strict=True):
            with counting() as n:
                got = outcome(run, v)
            check(got, want, exact)
            assert n.compiles > 0
        with counting() as n:
            for v, want in reversed(list(zip(values, wants, strict=True))):
                check(outcome(run, v), want, exact)
        assert n.compiles == 0 or not again
