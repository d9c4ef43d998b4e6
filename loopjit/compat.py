"""The only door to private JAX.

``jax._src``, ``jax.extend`` and ``jax.interpreters`` are imported here and nowhere else. Every
private name is found by a feature test; next to it stands why it is needed, and what happens
without it: a fall-back that is slower (a program is compiled that might have been shared), never
wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives
import jax.interpreters.ad
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

# --------------------------------------------------------------------------------------------------
# Jaxprs
# --------------------------------------------------------------------------------------------------

Jaxpr = jax_core.Jaxpr
ClosedJaxpr = jax_core.ClosedJaxpr
Literal = jax_core.Literal
Var = jax_core.Var

JAXPR_CARRIES_CONSTS: bool = Jaxpr is ClosedJaxpr
"""Since JAX 0.12 there is one class, and the consts live on the ``Jaxpr`` itself."""


def find_private(path: str) -> Any | None:
    """Looks up ``'package.module.Name'``.

    Args:
        path: the dotted path of a name that this version of JAX may or may not have.

    Returns:
        What stands there, or None. Callers treat None as "not on any white list".
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # JAX also raises errors of its own for names that it has removed
        return None


def _find_types(*paths: str) -> frozenset[type]:
    found = (find_private(path) for path in paths)
    return frozenset(item for item in found if isinstance(item, type))


# An output that nobody reads. Public since 0.10. Without it (None) no output counts as dropped,
# which the key only uses to tell more programs apart.
DropVar: type | None = getattr(jax_core, "DropVar", None) or find_private("jax._src.core.DropVar")

# The abstract value of arrays, compared by value. It is interned (identity is equality) or has an
# exact `__eq__`: shape, dtype, weak type, sharding, varying axes, memory space. Public, but only
# under this name. Without it nothing is interned.
ShapedArray: type | None = getattr(jax.core, "ShapedArray", None) or find_private(
    "jax._src.core.ShapedArray"
)

# The abstract value of a mutable array. Its `__eq__` leaves `kind` out, so the key takes it apart.
# Without it, programs with references are not interned.
AbstractRef: type | None = find_private("jax._src.state.types.AbstractRef")

# Classes whose `__eq__` and `__hash__` are exact: they compare everything that lowering or a
# transformation can read, or are interned so that identity is equality. Read in the sources of
# 0.10.2 and 0.12.0.1. A name that is missing here means: refuse to intern.
#   NamedSharding         spec, memory kind, logical device ids, mesh
#   SingleDeviceSharding  device, memory kind
#   PartitionSpec, Mesh, AbstractMesh   interned
#   Layout                major_to_minor, tiling, sub_byte_element_size_in_bits: all its attributes
#   UnspecifiedValue, AutoLayoutSingleton   singletons, compared by identity
# Left out on purpose: GSPMDSharding (equal when XLA finds them *semantically* equal, so the text
# may differ), PmapSharding, and Format (it may hold any sharding: the key takes it apart).
EXACT_TYPES: frozenset[type] = _find_types(
    "jax.sharding.NamedSharding",
    "jax.sharding.SingleDeviceSharding",
    "jax.sharding.PartitionSpec",
    "jax.sharding.Mesh",
    "jax.sharding.AbstractMesh",
    "jax._src.named_sharding.UnspecifiedValue",
    "jax._src.sharding_impls.UnspecifiedValue",
    "jax._src.layout.Layout",
    "jax._src.layout.AutoLayoutSingleton",
    "jax._src.core.AbstractToken",
) | (frozenset([ShapedArray]) if ShapedArray is not None else frozenset())

# Frozen dataclasses that are their fields and nothing more. The key compares the fields one by one,
# and so does not depend on `__eq__`. A missing name means: refuse to intern.
FIELD_TYPES: frozenset[type] = _find_types(
    "jax._src.lax.lax.RaggedDotDimensionNumbers",
    "jax._src.ad_checkpoint.DotsSaveable",
    "jax._src.ad_checkpoint.SaveOnlyTheseNames",
    "jax._src.ad_checkpoint.SaveAnyNamesButThese",
)

# Containers of JAX that are taken apart attribute by attribute. A missing name means: refuse.
#   HashableArray  `__eq__` says 0.0 == -0.0, so the key compares its bytes
#   FTTuple, FTPyTree, FTSingleton, FTFiltered, Either   since 0.12, in the parameters of scan
#                  (FTDict and FTStatic are left out: they hold anything)
#   _FlatCallback  a callback and the tree of its arguments
#   Format         a layout and a sharding
#   TypedNdArray   the value of a literal, mostly a view of NumPy memory (without it all of it is the user's)
HashableArray: type | None = find_private("jax._src.hashable_array.HashableArray")
FlatCallback: type | None = find_private("jax._src.callback._FlatCallback")
Format: type | None = find_private("jax._src.layout.Format")
TypedNdArray: type | None = find_private("jax._src.literals.TypedNdArray")
FTTuple: type | None = find_private("jax._src.flattree.FTTuple")
FTPyTree: type | None = find_private("jax._src.flattree.FTPyTree")
FTSingleton: type | None = find_private("jax._src.flattree.FTSingleton")
FTFiltered: type | None = find_private("jax._src.flattree.FTFiltered")
Either: type | None = find_private("jax._src.util.Either")

# How JAX wraps the functions that it traces later; needed to find the rule behind a thunk. Without
# them every rule counts as a new one.
WrappedFun: Any = find_private("jax._src.linear_util.WrappedFun")
ClosedRule: Any = find_private("jax._src.custom_batching.ClosedRule")

