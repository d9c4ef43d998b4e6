"""Transformations of and inside a ``loop_jit`` function: right, and compiled only once."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import loopjit
from counting import counting
from loopjit import loop_jit

X = np.linspace(0.2, 1.6, 8, dtype=np.float32)


def _mesh(axis_type="Auto"):
    return jax.make_mesh((8,), ("i",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))


def assert_same(got, want):
    """Trees, dtypes, weak types and, but for rounding, values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# Each makes a fresh function of an array; those that capture arrays capture others for each `k`.


def plain(k):
    return lambda x: jnp.sin(x) * x


def captured(k):
    a, b = jnp.full(8, k + 1.5, jnp.float32), jnp.float32(k + 0.5)
    return lambda x: jnp.sin(x * b) * a.sum()


def with_scan(k):
    return lambda x: lax.scan(lambda c, t: (jnp.sin(c) + t, c), x, jnp.arange(3.0))[0]


def with_scan_captured(k):
    a = jnp.full(3, k + 0.5, jnp.float32)
    return lambda x: lax.scan(lambda c, t: (jnp.sin(c) * t, c), x, a)[0]


def with_our_scan_captured(k):
    a = jnp.full(3, k + 0.5, jnp.float32)
    return lambda x: loopjit.lax.scan(lambda c, t: (jnp.sin(c) * t, c), x, a)[0]


def with_fori_captured(k):
    a = jnp.float32(k + 0.5)
    return lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.cos(c) * a + i, x)


def with_cond_captured(k):
    a = jnp.float32(k + 0.5)
    return lambda x: lax.cond(x.sum() > 0, lambda y: jnp.exp(-y) * a, lambda y: y - a, x)


def with_nested_loop_jit(k):
    a = jnp.float32(k + 0.5)
    inner = loop_jit(lambda y: jnp.tanh(y) * a)
    return lambda x: inner(x) + loop_jit(lambda y: y * a)(x)


def with_jit_captured(k):
    a = jnp.float32(k + 0.5)
    inner = jax.jit(lambda y: jnp.tanh(y) * a)
    return lambda x: inner(x) * 2.0


def with_custom_jvp(k):
    a = jnp.float32(k + 0.5)

    @jax.custom_jvp
    def rule(y):
        return jnp.sin(y)

    @rule.defjvp
    def _(primals, tangents):
        (y,), (t,) = primals, tangents
        return rule(y), 3.0 * jnp.cos(y) * t

    return lambda x: rule(x) * a


FUNCTIONS = [
    plain,
    captured,
    with_scan,
    with_scan_captured,
    with_our_scan_captured,
    with_fori_captured,
    with_cond_captured,
    with_nested_loop_jit,
    with_jit_captured,
    with_custom_jvp,
]


def _summed(f):
    return lambda x: f(x).sum()


def _jvp(f):
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))


def _vjp(f):
    def g(x):
        out, back = jax.vjp(f, x)
        return out, back(jnp.cos(out))

    return g


def _vjp_aux(f):
    def g(x):
        out, back, aux = jax.vjp(lambda x: (f(x), x + 1.0), x, has_aux=True)
        return back(out), aux

    return g


def _linearize(f):
    def g(x):
        out, push = jax.linearize(f, x)
        return out, push(x), push(2.0 * x)

    return g


def _linear_transpose(f):
    def g(x):
        _, push = jax.linearize(f, x)
        return jax.linear_transpose(push, x)(x)

    return g


# Whether the function must return a scalar, and the transformation. Each gives a function of x.
TRANSFORMATIONS = {
    "grad": (True, jax.grad),
    "value_and_grad": (True, jax.value_and_grad),
    "grad of grad": (True, lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())),
    "hessian": (True, jax.hessian),
    "jvp": (False, _jvp),
    "jvp of jvp": (False, lambda f: _jvp(_jvp(f))),
    "vjp": (False, _vjp),
    "vjp, has_aux": (False, _vjp_aux),
    "vmap": (False, jax.vmap),
    "vmap of vmap": (False, lambda f: lambda x: jax.vmap(jax.vmap(f))(x.reshape(2, 4))),
    "vmap of grad": (True, lambda f: jax.vmap(jax.grad(f))),
    "grad of vmap": (False, lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())),
    "linearize": (False, _linearize),
    "linear_transpose": (False, _linear_transpose),
    "jacfwd": (False, jax.jacfwd),
    "jacrev": (False, jax.jacrev),
    "checkpoint": (False, jax.checkpoint),
    "grad of checkpoint": (True, lambda f: jax.grad(jax.checkpoint(f))),
    "checkpoint, policy": (
        True,
        lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)),
    ),
    "jit of grad": (True, lambda f: jax.jit(jax.grad(f))),
}


