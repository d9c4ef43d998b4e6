"""Values and functions, written down so that equal descriptions mean the same program.

A description is a flat list of hashable parts (:attr:`Description.out`), plus the captured arrays in the
order they were met (:attr:`Description.hidden`): these become hidden inputs, so their values never count.
It is a tree: a function captured in two places is written down twice. Containers, whose identity can be
seen, are written down once and referred to afterwards.

``replace.py`` walks the same tree in the same order to put tracers where the arrays stand.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax import tree_util

from loopjit import compat
from loopjit.memo import Same
from loopjit.signature import trust
from loopjit.signature.code import Usage, float_bits

SMALL_ARRAY_BYTES = 16 * 1024
"""NumPy arrays count by content up to this size; above it they are opaque."""

_MUTATORS = frozenset(
    "append extend insert remove pop clear sort reverse update setdefault popitem add discard"
    " intersection_update difference_update symmetric_difference_update appendleft popleft extendleft"
    " __setitem__ __delitem__ __iadd__ __ior__ fill put itemset resize setflags setfield partition"
    " byteswap".split()
)
# Mutators that tell nothing of what the container held: a trace counter (`traces.append(1)`) is no read.
_BLIND = frozenset({"append", "extend", "add", "appendleft", "extendleft", "insert", "clear"})

ARRAY = "array"
EMPTY_CELL = "empty cell"
MISSING = "missing"
_MAX_PARTS = 20_000
OBJECT_PARTS = 50  # an object counts as so many parts: a graph of objects leads anywhere


class TooLarge(RecursionError):
    """A capture that leads to more than can be looked at on each call."""


class Live:
    """Stands for an object by its identity as long as it lives; a dead one equals nothing."""

    __slots__ = ("_id", "_ref")

    def __init__(self, value: object):
        self._id = id(value)
        try:
            self._ref: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if type(other) is not Live or other._id != self._id:
            return False
        mine = self._ref()
        return mine is not None and other._ref() is mine


class Description:
    """What was written down so far.

    Attributes:
      out: the parts of the key.
      hidden: the captured arrays (and tracers) that become hidden inputs, in order.
      opaque: for each capture that is not understood, a sentence. Not empty: no sharing across functions.
      writes: for each capture that the function writes to, its name. Not empty: no sharing either.
      pinned: the captured arrays that count by identity, in order.
      copied: whether what is met now is copied for a trace.
      functions: how many functions of the user were met.
      changeable: something was met that may change later and is not copied.
      uncopied: a function of the user was met that is not: JAX may remember an older trace of it.
      hoist: whether arrays met now become hidden inputs; else they count by identity (and content).
      live: everything that has an identity counts by it, since a program holds on to it.
    """

    # One is made for each function on the path of a warm call: what is rarely needed is made late.
    opaque: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seen: dict[int, tuple[int, Any]] | None = None
    pinned: tuple[Any, ...] = ()
    whole: frozenset[tuple[int, bool]] = frozenset()
    methods: frozenset[tuple[int, int, bool]] = frozenset()
    copied: bool = True
    uncopied: bool = False
    functions: int = 0
    changeable: bool = False
    limit: int = _MAX_PARTS

    live: bool = False

    def __init__(self, hoist: bool = True, live: bool = False):
        self.out: list[Any] = []
        self.hidden: list[Any] = []
        self.hoist = hoist
        if live:
            self.live = live

    @property
    def shareable(self) -> bool:
        return not self.opaque and not self.writes

    def reasons(self) -> tuple[str, ...]:
        """Why this may not be shared, a clause each; empty if it may."""
        return tuple(
            dict.fromkeys([*self.opaque, *[f"{w}, which it writes to" for w in self.writes]])
        )

    def refuse(self, value: object, why: str) -> None:
        self.opaque += (why,)
        self.out.append(Live(value))

    def number(self, value: object) -> None:
        """Writes down which of the things met so far this is."""
        if self.seen is None:
            self.seen = {}
        self.out.append(self.seen.setdefault(id(value), (len(self.seen), value))[0])
        if self.live:
            self.out.append(Live(value))

    def fix(self, uncopied: bool) -> tuple[bool, bool]:
        """From here on no tracer can be put anywhere; returns what :meth:`restore` takes."""
        before = self.hoist, self.copied
        if uncopied:
            self.hoist = self.copied = False
        return before

    def restore(self, before: tuple[bool, bool]) -> None:
        self.hoist, self.copied = before

    def again(self, value: object) -> bool:
        """Numbers a thing whose identity can be seen; whether it was written down before."""
        if self.seen is None:
            self.seen = {}
        number, _ = self.seen.setdefault(id(value), (len(self.seen), value))
        self.out += ("number", number)
        if self.live:
            self.out.append(Live(value))
        # Where tracers are put is part of it: the walk that puts them there must take the same turns.
        mark = (number, self.hoist)
        if mark in self.whole:
            return True
        self.whole |= {mark}
        return False


Kind = Callable[[Any, Usage, Description], None]
KINDS: dict[type, Kind] = {}
"""By exact type. ``kinds.py`` and ``transform.py`` add theirs."""


def describe(value: object, usage: Usage, d: Description) -> None:
    """Writes ``value`` down as far as ``usage`` says that it is looked at."""
    if len(d.out) > d.limit:
        raise TooLarge
    kind = KINDS.get(type(value))
    if kind is None:
        kind = _kind_of(value)
    kind(value, usage, d)


def _kind_of(value: object) -> Kind:
    """The kind of a value whose exact type is not in the table."""
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return _ref_or_array
    if trust.is_known(value):
        return _same
    if isinstance(value, np.generic):
        return _numpy_scalar
    if isinstance(value, np.dtype):
        return _by_value
    if isinstance(value, enum.Enum):
        return KINDS[enum.Enum]
    if isinstance(value, type):
        return KINDS[type]
    if type(value) in compat.EXACT_TYPES:
        return _by_value
    return KINDS[object]


# ---------------------------------------------------------------------------------------------------
# Atoms
# ---------------------------------------------------------------------------------------------------


def _atom(value: object, usage: Usage, d: Description) -> None:
    d.out += (type(value), value)


def _float(value: float, usage: Usage, d: Description) -> None:
    d.out += (float, float_bits(value))


def _complex(value: complex, usage: Usage, d: Description) -> None:
    d.out += (complex, float_bits(value.real), float_bits(value.imag))


def _numpy_scalar(value: np.generic, usage: Usage, d: Description) -> None:
    if value.dtype.hasobject:
        return d.refuse(value, f"a NumPy scalar of dtype {value.dtype}")
    d.out += (type(value), value.dtype, value.tobytes())


def _by_value(value: Hashable, usage: Usage, d: Description) -> None:
    d.out += (type(value), value)


def _same(value: object, usage: Usage, d: Description) -> None:
    d.out.append(Same(value))


def _treedef(value: Any, usage: Usage, d: Description) -> None:
    d.out.append(type(value))
    describe_tree(value, d)


def describe_tree(tree: Any, d: Description) -> None:
    """Writes down a tree node by node: JAX takes {1: x} and {True: x} for equal."""
    data = tree.node_data()
    children = tree.children()
    if data is None:
        d.out.append("leaf")
    else:
        kind, extra = data
        d.out += (kind, len(children))
        describe(extra, None, d)
    for child in children:
        describe_tree(child, d)


def _range(value: range, usage: Usage, d: Description) -> None:
    # Equal ranges may have other bounds and steps, which can be seen.
    d.out += (range, value.start, value.stop, value.step)


def _slice(value: slice, usage: Usage, d: Description) -> None:
    d.out.append(slice)
    for part in (value.start, value.stop, value.step):
        describe(part, None, d)


# ---------------------------------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------------------------------


def _array(value: Any, usage: Usage, d: Description) -> None:
    if d.hoist:
        d.hidden.append(value)
        d.out.append(ARRAY)
    else:
        pinned_array(value, d)


def pinned_array(value: Any, d: Description) -> None:
    """An array that is traced with its value: by identity, and by content, which may alias NumPy memory."""
    if isinstance(value, jax.core.Tracer):
        return d.refuse(value, "a tracer whose value the trace may look at")
    d.out += (ARRAY, Live(value))
    d.pinned += (value,)
    extended = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)  # type: ignore[attr-defined]
    if value.is_fully_addressable and not extended:
        if value.nbytes <= SMALL_ARRAY_BYTES:
            d.out.append(np.asarray(value).tobytes())
            return
    d.opaque += (
        f"an array of {value.nbytes} bytes whose value the trace may look at; pass it as an argument",
    )


def _ref_or_array(value: Any, usage: Usage, d: Description) -> None:
    if compat.is_ref(value):
        return d.refuse(value, "a mutable array (jax.new_ref)")
    _array(value, usage, d)


def _numpy_array(value: np.ndarray, usage: Usage, d: Description) -> None:
    if d.again(value):
        return
    if value.dtype.hasobject:
        return d.refuse(value, f"a NumPy array of dtype {value.dtype}")
    d.changeable = True
    if value.nbytes > SMALL_ARRAY_BYTES:
        return d.refuse(
            value,
            f"a NumPy array of {value.nbytes} bytes, which may be changed in place;"
            " make it a jax.Array (jnp.asarray) or pass it as an argument",
        )
    d.out += (np.ndarray, value.dtype, value.shape, value.strides, value.flags.writeable)
    d.out.append(value.tobytes())


# ---------------------------------------------------------------------------------------------------
# Containers
# ---------------------------------------------------------------------------------------------------


def _is_written(usage: Usage, d: Description, what: str) -> bool:
    """Notes mutating methods; True when nothing of the content is read."""
    if not usage:
        return False
    mutators = _MUTATORS.intersection(usage)
    if mutators:
        d.writes += (f"{what}.{sorted(mutators)[0]}",)
    return is_blind(usage)


def is_blind(usage: dict[str, Usage]) -> bool:
    """Whether a container is only written to, by methods that tell nothing of its content."""
    return bool(usage) and _BLIND.issuperset(usage)


def _tuple(value: tuple[Any, ...], usage: Usage, d: Description) -> None:
    d.out += (tuple, len(value))
    for item in value:
        describe(item, None, d)


def _sequence(value: Any, usage: Usage, d: Description) -> None:
    if d.again(value):
        return
    d.out += (type(value), len(value))
    if _is_written(usage, d, type(value).__name__):
        # Nothing of it counts but which one it is.
        d.out[-1] = Live(value) if not isinstance(value, (list, dict, set)) else Same(value)
        return
    for item in value:  # sets: in iteration order, which the traced code can see
        describe(item, None, d)


def _dict(value: dict[Any, Any], usage: Usage, d: Description) -> None:
    if d.again(value):
        return
    d.out += (type(value), len(value))
    if _is_written(usage, d, "dict"):
        # Nothing of it counts but which one it is.
        d.out[-1] = Live(value) if not isinstance(value, (list, dict, set)) else Same(value)
        return
    for key, item in list(value.items()):
        describe(key, None, d)
        describe(item, None, d)


def _deque(value: collections.deque[Any], usage: Usage, d: Description) -> None:
    d.out.append(value.maxlen)
    _sequence(value, usage, d)


def _namespace(value: types.SimpleNamespace, usage: Usage, d: Description) -> None:
    before = d.fix(True)  # it is not copied
    d.changeable = True
    d.out.append(types.SimpleNamespace)
    content = vars(value)
    if usage is None:
        _dict(content, None, d)  # vars() is one dict as long as the namespace lives
    else:
        for name, sub in usage.items():
            d.out.append(name)
            if name in content:
                describe(content[name], sub, d)
            else:
                d.out.append(MISSING)
    d.restore(before)


# ---------------------------------------------------------------------------------------------------
# Callables made of others
# ---------------------------------------------------------------------------------------------------


def _partial(value: functools.partial[Any], usage: Usage, d: Description) -> None:
    d.out += (type(value), len(value.args))
    if value.__dict__:
        d.opaque += ("a functools.partial with attributes of its own",)
    describe(value.func, None, d)
    for item in value.args:
        describe(item, None, d)
    _items(value.keywords, d)


def _items(content: dict[str, Any], d: Description) -> None:
    d.out.append(len(content))
    for key, item in content.items():
        d.out.append(key)
        describe(item, None, d)


def _c_function(value: types.BuiltinFunctionType, usage: Usage, d: Description) -> None:
    if trust.is_pure_c_function(value):
        d.out.append(Same(value))
    elif type(value.__self__) in (list, dict, set, collections.deque):
        # A bound method of a captured container, passed on or kept in a variable.
        d.out.append(value.__name__)
        describe(value.__self__, {value.__name__: None}, d)
    else:
        d.refuse(value, f"{value.__name__}, which may be stateful")


def _ufunc(value: np.ufunc, usage: Usage, d: Description) -> None:
    if trust.is_known(value):
        d.out.append(Same(value))
    else:  # np.frompyfunc
        d.refuse(value, f"the NumPy ufunc {value.__name__}")


def custom_rule_parts(value: Any) -> list[tuple[str, Any]]:
    """The attributes of a ``custom_jvp``, ``custom_vjp`` or ``custom_vmap`` object that matter."""
    return [(k, v) for k, v in vars(value).items() if k not in _WRAPPER_ATTRIBUTES]


_WRAPPER_ATTRIBUTES = frozenset(
    "__wrapped__ __doc__ __module__ __qualname__ __name__ __annotations__ __type_params__".split()
)


def _custom_rule(value: Any, usage: Usage, d: Description) -> None:
    if trust.is_known(value):
        return _same(value, usage, d)
    if d.again(value):  # the rule calls the function itself, as rules do
        return
    parts = custom_rule_parts(value)
    d.out += (type(value), len(parts))
    for name, part in parts:
        d.out.append(name)
        describe(part, None, d)


def _device(value: Any, usage: Usage, d: Description) -> None:
    d.out.append(Same(value))


_ATOMS = (int, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented))


def register_kinds() -> None:
    KINDS.update(dict.fromkeys(_ATOMS, _atom))
    KINDS[float] = _float
    KINDS[range] = _range
    KINDS[complex] = _complex
    KINDS[slice] = _slice
    KINDS[tuple] = _tuple
    KINDS.update(dict.fromkeys((list, set, frozenset, bytearray), _sequence))
    KINDS[collections.deque] = _deque
    KINDS[dict] = _dict
    KINDS[collections.OrderedDict] = _dict
    KINDS[types.SimpleNamespace] = _namespace
    KINDS[functools.partial] = _partial
    KINDS[tree_util.Partial] = _partial
    KINDS[types.BuiltinFunctionType] = _c_function
    KINDS[np.ufunc] = _ufunc
    KINDS[np.ndarray] = _numpy_array
    KINDS[type(tree_util.tree_structure(0))] = _treedef
    KINDS[jax.ShapeDtypeStruct] = _by_value
    for cls in compat.CUSTOM_RULE_TYPES:
        KINDS[cls] = _custom_rule
    if compat.ArrayImpl is not None:
        KINDS[compat.ArrayImpl] = _array
    if compat.Device is not None:
        KINDS[compat.Device] = _device


register_kinds()
