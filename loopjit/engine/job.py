"""The slow path of a call: finds the program by its full key, or traces and compiles it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from loopjit import compat
from loopjit.engine.call import Call, Split, Target, Trial
from loopjit.engine.promotion import Again, Promotion
from loopjit.engine.state import (
    COUNTS,
    STATES,
    TABLES,
    Entry,
    Signature,
    Site,
    State,
    holds_any,
    signature_of,
)
from loopjit.engine.warm import is_concrete, placed_elsewhere
from loopjit.errors import StrictError
from loopjit.memo import same_objects
from loopjit.programs.program import WAITING, Mismatch, current_context, features, make_program
from loopjit.programs.weak import adopt_executable
from loopjit.signature.arguments import Layout, nodes_of
from loopjit.signature.describe import Description

_log = logging.getLogger("loopjit")

_ROUNDS = 1000
"""More often than this nothing new can be learned by tracing; each time one leaf becomes static, at least."""
_SHARED_CONST_BYTES = 1 << 20
"""Arrays made while tracing are kept for other functions up to this size; above it, for one function."""


class Used(NamedTuple):
    """What a call on the slow path ended with."""

    state: State
    split: Split
    hidden: list[Any]
    entry: Entry


class Job:
    """One call on the slow path: finds the program, or makes it."""

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.target = target
        self.call = Call(target, args, kwargs)
        self.statics = Promotion(self.call)
        self.hoist = True
        self.ran = False
        self.out: Any = None
        self.used: Used

    def run(self) -> Any:
        for _ in range(_ROUNDS):
            state, signature, split = self._state()
            outermost = WAITING.acquire()
            if outermost:
                state.lock.acquire()  # so that equal functions in many threads are traced once
            try:
                return self._find_or_make(state, signature, split)
            except Again:
                continue
            finally:
                if outermost:
                    state.lock.release()
                    WAITING.release()
        raise Mismatch

    def layout(self) -> Layout:
        """How the arguments have to be split, found by tracing, without compiling anything."""
        for _ in range(_ROUNDS):
            state, signature, split = self._state()
            hidden = [*signature.hidden, *split.hidden]
            try:
                trial = self._trial(state, signature, split, hidden)
                if trial.error is None:
                    self.statics.heed(trial)
                    self.statics.keep(state)
                    return split.layout
                self.statics.solve(state, signature, trial)
            except Again:
                continue
            if not hidden:
                raise trial.error
            state.private = True
        raise Mismatch

    # -- finding --------------------------------------------------------------------------------------

    def _state(self) -> tuple[State, Signature, Split]:
        target = self.target
        signature = signature_of(target.roots, target.options_key)
        reasons = signature.reasons
        if not reasons:
            state = STATES.get(signature.key) or STATES.put(
                signature.key, State(target.max_programs)
            )
            self.call.writes = self.call.writes or state.writes
            if not state.private and not state.returns_others(signature.seen):
                split = self.statics.split(state, True)
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
        signature = self._signature()
        state = self._own(signature)
        return state, signature, self.statics.split(state, False)

    def _signature(self) -> Signature:
        """The functions as they count where programs may not be shared."""
        target = self.target
        return signature_of(target.roots, target.options_key, False, target.counts.holds)

    def _own(self, signature: Signature) -> State:
        own, most = self.target.own, self.target.max_programs
        if own is None:
            return State(most)
        state = own.get(signature.key) or own.put(signature.key, State(most))
        state.live = self.target.counts.holds
        while len(own) > 1 and sum([len(s.programs) for s in own.values()]) > most:
            own.pop_oldest()
        return state

    def _privately(self, state: State) -> Again:
        """Start over: programs of equal functions may not be shared."""
        state.private = True
        return Again()

    def _with_originals(self, state: State) -> Again:
        """Start over: and what is captured has to be seen itself, not copies of it."""
        state.writes = self.call.writes = True
        return self._privately(state)

    def _find_or_make(self, state: State, signature: Signature, split: Split) -> Any:
        hidden = [*signature.hidden, *split.hidden]
        pinned = (*signature.pinned, *split.pinned)
        if hidden and placed_elsewhere(hidden, split.dynamic, split.keywords):
            raise self._privately(state)
        exact = self._exact_key(hidden, split)
        entry = state.programs.get((split.types, split.key, exact))
        if entry is not None:
            out = self.out = self._call(entry, hidden, pinned, split)
            self.ran = True
            self._count("hits")
            self.statics.keep(state)
            self._learn(state, split, hidden, entry)
            return out
        return self._make(state, signature, split, hidden, exact)

    def _exact_key(self, hidden: list[Any], split: Split) -> Hashable:
        leaves, tree = tree_util.tree_flatten((hidden, split.dynamic, split.keywords))
        avals = tuple([jax.typeof(leaf) for leaf in leaves])
        once = not self.hoist and is_concrete(split.dynamic, split.keywords)
        return (avals, tree, str(tree), split.classes, current_context(), once)

    def _call(
        self, entry: Entry, hidden: Sequence[Any], pinned: Sequence[Any], split: Split
    ) -> Any:
        bound = (entry.bound_values(hidden, pinned),) if entry.bound else ()
        return entry.program.first_call(*bound, *split.dynamic, **split.keywords)

    def _count(self, what: str) -> None:
        for counts in (COUNTS, self.target.counts):
            setattr(counts, what, getattr(counts, what) + 1)

    def _trial(self, state: State, signature: Signature, split: Split, hidden: list[Any]) -> Trial:
        last = self.statics.last_trial(signature, split, hidden)
        return last or self.call.attempt(state, signature, split, hidden)

    # -- making ---------------------------------------------------------------------------------------

    def _make(
        self,
        state: State,
        signature: Signature,
        split: Split,
        hidden: list[Any],
        exact: Hashable,
    ) -> Any:
        trial = self._trial(state, signature, split, hidden)
        if trial.error is not None:
            self.statics.solve(state, signature, trial)
            if hidden:
                # Perhaps the value of a captured array is needed: trace with the array itself.
                _log.debug("%s: traced with its arrays", self.target.name, exc_info=trial.error)
                raise self._privately(state) from None
            raise trial.error
        traced = trial.traced
        self.statics.heed(trial)
        if hidden and trial.asked:
            # The value of a captured array is needed, though the function could do without it.
            raise self._privately(state)
        if not trial.untouched:
            # The copy of a captured container was written to: the original has to see that.
            raise self._with_originals(state)
        found = features(traced.jaxpr)
        self.statics.fix_trip_counts(state, signature, trial, found.whiles)
        copies, stale, forget = self.call.copying(state, signature, split)
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
            if late or foreign or not self.call.same_with_arrays(split, traced, hidden, forget):
                raise self._privately(state)
            state.classes = tuple(dict.fromkeys([*state.classes, *made]))
        if placed_elsewhere(traced.consts, split.dynamic, split.keywords):
            # JAX bakes them; as inputs they would decide where the program runs, or raise.
            raise Mismatch
        entry, fresh = self._entry(trial, found.rules, results.static)
        if fresh:
            adopt_executable(entry.program, [e.program for e in state.programs.values()])
        unchanged = self._unchanged(signature, split)
        if found.callbacks and not self.hoist and not self.target.counts.holds:
            seen = signature.seen | split.seen
            self.target.counts.holds = holds_any(traced.jaxpr, seen)
        out = self.out = self._call(entry, hidden, (), split)
        self.ran = True  # whatever happens now, the result stands: it must not run twice
        self._count("misses" if fresh else "interned")
        self.statics.commit(state, split, fresh)
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
        split: Split,
        hidden: list[Any],
        pinned: Sequence[Any],
        exact: Hashable,
        entry: Entry,
    ) -> None:
        if not self.hoist or state.private:
            # For this function object, as it is after the trace; its arrays count by identity.
            if self.target.own is None:
                return
            now = self._signature()
            before, state = state, self._own(now)
            split = self.statics.move(state, split)
            hidden, exact = [], self._exact_key([], split)
            old, pinned = pinned, (*now.pinned, *split.pinned)
            if not self.hoist and before is not state and same_objects(old, pinned):
                # The trace itself changed what is captured (it counts traces, say). That does not
                # void what was traced before, or two kinds of calls would be traced in turn for ever.
                state.adopt(before)
        entry = entry.without(pinned)
        state.add((split.types, split.key, exact), entry)
        self._learn(state, split, hidden, entry)

    def _learn(self, state: State, split: Split, hidden: list[Any], entry: Entry) -> None:
        site: Site = state.site(split.types, split.key)
        layout = split.layout
        layouts = layout.remember(split.values, site, state.layouts.get(split.types, ()))
        state.layouts[split.types] = layouts
        site.learn(entry, hidden, split.dynamic, split.keywords)
        alike = len(state.layouts) == len(layouts) == 1 and not site.where and not state.private
        plain = layout.all_traced and not (
            layout.plans or entry.program.takes_numbers or entry.fill or entry.once
        )
        state.quick = entry if alike and plain and not self.call.kwargs else None
        self.used = Used(state, split, hidden, entry)

    def _classes_made(self, classes: Sequence[type], split: Split) -> list[type]:
        """The classes of results that do not come from the arguments."""
        given = nodes_of(tree_util.tree_structure((split.dynamic, split.keywords))).classes
        return [cls for cls in classes if cls not in given]

    def _entry(self, trial: Trial, rules: bool, keeps: bool) -> tuple[Entry, bool]:
        split, hidden, traced = trial.split, trial.hidden, trial.traced
        consts = tuple([_own(c) for c in traced.consts])
        inputs = tuple(split.dynamic)
        bound = bool(consts or hidden)
        if bound:
            inputs = ((*consts, *hidden), *inputs)
        options = self.target.options(split.layout, self.call.args, self.call.kwargs, int(bound))
        # Rules do not matter to a program that is not transformed; where functions are not shared it is
        # cheap to have another one for calls under a transformation.
        once = rules and not self.hoist and is_concrete(inputs, split.keywords)
        canonical = TABLES.canonical(traced.jaxpr, transformable=not once)
        in_tree = tree_util.tree_structure((inputs, split.keywords))
        program, fresh = make_program(
            self.target.name, traced, in_tree, canonical, options, trial.context, keeps
        )
        return Entry(program.call, bound, consts, program, once=once), fresh

    def _unchanged(self, signature: Signature, split: Split) -> bool:
        """Whether everything that was written down is as it was before the trace."""
        target = self.target
        live = target.counts.holds and not self.hoist
        after = signature_of(target.roots, target.options_key, self.hoist, live)
        d = Description(self.hoist, live)
        split.layout.split(self.call.args, self.call.kwargs, d)
        return (
            after.key == signature.key
            and tuple(d.out) == split.values
            and same_objects([*signature.hidden, *split.hidden], [*after.hidden, *d.hidden])
        )


def _own(const: Any) -> Any:
    """A const that nobody can change: JAX keeps views of NumPy arrays of the user."""
    if isinstance(const, np.ndarray):
        const = const.copy()  # the method keeps the weak type that JAX may have noted
        const.setflags(write=False)
    return const