def _of(scalar, make, k):
    f = make(k)
    if not scalar:
        return f
    return lambda x: f(x).sum()


@pytest.mark.parametrize("make", FUNCTIONS)
@pytest.mark.parametrize("name", [n for n in TRANSFORMATIONS if not n.startswith("jit")])
def test_transformation_of_loop_jit(name, make):
    scalar, transform = TRANSFORMATIONS[name]
    x = jnp.asarray(X)
    for k in range(3):
        want = transform(_of(scalar, make, k))(x)
        fresh = _of(scalar, make, k)
        with counting() as n:
            got = jax.block_until_ready(transform(loop_jit(fresh))(x))
        assert_same(got, want)
        assert k == 0 or n.compiles == 0


@pytest.mark.parametrize("make", FUNCTIONS)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_loop_jit_of_transformation(name, make):
    scalar, transform = TRANSFORMATIONS[name]
    x = jnp.asarray(X)
    for k in range(3):
        want = transform(_of(scalar, make, k))(x)
        fresh = _of(scalar, make, k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(transform(fresh))(x))
        assert_same(got, want)
        assert k == 0 or n.compiles == 0


@pytest.mark.parametrize("make", [plain, captured, with_scan_captured])
@pytest.mark.parametrize("name", ["grad", "jvp", "vjp", "vmap", "linearize", "hessian"])
def test_transformation_of_loop_jit_traces_nothing_the_second_time(name, make):
    scalar, transform = TRANSFORMATIONS[name]
    x = jnp.asarray(X)
    for k in range(2):
        fresh = _of(scalar, make, k)
        with counting() as n:
            jax.block_until_ready(loop_jit(transform(fresh))(x))
    assert (n.compiles, n.traces) == (0, 0)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_loop_jit_of_transformation_of_loop_jit(name):
    scalar, transform = TRANSFORMATIONS[name]
    x = jnp.asarray(X)
    for k in range(3):
        want = transform(_of(scalar, captured, k))(x)
        fresh = _of(scalar, captured, k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(transform(loop_jit(fresh)))(x))
        assert_same(got, want)
        assert k == 0 or n.compiles == 0


def test_jit_of_loop_jit_is_right():
    # jax.jit compiles a fresh object each time, whatever is inside.
    x = jnp.asarray(X)
    for k in range(2):
        assert_same(jax.jit(loop_jit(captured(k)))(x), captured(k)(x))


def test_one_function_under_jit_compiles_once():
    f = loop_jit(captured(0))
    g = jax.jit(f)
    x = jnp.asarray(X)
    g(x)
    with counting() as n:
        jax.block_until_ready(g(x))
    assert (n.compiles, n.traces) == (0, 0)


def test_a_value_captured_by_jit_of_loop_jit_is_the_one_at_its_trace():
    # As in JAX: jax.jit looks once. What is called directly is never stale.
    a = jnp.float32(1.0)

    def f(x):
        return x * a

    ours, stock = loop_jit(f), jax.jit(loop_jit(f))
    x = jnp.float32(2.0)
    assert (float(ours(x)), float(stock(x))) == (2.0, 2.0)
    a = jnp.float32(3.0)
    assert (float(ours(x)), float(stock(x))) == (6.0, 2.0)


# ------------------------------------------------------------------------------------------------
# vmap
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, captured, with_scan_captured])
@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), ((0,), 0), ([1], 1)],
    ids=str,
)
def test_vmap_axes(make, in_axes, out_axes):
    x = jnp.arange(12.0, dtype=jnp.float32).reshape(3, 4) / 7
    for k in range(2):
        want = jax.vmap(make(k), in_axes, out_axes)(x)
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(jax.vmap(loop_jit(fresh), in_axes, out_axes)(x))
        assert_same(got, want)
    assert n.compiles == 0


