"""Static arguments, and the trees of traced ones: what is visible to the function counts."""

import collections
import dataclasses
import enum
import functools
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traps import X, module, same

from counting import counting
from loopjit import loop_jit


def arr(v, dtype=np.float32):
    return jnp.asarray(np.asarray(v, dtype))


def text_of(value) -> float:
    """A number for what can be seen of a value."""
    total = 0
    for letter in repr(value):
        total = (total * 31 + ord(letter)) % 100_003
    return float(total)


class Mode(enum.Enum):
    A = 1
    B = 2


class Flags(enum.IntFlag, boundary=enum.KEEP):
    A = 1


class Number(enum.IntEnum):
    A = 1
    B = 2


@dataclasses.dataclass
class Settings:
    rate: float
    names: list = dataclasses.field(default_factory=list)


class Liar:
    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Unhashable:
    __hash__ = None

    def __init__(self, k):
        self.k = k


def _show(s):
    if isinstance(s, (Liar, Unhashable)):
        return float(s.k)
    if isinstance(s, set):
        return text_of(list(s))
    if isinstance(s, enum.Enum):
        return text_of((type(s).__name__, s.value))
    return text_of(s)


# Groups of values; those of one group are compared with each other.
STATICS = {
    "strings": ["a", "b", b"a", "ab"],
    "enums": [Mode.A, Mode.B],
    "settings": [Settings(1.0), Settings(2.0), Settings(1.0, ["a"]), Settings(1.0, ["b"])],
    "liars": [Liar(1), Liar(2)],
    "unhashable": [Unhashable(1), Unhashable(2)],
}
DECLARED = {
    **STATICS,
    "numbers": [Number.A, Number.B, 1, 2],
    "flags": [Flags(0), Flags(8), Flags(16), Flags.A],
    "one": [1, True, 1.0, np.int32(1), np.float32(1), 1 + 0j, "1"],
    "zero": [0.0, -0.0, 0, False],
    "lists": [[1], [1.0], [True], [1, 2], (1,), [], None],
    "dicts": [{1: 2}, {True: 2}, {1: 2, 3: 4}, {3: 4, 1: 2}, {}],
    "sets": [{0, 8}, {8, 0}, {0}, frozenset({0})],
    "ranges": [range(0), range(2, 2), range(0, 0, 3)],
    "slices": [slice(1), slice(2), slice(None)],
    "dtypes": [np.dtype("f4"), np.dtype("i4"), np.dtype(">f4")],
}


def _statically(f, how):
    if how == "number":
        return loop_jit(f, static_argnums=1)
    if how == "name":
        return loop_jit(f, static_argnames="s")
    return loop_jit(f)


def _make():
    return lambda x, s: x + _show(s)


@pytest.mark.parametrize("how", ["number", "name", "found"])
@pytest.mark.parametrize("group", DECLARED)
def test_static_values_that_differ(group, how):
    if how == "found" and group not in STATICS:
        pytest.skip("JAX can trace these")
    one = _statically(_make(), how)
    values = DECLARED[group]
    for s in (*values, *reversed(values)):
        want = _make()(X, s)
        same(one(X, s), want)
        same(one(X, s=s), want)
        same(_statically(_make(), how)(X, s), want)


@pytest.mark.parametrize("how", ["number", "name", "found"])
@pytest.mark.parametrize(
    "value",
    [
        lambda: "text",
        lambda: Mode.A,
        lambda: Settings(1.0, ["a"]),
        lambda: types.SimpleNamespace(a=1, b=[2]),
        lambda: lambda x: x * 2.0,
        lambda: functools.partial(jnp.multiply, 2.0),
        lambda: jnp.sin,
    ],
)
def test_static_values_that_are_equal_hit(value, how):
    def make():
        return lambda x, s: x + (s(x) if callable(s) else 1.0)

    _statically(make(), how)(X, value())
    s, f = value(), _statically(make(), how)
    with counting() as n:
        out = f(X, s)
    assert (n.compiles, n.traces) == (0, 0)
    same(out, make()(X, s))


