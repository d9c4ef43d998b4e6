"""The loops of ``jax.lax``, called op by op with fresh functions, without compiling them again.

Signatures, semantics, dtypes and errors are those of :mod:`jax.lax`: a loop is traced by ``jax.lax`` itself,
once for all calls whose functions are equal. Every other name falls through to ``jax.lax``.

Inside of a trace (under ``jax.jit``) nothing would be gained, and ``jax.lax`` is called directly.
"""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from loopjit import compat
from loopjit.engine.call import Target
from loopjit.engine.job import Job
from loopjit.engine.state import COUNTS, SHARED, Counts
from loopjit.engine.warm import fast_call, find_state
from loopjit.memo import LRU
from loopjit.programs.program import Mismatch, ProgramOptions
from loopjit.signature.code import constant_key
from loopjit.transform import DISABLED

_log = logging.getLogger("loopjit")
_COUNTS = Counts()
_NO_KEYWORDS: dict[str, Any] = {}
_NO_OPTIONS = ProgramOptions(None, {}, True)

LOOPS = ("while_loop", "fori_loop", "scan", "map", "cond", "switch", "associative_scan")
# Those of JAX, also while ours stand in their place (`loopjit.install(lax=True)`).
_jax = types.SimpleNamespace(**{name: getattr(lax, name) for name in LOOPS})

# Where JAX finds its own programs again, a loop whose functions cannot be compared is best left to JAX: here
# it would be traced twice or three times. By the code of its functions: how often that has happened.
_private: LRU[Hashable, int] = LRU(4096)
_OFTEN = 2


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """``jax.lax.while_loop`` that finds the compiled loop again when the functions are equal.

    Args:
      cond_fun: maps the carry to a boolean scalar.
      body_fun: maps the carry to a carry of the same tree, shapes and dtypes.
      init_val: the initial carry, any pytree of arrays.

    Returns:
      The final carry.

    Raises:
      TypeError: as ``jax.lax.while_loop`` does, for example when the carry changes its type.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> float(loopjit.lax.while_loop(lambda x: x < 10.0, lambda x: x * 2.0, jnp.float32(1.0)))
      16.0
    """
    roots = (cond_fun, body_fun)
    try:
        return _hit(roots, "while_loop", (init_val,))
    except Mismatch:
        pass

    def make(cond_fun: Any, body_fun: Any) -> Any:
        return lambda init_val: _jax.while_loop(cond_fun, body_fun, init_val)

    return _stage(roots, "while_loop", make, (init_val,))


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """``jax.lax.fori_loop`` that finds the compiled loop again when the body is equal.

    As in ``jax.lax``, bounds whose values are known make a loop of fixed length, which can be
    differentiated in reverse mode; each length is one program.

    Args:
      lower: first index, an integer scalar.
      upper: the index after the last, an integer scalar.
      body_fun: maps the index and the carry to a carry of the same tree, shapes and dtypes.
      init_val: the initial carry, any pytree of arrays.
      unroll: as in ``jax.lax.fori_loop``.

    Returns:
      The final carry.

    Raises:
      TypeError: as ``jax.lax.fori_loop`` does.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> float(loopjit.lax.fori_loop(0, 4, lambda i, x: x + i, jnp.float32(0.0)))
      6.0
    """
    roots = (body_fun,)
    if type(lower) is int and type(upper) is int and unroll is None:
        key: Hashable = ("fori_loop", lower, upper)
        args: tuple[Any, ...] = (init_val,)
    else:
        low, high = _bound(lower), _bound(upper)
        key = ("fori_loop", low, high, _options_key((unroll,)))
        traced = ([lower] if low is None else [], [upper] if high is None else [])
        args = (init_val, *traced)
    try:
        return _hit(roots, key, args)
    except Mismatch:
        pass

    def make(body_fun: Any) -> Any:
        def run(init_val: Any, low: Any = (), high: Any = ()) -> Any:
            [low] = low or [lower]
            [high] = high or [upper]
            return _jax.fori_loop(low, high, body_fun, init_val, unroll=unroll)

        return run

    return _stage(roots, key, make, args)