def _pair(k):
    a = jnp.full(3, k + 1.0)
    return lambda p, y, *, s=2.0: {"u": p["w"] * y + a[0] * s, "v": p["b"]}


@pytest.mark.parametrize(
    "in_axes",
    [
        (None, 0),
        (0, None),
        ({"w": 0, "b": None}, 0),
        ({"w": None, "b": 1}, None),
        ({"w": 1, "b": 0}, 1),
    ],
    ids=str,
)
def test_vmap_axes_of_trees(in_axes):
    p = {"w": jnp.arange(9.0).reshape(3, 3), "b": jnp.ones((3, 3))}
    y = jnp.arange(9.0).reshape(3, 3)
    for k in range(2):
        want = jax.vmap(_pair(k), in_axes)(p, y)
        fresh = _pair(k)
        with counting() as n:
            got = jax.block_until_ready(jax.vmap(loop_jit(fresh), in_axes)(p, y))
        assert_same(got, want)
    assert n.compiles == 0


def test_vmap_of_keyword_arguments():
    p = {"w": jnp.arange(3.0), "b": jnp.arange(3.0)}
    y, s = jnp.arange(3.0), jnp.arange(3.0)
    got = jax.vmap(loop_jit(_pair(0)))(p, y, s=s)
    assert_same(got, jax.vmap(_pair(0))(p, y, s=s))


def _spmd_functions():
    return {
        "psum": lambda x: x / lax.psum(x, "i"),
        "pmax": lambda x: x - lax.pmax(x, "i"),
        "all_gather": lambda x: lax.all_gather(x, "i") * x,
        "ppermute": lambda x: lax.ppermute(x, "i", [(j, (j + 1) % 8) for j in range(8)]),
        "axis_index": lambda x: x * lax.axis_index("i"),
        "axis_size": lambda x: x * lax.axis_size("i"),
    }


@pytest.mark.parametrize("name", _spmd_functions())
def test_collectives_under_vmap(name):
    x = jnp.asarray(X)
    want = jax.vmap(_spmd_functions()[name], axis_name="i")(x)
    for _ in range(2):
        fresh = _spmd_functions()[name]
        with counting() as n:
            got = jax.block_until_ready(jax.vmap(loop_jit(fresh), axis_name="i")(x))
        assert_same(got, want)
    assert n.compiles == 0
    for _ in range(2):
        fresh = _spmd_functions()[name]
        with counting() as n:
            got = jax.block_until_ready(loop_jit(jax.vmap(fresh, axis_name="i"))(x))
        assert_same(got, want)
    assert (n.compiles, n.traces) == (0, 0)


def test_one_function_under_axes_of_different_sizes():
    f = loop_jit(lambda x: x * lax.axis_size("i") + lax.psum(1, "i"))
    for size in (2, 5, 2):
        x = jnp.ones(size)
        assert_same(jax.vmap(f, axis_name="i")(x), jnp.ones(size) * (2 * size))


def test_an_unbound_axis_is_the_error_of_jax():
    f = loop_jit(lambda x: lax.psum(x, "i"))
    assert float(jax.vmap(f, axis_name="i")(jnp.ones(3))[0]) == 3.0
    with pytest.raises(NameError, match="unbound axis name"):
        f(jnp.float32(1.0))


# ------------------------------------------------------------------------------------------------
# shard_map and shardings
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["psum", "ppermute", "axis_index", "axis_size"])
def test_loop_jit_of_shard_map(name):
    mesh = _mesh()
    x = jnp.asarray(X)

    def mapped(f):
        return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)

    want = mapped(_spmd_functions()[name])(x)
    for _ in range(2):
        fresh = _spmd_functions()[name]
        with counting() as n:
            got = jax.block_until_ready(loop_jit(mapped(fresh))(x))
        assert_same(got, want)
    assert (n.compiles, n.traces) == (0, 0)


@pytest.mark.parametrize("make", [plain, captured, with_scan_captured, with_our_scan_captured])
def test_shard_map_of_loop_jit(make):
    mesh = _mesh()
    x = jnp.asarray(X)

    def mapped(f):
        return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))

    for k in range(2):
        assert_same(mapped(loop_jit(make(k)))(x), mapped(make(k))(x))
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(mapped(loop_jit(fresh)))(x))
        assert_same(got, mapped(make(k))(x))
    assert n.compiles == 0


