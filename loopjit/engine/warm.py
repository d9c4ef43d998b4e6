"""The path of a warm call: from a function to its program in a few microseconds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import jax
from jax import tree_util

from loopjit import compat
from loopjit.engine.state import SHORTCUTS, STATES, State, describe_roots
from loopjit.programs.program import Mismatch
from loopjit.signature import kinds, plans
from loopjit.signature.arguments import Under, Unreadable, types_key
from loopjit.signature.describe import Description
from loopjit.signature.plans import Plan

_watch = compat.watch
_peek_state = STATES.peek
_find_shortcut = SHORTCUTS.peek
_LONG = "there is no shortcut"
_ABSENT: Any = object()
ArrayImpl = compat.ArrayImpl
PjitFunction = compat.PjitFunction


Guard = tuple[Callable[..., Any], str, Any]
Guards = tuple[Guard, ...]


# What is known of functions: their state (None where there is none, or programs may not be shared), the
# captured arrays that become hidden inputs, and those that count by identity. No named tuple: making one
# costs more than a guard.
Found = tuple[State | None, list[Any], tuple[Any, ...]]


class _Shortcut(NamedTuple):
    """The state of functions that are told apart by code, globals, numbers and arrays in closures.

    Attributes:
      state: shared.
      guards: of the plans of all functions: a lookup, a name, and what has to be there.
      objects: weak references to modules and jitted functions, whose ids are in the key.
      arrays: where globals hold arrays: the place among the hidden arrays, and how to read it.
      plans: keep code and globals alive, whose ids are in the key.
    """

    state: State
    guards: Guards
    objects: tuple[Callable[[], Any], ...]
    arrays: tuple[tuple[int, Callable[..., Any], str], ...]
    plans: tuple[Any, ...]


def find_state(roots: Sequence[Any], options_key: Hashable) -> Found:
    """The shared state of functions that are equal to these, and the arrays these capture (warm calls).

    Most fresh functions capture arrays and numbers and read the names of modules; for those a key is
    made of ids, and the description in full is only made once.
    """
    parts: list[Any] = [options_key]
    hidden: list[Any] = []
    held: list[Any] = []
    for root in roots:
        if type(root) is FunctionType:
            parts += (id(root.__code__), id(root.__globals__))
            closure = root.__closure__
            if closure is not None:
                for cell in closure:
                    try:
                        value = cell.cell_contents
                    except ValueError:
                        return _describe_state(roots, options_key)
                    kind = type(value)
                    if kind is ArrayImpl:
                        hidden.append(value)
                        parts.append(kind)
                    elif (
                        kind is int
                        or kind is str
                        or kind is bool
                        or (kind is float and value > 0.0)
                    ):
                        parts += (kind, value)
                    elif kind is ModuleType or kind is PjitFunction:
                        held.append(value)
                        parts += (kind, id(value))
                    else:
                        return _describe_state(roots, options_key)
            if root.__defaults__ is not None or root.__kwdefaults__ is not None:
                return _describe_state(roots, options_key)
        else:
            held.append(root)
            parts.append(id(root))
    if len(roots) == 2:  # one function twice is not two equal ones
        parts.append(roots[0] is roots[1])
    elif len(roots) > 2:
        ids = [id(root) for root in roots]
        parts.append(tuple([ids.index(one) for one in ids]))
    key = tuple(parts)
    found = _find_shortcut(key)
    if type(found) is not _Shortcut:
        long = _describe_state(roots, options_key)
        state = long[0]
        if found is None and state is not None and not _watch.touched:
            SHORTCUTS.replace(key, _shortcut(roots, state) or _LONG)
        return long
    for get, name, expected in found.guards:
        if get(name, _ABSENT) is not expected:
            SHORTCUTS.discard(key)
            return _describe_state(roots, options_key)
    if held:
        for alive, value in zip(found.objects, held):  # noqa: B905 (as many: the key says so)
            if alive() is not value:
                SHORTCUTS.discard(key)
                return _describe_state(roots, options_key)
    if found.arrays:
        for at, get, name in found.arrays:
            value = get(name)
            if type(value) is not ArrayImpl:
                return _describe_state(roots, options_key)
            hidden.insert(at, value)
    if found.state.private:  # found out since
        return None, [], ()
    return found.state, hidden, ()


def _shortcut(roots: Sequence[Any], state: State) -> _Shortcut | None:
    found: list[Plan] = []
    objects: list[Callable[[], Any]] = []
    arrays: list[tuple[int, Callable[..., Any], str]] = []
    guards: list[Guard] = []
    at = 0
    for root in roots:
        if type(root) is not FunctionType:
            if not _add_jitted(root, objects, found):
                return None
            continue
        plan = None if kinds.is_library(root) else plans.plan_of(root)
        if plan is None or root.__dict__ or plans.COPIED in plan.namespace:
            return None
        for source in plan.sources:
            if not source.item or not source.replaceable or type(source.read()) is not ArrayImpl:
                return None
            arrays.append((at, source.container.get, source.key))
            at += 1
        found.append(plan)
        for cell, usage in zip(root.__closure__ or (), plan.frees, strict=True):
            value = cell.cell_contents
            if type(value) is ArrayImpl:
                at += 1
            elif type(value) is ModuleType:
                objects.append(weakref.ref(value))
                for name in usage or ():
                    part = vars(value).get(name, _ABSENT)
                    if not plans.is_library_attribute(value, name, part):
                        return None
                    guards.append((vars(value).get, name, part))
            elif type(value) is PjitFunction and not _add_jitted(value, objects, found):
                return None
    if any(plan.opaque or plan.writes for plan in found):
        return None
    return _Shortcut(
        state, (*guards_of(found), *guards), tuple(objects), tuple(arrays), tuple(found)
    )


def _add_jitted(value: Any, objects: list[Callable[[], Any]], found: list[Plan]) -> bool:
    """Whether a jitted function can be told by its identity and by what the wrapped function reads."""
    if type(value) is not PjitFunction:
        return False
    objects.append(weakref.ref(value))
    function = kinds.wrapped_function(value)
    if function is None:  # one of JAX's own
        return True
    if type(function) is not FunctionType or kinds.is_library(function) or function.__dict__:
        return False
    held = (function.__closure__, function.__defaults__, function.__kwdefaults__)
    plan = plans.plan_of(function)
    found.append(plan)
    return held == (None, None, None) and not plan.sources and plans.COPIED not in plan.namespace


def guards_of(found: Sequence[Plan]) -> Guards:
    """The guards of some plans, each place once."""
    guards: dict[tuple[int, str], tuple[Callable[..., Any], str, Any]] = {}
    for plan in found:
        for place, name, expected in plan.guards:
            guards[id(place), name] = (place.get, name, expected)
        for owner, name, expected in plan.attributes:
            guards[id(owner), name] = (partial(getattr, owner), name, expected)
    return tuple(guards.values())


def _describe_state(roots: Sequence[Any], options_key: Hashable) -> Found:
    d = describe_roots(roots)
    if d.opaque or d.writes:
        return None, [], ()
    state = _peek_state((options_key, _watch.extra(), *d.out))
    if state is None or state.private or (_watch.touched and compat.bypass()):
        return None, [], ()
    if state.classes and state.returns_others(d.seen or ()):
        return None, [], ()
    return state, d.hidden, d.pinned


def fast_call(found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the program that is probably the right one. Raises :class:`Mismatch` where it is not."""
    state, hidden, pinned = found
    if state is None:
        raise Mismatch
    quick = state.quick
    if quick is not None and not kwargs:
        # No look at the arguments: JAX's dispatch has one, and a program of other avals says so.
        if not quick.bound:
            return quick.call(*args)
        if not (hidden and (_many if _many is not None else many_devices())):
            return quick.call((*quick.consts, *hidden), *args)
    types = tuple(map(type, args)) if not kwargs else types_key(args, kwargs)
    layouts = state.layouts.get(types)
    if layouts is None:
        raise Mismatch
    if layouts[0].counts and not compat.trace_state_is_clean():
        layouts = state.layouts.get(Under(types)) or ()
    site = None
    for layout in layouts:
        for plan in layout.plans:
            if not plan.holds():
                raise Mismatch
        if layout.all_traced:
            site = layout.site
            break
        d = Description(not state.private, state.live)
        try:
            dynamic, keywords = layout.split(args, kwargs, d)
        except Unreadable:
            continue
        if d.hoist and (d.opaque or d.writes):
            raise Mismatch
        site = layout.sites.get(tuple(d.out))
        if site is not None:
            args, kwargs = dynamic, keywords  # type: ignore[assignment]
            hidden = [*hidden, *d.hidden]
            pinned += d.pinned
            break
    if site is None:
        raise Mismatch
    entry = site.guess(hidden, args, kwargs) if site.where else site.entry
    if entry is None:
        raise Mismatch
    if entry.once and not is_concrete(args, kwargs):
        raise Mismatch
    if not entry.bound:
        return entry.call(*args, **kwargs)
    if hidden and many_devices() and placed_elsewhere(hidden, args, kwargs):
        raise Mismatch
    return entry.call(entry.bound_values(hidden, pinned), *args, **kwargs)


_many: bool | None = None


def many_devices() -> bool:
    """Whether this process has several devices; asked late, since asking starts the backends."""
    global _many
    if _many is None:
        _many = jax.device_count() > 1
    return _many


def placed_elsewhere(hidden: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a captured array is committed to devices that the arguments are not on.

    JAX accepts it as a constant, but as an input it would decide where the program runs, or raise.
    """
    committed = _committed_to(hidden)
    if not committed:
        return False
    arguments = _committed_to(tree_util.tree_leaves((args, kwargs)))
    where = arguments[0] if arguments else {compat.default_device()}
    return any(devices != where for devices in committed)


def _committed_to(arrays: Sequence[Any]) -> list[set[Any]]:
    return [
        set(x.sharding.device_set)
        for x in arrays
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
    ]


def is_concrete(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call is outside of every transformation, with arguments that are no tracers."""
    leaves = tree_util.tree_leaves((args, kwargs))
    return compat.trace_state_is_clean() and not any(
        isinstance(leaf, jax.core.Tracer) for leaf in leaves
    )
