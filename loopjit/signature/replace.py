"""Copies of a function for tracing: tracers stand where captured arrays stood.

Every user function that is reached is copied, also where no array is captured: JAX remembers traces by
the identity of functions (``lax.scan(body, ...)``), and a remembered one may be older than a global that
was changed since.

The walk mirrors ``describe.py`` step by step: the tracers come in the order of ``Description.hidden``.
"""

from __future__ import annotations

import collections
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import tree_util

from loopjit import compat
from loopjit.signature import trust
from loopjit.signature.code import Usage, code_info
from loopjit.signature.describe import KINDS, MISSING, custom_rule_parts, is_blind
from loopjit.signature.kinds import content_of, is_copied, reads_of
from loopjit.signature.plans import ABSENT, COPIED, Plan, Source, plan_of


class Mismatch(Exception):
    """The walk met another number of arrays than the description: the function changed meanwhile."""


class Replacer:
    """Puts ``tracers``, in order, in the place of captured arrays.

    Everything whose identity can be seen (functions, containers, objects, globals) is copied once, so that
    what was one thing is still one thing.

    After the trace, :meth:`untouched` says whether the copies of containers are as they were made. If
    not, the function writes to what it captures, and the copy took the write that the original should
    have seen: trace again with the original.
    """

    def __init__(self, tracers: Iterator[Any] | None):
        self._tracers = tracers  # None: copy functions, but leave the arrays
        self._used = 0
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that the ids above stay theirs
        self._whole: set[int] = set()
        self._methods: set[tuple[int, int]] = set()
        self._snapshots: dict[int, tuple[Any, list[Any]]] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._cells: dict[int, list[types.CellType]] = {}

    def untouched(self) -> bool:
        for container, items in self._snapshots.values():
            now = _items(container)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                return False
        return True

    def value(self, value: Any, usage: Usage = None) -> Any:
        """The copy of a value; the value itself where nothing in it is replaced."""
        replace = REPLACERS.get(type(value))
        if replace is not None:
            return replace(self, value, usage)
        if isinstance(value, (jax.Array, jax.core.Tracer)):
            return value if compat.is_ref(value) else self.on_tracer(value, usage)
        if KINDS.get(type(value)) is None and not trust.is_known(value) and is_copied(type(value)):
            return self.on_object(value, usage)
        return value

    def on_tracer(self, value: Any, usage: Usage) -> Any:
        if self._tracers is None:
            return value
        self._used += 1
        try:
            return next(self._tracers)
        except StopIteration:
            raise Mismatch from None

    def _first(self, value: Any) -> bool:
        """Whether a thing is met for the first time."""
        if id(value) in self._whole:
            return False
        self._whole.add(id(value))
        self._originals.append(value)
        return True

    def once(self, value: Any, make: Callable[[], Any]) -> Any:
        """The one copy of a thing, made when it is first met."""
        if self._first(value):
            self._copies[id(value)] = make()
        return self._copies[id(value)]

    # -- containers -----------------------------------------------------------------------------------

    def on_tuple(self, value: tuple[Any, ...], usage: Usage) -> Any:
        return tuple([self.value(v) for v in value])

    def on_sequence(self, value: Any, usage: Usage) -> Any:
        if self._first(value):
            new: Any = [] if type(value) is list else collections.deque(maxlen=value.maxlen)
            self._copies[id(value)] = new
            if not _only_written(usage):
                new.extend([self.value(v) for v in value])
            self._snapshots[id(new)] = (new, _items(new))
        return self._copies[id(value)]

    def on_set(self, value: Any, usage: Usage) -> Any:
        """Sets keep their order, so they are only copied where an element is."""
        if self._first(value):
            items = list(value)
            new = [self.value(v) for v in items]
            same = all(a is b for a, b in zip(items, new, strict=True))
            self._copies[id(value)] = value if same else type(value)(new)
        return self._copies[id(value)]

    def on_dict(self, value: dict[Any, Any], usage: Usage) -> Any:
        if self._first(value):
            new = self._copies[id(value)] = type(value)()
            for key, item in value.items() if not _only_written(usage) else ():
                new_key = self.value(key)
                new[new_key] = self.value(item)
            self._snapshots[id(new)] = (new, _items(new))
        return self._copies[id(value)]

    def on_object(self, value: Any, usage: Usage) -> Any:
        """An instance of a plain class: one copy of it, if a tracer has to stand in it."""
        if self._tracers is None:
            return value
        used = self._used
        parts: list[tuple[Any, Any]] = []
        reads = None if usage is None else reads_of(value, usage)
        if reads is not None:
            for name, sub, part, is_method in reads:
                if is_method:
                    self._own_method(value, part)
                elif part is not ABSENT:
                    parts.append((name, self.value(part, sub)))
        elif self._first(value):
            parts = [(name, self.value(part)) for name, part in content_of(value)]
        new = self._copies.get(id(value), value)
        if self._used == used:
            return new
        if new is value:
            new = self._copies[id(value)] = _blank(value, parts)
            self._originals.append(value)
        if not isinstance(value, tuple):
            for name, part in parts:
                _set(new, name, part)
            self._snapshots[id(new)] = (new, _items(new))
        return new

    def _own_method(self, value: Any, fn: types.FunctionType) -> None:
        """What a method reads from its instance; the method stands in the class, and is not copied."""
        if (id(value), id(fn)) not in self._methods:
            self._methods.add((id(value), id(fn)))
            self._originals.append(value)
            self.value(value, code_info(fn.__code__).params.get(0))

    # -- callables ------------------------------------------------------------------------------------

    def on_partial(self, value: functools.partial[Any], usage: Usage) -> Any:
        func = self.value(value.func)
        args = [self.value(v) for v in value.args]
        return type(value)(func, *args, **{k: self.value(v) for k, v in value.keywords.items()})

    def on_method(self, value: types.MethodType, usage: Usage) -> Any:
        function = value.__func__
        new = self.value(function)
        first: Usage = None
        if isinstance(function, types.FunctionType):
            first = code_info(function.__code__).params.get(0)
        return types.MethodType(new, self.value(value.__self__, first))

    def on_jitted(self, value: Any, usage: Usage) -> Any:
        options = None if trust.is_known(value) else compat.jit_options(value)
        if options is None:
            return value
        if self._first(value):
            new = self._copies[id(value)] = jax.jit(self.value(value.__wrapped__), **options)
            for name, part in vars(value).items():
                if name not in compat.JIT_ATTRIBUTES:
                    setattr(new, name, part)
        return self._copies[id(value)]

    def on_custom_rule(self, value: Any, usage: Usage) -> Any:
        if trust.is_known(value):
            return value
        if self._first(value):
            new = self._copies[id(value)] = copy.copy(value)
            for name, part in custom_rule_parts(value):
                setattr(new, name, self.value(part))
        return self._copies[id(value)]

    def on_function(self, fn: types.FunctionType, usage: Usage = None) -> Any:
        if trust.is_pure_function(fn):
            return self._library(fn)
        new = self._copy(fn)
        if not self._first(fn):
            return new
        plan = plan_of(fn)
        self._helpers(plan)
        for source in plan.sources:
            if source.replaceable:
                try:
                    value = self.value(source.read(), source.usage)
                except (KeyError, AttributeError, ValueError):
                    continue
                self._put(source, value)
        self._fill(fn, new, plan.frees)
        return new

    def _library(self, fn: types.FunctionType) -> Any:
        if fn.__closure__ is None:
            return fn
        if self._first(fn):
            new = self._copies[id(fn)] = _copy_function(fn, fn.__globals__)
            for old, cell in zip(fn.__closure__, new.__closure__ or (), strict=True):
                content = _content(old)
                if content is not ABSENT:
                    cell.cell_contents = self.value(content)
        return self._copies[id(fn)]

    def _fill(
        self, fn: types.FunctionType, new: types.FunctionType, frees: tuple[Usage, ...]
    ) -> None:
        """What only this function object holds."""
        for old, cell, usage in zip(
            fn.__closure__ or (), new.__closure__ or (), frees, strict=True
        ):
            content = _content(old)
            if content is not ABSENT:
                cell.cell_contents = self.value(content, usage)
        if fn.__defaults__ is not None:
            new.__defaults__ = self.value(fn.__defaults__)
        if fn.__kwdefaults__ is not None:
            new.__kwdefaults__ = self.on_dict(fn.__kwdefaults__, None)

    def _copy(self, fn: types.FunctionType) -> types.FunctionType:
        """The one copy of a function; it holds what the original holds until that is replaced."""
        new = self._copies.get(id(fn))
        if new is None:
            # Globals too: a derivative rule is traced later, and has to see them as they are now.
            new = self._copies[id(fn)] = _copy_function(fn, self._namespace(fn.__globals__))
            self._originals.append(fn)
            for old, cell in zip(fn.__closure__ or (), new.__closure__ or (), strict=True):
                self._cells.setdefault(id(old), []).append(cell)
                content = _content(old)
                if content is not ABSENT:
                    cell.cell_contents = content
        return new

    def _namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        copied = self._namespaces.get(id(original))
        if copied is None:
            copied = self._namespaces[id(original)] = {**original, COPIED: True}
            self._originals.append(original)
        return copied

    def _helpers(self, plan: Plan) -> None:
        """Functions that are reached through globals are copied, so that a helper's helper is the copy."""
        helpers = [(s, fn) for s, fn in plan.helpers if not trust.is_pure_function(fn)]
        for _, fn in helpers:
            self._copy(fn)
        for source, fn in helpers:
            self._put(source, self._copy(fn))

    def _put(self, source: Source, value: Any) -> None:
        """Puts a value where the copies look for it."""
        if source.item:
            self._namespace(source.container)[source.key] = value
        elif isinstance(source.container, types.CellType):
            for cell in self._cells.get(id(source.container), ()):
                cell.cell_contents = value
        elif isinstance(source.container, types.FunctionType):
            setattr(self._copy(source.container), source.key, value)


