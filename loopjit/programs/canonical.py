"""The name-free structural key of a jaxpr.

The promise: when two jaxprs have equal keys, they lower to the same StableHLO (up to locations and
the names of nested functions) under the same trace context. In mode ``"full"`` they also transform
alike: their derivatives, batched forms and transposes are the same programs. Mode ``"exec"`` leaves
out what only transformations read, for programs that are about to be run and nothing else.

The key is built from what JAX is known to read, by a white list. Whatever is not on the list raises
`Uninternable`: a program that is compiled once more costs milliseconds, a wrong one an answer.

Three things never enter a key: the names of variables (they are numbered in binding order), where
the code stood (locations, name stacks, debug information), and the ``name`` of a nested ``jit``.
"""

from __future__ import annotations

import enum
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any, Literal

import jax
import numpy as np

from loopjit import compat
from loopjit.memo import Same

Mode = Literal["full", "exec"]
RuleKey = Callable[[Callable[..., Any]], Hashable | None]


class Uninternable(Exception):
    """This jaxpr holds something that cannot be compared; the message says what."""


class Key:
    """The key of one jaxpr. Nested jaxprs stand in it as keys of their own.

    Attributes:
        parts: what is compared.
        equations: the number of equations, nested ones included.
        owned: no NumPy literal lies below, so that nothing here can be changed from outside.
        settled: computing the key again would give the same: below are neither NumPy literals,
            whose content may change, nor functions, whose captures may.
        callbacks: the functions that the program calls on the host; None for one that is not found.
    """

    __slots__ = ("__weakref__", "_hash", "callbacks", "equations", "owned", "parts", "settled")

    def __init__(
        self,
        parts: tuple[Any, ...],
        equations: int,
        callbacks: tuple[Any, ...],
        *,
        owned: bool,
        settled: bool,
    ) -> None:
        self.parts = parts
        self.equations = equations
        self.callbacks = callbacks
        self.owned = owned
        self.settled = settled
        self._hash = hash(parts)  # raises TypeError when something unhashable has slipped in

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Key:
            return NotImplemented
        return self._hash == other._hash and self.parts == other.parts


class _Plan:
    """Which parameters of a primitive count: one object for each primitive and set of names.

    It stands in the key for the primitive (compared by identity) and for the names.
    """

    __slots__ = ("calls_host", "counted", "ignored", "primitive", "rule", "size")

    def __init__(self, primitive: Any, names: frozenset[str], mode: Mode) -> None:
        # Primitives are compared by identity; one that defines `__eq__` (hijax) could lie.
        if type(primitive).__eq__ is not object.__eq__:
            raise Uninternable(f"a primitive with an __eq__ of its own: {primitive}")
        name = primitive.name
        ignored = _NAMES.get(name, ())
        self.rule: _RuleHandler | None = None
        if name in _RULES:
            self.rule, parameters = _RULES[name]
            ignored = (*ignored, *parameters)
        if mode == "exec":
            self.rule = None
            ignored = (*ignored, *TRANSFORM_ONLY.get(name, ()))
        self.primitive = primitive
        self.calls_host = compat.calls_host(name)
        self.size = len(names)
        self.ignored = names.intersection(ignored)
        self.counted = tuple(sorted(names.difference(ignored)))

    def fits(self, params: dict[str, Any]) -> bool:
        """Given that all counted names are there: are they the names of this plan?"""
        ignored = self.ignored
        return len(params) == self.size and (not ignored or ignored <= params.keys())