def test_callables_that_differ():
    def make(k):
        return lambda x: x * k

    f = loop_jit(lambda x, g: g(x))
    for k in (2.0, 3.0, 2, arr(2.0), arr(5.0), [4.0][0], -0.0, 0.0):
        same(f(X, make(k)), X * k)
        same(f(X, g=make(k)), X * k)
        same(f(X, functools.partial(lambda k, x: x * k, k)), X * k)
        same(loop_jit(lambda x, g: g(x))(X, make(k)), X * k)


def test_callables_with_captured_arrays_hit():
    def make(k):
        w = arr(k)
        return lambda x: x * w

    f = loop_jit(lambda x, g: g(x))
    f(X, make(2.0))
    g = make(3.0)
    with counting() as n:
        out = f(X, g)
    same(out, X * 3.0)
    assert (n.compiles, n.traces) == (0, 0)


@pytest.mark.parametrize("read", [lambda w: int(w), lambda w: w.tolist()])
def test_callables_whose_captured_array_is_read(read):
    def make(k):
        w = arr(k, np.int32)
        return lambda x: x * read(w)

    f = loop_jit(lambda x, g: g(x))
    for k in (2, 3, 2):
        same(f(X, make(k)), make(k)(X))
        same(loop_jit(lambda x, g: g(x))(X, make(k)), make(k)(X))


def test_a_static_argument_changed_in_place():
    settings = Settings(1.0, ["a"])
    f = loop_jit(lambda x, s: x * s.rate + len(s.names))
    same(f(X, settings), X * 1.0 + 1)
    settings.rate = 2.0
    same(f(X, settings), X * 2.0 + 1)
    settings.names.append("b")
    same(f(X, settings), X * 2.0 + 2)
    for value in ([1.0], {"k": 1.0}):
        key = 0 if isinstance(value, list) else "k"
        g = loop_jit(lambda x, s: x * s[key], static_argnums=1)
        same(g(X, value), X)
        value[key] = 3.0
        same(g(X, value), X * 3.0)
    w = np.array([1.0], np.float32)
    g = loop_jit(lambda x, s: x * float(s[0]), static_argnums=1)
    same(g(X, w), X)
    w[0] = 3.0
    same(g(X, w), X * 3.0)
    same(g(X, np.array([1.0], np.float32)), X)


def test_a_static_callable_changed_in_place():
    def g(x):
        return x * 2.0

    def other(x):
        return x * 3.0

    f = loop_jit(lambda x, g: g(x))
    same(f(X, g), X * 2.0)
    g.__code__ = other.__code__
    same(f(X, g), X * 3.0)
    m = module("m", "K = 2.0\ndef h(x):\n    return x * K")
    same(f(X, m.h), X * 2.0)
    m.K = 3.0
    same(f(X, m.h), X * 3.0)


def test_a_static_argument_is_written_to():
    f = loop_jit(lambda x, log: (log.append(x.shape), x * 2.0)[1], static_argnums=1)
    logs = [[], [], []]
    for log in logs:
        same(f(X, log), X * 2.0)
    assert logs == [[(3,)]] * 3


def test_the_class_of_a_static_argument_is_patched():
    class Layer:
        def run(self, x):
            return x * 2.0

    f = loop_jit(lambda x, layer: layer.run(x))
    same(f(X, Layer()), X * 2.0)
    Layer.run = lambda self, x: x * 3.0
    same(f(X, Layer()), X * 3.0)


def test_two_static_arguments_or_one_twice():
    f = loop_jit(lambda x, a, b: x if a is b else -x, static_argnums=(1, 2))
    a = [1]
    same(f(X, a, a), X)
    same(f(X, a, [1]), -X)
    same(f(X, a, a), X)
    g = lambda x: x
    h = types.FunctionType(g.__code__, g.__globals__)
    f = loop_jit(lambda x, a, b: x if a is b else -x)
    same(f(X, g, g), X)
    same(f(X, g, h), -X)