def test_eager_shard_map_of_loop_jit_compiles_no_more_than_jax():
    # JAX's eager shard_map compiles its own steps each time, also for one and the same function.
    mesh = _mesh()
    x = jnp.asarray(X)
    stock = jax.shard_map(jax.jit(plain(0)), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    counts = []
    for run in (lambda: stock, lambda: stock):
        with counting() as n:
            jax.block_until_ready(run()(x))
        counts.append(n.compiles)
    for _ in range(2):
        ours = jax.shard_map(loop_jit(plain(0)), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        with counting() as n:
            jax.block_until_ready(ours(x))
    assert n.compiles <= counts[-1]


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("make", [plain, captured, with_scan_captured])
def test_sharded_input_keeps_its_sharding(make, axis_type):
    mesh = _mesh(axis_type)
    sharding = NamedSharding(mesh, P("i"))
    with jax.set_mesh(mesh) if axis_type == "Explicit" else contextlib.nullcontext():
        x = jax.device_put(X, sharding)
        for k in range(2):
            want = jax.jit(make(k))(x)
            fresh = make(k)
            with counting() as n:
                got = jax.block_until_ready(loop_jit(fresh)(x))
            assert got.sharding == want.sharding
            assert_same(got, want)
            assert len(got.sharding.device_set) == 8
        assert (n.compiles, n.traces) == (0, 0)


def test_one_function_for_many_placements():
    f = loop_jit(captured(0))
    want = np.asarray(f(jnp.asarray(X)))
    mesh = _mesh()
    placements = [
        jax.devices()[3],
        NamedSharding(mesh, P("i")),
        NamedSharding(mesh, P()),
        jax.devices()[0],
        NamedSharding(jax.make_mesh((2, 4), ("a", "b")), P("b")),
    ]
    for _ in range(2):
        for placement in placements:
            x = jax.device_put(X, placement)
            got = f(x)
            assert got.sharding.device_set == x.sharding.device_set
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_captured_array_with_a_sharding():
    sharding = NamedSharding(_mesh(), P("i"))

    def make(k):
        a = jax.device_put(X + k, sharding)
        return lambda x: x * a

    x = jax.device_put(X, sharding)
    for k in range(3):
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(fresh)(x))
        np.testing.assert_allclose(got, X * (X + k), rtol=1e-6)
        assert got.sharding == sharding
    assert n.compiles == 0


@pytest.mark.parametrize("many", [False, True], ids=["all alike", "one each"])
def test_in_and_out_shardings(many):
    mesh = _mesh()
    rows, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())

    def make(k):
        a = jnp.full(8, k + 1.0)
        return lambda x, y: (x * a, y.sum() + x)

    options = (
        {"in_shardings": (rows, whole), "out_shardings": (whole, rows)}
        if many
        else {"in_shardings": rows, "out_shardings": rows}
    )
    x, y = jnp.asarray(X), jnp.asarray(X) * 2
    for k in range(3):
        want = jax.jit(make(k), **options)(x, y)
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(fresh, **options)(x, y))
        assert_same(got, want)
        assert [g.sharding for g in got] == [w.sharding for w in want]
    assert n.compiles == 0


@pytest.mark.parametrize("which", ["in_shardings", "out_shardings"])
def test_one_of_the_shardings(which):
    sharding = NamedSharding(_mesh(), P("i"))
    x = jnp.asarray(X)
    for k in range(2):
        got = loop_jit(captured(k), **{which: sharding})(x)
        want = jax.jit(captured(k), **{which: sharding})(x)
        assert_same(got, want)
        assert got.sharding == want.sharding


def test_shardings_of_trees():
    mesh = _mesh()
    rows, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())
    tree = {"a": jnp.asarray(X), "b": (jnp.asarray(X), jnp.float32(1.0))}
    options = {
        "in_shardings": ({"a": rows, "b": (whole, None)},),
        "out_shardings": {"a": whole, "b": rows},
    }

    def make(k):
        c = jnp.float32(k)
        return lambda t: {"a": t["a"] + c, "b": t["b"][0] * t["b"][1]}

    for k in range(2):
        got, want = loop_jit(make(k), **options)(tree), jax.jit(make(k), **options)(tree)
        assert_same(got, want)
        assert jax.tree.map(lambda g: g.sharding, got) == jax.tree.map(lambda w: w.sharding, want)