# Effects without content: instances of one class all mean the same. An effect that is in none of
# these lists means: refuse to intern.
PLAIN_EFFECTS: frozenset[type] = _find_types(
    "jax._src.core.InternalMutableArrayEffect",
    "jax._src.callback.IOEffect",
    "jax._src.callback.OrderedIOEffect",
    "jax._src.debugging.DebugEffect",
    "jax._src.debugging.OrderedDebugEffect",
    "jax._src.lax.lax.NoDCEEffect",
)
# Effects on one input: their `input` is a variable or a position.
INPUT_EFFECTS: frozenset[type] = _find_types(
    "jax._src.state.types.ReadEffect",
    "jax._src.state.types.WriteEffect",
    "jax._src.state.types.AccumEffect",
)
# The effect of reading a named axis: its `name` is the axis.
NAMED_AXIS_EFFECTS: frozenset[type] = _find_types("jax._src.core.NamedAxisEffect")


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """Turns the consts of a jaxpr into leading inputs.

    Args:
        closed: a ``ClosedJaxpr`` (a ``Jaxpr`` with its consts since 0.12), or an open ``Jaxpr``,
            whose constvars become inputs too.

    Returns:
        A ``Jaxpr`` without consts and constvars, and the consts: calling it on
        ``[*consts, *args]`` is calling ``closed`` on ``args``.
    """
    if JAXPR_CARRIES_CONSTS:
        consts = list(closed.consts)
        return (closed.with_consts(()) if consts else closed), consts
    jaxpr, consts = (
        (closed.jaxpr, list(closed.consts)) if isinstance(closed, ClosedJaxpr) else (closed, [])
    )
    if not jaxpr.constvars:
        return jaxpr, consts
    debug = jaxpr.debug_info
    if debug.arg_names is not None:
        debug = debug._replace(arg_names=("",) * len(jaxpr.constvars) + tuple(debug.arg_names))
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=(), invars=invars, debug_info=debug), consts


def close_jaxpr(jaxpr: Any) -> Any:
    """A closed jaxpr around an open one without constvars."""
    return jaxpr if JAXPR_CARRIES_CONSTS else ClosedJaxpr(jaxpr, ())


def close_jaxpr_anew(jaxpr: Any) -> Any:
    """A closed jaxpr that is an object of its own, around an open one without constvars."""
    if JAXPR_CARRIES_CONSTS:
        return jaxpr.replace(debug_info=jaxpr.debug_info)
    return ClosedJaxpr(jaxpr, ())


def inner_jaxprs(value: Any) -> list[Any]:
    """The open jaxprs in the parameters of an equation, or in one of them."""
    if isinstance(value, ClosedJaxpr):
        return [open_jaxpr(value)[0] if JAXPR_CARRIES_CONSTS else value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [jaxpr for item in value for jaxpr in inner_jaxprs(item)]
    return []


def calls_host(name: str) -> bool:
    """Whether a primitive of this name calls a function of the user's when the program runs or compiles."""
    return "callback" in name or "partitioning" in name


def callback_of(equation: Any) -> Any:
    """The function that an equation calls on the host, or None."""
    callback = equation.params.get("callback")
    return getattr(callback, "callback_func", callback)


def callbacks_of(jaxpr: Any) -> Iterator[Any]:
    """The functions that a program calls on the host; None for one that is not found."""
    for equation in jaxpr.eqns:
        if calls_host(equation.primitive.name):
            yield callback_of(equation)
        for inner in inner_jaxprs(equation.params):
            yield from callbacks_of(inner)


def jaxpr_as_fun(jaxpr: Any) -> Callable[..., Sequence[Any]]:
    """A function of flat inputs that returns the list of flat outputs of an open jaxpr."""
    return jax_core.jaxpr_as_fun(close_jaxpr(jaxpr))


# -- the rules behind thunks -----------------------------------------------------------------------
#
# `custom_jvp_call`, `custom_vjp_call` and `custom_vmap_call` carry fresh thunks at every trace; the
# functions of the user lie several closures deep. The three functions below dig them out, and check
# every step on the way: who wrapped what, with which arguments. Anything that does not look exactly
# like the sources of 0.10 .. 0.12 gives None, and then the thunk counts as a new rule.


class Rule(NamedTuple):
    """What decides how a derivative or batching rule acts.

    Attributes:
        functions: the functions of the user (or of JAX) that are called.
        statics: the values they are called with, and the trees and avals around them.
    """

    functions: tuple[Callable[..., Any], ...]
    statics: tuple[Any, ...]


class _Surprise(Exception):
    """A thunk that is built in another way than we know."""


_AD = "jax._src.custom_derivatives"
_API = "jax._src.api_util"
_PE = "jax._src.interpreters.partial_eval"
_LU = "jax._src.linear_util"


def _check(condition: bool) -> None:
    if not condition:
        raise _Surprise


def _is_function(value: Any, module: str, qualname: str) -> bool:
    """Is this the function that JAX defines under this name? (The names alone can be borrowed.)"""
    return (
        type(value) is types.FunctionType
        and value.__globals__.get("__name__") == module
        and value.__code__.co_name == qualname.rpartition(".")[2]
        and value.__qualname__ == qualname
    )


def _cells(function: types.FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, [c.cell_contents for c in cells], strict=True))


def _cells_of(value: Any, module: str, qualname: str) -> dict[str, Any]:
    _check(_is_function(value, module, qualname))
    return _cells(value)


def _wrapped(value: Any) -> Any:
    _check(WrappedFun is not None and type(value) is WrappedFun and value.params == ())
    return value


