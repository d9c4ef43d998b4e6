"""One call: its arguments split into static and traced leaves, and its function traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from loopjit import compat
from loopjit.engine.state import Counts, Signature, State
from loopjit.errors import StrictError
from loopjit.memo import LRU
from loopjit.programs.program import (
    Mismatch,
    ProgramOptions,
    Traced,
    current_context,
    same_program,
    trace,
)
from loopjit.signature import replace
from loopjit.signature.arguments import (
    Layout,
    Leaf,
    Promoted,
    TypesKey,
    Under,
    layout_of,
    leaves_of,
    types_key,
)
from loopjit.signature.code import Usage
from loopjit.signature.describe import Description
from loopjit.statics.calls import Parameters
from loopjit.statics.failure import Failure, Questions

_SMALL = 4096  # elements


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
      promotes: leaves become static where their values are needed; else that is the caller's error.
      traced: which arguments must not: positions and names.
      parameters: of the function: what the user calls an argument.
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
    promotes: bool = False
    traced: Callable[[tuple[Any, ...], dict[str, Any]], set[Any]] = lambda args, kwargs: set()
    parameters: Parameters | None = None
    usages: dict[int | str, Usage] | None = None
    max_programs: int = 256


class Split(NamedTuple):
    """The arguments of a call, split.

    Attributes:
      layout: how.
      hoist: captured arrays become hidden inputs.
      types: what the layout depends on.
      values: the static leaves, written down.
      key: which leaves are static, and ``values``.
      seen: ids of what has an identity among the static leaves.
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
    hoist: bool
    types: TypesKey
    values: Hashable
    key: Hashable
    seen: frozenset[int]
    classes: Hashable
    hidden: list[Any]
    pinned: tuple[Any, ...]
    reasons: tuple[str, ...]
    writes: bool
    uncopied: bool
    changeable: bool
    dynamic: Sequence[Any]
    keywords: dict[str, Any]


class Trial(NamedTuple):
    """What came of tracing a function with a split of its arguments.

    Attributes:
      signature: of the functions, see :class:`Signature`.
      split: of the arguments.
      hidden: the arrays that became hidden inputs.
      error: what it raised, if it did; then the rest says nothing.
      failure: what is known about the error.
      traced: the program.
      untouched: no copy of a container was written to.
      context: in which it was traced.
      asked: the value or the text of a tracer was asked for.
      caught: values that were needed, though the function went on without them.
    """

    signature: Hashable
    split: Split
    hidden: list[Any]
    error: Exception | None = None
    failure: Failure | None = None
    traced: Any = None
    untouched: bool = True
    context: Hashable = None
    asked: bool = False
    caught: Sequence[Failure] = ()


class Call:
    """A call of a target.

    Attributes:
      writes: the function writes to what it captures, or keeps it: the originals are traced, not copies.
    """

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.writes = False

    def split_at(self, state: State, hoist: bool, promoted: Promoted) -> Split:
        """Splits the arguments.

        Args:
          state: knows how calls with arguments of these types were split before.
          hoist: captured arrays become hidden inputs.
          promoted: the leaves that are static, though JAX could trace them.
        """
        args, kwargs, explicit = self.args, self.kwargs, self.target.explicit
        usages = self.target.usages
        nodes = Description(hoist)
        layout = layout_of(args, kwargs, explicit, nodes, promoted, usages=usages)
        types = types_key(args, kwargs)
        if layout.counts and not compat.trace_state_is_clean():
            types = Under(types)
        known = [k for k in state.layouts.get(types, ()) if k.promoted == promoted]
        if known and not any(map(layout.same, known)):
            # The same types, once with static leaves inside and once without: leaf by leaf from now on.
            nodes = Description(hoist)
            layout = layout_of(args, kwargs, explicit, nodes, promoted, flat=True)
        d = Description(hoist, state.live)
        dynamic, keywords = layout.split(args, kwargs, d)
        values = tuple(d.out)
        return Split(
            layout,
            hoist,
            types,
            values,
            (layout.which, values),
            frozenset(d.seen or ()),
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

    def copying(
        self, state: State, signature: Signature, split: Split
    ) -> tuple[bool, bool, Hashable]:
        """Whether copies are traced, whether JAX may have seen what is traced, and what it is to forget."""
        copies = not (self.writes or state.writes or signature.writes or split.writes)
        stale = signature.uncopied or split.uncopied or (not copies and signature.helpers)
        return copies, stale, signature.key if stale else None

    def attempt(self, state: State, signature: Signature, split: Split, hidden: list[Any]) -> Trial:
        """Traces the function; an error of the function is a result like others."""
        copies, _, forget = self.copying(state, signature, split)
        questions = Questions(self.traced_leaves(split), split.dynamic, split.keywords)
        asked = compat.times_asked()
        try:
            with compat.listening(questions):
                traced, untouched, context = self._trace(split, hidden, copies, forget, questions)
        except (Mismatch, StrictError, RuntimeError):
            raise
        except Exception as error:
            return Trial(signature.key, split, hidden, error, questions.failure(error))
        return Trial(
            signature.key,
            split,
            hidden,
            None,
            None,
            traced,
            untouched,
            context,
            compat.times_asked() != asked,
            questions.caught(),
        )

    def _trace(
        self,
        split: Split,
        hidden: list[Any],
        copies: bool,
        forget: Hashable,
        questions: Questions | None = None,
        tracers: bool = True,
    ) -> tuple[Traced, bool, Hashable]:
        seen: list[Any] = []

        # The names of the parameters are those that `statics/failure.py` looks for in errors.
        def traced(loopjit_bound: Any, loopjit_dynamic: Any, loopjit_keywords: Any) -> Any:
            values = iter(loopjit_bound if tracers else hidden)
            replacer = replace.Replacer(values if hidden else None)
            put = replacer.value if copies else _itself
            function = self.target.make(*[put(root) for root in self.target.roots])
            build = split.layout.rebuild(self.args, self.kwargs, put)
            if next(values, None) is not None:
                raise Mismatch  # something changed between the description and now
            seen[:] = [replacer, current_context()]
            if questions is not None:
                questions.start((loopjit_dynamic, loopjit_keywords))
            args, kwargs = build(loopjit_dynamic, loopjit_keywords)
            return function(*args, **kwargs)

        traced.__name__ = traced.__qualname__ = self.target.name
        # JAX remembers traces by the identity of functions, and does not notice what they read. Copies
        # are new to it; where there are originals it is made to forget them.
        with contextlib.nullcontext() if forget is None else compat.forget_traces(forget):
            bound = hidden if tracers else []
            out = trace(traced, (bound, list(split.dynamic), split.keywords))
        replacer, context = seen
        return out, replacer.untouched(), context

    def same_with_arrays(
        self, split: Split, traced: Traced, hidden: list[Any], forget: Hashable
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

    def leaves(self) -> list[Leaf]:
        """The leaves of the arguments, but for those of arguments that are declared static."""
        whole = self.target.explicit(self.args, self.kwargs)
        return leaves_of(self.args, self.kwargs, whole)

    def traced_leaves(self, split: Split) -> list[Leaf]:
        """Those that are traced, in the order of the program's inputs."""
        return [leaf for leaf in self.leaves() if not split.layout.is_static(leaf)]

    def path(self, leaf: Leaf) -> str:
        return self.name(leaf.place[0]) + leaf.path

    def name(self, key: int | str) -> str:
        parameters = self.target.parameters
        return str(key) if parameters is None else parameters.path(key)


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