def test_in_shardings_that_do_not_fit_are_the_error_of_jax():
    sharding = NamedSharding(_mesh(), P("i"))
    x = jnp.ones(3)
    for stage in (jax.jit, loop_jit):
        with pytest.raises(ValueError, match="divisible by 8|partitioned 8 times"):
            stage(plain(0), in_shardings=sharding)(x)
        with pytest.raises(ValueError, match="in_shardings.* specification must be a tree prefix"):
            stage(captured(0), in_shardings=(sharding, sharding))(jnp.asarray(X))


def test_sharding_constraints_and_device_put_inside():
    sharding = NamedSharding(_mesh(), P("i"))

    def make():
        return lambda x: lax.with_sharding_constraint(jnp.sin(x), sharding)

    x = jnp.asarray(X)
    for _ in range(2):
        fresh = make()
        with counting() as n:
            got = jax.block_until_ready(loop_jit(fresh)(x))
        assert got.sharding == jax.jit(make())(x).sharding
    assert (n.compiles, n.traces) == (0, 0)


# ------------------------------------------------------------------------------------------------
# Shapes, jaxprs, export
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FUNCTIONS)
def test_eval_shape_and_make_jaxpr(make):
    x = jnp.asarray(X)
    f, g = loop_jit(make(0)), make(0)
    assert jax.eval_shape(f, x) == jax.eval_shape(g, x)
    assert f.eval_shape(x) == jax.eval_shape(g, x)
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((8,), jnp.float32)).shape == (8,)
    closed = jax.make_jaxpr(f)(x)
    assert_same(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)[0], g(x))
    assert_same(loop_jit(lambda x: jnp.zeros(jax.eval_shape(f, x).shape))(x), jnp.zeros(8))


@pytest.mark.parametrize("make", [plain, captured, with_scan_captured, with_nested_loop_jit])
def test_export(make):
    x = jnp.asarray(X)
    want = make(0)(x)
    exported = jax.export.export(jax.jit(loop_jit(make(0))))(x)
    assert_same(exported.call(x), want)
    assert len(exported.in_avals) == 1  # captured arrays are baked
    pytest.importorskip("flatbuffers")
    again = jax.export.deserialize(exported.serialize())
    assert_same(loop_jit(lambda x: again.call(x) * 1.0)(x), want)


@pytest.mark.parametrize("make", [plain, captured, with_scan_captured])
def test_export_of_loop_jit_itself(make):
    x = jnp.asarray(X)
    f = loop_jit(make(0))
    f(x)
    exported = jax.export.export(f)(x)
    assert_same(exported.call(x), make(0)(x))
    assert len(exported.in_avals) == 1


# ------------------------------------------------------------------------------------------------
# Inside of loops, and closures over tracers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["eager", "grad", "vmap", "jit"])
@pytest.mark.parametrize("make", [plain, captured, with_scan_captured, with_custom_jvp])
def test_in_the_body_of_a_scan(make, transform):
    x = jnp.asarray(X)
    wrap = {
        "eager": lambda f: f,
        "grad": lambda f: jax.grad(lambda x: f(x).sum()),
        "vmap": jax.vmap,
        "jit": jax.jit,
    }[transform]

    def run(f):
        return wrap(
            lambda x: lax.scan(lambda c, t: (f(c) * t, c.sum()), x, jnp.arange(1.0, 4.0))[0]
        )

    for k in range(2):
        want = run(make(k))(x)
        assert_same(run(loop_jit(make(k)))(x), want)
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(run(loop_jit(fresh)))(x))
        assert_same(got, want)
    assert n.compiles == 0


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jit, jax.hessian, jax.jacfwd])
def test_closures_over_tracers(transform):
    x = jnp.float32(0.7) if transform is not jax.vmap else jnp.asarray(X)

    def run(stage):
        @transform
        def outer(a):
            f = stage(lambda y: jnp.sin(y * a) + a)
            g = stage(lambda y: lax.fori_loop(0, 2, lambda i, c: c * a + i, y))
            return f(a) + g(a + 1.0) + f(2.0 * a) + stage(lambda: a * a)()

        return outer(x)

    want = run(lambda f: f)
    for _ in range(2):
        assert_same(run(loop_jit), want)


