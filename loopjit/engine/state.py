"""What is remembered: programs by function, static values and avals; the tables of the process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from jax import tree_util

from loopjit import compat
from loopjit.memo import LRU
from loopjit.programs.program import Program, Tables
from loopjit.programs.shared import Sharing
from loopjit.signature import kinds
from loopjit.signature.arguments import Layout, Promoted, TypesKey
from loopjit.signature.describe import Description, describe
from loopjit.signature.plans import COPIED
from loopjit.signature.trust import is_pure_function
from loopjit.statics.report import LeafInfo


class CacheInfo(NamedTuple):
    """What happened to the calls of the process, or of one function.

    Attributes:
      hits: calls that needed no trace.
      interned: calls that were traced, and whose program was there already: nothing was compiled.
      misses: calls that were traced, and whose program was new.
      currsize: programs that are remembered.
      maxsize: how many are remembered at most.
    """

    hits: int
    interned: int
    misses: int
    currsize: int
    maxsize: int


class Counts:
    """Counters without a lock: a lost increment is not worth one on each call.

    Attributes:
      holds: programs of the function hold on to what it captures or is given, such as the ``self`` of a host
        callback: an equal object in its place is another program.
    """

    __slots__ = ("hits", "holds", "interned", "misses")

    def __init__(self) -> None:
        self.holds = False
        self.reset()

    def reset(self) -> None:
        self.hits = self.interned = self.misses = 0


class Entry(NamedTuple):
    """A program with the consts of one function.

    Attributes:
      call: the jitted callable.
      bound: whether its first argument is a tuple of bound values: consts, then captured arrays.
      consts: arrays that were made while tracing.
      program: what ``call`` belongs to.
      fill: captured arrays among the consts: (place, number among the pinned ones). They are taken from
        each call, so that nothing here keeps them alive.
      once: not to be transformed: derivative and batching rules did not count.
    """

    call: Callable[..., Any]
    bound: bool
    consts: tuple[Any, ...]
    program: Program
    fill: tuple[tuple[int, int], ...] = ()
    once: bool = False

    def bound_values(self, hidden: Sequence[Any], pinned: Sequence[Any]) -> tuple[Any, ...]:
        """What is passed before the arguments."""
        if not self.fill:
            return (*self.consts, *hidden)
        consts = list(self.consts)
        for place, number in self.fill:
            consts[place] = pinned[number]
        return (*consts, *hidden)

    def without(self, pinned: Sequence[Any]) -> Entry:
        """The same entry, with the captured arrays among its consts left out."""
        where = {id(array): number for number, array in enumerate(pinned)}
        fill = [(i, where[id(c)]) for i, c in enumerate(self.consts) if id(c) in where]
        if not fill:
            return self
        consts = list(self.consts)
        for place, _ in fill:
            consts[place] = None
        return self._replace(consts=tuple(consts), fill=tuple(fill))


class Site:
    """What was called last from one place, and, where calls differ in avals, how to tell them apart.

    Attributes:
      entry: the program that was used last.
      where: the leaves that tell calls apart; empty as long as all calls were alike.
      hints: the program to try, by what is seen there.
    """

    __slots__ = ("entry", "hints", "where")

    def __init__(self) -> None:
        self.entry: Any = None
        self.where: tuple[int, ...] = ()
        self.hints: dict[Hashable, Entry] = {}

    def guess(self, hidden: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The entry to try first. A wrong guess costs time, never a wrong program."""
        return self.hints.get(self._seen(hidden, args, kwargs), self.entry)

    def _seen(self, hidden: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
        leaves = tree_util.tree_leaves((hidden, args, kwargs))
        if self.where[-1] >= len(leaves):
            return len(leaves)
        return tuple([_glance(leaves[i]) for i in self.where])

    def learn(
        self, entry: Entry, hidden: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Notes that ``entry`` is the one for these arguments."""
        previous = self.entry
        if previous is not None and previous is not entry:
            pairs = zip(_argument_avals(previous), _argument_avals(entry), strict=False)
            differs = [i for i, (a, b) in enumerate(pairs) if a != b][:1]
            where = tuple(sorted({*self.where, *differs}))
            if where != self.where or len(self.hints) > 1024:
                self.where, self.hints = where, {}
        if self.where:
            self.hints[self._seen(hidden, args, kwargs)] = entry
        self.entry = entry


def _argument_avals(entry: Entry) -> list[Any]:
    return entry.program.avals[len(entry.consts) :]


def _glance(leaf: Any) -> Hashable:
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval
    return (type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None))


class State:
    """What is known of all functions that are equal (or, when it is private, of one).

    Attributes:
      layouts: by the types of the arguments; several where static values decide what else is static, the
        one that was used last first.
      sites: by those types and the static values.
      programs: by those, avals and context.
      private: programs of equal functions may not be shared.
      live: what has an identity counts by it.
      writes: a trace writes to what the function captures: it must see the originals.
      needs: leaves that must be static, by the types and trees of the arguments, what is static already,
        and the context; so a flag is known before it is asked what is needed where it is set.
      leaves: what became of each leaf, by its path.
      values: the values that static leaves had in programs, by their paths.
      warned: of what was warned.
      quick: the program that was used last, if all calls so far were alike and every argument is traced.
      classes: classes of the user's that results are made of. A function that captures another class, even
        an equal one, returns other results.
    """

    __slots__ = (
        "classes",
        "layouts",
        "leaves",
        "live",
        "lock",
        "needs",
        "private",
        "programs",
        "quick",
        "sites",
        "values",
        "warned",
        "writes",
    )

    def __init__(self, max_programs: int) -> None:
        self.layouts: dict[TypesKey, tuple[Layout, ...]] = {}
        self.sites: dict[Hashable, Site] = {}
        self.programs: LRU[Hashable, Entry] = LRU(max_programs)
        self.lock = threading.Lock()
        self.private = False
        self.live = False
        self.writes = False
        self.classes: tuple[type, ...] = ()
        self.needs: LRU[Hashable, Promoted] = LRU(1024)
        self.leaves: dict[str, LeafInfo] = {}
        self.values: dict[str, set[Hashable]] = {}
        self.warned: set[Hashable] = set()
        self.quick: Entry | None = None

    def returns_others(self, seen: Container[int]) -> bool:
        """Whether results are made of classes that are not among those that were seen."""
        return any(id(cls) not in seen for cls in self.classes)

    def site(self, types: TypesKey, statics: Hashable) -> Site:
        key = (types, statics)
        return self.sites.get(key) or self.sites.setdefault(key, Site())

    def add(self, key: Hashable, entry: Entry) -> None:
        """Remembers a program; when that pushes out another, nothing may hold on to it."""
        evicted = self.programs.evicted
        self.programs.put(key, entry)
        if self.programs.evicted != evicted:
            self.clear_sites()

    def adopt(self, other: State) -> None:
        """Takes over what is known of a function that has changed since in a way that does not count."""
        for key, entry in other.programs.items():
            self.programs.put(key, entry)
        self.sites = {**other.sites, **self.sites}
        self.layouts = {**other.layouts, **self.layouts}
        for point, places in other.needs.items():
            self.needs.put(point, places)
        for path, info in other.leaves.items():
            self.leaves.setdefault(path, info)
        self.values.update(other.values)
        self.warned |= other.warned

    def clear_sites(self) -> None:
        self.quick = None
        self.layouts.clear()
        self.sites.clear()


class Signature(NamedTuple):
    """Functions as they are now.

    Attributes:
      key: equal keys mean equal functions; the values of hidden arrays do not count.
      hidden: captured arrays that become hidden inputs, in order.
      pinned: captured arrays that count by identity, in order.
      reasons: why the programs may not be shared; empty if they may.
      uncopied: functions are reached that are not copied for a trace.
      helpers: functions are reached beside these.
      changeable: something is captured that may change later and is not copied.
      seen: ids of what is captured and can be told by its identity.
      writes: the functions write to what they capture.
    """

    key: Hashable
    hidden: list[Any]
    pinned: tuple[Any, ...]
    reasons: tuple[str, ...]
    writes: bool
    uncopied: bool
    helpers: bool
    changeable: bool
    seen: frozenset[int]


def describe_roots(roots: Sequence[Any], hoist: bool = True, live: bool = False) -> Description:
    """Writes down functions; what is nested too deeply is not understood."""
    d = Description(hoist, live)
    try:
        for root in roots:
            describe(root, None, d)
    except RecursionError:
        d.opaque += ("something that is nested too deeply",)
    return d


def signature_of(
    roots: Sequence[Any], options_key: Hashable, hoist: bool = True, live: bool = False
) -> Signature:
    """Writes down functions with all that they capture.

    Args:
      roots: the functions.
      options_key: what else tells programs apart.
      hoist: whether captured arrays become hidden inputs; else they count by identity and content.
      live: whether everything that has an identity counts by it.
    """
    d = describe_roots(roots, hoist, live)
    key = (options_key, compat.watch.extra(), *d.out)
    return Signature(
        key,
        d.hidden,
        d.pinned,
        d.reasons(),
        bool(d.writes),
        d.uncopied,
        d.functions > len(roots),
        d.changeable,
        frozenset(d.seen or ()),
    )


def holds_any(jaxpr: Any, things: Container[int]) -> bool:
    """Whether a host callback of a program leads to some of the things with these ids.

    What cannot be looked into may.
    """
    for callback in compat.callbacks_of(jaxpr):
        if callback is None:
            return True
        d = describe_roots([callback], hoist=False)
        seen = d.seen or {}
        if d.opaque or any(at in things and _is_thing(value) for at, (_, value) in seen.items()):
            return True
    return False


def _is_thing(value: Any) -> bool:
    """Not a function, a class or their globals, of which there is one as long as the function is one."""
    if type(value) is dict:
        return "__builtins__" not in value
    return not isinstance(value, (FunctionType, type))


def _rule_key(function: Callable[..., Any]) -> Hashable | None:
    """Derivative rules by what they are, where that is understood completely and cannot change.

    A rule is traced later, when globals may have changed. Functions that were copied for a trace read
    from copied globals, which nobody changes.
    """
    if type(function) is not FunctionType:
        return None
    if COPIED not in function.__globals__ and not is_pure_function(function):
        return None
    d = describe_roots([function], hoist=False)
    return tuple(d.out) if d.shareable and not d.pinned and not d.changeable else None


STATES: LRU[Hashable, State] = LRU(4096)
SHORTCUTS: LRU[Hashable, Any] = LRU(4096)
"""Of ``warm.py``; here so that all is cleared in one place."""
TABLES = Tables(_rule_key)
MAX_SHARED = 512
SHARED = Sharing(MAX_SHARED, _rule_key)
"""Programs of JAX itself, see ``loopjit.install``."""
COUNTS = Counts()
LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects with a ``hits`` of their own, which they add to ``COUNTS`` in the end."""


def cache_clear() -> None:
    """Forgets all signatures and programs: whatever is called next is traced and compiled again.

    Example:
      >>> import loopjit
      >>> loopjit.cache_clear()
    """
    compat.watch.renew()
    STATES.clear()
    SHORTCUTS.clear()
    TABLES.clear()
    SHARED.clear()
    kinds.clear()
    COUNTS.reset()
    for live in list(LIVE):
        live.hits = 0


def cache_info() -> CacheInfo:
    """Counts of the whole process, in the manner of :func:`functools.lru_cache`.

    Example:
      >>> import loopjit
      >>> loopjit.cache_clear()
      >>> loopjit.cache_info()
      CacheInfo(hits=0, interned=0, misses=0, currsize=0, maxsize=4096)
    """
    full, exact = TABLES.full.info(), TABLES.exec.info()
    hits = COUNTS.hits + sum([live.hits for live in list(LIVE)])
    size = full.size + exact.size + len(SHARED)
    return CacheInfo(hits, COUNTS.interned, COUNTS.misses, size, full.max_entries)


compat.clear_with_jax(cache_clear)
compat.watch.listeners.append(SHORTCUTS.clear)
