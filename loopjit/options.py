"""The options of ``jax.jit``, and what they mean for the arguments as a program takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

from loopjit.programs.program import ProgramOptions
from loopjit.signature.arguments import Direct, Layout
from loopjit.signature.describe import Description, describe


def _both(
    fun: Callable[..., Any] | None, numbers: Any, names: Any
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the same arguments, each found from the other."""
    by_number = _as_tuple(numbers, int)
    by_name = _as_tuple(names, str)
    if not by_number and not by_name:
        return (), ()
    try:
        parameters = list(inspect.signature(fun).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return by_number, by_name
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    keyword = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    count = len(positional)
    all_names = {
        *by_name,
        *(positional[i] for i in by_number if -count <= i < count),
    }
    all_numbers = {*by_number, *(positional.index(n) for n in by_name if n in positional)}
    return tuple(sorted(all_numbers)), tuple(
        sorted(n for n in all_names if n in keyword or n in by_name)
    )


def _from_the_front(fun: Callable[..., Any] | None, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Negative positions, counted from the last positional parameter of the signature."""
    if all(i >= 0 for i in numbers):
        return numbers
    try:
        parameters = inspect.signature(fun).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return tuple(i for i in numbers if i >= 0)
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return tuple(i if i >= 0 else i + count for i in numbers)


def _as_tuple(value: Any, kind: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, kind):
        return (value,)
    return tuple(value)


class Options:
    """The options of one decoration, and what they mean for a layout of arguments.

    Args:
      fun: the decorated function.
      jit: options of ``jax.jit``.
      ours: options that ``jax.jit`` does not have, see :func:`loop_jit`.
    """

    __slots__ = (
        "_donate",
        "_donate_names",
        "_static",
        "_static_names",
        "_traced",
        "_traced_names",
        "jit",
        "key",
        "max_programs",
        "ours",
        "program",
        "shardings",
        "strict",
    )

    def __init__(
        self,
        fun: Callable[..., Any] | None,
        jit: dict[str, Any],
        ours: dict[str, Any] | None = None,
    ):
        self.jit = jit
        self.ours = ours or {}
        self.max_programs: int = self.ours.get("max_programs", 256)
        self.strict: bool = self.ours.get("strict", False)
        jit = dict(jit)
        numbers = _from_the_front(fun, _as_tuple(jit.pop("static_argnums", None), int))
        self._static, self._static_names = _both(fun, numbers, jit.pop("static_argnames", None))
        self._traced, self._traced_names = _both(fun, None, self.ours.get("traced_argnames"))
        numbers = _from_the_front(fun, _as_tuple(jit.pop("donate_argnums", None), int))
        self._donate, self._donate_names = _both(fun, numbers, jit.pop("donate_argnames", None))
        self.shardings = {k: jit.pop(k) for k in ("in_shardings", "out_shardings") if k in jit}
        self.program = jit
        self.key = self._key()

    def _key(self) -> Hashable:
        if not self.jit and not self.ours:
            return None
        d = Description(hoist=False)
        describe({k: self.jit[k] for k in sorted(self.jit)}, None, d)
        return (self.max_programs, self._traced_names, *d.out)

    def contradictions(self) -> tuple[tuple[str, str, str], ...]:
        """Parameters that two options say different things about: the name, and the options."""
        pairs = (
            ("static", self._static_names, "donated", self._donate_names),
            ("static", self._static_names, "in traced_argnames", self._traced_names),
        )
        return tuple(
            (name, one, other)
            for one, names, other, others in pairs
            for name in names
            if name in others
        )

    def explicit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Any]:
        """Which arguments of a call are declared static: positions and names."""
        if not self._static and not self._static_names:
            return set()
        found: set[Any] = {i for i in self._static if 0 <= i < len(args)}
        found.update(name for name in self._static_names if name in kwargs)
        return found

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Any]:
        """Which arguments of a call must not become static: positions and names."""
        return {*self._traced, *self._traced_names}

    def for_layout(
        self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any], offset: int
    ) -> ProgramOptions:
        """The options of ``jax.jit`` for a program that takes the arguments as ``layout`` passes them."""
        jit = dict(self.program)
        if self._donate or self._donate_names:
            which = [i for i in self._donate if 0 <= i < len(args)]
            positions = layout.positions(args, kwargs, which)
            jit["donate_argnums"] = tuple(i + offset for i in positions)
            jit["donate_argnames"] = tuple(n for n in self._donate_names if n in kwargs)
        for name, value in self.shardings.items():
            if name == "in_shardings":
                value = self._in_shardings(value, layout, args, offset)
            jit[name] = value
        key = (self.key, tuple(sorted(jit.get("donate_argnums", ()))))
        return ProgramOptions(key, jit, plain=not self.shardings and "donate_argnums" not in jit)

    @staticmethod
    def _in_shardings(value: Any, layout: Layout, args: tuple[Any, ...], offset: int) -> Any:
        """Those of the inputs: bound values have none, and leaves that became static need none."""
        keep = layout.keep if isinstance(layout, Direct) else tuple(range(len(args)))
        if isinstance(value, (tuple, list)):
            if layout.promoted and len(value) == len(args):
                value = [value[i] for i in keep]
            return (None, *value) if offset else tuple(value)
        return (None, *[value] * len(keep)) if offset else value


PLAIN = Options(None, {})