def test_missing_none_and_given():
    def make():
        return lambda x, a=None, *rest, b=3.0, **named: (
            x * (1.0 if a is None else a) + b + 10.0 * len(rest) + 100.0 * len(named)
        )

    calls = [
        ((), {}),
        ((None,), {}),
        ((2.0,), {}),
        ((2.0, 3.0), {}),
        ((), {"b": 3.0}),
        ((), {"a": 2.0}),
        ((), {"a": None}),
        ((), {"c": 1.0}),
        ((), {"d": 1.0, "c": 1.0}),
        ((), {"c": 1.0, "d": 1.0}),
        ((2.0, None), {}),
        ((), {"b": 4.0, "c": None}),
    ]
    f = loop_jit(make())
    for args, kwargs in (*calls, *reversed(calls)):
        same(f(X, *args, **kwargs), jax.jit(make())(X, *args, **kwargs))
        same(loop_jit(make())(X, *args, **kwargs), jax.jit(make())(X, *args, **kwargs))


def test_names_of_keywords():
    f = loop_jit(lambda x, **named: x + text_of(sorted(named)))
    for name in ("a", "b", "a"):
        same(f(X, **{name: 1.0}), X + text_of([name]))


def test_dynamic_scalars_of_other_types():
    make = lambda: lambda x, s: (x * s, jnp.asarray(s))
    f = loop_jit(make())
    values = [
        1,
        1.0,
        True,
        np.int8(1),
        np.float32(1),
        np.float16(1),
        arr(1),
        arr(1, np.int32),
        1j,
        arr(1.0),
    ]
    for s in (*values, *reversed(values), np.array(1.0), jnp.asarray(1.0), jax.jit(lambda: 1.0)()):
        got, want = f(X, s), jax.jit(make())(X, s)
        same(got, want)
        assert [o.weak_type for o in got] == [o.weak_type for o in want]
        same(loop_jit(make())(X, s), want)


# --------------------------------------------------------------------------------------------
# Trees
# --------------------------------------------------------------------------------------------

TREES = [
    {1: 2.0},
    {True: 2.0},
    {1.0: 2.0},
    {"1": 2.0},
    {"a": 2.0},
    {"b": 2.0},
    [2.0],
    (2.0,),
    ((2.0,),),
    {"a": {1: 2.0}},
    {"a": {True: 2.0}},
    collections.OrderedDict(a=2.0),
    collections.OrderedDict([(True, 2.0)]),
    collections.OrderedDict([(1, 2.0)]),
    collections.defaultdict(int, {1: 2.0}),
    collections.defaultdict(float, {1: 2.0}),
    {0.0: 2.0},
    {-0.0: 2.0},
    {"a": None, "b": 2.0},
    [None, 2.0],
]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: {"in": (t, "static")}])
def test_trees_that_differ(wrap):
    def make():
        return lambda x, t: (
            x + text_of(jax.tree.map(lambda leaf: leaf if isinstance(leaf, str) else 0, t))
        )

    f = loop_jit(make())
    for tree in (*TREES, *reversed(TREES)):
        want = make()(X, wrap(tree))
        same(f(X, wrap(tree)), want)
        same(loop_jit(make())(X, wrap(tree)), want)


@pytest.mark.parametrize("first", [1, True, 1.0, 2])
def test_trees_with_several_fragile_nodes(first):
    def make():
        return lambda x, *trees: (
            x
            + sum(
                (i + 1) * text_of(type(k).__name__) + 100 * k
                for i, t in enumerate(trees)
                for k in t
            )
        )

    f = loop_jit(make())
    for second in (1, True, 1.0, 2, 3):
        for third in (1, True, 1.0, 2):
            trees = ({first: X[0]}, {second: X[1]}, {third: X[2]})
            same(f(X, *trees), make()(X, *trees))


