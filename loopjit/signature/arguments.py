"""Which leaves of a call's arguments are traced, and how the others enter the key.

What JAX can trace is traced. What it cannot (strings, callables, enums, settings objects, also unhashable
ones) is static, leaf by leaf, and compared by the rules of ``describe.py``; so are *promoted* leaves, which
JAX could trace, but whose values the function needs. Two layouts:

- *direct*: the traced arguments are passed on as they are, and static ones are whole positional or keyword
  arguments, which are left out. All of the tree handling stays in JAX's C++.
- *flat*: static leaves stand inside of containers, or trees that JAX takes for equal may differ; then the
  traced leaves are passed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from loopjit.signature import trust
from loopjit.signature.code import Usage
from loopjit.signature.describe import Description, Live, describe_tree
from loopjit.signature.host import fits, host_value, is_count, known_value, rank
from loopjit.signature.kinds import describe_bounded
from loopjit.signature.plans import Plan, class_plan

PyTreeDef = Any
TypesKey = Hashable
Place = tuple[int | str, int]
"""Of a leaf: the position or name of the argument, and the number of the leaf in it."""


class OnHost(NamedTuple):
    """Of a static array: the function has to see the value that was read, not an array of JAX's."""

    place: Place


Promoted = frozenset[Place | OnHost]

_TRACED_TYPES = (bool, int, float, complex, jax.Array, jax.core.Tracer, np.generic)
_CONTAINERS = (tuple, list, dict, type(None))
_PLAIN_KEYS = (str, bytes)


def is_traced(leaf: object) -> bool:
    """Whether JAX can trace this leaf of a pytree."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "biufcV" and not leaf.dtype.hasobject
    if isinstance(leaf, _TRACED_TYPES):
        return type(leaf) is not int or fits(leaf)
    if isinstance(leaf, (str, bytes, type)) or callable(leaf):
        return False
    if hasattr(type(leaf), "__jax_array__"):
        return True
    try:
        jax.typeof(leaf)
    except Exception:
        return False
    return True


def types_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypesKey:
    """What decides the layout of a call: the types of its arguments, one level deep."""
    if not kwargs:
        return tuple(map(type, args))
    return (tuple(map(type, args)), tuple(kwargs), tuple(map(type, kwargs.values())))


class Under(NamedTuple):
    """The types of the arguments of a call under a transformation, where ints are static."""

    types: TypesKey


class Nodes(NamedTuple):
    """What a tree's nodes say.

    Attributes:
      fragile: two trees that compare equal may differ.
      static: there is static data whose identity or content can matter.
      classes: classes of the user among the nodes.
    """

    fragile: bool
    static: bool
    classes: tuple[type, ...]


def nodes_of(tree: PyTreeDef) -> Nodes:
    """Looks at the nodes of a tree."""
    fragile = static = False
    classes: dict[type, None] = {}
    todo = [tree]
    while todo:
        node = todo.pop()
        data = node.node_data()
        if data is not None:
            kind, extra = data
            if kind is dict:
                fragile = fragile or not all(type(key) is str for key in extra)
            elif kind not in _CONTAINERS:
                static = static or not _is_plain(extra)
                if not trust.is_pure_class(kind):
                    classes[kind] = None
        todo += node.children()
    return Nodes(fragile or static, static, tuple(classes))


def _is_plain(extra: Any) -> bool:
    """Whether equality of a node's static data is exact."""
    if extra is None or type(extra) in _PLAIN_KEYS or isinstance(extra, type):
        return True
    if type(extra) in (tuple, list):
        return all(map(_is_plain, extra))
    return False


