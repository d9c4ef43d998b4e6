"""What a function reads from its module, computed once per (code, globals) and checked by identity.

Most of what a function captures are globals: modules, helper functions, constants. That part is the same
for every fresh lambda with the same code, so it is written down once, as a *plan*:

- ``token``: stands for the description of everything that does not change under its identity;
- ``guards``: where it was found, and what stood there (checked with ``is`` at each call);
- ``sources``: where values stand that do change under one identity, or that become hidden inputs
  (arrays, lists, settings objects): they are looked at again at each call.

A plan whose guards fail is made anew. Classes have plans too: what their methods and attributes are.
"""

from __future__ import annotations

import abc
import enum
import types
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from loopjit import compat
from loopjit.memo import LRU, Same
from loopjit.signature import trust
from loopjit.signature.code import Usage, code_info, merge
from loopjit.signature.describe import (
    EMPTY_CELL,
    MISSING,
    Description,
    Live,
    describe,
)

ABSENT: Any = object()
_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), range, type(Ellipsis))
_MAX_FUNCTIONS = 400


COPIED = "__loopjit_copied__"
"""Marks globals that were copied for one trace."""


class Token:
    """Stands for one description; equal descriptions have the same token."""

    __slots__ = ()


TOKENS: LRU[Hashable, Token] = LRU(16384)


class Source(NamedTuple):
    """A place to look at again at each call: ``container[key]``, or an attribute when ``item`` is false.

    Attributes:
      replaceable: whether a trace may see another value there (see ``replace.py``).
    """

    item: bool
    container: Any
    key: Any
    usage: Usage
    replaceable: bool

    def read(self) -> Any:
        if self.item:
            return self.container[self.key]
        return getattr(self.container, self.key)


class Plan:
    """See the module's docstring.

    Attributes:
      helpers: the user's functions that were reached through globals, and where: they are copied
        together with the function (see ``replace.py``).
      identities: functions, classes and globals whose identity can be seen.
      uncopied: functions of the user are reached that are not copied.
    """

    __slots__ = (
        "attributes",
        "code",
        "frees",
        "guards",
        "helpers",
        "identities",
        "namespace",
        "opaque",
        "sources",
        "token",
        "uncopied",
        "writes",
    )

    def __init__(self, code: types.CodeType | None, namespace: Mapping[str, Any]):
        self.code = code
        self.namespace = namespace
        self.guards: tuple[tuple[Mapping[str, Any], str, Any], ...] = ()
        self.attributes: tuple[tuple[Any, str, Any], ...] = ()
        self.sources: tuple[Source, ...] = ()
        self.helpers: tuple[tuple[Source, types.FunctionType], ...] = ()
        self.frees: tuple[Usage, ...] = ()
        self.opaque: tuple[str, ...] = ()
        self.writes: tuple[str, ...] = ()
        self.identities: tuple[Any, ...] = ()
        self.uncopied = False
        self.token: Hashable = None

    def holds(self) -> bool:
        """Whether everything still stands where it stood."""
        for place, name, expected in self.guards:
            if place.get(name, ABSENT) is not expected:
                return False
        for owner, name, expected in self.attributes:
            if getattr(owner, name, ABSENT) is not expected:
                return False
        return True


_FUNCTIONS: LRU[tuple[int, int], Plan] = LRU(1024)
_CLASSES: LRU[int, Plan] = LRU(1024)
find_plan = _FUNCTIONS.peek


def clear() -> None:
    """Forgets all plans and tokens (functions traced so far are traced again)."""
    for table in (_FUNCTIONS, _CLASSES, TOKENS):
        table.clear()


def plan_of(fn: types.FunctionType) -> Plan:
    """The plan of a function's code in its globals."""
    key = (id(fn.__code__), id(fn.__globals__))
    plan = _FUNCTIONS.get(key)
    if plan is None or not plan.holds():
        builder = _Builder(fn.__code__, fn.__globals__)
        builder.code(fn.__code__, fn.__globals__)
        plan = builder.finish()
        # The plan keeps code and globals alive, so that their ids are not used again; but not globals
        # that were copied for one trace.
        if COPIED not in fn.__globals__:
            _FUNCTIONS.replace(key, plan)
    return plan


