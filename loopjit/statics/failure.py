"""What an error of JAX says about the leaves whose values were needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import jax
from jax import tree_util

from loopjit import compat
from loopjit.signature.arguments import Leaf, Place
from loopjit.statics.lines import is_users, line_here, line_of

# The parameters of the function that is traced. JAX says in its errors on which of them a value depends.
BOUND, DYNAMIC, KEYWORDS = "loopjit_bound", "loopjit_dynamic", "loopjit_keywords"
_DEPENDS = re.compile(r"depends on the values? of the arguments? ([^\n]*)")
_SEPARATOR = re.compile(r", and |, | and ")


_LIKELY = (
    TypeError,
    IndexError,
    AttributeError,
    AssertionError,
    OverflowError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)
_HINTS = re.compile(r"[Tt]race[rd]|static|concrete|[Dd]ifferentiation")


class Failure(NamedTuple):
    """A value was needed that a tracer does not have.

    Attributes:
      known: whether it was found out which leaves the value depends on; else ``named`` is empty.
      named: those leaves.
      bound: whether it depends on a captured array, too.
      likely: it is an error as tracers cause them.
      guesses: leaves that are likely to be needed, the likeliest first.
      line: of the user's.
      truth: a truth value was needed, as by an ``if``.
    """

    known: bool
    named: frozenset[Place]
    bound: bool
    likely: bool
    guesses: tuple[Place, ...]
    line: str | None
    truth: bool


class Questions:
    """Listens to what is asked of the tracers of one trace.

    Args:
      leaves: those that are traced, in order.
      dynamic: the positional arguments of the traced function.
      keywords: its keyword arguments.
    """

    def __init__(self, leaves: Sequence[Leaf], dynamic: Sequence[Any], keywords: dict[str, Any]):
        self._places = [leaf.place for leaf in leaves]
        self._arguments = (list(dynamic), dict(keywords))
        self._asked_before = compat.times_asked()
        self._code: CodeType | None = None
        self._tracers: dict[int, Place] = {}
        self._asked: list[tuple[set[str], Place | None, str | None, bool, bool]] = []

    def start(self, tracers: Any) -> None:
        """The trace begins. Called by the traced function, with its own arguments."""
        self._code = sys._getframe(1).f_code
        leaves = tree_util.tree_leaves(tracers)
        pairs = zip(leaves, self._places, strict=False)
        self._tracers = {id(t): p for t, p in pairs if isinstance(t, jax.core.Tracer)}

    def __call__(self, subject: Any) -> None:
        """Notes a question."""
        if self._code is None or len(self._asked) > 16:
            return
        names, place = set[str](), None
        if isinstance(subject, BaseException):
            names = _names(str(subject))
        else:
            place = self._tracers.get(id(subject))
        truth = isinstance(subject, jax.errors.TracerBoolConversionError)
        caught = _may_be_caught(self._code)
        self._asked.append((names, place, line_here(self._code), truth, caught))

    def failure(self, error: BaseException) -> Failure:
        """What is known about the error that ended the trace."""
        named, bound = self._named(_names(str(error)))
        if not (named or bound) and self._asked and self._asked[-1][1] is not None:
            named = frozenset([self._asked[-1][1]])  # its text was taken last, for this very error
        return Failure(
            bool(named or bound),
            named,
            bound,
            self._is_likely(error),
            () if named else tuple(dict.fromkeys(self._near(error.__traceback__))),
            None if self._code is None else line_of(error.__traceback__, self._code),
            isinstance(error, jax.errors.TracerBoolConversionError),
        )

    def _is_likely(self, error: BaseException) -> bool:
        """Whether a tracer may be the cause, so that it is worth running the function again."""
        return (
            isinstance(error, _LIKELY)
            or compat.times_asked() != self._asked_before
            or _HINTS.search(str(error)) is not None
        )

    def caught(self) -> list[Failure]:
        """Questions in a trace that went on, though not those that only JAX can have caught."""
        found = []
        for names, place, line, truth, caught in self._asked:
            if not caught:
                continue
            named, bound = self._named(names)
            if place is not None:
                named |= {place}
            if named:
                found.append(Failure(True, named, bound, True, (), line, truth))
        return found

    def _named(self, names: set[str]) -> tuple[frozenset[Place], bool]:
        if not names:
            return frozenset(), False
        dynamic, keywords = self._arguments
        paths, _ = tree_util.tree_flatten_with_path((dynamic, keywords))
        known = {
            (KEYWORDS if path[0].idx else DYNAMIC) + tree_util.keystr(path[1:]): place
            for (path, _), place in zip(paths, self._places, strict=True)
        }
        bound = any(name.startswith(BOUND) for name in names)
        return frozenset(known[name] for name in names if name in known), bound

    def _near(self, traceback: TracebackType | None) -> Iterator[Place]:
        """The leaves that the innermost code that has any of them at hand has at hand."""
        frames = []
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        for frame in reversed(frames):
            if frame.f_code is self._code:
                return
            places = [self._tracers[id(v)] for v in _values(frame) if id(v) in self._tracers]
            if places:
                yield from places
                return


def _may_be_caught(inside: CodeType) -> bool:
    """Whether code of the user's that is running, inside of a function, handles exceptions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not inside:
        if frame.f_code.co_exceptiontable and is_users(frame):
            return True
        frame = frame.f_back
    return False


def _names(message: str) -> set[str]:
    """The parameters that a value depends on, as the message of an error has them."""
    found: set[str] = set()
    for names in _DEPENDS.findall(message):
        found.update(_SEPARATOR.split(names.rstrip(".")))
    return found


def _values(frame: FrameType) -> Iterable[Any]:
    for value in list(frame.f_locals.values()):
        yield value
        if isinstance(value, (tuple, list)):
            yield from value[:64]
        elif type(value) is dict:
            yield from list(value.values())[:64]