class Canonicalizer:
    """Builds keys. Only keys of the same canonicalizer can be compared.

    Equal nested keys are made one object (a weak table), so that comparing two large keys never
    walks the same pair of nested jaxprs twice; keys of nested jaxprs are remembered by the identity
    of the jaxpr, which is held weakly.

    Args:
        mode: ``"full"`` or ``"exec"``.
        rule_key: asked for functions that stand for derivative or batching rules, and for callbacks
            that capture nothing. It gives a hashable that is equal exactly when the functions are
            interchangeable *from now on*, or None when it cannot tell. Then, as without it, two
            traces never have equal rules: the rule's captures may have changed between them,
            although it is the same function.
    """

    def __init__(self, mode: Mode, rule_key: RuleKey | None = None) -> None:
        if mode not in ("full", "exec"):
            raise ValueError(f"mode must be 'full' or 'exec', not {mode!r}")
        self.mode: Mode = mode
        self.rule_key = rule_key
        self.latest_plans: dict[Any, _Plan] = {}
        self._plans: dict[tuple[Any, frozenset[str]], _Plan] = {}
        self._known: weakref.WeakKeyDictionary[Any, Key] = weakref.WeakKeyDictionary()
        # A key to itself, both weak (a WeakValueDictionary would hold its keys).
        self._keys: weakref.WeakKeyDictionary[Key, weakref.ref[Key]] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def key(self, jaxpr: Any) -> Key:
        """The key of an open jaxpr without consts.

        Raises:
            Uninternable: something in it is not on the white list.
        """
        try:
            return self.key_of(jaxpr, {})
        except Uninternable:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            # KeyError: a free variable. TypeError: not hashable. The others: a JAX we do not know.
            raise Uninternable(f"{type(error).__name__}: {error}") from error

    def key_of(self, jaxpr: Any, memo: dict[int, Key]) -> Key:
        """The key of a jaxpr, nested or not; ``memo`` lives as long as one call of `key`."""
        key = memo.get(id(jaxpr)) or self._known.get(jaxpr)
        if key is not None:
            return key
        key = _Walk(self, memo).jaxpr(jaxpr)
        with self._lock:
            # This compares under the lock, but in time linear in the key's own equations, because
            # equal nested keys already are one object.
            first = self._keys.get(key)
            first_key = first() if first is not None else None
            if first_key is None:
                self._keys[key] = weakref.ref(key)
            else:
                key = first_key
            if key.settled:
                self._known[jaxpr] = key
        memo[id(jaxpr)] = key
        return key

    def plan(self, primitive: Any, params: dict[str, Any]) -> _Plan:
        """The plan for a primitive with these parameters."""
        names = frozenset(params)
        with self._lock:
            plan = self._plans.get((primitive, names))
            if plan is None:
                plan = self._plans[primitive, names] = _Plan(primitive, names, self.mode)
            self.latest_plans[primitive] = plan
        return plan

    def clear(self) -> None:
        """Forgets everything; keys from before equal no key from after."""
        with self._lock:
            self.latest_plans.clear()
            self._plans.clear()
            self._known.clear()
            self._keys.clear()


# The name of a nested jit is a name: it ends up in locations and as a symbol in the module.
_NAMES: dict[str, tuple[str, ...]] = {"jit": ("name",), "pjit": ("name",)}

# Parameters that lowering does not read (their lowering rules were read in 0.10.2 and 0.12.0.1).
# What is behind a thunk (see _RULES) is left out as well.
TRANSFORM_ONLY: dict[str, tuple[str, ...]] = {
    "custom_jvp_call": ("symbolic_zeros",),
    "custom_vjp_call": ("symbolic_zeros",),
    "reduce": ("computation",),  # the function that `jaxpr` was traced from
}

_MAX_LITERAL = 1024
_pack = struct.Struct("<d").pack


def _references(view: Any) -> int:
    return sys.getrefcount(view.base)


_PRIVATE = _references(np.array(1.0).view())


def _is_private(literal: Any) -> bool:
    """Whether nobody but JAX's view holds the memory of a literal, as with those made of Python numbers."""
    base = literal.base
    if type(literal) is not compat.TypedNdArray or type(base) is not np.ndarray:
        return False
    owns = base.flags.owndata
    del base
    return owns and _references(literal) <= _PRIVATE


class _Unsure(Exception):
    """A rule whose equality nobody vouches for."""


