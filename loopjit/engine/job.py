"""The slow path of a call: finds the program by its full key, or traces and compiles it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from loopjit import compat
from loopjit.engine.state import (
    COUNTS,
    STATES,
    TABLES,
    Counts,
    Entry,
    Signature,
    Site,
    State,
    signature_of,
)
from loopjit.engine.warm import is_concrete, placed_elsewhere
from loopjit.errors import StrictError
from loopjit.memo import LRU
from loopjit.programs.program import (
    WAITING,
    Mismatch,
    ProgramOptions,
    Traced,
    current_context,
    features,
    make_program,
    same_program,
    trace,
)
from loopjit.signature import replace
from loopjit.signature.arguments import Layout, TypesKey, Under, layout_of, nodes_of, types_key
from loopjit.signature.code import Usage
from loopjit.signature.describe import Description

_log = logging.getLogger("loopjit")

_SMALL = 4096  # elements
_SHARED_CONST_BYTES = 1 << 20
"""Arrays made while tracing are kept for other functions up to this size; above it, for one function."""


class Target(NamedTuple):
    """What is to be staged.

    Attributes:
      roots: the function, or for a loop the functions that are its arguments.
      make: makes the function to trace from (copies of) the roots.
      name: how the program is called in profiles.
      options_key: hashable; stands for ``options``, ``explicit`` and ``make``.
      options: how a program is jitted, see :class:`Options`.
      explicit: which arguments are declared static: positions and names.
      own: the private states, kept with the function object. None: a function that is called once.
      counts: of this function.
      strict: raise instead of taking a slower path.
      fix_ints: Python ints are static under a transformation.
      usages: what the function reads from each of its parameters.
      max_programs: how many programs are remembered.
    """

    roots: tuple[Any, ...]
    make: Callable[..., Callable[..., Any]]
    name: str
    options_key: Hashable
    options: Callable[[Layout, tuple[Any, ...], dict[str, Any], int], ProgramOptions]
    explicit: Callable[[tuple[Any, ...], dict[str, Any]], set[Any]]
    own: LRU[Hashable, State] | None
    counts: Counts
    strict: bool
    fix_ints: bool
    usages: dict[int | str, Usage] | None = None
    max_programs: int = 256


class _Split(NamedTuple):
    """The arguments of a call, split.

    Attributes:
      layout: how.
      types: what the layout depends on.
      key: the static leaves, written down.
      classes: the user's classes among the nodes of the traced ones.
      hidden: arrays that static leaves capture; pinned: those that count by identity.
      reasons: why the static leaves may not be shared.
      writes: static leaves are written to.
      changeable: static leaves may change later.
      uncopied: static leaves lead to functions that are not copied for a trace.
      dynamic: the traced positional arguments.
      keywords: the traced keyword arguments.
    """

    layout: Layout
    types: TypesKey
    key: Hashable
    classes: Hashable
    hidden: list[Any]
    pinned: tuple[Any, ...]
    reasons: tuple[str, ...]
    writes: bool
    uncopied: bool
    changeable: bool
    dynamic: Sequence[Any]
    keywords: dict[str, Any]


class _Again(Exception):
    """What was learned by tracing changes the state: start over."""


class Used(NamedTuple):
    """What a call on the slow path ended with."""

    state: State
    split: _Split
    hidden: list[Any]
    entry: Entry


class Job:
    """One call on the slow path: finds the program, or makes it."""

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.hoist = True
        self.writes = False
        self.whiles: int | None = None
        self.used: Used

    def run(self) -> Any:
        for _ in range(8):
            state, signature, split = self._state()
            outermost = WAITING.acquire()
            if outermost:
                state.lock.acquire()  # so that equal functions in many threads are traced once
            try:
                return self._find_or_make(state, signature, split)
            except _Again:
                continue
            finally:
                if outermost:
                    state.lock.release()
                    WAITING.release()
        raise Mismatch

    # -- finding --------------------------------------------------------------------------------------

    def _state(self) -> tuple[State, Signature, _Split]:
        target = self.target
        signature = signature_of(target.roots, target.options_key)
        reasons = signature.reasons
        if not reasons:
            state = STATES.get(signature.key) or STATES.put(
                signature.key, State(target.max_programs)
            )
            self.writes = self.writes or state.writes
            if not state.private and not state.returns_others(signature.seen):
                split = self._split(state, hoist=True)
                reasons = split.reasons
                if not reasons:
                    self.hoist = True
                    return state, signature, split
        if target.strict and reasons:
            raise StrictError(
                f"strict=True: {target.name} cannot be recognised when it is made anew, because it"
                f" captures or is given {'; '.join(reasons)}"
            )
        self.hoist = False
        signature = signature_of(target.roots, target.options_key, hoist=False)
        state = self._own(signature)
        return state, signature, self._split(state, hoist=False)

    def _own(self, signature: Signature) -> State:
        own, most = self.target.own, self.target.max_programs
        if own is None:
            return State(most)
        state = own.get(signature.key) or own.put(signature.key, State(most))
        while len(own) > 1 and sum([len(s.programs) for s in own.values()]) > most:
            own.pop_oldest()
        return state

    def _split(self, state: State, hoist: bool) -> _Split:
        args, kwargs, explicit = self.args, self.kwargs, self.target.explicit
        types = types_key(args, kwargs)
        fix_ints = (
            self.target.fix_ints
            and state.fixed.get(types, False)
            and not compat.trace_state_is_clean()
        )
        nodes = Description(hoist)
        usages = self.target.usages
        layout = layout_of(args, kwargs, explicit, nodes, fix_ints, usages=usages)
        layout.ints = layout.ints and self.target.fix_ints
        if layout.ints and fix_ints:
            types = Under(types)
        known = state.layouts.get(types)
        if known is not None and not known.same(layout):
            # The same types, once with static leaves inside and once without: leaf by leaf from now on.
            nodes = Description(hoist)
            layout = layout_of(args, kwargs, explicit, nodes, fix_ints, flat=True)
        d = Description(hoist)
        dynamic, keywords = layout.split(args, kwargs, d)
        return _Split(
            layout,
            types,
            tuple(d.out),
            tuple(nodes.out),
            d.hidden,
            d.pinned,
            (*nodes.reasons(), *d.reasons()),
            bool(d.writes),
            d.uncopied or nodes.uncopied or bool(layout.plans),
            d.changeable,
            dynamic,
            keywords,
        )

    def _privately(self, state: State) -> _Again:
        """Start over: programs of equal functions may not be shared."""
        state.private = True
        return _Again()

    def _with_originals(self, state: State) -> _Again:
        """Start over: and what is captured has to be seen itself, not copies of it."""
        state.writes = self.writes = True
        return self._privately(state)

    def _find_or_make(self, state: State, signature: Signature, split: _Split) -> Any:
        hidden = [*signature.hidden, *split.hidden]
        pinned = (*signature.pinned, *split.pinned)
        if hidden and placed_elsewhere(hidden, split.dynamic, split.keywords):
            raise self._privately(state)
        exact = self._exact_key(hidden, split)
        entry = state.programs.get((split.types, split.key, exact))
        if entry is not None:
            out = self._call(entry, hidden, pinned, split)
            self._count("hits")
            self._learn(state, split, hidden, entry)
            return out
        return self._make(state, signature, split, hidden, exact)

    def _exact_key(self, hidden: list[Any], split: _Split) -> Hashable:
        leaves, tree = tree_util.tree_flatten((hidden, split.dynamic, split.keywords))
        avals = tuple([jax.typeof(leaf) for leaf in leaves])
        once = not self.hoist and is_concrete(split.dynamic, split.keywords)
        return (avals, tree, str(tree), split.classes, current_context(), once)

    def _call(
        self, entry: Entry, hidden: Sequence[Any], pinned: Sequence[Any], split: _Split
    ) -> Any:
        bound = (entry.bound_values(hidden, pinned),) if entry.bound else ()
        return entry.program.first_call(*bound, *split.dynamic, **split.keywords)

    def _count(self, what: str) -> None:
        for counts in (COUNTS, self.target.counts):
            setattr(counts, what, getattr(counts, what) + 1)

    # -- making ---------------------------------------------------------------------------------------

    def _make(
        self,
        state: State,
        signature: Signature,
        split: _Split,
        hidden: list[Any],
        exact: Hashable,
    ) -> Any:
        copies = not (self.writes or state.writes or signature.writes or split.writes)
        stale = signature.uncopied or split.uncopied or (not copies and signature.helpers)
        forget = signature.key if stale else None
        asked = compat.times_asked()
        try:
            traced, untouched, context = self._trace(split, hidden, copies, forget)
        except Exception:
            if not hidden:
                raise
            # Perhaps the value of a captured array is needed: trace with the array itself.
            _log.debug("%s: traced with its arrays", self.target.name, exc_info=True)
            raise self._privately(state) from None
        if hidden and compat.times_asked() != asked:
            # The value of a captured array is needed, though the function could do without it.
            raise self._privately(state)
        if not untouched:
            # The copy of a captured container was written to: the original has to see that.
            raise self._with_originals(state)
        found = features(traced.jaxpr)
        self._decide_on_ints(state, split, found.whiles)
        results = nodes_of(traced.out_tree)
        if copies and (found.callbacks or results.static):
            # What runs later, or is returned, has to hold what is captured, not the copies.
            raise self._with_originals(state)
        if self.hoist:
            changeable = signature.changeable or split.changeable
            made = self._classes_made(results.classes, split)
            if stale and not compat.CAN_FORGET:
                raise self._privately(state)
            # Rules are traced later, when our tracers are dead, and what they read may have changed.
            late = found.rules and (hidden or changeable)
            foreign = any(id(cls) not in signature.seen for cls in made)
            if late or foreign or not self._same_with_arrays(split, traced, hidden, forget):
                raise self._privately(state)
            state.classes = tuple(dict.fromkeys([*state.classes, *made]))
        if placed_elsewhere(traced.consts, split.dynamic, split.keywords):
            # JAX bakes them; as inputs they would decide where the program runs, or raise.
            raise Mismatch
        entry, fresh = self._entry(traced, hidden, split, context, found.rules, results.static)
        unchanged = self._unchanged(signature, split)
        out = self._call(entry, hidden, (), split)
        self._count("misses" if fresh else "interned")
        if any(isinstance(c, jax.core.Tracer) for c in entry.consts):
            return out  # of a transformation that will be over
        if self.hoist:
            kept = sum(getattr(c, "nbytes", 0) for c in entry.consts)
            state.private = not unchanged or found.callbacks or kept > _SHARED_CONST_BYTES
            if state.private:
                entry = entry._replace(consts=(*entry.consts, *hidden))
        pinned = (*signature.pinned, *split.pinned)
        self._store(state, split, hidden, pinned, exact, entry)
        return out

    def _store(
        self,
        state: State,
        split: _Split,
        hidden: list[Any],
        pinned: Sequence[Any],
        exact: Hashable,
        entry: Entry,
    ) -> None:
        if not self.hoist or state.private:
            # For this function object, as it is after the trace; its arrays count by identity.
            if self.target.own is None:
                return
            now = signature_of(self.target.roots, self.target.options_key, hoist=False)
            state = self._own(now)
            split = self._split(state, hoist=False)
            hidden, exact = [], self._exact_key([], split)
            pinned = (*now.pinned, *split.pinned)
        entry = entry.without(pinned)
        state.add((split.types, split.key, exact), entry)
        self._learn(state, split, hidden, entry)

    def _learn(self, state: State, split: _Split, hidden: list[Any], entry: Entry) -> None:
        site: Site = state.site(split.types, split.key)
        split.layout.remember(split.key, site, state.layouts.get(split.types))
        state.layouts[split.types] = split.layout
        site.learn(entry, hidden, split.dynamic, split.keywords)
        layout = split.layout
        alike = len(state.layouts) == 1 and not site.where and not state.private
        plain = layout.all_traced and not (layout.plans or layout.ints or entry.fill or entry.once)
        state.quick = entry if alike and plain and not self.kwargs else None
        self.used = Used(state, split, hidden, entry)

    def _trace(
        self, split: _Split, hidden: list[Any], copies: bool, forget: Hashable, tracers: bool = True
    ) -> tuple[Traced, bool, Hashable]:
        seen: list[Any] = []

        def traced(bound: Sequence[Any], dynamic: Sequence[Any], keywords: dict[str, Any]) -> Any:
            values = iter(bound if tracers else hidden)
            replacer = replace.Replacer(values if hidden else None)
            put = replacer.value if copies else _itself
            function = self.target.make(*[put(root) for root in self.target.roots])
            build = split.layout.rebuild(self.args, self.kwargs, put)
            if next(values, None) is not None:
                raise Mismatch  # something changed between the description and now
            seen[:] = [replacer, current_context()]
            args, kwargs = build(dynamic, keywords)
            return function(*args, **kwargs)

        traced.__name__ = traced.__qualname__ = self.target.name
        # JAX remembers traces by the identity of functions, and does not notice what they read. Copies
        # are new to it; where there are originals it is made to forget them.
        with contextlib.nullcontext() if forget is None else compat.forget_traces(forget):
            bound = hidden if tracers else []
            out = trace(traced, (bound, list(split.dynamic), split.keywords))
        replacer, context = seen
        return out, replacer.untouched(), context

    def _decide_on_ints(self, state: State, split: _Split, whiles: int) -> None:
        """Whether Python ints have to be static, so that a loop can be differentiated in reverse mode.

        Under a transformation, an int that bounds a loop does what it does without us: the loop has a
        fixed length. An int that bounds no loop stays traced, as in ``jax.jit``.
        """
        types = split.types
        if isinstance(types, Under):
            if self.whiles is not None and whiles >= self.whiles:
                state.fixed[types.types] = False  # it bounds no loop after all
                raise _Again
        elif (
            split.layout.ints
            and whiles
            and types not in state.fixed
            and not compat.trace_state_is_clean()
        ):
            state.fixed[types] = True
            self.whiles = whiles
            raise _Again

    def _classes_made(self, classes: Sequence[type], split: _Split) -> list[type]:
        """The classes of results that do not come from the arguments."""
        given = nodes_of(tree_util.tree_structure((split.dynamic, split.keywords))).classes
        return [cls for cls in classes if cls not in given]

    def _same_with_arrays(
        self, split: _Split, traced: Traced, hidden: list[Any], forget: Hashable
    ) -> bool:
        """Whether the trace is the same with the captured arrays themselves in their places.

        A function can tell a tracer from an array without failing: it may catch the error of ``int(c)``,
        print it, or ask for its class; and ``fori_loop`` looks at bounds whose values it can have. So it
        is traced once more, with other arrays of the same avals: whoever looks at values sees others.
        """
        if not hidden:
            return True
        try:
            arrays = [_disturbed(array) for array in hidden]
            other, untouched, _ = self._trace(split, arrays, True, forget, tracers=False)
            if not (untouched and same_program(traced, arrays, other)):
                return False
            if len(set(map(id, hidden))) == len(hidden):
                return True
            # One array in two places: whoever asks whether it is one sees that it is.
            other, untouched, _ = self._trace(split, hidden, True, forget, tracers=False)
            return untouched and same_program(traced, hidden, other)
        except Exception:
            return False

    def _entry(
        self,
        traced: Traced,
        hidden: list[Any],
        split: _Split,
        context: Hashable,
        rules: bool,
        keeps: bool,
    ) -> tuple[Entry, bool]:
        consts = tuple([_own(c) for c in traced.consts])
        inputs = tuple(split.dynamic)
        bound = bool(consts or hidden)
        if bound:
            inputs = ((*consts, *hidden), *inputs)
        options = self.target.options(split.layout, self.args, self.kwargs, int(bound))
        # Rules do not matter to a program that is not transformed; where functions are not shared it is
        # cheap to have another one for calls under a transformation.
        once = rules and not self.hoist and is_concrete(inputs, split.keywords)
        canonical = TABLES.canonical(traced.jaxpr, transformable=not once)
        in_tree = tree_util.tree_structure((inputs, split.keywords))
        program, fresh = make_program(
            self.target.name, traced, in_tree, canonical, options, context, keeps
        )
        return Entry(program.call, bound, consts, program, once=once), fresh

    def _unchanged(self, signature: Signature, split: _Split) -> bool:
        """Whether everything that was written down is as it was before the trace."""
        target = self.target
        after = signature_of(target.roots, target.options_key, hoist=self.hoist)
        d = Description(self.hoist)
        split.layout.split(self.args, self.kwargs, d)
        old, new = [*signature.hidden, *split.hidden], [*after.hidden, *d.hidden]
        return (
            after.key == signature.key
            and tuple(d.out) == split.key
            and len(old) == len(new)
            and all(a is b for a, b in zip(old, new, strict=True))
        )


def _own(const: Any) -> Any:
    """A const that nobody can change: JAX keeps views of NumPy arrays of the user."""
    if isinstance(const, np.ndarray):
        const = const.copy()  # the method keeps the weak type that JAX may have noted
        const.setflags(write=False)
    return const


def _disturbed(array: Any) -> Any:
    """Another array of the same aval; the array itself where that would be costly, or is not possible."""
    if isinstance(array, jax.core.Tracer) or array.size > _SMALL:
        return array
    try:
        values = np.asarray(array)
        values = ~values if values.dtype == bool else values + values.dtype.type(1)
        with jax.ensure_compile_time_eval():
            if array.weak_type:
                other = ~array if array.dtype == bool else array + 1
            else:
                other = jax.device_put(values, array.sharding)
    except Exception:
        return array  # keys, or arrays of other processes
    return other if jax.typeof(other) == jax.typeof(array) else array


def _itself(value: Any, usage: Usage = None) -> Any:
    return value
