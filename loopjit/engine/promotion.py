"""Which leaves of a call become static: found by tracing, remembered with the state, told to the user."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax import tree_util

from loopjit import compat
from loopjit.engine.call import Call, Split, Trial
from loopjit.engine.state import Signature, State
from loopjit.errors import StrictError
from loopjit.memo import same_objects
from loopjit.programs.program import current_context, features
from loopjit.signature.arguments import Layout, Leaf, OnHost, Place, Promoted, Under
from loopjit.signature.host import is_count, rank
from loopjit.statics import report
from loopjit.statics.failure import Failure
from loopjit.statics.search import find_needed, without_needless
from loopjit.statics.trips import bounding_inputs

_DEFAULT = "it is left at its default"
_CONVERSIONS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


_COUNTED = (bool, int, float, complex, str, bytes, np.generic, np.ndarray, jax.Array)
"""Leaves whose values are counted: settings objects, and functions, are made once as a rule."""


class Again(Exception):
    """What was learned by tracing changes the state: start over."""


class Promotion:
    """The static leaves of one call.

    What is found out is kept here until the call has succeeded, and then with the state.

    Attributes:
      note: for JAX's error, if it comes to that.
      users: the layout with which the error of the function is what plain Python would raise, too.
    """

    def __init__(self, call: Call):
        self._call = call
        self._needs: dict[Hashable, Promoted] = {}
        self._here: Promoted = frozenset()
        self._steps: dict[Place | OnHost, Hashable] = {}
        self._found: dict[str, report.LeafInfo] = {}
        self._floats: dict[str, str] = {}
        self._last: Trial | None = None
        self.note: str | None = None
        self.users: Layout | None = None

    def split(self, state: State, hoist: bool) -> Split:
        """Splits the arguments by what is known of the leaves that must be static."""
        # What was found for this call holds for it, though a trace may have changed what its static
        # arguments say, if it writes to them.
        promoted = self._here
        while True:
            split = self._call.split_at(state, hoist, promoted)
            if not self._call.target.promotes:
                return split
            points = [self._point(split)]
            if self._is_under():
                points.append(self._point(split, under=True))
            more: Promoted = frozenset()
            for point in points:
                found = self._needs_at(state, point)
                self._steps.update(dict.fromkeys(found, point))
                more |= found
            if more <= promoted:
                if self._call.target.strict:
                    self._refuse_arrays(split)
                self._here = promoted
                return split
            promoted |= more

    def move(self, state: State, split: Split) -> Split:
        """The same split for another state, which learns what has to be static."""
        promoted = split.layout.promoted
        if promoted:
            start = self._call.split_at(state, False, frozenset())
            state.needs.put(self._point(start, self._is_under()), promoted)
        return self._call.split_at(state, False, promoted)

    def _refuse_arrays(self, split: Split) -> None:
        for leaf in self._call.leaves():
            if isinstance(leaf.value, jax.Array) and split.layout.is_static(leaf):
                message = report.array_message(self._call.target.name, self._call.path(leaf), "")
                raise StrictError(f"strict=True: {message}")

    def _needs_at(self, state: State, point: Hashable) -> Promoted:
        return self._needs.get(point, frozenset()) | (state.needs.peek(point) or frozenset())

    def _point(self, split: Split, under: bool = False) -> Hashable:
        """Where on the way from no static leaves to all that are needed a split is."""
        types = split.types.types if isinstance(split.types, Under) else split.types
        tree = tree_util.tree_structure((split.dynamic, split.keywords))
        return (under, types, split.key, tree, current_context())

    def _is_under(self) -> bool:
        """Whether trip counts have to be static: the call may be differentiated in reverse mode."""
        return self._call.target.promotes and not compat.trace_state_is_clean()

    def last_trial(self, signature: Signature, split: Split, hidden: list[Any]) -> Trial | None:
        """The last trial, if it was one of just this."""
        trial, self._last = self._last, None
        if (
            trial is None
            or trial.signature != signature.key
            or trial.split.key != split.key
            or not same_objects(trial.hidden, hidden)
        ):
            return None
        return trial

    def _candidates(self, split: Split) -> list[Place | OnHost]:
        """Leaves that could be static, the likeliest to be needed first; last, to read arrays to the host."""
        if not self._call.target.promotes:
            return []
        forbidden = self._call.target.traced(self._call.args, self._call.kwargs)
        ranks = [
            (order, leaf.place)
            for leaf in self._call.traced_leaves(split)
            if leaf.place[0] not in forbidden and (order := rank(leaf.value)) is not None
        ]
        promoted = split.layout.promoted
        arrays = [
            OnHost(leaf.place)
            for leaf in self._call.leaves()
            if isinstance(leaf.value, jax.Array) and leaf.place in promoted
        ]
        return [
            *[place for _, place in sorted(ranks, key=lambda item: item[0])],
            *[place for place in arrays if place not in promoted],
        ]

    def _works(
        self, state: State, signature: Signature, split: Split
    ) -> Callable[[Promoted], Trial]:
        """Tries more static leaves."""

        def attempt(more: Promoted) -> Trial:
            new = self._call.split_at(state, split.hoist, split.layout.promoted | more)
            trial = self._call.attempt(state, signature, new, [*signature.hidden, *new.hidden])
            if trial.error is None:
                self._last = trial
            return trial

        return attempt

    def solve(self, state: State, signature: Signature, trial: Trial) -> None:
        """Starts over with the leaves static whose values are needed. Returns where that would not help."""
        split, failure = trial.split, trial.failure
        assert failure is not None
        self.note = self._explain(trial)
        if split.layout.promoted and self._is_users(None, trial):
            self.users = split.layout
        candidates = self._candidates(split)
        if failure.bound or not (failure.known or failure.likely):
            return
        if failure.known and failure.named.issubset(candidates):
            needed: Promoted | None = failure.named
        else:
            if failure.known:  # JAX names all inputs of a nested program, though one may do
                candidates = [place for place in candidates if place in failure.named]
            attempt = self._works(state, signature, split)
            trials: list[Trial] = []

            def works(more: Promoted) -> bool:
                trials.append(attempt(more))
                return trials[-1].error is None

            needed = find_needed(works, candidates, failure.guesses)
            if needed is None and trials and self._is_users(trial, trials[-1]):
                self.users, self.note = trials[-1].split.layout, None
        if needed:
            self._need(split, self._point(split), needed, "its value is needed", failure)
            raise Again

    def _is_users(self, before: Trial | None, trial: Trial) -> bool:
        """Whether plain Python would raise the error, too: it is another than that which tracers cause."""
        failure = trial.failure
        if failure is None or failure.known or isinstance(trial.error, _CONVERSIONS):
            return False
        if any(isinstance(place, OnHost) for place in trial.split.layout.promoted):
            return False  # or NumPy raised it
        return before is None or str(before.error) != str(trial.error)

    def heed(self, trial: Trial) -> None:
        """Starts over where a value was needed, and the function caught the error."""
        if not trial.caught:
            return
        candidates = self._candidates(trial.split)
        for failure in trial.caught:
            if not failure.bound and failure.named.issubset(candidates):
                point = self._point(trial.split)
                self._need(trial.split, point, failure.named, "its value is asked for", failure)
                raise Again

    def fix_trip_counts(
        self, state: State, signature: Signature, trial: Trial, whiles: int
    ) -> None:
        """Starts over with trip counts static, so that their loops can be differentiated in reverse mode.

        Under a transformation, a number that bounds a loop does what it does without us: the loop has a
        fixed length. One that bounds no loop stays traced, as in ``jax.jit``.
        """
        split = trial.split
        if not whiles or not self._is_under():
            return
        compat.explain_reverse_mode(report.REVERSE_NOTE)
        point = self._point(split, under=True)
        if point in self._needs or state.needs.peek(point) is not None:
            return
        start = len(trial.traced.consts) + len(trial.hidden)
        bounding = {i - start for i in bounding_inputs(trial.traced.jaxpr)}
        usable = self._candidates(split)
        leaves = self._call.traced_leaves(split)
        found = [
            leaf
            for i, leaf in enumerate(leaves)
            if i in bounding and leaf.place in usable and is_count(leaf.value)
        ]
        counts: list[Place | OnHost] = [
            *[leaf.place for leaf in found],
            *[OnHost(leaf.place) for leaf in found if isinstance(leaf.value, jax.Array)],
        ]
        attempt = self._works(state, signature, split)

        def loops(more: Promoted) -> int:
            result = attempt(more)
            return whiles if result.error else features(result.traced.jaxpr).whiles

        fewest = loops(frozenset(counts)) if counts else whiles
        if fewest >= whiles:
            state.needs.put(point, frozenset())
            return
        needed = without_needless(lambda more: loops(more) <= fewest, counts)
        self._need(split, point, needed, "under a transformation, it is the length of a loop", None)
        raise Again

    def _need(
        self,
        split: Split,
        point: Hashable,
        places: Promoted,
        reason: str,
        failure: Failure | None,
    ) -> None:
        """Notes that leaves must be static, and why."""
        self._here |= places
        for place in places:
            # That an array has to be on the host does not depend on its value: it is known with the array.
            known = self._steps.get(place.place, point) if isinstance(place, OnHost) else point
            self._needs[known] = self._needs.get(known, frozenset()) | {place}
            self._steps[place] = known
        line = None if failure is None else failure.line
        name = self._call.target.name
        for leaf in self._call.traced_leaves(split):
            if leaf.place not in places:
                continue
            path = self._call.path(leaf)
            self._found[path] = report.LeafInfo(path, True, reason, line)
            if failure is not None and failure.truth and rank(leaf.value) == 4:
                self._floats[path] = report.float_message(name, path, report.at(line))

    def _explain(self, trial: Trial) -> str | None:
        """A note for the error, if it comes from a value that was needed."""
        error, failure = trial.error, trial.failure
        assert error is not None and failure is not None
        note = report.note_of(error)
        if note is not None:
            return note
        if not failure.known and not isinstance(error, _CONVERSIONS):
            return None
        places = failure.named or failure.guesses
        named = [leaf for leaf in self._call.traced_leaves(trial.split) if leaf.place in places]
        forbidden = self._call.target.traced(self._call.args, self._call.kwargs)
        return report.unsolved_note(
            [(self._call.path(leaf), leaf.value) for leaf in named],
            failure.line,
            {self._call.path(leaf) for leaf in named if leaf.place[0] in forbidden},
        )

    def keep(self, state: State) -> None:
        for point, places in self._needs.items():
            state.needs.replace(point, places | (state.needs.peek(point) or frozenset()))

    def commit(self, state: State, split: Split, fresh: bool) -> None:
        """Keeps what was found out about the leaves, and warns, once."""
        self.keep(state)
        whole = self._call.target.explicit(self._call.args, self._call.kwargs)
        for leaf in self._call.leaves():
            path = self._call.path(leaf)
            known = state.leaves.get(path)
            if known is not None and known.reason == _DEFAULT:
                known = None
            if split.layout.is_static(leaf):
                if known is None or not known.static:
                    reason = f"JAX cannot trace a {type(leaf.value).__name__}"
                    info = self._found.get(path, report.LeafInfo(path, True, reason))
                    state.leaves[path] = info
                self._warn_of(state, path, leaf, fresh)
            elif known is None:
                state.leaves[path] = report.LeafInfo(path, False, "JAX can trace it")
        for key in whole:
            path = self._call.name(key)
            state.leaves[path] = report.LeafInfo(path, True, "declared static")
        if self._call.target.parameters is not None:
            for path, value in self._call.target.parameters.defaults(
                self._call.args, self._call.kwargs
            ).items():
                if isinstance(value, (bool, int, float, complex)):
                    state.leaves.setdefault(path, report.LeafInfo(path, True, _DEFAULT))
        for path, message in self._floats.items():
            self._warn(state, path, "float", message)

    def _warn_of(self, state: State, path: str, leaf: Leaf, fresh: bool) -> None:
        """Warnings that are due for a static leaf, each once."""
        where = report.at(state.leaves[path].line)
        if isinstance(leaf.value, jax.Array):
            self._warn(
                state, path, "array", report.array_message(self._call.target.name, path, where)
            )
        if fresh and isinstance(leaf.value, _COUNTED):
            values = state.values.setdefault(path, set())
            values.add((type(leaf.value).__name__, str(leaf.value)[:256]))
            if len(values) >= report.MANY_VALUES:
                values.clear()
                message = report.values_message(self._call.target.name, path, where)
                self._warn(state, path, "values", message)

    def _warn(self, state: State, path: str, what: str, message: str) -> None:
        if (path, what) not in state.warned:
            state.warned.add((path, what))
            report.warn(message)