def _memoized(thunk: Any, method: str) -> dict[str, Any]:
    """The cells of the function that a tracing thunk memoizes."""
    _check(_wrapped(thunk).transforms == ())
    memoized = _cells_of(thunk.f, _PE, "_memoize.<locals>.memoized")
    return _cells_of(memoized["fn"], _PE, f"DynamicJaxprTrace.{method}")


def _kinds(values: Sequence[Any]) -> list[str]:
    return [type(value).__name__ for value in values]


def _static_arguments(transforms: Sequence[tuple[Any, tuple[Any, ...]]]) -> tuple[Any, ...]:
    """The arguments that `nondiff_argnums` fixes: at most one transformation, of two kinds."""
    if not transforms:
        return ()
    [(function, arguments)] = transforms
    if _is_function(function, _API, "_prepend_static_args"):
        (fixed,), where = arguments, ()
    else:
        _check(_is_function(function, _API, "_argnums_partial"))
        where, fixed = arguments
    _check(all(kind == "Unhashable" for kind in _kinds(fixed)))
    return (tuple(where), *[box.val for box in fixed])


def _store_of(thunk: Any) -> Any:
    return _cells_of(thunk, _LU, "transformation_with_aux2.<locals>.<lambda>")["out_store"]


def jvp_rule(thunk: Any) -> Rule | None:
    """The rule behind ``custom_jvp_call``'s ``jvp_jaxpr_fun``, or None."""
    try:
        cells = _memoized(thunk, "process_custom_jvp_call.<locals>.jvp_jaxpr_thunk")
        jvp = _wrapped(cells["jvp"])
        (flatten, arguments), *rest = jvp.transforms
        _check(_is_function(flatten, _AD, "_flatten_jvp"))
        # Two names and a thunk with the primal's type: for error messages only.
        _check(_kinds(arguments) == ["str", "str", "PyTreeDef", "function"])
        statics = (arguments[2], tuple(cells["in_avals"]), *_static_arguments(rest))
        return Rule((jvp.f,), statics)
    except Exception:
        return None


def vjp_rule(fwd_thunk: Any, bwd: Any, out_trees: Any) -> Rule | None:
    """The rule behind the parameters of ``custom_vjp_call``, or None.

    ``out_trees`` reads what the forward rule has stored, so it follows from the forward rule; it is
    only checked to be *its* store.
    """
    try:
        cells = _memoized(fwd_thunk, "process_custom_vjp_call.<locals>.fwd_jaxpr_from_zeros")
        fwd, bwd = _wrapped(cells["fwd"]), _wrapped(bwd)
        (flatten_fwd, fwd_arguments), *fwd_rest = fwd.transforms
        (flatten_bwd, bwd_arguments), *bwd_rest = bwd.transforms
        _check(_is_function(flatten_fwd, _AD, "_flatten_fwd"))
        _check(_is_function(flatten_bwd, _AD, "_flatten_bwd"))
        # nondiff_argnums (until 0.10), symbolic zeros; then debug information, the tree of the
        # inputs, and a thunk with the primal's type for error messages.
        *flags, _, _, fwd_tree, _ = fwd_arguments
        _check(_kinds(flags) in (["bool"], ["tuple", "bool"]))
        _check(_kinds(fwd_arguments[-4:]) == ["DebugInfo", "DebugInfo", "PyTreeDef", "function"])
        # The tree and the avals of the inputs; since 0.11 the primal (for error messages), symbolic
        # zeros, and whether the rule logs.
        bwd_tree, bwd_avals, bwd_trees, *bwd_flags = bwd_arguments
        _check(_kinds(bwd_flags[1:]) in ([], ["bool", "bool"]) and len(bwd_flags) in (0, 3))
        trees = _cells_of(
            out_trees, _PE, "DynamicJaxprTrace.process_custom_vjp_call.<locals>.out_trees_"
        )
        _check(_store_of(trees["out_trees"]) is fwd.stores[0])
        _check(_store_of(bwd_trees) is fwd.stores[0])
        statics = (
            *flags,
            fwd_tree,
            tuple(cells["in_avals"]),
            bwd_tree,
            tuple(bwd_avals),
            *bwd_flags[1:],
            trees["num_consts"],
            _static_arguments(fwd_rest),
            _static_arguments(bwd_rest),
        )
        return Rule((fwd.f, bwd.f), statics)
    except Exception:
        return None


def vmap_rule(rule: Any) -> Rule | None:
    """The rule behind ``custom_vmap_call``'s ``rule``, or None."""
    if ClosedRule is None or type(rule) is not ClosedRule:
        return None
    return Rule((rule.rule,), ())


def defjvps_rule(function: Any) -> Rule | None:
    """Takes apart the rule that ``custom_jvp.defjvps`` makes of one rule per argument, or None.

    It calls the primal again, so the primal is one of the functions.
    """
    try:
        cells = _cells_of(function, _AD, "custom_jvp.defjvps.<locals>.jvp")
        primal, rules = cells["self"], cells["jvps"]
        _check(type(primal) is jax.custom_jvp and primal.jvp is function)
        present = tuple(rule is not None for rule in rules)
        functions = (primal.fun, *[rule for rule in rules if rule is not None])
        return Rule(functions, (present, bool(primal.symbolic_zeros)))
    except Exception:
        return None


_PjitFunction: type = type(jax.jit(lambda: None))


