"""How functions, methods, classes, modules and objects are written down."""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Hashable
from typing import Any

from loopjit import compat
from loopjit.memo import LRU, Same
from loopjit.signature import plans, trust
from loopjit.signature.code import Usage, code_info
from loopjit.signature.describe import (
    EMPTY_CELL,
    KINDS,
    MISSING,
    OBJECT_PARTS,
    Description,
    Live,
    TooLarge,
    describe,
)
from loopjit.signature.plans import ABSENT, TOKENS, Source, Token, class_plan, find_plan, plan_of


def clear() -> None:
    """Forgets all that was computed once: functions are looked at again."""
    plans.clear()
    _JITTED.clear()


def describe_function(fn: types.FunctionType, usage: Usage, d: Description) -> None:
    """A Python function: its plan, then what only this function object holds."""
    plan = find_plan((id(fn.__code__), id(fn.__globals__)))
    if plan is None or not plan.holds():
        if trust.is_pure_function(fn):
            return _describe_library(fn, d)
        plan = plan_of(fn)
    if d.again(fn):
        return
    out = d.out
    out.append(plan.token)
    if fn.__name__ != fn.__code__.co_name:
        out.append(fn.__name__)
    if plan.opaque:
        d.opaque += plan.opaque
    if plan.writes:
        d.writes += plan.writes
    for thing in plan.identities:
        d.number(thing)
    d.uncopied = d.uncopied or plan.uncopied or not d.copied
    d.functions += 1 + len(plan.helpers)
    if plan.sources or plan.helpers:
        d.number(fn.__globals__)
        for source in plan.sources:
            describe_source(source, d)
    if fn.__closure__ is not None:
        _describe_cells(fn.__closure__, plan.frees, d)
    if fn.__defaults__ is not None:
        out.append("defaults")
        describe(fn.__defaults__, None, d)
    if fn.__kwdefaults__ is not None:
        out.append("keywords")
        KINDS[dict](fn.__kwdefaults__, None, d)
    if fn.__dict__:
        describe_attributes(fn.__dict__, d)


def describe_attributes(attributes: dict[str, Any], d: Description) -> None:
    """The attributes of a function, which code that gets hold of it may read."""
    d.out += ("attributes", len(attributes))
    for name, value in attributes.items():
        d.out.append(name)
        if name != "__wrapped__":  # says where a function comes from, not what it does
            describe_pinned(value, None, d)


