"""Which leaves could be static in place of traced, and what stands for them in the program then.

Only what is small and whole, since each value is a program of its own: Python numbers, NumPy scalars, and
arrays of integers or booleans that hold a decision (a size, a shape, a mask) rather than data.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 64
"""Elements of an array that may decide what the program is."""

_NUMBERS = {bool: 0, int: 1, float: 4, complex: 4}
_INT32 = range(-(2**31), 2**31)
_INT64 = range(-(2**63), 2**63)


def rank(leaf: object) -> int | None:
    """How likely it is that a leaf decides the program: 0 is likeliest, None is not at all.

    Flags and counts decide programs every day, floats hardly ever, and an array only when all else has
    been tried, since it has to be read from its device.
    """
    number = _NUMBERS.get(type(leaf))
    if number is not None:
        return number
    if isinstance(leaf, np.generic):  # before float: a float64 is one
        return 2 if leaf.dtype.kind in "biu" else 4 if leaf.dtype.kind in "fc" else None
    if isinstance(leaf, int):  # a member of an IntEnum
        return 0
    if isinstance(leaf, (float, complex)):
        return 4
    if isinstance(leaf, (np.ndarray, jax.Array)) and _decides(leaf):
        return 3 if leaf.ndim == 0 else 5
    return None


def _decides(array: Any) -> bool:
    dtype = array.dtype
    if array.size > SMALL or not (
        jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.integer)
    ):
        return False
    return not isinstance(array, jax.Array) or is_readable(array)


def is_readable(array: jax.Array) -> bool:
    """Whether an array may be read to the host, now and here."""
    if isinstance(array, jax.core.Tracer) or array.is_deleted() or not array.is_fully_addressable:
        return False
    guard = jax.config.jax_transfer_guard_device_to_host  # type: ignore[attr-defined]
    return guard is None or not str(guard).startswith("disallow")


def host_value(leaf: Any) -> Any:
    """The value of a leaf that is static, as it is written down: of an array, what is read from it.

    It also stands for an array in the function if something is computed from it that has to be a value
    (``m = 2 * n + 1``, ``range(m)``): within a trace, operations on a ``jax.Array`` are traced.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    value = np.asarray(leaf)
    return value.item() if leaf.weak_type and value.ndim == 0 else value


def known_value(leaf: Any) -> Any:
    """What stands for a leaf that is static if its own value is enough: an array that is no tracer.

    A copy, since the program keeps it, and the user may delete or donate the array.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    value = host_value(leaf)
    if not isinstance(value, np.ndarray):
        return value
    with jax.ensure_compile_time_eval():
        return jnp.array(value)


def is_count(leaf: object) -> bool:
    """Whether a leaf could be the trip count of a loop: a whole number, and one that could be static."""
    if isinstance(leaf, int):  # also a bool, or a member of an IntEnum
        return True
    if not isinstance(leaf, (np.generic, np.ndarray, jax.Array)) or leaf.ndim:
        return False
    whole = jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.bool_)
    return bool(whole) and rank(leaf) is not None


def fits(number: int) -> bool:
    """Whether JAX can make an array of a Python int."""
    if number in _INT32:
        return True
    return bool(jax.config.jax_enable_x64) and number in _INT64  # type: ignore[attr-defined]