def class_plan(cls: type) -> Plan:
    """The plan of a user's class: its methods and attributes along the whole MRO."""
    plan = _CLASSES.get(id(cls))
    if plan is None or not plan.holds():
        builder = _Builder(None, cls.__dict__)
        builder.whole_class(cls)
        plan = _CLASSES.replace(id(cls), builder.finish(keep=cls))
    return plan


class _Builder:
    """Writes down what code reads from globals, functions and classes alike."""

    def __init__(self, code: types.CodeType | None, namespace: Mapping[str, Any]):
        self._plan = Plan(code, namespace)
        self._out: list[Any] = []
        self._guards: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._sources: list[Source] = []
        self._places: dict[tuple[int, Any], int] = {}
        self._helpers: list[tuple[Source, types.FunctionType]] = []
        self._opaque: list[str] = []
        self._writes: list[str] = []
        self._functions: dict[tuple[int, int, int], int] = {}
        self._classes: dict[int, int] = {}
        self._identities: dict[int, Any] = {}
        self._uncopied = False
        self._functions_seen: dict[tuple[int, bool], int] = {}

    def finish(self, keep: object = None) -> Plan:
        plan = self._plan
        plan.guards = tuple(self._guards.values())
        plan.attributes = tuple(self._attributes.values())
        plan.sources = tuple(self._sources)
        plan.helpers = tuple(self._helpers)
        plan.identities = tuple(self._identities.values())
        plan.uncopied = self._uncopied
        plan.opaque = tuple(self._opaque)
        plan.writes = tuple(self._writes)
        if plan.code is not None:
            plan.frees = code_info(plan.code).frees
        if keep is not None:
            plan.attributes += ((keep, "__mro__", keep.__mro__),)  # type: ignore[attr-defined]
        plan.token = TOKENS.put(tuple(self._out), Token())
        return plan

    # -- code -----------------------------------------------------------------------------------------

    def code(
        self, code: types.CodeType, namespace: dict[str, Any], replaceable: bool = True
    ) -> None:
        """Everything that ``code`` reads when its globals are ``namespace``."""
        key = (id(code), id(namespace), replaceable)
        number = self._functions.get(key)
        if number is not None:
            self._out += ("function again", number)
            return
        self._functions[key] = len(self._functions)
        self._uncopied = self._uncopied or not replaceable
        self._identities[id(namespace)] = namespace
        info = code_info(code)
        self._out.append(info.key)
        if info.introspects:
            self._opaque.append(f"{code.co_name}, which looks at where functions come from")
        if len(self._functions) > _MAX_FUNCTIONS:
            self._opaque.append(f"more than {_MAX_FUNCTIONS} helper functions")
            return
        self._writes += info.writes
        for name in info.imports:
            if not trust.is_pure_import(name):
                self._opaque.append(f"the import of {name} inside of {code.co_name}")
        found = namespace.get("__builtins__", {})
        builtins = found if isinstance(found, dict) else vars(found)
        for name, usage in info.reads.items():
            self._out.append(name)
            if name in namespace:
                self._value(Source(True, namespace, name, usage, replaceable))
                continue
            self._guard(namespace, name, ABSENT)
            value = builtins.get(name, ABSENT)
            self._guard(builtins, name, value)
            if value is ABSENT:
                self._out.append(MISSING)
            elif trust.is_pure_builtin(name, value):
                self._out.append(Same(value))
            else:
                self._opaque.append(f"{name}(), called in {code.co_name}")
                if name in _REFLECTIVE:  # may write to variables that no analysis sees
                    self._writes.append(f"{name}()")

    def _guard(self, place: Mapping[str, Any], name: str, expected: Any) -> None:
        self._guards[(id(place), name)] = (place, name, expected)

    def _watch(self, owner: Any, name: str) -> Any:
        value = getattr(owner, name, ABSENT)
        self._attributes[(id(owner), name)] = (owner, name, value)
        return value

    # -- values ---------------------------------------------------------------------------------------

    def _value(self, source: Source) -> None:
        try:
            value = source.read()
        except ValueError:  # an empty cell: a local function that is not defined yet
            self._out.append(EMPTY_CELL)
            self._sources.append(source)
            return
        kind = type(value)
        if kind in _IMMUTABLE or (kind is tuple and all(type(v) in _IMMUTABLE for v in value)):
            self._stands(source, value)
            self._write_down(value, source.usage)
        elif isinstance(value, types.ModuleType):
            self._stands(source, value)
            self._module(value, source)
        elif trust.is_known(value) or (
            kind is types.BuiltinFunctionType and trust.is_pure_c_function(value)
        ):
            self._stands(source, value)
            self._out.append(Same(value))
        elif kind is types.FunctionType:
            self._stands(source, value)
            self._function(value, source)
        elif isinstance(value, type):
            self._stands(source, value)
            if not self._class_reads(value, source.usage):
                self._class(value)
        else:
            self._dynamic(source)

    def _write_down(self, value: object, usage: Usage) -> None:
        d = Description()
        describe(value, usage, d)
        self._out += d.out

    def _stands(self, source: Source, value: Any) -> None:
        """Guards the place: the same object must stand there."""
        if source.item:
            self._guard(source.container, source.key, value)
        else:
            self._watch(source.container, source.key)

    def _dynamic(self, source: Source) -> None:
        """To be looked at again at each call; each place once, so that what shares a place shares it."""
        place = (id(source.container), source.key)
        number = self._places.get(place)
        if number is None:
            number = self._places[place] = len(self._sources)
            self._sources.append(source)
        else:
            old = self._sources[number]
            if old.usage != source.usage or old.replaceable != source.replaceable:
                self._sources[number] = old._replace(
                    usage=merge(old.usage, source.usage),
                    replaceable=old.replaceable and source.replaceable,
                )
        self._out += ("source", number)

    def _module(self, module: types.ModuleType, source: Source) -> None:
        pure = trust.is_pure_module(module)
        self._out.append(Same(module) if pure else module.__name__)
        if source.usage is None:
            self._opaque.append(f"the module {module.__name__}, which is passed on as a value")
            return
        content = vars(module)
        for name, usage in source.usage.items():
            self._out.append(name)
            if name not in content:
                value = (
                    getattr(module, name, ABSENT) if pure else ABSENT
                )  # a lazy attribute of JAX's
                if value is ABSENT or not trust.is_pure_attribute(module, name):
                    self._opaque.append(
                        f"{module.__name__}.{name}, which the module makes when asked"
                    )
                else:
                    self._out.append(Same(value))
                continue
            value = content[name]
            if pure and not trust.is_pure_attribute(module, name):
                self._guard(content, name, value)
                self._opaque.append(f"{module.__name__}.{name}, which is stateful")
            elif pure and _is_library(value):
                self._guard(content, name, value)
                self._out.append(Same(value))
            else:
                self._value(Source(True, content, name, usage, False))

    # -- functions ------------------------------------------------------------------------------------

    def _function(self, fn: types.FunctionType, source: Source) -> None:
        if fn.__dict__.get("__loopjit_opaque__"):
            self._opaque.append(f"{fn.__qualname__}, which is marked as opaque")
        self._identities[id(fn)] = fn
        key = (id(fn), source.replaceable)
        if source.replaceable:
            self._helpers.append((source, fn))
        if key in self._functions_seen:
            self._out += ("helper again", self._functions_seen[key])
            return
        self._functions_seen[key] = len(self._functions_seen)
        if trust.is_pure_function(fn):
            self._out += ("library", Same(fn.__code__))
        else:
            # `%autoreload` and others change functions in place.
            self._attributes[(id(fn), "unchanged")] = (Unchanged(fn), "unchanged", True)
            self._out.append(fn.__name__)
            for name in fn.__dict__:
                if name != "__wrapped__":  # says where a function comes from, not what it does
                    self._out.append(name)
                    self._value(Source(True, fn.__dict__, name, None, False))
            self.code(fn.__code__, fn.__globals__, source.replaceable)
        usages = code_info(fn.__code__).frees
        for cell, usage in zip(fn.__closure__ or (), usages, strict=True):
            self._value(Source(False, cell, "cell_contents", usage, source.replaceable))
        if fn.__defaults__:
            self._defaults(
                Source(False, fn, "__defaults__", None, source.replaceable), fn.__defaults__
            )
        if fn.__kwdefaults__:  # a dict, whose content can change
            self._dynamic(Source(False, fn, "__kwdefaults__", None, source.replaceable))

    def _defaults(self, source: Source, defaults: tuple[Any, ...]) -> None:
        if all(type(v) in _IMMUTABLE or trust.is_known(v) for v in defaults):
            self._write_down(defaults, None)
        else:
            self._dynamic(source)

    # -- classes --------------------------------------------------------------------------------------

    def _class(self, cls: type) -> None:
        if trust.is_pure_class(cls):
            self._out.append(Same(cls))
        else:
            self.whole_class(cls)

    def _class_reads(self, cls: type, usage: Usage) -> bool:
        """Only what is read from a class that is neither called nor passed on: ``Cfg.lr``."""
        if usage is None or trust.is_pure_class(cls) or type(cls) not in (type, abc.ABCMeta):
            return False
        if any(name in vars(type) for name in usage):
            return False
        self._watch(cls, "__mro__")
        self._out.append("class reads")
        for name, sub in usage.items():
            self._out.append(name)
            for base in cls.__mro__:
                content = vars(base)
                if name in content:
                    value = content[name]
                    if isinstance(value, (staticmethod, classmethod, property)):
                        self._class_attribute(base, content, name)
                        if isinstance(value, classmethod):
                            self._class(cls)
                    else:
                        self._value(Source(True, content, name, sub, False))
                    break
                self._guard(content, name, ABSENT)
            else:
                self._out.append(MISSING)
        return True

    def whole_class(self, cls: type) -> None:
        number = self._classes.get(id(cls))
        if number is not None:
            self._out += ("class again", number)
            return
        self._classes[id(cls)] = len(self._classes)
        self._identities[id(cls)] = cls
        if type(cls) not in (type, abc.ABCMeta, enum.EnumMeta):
            self._opaque.append(f"{cls.__qualname__}, a class with a metaclass")
            self._out.append(Live(cls))
            return
        self._watch(cls, "__mro__")
        if isinstance(cls, abc.ABCMeta):
            self._attributes[(id(cls), "registry")] = (_Registry(), "unchanged", True)
            if compat.has_registered_classes(cls):
                self._opaque.append(f"{cls.__qualname__}, with which other classes are registered")
        for base in cls.__mro__:
            if base is not cls and trust.is_pure_class(base):
                self._out.append(Same(base))
                continue
            self._out += ("class", base.__qualname__, base.__module__)
            content = vars(base)
            names = [name for name in content if name not in _NOT_BEHAVIOUR]
            self._attributes[(id(base), "names")] = (Names(base, len(content)), "unchanged", True)
            for name in names:
                self._out.append(name)
                self._class_attribute(base, content, name)

    def _class_attribute(self, cls: type, content: Mapping[str, Any], name: str) -> None:
        value = content[name]
        source = Source(True, content, name, None, False)
        inner: tuple[Any, ...]
        if isinstance(value, (staticmethod, classmethod)):
            inner = (value.__func__,)
        elif isinstance(value, property):
            inner = (value.fget, value.fset, value.fdel)
        elif isinstance(value, types.MemberDescriptorType):  # __slots__
            self._guard(content, name, value)
            self._out.append("slot")
            return
        elif name in _GENERATED and _is_generated(cls, name, value):
            self._guard(content, name, value)
            return
        elif name == "_field_defaults" and issubclass(cls, tuple):
            self._guard(content, name, value)
            inner = tuple(value.values())
            self._out += tuple(value)
        elif name == "__dataclass_fields__":
            self._guard(content, name, value)
            for field in value.values():
                self._out += ("field", field.name, field.init, field.kw_only, repr(field.type))
                self._out += (field.repr, field.hash, field.compare)
                for part in (field.default, field.default_factory, dict(field.metadata)):
                    self._detached(part)
            return
        elif issubclass(cls, enum.Enum) and name in _ENUM_TABLES:
            self._guard(content, name, value)
            return
        elif isinstance(value, enum.Enum):
            self._guard(content, name, value)
            for attribute in vars(value):
                if attribute not in ("__objclass__", "_sort_order_"):
                    self._out.append(attribute)
                    self._value(Source(True, vars(value), attribute, None, False))
            return
        else:
            if type(value).__name__ == "_tuplegetter":  # a field of a named tuple
                self._guard(content, name, value)
                self._out.append("field")
                return
            self._value(source)
            return
        self._guard(content, name, value)
        self._out.append(type(value))
        for part in inner:
            self._detached(part)

    def _detached(self, value: Any) -> None:
        """A value held by something that cannot be changed, so the place needs no guard."""
        self._value(Source(True, {"held": value}, "held", None, False))