def _bound(value: Any) -> Hashable | None:
    """A key of a loop bound whose value ``jax.lax`` looks at; None for one that is traced."""
    if type(value) is int:
        return value
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        array: Any = value
        if array.ndim or not np.issubdtype(array.dtype, np.integer):
            return None  # an error that jax.lax explains
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return None
        weak = bool(getattr(array, "weak_type", False))
        return (type(value), str(array.dtype), weak, int(array))
    return constant_key(value) if isinstance(value, (int, float)) else None


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
) -> tuple[Any, Any]:
    """``jax.lax.scan`` that finds the compiled loop again when the body is equal.

    Args:
      f: maps the carry and one slice of ``xs`` to a carry of the same type and one slice of the output.
      init: the initial carry, any pytree of arrays.
      xs: leaves ``[length, ...]``, or None.
      length: the number of steps; needed where ``xs`` has no leaves.
      reverse: whether to go through ``xs`` from the end.
      unroll: as in ``jax.lax.scan``.

    Returns:
      The final carry, and the outputs with leaves ``[length, ...]``.

    Raises:
      TypeError, ValueError: as ``jax.lax.scan`` does.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> total, sums = loopjit.lax.scan(lambda c, x: (c + x, c + x), jnp.float32(0.0), jnp.arange(4.0))
      >>> sums.tolist()
      [0.0, 1.0, 3.0, 6.0]
    """
    roots = (f,)
    options = (length, reverse, unroll, _split_transpose)
    key = ("scan", _options_key(options))
    args = (init, xs)
    try:
        return _hit(roots, key, args)
    except Mismatch:
        pass

    def make(f: Any) -> Any:
        return lambda init, xs: _jax.scan(f, init, xs, *options)

    return _stage(roots, key, make, args)


def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """``jax.lax.map`` that finds the compiled loop again when the function is equal.

    Args:
      f: maps one slice of ``xs`` to one slice of the output.
      xs: leaves ``[length, ...]``.
      batch_size: how many slices are taken at a time, as in ``jax.lax.map``.

    Returns:
      The outputs, leaves ``[length, ...]``.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> loopjit.lax.map(lambda x: x * 2.0, jnp.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """
    roots = (f,)
    key = ("map", _options_key((batch_size,)))
    try:
        return _hit(roots, key, (xs,))
    except Mismatch:
        pass

    def make(f: Any) -> Any:
        return lambda xs: _jax.map(f, xs, batch_size=batch_size)

    return _stage(roots, key, make, (xs,))


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    **operand: Any,
) -> Any:
    """``jax.lax.cond`` that finds the compiled program again when both functions are equal.

    Args:
      pred: a boolean scalar.
      true_fun: called with ``operands`` where ``pred`` holds.
      false_fun: called with ``operands`` where it does not; its result has the same type.
      *operands: any pytrees of arrays.
      **operand: ``operand=``, as in ``jax.lax.cond``.

    Returns:
      The result of one of the functions.

    Raises:
      TypeError: as ``jax.lax.cond`` does, for example when the results differ in type.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> float(loopjit.lax.cond(True, lambda x: x + 1.0, lambda x: x - 1.0, jnp.float32(1.0)))
      2.0
    """
    if operand:
        if operands or operand.keys() != {"operand"}:
            return _jax.cond(pred, true_fun, false_fun, *operands, **operand)
        operands = (operand["operand"],)
    roots = (true_fun, false_fun)
    args = (pred, *operands)
    try:
        return _hit(roots, "cond", args)
    except Mismatch:
        pass

    def make(true_fun: Any, false_fun: Any) -> Any:
        return lambda pred, *operands: _jax.cond(pred, true_fun, false_fun, *operands)

    return _stage(roots, "cond", make, args)


def switch(
    index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, **operand: Any
) -> Any:
    """``jax.lax.switch`` that finds the compiled program again when all branches are equal.

    Args:
      index: an integer scalar, clamped to the branches there are.
      branches: functions with results of the same type.
      *operands: any pytrees of arrays.
      **operand: ``operand=``, as in ``jax.lax.switch``.

    Returns:
      The result of one branch.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> float(loopjit.lax.switch(1, [lambda x: x, lambda x: -x], jnp.float32(2.0)))
      -2.0
    """
    if operand and not operands and operand.keys() == {"operand"}:
        operands, operand = (operand["operand"],), {}
    if operand or not isinstance(branches, (list, tuple)):
        return _jax.switch(index, branches, *operands, **operand)
    roots = tuple(branches)
    args = (index, *operands)
    try:
        return _hit(roots, "switch", args)
    except Mismatch:
        pass

    def make(*branches: Any) -> Any:
        return lambda index, *operands: _jax.switch(index, branches, *operands)

    return _stage(roots, "switch", make, args)