def is_own_function(value: Any) -> bool:
    """Is this a function of the jax package that captures nothing?

    What such a function does cannot change while the process runs. Its ``__module__`` proves
    nothing, since ``functools.wraps`` copies it; its globals do.
    """
    if type(value) is _PjitFunction:
        # What is compared is the jitted object itself, with its options.
        value = getattr(value, "__wrapped__", None)
    if type(value) is not types.FunctionType or value.__closure__ is not None:
        return False
    name = value.__globals__.get("__name__") or ""
    module = sys.modules.get(name)
    is_jax = name == "jax" or name.startswith("jax.")
    return is_jax and module is not None and module.__dict__ is value.__globals__


# ---------------------------------------------------------------------------------------------------
# Values that a function may capture
# ---------------------------------------------------------------------------------------------------

# The exact class of concrete arrays, for the fast table of kinds. Without it arrays are found by
# `isinstance`, which is slower.
ArrayImpl: Any = find_private("jax._src.array.ArrayImpl")

# Devices are compared by identity. The class is public only under this name; without it a captured
# device is opaque.
Device: type | None = getattr(jax, "Device", None)

# Objects with derivative or batching rules: what they are is what their attributes are.
CUSTOM_RULE_TYPES: tuple[type, ...] = tuple(
    cls
    for cls in (
        jax.custom_jvp,
        jax.custom_vjp,
        find_private("jax.custom_batching.custom_vmap"),
    )
    if isinstance(cls, type)
)

_Ref: type | None = getattr(jax, "Ref", None) or find_private("jax._src.core.Ref")


def is_ref(value: Any) -> bool:
    """Is this a mutable array? Where JAX does not say, whatever has ``get`` and ``swap`` is one."""
    if _Ref is not None:
        return isinstance(value, _Ref)
    return hasattr(value, "swap")


PjitFunction: type = _PjitFunction

JIT_ATTRIBUTES = frozenset(vars(jax.jit(lambda: None)))
"""Attributes of every jitted object; others were set by the user, or copied from the function."""

# What `jax.jit` was asked for; kept on the jitted object. Without it a captured jitted function counts
# by identity, so a fresh one is a miss.
_PLAIN_JIT = {
    "user_specified_in_shardings": False,
    "device": None,
    "backend": None,
    "use_resource_env": False,
}


def jit_options(jitted: Any) -> dict[str, Any] | None:
    """The options of a ``jax.jit`` object, or None where it cannot be rebuilt from them.

    Only objects without shardings, layouts, devices or backends: those are compared by identity.
    """
    info = getattr(jitted, "_jit_info", None)
    if info is None or not hasattr(info, "_asdict") or not hasattr(jitted, "__wrapped__"):
        return None
    fields = info._asdict()
    if any(fields.get(name, value) != value for name, value in _PLAIN_JIT.items()):
        return None
    for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"):
        for leaf in fields.get(f"{name}_leaves", (None,)):
            if leaf is not None and type(leaf).__name__ != "UnspecifiedValue":
                return None
    try:
        return {
            "static_argnums": fields["static_argnums"],
            "static_argnames": fields["static_argnames"],
            "donate_argnums": fields["donate_argnums"],
            "donate_argnames": fields["donate_argnames"],
            "keep_unused": fields["keep_unused"],
            "inline": fields["inline"],
            "compiler_options": dict(fields["compiler_options_kvs"]),
        }
    except (KeyError, TypeError, ValueError):
        return None


# ---------------------------------------------------------------------------------------------------
# The context of a trace
# ---------------------------------------------------------------------------------------------------

# Whether some JAX transformation is under way in this thread. Public in `jax.extend.core` or `jax.core`.
# Captured in a new thread, which starts clean even when this module is imported while tracing.
_opaque_trace_state = getattr(jax_core, "get_opaque_trace_state", None) or getattr(
    jax.core, "get_opaque_trace_state", None
)


def _in_new_thread(function: Callable[[], Any]) -> Any:
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


_CLEAN = _in_new_thread(_opaque_trace_state) if _opaque_trace_state is not None else None


# The trace that is under way. Without it a loop inside of a trace becomes a call of a staged program,
# which is the same program with one more (inlined) call in it.
_trace_ctx = find_private("jax._src.core.trace_ctx")


def _trace_state_is_clean() -> bool:
    return _opaque_trace_state is not None and bool(_opaque_trace_state() == _CLEAN)


# The private one gives the same answer in a third of the time, which counts: it is asked at warm calls.
trace_state_is_clean: Callable[[], bool] = (
    getattr(_trace_ctx, "is_top_level", None) or _trace_state_is_clean
)
"""Whether no transformation is under way in this thread. Unknown counts as "one is"."""


# Everything that JAX itself puts into the keys of its trace caches. Without it (None) nothing is kept
# from one context to another: each call that JAX's C++ dispatch does not know is traced.
_trace_context = find_private("jax._src.config.trace_context")


def trace_context() -> Hashable:
    """JAX's whole trace context, as a hashable."""
    if _trace_context is None:
        return object()
    # Without our own mark: whoever is traced inside of `forget_traces` is traced in the same context.
    return tuple([None if type(part) is _Unseen else part for part in _trace_context()])


# What changes tracing, lowering or compiling and is in none of JAX's cache keys.
_EXTRA_STATES = (
    "jax_default_prng_impl",
    "jax_legacy_prng_key",
    "jax_enable_custom_prng",
    "jax_default_dtype_bits",
    "jax_safer_randint",
    "jax_custom_vjp_disable_shape_check",
    "jax_disable_bwd_checks",
    "jax_disable_vmap_shmap_error",
    "jax_bcoo_cusparse_lowering",
    "jax_use_magma",
    "jax_use_rgv3",
    "jax_refs_to_pins",
    "jax_mosaic_allow_hlo",
    "jax_pallas_poison_buffers",
    "jax_compiler_enable_remat_pass",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_remove_custom_partitioning_ptr_from_cache_key",
    "jax_enable_checks",
)
# Modes under which loopjit steps aside: JAX runs the function op by op, or looks at each value.
# (Profile-guided optimization keeps a profile for each jaxpr.)
_BYPASS_STATES = (
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_check_tracer_leaks",
    "jax_enable_pgle",
)