def test_closures_over_tracers_in_containers():
    def outer(stage):
        def f(a, b):
            params = {"a": a, "l": [b, (a, 2.0)]}
            return stage(lambda x: x * params["a"] + params["l"][0] * params["l"][1][0])(a)

        return f

    args = jnp.float32(0.5), jnp.float32(1.5)
    for _ in range(2):
        got = jax.grad(outer(loop_jit), argnums=(0, 1))(*args)
        assert_same(got, jax.grad(outer(lambda f: f), argnums=(0, 1))(*args))


def test_tracers_of_several_transformations_at_once():
    def run(stage):
        def f(a, x):
            return jax.vmap(lambda y: jax.grad(lambda z: stage(lambda w: w**2 * a * y * z)(z))(y))(
                x
            )

        return jax.jacfwd(f)(jnp.float32(2.0), jnp.asarray(X))

    for _ in range(2):
        assert_same(run(loop_jit), run(lambda f: f))


def test_nothing_of_a_trace_is_kept():
    f = None

    def outer(a):
        nonlocal f
        f = loop_jit(lambda x: x * a)
        return f(a)

    assert float(jax.grad(outer)(jnp.float32(3.0))) == 6.0
    assert float(jax.jit(outer)(jnp.float32(3.0))) == 9.0
    with pytest.raises(jax.errors.UnexpectedTracerError):
        f(jnp.float32(1.0))
    # Nobody may keep the function: JAX 0.12 itself holds on to a tracer that a living one captures.
    with jax.checking_leaks():
        got = jax.grad(lambda a: loop_jit(lambda x: x * a)(a))(jnp.float32(3.0))
    assert float(got) == 6.0


def test_nested_loop_jit_compiles_nothing_when_fresh():
    def make(k):
        a, b = jnp.float32(k + 1.0), jnp.float32(k + 2.0)
        third = loop_jit(lambda x: x + b)
        second = loop_jit(lambda x: third(x) * a)
        return loop_jit(lambda x: second(x) + third(x) + loop_jit(jnp.sin)(x))

    x = jnp.float32(0.3)
    for k in range(3):
        f = make(k)
        with counting() as n:
            got = float(f(x))
        a, b = k + 1.0, k + 2.0
        assert got == pytest.approx((0.3 + b) * a + 0.3 + b + np.sin(0.3), rel=1e-6)
    assert (n.compiles, n.traces) == (0, 0)


def test_grad_arguments():
    def make(k):
        a = jnp.float32(k + 1.0)
        return lambda x, y, *, z: (a * x * y**2 * z, {"aux": x})

    args = jnp.float32(2.0), jnp.float32(3.0)
    for k in range(2):
        for argnums in (0, 1, (0, 1)):
            transform = functools.partial(jax.value_and_grad, argnums=argnums, has_aux=True)
            want = transform(make(k))(*args, z=4.0)
            fresh = make(k)
            with counting() as n:
                got = jax.block_until_ready(transform(loop_jit(fresh))(*args, z=4.0))
            assert_same(got, want)
            assert k == 0 or n.compiles == 0
            assert_same(loop_jit(transform(make(k)))(*args, z=4.0), want)


@pytest.mark.parametrize("kind", [int, float, np.int32, bool])
@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: lambda x, n: jax.vmap(f, (0, None))(x, n)]
)
def test_new_values_of_python_numbers_compile_nothing(transform, kind):
    f = loop_jit(lambda x, step: jnp.sum(x * x) * step)
    x = jnp.asarray(X)
    transform(f)(x, kind(0))
    for step in range(1, 4):
        with counting() as n:
            got = jax.block_until_ready(transform(f)(x, kind(step)))
        assert n.compiles == 0
        assert_same(got, transform(lambda x, step: jnp.sum(x * x) * step)(x, kind(step)))


def test_grad_of_integers_is_the_error_of_jax():
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jax.grad(loop_jit(lambda x: x * x))(3)
    assert jax.grad(loop_jit(lambda x: x * 2.0), allow_int=True)(3).dtype == jax.dtypes.float0


