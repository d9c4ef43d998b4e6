"""Exceptions and warnings of loopjit."""

from __future__ import annotations


class LoopJitError(Exception):
    """Base of every error that loopjit raises by itself (JAX's own errors pass through unchanged)."""


class StrictError(LoopJitError):
    """Raised under ``strict=True`` where loopjit would otherwise take a slower path.

    The message says what was met, where, and how to mend it.
    """


class LoopJitTypeError(LoopJitError, TypeError):
    """A wrong kind of argument: a :class:`TypeError`, as ``jax.jit`` raises in the same place."""


class LoopJitValueError(LoopJitError, ValueError):
    """A wrong value of an option: a :class:`ValueError`, as ``jax.jit`` raises in the same place."""


class LoopJitWarning(UserWarning):
    """Something works, but costs more than it has to."""