def associative_scan(
    fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """``jax.lax.associative_scan`` as one compiled program, found again when the function is equal.

    (``jax.lax`` runs it as many small programs when it is called op by op, so results may differ from it
    by rounding, as they do under ``jax.jit``.)

    Args:
      fn: an associative function of two pytrees like ``elems``.
      elems: leaves with equal sizes along ``axis``.
      reverse: whether to scan from the end.
      axis: the axis to scan over.

    Returns:
      Leaves of the shapes of ``elems``.

    Example:
      >>> import jax.numpy as jnp, loopjit
      >>> loopjit.lax.associative_scan(lambda a, b: a + b, jnp.arange(4.0)).tolist()
      [0.0, 1.0, 3.0, 6.0]
    """
    roots = (fn,)
    key = ("associative_scan", _options_key((reverse, axis)))
    try:
        return _hit(roots, key, (elems,))
    except Mismatch:
        pass

    def make(fn: Any) -> Any:
        return lambda elems: _jax.associative_scan(fn, elems, reverse, axis)

    return _stage(roots, key, make, (elems,))


class _Unknown:
    """A key that equals nothing: an option of a kind that jax.lax may or may not accept."""


def _options_key(options: tuple[Any, ...]) -> Hashable:
    key: list[Any] = []
    for option in options:
        kind = type(option)
        if kind in (int, bool, type(None)):
            key += (kind, option)
        elif isinstance(option, np.integer):
            key += (kind, operator.index(option))
        else:
            key.append(_Unknown())
    return tuple(key)


def _hit(roots: tuple[Any, ...], key: Hashable, args: tuple[Any, ...]) -> Any:
    """Calls the program of equal functions, if it is known; raises Mismatch if not."""
    if _is_left_to_jax(roots):
        raise Mismatch
    try:
        out = fast_call(find_state(roots, key), args, _NO_KEYWORDS)
    except TypeError:
        raise Mismatch from None
    COUNTS.hits += 1
    return out


def _options(*args: Any) -> ProgramOptions:
    return _NO_OPTIONS


def _no_statics(args: Any, kwargs: Any) -> set[Any]:
    return set()


def _stage(
    roots: tuple[Any, ...],
    key: Hashable,
    make: Callable[..., Callable[..., Any]],
    args: tuple[Any, ...],
) -> Any:
    """Traces and compiles the loop, for all calls with equal functions.

    Args:
      roots: the functions that are its arguments.
      key: the name of the loop, and the arguments that ``make`` fixes.
      make: makes a function of ``args`` from (copies of) the roots.
      args: the arguments that are traced.
    """
    if (
        DISABLED
        or compat.bypass()
        or compat.is_tracing()
        or not all(callable(f) for f in roots)
        or _is_left_to_jax(roots)
    ):
        return make(*roots)(*args)
    name = key if isinstance(key, str) else key[0]  # type: ignore[index]
    target = Target(roots, make, name, key, _options, _no_statics, None, _COUNTS, False)
    job = Job(target, args, {})
    try:
        out = job.run()
        if not job.hoist:
            codes = _codes(roots)
            _private.replace(codes, (_private.peek(codes) or 0) + 1)
        return out
    except RuntimeError:
        raise  # the program ran
    except Exception:
        # If it is the caller's doing, jax.lax says so in its own words.
        _log.debug("%s: left to jax.lax", name, exc_info=True)
        return make(*roots)(*args)


def _is_left_to_jax(roots: tuple[Any, ...]) -> bool:
    return SHARED.active and (_private.peek(_codes(roots)) or 0) >= _OFTEN


def _codes(roots: tuple[Any, ...]) -> Hashable:
    return tuple([getattr(root, "__code__", type(root)) for root in roots])


def __getattr__(name: str) -> Any:
    return getattr(lax, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(lax)})
