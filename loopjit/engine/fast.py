"""The shortest way of a call: a trail says that nothing has changed, and the program is at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any

from loopjit import compat
from loopjit.engine.job import Job
from loopjit.engine.receiver import Arrays, Receivers, call_site, caller
from loopjit.engine.state import COUNTS, LIVE, Entry, Site, State
from loopjit.engine.trail import Check, stale
from loopjit.engine.warm import many_devices
from loopjit.signature.arguments import Direct, Under
from loopjit.statics.calls import Parameters, is_default

_EXACT = frozenset({str, bytes, int, bool})
_MOST_VALUES = 512


class Fast:
    """What calls of one function object ended with.

    Attributes:
      check: gives the captured arrays, or None where something that the function captures has changed.
      state: whose programs these are; shared: with equal functions.
      required: how many parameters come before those with defaults, which might be given as they are; a
        large number if there are none.
      quick: the program, if all calls so far were alike and every argument is traced. Like those of
        ``by_value`` it takes the captured arrays first, if there are any.
      static: the position of the only static argument, in all calls so far.
      by_value: the program for each type and value of it, called without it, if calls with this value
        were alike.
      entries: what was called first for each of them.
      several: where several arguments are static, by the number of arguments.
      receivers: the programs for objects that were the only static argument.
      sites: what was called last, by the types of the arguments, where calls differ in them or in avals.
      ways: by the types of the arguments, whether all of them were traced; None if only in some calls.
      numbers: there are Python ints or bools, which a call within a trace or a transformation may want.
      hits: calls that went this way.
    """

    __slots__ = (
        "__weakref__",
        "_defaults",
        "_names",
        "_spellings",
        "by_value",
        "check",
        "entries",
        "hits",
        "numbers",
        "quick",
        "receivers",
        "required",
        "several",
        "shared",
        "sites",
        "state",
        "static",
        "ways",
    )

    def __init__(
        self,
        check: Check,
        state: State,
        shared: bool,
        parameters: Parameters,
        defaults: tuple[Any, ...] | None,
    ):
        self.hits = 0
        LIVE.add(self)
        self.check = check
        self.state = state
        self.shared = shared
        self._names = parameters.names
        self._defaults = defaults or ()
        self.required = len(self._names) - len(self._defaults) if defaults else sys.maxsize
        self._spellings: set[tuple[Any, ...]] = set()
        self.quick: Callable[..., Any] | None = None
        self.static: int | None = None
        self.numbers = False
        self.by_value: dict[type, dict[Any, Callable[..., Any]]] = {}
        self.several: dict[int, _Several] = {}
        self.receivers: Receivers | None = None
        self.entries: dict[Hashable, Entry] = {}
        self.sites: dict[Hashable, Site] = {}
        self.ways: dict[Hashable, bool | None] = {}

    def __del__(self) -> None:
        COUNTS.hits += self.hits

    def forget(self) -> None:
        self.check = stale

    def spell(self, args: Arrays, kwargs: dict[str, Any]) -> Arrays:
        """The arguments by position, without defaults. Raises KeyError for a spelling that is new."""
        if kwargs:
            if (len(args), *kwargs) not in self._spellings:
                raise KeyError
            args = (*args, *[kwargs[name] for name in self._names[len(args) :] if name in kwargs])
        first = self.required
        for at in range(len(args) - 1, first - 1, -1):
            if is_default(args[at], self._defaults[at - first]):
                if at < len(args) - 1:  # one in the middle
                    raise KeyError
                args = args[:at]
        return args

    def knows(self, args: Arrays, kwargs: dict[str, Any]) -> None:
        """This spelling stands for positional arguments alone."""
        # (A name may have been left out because it is given its default: next time it may not be.)
        names = self._names[len(args) : len(args) + len(kwargs)]
        if kwargs and kwargs.keys() == set(names):
            self._spellings.add((len(args), *kwargs))

    def call(self, hidden: Arrays, args: Arrays) -> Any:
        """A call with arguments of several kinds. Raises LookupError where it is not known here."""
        several = self.several.get(len(args))
        if several is not None:
            return several.call(hidden, args)
        site = self.sites.get(tuple(map(type, args)))
        if site is None:
            if self.receivers is None:
                raise LookupError
            return self.receivers.call(hidden, args)
        if hidden:
            return call_site(site, hidden, args)
        entry = site.guess((), args, {}) if site.where else site.entry
        return entry.call(entry.consts, *args) if entry.bound else entry.call(*args)

    def learn(self, job: Job) -> bool:
        """Remembers what a call ended with; whether it was one with a new object."""
        used = job.used
        layout, entry = used.split.layout, used.entry
        under = isinstance(used.split.types, Under)
        if under or job.call.kwargs or layout.plans or entry.fill or entry.once:
            return False
        self.numbers = self.numbers or layout.numbers or entry.program.takes_numbers
        spread = bool(used.hidden) and many_devices()
        call = caller(entry, bool(used.hidden))
        types = used.split.types
        if self.ways.setdefault(types, layout.all_traced) is not layout.all_traced:
            # Once traced and once not: a guess would be wrong too often, which takes long to find out.
            self.ways[types] = None
        if self.ways[types] is None:
            self.sites.pop(types, None)
            self.quick = None
        if layout.all_traced:
            if self.ways[types] is None:
                return False
            site = self.sites.setdefault(used.split.types, Site())
            site.learn(entry, used.hidden, used.split.dynamic, {})
            alone = len(self.sites) == len(self.ways) == 1 and not site.where
            alone = alone and self.static is None and not self.several
            self.quick = call if alone and not spread else None
        elif not isinstance(layout, Direct) or layout.static_names:
            return False
        elif len(layout.static) > 1:
            self.quick = None
            values = [job.call.args[at] for at in layout.static]
            if self.static is None and not spread and all(map(_is_exact, values)):
                count = len(job.call.args)
                several = self.several.setdefault(count, _Several(layout))
                several.learn(layout, values, entry, call)
        else:
            [static] = layout.static
            self.quick = None
            value = job.call.args[static]
            if self.static not in (None, static) or self.several:
                return False
            if _is_exact(value):
                if not spread:
                    self.static = static
                    calls = self.by_value.setdefault(type(value), {})
                    _learn(calls, value, self.entries, entry, call)
            elif self.shared and not layout.promoted:
                # (A program of one function may hold the object itself.)
                if self.receivers is None:
                    self.receivers = Receivers(static)
                self.static = static
                usage = (job.target.usages or {}).get(static)
                return self.receivers.learn(used, value, usage)
        return False


class _Several:
    """The programs of calls with several static arguments, by their types and values."""

    __slots__ = ("_calls", "_entries", "_keep", "_pick", "_static")

    def __init__(self, layout: Direct):
        self._static = layout.static
        self._pick: Callable[[Arrays], Arrays] = itemgetter(*layout.static)
        self._keep = layout.keep
        self._calls: dict[tuple[type, ...], dict[Arrays, Callable[..., Any]]] = {}
        self._entries: dict[Hashable, Entry] = {}

    def call(self, hidden: Arrays, args: Arrays) -> Any:
        values = self._pick(args)
        call = self._calls[tuple(map(type, values))][values]
        rest = [args[at] for at in self._keep]
        return call(hidden, *rest) if hidden else call(*rest)

    def learn(
        self, layout: Direct, values: list[Any], entry: Entry, call: Callable[..., Any]
    ) -> None:
        if layout.static == self._static:
            calls = self._calls.setdefault(tuple(map(type, values)), {})
            _learn(calls, tuple(values), self._entries, entry, call)


def _learn(
    calls: dict[Any, Callable[..., Any]],
    value: Any,
    entries: dict[Hashable, Entry],
    entry: Entry,
    call: Callable[..., Any],
) -> None:
    if len(calls) > _MOST_VALUES:
        calls.clear()
        entries.clear()
    key = (id(calls), value)  # a dict for each type
    if entries.setdefault(key, entry) is entry:
        calls[value] = call
    else:  # calls with this value differ in avals
        calls.pop(value, None)


def _is_exact(value: Any) -> bool:
    """Whether a value is a key that nothing else equals, but for its type: no 0.0, and no NaN."""
    kind = type(value)
    return kind in _EXACT or (kind is float and value == value and value != 0.0)


def _forget_all() -> None:
    for fast in list(LIVE):
        fast.forget()


compat.watch.listeners.append(_forget_all)
