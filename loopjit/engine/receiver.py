"""The shortest way of a call with one static object, such as ``self`` of a decorated method."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from loopjit.engine.job import Used
from loopjit.engine.state import Entry, Site
from loopjit.engine.trail import Check, trail_of_argument
from loopjit.engine.warm import many_devices, placed_elsewhere
from loopjit.programs.program import Mismatch
from loopjit.signature.code import Usage

Arrays = tuple[Any, ...]
_MOST_OBJECTS = 1024
_MOST_TRIED = 8


class Receiver:
    """The programs of calls with an object that a trail holds for.

    Attributes:
      check: the trail.
      key: what the description of the object was.
      quick: the program, if all calls so far were alike.
      sites: what was called last, by the types of the other arguments.
    """

    __slots__ = ("check", "key", "quick", "sites")

    def __init__(self, check: Check, key: Hashable):
        self.check = check
        self.key = key
        self.quick: Callable[..., Any] | None = None
        self.sites: dict[Hashable, Site] = {}

    def learn(self, entry: Entry, hidden: Sequence[Any], rest: Arrays) -> None:
        site = self.sites.setdefault(tuple(map(type, rest)), Site())
        site.learn(entry, hidden, rest, {})
        alone = len(self.sites) == 1 and not site.where
        spread = hidden and many_devices()
        self.quick = caller(entry, bool(hidden)) if alone and not spread else None


class Receivers:
    """What is known of objects that were the argument ``at`` of one function.

    A trail holds for whatever object the function would read the same from. So the id of an object is only
    a hint of which trail to try first, and objects that are equal share one.
    """

    __slots__ = ("_at", "_by_id", "_recent")

    def __init__(self, at: int):
        self._at = at
        self._by_id: dict[int, Receiver] = {}
        self._recent: tuple[Receiver, ...] = ()

    def call(self, hidden: Arrays, args: Arrays) -> Any:
        """A call of a function that captures ``hidden``. Raises LookupError where it is not known here."""
        at = self._at
        value = args[at]
        receiver = self._by_id.get(id(value))
        own = None if receiver is None else receiver.check(value)
        if own is None:
            receiver, own = self._search(value)
        if hidden:
            own = (*hidden, *own)
        rest = args[1:] if at == 0 else (*args[:at], *args[at + 1 :])
        quick = receiver.quick  # type: ignore[union-attr]
        if quick is not None:
            return quick(own, *rest) if own else quick(*rest)
        return call_site(receiver.sites[tuple(map(type, rest))], own, rest)  # type: ignore[union-attr]

    def _search(self, value: Any) -> tuple[Receiver, Arrays]:
        for receiver in self._recent:
            own = receiver.check(value)
            if own is not None:
                self._note(value, receiver)
                return receiver, own
        raise LookupError

    def _note(self, value: Any, receiver: Receiver) -> None:
        if len(self._by_id) >= _MOST_OBJECTS:
            self._by_id.clear()
        self._by_id[id(value)] = receiver

    def learn(self, used: Used, value: Any, usage: Usage) -> bool:
        """Remembers what a call ended with; whether a trail was made."""
        split = used.split
        receiver = self._by_id.get(id(value))
        new = receiver is None or receiver.key != split.values or receiver.check(value) is None
        if new:
            check = trail_of_argument(value, usage, split.values, used.state)
            if check is None:
                return False
            receiver = Receiver(check, split.values)
            self._recent = (receiver, *self._recent[: _MOST_TRIED - 1])
            self._note(value, receiver)
        receiver.learn(used.entry, used.hidden, tuple(split.dynamic))  # type: ignore[union-attr]
        return new


def call_site(site: Site, hidden: Arrays, args: Arrays) -> Any:
    """Calls the program that is probably the right one, as :func:`warm.fast_call` does."""
    entry = site.guess(hidden, args, {}) if site.where else site.entry
    if not entry.bound:
        return entry.call(*args)
    if hidden and many_devices() and placed_elsewhere(hidden, args, {}):
        raise Mismatch
    return entry.call((*entry.consts, *hidden), *args)


def caller(entry: Entry, hidden: bool) -> Callable[..., Any]:
    """Calls a program with its consts; where there are captured arrays, they are the first argument."""
    call, consts = entry.call, entry.consts
    if not entry.bound or (hidden and not consts):
        return call
    if hidden:
        return lambda arrays, *args: call((*consts, *arrays), *args)
    return lambda *args: call(consts, *args)