def _copy_function(fn: types.FunctionType, namespace: dict[str, Any]) -> types.FunctionType:
    """A copy with empty cells of its own."""
    closure = None if fn.__closure__ is None else tuple([types.CellType() for _ in fn.__closure__])
    new = types.FunctionType(fn.__code__, namespace, fn.__name__, fn.__defaults__, closure)
    new.__kwdefaults__ = fn.__kwdefaults__
    new.__qualname__ = fn.__qualname__
    new.__module__ = fn.__module__
    new.__doc__ = fn.__doc__
    if sys.version_info >= (3, 14):  # annotations are computed when asked for
        new.__annotate__ = fn.__annotate__
    else:
        new.__annotations__ = fn.__annotations__
    if fn.__dict__:
        new.__dict__.update(fn.__dict__)
    return new


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _only_written(usage: Usage) -> bool:
    return usage is not None and is_blind(usage)


def _blank(value: Any, parts: list[tuple[Any, Any]]) -> Any:
    """A copy of an instance, made without running code of its class."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [part for _, part in parts])
    new = object.__new__(type(value))
    for name, part in content_of(value):
        _set(new, name, part)
    return new


def _set(instance: Any, name: str, value: Any) -> None:
    """Sets an attribute also where the class forbids it (frozen dataclasses)."""
    if value is MISSING:
        return
    object.__setattr__(instance, name, value)


def _items(container: Any) -> list[Any]:
    if not isinstance(container, (dict, list, collections.deque)):
        container = dict(content_of(container))
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


Replace = Callable[[Replacer, Any, Usage], Any]
REPLACERS: dict[type, Replace] = {
    tuple: Replacer.on_tuple,
    list: Replacer.on_sequence,
    set: Replacer.on_set,
    frozenset: Replacer.on_set,
    collections.deque: Replacer.on_sequence,
    dict: Replacer.on_dict,
    collections.OrderedDict: Replacer.on_dict,
    functools.partial: Replacer.on_partial,
    tree_util.Partial: Replacer.on_partial,
    types.MethodType: Replacer.on_method,
    types.FunctionType: Replacer.on_function,
    compat.PjitFunction: Replacer.on_jitted,
}
for _cls in compat.CUSTOM_RULE_TYPES:
    REPLACERS[_cls] = Replacer.on_custom_rule
if compat.ArrayImpl is not None:
    REPLACERS[compat.ArrayImpl] = Replacer.on_tracer
