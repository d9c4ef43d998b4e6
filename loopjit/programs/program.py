"""From a traced function to something that is called: one ``jax.jit`` object per canonical program.

``jax.jit`` goes on deciding what it decides about arguments (shardings, placement, donation), in C++.
What is claimed here is only that a program was traced for these avals in this context; the function
under ``jax.jit`` checks both whenever JAX's dispatch does not know a call, and raises :class:`Mismatch`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree_util

from loopjit import compat
from loopjit.programs.canonical import Canonicalizer, Uninternable
from loopjit.programs.consts import lift
from loopjit.programs.intern import Canonical, Interner

PyTreeDef = Any


class Mismatch(Exception):
    """This program was traced for other avals, another tree or another context."""


class Traced(NamedTuple):
    """A traced function.

    Attributes:
      jaxpr: open; its inputs are ``consts`` followed by the leaves of the arguments.
      consts: arrays (and tracers) that the function closed over.
      out_tree: of the result.
      deep: some of the arrays were captured by functions that are called in a loop or a branch.
    """

    jaxpr: Any
    consts: list[Any]
    out_tree: PyTreeDef
    deep: bool = False


def trace(fun: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """Traces ``fun``. ``make_jaxpr``, because ``jit(f).trace()`` hides closed-over tracers."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    jaxpr, consts, deep = lift(*compat.open_jaxpr(closed))
    return Traced(jaxpr, consts, tree_util.tree_structure(shape), deep)


def same_program(traced: Traced, hidden: Sequence[Any], other: Traced) -> bool:
    """Whether a function was traced alike with tracers in the place of arrays, and with arrays.

    Args:
      traced: with tracers: after its consts, the hidden arrays are inputs.
      hidden: the arrays, no two of them the same.
      other: with the arrays, which are among its consts.
    """
    number = {id(array): i for i, array in enumerate(hidden)}
    start = len(traced.consts)
    inputs = traced.jaxpr.invars[start : start + len(hidden)]
    used = _used(traced.jaxpr)
    ours = {i: v for i, v in enumerate(inputs) if v in used}
    used = _used(other.jaxpr)
    pairs = list(zip(other.consts, other.jaxpr.invars, strict=False))
    theirs = {number[id(c)]: v for c, v in pairs if id(c) in number and v in used}
    if ours.keys() != theirs.keys() or len(number) < len(hidden):
        # JAX leaves arrays as consts of nested programs, and makes inputs of tracers.
        return _skeleton(traced.jaxpr) == _skeleton(other.jaxpr)
    order = sorted(ours)
    left = traced.jaxpr.replace(
        invars=[
            *traced.jaxpr.invars[:start],
            *[ours[i] for i in order],
            *traced.jaxpr.invars[start + len(hidden) :],
        ]
    )
    right = other.jaxpr.replace(
        invars=[
            *[v for c, v in pairs if id(c) not in number],
            *[theirs[i] for i in order],
            *other.jaxpr.invars[len(other.consts) :],
        ]
    )
    try:
        canonicalizer = Canonicalizer("exec")
        if canonicalizer.key(left) == canonicalizer.key(right):
            return True
        exact = not other.deep
    except Uninternable:
        exact = False
    # The operands of a loop come in another order when JAX finds tracers in it.
    return not exact and _skeleton(left) == _skeleton(right)


def _skeleton(jaxpr: Any) -> list[Any]:
    """What a program does, without what it does it to."""
    out: list[Any] = []
    for equation in jaxpr.eqns:
        literals = [str(a) for a in equation.invars if isinstance(a, compat.Literal)]
        out += (equation.primitive.name, literals, [str(v.aval) for v in equation.outvars])
        out += [_skeleton(inner) for inner in compat.inner_jaxprs(equation.params)]
    return out


def _used(jaxpr: Any) -> set[Any]:
    atoms = [a for e in jaxpr.eqns for a in e.invars] + list(jaxpr.outvars)
    return {a for a in atoms if not isinstance(a, compat.Literal)}


class Features(NamedTuple):
    """What a jaxpr holds that refers to functions of the user.

    Attributes:
      callbacks: host callbacks: the program calls *this* function object when it runs.
      rules: derivative or batching rules, which are traced later, and may have captured tracers.
      whiles: how many ``while`` loops there are.
    """

    callbacks: bool
    rules: bool
    whiles: int