def _describe_cells(closure: tuple[Any, ...], frees: tuple[Usage, ...], d: Description) -> None:
    for cell, usage in zip(closure, frees, strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            d.out.append(EMPTY_CELL)
            continue
        kind = KINDS.get(type(value))
        if kind is None:
            describe_bounded(value, usage, d)
        else:
            kind(value, usage, d)


# What was too large to be written down, by id: it is not looked into again.
_BLOCKED: LRU[int, Any] = LRU(1024)
_find_blocked = _BLOCKED.peek


def describe_bounded(value: Any, usage: Usage, d: Description) -> None:
    """Writes down a captured value; one that leads too far is opaque, and counts by identity."""
    blocked = _find_blocked(id(value))
    if blocked is not None and blocked() is value:
        d.refuse(value, _too_large(value))
        return
    start, limit, hidden = len(d.out), d.limit, len(d.hidden)
    try:
        describe(value, usage, d)
    except TooLarge:
        try:
            _BLOCKED.replace(id(value), weakref.ref(value))
        except TypeError:
            raise TooLarge from None  # a container: what holds it is opaque
        del d.out[start:], d.hidden[hidden:]
        d.limit = limit
        d.refuse(value, _too_large(value))


def _too_large(value: Any) -> str:
    return f"an object of type {type(value).__qualname__}, which leads to too many others"


def describe_source(source: Source, d: Description) -> None:
    try:
        value = source.read()
    except (KeyError, AttributeError, ValueError):
        d.out.append(MISSING)
        return
    before = d.fix(not source.replaceable)
    describe_bounded(value, source.usage, d)
    d.restore(before)


def describe_pinned(value: Any, usage: Usage, d: Description) -> None:
    """Writes down a value where no tracer can be put: arrays in it count by identity."""
    before = d.fix(True)
    describe(value, usage, d)
    d.restore(before)


def _describe_library(fn: types.FunctionType, d: Description) -> None:
    """A function of a trusted package: by its code; what its closure holds may be the user's."""
    d.out.append(Same(fn.__code__))
    if fn.__closure__ is None or d.again(fn):
        return
    for cell in fn.__closure__:
        try:
            value = cell.cell_contents
        except ValueError:
            d.out.append(EMPTY_CELL)
            continue
        if isinstance(value, types.ModuleType):  # what the library does with it is the library's
            d.out.append(Same(value))
        else:
            describe(value, None, d)


def _describe_method(method: types.MethodType, usage: Usage, d: Description) -> None:
    d.out.append(types.MethodType)
    function = method.__func__
    describe(function, None, d)
    first: Usage = None
    if isinstance(function, types.FunctionType):
        first = code_info(function.__code__).params.get(0)
    describe(method.__self__, first, d)


def _describe_class(cls: type, usage: Usage, d: Description) -> None:
    if trust.is_known(cls) or trust.is_pure_class(cls):
        d.out.append(Same(cls))
        return
    plan = class_plan(cls)
    d.out.append(plan.token)
    d.opaque += plan.opaque
    d.writes += plan.writes
    d.uncopied = d.uncopied or plan.uncopied
    for thing in plan.identities:
        d.number(thing)
    for source in plan.sources:
        describe_source(source, d)


def _describe_enum(value: enum.Enum, usage: Usage, d: Description) -> None:
    _describe_class(type(value), None, d)
    d.out.append(
        value.name if value.name is not None else value.value
    )  # a flag may be made of others


def _describe_object(value: Any, usage: Usage, d: Description) -> None:
    """An instance: by the attributes that are read, or by all of its content and its class."""
    cls = type(value)
    if cls is object:  # a sentinel: its identity is all there is
        d.out.append(Live(value))
        return
    d.changeable = d.changeable or not isinstance(value, tuple)
    before = d.fix(not is_copied(cls))
    d.limit -= OBJECT_PARTS
    reads = None if usage is None else reads_of(value, usage)
    if reads is not None:
        d.number(value)
        for name, sub, part, is_method in reads:
            d.out.append(name)
            if part is ABSENT:
                d.out.append(MISSING)
            elif is_method:
                _describe_own_method(value, part, d)
            else:
                describe(part, sub, d)
    elif not d.again(value):
        reason = _not_plain(cls)
        if reason:
            d.refuse(value, f"an object of type {cls.__module__}.{cls.__qualname__}, {reason}")
        else:
            _describe_class(cls, None, d)
            for name, part in content_of(value):
                d.out.append(name)
                describe(part, None, d)
    d.restore(before)


def is_copied(cls: type) -> bool:
    """Whether instances can be copied for a trace, so that tracers can stand in their attributes."""
    return (
        cls.__new__ is object.__new__
        and not _not_plain(cls)
        and not issubclass(cls, BaseException)
        and "__del__" not in dir(cls)
    ) or (issubclass(cls, tuple) and hasattr(cls, "_fields") and not _not_plain(cls))


def content_of(value: Any) -> list[tuple[Any, Any]]:
    """All that an instance of a plain class holds, by name."""
    out: list[tuple[Any, Any]] = []
    if isinstance(value, tuple):
        out += enumerate(value)
    out += own_attributes(value).items()
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    out.append((name, member.__get__(value)))
                except AttributeError:
                    out.append((name, MISSING))
    return out


def own_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an instance, without running code of its class."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


_HEAP_TYPE = 1 << 9


def _not_plain(cls: type) -> str:
    """Why the content of instances of ``cls`` does not say what they are, or an empty string."""
    if not _is_python_class(cls):
        return "a type that is not written in Python"
    if trust.is_pure_class(cls):
        return "which loopjit does not know"
    for base in cls.__mro__:
        if base is object or base is tuple or _is_python_class(base):
            continue
        return f"a subclass of {base.__name__}"
    return ""


_python_classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_C_PARTS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)


def _is_python_class(cls: type) -> bool:
    """Whether a class was made by a ``class`` statement, so that its attributes are all that it holds."""
    known = _python_classes.get(cls)
    if known is None:
        parts = vars(cls)
        known = bool(cls.__flags__ & _HEAP_TYPE) and "__module__" in parts
        for name, part in parts.items():
            if isinstance(part, _C_PARTS) or (
                isinstance(part, types.GetSetDescriptorType)
                and name not in ("__dict__", "__weakref__")
            ):
                known = False
            if name == "__new__" and isinstance(part, types.BuiltinFunctionType):
                known = False
        _python_classes[cls] = known
    return known


