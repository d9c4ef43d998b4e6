"""Hash-consing of jaxprs: of programs that are the same, one is kept.

JAX caches lowering, derivatives, batching and transposition by the *identity* of a jaxpr. So a
program that is replaced by the one that was seen before hits all of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from loopjit import compat
from loopjit.programs.canonical import Canonicalizer, Key, Mode, RuleKey, Uninternable

_serials = itertools.count(1)


class Canonical:
    """The one program that stands for all that are structurally equal to it.

    Attributes:
        jaxpr: an open jaxpr without consts; its NumPy literals are copies that nobody can change.
        serial: a number that no other canonical program has or will have.
        equations: how many equations it has, nested ones included.
        calls_host: whether it calls functions of the user's while it runs.
        programs: a place for the dispatch layer to keep what it compiled from it.
    """

    __slots__ = ("__weakref__", "calls_host", "equations", "jaxpr", "programs", "serial")

    def __init__(self, jaxpr: Any, key: Key) -> None:
        self.jaxpr = jaxpr
        self.serial = next(_serials)
        self.equations = key.equations
        self.calls_host = bool(key.callbacks)
        self.programs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Canonical(serial={self.serial}, equations={self.equations})"


class InternInfo(NamedTuple):
    """What an `Interner` has seen so far, and what it holds."""

    hits: int
    misses: int
    refused: int
    evicted: int
    size: int
    equations: int
    max_entries: int
    max_equations: int


class Interner:
    """A bounded, thread-safe table of canonical programs; the least recently used go first.

    Args:
        mode: what counts as equal, see `loopjit.programs.canonical`.
        max_entries: how many programs are kept at most.
        max_equations: how many equations they may have together. A program that has more alone is
            refused.
        rule_key: see `Canonicalizer`.
        accepts: asked for each key whether such a program may be kept.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        max_entries: int = 4096,
        max_equations: int = 1_000_000,
        rule_key: RuleKey | None = None,
        accepts: Callable[[Key], bool] | None = None,
    ) -> None:
        if max_entries < 1 or max_equations < 1:
            raise ValueError("an Interner keeps at least one program of one equation")
        self._canonicalizer = Canonicalizer(mode, rule_key)
        self._accepts = accepts
        self._max_entries = max_entries
        self._max_equations = max_equations
        self._table: OrderedDict[Key, Canonical] = OrderedDict()
        # Reentrant: a garbage collection while it is held may run a finalizer that interns.
        self._lock = threading.RLock()
        self._hits = self._misses = self._refused = self._evicted = self._equations = 0

    def intern(self, jaxpr: Any) -> Canonical | None:
        """The canonical program of an open jaxpr, whose constvars (if any) become leading inputs.

        Args:
            jaxpr: the jaxpr. Consts that it carries are dropped: the caller passes them first.

        Returns:
            The canonical program, or None when this one may not be shared.
        """
        try:
            jaxpr, _ = compat.open_jaxpr(jaxpr)
            key = self._canonicalizer.key(jaxpr)
            canonical = self._find(key)
            if canonical is not None:
                return canonical
            if key.equations > self._max_equations:
                raise Uninternable("too many equations")
            if self._accepts is not None and not self._accepts(key):
                raise Uninternable("not wanted")
            if not key.owned:
                # The key of the copy, not of the original, which may have changed in between.
                jaxpr = own_literals(jaxpr)
                key = self._canonicalizer.key(jaxpr)
            return self._insert(key, Canonical(jaxpr, key))
        except Uninternable:
            with self._lock:
                self._refused += 1
            return None

    def limit(self, max_entries: int) -> None:
        """Sets how many programs are kept at most, from the next new one on."""
        self._max_entries = max_entries

    def clear(self) -> None:
        """Forgets all programs, and sets the counters to zero."""
        with self._lock:
            dropped, self._table = self._table, OrderedDict()
            self._hits = self._misses = self._refused = self._evicted = self._equations = 0
            self._canonicalizer.clear()
        del dropped  # outside of the lock: this may free objects of the user

    def info(self) -> InternInfo:
        """Counters and sizes."""
        with self._lock:
            return InternInfo(
                self._hits,
                self._misses,
                self._refused,
                self._evicted,
                len(self._table),
                self._equations,
                self._max_entries,
                self._max_equations,
            )

    def _find(self, key: Key) -> Canonical | None:
        with self._lock:
            canonical = self._table.get(key)
            if canonical is not None:
                self._hits += 1
                self._table.move_to_end(key)
            return canonical

    def _insert(self, key: Key, canonical: Canonical) -> Canonical:
        evicted = []
        with self._lock:
            first = self._find(key)
            if first is not None:  # another thread was faster
                return first
            self._misses += 1
            self._table[key] = canonical
            self._equations += canonical.equations
            while (
                len(self._table) > self._max_entries or self._equations > self._max_equations
            ) and len(self._table) > 1:
                item = self._table.popitem(last=False)
                self._equations -= item[1].equations
                self._evicted += 1
                evicted.append(item)
        del evicted  # outside of the lock: this may free objects of the user
        return canonical


def own_literals(jaxpr: Any) -> Any:
    """A jaxpr like this one whose NumPy literals, nested ones too, are private copies.

    A literal may be a view of an array of the user, who may write to it.
    """
    return _Owner().jaxpr(jaxpr)


class _Owner:
    """Copies what has to be copied; what is shared (nested jits) stays shared."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._done:
            equations = [self._equation(equation) for equation in jaxpr.eqns]
            outvars = self._atoms(jaxpr.outvars)
            changed = outvars is not jaxpr.outvars or any(
                new is not old for new, old in zip(equations, jaxpr.eqns, strict=True)
            )
            self._done[id(jaxpr)] = (
                jaxpr.replace(eqns=equations, outvars=outvars, debug_info=jaxpr.debug_info)
                if changed
                else jaxpr
            )
        return self._done[id(jaxpr)]

    def _equation(self, equation: Any) -> Any:
        invars = self._atoms(equation.invars)
        changed = {}
        for name, value in equation.params.items():
            new = self._param(value)
            if new is not value:
                changed[name] = new
        if invars is equation.invars and not changed:
            return equation
        return equation.replace(invars=invars, params={**equation.params, **changed})

    def _atoms(self, atoms: list[Any]) -> list[Any]:
        if not any(
            type(atom) is compat.Literal and isinstance(atom.val, np.ndarray) for atom in atoms
        ):
            return atoms
        return [_own_atom(atom) for atom in atoms]

    def _param(self, value: Any) -> Any:
        if isinstance(value, compat.Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, compat.ClosedJaxpr):
            jaxpr = self.jaxpr(value.jaxpr)
            if jaxpr is value.jaxpr:
                return value
            if id(value) not in self._done:
                self._done[id(value)] = compat.ClosedJaxpr(jaxpr, value.consts)
            return self._done[id(value)]
        if isinstance(value, tuple):
            items = [self._param(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value


def _own_atom(atom: Any) -> Any:
    if type(atom) is not compat.Literal or not isinstance(atom.val, np.ndarray):
        return atom
    value = atom.val.copy()  # the method: it keeps JAX's subclass and the weak type
    value.setflags(write=False)
    return compat.Literal(value, atom.aval)