def is_library_attribute(module: types.ModuleType, name: str, value: Any) -> bool:
    """Whether ``module.name``, which is ``value``, is something pure of a trusted package."""
    pure = trust.is_pure_module(module) and trust.is_pure_attribute(module, name)
    return pure and _is_library(value)


def _is_library(value: Any) -> bool:
    """Whether something that stands in a trusted module was not put there by the user."""
    if trust.is_known(value):
        return True
    if isinstance(value, types.FunctionType):
        return trust.is_pure_function(value) and value.__closure__ is None
    if isinstance(value, type):
        return trust.is_pure_class(value)
    return isinstance(value, types.BuiltinFunctionType) and trust.is_pure_c_function(value)


_REFLECTIVE = frozenset("globals locals vars eval exec compile setattr delattr __import__".split())


class Unchanged:
    """Lets one guard watch all of a function that can be changed in place, but its cells."""

    __slots__ = ("fn", "parts")

    def __init__(self, fn: types.FunctionType):
        self.fn = fn
        self.parts = self._now()

    def _now(self) -> tuple[Any, ...]:
        fn = self.fn
        return (fn.__code__, fn.__defaults__, fn.__kwdefaults__, fn.__name__, len(fn.__dict__))

    @property
    def unchanged(self) -> bool:
        now = self._now()
        old = self.parts
        return now[0] is old[0] and now[1] is old[1] and now[2] is old[2] and now[3:] == old[3:]