def test_static_leaves_inside_of_trees():
    def make():
        return lambda t: t["x"] + text_of(t["s"]) + len(t["s"])

    f = loop_jit(make())
    for s in ("a", "b", "a"):
        same(f({"x": X, "s": s}), make()({"x": X, "s": s}))
        same(loop_jit(make())({"x": X, "s": s}), make()({"x": X, "s": s}))
    # The same types, once with a static leaf inside and once without.
    same(loop_jit(lambda t: t["x"] * 2.0)({"x": X, "s": 1.0}), X * 2.0)
    g = loop_jit(lambda t: t["x"] * (2.0 if isinstance(t["s"], str) else t["s"]))
    for s in (3.0, "a", 3.0, 4.0, "b"):
        same(g({"x": X, "s": s}), X * (2.0 if isinstance(s, str) else s))


def _node(name, children, aux, bases=(), **content):
    cls = type(name, bases, content)
    jax.tree_util.register_pytree_node(
        cls, lambda o: (children(o), aux(o)), lambda aux, c: _unflatten(cls, aux, c)
    )
    return cls


def _unflatten(cls, aux, children):
    new = object.__new__(cls)
    new.x, new.aux = children[0], aux
    return new


class Aux:
    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return isinstance(other, Aux)

    def __hash__(self):
        return 0

    def __repr__(self):
        return "Aux"


AuxNode = _node("AuxNode", lambda o: (o.x,), lambda o: o.aux)


@pytest.mark.parametrize(
    "values",
    [
        (0.0, -0.0, 0, False),
        (1, True, 1.0),
        ("a", "b"),
        ((1, 2), (True, 2), (1, 2.0)),
        (Aux(1), Aux(2)),
        (lambda: 1, lambda: 2),
        (Mode.A, Mode.B),
    ],
)
def test_static_data_of_a_node(values):
    def make():
        def f(node):
            aux = node.aux
            return node.x + (
                aux.k if isinstance(aux, Aux) else aux() if callable(aux) else text_of(aux)
            )

        return f

    def node(aux):
        return _unflatten(AuxNode, aux, (X,))

    f = loop_jit(make())
    for aux in (*values, *reversed(values)):
        same(f(node(aux)), make()(node(aux)))
        same(loop_jit(make())(node(aux)), make()(node(aux)))
        same(loop_jit(make())([node(aux)][0]), make()(node(aux)))
        same(loop_jit(lambda n, s: n.x + len(s))(node(aux), "ab"), X + 2)


def test_methods_of_a_node_are_patched():
    cls = _node("Patched", lambda o: (o.x,), lambda o: None, run=lambda self: self.x * 2.0)
    node = _unflatten(cls, None, (X,))
    f = loop_jit(lambda n: n.run())
    g = loop_jit(lambda ns: ns[0].run())
    for k in (2.0, 3.0, 4.0):
        cls.run = lambda self: self.x * k
        same(f(node), X * k)
        same(f(node), X * k)
        same(g([node]), X * k)
        same(loop_jit(lambda n: n.run())(node), X * k)


def test_what_the_methods_of_a_node_read():
    space = module("m", "K = 2.0\ndef run(self):\n    return self.x * K")
    cls = _node("Reads", lambda o: (o.x,), lambda o: None, run=space.run, factor=1.0)
    node = _unflatten(cls, None, (X,))
    f = loop_jit(lambda n: n.run() * n.factor)
    same(f(node), X * 2.0)
    space.K = 3.0
    same(f(node), X * 3.0)
    cls.factor = 2.0
    same(f(node), X * 6.0)
    space.run.__code__ = (lambda self: self.x * 5.0).__code__
    same(f(node), X * 10.0)


def test_two_classes_alike():
    def make(k):
        return _node("Alike", lambda o: (o.x,), lambda o: None, run=lambda self: self.x * k)

    f = loop_jit(lambda n: n.run())
    for k in (2.0, 3.0, 2.0):
        cls = make(k)
        same(f(_unflatten(cls, None, (X,))), X * k)
        same(loop_jit(lambda n: n.run())(_unflatten(cls, None, (X,))), X * k)


def test_which_class_it_is():
    def make():
        return _node("Which", lambda o: (o.x,), lambda o: None)

    a, b = make(), make()
    f = lambda: lambda n: n.x * 2.0 if isinstance(n, a) else n.x
    for cls in (a, b, a):
        same(loop_jit(f())(_unflatten(cls, None, (X,))), X * 2.0 if cls is a else X)