_EXTRA = [name for name in _EXTRA_STATES if hasattr(jax.config, name)]
_BYPASS = [name for name in _BYPASS_STATES if hasattr(jax.config, name)]


class _Watch:
    """Whether one of the states above was changed since the import.

    Reading twenty states takes longer than all the rest of a warm call, and hardly anybody changes
    them; so JAX's own hooks (a global one, and one for ``with`` statements) set a flag, and only after
    that the states are read at each call. Where a state takes no hooks the flag is set from the start.
    """

    __slots__ = ("epoch", "initial", "listeners", "touched")

    def __init__(self) -> None:
        # In a new thread: a `with` may be open in this one.
        self.initial: tuple[Any, ...] = _in_new_thread(config_key)
        self.touched = config_key() != self.initial or bypass()
        self.listeners: list[Callable[[], None]] = []
        self.renew()
        states = find_private("jax._src.config.config_states") or {}
        for name in (*_EXTRA, *_BYPASS):
            if not self._hook(states.get(name)):
                self.touched = True

    def _hook(self, state: Any) -> bool:
        slots = ("_update_global_hook", "_update_thread_local_hook")
        if state is None or not all(hasattr(state, slot) for slot in slots):
            return False
        usual = getattr(jax.config, state.name)
        for slot in slots:
            setattr(state, slot, self._after(getattr(state, slot), usual))
        return True

    def _after(self, inner: Callable[[Any], None] | None, usual: Any) -> Callable[[Any], None]:
        def hook(value: Any) -> None:
            # None: a `with` was left. JAX itself turns debug_nans off for a moment now and then.
            if value is not None and value != usual:
                self.touched = True
                self.renew()
            if inner is not None:
                inner(value)

        return hook

    def renew(self) -> None:
        """What was remembered for the current epoch is void; listeners forget it at once."""
        self.epoch = object()
        for forget in self.listeners:
            forget()

    def extra(self) -> Hashable:
        """What keys have to contain beside JAX's trace context; None as long as nothing is unusual."""
        if not self.touched:
            return None
        now = config_key()
        return None if now == self.initial else now


def config_key() -> tuple[Any, ...]:
    """The states that JAX's own keys leave out."""
    return tuple([getattr(jax.config, name) for name in _EXTRA])


def bypass() -> bool:
    """Whether JAX is in a mode in which loopjit steps aside."""
    return any(getattr(jax.config, name) for name in _BYPASS)


watch = _Watch()


def is_tracing() -> bool:
    """Whether a jaxpr is being made in this thread (by ``jax.jit``, the body of a loop ...)."""
    trace = getattr(_trace_ctx, "trace", None)
    while trace is not None:
        if type(trace).__name__ == "DynamicJaxprTrace":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


class _Cleared:
    """What ``jax.clear_caches()`` asks to be cleared."""

    def __init__(self, clear: Callable[[], None]):
        self.cache_clear = clear

    def cache_info(self) -> None:
        return None

    def cache_keys(self) -> tuple[()]:
        return ()


_cleared: list[_Cleared] = []  # JAX holds them weakly


def clear_with_jax(clear: Callable[[], None]) -> None:
    """Lets ``jax.clear_caches()`` call ``clear``. Without the private registry it does not."""
    register = find_private("jax._src.util.register_cache")
    if register is not None:
        _cleared.append(_Cleared(clear))
        register(_cleared[-1], "loopjit")


_abc_dump = find_private("_abc._get_dump")


def has_registered_classes(cls: type) -> bool:
    """Whether classes were registered with an abstract class. Unknown counts as "some were"."""
    try:
        return bool(_abc_dump(cls)[0])  # type: ignore[misc]
    except Exception:
        return True


class _Unseen:
    """A value of JAX's user context that was never there before."""


_user_context = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None

CAN_FORGET: bool = _user_context is not None
"""Whether JAX can be made to trace functions again that it remembers by identity."""


_marks: OrderedDict[Hashable, _Unseen] = OrderedDict()


def forget_traces(state: Hashable) -> contextlib.AbstractContextManager[Any]:
    """While it is entered, JAX finds no trace of a function (of a scan's body ...) from another state.

    Args:
        state: stands for all that functions read. JAX keeps some data for each, for functions of its own
            that it traces anew, so a state that comes again gets the same mark.
    """
    if _user_context is None:
        return contextlib.nullcontext()
    mark = _marks.setdefault(state, _Unseen())
    if len(_marks) > 256:
        _marks.popitem(last=False)
    return _user_context(mark)


class _Asked(threading.local):
    """How often the value of a tracer was asked for in this thread, and who wants to know."""

    count = 0
    listener: Callable[[Any], None] | None = None


_asked = _Asked()


def times_asked() -> int:
    """Grows when JAX refuses to give the value of a tracer (also if the error is caught), or its text."""
    return _asked.count


@contextlib.contextmanager
def listening(listener: Callable[[Any], None]) -> Iterator[None]:
    """Tells ``listener`` of each question in this thread while it is entered.

    Args:
        listener: gets the error, when JAX refuses to give a value; or the tracer, when JAX takes its text,
            which it does to say in an error that it cannot be used as a size, or an index.
    """
    outer, _asked.listener = _asked.listener, listener
    try:
        yield
    finally:
        _asked.listener = outer


