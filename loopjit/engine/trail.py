"""Guards on all that a function captures, as one generated function: for calls of the same function object.

Describing a function takes some microseconds. Where the same function object is called again it is enough
to see that nothing has changed since it was described, and that is a matter of identity: the same float in
the same cell, the same class of the same object, the same code in the same helper. A *trail* is what a
description has read, place by place, written as straight Python, with one comparison by ``is`` for each::

    def check(root):
        if root is not k0: return None
        v1 = k2['cfg']                          # a global that holds a settings object
        if type(v1) is not k3: return None
        if v1.lr is not k4: return None         # read as the function reads it
        v5 = k6.cell_contents                   # a captured array: its value does not count,
        if type(v5) is not k7: return None
        return (v5,)                            # and it is an input of the program

The code is made by walking as ``describe.py`` does; what cannot be guarded ends the walk, and there is no
trail. Three things make this safe:

- What is compared with ``is`` cannot change under its identity: numbers, strings, code, classes. What can
  change is never compared but read again from where the function would read it, and looked into. So a trail
  keeps alive no container, no object and no array, and an object in the place of another will do if all that
  is read from it is the same.
- Things whose identity can be seen are compared with each other, as the description numbers them.
- A trail counts only if, after it was written, a description finds the state that the program belongs to and
  the same arrays in the same order, and the trail still holds after that.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import math
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from loopjit import compat
from loopjit.engine.state import State, describe_roots
from loopjit.memo import LRU, same_objects
from loopjit.signature import kinds, plans, trust
from loopjit.signature.code import Usage, code_info
from loopjit.signature.describe import Description, custom_rule_parts
from loopjit.signature.plans import Plan

Check = Callable[[Any], tuple[Any, ...] | None]
"""Takes the function (or the argument); gives the captured arrays, or None where something has changed."""

_log = logging.getLogger("loopjit")
_MAX_LINES = 240
_MAX_ITEMS = 32
_ATOMS: frozenset[type] = frozenset(
    {int, bool, str, bytes, float, complex, range, type(None), type(...), type(NotImplemented)}
)
_COMPUTED = frozenset({int, float, str})
"""Of these there may be several equal ones. They are compared by value only where they are not the same."""
_own_dict = object.__getattribute__
_own_items = tuple.__iter__


class _Unguarded(Exception):
    """Something that no comparison by identity can watch."""


def stale(root: Any) -> None:
    """The check of a trail that is void."""


def trail_of(
    fun: Any, options_key: Hashable, state: State, states: LRU[Hashable, State], shared: bool
) -> Check | None:
    """The trail of a function whose programs are those of ``state``, if there is one.

    Args:
      fun: the function.
      options_key: what else tells programs apart.
      state: one of ``states``.
      states: by the description of functions.
      shared: among equal functions. If not, the programs may hold what the function captures, which a trail
        does not tell from what equals it.
    """
    plain = type(fun) is types.FunctionType
    if not shared and (not plain or _captures(fun)):
        return None
    trail = _write(state, lambda w: w.root(fun) if plain else w.value("root", fun, None))
    if trail is None:
        return None
    d = describe_roots([fun], hoist=shared)
    key = (options_key, compat.watch.extra(), *d.out)
    known = d.shareable and states.peek(key) is state and not state.returns_others(d.seen or ())
    return trail if known and _agrees(trail, fun, d) else None


def trail_of_argument(value: Any, usage: Usage, key: Hashable, state: State) -> Check | None:
    """The trail of a static argument that was written down as ``key``, if there is one."""
    trail = _write(state, lambda w: w.value("root", value, usage))
    if trail is None:
        return None
    d = Description()
    kinds.describe_bounded(value, usage, d)
    return trail if d.shareable and tuple(d.out) == key and _agrees(trail, value, d) else None


def _agrees(trail: Check, root: Any, d: Description) -> bool:
    """Whether a trail holds, and finds the arrays that the description has found."""
    found = trail(root)
    return found is not None and not d.pinned and same_objects(found, d.hidden)


def _write(state: State, walk: Callable[[_Writer], None]) -> Check | None:
    writer = _Writer()
    try:
        walk(writer)
        if writer.arrays:
            writer.lines.append(f"if {writer.bind(state)}.private: return None")
        return writer.finish()
    except (_Unguarded, RecursionError):
        return None
    except Exception:
        # Whatever an odd object does when it is looked at: the longer way copes with it.
        _log.debug("no trail", exc_info=True)
        return None


_MAKERS: LRU[str, Callable[..., Check]] = LRU(512)
"""By source: functions that capture alike have the same check, with other values bound."""


class _Writer:
    """Writes the code of one trail.

    Attributes:
      lines: statements; each leaves the check where something is not as it was.
      arrays: the variables that hold captured arrays, in the order of the description.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.arrays: list[str] = []
        self._bound: dict[int, tuple[str, Any]] = {}
        self._count = 0
        self._seen: dict[int, tuple[str, Any]] = {}
        self._alike: dict[type, list[tuple[str, bool]]] = {}
        self._whole: set[int] = set()
        self._methods: set[tuple[int, int]] = set()
        self._guarded: dict[int, Plan] = {}

    def finish(self) -> Check:
        names = [name for name, _ in self._bound.values()]
        body = "\n   ".join([*self.lines, f"return ({''.join(a + ', ' for a in self.arrays)})"])
        source = (
            f"def make({', '.join(names)}):\n def check(root):\n  try:\n   {body}\n"
            "  except Exception: return None\n return check"
        )
        make = _MAKERS.peek(source)
        if make is None:
            scope: dict[str, Any] = {}
            exec(compile(source, "<trail of loopjit>", "exec"), scope)
            make = _MAKERS.put(source, scope["make"])
        return make(*[value for _, value in self._bound.values()])

    # -- statements -----------------------------------------------------------------------------------

    def bind(self, value: Any) -> str:
        """A name for a value that the code holds."""
        known = self._bound.get(id(value))
        if known is None:
            known = self._bound[id(value)] = (f"k{len(self._bound)}", value)
        return known[0]

    def let(self, expression: str) -> str:
        """A variable for what is read now."""
        [name] = self.names(1)
        self.lines.append(f"{name} = {expression}")
        return name

    def names(self, count: int) -> list[str]:
        self._count += count
        if count > _MAX_ITEMS or len(self.lines) > _MAX_LINES:
            raise _Unguarded
        return [f"v{i}" for i in range(self._count - count, self._count)]

    def unpack(self, expression: str, count: int) -> list[str]:
        """Variables for the items of something: as many as there are now, or the check fails."""
        names = self.names(count)
        self.lines.append(f"[{', '.join(names)}] = {expression}")
        return names

    def same(self, expression: str, value: Any) -> None:
        self.lines.append(f"if {expression} is not {self.bind(value)}: return None")

    def typed(self, expression: str, value: Any) -> str:
        """A variable for what is read now, which must be of the same type."""
        name = expression if expression.isidentifier() else self.let(expression)
        self.lines.append(f"if type({name}) is not {self.bind(type(value))}: return None")
        return name

    def identity(self, name: str, value: Any, held: bool = False) -> bool:
        """Guards what is one thing and what is two; whether this was met before."""
        known = self._seen.get(id(value))
        if known is not None:
            if name != known[0]:
                self.lines.append(f"if {name} is not {known[0]}: return None")
            return True
        self._seen[id(value)] = (name, value)
        others = self._alike.setdefault(type(value), [])
        for other, other_held in others:
            if not (held and other_held):
                self.lines.append(f"if {name} is {other}: return None")
        others.append((name, held))
        return False

    def again(self, name: str, value: Any, held: bool = False) -> bool:
        """As ``Description.again``: whether all of this thing is guarded already."""
        self.identity(name, value, held)
        if id(value) in self._whole:
            return True
        self._whole.add(id(value))
        return False

    # -- values ---------------------------------------------------------------------------------------

    def value(self, expression: str, value: Any, usage: Usage) -> None:
        """Guards what ``expression`` reads, which is ``value`` now, as far as it is looked at."""
        if type(value) in _COMPUTED:
            name = expression if expression.isidentifier() else self.let(expression)
            known = self.bind(value)
            equal = f"{self.bind(_equal)}({name}, {known})"
            self.lines.append(f"if {name} is not {known} and not {equal}: return None")
            return
        if _stays(value):
            return self.same(expression, value)
        kind = KINDS.get(type(value)) or _kind_of(value)
        kind(self, expression, value, usage)

    def items(self, expression: str, content: Mapping[Any, Any]) -> None:
        """The keys of a dict, in order, and its values."""
        if not all(map(_stays, content)):
            raise _Unguarded
        for name, key in zip(self.unpack(expression, len(content)), content, strict=True):
            self.same(name, key)
        values = self.unpack(f"{expression}.values()", len(content))
        for name, value in zip(values, list(content.values()), strict=True):
            self.value(name, value, None)

    def sequence(self, expression: str, content: Sequence[Any]) -> None:
        for name, value in zip(self.unpack(expression, len(content)), content, strict=True):
            self.value(name, value, None)

    # -- functions ------------------------------------------------------------------------------------

    def root(self, fn: types.FunctionType) -> None:
        """The function itself, which whoever holds the trail keeps alive.

        Where it captures nothing, nobody can get hold of it and read its attributes; and a default value
        that it did not have is not used by a call that did without.
        """
        self.same("root", fn)
        self.function(self.bind(fn), fn, held=True, alone=not _captures(fn))

    def function(
        self, name: str, fn: types.FunctionType, held: bool = False, alone: bool = False
    ) -> None:
        self.same(f"{name}.__code__", fn.__code__)
        if not held:
            self.same(f"{name}.__globals__", fn.__globals__)
        if not alone:
            self.same(f"{name}.__name__", fn.__name__)
        if kinds.is_library(fn):
            if fn.__closure__ is not None and not self.again(name, fn, held):
                self._cells(name, fn, (None,) * len(fn.__closure__), held)
            return
        plan = plans.plan_of(fn)
        if self.again(name, fn, held):
            return
        self.plan(plan, fn.__globals__)
        if fn.__closure__ is not None:
            self._cells(name, fn, plan.frees, held)
        if not alone or fn.__defaults__ is not None:
            self.value(f"{name}.__defaults__", fn.__defaults__, None)
        if not alone or fn.__kwdefaults__ is not None:
            self.value(f"{name}.__kwdefaults__", fn.__kwdefaults__, None)
        if fn.__dict__.keys() - {"__wrapped__"}:
            raise _Unguarded
        if not alone:
            for key in self.unpack(f"{name}.__dict__", len(fn.__dict__)):
                self.same(key, "__wrapped__")

    def _cells(self, name: str, fn: types.FunctionType, frees: Sequence[Usage], held: bool) -> None:
        closure = fn.__closure__ or ()
        if held:
            cells = [self.bind(cell) for cell in closure]
        else:
            cells = self.unpack(f"{name}.__closure__", len(closure))
        for cell_name, cell, usage in zip(cells, closure, frees, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                raise _Unguarded from None
            self.value(f"{cell_name}.cell_contents", content, usage)

    def plan(self, plan: Plan, namespace: Any = None) -> None:
        """What functions with this code, or instances of this class, read."""
        if plan.opaque or plan.writes:
            raise _Unguarded
        if id(plan) not in self._guarded:
            self._guarded[id(plan)] = plan
            for place, key, expected in plan.guards:
                if expected is plans.ABSENT:
                    self.lines.append(f"if {key!r} in {self.bind(place)}: return None")
                else:
                    self.same(f"{self.bind(place)}[{key!r}]", expected)
            for owner, key, expected in plan.attributes:
                self._attribute(owner, key, expected)
        for thing in plan.identities:
            self.identity(self.bind(thing), thing, held=True)
        if namespace is not None and (plan.sources or plan.helpers):
            self.identity(self.bind(namespace), namespace, held=True)
        for source in plan.sources:
            try:
                value = source.read()
            except (KeyError, AttributeError, ValueError):
                raise _Unguarded from None
            container = self.bind(source.container)
            read = f"[{source.key!r}]" if source.item else f".{source.key}"
            self.value(container + read, value, source.usage)

    def _attribute(self, owner: Any, key: str, expected: Any) -> None:
        """A guard of a plan; those that run code of ours are written out, which is much faster."""
        if isinstance(owner, plans.Unchanged):
            fn, (code, defaults, keywords, name, count) = owner.fn, owner.parts
            self.same(f"{self.bind(fn)}.__code__", code)
            self.same(f"{self.bind(fn)}.__defaults__", defaults)
            self.same(f"{self.bind(fn)}.__kwdefaults__", keywords)
            self.same(f"{self.bind(fn)}.__name__", name)
            self.lines.append(f"if len({self.bind(fn)}.__dict__) != {count}: return None")
        elif isinstance(owner, plans.Names):
            self.lines.append(
                f"if len({self.bind(owner.owner)}.__dict__) != {owner.count}: return None"
            )
        else:
            self.same(f"{self.bind(owner)}.{key}", expected)

    # -- objects --------------------------------------------------------------------------------------

    def reads(self, name: str, value: Any, usage: dict[str, Usage]) -> bool:
        """The attributes that are read, if that is all that counts; as ``kinds._describe_object``.

        They are read as the function reads them, so that it does not matter where they come from.
        """
        reads = kinds.reads_of(value, usage)
        if reads is None:
            return False
        self.identity(name, value)
        for attribute, sub, part, is_method in reads:
            if part is plans.ABSENT:
                raise _Unguarded
            if not is_method:
                self.value(f"{name}.{attribute}", part, sub)
                continue
            method = self.let(f"{name}.{attribute}")
            self.lines.append(
                f"if type({method}) is not {self.bind(types.MethodType)}: return None"
            )
            self.lines.append(f"if {method}.__self__ is not {name}: return None")
            self.value(f"{method}.__func__", part, None)
            mark = (id(value), id(part))
            if mark not in self._methods:
                self._methods.add(mark)
                self.value(name, value, code_info(part.__code__).params.get(0))
        return True

    def cls(self, cls: type) -> None:
        """A class whose identity is guarded, and which can change in place."""
        if not (trust.is_known(cls) or trust.is_pure_class(cls)):
            self.plan(plans.class_plan(cls))


def _captures(fn: types.FunctionType) -> bool:
    """Whether a function reads more than what the guards of its plan watch."""
    held = (fn.__closure__, fn.__defaults__, fn.__kwdefaults__)
    return held != (None, None, None) or kinds.is_library(fn) or bool(plans.plan_of(fn).sources)


def _equal(value: Any, known: Any) -> bool:
    """Whether a number or a string has the same type and bits (a NaN equals nothing)."""
    if type(value) is not type(known) or value != known:
        return False
    return type(known) is not float or math.copysign(1.0, value) == math.copysign(1.0, known)


def _stays(value: Any) -> bool:
    """Whether a value is the same as long as it is the same object, and has no identity of its own."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is tuple:
        return all(map(_stays, value))
    if kind is slice:
        return _stays(value.start) and _stays(value.stop) and _stays(value.step)
    if isinstance(value, np.generic):  # a structured scalar can be written to
        return kind is not np.void and not value.dtype.hasobject
    return isinstance(value, np.dtype) and value.names is None


# ---------------------------------------------------------------------------------------------------
# Kinds
# ---------------------------------------------------------------------------------------------------

Kind = Callable[[_Writer, str, Any, Usage], None]


def _kind_of(value: Any) -> Kind:
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return _refuse
    if trust.is_known(value):
        return _same
    if isinstance(value, (np.generic, np.dtype)) or type(value) in compat.EXACT_TYPES:
        return _refuse
    if isinstance(value, enum.Enum):
        return _enum
    if isinstance(value, type):
        return _class
    return _object


def _refuse(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    raise _Unguarded


def _same(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    w.same(expression, value)


def _same_if_known(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    if not trust.is_known(value):
        raise _Unguarded
    w.same(expression, value)


def _c_function(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    if not trust.is_pure_c_function(value):
        raise _Unguarded
    w.same(expression, value)


def _array(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    w.arrays.append(w.typed(expression, value))


def _tuple(w: _Writer, expression: str, value: tuple[Any, ...], usage: Usage) -> None:
    w.sequence(w.typed(expression, value), value)


def _list(w: _Writer, expression: str, value: list[Any], usage: Usage) -> None:
    name = w.typed(expression, value)
    if not w.again(name, value):
        w.sequence(name, list(value))


def _dict(w: _Writer, expression: str, value: dict[Any, Any], usage: Usage) -> None:
    name = w.typed(expression, value)
    if not w.again(name, value):
        w.items(name, dict(value))


def _namespace(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    name = w.typed(expression, value)
    if usage is None:
        return _dict(w, f"{name}.__dict__", vars(value), None)
    for attribute, sub in usage.items():
        if attribute not in vars(value):
            raise _Unguarded
        w.value(f"{name}.__dict__[{attribute!r}]", vars(value)[attribute], sub)


def _partial(w: _Writer, expression: str, value: functools.partial[Any], usage: Usage) -> None:
    name = w.typed(expression, value)
    w.unpack(f"{name}.__dict__", len(value.__dict__))
    w.value(f"{name}.func", value.func, None)
    w.sequence(w.let(f"{name}.args"), value.args)
    w.items(w.let(f"{name}.keywords"), dict(value.keywords))


def _function(w: _Writer, expression: str, value: types.FunctionType, usage: Usage) -> None:
    w.function(w.typed(expression, value), value)


def _method(w: _Writer, expression: str, value: types.MethodType, usage: Usage) -> None:
    name = w.typed(expression, value)
    function = value.__func__
    w.value(f"{name}.__func__", function, None)
    first: Usage = None
    if isinstance(function, types.FunctionType):
        first = code_info(function.__code__).params.get(0)
    w.value(f"{name}.__self__", value.__self__, first)


def _custom_rule(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    if trust.is_known(value):
        return w.same(expression, value)
    name = w.typed(expression, value)
    if w.again(name, value):
        return
    content = w.let(f"{name}.__dict__")
    for key_name, key in zip(w.unpack(content, len(vars(value))), vars(value), strict=True):
        w.same(key_name, key)
    for key, part in custom_rule_parts(value):
        w.value(f"{content}[{key!r}]", part, None)


def _jitted(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    """Known by identity (weakly, since it may lead to arrays); what it wraps may change in place."""
    if kinds.wrapped_function(value) is None:
        return w.same(expression, value)
    if vars(value).keys() - compat.JIT_ATTRIBUTES:
        raise _Unguarded
    name = w.typed(expression, value)
    w.lines.append(f"if {name} is not {w.bind(weakref.ref(value))}(): return None")
    w.lines.append(f"if tuple({name}.__dict__) != {w.bind(tuple(vars(value)))}: return None")
    if not w.again(name, value):
        w.value(f"{name}.__wrapped__", value.__wrapped__, None)


def _module(w: _Writer, expression: str, value: types.ModuleType, usage: Usage) -> None:
    if usage is None:
        raise _Unguarded
    w.same(expression, value)
    content = vars(value)
    for attribute, sub in usage.items():
        part = content.get(attribute, plans.ABSENT)
        place = f"{w.bind(content)}[{attribute!r}]"
        if part is plans.ABSENT:
            raise _Unguarded
        if trust.is_pure_module(value) and callable(part):
            w.same(place, part)
        else:
            w.value(place, part, sub)


def _class(w: _Writer, expression: str, value: type, usage: Usage) -> None:
    w.same(expression, value)
    w.cls(value)


def _enum(w: _Writer, expression: str, value: enum.Enum, usage: Usage) -> None:
    w.same(expression, value)
    w.cls(type(value))


def _object(w: _Writer, expression: str, value: Any, usage: Usage) -> None:
    cls = type(value)
    if cls is object:
        return w.same(expression, value)
    name = w.typed(expression, value)
    if usage is not None and w.reads(name, value, usage):
        return
    if w.again(name, value):
        return
    w.cls(cls)
    if isinstance(value, tuple):
        w.sequence(f"{w.bind(_own_items)}({name})", tuple(_own_items(value)))
    if cls.__dictoffset__:
        content = w.let(f"{w.bind(_own_dict)}({name}, '__dict__')")
        w.items(content, kinds.own_attributes(value))
    for base in cls.__mro__:
        for member in vars(base).values():
            if isinstance(member, types.MemberDescriptorType):
                w.value(f"{w.bind(member)}.__get__({name})", member.__get__(value), None)


KINDS: dict[type, Kind] = {
    tuple: _tuple,
    list: _list,
    dict: _dict,
    collections.OrderedDict: _dict,
    types.SimpleNamespace: _namespace,
    functools.partial: _partial,
    tree_util.Partial: _partial,
    types.BuiltinFunctionType: _c_function,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.ModuleType: _module,
    type: _class,
    np.ufunc: _same_if_known,
    compat.PjitFunction: _jitted,
    **dict.fromkeys(compat.CUSTOM_RULE_TYPES, _custom_rule),
    **dict.fromkeys((slice, set, frozenset, bytearray, collections.deque, np.ndarray), _refuse),
    **dict.fromkeys((type(tree_util.tree_structure(0)), jax.ShapeDtypeStruct), _refuse),
}
"""By exact type, as the table of ``describe.py``. ``transform.py`` adds its own."""
if compat.ArrayImpl is not None:
    KINDS[compat.ArrayImpl] = _array
if compat.Device is not None:
    KINDS[compat.Device] = _same
