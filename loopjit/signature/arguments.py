"""Which leaves of a call's arguments are traced, and how the others enter the key.

What JAX can trace is traced. What it cannot (strings, callables, enums, settings objects, also unhashable
ones) is static, leaf by leaf, and compared by the rules of ``describe.py``. Two layouts:

- *direct*: the traced arguments are passed on as they are, and static ones are whole positional or keyword
  arguments, which are left out. All of the tree handling stays in JAX's C++.
- *flat*: static leaves stand inside of containers, or trees that JAX takes for equal may differ; then the
  traced leaves are passed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from loopjit.signature import trust
from loopjit.signature.code import Usage
from loopjit.signature.describe import Description, Live, describe_tree
from loopjit.signature.kinds import describe_bounded
from loopjit.signature.plans import Plan, class_plan

PyTreeDef = Any
TypesKey = Hashable

_TRACED_TYPES = (bool, int, float, complex, jax.Array, jax.core.Tracer, np.generic)
_CONTAINERS = (tuple, list, dict, type(None))
_PLAIN_KEYS = (str, bytes)


def is_traced(leaf: object) -> bool:
    """Whether JAX can trace this leaf of a pytree."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "biufcV" and not leaf.dtype.hasobject
    if isinstance(leaf, _TRACED_TYPES):
        return True
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


class Layout:
    """How the arguments of calls with the same types are split.

    Attributes:
      plans: plans of the user's classes among the nodes of the arguments; they must hold.
      ints: Python ints are traced; under a transformation they are not, since there a loop whose trip
        count is traced cannot be differentiated in reverse mode.
      all_traced: nothing is static, and nothing about the trees needs a closer look.
      site: of the call that was seen last; sites: by the static leaves.
    """

    all_traced: bool = False
    ints: bool = False
    plans: tuple[Plan, ...] = ()

    def __init__(self) -> None:
        self.site: Any = None
        self.sites: dict[Hashable, Any] = {}

    def same(self, other: Layout) -> bool:
        """Whether both split alike."""
        return type(self) is type(other)

    def remember(self, key: Hashable, site: Any, older: Layout | None) -> None:
        """Finds ``site`` again by the static leaves that were written down as ``key``."""
        if older is not None and older is not self and self.same(older):
            self.sites = older.sites
        if len(self.sites) > 512:
            self.sites = {}
        self.sites[key] = site
        self.site = site

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


class Direct(Layout):
    """Static arguments are whole arguments."""

    def __init__(
        self,
        static: tuple[int, ...],
        static_names: tuple[str, ...],
        count: int,
        usages: dict[int | str, Usage],
    ):
        super().__init__()
        self._usages = usages
        self.all_traced = not static and not static_names
        self.static = static
        self.static_names = static_names
        self.keep = tuple(i for i in range(count) if i not in static)

    def same(self, other: Layout) -> bool:
        return (
            isinstance(other, Direct)
            and self.static == other.static
            and self.static_names == other.static_names
        )

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], d: Description
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.static:
            for i in self.static:
                describe_bounded(args[i], self._usages.get(i), d)
            args = tuple([args[i] for i in self.keep])
        if self.static_names:
            kwargs = dict(kwargs)
            for name in self.static_names:
                describe_bounded(kwargs.pop(name), self._usages.get(name), d)
        return args, kwargs

    def rebuild(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replace: Callable[..., Any],
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        usages = self._usages
        statics = {i: replace(args[i], usages.get(i)) for i in self.static}
        named = {name: replace(kwargs[name], usages.get(name)) for name in self.static_names}
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


class Flat(Layout):
    """Static leaves stand inside of containers, or the trees need a closer look."""

    def __init__(
        self, explicit: Callable[[tuple[Any, ...], dict[str, Any]], set[Any]], fix_ints: bool
    ):
        super().__init__()
        self._explicit = explicit
        self._fix_ints = fix_ints

    def _is_static(self, leaf: Any) -> bool:
        return not is_traced(leaf) or (self._fix_ints and type(leaf) is int)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """(leaves, tree, which of them are static, whole static arguments)."""
        whole = self._explicit(args, kwargs)
        hidden = {key: (args[key] if isinstance(key, int) else kwargs[key]) for key in whole}
        args = tuple([None if i in whole else a for i, a in enumerate(args)])
        kwargs = {k: None if k in whole else v for k, v in kwargs.items()}
        leaves, tree = tree_util.tree_flatten((args, kwargs))
        return leaves, tree, [self._is_static(leaf) for leaf in leaves], hidden

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
        leaves, tree, static, hidden = self._flatten(args, kwargs)
        whole = {key: replace(value) for key, value in hidden.items()}
        fixed = [
            replace(leaf) if is_static else None
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
        whole = self._explicit(args, kwargs)
        out: list[int] = []
        at = 0
        for i, argument in enumerate(args):
            leaves = [] if i in whole else tree_util.tree_leaves(argument)
            for leaf in leaves:
                if not self._is_static(leaf):
                    if i in which:
                        out.append(at)
                    at += 1
        return out


def layout_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    explicit: Callable[[tuple[Any, ...], dict[str, Any]], set[Any]],
    d: Description,
    fix_ints: bool = False,
    flat: bool = False,
    usages: dict[int | str, Usage] | None = None,
) -> Layout:
    """Finds the layout of a call, and writes down the user's classes among the nodes.

    Args:
      args: the positional arguments.
      kwargs: the keyword arguments.
      explicit: which arguments are declared static: positions and names.
      d: refuses where a class is not understood.
      fix_ints: Python ints are static.
      flat: a direct layout will not do.
      usages: what the function reads from each of its parameters.
    """
    whole = explicit(args, kwargs)
    static: list[Any] = []
    mixed = flat
    ints = False
    classes: dict[type, None] = {}
    for key, value in [*enumerate(args), *kwargs.items()]:
        if key in whole:
            static.append(key)
            continue
        tree: PyTreeDef
        leaves, tree = tree_util.tree_flatten(value)
        found = int in map(type, leaves)
        ints = ints or found
        if tree.num_nodes == 1 and tree.num_leaves == 1:
            if not is_traced(value) or (fix_ints and found):
                static.append(key)
            continue
        nodes = nodes_of(tree)
        classes.update(dict.fromkeys(nodes.classes))
        mixed = mixed or nodes.fragile or (fix_ints and found) or not all(map(is_traced, leaves))
    layout: Layout
    if mixed:
        layout = Flat(explicit, fix_ints)
    else:
        positions = tuple([key for key in static if isinstance(key, int)])
        names = tuple([key for key in static if isinstance(key, str)])
        layout = Direct(positions, names, len(args), usages or {})
    layout.ints = ints
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