def _notice(cls: type, method: str, from_jax: bool) -> None:
    inner = getattr(cls, method)

    @functools.wraps(inner)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        by_jax = sys._getframe(1).f_globals.get("__name__", "").startswith("jax.")
        if from_jax or not by_jax:
            _asked.count += 1
        out = inner(*args, **kwargs)
        if _asked.listener is not None and (from_jax or by_jax):
            _asked.listener(args[0])
        return out

    setattr(cls, method, noticed)


# Public classes, and what they do stays the same. There is no other way to learn that a function asked
# for a value and went on without it (`try: k = int(n)`, `except: k = 0`), or took the text of a tracer.
# (JAX itself takes the text for its debug information.)
_notice(jax.core.Tracer, "__repr__", from_jax=False)
for _name in (
    "ConcretizationTypeError",
    "TracerArrayConversionError",
    "TracerBoolConversionError",
    "TracerIntegerConversionError",
    "NonConcreteBooleanIndexError",
):
    if isinstance(getattr(jax.errors, _name, None), type):
        _notice(getattr(jax.errors, _name), "__init__", from_jax=True)


def share_executable(have: Any, want: Any) -> None:
    """Lets one ``jax.stages.Lowered`` compile to what another has compiled to, if that is known.

    There is no public way to tell JAX that two programs are one for the compiler. Without the private
    attributes the second one is compiled, too. What the text of a program does not say is compared here:
    which inputs are used (the others are not in the text), and how inputs and outputs are placed.
    """
    source, target = getattr(have, "_lowering", None), getattr(want, "_lowering", None)
    ours, theirs = getattr(source, "compile_args", None), getattr(target, "compile_args", None)
    executable = getattr(source, "_executable", None)
    if (
        executable is not None
        and ours is not None
        and theirs is not None
        and ours.keys() == theirs.keys()
        and "kept_var_idx" in ours
        and all(ours[name] == theirs[name] for name in ours if name not in _NOT_COMPARED)
        and getattr(target, "_executable", executable) is None
    ):
        target._executable = executable  # type: ignore[union-attr]


# Of the arguments with which JAX compiles: the avals of inputs, which differ in weak types, and the state of
# symbolic dimensions, which are in the avals.
_NOT_COMPARED = frozenset({"global_in_avals", "all_args_info", "shape_poly_state"})


def explain_reverse_mode(note: str) -> None:
    """Adds a note to JAX's error for a ``while`` loop in reverse mode, from now on.

    The error comes when JAX goes back through a program, long after the call of the program has returned;
    so the rule for that, in a public table, is wrapped. Nothing else about it changes. Without the table
    the error stays as it is.
    """
    rules = getattr(jax.interpreters.ad, "primitive_transposes", {})
    loop = getattr(jax_core.primitives, "while_p", None)
    rule = rules.get(loop)
    if rule is None or hasattr(rule, "loopjit_note"):
        return

    @functools.wraps(rule)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return rule(*args, **kwargs)
        except ValueError as error:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    explained.loopjit_note = note  # type: ignore[attr-defined]
    rules[loop] = explained


def new_var(aval: Any) -> Any:
    """A variable for a jaxpr that is rebuilt, or None: then it is left as it is, and not interned."""
    try:
        var = Var(aval)
    except Exception:
        return None
    return var if var.aval is aval else None


def replace_jaxpr(jaxpr: Any, *, invars: list[Any], eqns: list[Any]) -> Any:
    """A jaxpr with more inputs in front; the names of arguments in its debug information go with them."""
    debug = jaxpr.debug_info
    more = len(invars) - len(jaxpr.invars)
    if getattr(debug, "arg_names", None) is not None:
        debug = debug._replace(arg_names=(*[""] * more, *debug.arg_names))
    return jaxpr.replace(invars=invars, eqns=eqns, debug_info=debug)


def count_inputs(effects: Any) -> bool:
    """Whether effects on inputs say which one by its number. (Since 0.10 they say it by the variable.)"""
    return any(type(getattr(effect, "input", None)) is int for effect in effects)


def more_scan_consts(ft_in: Any, more: int) -> Any | None:
    """The operands of a scan (its consts, its carry, what it scans over), since 0.12, with consts in front.

    Without the private classes, or if they are not as we know them, None: the scan is left as it is.
    """
    try:
        consts, carry, xs = ft_in.unpack()
        parts = [FTSingleton(None) for _ in range(more)]  # type: ignore[misc]
        parts += getattr(consts, "elts", [consts]) if type(consts) is FTTuple else [consts]
        grown = FTTuple(FTTuple(*parts), carry, xs)  # type: ignore[misc]
        sizes = [len(part) for part in grown.unpack()]
    except Exception:
        return None
    return grown if sizes == [more + len(consts), len(carry), len(xs)] else None


# What `jax.jit` has in the place of a sharding that nobody asked for.
UNSPECIFIED: Any = find_private("jax._src.sharding_impls.UNSPECIFIED") or find_private(
    "jax._src.named_sharding.UNSPECIFIED"
)


# ---------------------------------------------------------------------------------------------------
# Hooks: where JAX itself runs programs
# ---------------------------------------------------------------------------------------------------