def reads_of(value: Any, usage: dict[str, Usage]) -> list[tuple[str, Usage, Any, bool]] | None:
    """The attributes that are read: (name, usage, value, whether it is a method of the instance).

    None where reading one of them runs code of the user's.
    """
    cls = type(value)
    if _not_plain(cls) or cls.__getattribute__ is not object.__getattribute__:
        return None
    if isinstance(value, tuple):
        return None
    content = own_attributes(value)
    parts: list[tuple[str, Usage, Any, bool]] = []
    for name, sub in usage.items():
        if name in ("__class__", "__dict__"):
            return None
        on_class = _on_class(cls, name)
        if on_class is ABSENT:
            if name not in content and hasattr(cls, "__getattr__"):
                return None
            parts.append((name, sub, content.get(name, ABSENT), False))
        elif isinstance(on_class, types.MemberDescriptorType):
            parts.append((name, sub, getattr(value, name, ABSENT), False))
        elif hasattr(type(on_class), "__set__") or hasattr(type(on_class), "__delete__"):
            return None
        elif name in content:
            parts.append((name, sub, content[name], False))
        elif isinstance(on_class, types.FunctionType):
            parts.append((name, sub, on_class, True))
        elif isinstance(on_class, staticmethod):
            parts.append((name, sub, on_class.__func__, False))
        elif hasattr(type(on_class), "__get__") and type(on_class) is not type:
            return None
        else:
            parts.append((name, sub, on_class, False))
    return parts


def _describe_own_method(value: Any, fn: types.FunctionType, d: Description) -> None:
    """``self.method``: the function, and what the method reads from ``self``."""
    describe_pinned(fn, None, d)  # it stands in the class, which is not copied
    mark = (id(value), id(fn), d.hoist)
    d.out.append(mark in d.methods)
    if mark not in d.methods:
        d.methods |= {mark}
        describe(value, code_info(fn.__code__).params.get(0), d)


def _on_class(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        content = vars(base)
        if name in content:
            return content[name]
    return ABSENT


def _describe_module(value: types.ModuleType, usage: Usage, d: Description) -> None:
    """A module in a variable (a local import): what is read from it."""
    name = value.__name__
    if usage is None:
        return d.refuse(value, f"the module {name}, which is passed on as a value")
    pure = trust.is_pure_module(value)
    d.out.append(Same(value) if pure else name)
    for attribute, sub in usage.items():
        d.out.append(attribute)
        part = vars(value).get(attribute, ABSENT)
        if part is ABSENT or (pure and not trust.is_pure_attribute(value, attribute)):
            d.refuse(value, f"{name}.{attribute}, which is stateful or made when asked")
        elif pure and callable(part):
            d.out.append(Same(part))
        else:
            describe_pinned(part, sub, d)


# By id, with a weak reference: the options of a jitted object do not change.
_JITTED: LRU[int, tuple[Any, Hashable, bool]] = LRU(4096)
_find_jitted = _JITTED.peek


def _jitted_parts(value: Any) -> tuple[Any, Hashable, bool]:
    """A weak reference, a key of the options (None: unknown), and whether the wrapped function counts."""
    parts: tuple[Any, Hashable, bool]
    if trust.is_known(value):
        parts = (weakref.ref(value), Same(value), False)
    else:
        options = compat.jit_options(value)
        if options is None:
            parts = (weakref.ref(value), None, False)
        else:
            d = Description()
            describe(options, None, d)
            key = TOKENS.put(("jit", *d.out), Token()) if d.shareable else None
            parts = (weakref.ref(value), key, True)
    return _JITTED.replace(id(value), parts)


def wrapped_function(value: Any) -> Any:
    """What a jitted object wraps, where that is what decides; None for one that is known by identity."""
    parts = _find_jitted(id(value))
    return value.__wrapped__ if parts is None or parts[2] else None


def is_library(fn: types.FunctionType) -> bool:
    """Whether a function is written down by its code and closure alone."""
    return trust.is_pure_function(fn)


def _describe_jitted(value: Any, usage: Usage, d: Description) -> None:
    """A ``jax.jit`` object: by what it wraps and its options, since a trace sees a fresh copy of it."""
    parts = _find_jitted(id(value))
    if parts is None or parts[0]() is not value:
        parts = _jitted_parts(value)
    if parts[1] is None:
        d.refuse(value, "a jitted function whose options loopjit cannot compare")
        return
    d.out.append(parts[1])
    attributes = {k: v for k, v in vars(value).items() if k not in compat.JIT_ATTRIBUTES}
    if attributes:
        describe_attributes(attributes, d)
    if parts[2] and not d.again(value):
        describe(value.__wrapped__, None, d)


def register_kinds() -> None:
    KINDS[types.FunctionType] = describe_function
    KINDS[types.MethodType] = _describe_method
    KINDS[type] = _describe_class
    KINDS[enum.Enum] = _describe_enum
    KINDS[object] = _describe_object
    KINDS[compat.PjitFunction] = _describe_jitted
    KINDS[types.ModuleType] = _describe_module


register_kinds()
