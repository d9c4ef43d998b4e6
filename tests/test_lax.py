"""The loops of ``loopjit.lax`` against those of ``jax.lax``; fresh functions compile nothing."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopjit
import loopjit.lax
from counting import counting

X = np.linspace(0.1, 1.2, 12, dtype=np.float32).reshape(6, 2)
A = jnp.asarray(np.array([0.5, -1.5], np.float32))


def outcome(run):
    """The result of a call, or the error: class and text without addresses."""
    try:
        return "value", run()
    except Exception as error:
        return "error", error


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # (jax.lax hands back a Python number or a NumPy array that a loop leaves alone as it came.)
        assert isinstance(a, jax.Array) or type(a) is type(b)
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------

# A case is a function of the module, and of a number that is captured: fresh functions each time.
CASES = {
    # while_loop
    "while, float": lambda L, k: L.while_loop(lambda x: x < 9.0, lambda x: x * 2 + k, 1.0),
    "while, int": lambda L, k: L.while_loop(lambda x: x < 9, lambda x: x * 2 + k, 1),
    "while, bool": lambda L, k: L.while_loop(lambda x: x, lambda x: ~x & (k > 9), True),
    "while, strong": lambda L, k: L.while_loop(lambda x: x < 9, lambda x: x * 2 + k, jnp.int32(1)),
    "while, numpy": lambda L, k: L.while_loop(lambda x: x < 9, lambda x: x * 2 + k, np.float32(1)),
    "while, numpy array": lambda L, k: L.while_loop(lambda x: x.sum() < 99, lambda x: x * 2 + k, X),
    "while, int8": lambda L, k: L.while_loop(
        lambda x: x < 9, lambda x: x + np.int8(k + 1), np.int8(1)
    ),
    "while, complex": lambda L, k: L.while_loop(
        lambda z: abs(z) < 9, lambda z: z * (1 + k + 1j), 1j + 1
    ),
    "while, tree": lambda L, k: L.while_loop(
        lambda c: c["n"] < 5,
        lambda c: {"n": c["n"] + 1, "v": [c["v"][0] * A + k, None]},
        {"n": 0, "v": [jnp.ones(2), None]},
    ),
    "while, never": lambda L, k: L.while_loop(lambda c: False, lambda c: c + k, jnp.ones(3)),
    "while, empty": lambda L, k: L.while_loop(lambda c: c != 0, lambda c: c - c, k),
    "while, invariant": lambda L, k: L.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], c[2] * 2), (0, 2.0, 2.0)
    ),
    "while, promoted": lambda L, k: L.while_loop(
        lambda x: x < 9, lambda x: jnp.float32(x * 2 + k), 1.0
    ),
    "while, pred of shape ()": lambda L, k: L.while_loop(
        lambda x: jnp.all(x < 9), lambda x: x + 1 + k, A
    ),
    # fori_loop
    "fori": lambda L, k: L.fori_loop(0, 5, lambda i, x: x + i * k, 1.0),
    "fori, weak int": lambda L, k: L.fori_loop(0, 5, lambda i, x: x + i * k, 1),
    "fori, index type": lambda L, k: L.fori_loop(0, 3, lambda i, x: i, 7),
    "fori, numpy bounds": lambda L, k: L.fori_loop(
        np.int32(1), np.int32(5), lambda i, x: x + i * k, 0
    ),
    "fori, int8 bounds": lambda L, k: L.fori_loop(
        np.int8(1), np.int8(5), lambda i, x: x + k, np.int8(0)
    ),
    "fori, array bounds": lambda L, k: L.fori_loop(
        jnp.int32(1), jnp.int32(5), lambda i, x: x + i * k, 1
    ),
    "fori, one array bound": lambda L, k: L.fori_loop(1, jnp.int32(5), lambda i, x: x + i * k, 1.0),
    "fori, uint bounds": lambda L, k: L.fori_loop(
        jnp.uint8(1), 5, lambda i, x: x + i.astype(int), 1
    ),
    "fori, empty": lambda L, k: L.fori_loop(5, 0, lambda i, x: x + i, jnp.float32(k)),
    "fori, negative": lambda L, k: L.fori_loop(-3, 2, lambda i, x: x + i * k, 0.0),
    "fori, bool bounds": lambda L, k: L.fori_loop(False, True, lambda i, x: x + k, 0.0),
    "fori, unroll": lambda L, k: L.fori_loop(0, 7, lambda i, x: x * A + i * k, A, unroll=3),
    "fori, unroll all": lambda L, k: L.fori_loop(0, 7, lambda i, x: x * A + i * k, A, unroll=True),
    "fori, unroll False": lambda L, k: L.fori_loop(
        0, 7, lambda i, x: x * A + i * k, A, unroll=False
    ),
    "fori, tree": lambda L, k: L.fori_loop(0, 3, lambda i, c: {"a": c["a"] * 2 + k}, {"a": (1.0)}),
    "fori, no carry": lambda L, k: L.fori_loop(0, 3, lambda i, c: c, ()),
    "fori, None": lambda L, k: L.fori_loop(0, 3, lambda i, c: None, None),
    # scan
    "scan": lambda L, k: L.scan(lambda c, x: (c + x * k, c.sum()), A, X),
    "scan, no xs": lambda L, k: L.scan(lambda c, x: (c + k, c), A, None, length=4),
    "scan, xs left out": lambda L, k: L.scan(lambda c, _: (c + k, c), 1.0, length=4),
    "scan, no ys": lambda L, k: L.scan(lambda c, x: (c + x * k, None), A, X),
    "scan, length": lambda L, k: L.scan(lambda c, x: (c + x * k, c), A, X, 6),
    "scan, length as NumPy": lambda L, k: L.scan(lambda c, x: (c + k, c), A, None, np.int64(3)),
    "scan, reverse": lambda L, k: L.scan(lambda c, x: (c + x * k, c), A, X, reverse=True),
    "scan, unroll": lambda L, k: L.scan(lambda c, x: (c + x * k, c), A, X, unroll=4),
    "scan, unroll all": lambda L, k: L.scan(lambda c, x: (c + x * k, c), A, X, unroll=True),
    "scan, tree": lambda L, k: L.scan(
        lambda c, x: ({"c": c["c"] + x[0].sum()}, (x[1]["i"], c)),
        {"c": 0.0},
        (X, {"i": np.arange(6)}),
    ),
    "scan, weak carry": lambda L, k: L.scan(lambda c, x: (c * 2, c), 1, jnp.arange(3)),
    "scan, weak to strong": lambda L, k: L.scan(lambda c, x: (c + x, c), 1.0, X[:, 0]),
    "scan, length 0": lambda L, k: L.scan(lambda c, x: (c + x, c), A, X[:0]),
    "scan, list as xs": lambda L, k: L.scan(
        lambda c, x: (c + x[0] + x[1], c), 0.0, [X[:, 0], X[:, 1]]
    ),
    "scan, split transpose": lambda L, k: L.scan(
        lambda c, x: (c * x, c), A, X, _split_transpose=True
    ),
    # map
    "map": lambda L, k: L.map(lambda x: x * A + k, X),
    "map, tree": lambda L, k: L.map(lambda t: {"s": t[0] + t[1]}, (X, jnp.arange(6.0))),
    "map, batch_size": lambda L, k: L.map(lambda x: x.sum() * k, X, batch_size=4),
    "map, batch_size fits": lambda L, k: L.map(lambda x: x.sum() * k, X, batch_size=3),
    "map, batch_size large": lambda L, k: L.map(lambda x: x.sum() * k, X, batch_size=99),
    "map, constant": lambda L, k: L.map(lambda x: 1.0 + k, X),
    # cond
    "cond": lambda L, k: L.cond(True, lambda x: x + k, lambda x: x - k, A),
    "cond, false": lambda L, k: L.cond(False, lambda x: x + k, lambda x: x - k, A),
    "cond, array": lambda L, k: L.cond(A[0] > 0, lambda x: x + k, lambda x: x - k, A),
    "cond, number": lambda L, k: L.cond(3, lambda x: x + k, lambda x: x - k, A),
    "cond, float": lambda L, k: L.cond(0.0, lambda x: x + k, lambda x: x - k, A),
    "cond, NumPy": lambda L, k: L.cond(np.bool_(True), lambda x: x + k, lambda x: x - k, A),
    "cond, no operands": lambda L, k: L.cond(True, lambda: A + k, lambda: A),
    "cond, many operands": lambda L, k: L.cond(
        True, lambda x, y: (x, y), lambda x, y: (y, x), 1.0, 2.0 + k
    ),
    "cond, operand=": lambda L, k: L.cond(True, lambda x: x + k, lambda x: x - k, operand=A),
    "cond, operand=None": lambda L, k: L.cond(True, lambda _: A + k, lambda _: A, operand=None),
    "cond, weak": lambda L, k: L.cond(True, lambda x: x, lambda x: x * 2, 1.0),
    "cond, weak and strong": lambda L, k: L.cond(True, lambda: 1.0, lambda: jnp.float32(2)),
    "cond, old form": lambda L, k: L.cond(True, 1.0, lambda x: x + k, 2.0, lambda x: x - k),
    "cond, None result": lambda L, k: L.cond(True, lambda x: None, lambda x: None, A),
    # switch
    "switch": lambda L, k: L.switch(1, [lambda x: x, lambda x: x * A, lambda x: x + k], A),
    "switch, below": lambda L, k: L.switch(-3, [lambda x: x, lambda x: x * A], A),
    "switch, above": lambda L, k: L.switch(9, [lambda x: x, lambda x: x * A], A),
    "switch, array": lambda L, k: L.switch(jnp.uint8(1), [lambda x: x, lambda x: x * A], A),
    "switch, one branch": lambda L, k: L.switch(5, [lambda x: x * k], A),
    "switch, one branch, bool": lambda L, k: L.switch(0, (lambda: 1.0,)),
    "switch, generator": lambda L, k: L.switch(1, (b for b in [jnp.sin, jnp.cos]), A),
    "switch, same twice": lambda L, k: L.switch(1, [jnp.sin, jnp.sin], A),
    "switch, operand=": lambda L, k: L.switch(1, [jnp.sin, jnp.cos], operand=A),
    "switch, keywords": lambda L, k: L.switch(index=0, branches=[jnp.sin, jnp.cos], operand=A),
    # associative_scan
    "associative": lambda L, k: L.associative_scan(jnp.add, X),
    "associative, lambda": lambda L, k: L.associative_scan(lambda a, b: a * b, X),
    "associative, reverse": lambda L, k: L.associative_scan(lambda a, b: a + b, X, reverse=True),
    "associative, axis": lambda L, k: L.associative_scan(lambda a, b: a + b, X, axis=1),
    "associative, axis -1": lambda L, k: L.associative_scan(lambda a, b: a + b, X, True, -1),
    "associative, tree": lambda L, k: L.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (X, jnp.asarray(X))
    ),
    "associative, ints": lambda L, k: L.associative_scan(lambda a, b: a + b, np.arange(5)),
    "associative, one": lambda L, k: L.associative_scan(lambda a, b: a + b, X[:1]),
    "associative, none": lambda L, k: L.associative_scan(lambda a, b: a + b, X[:0]),
}


def _jitted(f):
    return jax.jit(lambda: f())()


@pytest.mark.parametrize("stage", [lambda f: f(), _jitted], ids=["eager", "under jit"])
@pytest.mark.parametrize("name", CASES)
def test_like_jax_lax(name, stage):
    case = CASES[name]
    for k in (1, 2, 1):
        kind, want = outcome(lambda: stage(lambda: case(jax.lax, k)))
        got_kind, got = outcome(lambda: stage(lambda: case(loopjit.lax, k)))
        assert got_kind == kind, (got, want)
        if kind == "value":
            assert_same(got, want)
        else:
            assert type(got) is type(want) and str(got) == str(want)


@pytest.mark.parametrize("name", CASES)
def test_called_again_with_fresh_functions(name):
    case = CASES[name]
    if outcome(lambda: case(loopjit.lax, 1))[0] == "error":
        pytest.skip("an error in this version of JAX")
    case(loopjit.lax, 1)
    with counting() as n:
        jax.block_until_ready(case(loopjit.lax, 1))
    if name.startswith(
        ("cond, operand=", "cond, old form", "switch, operand=", "switch, keywords")
    ):
        pytest.skip("legacy forms are those of jax.lax")
    assert n.compiles == 0


WARM = [
    "while, float",
    "while, tree",
    "fori",
    "fori, array bounds",
    "fori, unroll",
    "scan",
    "scan, tree",
    "scan, no xs",
    "map",
    "map, batch_size",
    "cond",
    "cond, no operands",
    "switch",
    "associative, lambda",
]


@pytest.mark.parametrize("name", WARM)
def test_called_again_traces_nothing(name):
    case = CASES[name]
    case(loopjit.lax, 1)
    with counting() as n:
        jax.block_until_ready(case(loopjit.lax, 1))
    assert (n.compiles, n.traces) == (0, 0)


@pytest.mark.parametrize("loop", ["while_loop", "fori_loop", "scan", "map", "associative_scan"])
def test_parameters_are_those_of_jax_lax(loop):
    stock = inspect.signature(getattr(jax.lax, loop)).parameters.values()
    ours = inspect.signature(getattr(loopjit.lax, loop)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in stock
    ]


def test_all_arguments_by_name():
    for L in (jax.lax, loopjit.lax):
        assert (
            float(L.while_loop(cond_fun=lambda x: x < 3, body_fun=lambda x: x + 1, init_val=0.0))
            == 3
        )
        assert float(L.fori_loop(lower=0, upper=3, body_fun=lambda i, x: x + 1, init_val=0.0)) == 3
        c, _ = L.scan(
            f=lambda c, x: (c + x, c), init=0.0, xs=jnp.arange(3.0), length=3, reverse=False
        )
        assert float(c) == 3
        assert L.map(f=lambda x: x, xs=jnp.arange(3)).shape == (3,)
        assert float(L.cond(True, true_fun=lambda x: x, false_fun=lambda x: -x, operand=1.0)) == 1
        assert (
            float(L.cond(pred=True, true_fun=lambda x: x, false_fun=lambda x: -x, operand=1.0)) == 1
        )
        out = L.associative_scan(fn=jnp.add, elems=jnp.arange(3), reverse=False, axis=0)
        assert out.tolist() == [0, 1, 3]


# ------------------------------------------------------------------------------------------------
# Errors
# ------------------------------------------------------------------------------------------------


def add(x):
    return x + 1


def add2(x, y):
    return x + y


def never(x):
    return False


ERRORS = {
    "while, body not callable": lambda L: L.while_loop(never, 3, 1.0),
    "while, cond not callable": lambda L: L.while_loop(None, add, 1.0),
    "while, carry dtype": lambda L: L.while_loop(never, lambda x: x * 1.5, 1),
    "while, carry dtype, array": lambda L: L.while_loop(never, lambda x: x * 1.5, jnp.arange(3)),
    "while, carry shape": lambda L: L.while_loop(never, lambda x: jnp.concatenate([x, x]), A),
    "while, carry tree": lambda L: L.while_loop(never, lambda x: (x, x), A),
    "while, carry keys": lambda L: L.while_loop(never, lambda x: {"b": x["a"]}, {"a": A}),
    "while, carry tree nested": lambda L: L.while_loop(never, lambda c: [c[0], (c[1],)], [A, A]),
    "while, pred float": lambda L: L.while_loop(lambda x: x, add, 1.0),
    "while, pred shape": lambda L: L.while_loop(lambda x: x > 0, add, A),
    "while, pred tree": lambda L: L.while_loop(lambda x: (True, True), add, A),
    "while, pred None": lambda L: L.while_loop(lambda x: None, add, A),
    "while, string carry": lambda L: L.while_loop(never, add, "a"),
    "while, object carry": lambda L: L.while_loop(never, add, object()),
    "while, body raises": lambda L: L.while_loop(never, lambda x: 1 // 0, 1.0),
    "while, body takes two": lambda L: L.while_loop(never, lambda x, y: x, 1.0),
    "while, body returns a string": lambda L: L.while_loop(never, lambda x: "a", 1.0),
    "while, concretization": lambda L: L.while_loop(never, lambda x: x if x > 0 else -x, 1.0),
    "while, missing": lambda L: L.while_loop(never, add),
    "fori, body not callable": lambda L: L.fori_loop(0, 3, None, 1.0),
    "fori, float bounds": lambda L: L.fori_loop(0.0, 3.0, add2, 1.0),
    "fori, float array bound": lambda L: L.fori_loop(0, jnp.float32(3), add2, 1.0),
    "fori, mixed dtypes": lambda L: L.fori_loop(np.int8(0), np.int16(3), add2, 1),
    "fori, mixed dtypes, arrays": lambda L: L.fori_loop(jnp.uint8(0), jnp.int32(3), add2, 1),
    "fori, bound shape": lambda L: L.fori_loop(0, jnp.arange(2), add2, 1),
    "fori, string bound": lambda L: L.fori_loop("0", 3, add2, 1),
    "fori, None bound": lambda L: L.fori_loop(None, 3, add2, 1),
    "fori, carry dtype": lambda L: L.fori_loop(0, 3, lambda i, x: x * 1.5, 1),
    "fori, carry tree": lambda L: L.fori_loop(0, 3, lambda i, x: (x, i), 1),
    "fori, carry shape": lambda L: L.fori_loop(0, 3, lambda i, x: x[None], A),
    "fori, carry None": lambda L: L.fori_loop(0, 3, lambda i, x: None, A),
    "fori, unroll with arrays": lambda L: L.fori_loop(0, jnp.int32(3), add2, 1, unroll=2),
    "fori, unroll string": lambda L: L.fori_loop(0, 3, add2, 1, unroll="x"),
    "fori, unroll 0": lambda L: L.fori_loop(0, 3, add2, 1, unroll=0),
    "fori, too large": lambda L: L.fori_loop(0, 2**40, add2, 1),
    "scan, f not callable": lambda L: L.scan(3, A, X),
    "scan, no pair": lambda L: L.scan(lambda c, x: c, A, X),
    "scan, triple": lambda L: L.scan(lambda c, x: (c, c, c), A, X),
    "scan, None": lambda L: L.scan(lambda c, x: None, A, X),
    "scan, carry dtype": lambda L: L.scan(lambda c, x: (c * 1.5, x), 1, X),
    "scan, carry shape": lambda L: L.scan(lambda c, x: (c[None], x), A, X),
    "scan, carry tree": lambda L: L.scan(lambda c, x: ([c], x), A, X),
    "scan, carry leaf of tree": lambda L: L.scan(
        lambda c, x: ({"a": c["a"], "b": c["b"] * 1.5}, x), {"a": A, "b": 1}, X
    ),
    "scan, lengths differ": lambda L: L.scan(lambda c, x: (c, x), 0.0, (X, X[:3])),
    "scan, length differs": lambda L: L.scan(lambda c, x: (c, x), 0.0, X, length=3),
    "scan, no length": lambda L: L.scan(lambda c, x: (c, x), 0.0, None),
    "scan, scalar xs": lambda L: L.scan(lambda c, x: (c, x), 0.0, 3.0),
    "scan, length string": lambda L: L.scan(lambda c, x: (c, x), 0.0, None, length="3"),
    "scan, length float": lambda L: L.scan(lambda c, x: (c, x), 0.0, None, length=3.0),
    "scan, length traced": lambda L: jax.jit(lambda n: L.scan(lambda c, x: (c, x), 0.0, None, n))(
        3
    ),
    "scan, unroll 0": lambda L: L.scan(lambda c, x: (c, x), 0.0, X, unroll=0),
    "scan, unroll negative": lambda L: L.scan(lambda c, x: (c, x), 0.0, X, unroll=-1),
    "scan, string xs": lambda L: L.scan(lambda c, x: (c, x), 0.0, "abc"),
    "scan, string init": lambda L: L.scan(lambda c, x: (c, x), "abc", X),
    "map, f not callable": lambda L: L.map(None, X),
    "map, scalar": lambda L: L.map(add, 3.0),
    "map, lengths differ": lambda L: L.map(lambda t: t[0], (X, X[:2])),
    "map, batch_size 0": lambda L: L.map(add, X, batch_size=0),
    "map, batch_size float": lambda L: L.map(add, X, batch_size=2.5),
    "map, empty tree": lambda L: L.map(add, ()),
    "cond, not callable": lambda L: L.cond(True, 3, add, 1.0),
    "cond, not callable, both": lambda L: L.cond(True, 3, None, 1.0),
    "cond, pred shape": lambda L: L.cond(A > 0, add, add, 1.0),
    "cond, pred string": lambda L: L.cond("x", add, add, 1.0),
    "cond, pred None": lambda L: L.cond(None, add, add, 1.0),
    "cond, pred function": lambda L: L.cond(add, add, add, 1.0),
    "cond, pred list": lambda L: L.cond([True], add, add, 1.0),
    "cond, dtypes": lambda L: L.cond(True, lambda x: x, lambda x: x.astype(int), A),
    "cond, shapes": lambda L: L.cond(True, lambda x: x, lambda x: x[0], A),
    "cond, trees": lambda L: L.cond(True, lambda x: x, lambda x: (x,), A),
    "cond, keys": lambda L: L.cond(True, lambda x: {"a": x}, lambda x: {"b": x}, A),
    "cond, too few operands": lambda L: L.cond(True, add, add),
    "cond, too many operands": lambda L: L.cond(True, add, add, 1, 2),
    "cond, both kinds of operands": lambda L: L.cond(True, add, add, 1, operand=2),
    "cond, unknown keyword": lambda L: L.cond(True, add, add, 1, operands=2),
    "cond, string operand": lambda L: L.cond(True, add, add, "a"),
    "switch, no branches": lambda L: L.switch(0, [], 1.0),
    "switch, not callable": lambda L: L.switch(0, [add, 3], 1.0),
    "switch, one, not callable": lambda L: L.switch(0, [3], 1.0),
    "switch, float index": lambda L: L.switch(1.0, [add, add], 1.0),
    "switch, index shape": lambda L: L.switch(jnp.arange(2), [add, add], 1.0),
    "switch, index string": lambda L: L.switch("a", [add, add], 1.0),
    "switch, index None": lambda L: L.switch(None, [add, add], 1.0),
    "switch, index bool": lambda L: L.switch(True, [add, add], 1.0),
    "switch, dtypes": lambda L: L.switch(0, [lambda x: x, lambda x: x.astype(int)], A),
    "switch, trees": lambda L: L.switch(0, [lambda x: x, lambda x: [x]], A),
    "switch, branches a function": lambda L: L.switch(0, add, A),
    "associative, not callable": lambda L: L.associative_scan(3, X),
    "associative, lengths": lambda L: L.associative_scan(add2, (X, X[:2])),
    "associative, scalar": lambda L: L.associative_scan(add2, 3.0),
    "associative, axis": lambda L: L.associative_scan(add2, X, axis=7),
    "associative, axis string": lambda L: L.associative_scan(add2, X, axis="a"),
    "associative, shape": lambda L: L.associative_scan(lambda a, b: a[:0], X),
    "associative, tree": lambda L: L.associative_scan(lambda a, b: (a, b), X),
}


def _text(error):
    text = re.sub(r"0x[0-9a-f]+", "0x", str(error))
    text = re.sub(r"(?s)The error occurred while tracing.*? for (jit|scan|while|cond)", "", text)
    return re.sub(r"at [^ ]*:\d+", "at", text)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_jax_lax(name):
    kind, want = outcome(lambda: ERRORS[name](jax.lax))
    for _ in range(2):
        got_kind, got = outcome(lambda: ERRORS[name](loopjit.lax))
        assert got_kind == kind, (got, want)
        if kind == "value":
            return assert_same(got, want)
        assert type(got) is type(want)
        assert _text(got) == _text(want)


def test_an_error_leaves_nothing_behind():
    flag = [True]

    def body(x):
        if flag[0]:
            raise KeyError("mine")
        return x + 1

    for _ in range(2):
        with pytest.raises(KeyError, match="mine") as info:
            loopjit.lax.while_loop(lambda x: x < 3, body, 0)
        assert info.traceback[-1].name == "body"
    flag[0] = False
    assert int(loopjit.lax.while_loop(lambda x: x < 3, body, 0)) == 3


def test_wrong_input_after_right_input():
    def run(L, init):
        return L.while_loop(lambda x: x.sum() < 9, lambda x: x * 1.5, init)

    for good in (jnp.ones(2), jnp.ones(3)):
        assert_same(run(loopjit.lax, good), run(jax.lax, good))
    for bad in (jnp.arange(3), "a", (1.0, 2.0)):
        _, want = outcome(lambda: run(jax.lax, bad))
        kind, got = outcome(lambda: run(loopjit.lax, bad))
        assert kind == "error" and type(got) is type(want) and _text(got) == _text(want)


# ------------------------------------------------------------------------------------------------
# Transformations, and loops in loops
# ------------------------------------------------------------------------------------------------


def _loops(L):
    """Fresh functions of a vector of two, each with one loop, that can be differentiated."""
    return {
        "fori": lambda x: L.fori_loop(0, 3, lambda i, c: jnp.sin(c) * A + x, x),
        "fori, unroll": lambda x: L.fori_loop(0, 4, lambda i, c: jnp.sin(c) * A + x, x, unroll=2),
        "scan": lambda x: L.scan(lambda c, t: (jnp.sin(c) * t + x, c), x, jnp.asarray(X))[1].sum(0),
        "scan, reverse": lambda x: L.scan(
            lambda c, t: (c * t + x, c), x, jnp.asarray(X), reverse=True
        )[0],
        "map": lambda x: L.map(lambda t: jnp.sin(t * x).sum(), jnp.asarray(X))[:2] * x,
        "map, batch_size": lambda x: L.map(
            lambda t: jnp.sin(t * x).sum(), jnp.asarray(X), batch_size=4
        )[:2],
        "cond": lambda x: L.cond(x.sum() > 0, lambda y: jnp.exp(y) * A, lambda y: y * x, x),
        "switch": lambda x: L.switch(
            x.sum().astype(int), [lambda y: y * x, lambda y: jnp.sin(y * A)], x
        ),
        "associative": lambda x: L.associative_scan(lambda a, b: a * b, x[None] * jnp.asarray(X))[
            -1
        ],
        "nested": lambda x: L.fori_loop(
            0,
            2,
            lambda i, c: L.scan(
                lambda d, t: (d * t + c, L.cond(t > 0, lambda: d, lambda: c)), c, x
            )[0],
            x,
        ),
    }


def _while(L):
    def stage(x):
        return L.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * A + x), (0, x)
        )[1]

    return stage


TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x),
    "jacfwd": jax.jacfwd,
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum())),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, -x, 2 * x])),
    "vmap of grad": lambda f: (
        lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.stack([x, -x]))
    ),
    "make_jaxpr": lambda f: (
        lambda x: jax.core.eval_jaxpr((j := jax.make_jaxpr(f)(x)).jaxpr, j.consts, x)
    ),
    "eval_shape": lambda f: lambda x: jnp.zeros(jax.eval_shape(f, x).shape),
}


# These trace a fresh function of the caller's as a whole, so that nothing of it is called op by op.
STAGED = ("jit", "checkpoint", "make_jaxpr")


@pytest.mark.parametrize("loop", _loops(jax.lax))
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name, loop):
    transform = TRANSFORMATIONS[name]
    x = A + 1.0
    want = transform(_loops(jax.lax)[loop])(x)
    for k in range(3):
        with counting() as n:
            got = jax.block_until_ready(transform(_loops(loopjit.lax)[loop])(x))
        assert_same(got, want)
    if name not in STAGED:
        assert n.compiles == 0


@pytest.mark.parametrize("name", ["jit", "jvp", "vmap", "jacfwd", "linearize", "make_jaxpr"])
def test_transformations_of_while_loop(name):
    transform = TRANSFORMATIONS[name]
    x = A + 1.0
    want = transform(_while(jax.lax))(x)
    for k in range(3):
        with counting() as n:
            got = jax.block_until_ready(transform(_while(loopjit.lax))(x))
        assert_same(got, want)
    if name not in STAGED:
        assert n.compiles == 0


def test_reverse_mode_of_while_is_the_error_of_jax():
    for L in (jax.lax, loopjit.lax):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for"):
            jax.grad(lambda x: _while(L)(x).sum())(A)


def test_static_bounds_can_be_differentiated_and_traced_ones_not():
    def run(L, n):
        return jax.grad(lambda x: L.fori_loop(0, n, lambda i, c: c * x, 1.0))(2.0)

    for n in (3, np.int32(3), 4, 3):
        assert_same(run(loopjit.lax, n), run(jax.lax, n))
    for L in (jax.lax, loopjit.lax):
        with pytest.raises(ValueError, match="Reverse-mode differentiation"):
            jax.jit(lambda n: run(L, n))(3)


def test_each_static_bound_is_one_program_and_array_bounds_share():
    for n in (3, 4, 3, 4):
        out = loopjit.lax.fori_loop(0, n, lambda i, x: x + i, 0)
        assert int(out) == sum(range(n))
    f = jax.jit(lambda n: loopjit.lax.fori_loop(0, n, lambda i, x: x + i, 0))
    f(1)
    with counting() as n:
        assert [int(f(k)) for k in (3, 4, 5)] == [3, 6, 10]
    assert n.compiles == 0


def test_an_array_bound_is_read_where_jax_reads_it():
    # The value of a concrete bound is known to jax.lax: reverse mode works.
    def run(L, n):
        return jax.grad(lambda x: L.fori_loop(0, n, lambda i, c: c * x, 1.0))(2.0)

    for n in (jnp.int32(3), jnp.int32(4)):
        kind, want = outcome(lambda: run(jax.lax, n))
        got_kind, got = outcome(lambda: run(loopjit.lax, n))
        assert got_kind == kind
        if kind == "value":
            assert_same(got, want)


def _body(c, x):
    return c * 2.0 + x, c


OPTIONS = {
    "scan": [
        lambda L, xs: L.scan(_body, A, xs),
        lambda L, xs: L.scan(_body, A, xs, reverse=True),
        lambda L, xs: L.scan(_body, A, xs, unroll=2),
        lambda L, xs: L.scan(_body, A, xs, length=6, unroll=True),
        lambda L, xs: L.scan(_body, A, 1.0 * xs, length=None, reverse=True, unroll=3),
    ],
    "scan, length": [
        lambda L, xs, n=n: L.scan(lambda c, _: (c + 1.0, c), A, None, length=n) for n in (2, 3, 0)
    ],
    "fori": [
        lambda L, xs, low=low, high=high: L.fori_loop(low, high, lambda i, c: c + i, 1.0)
        for low, high in ((0, 3), (1, 3), (0, 4), (np.int32(1), 4), (0, jnp.int32(5)))
    ],
    "map": [
        lambda L, xs, size=size: L.map(lambda x: (x * 2.0, x.sum()), xs, batch_size=size)
        for size in (None, 2, 4, 1)
    ],
    "associative": [
        lambda L, xs, options=options: L.associative_scan(jnp.add, xs, **options)
        for options in ({}, {"reverse": True}, {"axis": 1}, {"axis": 1, "reverse": True})
    ],
    "cond": [
        lambda L, xs, pred=pred: L.cond(pred, jnp.sin, jnp.cos, xs)
        for pred in (True, False, np.bool_(True), 0, 2, 0.0, jnp.bool_(False), jnp.int8(3))
    ],
    "switch": [
        lambda L, xs, i=i: L.switch(i, [jnp.sin, jnp.cos, jnp.tan], xs)
        for i in (0, 1, 2, 5, -1, np.int8(1), jnp.uint8(2))
    ],
    "functions of another order": [
        lambda L, xs: L.switch(1, [jnp.sin, jnp.cos], xs),
        lambda L, xs: L.switch(1, [jnp.cos, jnp.sin], xs),
        lambda L, xs: L.cond(True, jnp.sin, jnp.cos, xs),
        lambda L, xs: L.cond(True, jnp.cos, jnp.sin, xs),
    ],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_same_functions_with_other_options(name):
    xs = jnp.asarray(X)
    for _ in range(2):
        for call in OPTIONS[name]:
            assert_same(call(loopjit.lax, xs), call(jax.lax, xs))


def test_each_option_reaches_the_program():
    def programs(call):
        text = str(jax.make_jaxpr(lambda xs: call(loopjit.lax, xs))(X))
        return re.findall(r"(?:length|reverse|unroll)=\w+", text)

    for call in OPTIONS["scan"]:
        assert programs(call) == programs(lambda L, xs: call(jax.lax, xs))
    x = jnp.asarray(X)
    for unroll in (1, 2, 3):
        loopjit.lax.scan(_body, A, x, unroll=unroll)
    assert loopjit.cache_info().currsize == 3


def test_closures_over_arrays_and_their_new_values():
    for loop in (
        lambda a: loopjit.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + a, jnp.zeros(2)),
        lambda a: loopjit.lax.fori_loop(0, 3, lambda i, x: x + a, jnp.zeros(2)),
        lambda a: loopjit.lax.scan(lambda c, x: (c + a, c), jnp.zeros(2), None, 3),
        lambda a: loopjit.lax.map(lambda x: x + a, X),
        lambda a: loopjit.lax.cond(True, lambda x: x + a, lambda x: x - a, jnp.zeros(2)),
        lambda a: loopjit.lax.switch(1, [lambda x: x + a, lambda x: x - a], jnp.zeros(2)),
        lambda a: loopjit.lax.associative_scan(lambda x, y: x + y + 0 * a, X),
    ):
        arrays = [jnp.full(2, k + 1.0) for k in range(3)]
        results = []
        for a in arrays:
            with counting() as n:
                results.append(jax.block_until_ready(loop(a)))
        assert (n.compiles, n.traces) == (0, 0)
        again = [loop(a) for a in arrays]
        jax.tree.map(np.testing.assert_array_equal, again, results)
        with jax.disable_jit():
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), loop(arrays[1]), again[1]
            )


def test_an_array_rebound_in_a_loop():
    a = jnp.ones(2)
    for k in range(4):
        with counting() as n:
            a = loopjit.lax.fori_loop(0, 2, lambda i, x: x + a, a)
    assert n.compiles == 0
    assert a.tolist() == [81.0, 81.0]


def test_functions_of_every_kind():
    class Body:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x + self.k

        def method(self, x):
            return x + 2 * self.k

    for k in (1.0, 2.0):
        for body in (
            Body(k),
            Body(k).method,
            functools.partial(lambda k, x: x + k, k),
            jax.jit(lambda x: x + k),
            loopjit.loop_jit(lambda x: x + k),
        ):
            got = loopjit.lax.while_loop(lambda x: x < 9, body, 0.0)
            assert_same(got, jax.lax.while_loop(lambda x: x < 9, body, 0.0))
    assert_same(loopjit.lax.map(jnp.sin, X), jax.lax.map(jnp.sin, X))


def test_concrete_carry_of_committed_and_sharded_arrays():
    x = jax.device_put(X[:, 0], jax.devices()[3])
    out = loopjit.lax.fori_loop(0, 3, lambda i, c: c * 2, x)
    assert out.devices() == {jax.devices()[3]}
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    y = jax.device_put(X[:, 0], sharding)
    want = jax.lax.fori_loop(0, 3, lambda i, c: c * 2, y)
    for _ in range(2):
        assert loopjit.lax.fori_loop(0, 3, lambda i, c: c * 2, y).sharding == want.sharding


def test_effects_in_loops():
    seen = []

    def run(tag):
        def body(i, x):
            jax.debug.callback(lambda v: seen.append((tag, int(v))), x, ordered=True)
            return x + 1

        return loopjit.lax.fori_loop(0, 3, body, 0)

    run("a"), run("b")
    jax.effects_barrier()
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]


def test_disable_jit():
    with jax.disable_jit():
        seen = []
        loopjit.lax.while_loop(lambda x: x < 3, lambda x: seen.append(x) or x + 1, jnp.int32(0))
    assert [int(x) for x in seen] == [0, 1, 2]


def test_x64():
    def run(L):
        return L.fori_loop(0, 3, lambda i, x: x + i, 0), L.scan(
            lambda c, x: (c + x, x), 0.0, np.arange(3.0)
        )

    for _ in range(2):
        assert_same(run(loopjit.lax), run(jax.lax))
        with jax.enable_x64(True):
            assert_same(run(loopjit.lax), run(jax.lax))


def test_under_named_axes():
    def run(L):
        return jax.vmap(
            lambda x: L.scan(lambda c, _: (jax.lax.psum(c, "i"), c), x, None, 2)[0], axis_name="i"
        )(jnp.arange(3.0))

    for _ in range(2):
        assert_same(run(loopjit.lax), run(jax.lax))


# ------------------------------------------------------------------------------------------------
# Everything else is jax.lax
# ------------------------------------------------------------------------------------------------


def test_other_names_fall_through():
    names = [n for n in dir(jax.lax) if not n.startswith("_")]
    ours = {"while_loop", "fori_loop", "scan", "map", "cond", "switch", "associative_scan"}
    for name in names:
        if name not in ours:
            assert getattr(loopjit.lax, name) is getattr(jax.lax, name), name
    assert set(names) <= set(dir(loopjit.lax))
    assert loopjit.lax.dot is jax.lax.dot
    assert loopjit.lax.linalg is jax.lax.linalg
    assert all(getattr(loopjit.lax, name) is not getattr(jax.lax, name) for name in ours)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no_such_loop"):
        loopjit.lax.no_such_loop
    assert not hasattr(loopjit.lax, "no_such_loop")
    with pytest.raises(ImportError, match="no_such_loop"):
        exec("from loopjit.lax import no_such_loop")


def test_names_of_the_module_do_not_hide_those_of_jax():
    namespace = {}
    exec("from loopjit.lax import add, dot, dot_general, fori_loop, sort", namespace)
    assert namespace["dot_general"] is jax.lax.dot_general
    assert namespace["fori_loop"] is loopjit.lax.fori_loop