# Primitives that hold jaxprs and are compiled when they are called op by op. Public. (`custom_linear_solve`,
# `checkpoint`, `custom_jvp_call` ... are evaluated: what is inside of them is called op by op in turn.)
EAGER_PRIMITIVES: tuple[Any, ...] = tuple(
    getattr(jax_core.primitives, name)
    for name in ("while_p", "scan_p", "cond_p", "reduce_p", "reduce_window_p")
    if hasattr(jax_core.primitives, name)
)


_VERSIONS = ((0, 10), (0, 13))  # from the first to before the second: the sources that were read


def unknown_in_loops() -> str | None:
    """What is not as we know it about loops that are called op by op; None if all is."""
    version = tuple([int(part) for part in re.findall(r"\d+", jax.__version__)[:2]])
    if not _VERSIONS[0] <= version < _VERSIONS[1]:
        return f"jax {jax.__version__} is not one of those that loopjit was made for"
    for name in ("while_p", "scan_p", "cond_p"):
        primitive = getattr(jax_core.primitives, name, None)
        if not callable(getattr(primitive, "impl", None)) or not hasattr(primitive, "def_impl"):
            return f"jax.extend.core.primitives.{name} is not there, or has no impl rule"
    return None


def compiles_op_by_op(primitive: Any) -> bool:
    """Whether the impl rule of a primitive is JAX's usual one: compile it alone, and run it."""
    rule = primitive.impl
    return (
        isinstance(rule, functools.partial)
        and getattr(rule.func, "__name__", None) == "apply_primitive"
        and rule.args == (primitive,)
    )


# The one function through which every program of `jax.jit` goes that JAX's C++ dispatch does not know yet:
# called at top level, by `jit_p`'s impl rule, by impl rules of other primitives, by libraries that bound
# `jax.jit` long ago. It gets the traced program and the arguments, compiles, and runs. There is no public
# place like it: `jit_p`'s impl rule is not asked at top level. Without it only loops are shared.
_PJIT = "jax._src.pjit"
_RUNNER = "_pjit_call_impl_python"
_RUNNER_PARAMETERS = frozenset(
    "jaxpr in_shardings out_shardings in_layouts out_layouts donated_invars ctx_mesh name keep_unused "
    "inline compiler_options_kvs".split()
)


def unknown_in_jit() -> str | None:
    """What is not as we know it about the way in which ``jax.jit`` runs programs; None if all is."""
    module = sys.modules.get(_PJIT)
    runner = getattr(module, _RUNNER, None)
    if not callable(runner):
        return f"{_PJIT}.{_RUNNER} is not there"
    try:
        parameters = inspect.signature(runner).parameters.values()
    except (TypeError, ValueError):
        return f"{_PJIT}.{_RUNNER} has no signature"
    kinds = {p.kind for p in parameters if p.name not in _RUNNER_PARAMETERS}
    if (
        kinds != {inspect.Parameter.VAR_POSITIONAL}
        or len(parameters) != len(_RUNNER_PARAMETERS) + 1
    ):
        return f"{_PJIT}.{_RUNNER} takes other parameters"
    callers = [getattr(module, name, None) for name in ("_run_python_pjit", "_pjit_call_impl")]
    if not all(_mentions(getattr(caller, "__code__", None), _RUNNER) for caller in callers):
        return f"{_PJIT}.{_RUNNER} is called from elsewhere"
    needed = (_shard_argument, _is_default_layout, UNSPECIFIED, ArrayImpl)
    if any(value is None for value in needed):
        return "arrays are placed in another way"
    return None


def _mentions(code: Any, name: str) -> bool:
    """Whether a function, or one inside of it, looks up a global name."""
    return isinstance(code, types.CodeType) and (
        name in code.co_names or any(_mentions(inner, name) for inner in code.co_consts)
    )


def get_runner() -> Callable[..., Any]:
    """What runs the programs of ``jax.jit``: ``runner(*args, jaxpr=..., name=..., ...)``."""
    return getattr(sys.modules[_PJIT], _RUNNER)


def set_runner(runner: Callable[..., Any]) -> None:
    """Puts another function in the place of the one that runs the programs of ``jax.jit``."""
    setattr(sys.modules[_PJIT], _RUNNER, runner)


# The file that defines the functions with which JAX runs single primitives. It remembers them for good, so
# that there is nothing to find again. Without it they take up places in the table.
_APPLY: Any = getattr(find_private("jax._src.dispatch.apply_primitive"), "__code__", None)


def is_single_primitive(jaxpr: Any) -> bool:
    """Whether a program is what JAX makes of one primitive without jaxprs, to run it op by op."""
    source = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    if _APPLY is None or not source.rpartition(":")[0].endswith(f" at {_APPLY.co_filename}"):
        return False
    return not any(inner_jaxprs(equation.params) for equation in jaxpr.eqns)


# How JAX places an argument for an executable.
_shard_argument: Any = find_private("jax._src.interpreters.pxla.cc_shard_arg")

# Whether an array lies in memory as JAX lays it down by itself.
_is_default_layout: Any = find_private("jax._src.interpreters.pxla.is_default_layout")