class _Registry:
    """Lets a guard notice that a class was registered with an abstract one: ``isinstance`` may change."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token = abc.get_cache_token()

    @property
    def unchanged(self) -> bool:
        return abc.get_cache_token() == self._token


class Names:
    """Lets a guard count the attributes of a class or a function: one that is added may hide another."""

    __slots__ = ("count", "owner")

    def __init__(self, owner: Any, count: int):
        self.owner = owner
        self.count = count

    @property
    def unchanged(self) -> bool:
        return len(self.owner.__dict__) == self.count


# Attributes of every class that say nothing of what its instances do.
_NOT_BEHAVIOUR = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __annotate__ __annotate_func__"
    " __annotations_cache__ __firstlineno__ __static_attributes__ __dataclass_params__ __orig_bases__"
    " __parameters__ __abstractmethods__ _abc_impl __type_params__ __slots__"
    " __slotnames__".split()
)
# What `Enum` keeps in its classes; it follows from the members.
_ENUM_TABLES = frozenset(
    "_member_names_ _member_map_ _value2member_map_ _hashable_values_ _unhashable_values_"
    " _unhashable_values_map_ _member_type_ _new_member_ _use_args_ _value_repr_ _boundary_"
    " _flag_mask_ _singles_mask_ _all_bits_ _inverted_ _ignore_ _order_ _sunder_".split()
)
# Methods that `NamedTuple` writes: they follow from the fields.
_GENERATED = frozenset(
    "__init__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__ __replace__"
    " __new__ __getnewargs__ _make _replace _asdict __getstate__ __setstate__".split()
)


def _is_generated(cls: type, name: str, value: Any) -> bool:
    function = getattr(value, "__func__", value)
    if function is None:
        return True
    if not isinstance(function, types.FunctionType):
        return False
    if name == "__repr__" and "__dataclass_params__" in vars(cls):
        # It says where the class comes from, and keeps a set of what it is printing.
        code = getattr(function, "__wrapped__", function).__code__
        where = function.__globals__.get("__name__")
        return where in ("dataclasses", "reprlib") and code.co_filename == "<string>"
    if name == "__hash__" and "__dataclass_fields__" in vars(cls):
        # By identity where a field is hashed by identity; its code reads nothing but the fields.
        return {"hash", *vars(cls)["__dataclass_fields__"]}.issuperset(function.__code__.co_names)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return function.__globals__.get("__name__", "").startswith(("collections", "namedtuple_"))
    return False