class _Walk:
    """One pass over one jaxpr (nested ones get their own)."""

    __slots__ = ("_memo", "callbacks", "equations", "owned", "owner", "settled")

    def __init__(self, owner: Canonicalizer, memo: dict[int, Key]) -> None:
        self.owner = owner
        self._memo = memo
        self.equations = 0
        self.callbacks: list[Any] = []
        self.owned = True
        self.settled = True

    def jaxpr(self, jaxpr: Any) -> Key:
        """The key of a jaxpr whose consts, if any, are the caller's business.

        It is flat, for speed: one long tuple, in which the number of inputs comes before the
        inputs and the plan says how many parameters follow, so that there is one way to read it.
        """
        if getattr(jaxpr, "is_high", False):
            raise Uninternable("a jaxpr with hijax types")
        parts: list[Any] = []
        push = parts.append
        numbers: dict[Any, int] = {}
        shaped, dropped = compat.ShapedArray, compat.DropVar
        literal_type, literal_key = compat.Literal, self.literal
        handlers, value_key = _HANDLERS, self.value
        plans, make_plan = self.owner.latest_plans, self.owner.plan

        constvars, invars, equations = jaxpr.constvars, jaxpr.invars, jaxpr.eqns
        self.equations += len(equations)
        parts += (len(constvars), len(invars), len(equations))
        count = 0
        for var in (*constvars, *invars):
            if getattr(var, "initial_qdd", None) is not None:
                raise Uninternable("an input with quasi-dynamic data")
            push(self.aval(var.aval))
            numbers[var] = count
            count += 1

        for equation in equations:
            primitive, params = equation.primitive, equation.params
            plan = plans.get(primitive)
            if plan is None:
                plan = make_plan(primitive, params)
            try:
                values = [params[name] for name in plan.counted]
            except KeyError:
                values = None
            if values is None or not plan.fits(params):
                plan = make_plan(primitive, params)
                values = [params[name] for name in plan.counted]
            push(plan)
            # Counts as a whole: compute_on, XLA metadata, threefry_partitionable, the mesh. JAX
            # interns it, so identity is equality; the key keeps it alive.
            push(equation.ctx)
            for value in values:
                handler = handlers.get(type(value))
                push(value_key(value) if handler is None else handler(self, value))
            if plan.rule is not None:
                push(plan.rule(self, params))
            if plan.calls_host:
                self.callbacks.append(compat.callback_of(equation))
            ins = equation.invars
            push(len(ins))
            for atom in ins:
                if type(atom) is literal_type:
                    parts += literal_key(atom)
                else:
                    push(numbers[atom])
            for var in equation.outvars:
                aval = var.aval
                if type(var) is dropped:
                    push(None)  # dead code elimination tells it from one that is not read
                push(aval if type(aval) is shaped else self.aval(aval))
                numbers[var] = count
                count += 1
            if equation.effects:
                push(self.effects(equation.effects, numbers))

        push("outputs")
        for atom in jaxpr.outvars:
            if type(atom) is literal_type:
                parts += literal_key(atom)
            else:
                push(numbers[atom])
        push(self.effects(jaxpr.effects, numbers) if jaxpr.effects else None)
        return Key(
            tuple(parts),
            self.equations,
            tuple(self.callbacks),
            owned=self.owned,
            settled=self.settled,
        )

    def aval(self, aval: Any) -> Hashable:
        kind = type(aval)
        if kind is compat.ShapedArray or kind in compat.EXACT_TYPES:
            return aval
        if kind is compat.AbstractRef:
            # Piece by piece: its `__eq__` leaves `kind` out.
            space, ref_kind = aval.memory_space, getattr(aval, "kind", None)
            return (kind, self.aval(aval.inner_aval), self.value(space), self.value(ref_kind))
        raise Uninternable(f"an abstract value of type {kind.__name__}")

    def literal(self, atom: Any) -> tuple[Any, ...]:
        """By type, bits, dtype and aval: ``0``, ``0.0``, ``-0.0`` and ``False`` all differ.

        Begins with a type (a variable is a number), which also says how many pieces follow.
        """
        value, aval = atom.val, self.aval(atom.aval)
        kind = type(value)
        dtype = getattr(value, "dtype", None)
        if isinstance(value, jax.core.Tracer):
            raise Uninternable("a tracer in a literal")
        if isinstance(value, float):
            return (kind, _pack(value), dtype, aval)
        if isinstance(value, int):  # bool and JAX's typed integers too
            return (kind, int(value), dtype, aval)
        if isinstance(value, complex):
            return (kind, _pack(value.real) + _pack(value.imag), dtype, aval)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return (kind, value.tobytes(), dtype, aval)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            if value.size > _MAX_LITERAL:
                raise Uninternable("a large NumPy literal")
            # Mostly a view, and of an array that the user may write to, unless nobody else holds that: else
            # do not remember this key, and let the table own a copy.
            if not _is_private(value):
                self.owned = self.settled = False
            weak = getattr(value, "weak_type", None)
            return (kind, value.tobytes(), value.shape, dtype, weak, aval)
        # Also a jax.Array: its buffer may be shared with NumPy memory that changes.
        raise Uninternable(f"a literal of type {kind.__name__}")

    def effects(self, effects: Any, numbers: dict[Any, int]) -> Hashable:
        keys: list[Hashable] = []
        for effect in effects:
            kind = type(effect)
            if kind in compat.INPUT_EFFECTS:
                where = effect.input
                keys.append((kind, where if type(where) is int else (numbers[where],)))
            elif kind in compat.PLAIN_EFFECTS:
                keys.append((kind, 0))
            elif kind in compat.NAMED_AXIS_EFFECTS:
                keys.append((kind, self.value(effect.name)))
            else:
                raise Uninternable(f"an effect of type {kind.__name__}")
        return frozenset(keys)

    def nested(self, closed: Any) -> Hashable:
        """A jaxpr in a parameter, open or closed."""
        if getattr(closed, "consts", ()):
            # It would be baked into the program, but its content may change: a NumPy array, a
            # jax.Array that shares NumPy memory, or a tracer of another trace.
            raise Uninternable("a constant in a nested jaxpr")
        is_open = type(closed) is compat.Jaxpr
        key = self.owner.key_of(closed if is_open else closed.jaxpr, self._memo)
        self.equations += key.equations
        self.callbacks += key.callbacks
        self.owned &= key.owned
        self.settled &= key.settled
        return (key, is_open)

    def value(self, value: Any) -> Hashable:
        """A parameter, of whatever type."""
        kind = type(value)
        handler = _HANDLERS.get(kind) or _find_handler(value)
        if kind.__module__.partition(".")[0] in _PACKAGES:  # not the classes of users: they may go
            _HANDLERS.setdefault(kind, handler)
        return handler(self, value)

    def function(self, function: Any) -> Hashable:
        """A function that stands for a rule.

        Raises:
            _Unsure: nobody vouches for it.
        """
        if compat.is_own_function(function):
            return Same(function)
        pieces = compat.defjvps_rule(function)
        if pieces is not None:
            return ("defjvps", self.rule(pieces))
        if self.owner.rule_key is not None:
            self.settled = False
            key = self.owner.rule_key(function)
            if key is not None:
                return ("function", key)
        raise _Unsure

    def rule(self, rule: compat.Rule) -> Hashable:
        functions = tuple([self.function(function) for function in rule.functions])
        statics = tuple([self.static(static) for static in rule.statics])
        # A thunk traces its rule once and remembers the result, whatever the context is later. So a
        # rule is only as good as another under one context (matmul precision, x64, ...).
        return (functions, statics, compat.trace_context(), compat.config_key())

    def static(self, value: Any) -> Hashable:
        """An argument that a rule was fixed to. A function here is as good as the rule itself."""
        kind = type(value)
        if kind is tuple:
            return (tuple, tuple([self.static(item) for item in value]))
        if kind in _FUNCTIONS:
            return self.function(value)
        return self.value(value)


