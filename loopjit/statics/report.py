"""What the user gets to see of the analysis: the table of leaves, the notes on errors, the warnings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

from loopjit.errors import LoopJitWarning

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MANY_VALUES = 20
"""Programs for the values of one leaf after which a warning is due."""


class LeafInfo(NamedTuple):
    """What became of one leaf of the arguments.

    Attributes:
      path: what the leaf is called: ``n``, ``params['w']``.
      static: whether its value is part of the program; else it is traced.
      reason: why.
      line: where its value was needed, ``"model.py:12: range(n)"``, if that is the reason.
    """

    path: str
    static: bool
    reason: str
    line: str | None = None


class Statics(tuple[LeafInfo, ...]):
    """The leaves of a function's arguments. Its text is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("leaf", "", "why", "where")]
        rows += [(r.path, "static" if r.static else "traced", r.reason, r.line or "") for r in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)


def warn(message: str) -> None:
    """Warns, at the line that called loopjit."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, LoopJitWarning, stacklevel=level)


def array_message(name: str, path: str, where: str) -> str:
    return (
        f"{name}: the value of the array `{path}` is needed{where}, so it is read to the host and is"
        f" static: each call waits for the device, and each new value is a new program. Pass a Python"
        f" int or a NumPy array, or use jax.lax.cond, jnp.where or a jax.lax loop."
    )


def float_message(name: str, path: str, where: str) -> str:
    return (
        f"{name}: `{path}` decides a condition{where}, so it is static, and each new value of it is"
        f" compiled. Use jax.lax.cond or jnp.where, which leave it traced."
    )


def values_message(name: str, path: str, where: str) -> str:
    return (
        f"{name}: `{path}` has had {MANY_VALUES} values: {MANY_VALUES} programs. It is static because its"
        f" value is needed{where}. Pass it as an array to a jax.lax loop, or pad to a few sizes."
    )


def at(line: str | None) -> str:
    """A line, as a sentence goes on with it."""
    return f" at {line}" if line else ""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error of JAX's, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def unsolved_note(paths: Iterable[tuple[str, Any]], line: str | None, forbidden: set[str]) -> str:
    """Why a value that is needed cannot be had, and what to do.

    Args:
      paths: the leaves, with what stands there.
      line: of the user's.
      forbidden: paths of ``traced_argnames``.
    """
    parts = [f"`{path}` ({_kind(value)})" for path, value in paths]
    which = ", ".join(parts) or "a traced value"
    if forbidden:
        names = ", ".join(f"`{name}`" for name in sorted(forbidden))
        todo = f"traced_argnames forbids that {names} becomes static: take it off that list"
    else:
        todo = (
            "a value that depends on it cannot decide what the program is: use jax.lax.cond, jnp.where or"
            " a jax.lax loop, or pass a Python number, if it is one"
        )
    return f"loopjit: the value of {which} is needed{at(line)}; {todo}."


def _kind(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return type(value).__name__
    return f"{dtype}[{','.join(map(str, value.shape))}]"


REVERSE_NOTE = (
    "loopjit: a loop whose trip count is traced keeps no record of its steps, which reverse mode has to go"
    " back through. A trip count that is a Python int of a loop_jit function is made static by itself, unless"
    " an outer jax.jit has traced it (declare it static there). A `while_loop` that ends when the data say so"
    " can be differentiated in forward mode (jax.jacfwd, jax.jvp), or be written as a scan over the most"
    " steps it may take, with jnp.where."
)

CARRY_NOTE = (
    "loopjit: a carry keeps its shape and dtype from step to step. What grows is written into an array of"
    " its final size (`buffer = jnp.zeros(n).at[0].set(x)` before the loop, `buffer.at[i].set(y)` in it), or"
    " is the second result of the body of jax.lax.scan, which stacks it. What changes its dtype starts with"
    " the dtype that it ends with (`jnp.zeros(())` in place of `0`)."
)
_NOTES = {
    "Reverse-mode differentiation does not work for lax.while_loop": REVERSE_NOTE,
    "carry input and carry output must have equal types": CARRY_NOTE,
}


def note_of(error: BaseException) -> str | None:
    """What to do about an error of JAX that has nothing to do with static leaves."""
    text = str(error)
    return next((note for fragment, note in _NOTES.items() if fragment in text), None)