def test_complex_and_holomorphic():
    def make():
        return lambda z: jnp.sin(z) * z

    z = jnp.complex64(0.3 + 0.4j)
    for _ in range(2):
        got = jax.grad(loop_jit(make()), holomorphic=True)(z)
        assert_same(got, jax.grad(make(), holomorphic=True)(z))


def test_custom_vjp_with_captures():
    def make(k):
        scale = float(k + 2)

        @jax.custom_vjp
        def f(x):
            return x * 1.0

        f.defvjp(lambda x: (x, x), lambda res, g: (g * scale * res,))
        return lambda x: f(x).sum()

    x = jnp.asarray(X)
    for k in (0, 1, 0, 1):
        assert_same(jax.grad(loop_jit(make(k)))(x), (k + 2) * x)
        assert_same(loop_jit(jax.grad(make(k)))(x), (k + 2) * x)


# ------------------------------------------------------------------------------------------------
# Effects
# ------------------------------------------------------------------------------------------------


def test_ordered_callbacks_run_each_time_and_in_order():
    seen = []

    def make(n):
        def note(x):
            seen.append((n, int(x)))

        def f(x):
            jax.experimental.io_callback(note, None, x, ordered=True)
            jax.experimental.io_callback(note, None, x + 1, ordered=True)
            return x

        return f

    for n in range(3):
        loop_jit(make(n))(jnp.int32(10))
        jax.effects_barrier()
    assert seen == [(n, x) for n in range(3) for x in (10, 11)]
    f = loop_jit(make(9))
    f(jnp.int32(1)), f(jnp.int32(2))
    jax.effects_barrier()
    assert seen[6:] == [(9, 1), (9, 2), (9, 2), (9, 3)]


@pytest.mark.parametrize("ordered", [False, True])
def test_debug_callback(ordered):
    seen = []

    def make(n):
        note = lambda x: seen.append((n, float(x)))
        return lambda x: (jax.debug.callback(note, x, ordered=ordered), x * 2)[1]

    x = jnp.float32(3.0)
    for n in range(2):
        assert float(loop_jit(make(n))(x)) == 6.0
        jax.effects_barrier()
    assert seen == [(0, 3.0), (1, 3.0)]
    del seen[:]
    f = loop_jit(make(7))
    jax.grad(f)(x), jax.vmap(f)(jnp.ones(2)), loop_jit(jax.grad(make(8)))(x)
    jax.effects_barrier()
    assert seen == [(7, 3.0), (7, 1.0), (7, 1.0), (8, 3.0)]


def test_debug_print(capfd):
    def make():
        def f(x):
            jax.debug.print("x is {}", x)
            return x

        return f

    for i in range(3):
        loop_jit(make())(i)
        jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:3] == ["x is 0", "x is 1", "x is 2"]


def test_pure_callback():
    def make(n):
        return lambda x: jax.pure_callback(
            lambda v: np.float32(v + n), jax.ShapeDtypeStruct((), "f4"), x
        )

    x = jnp.float32(1.0)
    assert [float(loop_jit(make(n))(x)) for n in (1, 2, 1)] == [2.0, 3.0, 2.0]


# ------------------------------------------------------------------------------------------------
# Donation, keys, weak types, trees, refs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, captured, with_scan_captured])
def test_donation(make):
    for k in range(2):
        x, y = jnp.asarray(X), jnp.asarray(X)
        want = make(k)(y)
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(fresh, donate_argnums=0)(x))
        assert x.is_deleted() and not y.is_deleted()
        assert_same(got, want)
    assert (n.compiles, n.traces) == (0, 0)


def test_captured_arrays_are_never_donated():
    a, b = jnp.ones(8), jnp.ones(8)

    def f(x, y):
        return x + a, y * b

    for _ in range(2):
        x, y = jnp.zeros(8), jnp.ones(8)
        loop_jit(f, donate_argnums=(0, 1))(x, y)
        assert x.is_deleted() and y.is_deleted()
        assert not a.is_deleted() and not b.is_deleted()


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
@pytest.mark.parametrize("where", ["argument", "captured"])
def test_random_keys(typed, where):
    new = jax.random.key if typed else jax.random.PRNGKey

    def make(key):
        if where == "captured":
            return lambda k: (jax.random.normal(key, (3,)), jax.random.split(key, 2))
        return lambda k: (jax.random.normal(k, (3,)), jax.random.split(k, 2))

    for seed in range(3):
        key = new(seed)
        want = make(key)(key)
        fresh = make(key)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(fresh)(key))
        assert_same(got, want)
    assert (n.compiles, n.traces) == (0, 0)