@jax.tree_util.register_pytree_node_class
class Forgetful:
    """Leaves a field out."""

    def __init__(self, x, k):
        self.x, self.k = x, k

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, 1.0)


def test_a_node_that_leaves_a_field_out():
    def make(o):
        return lambda x: x * o.k + o.x

    for k in (2.0, 3.0, 2.0):
        o = Forgetful(X, k)
        same(loop_jit(make(o))(X), X * k + X)
        o.k = 7.0
        same(loop_jit(make(o))(X), X * 7.0 + X)
        f = loop_jit(lambda o: o.x * o.k)
        same(f(Forgetful(X, k)), X)
        same(
            loop_jit(lambda o, s: s.k * o.x, static_argnums=1)(Forgetful(X, 5.0), Forgetful(X, k)),
            X * k,
        )


class Pair(typing.NamedTuple):
    a: jax.Array
    b: jax.Array

    def run(self):
        return self.a - self.b


def test_named_tuples():
    make = lambda: lambda p: p.run() if hasattr(p, "run") else p[0] + p[1]
    f = loop_jit(make())
    for p in (Pair(X, X * 2.0), (X, X * 2.0), Pair(X, X * 2.0)):
        same(f(p), make()(p))
    with counting() as n:
        loop_jit(make())(Pair(X, X))
    assert (n.compiles, n.traces) == (0, 0)


def test_partial_as_an_argument():
    def make(k):
        return jax.tree_util.Partial(lambda a, x: x * k + a, X)

    f = loop_jit(lambda g, x: g(x))
    for k in (2.0, 3.0, 2.0):
        same(f(make(k), X), X * k + X)
    w = arr(2.0)
    g = jax.tree_util.Partial(lambda a, x: x * w + a, X)
    same(f(g, X), X * 2.0 + X)
    w = arr(3.0)
    same(f(g, X), X * 3.0 + X)


def test_registered_dataclasses():
    def make():
        @functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["k"])
        @dataclasses.dataclass
        class P:
            x: jax.Array
            k: float

        return P

    P = make()
    f = loop_jit(lambda p: p.x * p.k)
    for k in (2.0, 3.0, 0.0, -0.0, 2, True, 2.0):
        same(f(P(X, k)), X * k)
        same(loop_jit(lambda p: p.x * p.k)(P(X, k)), X * k)


def test_donated_and_static_together():
    def make():
        return lambda x, s, y: x * len(s) + y

    for s in ("a", "bb", "a"):
        x = jnp.array([1.0, 2.0, 3.0])
        same(loop_jit(make(), donate_argnums=0, static_argnums=1)(x, s, X), X * len(s) + X)
        same(
            loop_jit(make(), donate_argnames="y")(X, s, jnp.array([1.0, 2.0, 3.0])), X * len(s) + X
        )


def test_options_that_differ():
    def make():
        return lambda a, b: a if isinstance(b, int) else a * 2.0

    same(loop_jit(make(), static_argnums=1)(X, 1), X)
    same(loop_jit(make())(X, 1), X * 2.0)
    same(loop_jit(make(), static_argnums=1)(X, 1), X)
    same(loop_jit(make(), static_argnames="b")(X, b=1), X)
    same(loop_jit(make())(X, b=1), X * 2.0)


def test_shardings_that_differ():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("a",))
    spec = jax.sharding.PartitionSpec

    def make():
        return lambda x: x * 2.0

    for s in (spec("a"), spec(), spec("a")):
        sharding = jax.sharding.NamedSharding(mesh, s)
        for options in ({"out_shardings": sharding}, {"in_shardings": sharding}):
            got, want = loop_jit(make(), **options)(X), jax.jit(make(), **options)(X)
            same(np.asarray(got), np.asarray(want))
            assert got.sharding.is_equivalent_to(want.sharding, 1)
    for device in jax.devices()[:3]:
        x = jax.device_put(X, device)
        assert loop_jit(make())(x).devices() == {device}