_RULES: dict[str, Callable[[dict[str, Any]], compat.Rule | None]] = {
    "custom_jvp_call": lambda p: compat.jvp_rule(p.get("jvp_jaxpr_fun")),
    "custom_vjp_call": lambda p: compat.vjp_rule(
        p.get("fwd_jaxpr_thunk"), p.get("bwd"), p.get("out_trees")
    ),
    "custom_vmap_call": lambda p: compat.vmap_rule(p.get("rule")),
}


def features(jaxpr: Any) -> Features:
    """Looks through a jaxpr, nested ones included."""
    callbacks = rules = False
    whiles = 0
    seen: set[int] = set()
    todo = [jaxpr]
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for equation in current.eqns:
            name = equation.primitive.name
            whiles += name == "while"
            callbacks = callbacks or compat.calls_host(name)
            if name in _RULES:
                rule = _RULES[name](equation.params)
                rules = rules or rule is None or not all(map(_own_rule, rule.functions))
            elif equation.params.get("policy") is not None:
                rules = rules or not _own_rule(equation.params["policy"])
            elif name.startswith("custom_") and any(map(callable, equation.params.values())):
                rules = True
            todo += compat.inner_jaxprs(equation.params)
    return Features(callbacks, rules, whiles)


def _own_rule(function: Any) -> bool:
    if compat.is_own_function(function):
        return True
    inner = compat.defjvps_rule(function)
    return inner is not None and all(map(compat.is_own_function, inner.functions))


def tree_key(tree: PyTreeDef) -> Hashable:
    """A key that tells trees apart that compare equal ({1: x} and {True: x})."""
    return (tree, str(tree))


class Program:
    """One jitted callable over a canonical program (or over one that may not be shared).

    Attributes:
      call: takes the bound values first (consts and captured arrays, as one tuple, if there are any),
        then the arguments.
      avals: of its inputs.
      out_avals: of its outputs.
      takes_numbers: a whole number, or a bool, would do in the place of some input.
      context: in which it was traced, see :func:`current_context`.
      in_tree: of ``(args, kwargs)``, bound values included.
    """

    __slots__ = (
        "_once",
        "avals",
        "call",
        "context",
        "in_tree",
        "out_avals",
        "takes_numbers",
    )

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        in_tree: PyTreeDef,
        out_tree: PyTreeDef,
        jit_options: dict[str, Any],
        context: Hashable,
    ):
        self.in_tree = in_tree
        self.avals = [v.aval for v in jaxpr.invars]
        self.takes_numbers = any(map(_is_number, self.avals))
        self.out_avals = [v.aval for v in jaxpr.outvars]
        self.context = context
        self._once = Once()
        runner = _runner(jaxpr, in_tree, out_tree, context)
        runner.__name__ = runner.__qualname__ = name
        self.call: Callable[..., Any] = jax.jit(runner, **jit_options)

    def first_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the program so that only one thread compiles it."""
        return self._once.call(self.call, *args, **kwargs)


class Once:
    """Lets one thread alone make the first of some calls: it compiles, and the others find the program.

    Attributes:
      done: a call has succeeded.
      thread: the one that makes the first call, or None.
    """

    __slots__ = ("_lock", "done", "thread")

    def __init__(self) -> None:
        self.done = False
        self.thread: int | None = None
        self._lock = threading.RLock()

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``; alone, until a call has succeeded."""
        if self.done:
            return function(*args, **kwargs)
        # With a limit: a callback of the program may run in another thread, and want it too.
        alone = self._lock.acquire(timeout=_PATIENCE_S)
        if alone:
            before, self.thread = self.thread, threading.get_ident()
        try:
            out = function(*args, **kwargs)
            self.done = True
            return out
        finally:
            if alone:
                self.thread = before
                self._lock.release()

    def is_called_here(self) -> bool:
        """Whether this thread makes the first call: it is a finalizer, or a listener of JAX, that asks."""
        return self.thread == threading.get_ident()


def _is_number(aval: Any) -> bool:
    if getattr(aval, "shape", None) != ():
        return False
    return bool(jnp.issubdtype(aval.dtype, jnp.integer) or jnp.issubdtype(aval.dtype, jnp.bool_))


_PATIENCE_S = 30.0


class _Waiting(threading.local):
    """A thread that holds one lock never waits for another: two threads cannot wait for each other."""

    held = False

    def acquire(self) -> bool:
        if self.held:
            return False
        self.held = True
        return True

    def release(self) -> None:
        self.held = False