def test_typed_keys_of_two_implementations():
    def make():
        return lambda k: jax.random.bits(k, (2,))

    for _ in range(2):
        for impl in ("threefry2x32", "rbg"):
            key = jax.random.key(3, impl=impl)
            assert_same(loop_jit(make())(key), make()(key))


@pytest.mark.parametrize(
    "value", [1, 1.0, True, 1j, np.float32(1), np.int8(1), np.bool_(True), np.ones(2)], ids=repr
)
def test_weak_types_of_results(value):
    def make():
        return lambda x: (x, x + 1, x * 2.5, 3, 2.5, jnp.float32(1), [True])

    want = jax.jit(make())(value)
    for _ in range(2):
        assert_same(loop_jit(make())(value), want)


def test_weak_and_strong_arguments_one_after_another():
    f, g = loop_jit(lambda x: x + 1), jax.jit(lambda x: x + 1)
    arguments = [
        1,
        jnp.int32(1),
        1.0,
        jnp.float32(1),
        True,
        np.int32(1),
        np.float64(1),
        jnp.ones(2),
    ]
    for _ in range(2):
        for x in arguments:
            assert_same(f(x), g(x))


@pytest.mark.parametrize(
    "result",
    [None, (), [], {}, {"a": None}, (None, [None, ()]), [{}, {"b": ()}]],
    ids=str,
)
def test_results_without_leaves(result):
    f = loop_jit(lambda x: result)
    for _ in range(2):
        out = f(jnp.float32(1.0))
        assert out == result and type(out) is type(result)
    assert jax.tree.structure(loop_jit(lambda: result)()) == jax.tree.structure(result)


def test_arguments_without_leaves():
    f = loop_jit(lambda a, b, c, d=None: (a, b, c, d, 1.0))
    for _ in range(2):
        assert f(None, (), {}, d=[]) == (None, (), {}, [], 1.0)
        assert f(None, (), {"x": None}) == (None, (), {"x": None}, None, 1.0)
        assert f((), None, {}) == ((), None, {}, None, 1.0)


def test_fresh_functions_with_other_trees():
    for out in (lambda x: (x, x), lambda x: [x, x], lambda x: {"a": x, "b": x}):
        for _ in range(2):
            got = loop_jit(lambda x: out(x))(jnp.float32(1.0))
            assert jax.tree.structure(got) == jax.tree.structure(out(0))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no refs")
def test_refs_inside():
    def make(k):
        a = jnp.float32(k + 1.0)

        def f(x):
            ref = jax.new_ref(x)
            for _ in range(3):
                ref[...] = ref[...] * a
            return ref[...]

        return f

    x = jnp.asarray(X)
    for k in range(3):
        want = make(k)(x)
        fresh = make(k)
        with counting() as n:
            got = jax.block_until_ready(loop_jit(fresh)(x))
        assert_same(got, want)
    assert (n.compiles, n.traces) == (0, 0)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no refs")
def test_refs_as_arguments_and_captured():
    ref = jax.new_ref(jnp.float32(0.0))

    def add(r, x):
        r[...] += x
        return r[...]

    f = loop_jit(add)
    assert [float(f(ref, jnp.float32(x))) for x in (1.0, 2.0, 3.0)] == [1.0, 3.0, 6.0]
    assert float(loop_jit(lambda r, x: add(r, x))(ref, jnp.float32(1.0))) == 7.0
    for i in range(3):
        out = loop_jit(lambda x: add(ref, x))(jnp.float32(1.0))
        assert float(out) == 8.0 + i
    assert float(ref[...]) == 10.0


def test_config_contexts_are_told_apart():
    f = loop_jit(lambda x: x + 1)
    x = np.arange(3)
    assert f(x).dtype == jnp.int32
    with jax.enable_x64(True):
        assert f(x).dtype == jnp.int64
    assert f(x).dtype == jnp.int32
    with jax.disable_jit():
        seen = []
        loop_jit(lambda x: seen.append(type(x)) or x)(jnp.ones(2))
        assert not issubclass(seen[0], jax.core.Tracer)
