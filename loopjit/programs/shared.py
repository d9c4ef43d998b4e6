"""Programs of JAX itself: what a loop, or ``jax.jit``, is about to run, and what stands for it.

A program that is about to run is not transformed any more, so what counts is what lowering reads (mode
``"exec"``). Its consts become inputs. They are copied: JAX would have baked their values into the program,
so that nothing changes when somebody donates, deletes or overwrites the array afterwards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from loopjit import compat
from loopjit.memo import LRU
from loopjit.programs.canonical import TRANSFORM_ONLY, RuleKey, captures_nothing
from loopjit.programs.consts import lift
from loopjit.programs.intern import Interner
from loopjit.programs.program import Once


class Home:
    """Where all programs that are one meet.

    Attributes:
      jaxpr: closed, without consts; it stands for all of them. JAX finds the executable by its identity.
      name: under which it is compiled: that of the first function; empty until then.
      once: lets one thread compile it.
    """

    __slots__ = ("__weakref__", "jaxpr", "name", "once")

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.name = ""
        self.once = Once()


class Shared(NamedTuple):
    """A program in the terms of its home.

    Attributes:
      home: what is compiled.
      consts: arrays that ``home.jaxpr`` takes before the arguments: copies that nobody else holds.
      device: on which they are, if there are any.
      found: the home was there before this program.
    """

    home: Home
    consts: tuple[Any, ...]
    device: Any
    found: bool


class _Known:
    """What is remembered of a jaxpr by its identity; it must not be kept alive from here.

    Attributes:
      homes: by context; they give None if the home is gone. Empty if the program cannot be shared.
      consts, device: see `Shared`.
    """

    __slots__ = ("consts", "device", "homes")

    def __init__(self) -> None:
        self.homes: dict[Hashable, Callable[[], Home | None]] = {}
        self.consts: tuple[Any, ...] | None = None
        self.device: Any = None


class Operation:
    """Runs a primitive that holds jaxprs, as JAX does op by op: under a ``jax.jit`` of its own.

    Attributes:
      call: does the work, given the operands.
      params: of the primitive.
      found: it has been used before.
      once: lets one thread compile it.
    """

    __slots__ = ("call", "found", "once", "params")

    def __init__(self, primitive: Any, params: dict[str, Any]):
        def run(*args: Any) -> Any:
            return primitive.bind(*args, **params)

        run.__name__ = run.__qualname__ = primitive.name
        self.params = params
        self.found = False
        self.once = Once()
        jitted: Callable[..., Any] = jax.jit(run)

        def first_call(*args: Any) -> Any:
            out = self.once.call(jitted, *args)
            self.call = jitted
            return out

        self.call = first_call


class Homes:
    """A bounded table of programs.

    Args:
      max_programs: how many are kept at most; what was used longest ago goes first.
      rule_key: see `Canonicalizer`; for callbacks.
      calls_host: whether programs with callbacks are shared. They must not run under one ``jax.jit`` object:
        where the callback runs the same program, JAX would take it for a recursion, or wait for ever.
    """

    def __init__(self, max_programs: int, rule_key: RuleKey, calls_host: bool):
        self._interner = Interner(
            "exec",
            max_entries=max_programs,
            rule_key=rule_key,
            # A callback that captures something is never found again, and keeps alive what it captures.
            accepts=lambda key: (
                (calls_host and all(map(captures_nothing, key.callbacks))) or not key.callbacks
            ),
        )
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # reentrant: see `Interner`

    def __len__(self) -> int:
        return self._interner.info().size

    def limit(self, max_programs: int) -> None:
        """Sets how many programs are kept from now on."""
        self._interner.limit(max_programs)

    def clear(self) -> None:
        """Forgets all programs."""
        with self._lock:
            dropped, self._known = self._known, weakref.WeakKeyDictionary()
        self._interner.clear()
        del dropped  # outside of the lock: this may free objects of the user

    def find(self, jaxpr: Any, place: Callable[[], Any]) -> tuple[Shared | None, bool]:
        """What stands for a program that is about to run, and whether this very object is a new one.

        Args:
          jaxpr: closed.
          place: gives the one device on which it is going to run, or None: asked if there are consts.

        Returns:
          None in the place of the first if the program is to run as it is.
        """
        context = compat.watch.extra()  # what JAX's own keys leave out
        known = self._known.get(jaxpr)
        if known is not None:
            get = known.homes.get(context)
            home = None if get is None else get()
            if home is not None and known.consts is not None:
                return Shared(home, known.consts, known.device, True), False
            if not known.homes:
                return None, False
        shared = self._share(jaxpr, context, known or _Known(), place)
        return shared, known is None

    def _share(
        self, jaxpr: Any, context: Hashable, known: _Known, place: Callable[[], Any]
    ) -> Shared | None:
        with self._lock:
            known = self._known.setdefault(jaxpr, known)
        if compat.is_single_primitive(jaxpr):
            return None
        opened, consts, _ = lift(*compat.open_jaxpr(jaxpr), transformable=False)
        if consts and known.consts is None:
            known.device = place()
            if known.device is None or compat.distributes(opened):
                return None
        canonical = self._interner.intern(opened)
        if canonical is None:
            return None
        if known.consts is None:
            avals = [v.aval for v in opened.invars[: len(consts)]]
            known.consts = compat.copies_of_consts(consts, avals, known.device)
        if known.consts is None:
            return None
        with self._lock:
            home: Home | None = canonical.programs.get(context)
            found = home is not None
            if home is None:
                # The first object itself, so that what JAX makes of it elsewhere (`.lower()`) is the same.
                # In another context one of its own: JAX's keys contain its identity, and not this context.
                own = not consts and not canonical.programs and canonical.jaxpr is opened
                home = Home(jaxpr if own else compat.close_jaxpr_anew(canonical.jaxpr))
                # A callback may wait for the same program in another thread.
                home.once.done = canonical.calls_host
                canonical.programs[context] = home
        known.homes[context] = weakref.ref(home) if home.jaxpr is jaxpr else _always(home)
        return Shared(home, known.consts, known.device, found)


def _always(home: Home) -> Callable[[], Home]:
    return lambda: home


# A loop has two bodies, a branch two or more.
_BODIES_PER_PROGRAM = 4


class Sharing:
    """What stands for the programs of a process.

    Args:
      max_programs: how many programs are kept at most.
      rule_key: see `Canonicalizer`; for callbacks.

    Attributes:
      active: whether JAX asks here.
      programs: of ``jax.jit``.
    """

    def __init__(self, max_programs: int, rule_key: RuleKey):
        self.active = False
        self.programs = Homes(max_programs, rule_key, calls_host=True)
        self._bodies = Homes(_BODIES_PER_PROGRAM * max_programs, rule_key, calls_host=False)
        self._operations: LRU[Hashable, Operation] = LRU(max_programs)

    def __len__(self) -> int:
        # An operation is a program, too, when `jax.jit` is looked at.
        return max(len(self.programs), len(self._operations))

    def limit(self, max_programs: int) -> None:
        """Sets how many programs are kept from now on."""
        self.programs.limit(max_programs)
        self._bodies.limit(_BODIES_PER_PROGRAM * max_programs)
        self._operations.limit(max_programs)

    def clear(self) -> None:
        """Forgets all programs."""
        self.programs.clear()
        self._bodies.clear()
        self._operations.clear()

    def operation(self, primitive: Any, params: dict[str, Any]) -> Operation | None:
        """What runs a primitive called op by op; None if JAX shall do it.

        Args:
          primitive: with jaxprs among its parameters, such as a loop.
          params: its parameters.
        """
        ignored = TRANSFORM_ONLY.get(primitive.name, ())
        try:
            values = {name: self._standing_for(value) for name, value in params.items()}
            counted = [value for name, value in values.items() if name not in ignored]
            # The types, too: 1 and True are equal, and whoever reads them may tell them apart.
            key = (primitive, compat.watch.extra(), *values, *map(type, counted), *counted)
            known = self._operations.get(key)
        except (_ByIdentity, TypeError):
            return None  # a TypeError: what is not hashable JAX cannot remember either
        known = known or self._operations.put(key, Operation(primitive, values))
        return None if known.once.is_called_here() else known

    def _standing_for(self, value: Any) -> Any:
        """A parameter with the jaxprs that stand for those in it."""
        kind = type(value)
        if kind is compat.ClosedJaxpr:
            shared, _ = self._bodies.find(value, _nowhere)
            if shared is None:
                raise _ByIdentity
            return shared.home.jaxpr
        if kind is compat.Jaxpr:
            raise _ByIdentity
        return tuple(map(self._standing_for, value)) if kind is tuple else value


class _ByIdentity(Exception):
    """A jaxpr that nothing stands for."""


def _nowhere() -> None:
    """A body with consts cannot be shared alone."""