WAITING = _Waiting()


def _runner(
    jaxpr: Any, in_tree: PyTreeDef, out_tree: PyTreeDef, context: Hashable
) -> Callable[..., Any]:
    run = compat.jaxpr_as_fun(jaxpr)
    avals = [v.aval for v in jaxpr.invars]
    tree_text = str(in_tree)

    # Runs when JAX traces the program: at the first call, and at calls that its dispatch does not know.
    def runner(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_util.tree_flatten((args, kwargs))
        if (
            tree != in_tree
            or str(tree) != tree_text
            or [jax.typeof(x) for x in leaves] != avals
            or compat.bypass()
            or current_context() != context
        ):
            raise Mismatch
        return tree_util.tree_unflatten(out_tree, run(*leaves))

    return runner


def current_context() -> Hashable:
    """Everything outside of a function and its arguments that decides what a trace is."""
    return (compat.trace_context(), compat.config_key())


class Tables:
    """The process-wide tables of canonical programs."""

    def __init__(self, rule_key: Callable[[Callable[..., Any]], Hashable | None]):
        self.full = Interner("full", rule_key=rule_key)
        self.exec = Interner("exec")

    def clear(self) -> None:
        self.full.clear()
        self.exec.clear()

    def canonical(self, jaxpr: Any, transformable: bool) -> Canonical | None:
        """The canonical program.

        Args:
          jaxpr: open.
          transformable: whether derivative and batching rules count. They do unless the program is
            called once, with concrete arguments, outside of every transformation.
        """
        return (self.full if transformable else self.exec).intern(jaxpr)


class ProgramOptions(NamedTuple):
    """How a program is jitted: part of its key, beside the trees.

    Attributes:
      key: hashable; stands for ``jit``.
      jit: the keyword arguments of ``jax.jit``, for the arguments as the program takes them.
      plain: nothing in ``jit`` refers to positions of arguments.
    """

    key: Hashable
    jit: dict[str, Any]
    plain: bool


def make_program(
    name: str,
    traced: Traced,
    in_tree: PyTreeDef,
    canonical: Canonical | None,
    options: ProgramOptions,
    context: Hashable,
    keeps: bool = False,
) -> tuple[Program, bool]:
    """The program of a traced function, and whether it is new.

    Args:
      name: what it is called in profiles.
      traced: the function.
      in_tree: of ``(args, kwargs)`` as the program will be called, bound values included.
      canonical: None for a program that may not be shared.
      options: how it is jitted.
      context: see :func:`current_context`.
      keeps: the tree of the result holds objects of the user's.
    """
    out_tree = traced.out_tree
    if keeps:
        # It holds what this very function captures, which no other may return.
        flat = traced._replace(out_tree=tree_util.tree_structure([0] * out_tree.num_leaves))
        base, fresh = make_program(name, flat, in_tree, canonical, options, context)
        program = copy.copy(base)
        program.call = _with_trees_of(base, in_tree, out_tree)
        return program, fresh
    if canonical is None:
        return Program(name, traced.jaxpr, in_tree, out_tree, options.jit, context), True
    programs = canonical.programs
    key = (tree_key(in_tree), tree_key(out_tree), options.key, context)
    known: Program | None = programs.get(key)
    if known is not None:
        return known, False
    program = Program(name, canonical.jaxpr, in_tree, out_tree, options.jit, context)
    fresh = True
    if options.plain:
        first = programs.setdefault((options.key, context), program)
        if first is not program:
            program.call = _with_trees_of(first, in_tree, out_tree)
            fresh = False
    return programs.setdefault(key, program), fresh


def _with_trees_of(program: Program, in_tree: PyTreeDef, out_tree: PyTreeDef) -> Callable[..., Any]:
    """The same flat program called with other trees: slower by the handling of trees, but not compiled."""
    call, its_in_tree, text = program.call, program.in_tree, str(in_tree)

    def adapted(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_util.tree_flatten((args, kwargs))
        if tree != in_tree or str(tree) != text:
            raise Mismatch
        its_args, its_kwargs = tree_util.tree_unflatten(its_in_tree, leaves)
        return tree_util.tree_unflatten(
            out_tree, tree_util.tree_leaves(call(*its_args, **its_kwargs))
        )

    return adapted