# -- rules (mode "full" only: "exec" ignores these parameters) -------------------------------------

_RuleHandler = Callable[[_Walk, dict[str, Any]], Hashable]


def _rule_key(walk: _Walk, rule: compat.Rule | None, *thunks: Any) -> Hashable:
    if rule is not None:
        try:
            return walk.rule(rule)
        except (_Unsure, Uninternable):
            pass
    walk.settled = False  # thunks hold on to their trace
    return tuple([Same(thunk) for thunk in thunks])


def _jvp_rule(walk: _Walk, params: dict[str, Any]) -> Hashable:
    thunk = params["jvp_jaxpr_fun"]
    return _rule_key(walk, compat.jvp_rule(thunk), thunk)


def _vjp_rule(walk: _Walk, params: dict[str, Any]) -> Hashable:
    thunks = params["fwd_jaxpr_thunk"], params["bwd"], params["out_trees"]
    return _rule_key(walk, compat.vjp_rule(*thunks), *thunks)


def _vmap_rule(walk: _Walk, params: dict[str, Any]) -> Hashable:
    rule = params["rule"]
    return _rule_key(walk, compat.vmap_rule(rule), rule)


def _policy(walk: _Walk, params: dict[str, Any]) -> Hashable:
    policy = params["policy"]
    if type(policy) in _FUNCTIONS:
        return _rule_key(walk, compat.Rule((policy,), ()), policy)
    return walk.value(policy)