def run_with_consts(
    runner: Callable[..., Any], consts: Sequence[Any], args: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Runs a program of ``jax.jit`` that takes some constants before its arguments.

    Args:
        runner: see `get_runner`.
        consts: arrays.
        args: the arguments.
        params: of the program; those that have one value for each input lack the values for ``consts``.
    """
    count = len(consts)
    out, executable, profiler, const_args = runner(
        *consts,
        *args,
        **{
            **params,
            "in_shardings": (*[UNSPECIFIED] * count, *params["in_shardings"]),
            "in_layouts": (*[None] * count, *params["in_layouts"]),
            "donated_invars": (*[False] * count, *params["donated_invars"]),
        },
    )
    # JAX's dispatch knows inputs that are constants: it puts them before the arguments of each call.
    try:
        const_args = [*const_args, *_placed(executable, consts)]
    except Exception:  # an executable of another kind: JAX asks again at each call
        executable = None
    return out, executable, profiler, const_args


def _placed(executable: Any, consts: Sequence[Any]) -> list[Any]:
    """Consts where an executable wants them; it has no place for those that are not used."""
    used, places = executable._kept_var_idx, iter(executable._in_shardings)
    layouts = iter(executable._dispatch_in_layouts)
    return [
        _shard_argument(const, next(places), next(layouts)) if i in used else const
        for i, const in enumerate(consts)
    ]


def donates_in_vain(params: dict[str, Any]) -> bool:
    """Whether a program of ``jax.jit`` is given a buffer for which it has no use: JAX warns as it lowers it.

    Args:
        params: its parameters, see `get_runner`.
    """
    if not any(params["donated_invars"]):
        return False
    jaxpr = params["jaxpr"]
    given = [a for a, d in zip(jaxpr.in_avals, params["donated_invars"], strict=True) if d]
    wanted, offered = (
        Counter([(getattr(aval, "shape", None), getattr(aval, "dtype", None)) for aval in avals])
        for avals in (jaxpr.out_avals, given)
    )
    return not offered <= wanted


def only_device(args: Sequence[Any], params: dict[str, Any]) -> Any | None:
    """The device on which a program of ``jax.jit`` is going to run.

    Args:
        args: its arguments.
        params: its parameters, see `get_runner`.

    Returns:
        None if there are several, if arrays are distributed by a mesh (also by one of one device: the results
        say so), or if we cannot tell.
    """
    shardings = [*params["in_shardings"], *params["out_shardings"]]
    shardings = [sharding for sharding in shardings if sharding is not UNSPECIFIED]
    arrays = [arg for arg in args if isinstance(arg, jax.Array)]
    shardings += [a.sharding for a in arrays if a.committed or len(a.sharding.device_set) > 1]
    if not params["ctx_mesh"].empty:
        return None
    if any(type(sharding) is not jax.sharding.SingleDeviceSharding for sharding in shardings):
        return None
    devices = {device for sharding in shardings for device in sharding.device_set}
    return default_device() if not devices else devices.pop() if len(devices) == 1 else None


def default_device() -> Any:
    """Where JAX runs what nothing else is said about."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        return jax.devices(device)[0] if device else jax.local_devices()[0]
    return device


def distributes(jaxpr: Any) -> bool:
    """Whether a program says itself how arrays are distributed. Then XLA decides it for its inputs, too."""
    if any(not _mesh_of(var.aval).empty for var in jaxpr.invars):
        return True
    for equation in jaxpr.eqns:
        params = equation.params
        if _places(equation.primitive.name):
            return True
        given = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        if any(sharding is not UNSPECIFIED for sharding in given):
            return True
        if any(map(distributes, inner_jaxprs(params))):
            return True
    return False


def _mesh_of(aval: Any) -> Any:
    return getattr(getattr(aval, "sharding", None), "mesh", None) or _NO_MESH


_NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())


@functools.cache
def _places(name: str) -> bool:
    """Whether a primitive of this name decides where arrays are."""
    return any(part in name for part in ("shard", "mesh", "layout", "partition", "pmap", "device"))


def copies_of_consts(
    consts: Sequence[Any], avals: Sequence[Any], device: Any
) -> tuple[Any, ...] | None:
    """Copies of what a program captured, as arguments that leave open where it runs.

    Args:
        consts: arrays.
        avals: what the program takes them for.
        device: where the copies shall be.

    Returns:
        Uncommitted arrays; or None if one of them cannot be given as an argument without a difference: it
        lies on several devices, or in another memory, or is no array; or they are so large that JAX warns.
    """
    # JAX warns of more than this, as it compiles it into the program.
    most = getattr(jax.config, "jax_captured_constants_warn_bytes", -1)
    if consts and 0 <= most <= sum([getattr(const, "nbytes", 0) for const in consts]):
        return None
    try:
        return tuple([_copy(c, aval, device) for c, aval in zip(consts, avals, strict=True)])
    except Exception:  # deleted, guarded against transfers, or of a kind that we do not know
        return None


def _copy(const: Any, aval: Any, device: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        data = _copy_array(jax.random.key_data(const), device)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(const))
    if isinstance(const, jax.Array):
        return _copy_array(const, device)
    if not isinstance(const, (np.ndarray, np.generic)):
        raise TypeError(f"not an array: {type(const).__name__}")
    return _copy_array(np.array(const, dtype=aval.dtype), device)


def _copy_array(array: Any, device: Any) -> Any:
    if not isinstance(array, np.ndarray):
        sharding = array.sharding
        if type(array) is not ArrayImpl or len(sharding.device_set) > 1:
            raise TypeError("on several devices")
        [its_device] = sharding.device_set
        usual: Any = its_device.default_memory()
        if sharding.memory_kind not in (None, usual.kind):
            raise TypeError("in another memory")
        # JAX has no uncommitted arrays with a layout of their own.
        if not _is_default_layout(array.format.layout, sharding, array.aval):
            raise TypeError("in another layout")
    copy = jax.device_put(array, device, may_alias=False)
    # The memory may be NumPy's, and be written to as soon as the call has returned.
    copy.block_until_ready()
    # There is no public way to have an array on a certain device that is not committed to it.
    return ArrayImpl(copy.aval, copy.sharding, copy._arrays, committed=False)