class Leaf(NamedTuple):
    """A leaf of a call's arguments.

    Attributes:
      place: where it stands.
      path: from the argument to it, as JAX writes it: ``['w'][0]``; empty for the argument itself.
      value: what stands there.
    """

    place: Place
    path: str
    value: Any


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any], whole: set[Any]) -> list[Leaf]:
    """The leaves of a call's arguments, but for those that are static as a whole; names in sorted order."""
    found = []
    for key, value in _in_order(args, kwargs):
        if key not in whole:
            paths, _ = tree_util.tree_flatten_with_path(value)
            found += [
                Leaf((key, i), tree_util.keystr(path), leaf) for i, (path, leaf) in enumerate(paths)
            ]
    return found


class Layout:
    """How the arguments of calls with the same types are split.

    Attributes:
      promoted: the leaves that JAX could trace, and that are static all the same.
      plans: plans of the user's classes among the nodes of the arguments; they must hold.
      counts: there are whole numbers, which could be the trip count of a loop. Under a transformation
        they may have to be static: a loop whose trip count is traced has no reverse mode.
      numbers: there are Python ints or bools.
      all_traced: nothing is static, and nothing about the trees needs a closer look.
      which: tells layouts of the same call apart.
      site: of the call that was seen last; sites: by the static leaves.
    """

    all_traced: bool = False
    counts: bool = False
    numbers: bool = False
    plans: tuple[Plan, ...] = ()
    which: Hashable = None

    def __init__(self, promoted: Promoted) -> None:
        self.promoted = promoted
        self.site: Any = None
        self.sites: dict[Hashable, Any] = {}

    def remember(self, values: Hashable, site: Any, known: Sequence[Layout]) -> tuple[Layout, ...]:
        """Finds ``site`` again by the static leaves that were written down as ``values``.

        Returns:
          The layouts of calls with these types: this one, and those of ``known`` with other static leaves.
        """
        for older in known:
            if older is not self and self.same(older):
                self.sites = older.sites
        if len(self.sites) > 512:
            self.sites = {}
        self.sites[values] = site
        self.site = site
        others = [layout for layout in known if layout.promoted != self.promoted]
        # Where everything is traced nothing tells calls apart: that layout is the last to be tried.
        layouts = [self, *others[:_ALTERNATIVES]]
        return tuple(sorted(layouts, key=lambda layout: layout.all_traced))

    def same(self, other: Layout) -> bool:
        """Whether both split alike."""
        return self.promoted == other.promoted and self.which == other.which

    def is_static(self, leaf: Leaf) -> bool:
        """Whether a leaf (of an argument that is not static as a whole) is static."""
        raise NotImplementedError

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], d: Description
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The traced arguments; the static ones are written down."""
        raise NotImplementedError

    def rebuild(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replace: Callable[..., Any],
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """How traced arguments become those of the function, with the statics of this call."""
        raise NotImplementedError

    def positions(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], which: Sequence[int]
    ) -> list[int]:
        """Where the positional arguments ``which`` stand among the traced ones."""
        raise NotImplementedError


_ALTERNATIVES = 7


class Unreadable(TypeError):
    """A static array may not be read to the host now."""


def _on_host(promoted: Promoted) -> Promoted:
    return frozenset([place for place in promoted if isinstance(place, OnHost)])


class Direct(Layout):
    """Static arguments are whole arguments."""

    def __init__(
        self,
        static: tuple[int, ...],
        static_names: tuple[str, ...],
        count: int,
        usages: dict[int | str, Usage],
        promoted: Promoted = frozenset(),
    ):
        super().__init__(promoted)
        self._usages = usages
        self.all_traced = not static and not static_names
        self.static = static
        self.static_names = static_names
        self.keep = tuple(i for i in range(count) if i not in static)
        self.which = (static, static_names, _on_host(promoted))

    def is_static(self, leaf: Leaf) -> bool:
        key = leaf.place[0]
        return key in self.static or key in self.static_names

    def _written(self, key: int | str, value: Any) -> Any:
        """What is written down of a static argument."""
        if (key, 0) not in self.promoted:
            return value
        if isinstance(value, jax.Array) and rank(value) is None:
            raise Unreadable
        return host_value(value)

    def _seen(self, key: int | str, value: Any, replace: Callable[..., Any]) -> Any:
        """What the function sees of it."""
        if (key, 0) in self.promoted:  # an array among them was not captured: nothing stands for it
            return _seen(value, (key, 0), self.promoted)
        return replace(value, self._usages.get(key))

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], d: Description
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.static:
            for i in self.static:
                describe_bounded(self._written(i, args[i]), self._usages.get(i), d)
            args = tuple([args[i] for i in self.keep])
        if self.static_names:
            kwargs = dict(kwargs)
            for name in self.static_names:
                describe_bounded(self._written(name, kwargs.pop(name)), self._usages.get(name), d)
        return args, kwargs

    def rebuild(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replace: Callable[..., Any],
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        statics = {i: self._seen(i, args[i], replace) for i in self.static}
        named = {name: self._seen(name, kwargs[name], replace) for name in self.static_names}
        names = tuple(kwargs)
        count = len(args)

        def build(dynamic: Sequence[Any], keywords: dict[str, Any]) -> Any:
            rest = iter(dynamic)
            full = tuple([statics[i] if i in statics else next(rest) for i in range(count)])
            return full, {k: named[k] if k in named else keywords[k] for k in names}

        return build

    def positions(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], which: Sequence[int]
    ) -> list[int]:
        return [at for at, i in enumerate(self.keep) if i in which]


_TRACED, _STATIC, _PROMOTED = range(3)


class Flat(Layout):
    """Static leaves stand inside of containers, or the trees need a closer look."""

    def __init__(
        self,
        explicit: Callable[[tuple[Any, ...], dict[str, Any]], set[Any]],
        promoted: Promoted = frozenset(),
    ):
        super().__init__(promoted)
        self.which = ("flat", _on_host(promoted))
        self._explicit = explicit

    def is_static(self, leaf: Leaf) -> bool:
        return not is_traced(leaf.value) or self._is_promoted(leaf.place, leaf.value)

    def _is_promoted(self, place: Place, value: Any) -> bool:
        return place in self.promoted and rank(value) is not None

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], written: bool = True) -> Any:
        """(leaves, tree, which of them are static, whole static arguments)."""
        whole = self._explicit(args, kwargs)
        hidden = {key: (args[key] if isinstance(key, int) else kwargs[key]) for key in whole}
        args = tuple([None if i in whole else a for i, a in enumerate(args)])
        kwargs = {k: None if k in whole else v for k, v in kwargs.items()}
        leaves, tree = tree_util.tree_flatten((args, kwargs))
        static = [_TRACED if is_traced(leaf) else _STATIC for leaf in leaves]
        if self.promoted:
            for at, place in enumerate(_places(args, kwargs)):
                if self._is_promoted(place, leaves[at]):
                    static[at] = _PROMOTED
                    value = leaves[at]
                    leaves[at] = (
                        host_value(value) if written else _seen(value, place, self.promoted)
                    )
        return leaves, tree, static, hidden

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], d: Description
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        leaves, tree, static, hidden = self._flatten(args, kwargs)
        if nodes_of(tree).fragile:
            describe_tree(tree, d)
        else:
            d.out.append(tree)
        d.out.append(tuple(static))
        for key, value in hidden.items():
            d.out.append(key)
            describe_bounded(value, None, d)
        dynamic = []
        for leaf, is_static in zip(leaves, static, strict=True):
            if is_static:
                describe_bounded(leaf, None, d)
            else:
                dynamic.append(leaf)
        return dynamic, {}

    def rebuild(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replace: Callable[..., Any],
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        leaves, tree, static, hidden = self._flatten(args, kwargs, written=False)
        whole = {key: replace(value) for key, value in hidden.items()}
        fixed = [
            # An array that was promoted was not captured: nothing stands for it.
            replace(leaf) if is_static == _STATIC else leaf
            for leaf, is_static in zip(leaves, static, strict=True)
        ]

        def build(dynamic: Sequence[Any], keywords: dict[str, Any]) -> Any:
            rest = iter(dynamic)
            full = [
                value if is_static else next(rest)
                for value, is_static in zip(fixed, static, strict=True)
            ]
            new_args, new_kwargs = tree_util.tree_unflatten(tree, full)
            new_args = tuple([whole.get(i, a) for i, a in enumerate(new_args)])
            return new_args, {k: whole.get(k, v) for k, v in new_kwargs.items()}

        return build

    def positions(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], which: Sequence[int]
    ) -> list[int]:
        _, _, static, _ = self._flatten(args, kwargs)
        whole = self._explicit(args, kwargs)
        places = [p for p in _places(args, kwargs) if p[0] not in whole]
        traced = [p for p, is_static in zip(places, static, strict=True) if not is_static]
        return [at for at, (key, _) in enumerate(traced) if key in which]


def _seen(value: Any, place: Place, promoted: Promoted) -> Any:
    return host_value(value) if OnHost(place) in promoted else known_value(value)


def _places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Place]:
    """The places of all leaves, in the order of JAX."""
    for key, value in _in_order(args, kwargs):
        for i in range(len(tree_util.tree_leaves(value))):
            yield key, i


def _in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int | str, Any]]:
    """The arguments with their positions and names, in the order of JAX."""
    return [*enumerate(args), *[(name, kwargs[name]) for name in sorted(kwargs)]]


def layout_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    explicit: Callable[[tuple[Any, ...], dict[str, Any]], set[Any]],
    d: Description,
    promoted: Promoted = frozenset(),
    flat: bool = False,
    usages: dict[int | str, Usage] | None = None,
) -> Layout:
    """Finds the layout of a call, and writes down the user's classes among the nodes.

    Args:
      args: the positional arguments.
      kwargs: the keyword arguments.
      explicit: which arguments are declared static: positions and names.
      d: refuses where a class is not understood.
      promoted: leaves that are static, though JAX could trace them.
      flat: a direct layout will not do.
      usages: what the function reads from each of its parameters.
    """
    whole = explicit(args, kwargs)
    static: list[Any] = []
    mixed = flat
    counts = numbers = False
    classes: dict[type, None] = {}
    for key, value in [*enumerate(args), *kwargs.items()]:
        if key in whole:
            static.append(key)
            continue
        tree: PyTreeDef
        leaves, tree = tree_util.tree_flatten(value)
        kinds = set(map(type, leaves))
        numbers = numbers or int in kinds or bool in kinds
        counts = counts or any(map(is_count, leaves))
        if tree.num_nodes == 1 and tree.num_leaves == 1:
            if not is_traced(value) or ((key, 0) in promoted and rank(value) is not None):
                static.append(key)
            continue
        nodes = nodes_of(tree)
        classes.update(dict.fromkeys(nodes.classes))
        mixed = mixed or nodes.fragile or not all(map(is_traced, leaves))
        mixed = mixed or any(
            (key, i) in promoted and rank(v) is not None for i, v in enumerate(leaves)
        )
    layout: Layout
    if mixed:
        layout = Flat(explicit, promoted)
    else:
        positions = tuple([key for key in static if isinstance(key, int)])
        names = tuple([key for key in static if isinstance(key, str)])
        layout = Direct(positions, names, len(args), usages or {}, promoted)
    layout.counts = counts
    layout.numbers = numbers
    layout.plans = tuple([_class_of_node(cls, d) for cls in classes])
    return layout


def _class_of_node(cls: type, d: Description) -> Plan:
    """Writes down a class of the user's whose instances are nodes of an argument."""
    plan = class_plan(cls)
    d.out.append(plan.token)
    d.opaque += plan.opaque
    if plan.sources:
        d.opaque += (f"attributes of {cls.__qualname__} that can change in place",)
    if not d.shareable:
        d.out.append(Live(cls))
    return plan