def _reducer(walk: _Walk, params: dict[str, Any]) -> Hashable:
    reducer = params["computation"]
    return _rule_key(walk, compat.Rule((reducer,), ()), reducer)


# For each primitive: what makes the key of its rule, and the parameters that it stands for.
_RULES: dict[str, tuple[_RuleHandler, tuple[str, ...]]] = {
    "custom_jvp_call": (_jvp_rule, ("jvp_jaxpr_fun",)),
    "custom_vjp_call": (_vjp_rule, ("fwd_jaxpr_thunk", "bwd", "out_trees")),
    "custom_vmap_call": (_vmap_rule, ("rule",)),
    "remat2": (_policy, ("policy",)),
    "checkpoint": (_policy, ("policy",)),
    "reduce": (_reducer, ("computation",)),
}


# -- parameters, by type ---------------------------------------------------------------------------
#
# Every key begins with the type where two types could have equal values (1 == True == 1.0).

_Handler = Callable[[_Walk, Any], Hashable]
_TREE = type(jax.tree.structure(0))
_JITTED = type(jax.jit(lambda: None))
_FUNCTIONS = frozenset([types.FunctionType, types.MethodType, _JITTED])
_PACKAGES = frozenset(["builtins", "jax", "jaxlib", "ml_dtypes", "numpy", "types"])

# Made once, because they are so frequent.
_TRUE, _FALSE = (bool, True), (bool, False)
_SMALL = tuple([(int, value) for value in range(64)])

# Equal exactly when type and `==` say so.
_EXACT = frozenset([int, bool, str, bytes, type(None)]) | compat.EXACT_TYPES


def _atom(walk: _Walk, value: Any) -> Hashable:
    return value


def _typed(walk: _Walk, value: Any) -> Hashable:
    return (type(value), value)


def _bool(walk: _Walk, value: bool) -> Hashable:
    return _TRUE if value else _FALSE


def _int(walk: _Walk, value: int) -> Hashable:
    return _SMALL[value] if 0 <= value < len(_SMALL) else (int, value)


def _float(walk: _Walk, value: float) -> Hashable:
    return (float, _pack(value))


def _complex(walk: _Walk, value: complex) -> Hashable:
    return (complex, _pack(value.real), _pack(value.imag))


def _numpy_scalar(walk: _Walk, value: np.generic) -> Hashable:
    if value.dtype.hasobject:
        raise Uninternable("a NumPy scalar that holds Python objects")
    return (type(value), value.dtype, value.tobytes())


def _tuple(walk: _Walk, value: tuple[Any, ...]) -> Hashable:
    kinds = tuple(map(type, value))
    if _EXACT.issuperset(kinds):
        return (kinds, value)
    return (tuple, tuple([walk.value(item) for item in value]))


def _named_tuple(walk: _Walk, value: Any) -> Hashable:
    return (type(value), tuple([walk.value(item) for item in value]))


def _frozenset(walk: _Walk, value: frozenset[Any]) -> Hashable:
    return (frozenset, frozenset([walk.value(item) for item in value]))


def _same(walk: _Walk, value: Any) -> Hashable:
    return Same(value)


def _function(walk: _Walk, value: Any) -> Hashable:
    if not compat.is_own_function(value):
        walk.settled = False  # its closure may hold on to the jaxpr that it stands in
    return Same(value)


def _method(walk: _Walk, value: types.MethodType) -> Hashable:
    walk.settled = False
    return (types.MethodType, Same(value.__func__), Same(value.__self__))


def _dataclass(walk: _Walk, value: Any) -> Hashable:
    return (type(value), tuple([walk.value(getattr(value, f.name)) for f in fields(value)]))


def _hashable_array(walk: _Walk, value: Any) -> Hashable:
    array = value.val
    if array.dtype.hasobject:
        raise Uninternable("an array of Python objects")
    return (type(value), array.dtype, array.shape, array.tobytes())


def _format(walk: _Walk, value: Any) -> Hashable:
    return (type(value), walk.value(value.layout), walk.value(value.sharding))


