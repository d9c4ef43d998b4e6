"""Programs that differ in weak types alone share what they were compiled to.

A weak type decides what is computed while a function is traced, and means nothing to the compiler. So a step
that was called with ``1.0`` need not be compiled again for its own result, which is no longer weak. Whether
two programs are one to the compiler is seen in their StableHLO.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
from jax import tree_util

from loopjit import compat
from loopjit.programs.program import Program

_DEFINITION = re.compile(r"\s*(%\w+)(?::\d+)? = ")
_NAME = re.compile(r"%\w+")
_NO_CONVERSION = re.compile(r"\s*(%\w+) = stablehlo\.convert (%\w+(?:#\d+)?) : tensor<[^()]*>")


def adopt_executable(program: Program, others: Iterable[Program]) -> None:
    """Lets ``program``, which is new, have what one of ``others`` was compiled to, if it is the same."""
    for other in others:
        if not _differ_in_weak_types(program, other):
            continue
        try:
            have, want = _lower(other), _lower(program)
            if _text(have) == _text(want):
                compat.share_executable(have, want)
                return
        except Exception:  # what cannot be lowered without its arguments is compiled with them
            return


def _differ_in_weak_types(program: Program, other: Program) -> bool:
    """Whether the weak types of inputs are all that differs, before a closer look."""
    return (
        hasattr(program.call, "lower")
        and hasattr(other.call, "lower")
        and program.avals != other.avals
        and _strong(program.avals) == _strong(other.avals)
        and program.out_avals == other.out_avals
        and program.in_tree == other.in_tree
        and program.context == other.context
    )


def _strong(avals: list[Any]) -> list[Any]:
    """The avals without their weak types."""
    return [a.update(weak_type=False) if getattr(a, "weak_type", False) else a for a in avals]


def _lower(program: Program) -> Any:
    leaves = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in program.avals
    ]
    args, kwargs = tree_util.tree_unflatten(program.in_tree, leaves)
    return program.call.lower(*args, **kwargs)  # type: ignore[attr-defined]


def _text(lowered: Any) -> str:
    """The StableHLO, without conversions from a type to itself, and with its values numbered anew.

    Such a conversion is what makes a weak value strong. Names of values are used again in regions that
    do not see each other, so that a definition makes a new name of an old one.
    """
    names: dict[str, str] = {}
    count = 0

    def numbered(match: re.Match[str]) -> str:
        nonlocal count
        if match[0] not in names:
            names[match[0]] = f"%v{count}"
            count += 1
        return names[match[0]]

    lines = []
    for line in lowered.as_text().splitlines():
        same = _NO_CONVERSION.fullmatch(line)
        if same is not None:
            names[same[1]] = _NAME.sub(numbered, same[2])
            continue
        if "func.func" in line:
            names.clear()
        defined = _DEFINITION.match(line)
        start = 0 if defined is None else defined.end()
        rest = _NAME.sub(numbered, line[start:])  # it may use the old value of the name
        if defined is not None:
            names.pop(defined[1], None)
        lines.append(_NAME.sub(numbered, line[:start]) + rest)
    return "\n".join(lines)