def _plain_effect(walk: _Walk, value: Any) -> Hashable:
    return (type(value), "effect")


def _flat_tuple(walk: _Walk, value: Any) -> Hashable:
    return (type(value), tuple([walk.value(item) for item in value.elts]))


def _flat_pytree(walk: _Walk, value: Any) -> Hashable:
    return (type(value), tuple([walk.value(item) for item in value.xs]), walk.value(value.tree))


def _flat_single(walk: _Walk, value: Any) -> Hashable:
    return (type(value), walk.value(value.val))


def _either(walk: _Walk, value: Any) -> Hashable:
    return (type(value), bool(value.is_right), walk.value(value.val))


def _tree(walk: _Walk, value: Any) -> Hashable:
    # `==` says that {1: x} and {True: x} have one structure, and trusts the `__eq__` of users; so
    # first the pieces, by our rules, and then the tree itself, for what it knows and does not show.
    return (_TREE, _tree_pieces(walk, value), value)


def _tree_pieces(walk: _Walk, tree: Any) -> Hashable:
    node = tree.node_data()
    if node is None:
        return None
    kind, data = node
    if type(data) is list:  # the sorted keys of a dictionary
        data = tuple(data)
    children = tuple([_tree_pieces(walk, child) for child in tree.children()])
    return (Same(kind), walk.value(data), children)


def _callback(walk: _Walk, value: Any) -> Hashable:
    return (type(value), _callback_function(walk, value.callback_func), walk.value(value.in_tree))


def _callback_function(walk: _Walk, function: Any) -> Hashable:
    # A callback is called again and again, later. Two of them are interchangeable only if they
    # share everything that may change meanwhile: the same globals, no cells and no default values.
    rule_key = walk.owner.rule_key
    walk.settled = False
    if rule_key is not None and captures_nothing(function):
        key = rule_key(function)
        if key is not None:
            return ("callback", key, Same(function.__globals__))
    return Same(function)


def captures_nothing(function: Any) -> bool:
    """Whether a function has neither cells nor default values nor attributes."""
    return (
        type(function) is types.FunctionType
        and function.__closure__ is None
        and function.__defaults__ is None
        and function.__kwdefaults__ is None
        and not function.__dict__
    )


def _jaxpr(walk: _Walk, value: Any) -> Hashable:
    return walk.nested(value)


_HANDLERS: dict[type, _Handler] = {
    int: _int,
    bool: _bool,
    str: _atom,
    bytes: _atom,
    type(None): _atom,
    float: _float,
    complex: _complex,
    tuple: _tuple,
    frozenset: _frozenset,
    _TREE: _tree,
    types.FunctionType: _function,
    types.BuiltinFunctionType: _function,
    types.MethodType: _method,
    np.ufunc: _same,
    object: _same,  # a mark that is nothing but itself
    _JITTED: _function,
    compat.Jaxpr: _jaxpr,
    compat.ClosedJaxpr: _jaxpr,
}
for _kind, _handler in (
    (compat.HashableArray, _hashable_array),
    (compat.Format, _format),
    (compat.FTTuple, _flat_tuple),
    (compat.FTPyTree, _flat_pytree),
    (compat.FTSingleton, _flat_single),
    (compat.FTFiltered, _flat_single),
    (compat.Either, _either),
    (compat.FlatCallback, _callback),
    (compat.WrappedFun, _function),
    (compat.ClosedRule, _function),
    *[(_type, _dataclass) for _type in compat.FIELD_TYPES],
    *[(_type, _atom) for _type in compat.EXACT_TYPES],
    *[(_type, _plain_effect) for _type in compat.PLAIN_EFFECTS],
):
    if _kind is not None:
        _HANDLERS[_kind] = _handler


def _find_handler(value: Any) -> _Handler:
    """For families of types that have no list."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _same  # members are singletons; `__eq__` may be anyone's
    if isinstance(value, np.dtype):
        return _typed
    if isinstance(value, np.generic):
        return _numpy_scalar
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and not hasattr(value, "__dict__"):
        return _named_tuple
    if isinstance(value, type | jax.Device):
        return _same
    raise Uninternable(f"a parameter of type {kind.__module__}.{kind.__qualname__}")
