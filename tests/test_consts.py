"""Arrays that jitted functions captured, at any depth, become inputs, and nothing else changes.

The numbers are small integers, so that every way of computing with them is exact.
"""

import gc
import weakref

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from loopjit import compat
from loopjit.programs import consts as lifting
from loopjit.programs.canonical import Canonicalizer, Uninternable
from loopjit.programs.consts import lift
from loopjit.programs.program import same_program, trace as trace_program

check_jaxpr = getattr(jax.extend.core, "check_jaxpr", None) or compat.find_private(
    "jax._src.core.check_jaxpr"
)
closed_call_p = jax.extend.core.primitives.closed_call_p

X = jnp.array([1.0, 2.0, 3.0])


def lift_consts(jaxpr, consts, transformable=True):
    return lift(jaxpr, consts, transformable)[:2]


def leaf(seed=0, minus=False):
    """A jitted function that has captured two arrays."""
    c, d = jnp.array([1.0, 2.0, 3.0]) + seed, np.array([4.0, 5.0, 6.0], np.float32) - seed

    @jax.jit
    def captures(x):
        return x * c - d if minus else x * c + d

    return captures


def small(x):
    return lax.rem(x, jnp.float32(16))


# -- each of these puts a function of one array into a primitive --------------------------------------


def in_jit(f):
    return jax.jit(lambda x: f(x) + 1)


def in_checkpoint(f):
    return jax.checkpoint(lambda x: f(x) + 1)


def in_closed_call(f):
    def call(x):
        inner = jax.make_jaxpr(f)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        # What it is bound with differs between versions.
        params = closed_call_p.get_bind_params({"call_jaxpr": inner})
        return closed_call_p.bind(x, **params)[0]

    return call


def in_scan(f):
    def run(x):
        y = x + 1  # an operand that the body captures, behind which nothing may move
        step = lambda s, z: (small(f(s) + y * z), s - z)
        carry, out = lax.scan(step, x, jnp.array([1.0, 2.0]), reverse=True)
        return carry + out[0] - out[1]

    return run


def in_while_body(f):
    def run(x):
        y, z = x + 1, jnp.sum(x) * 0 + 2
        cond = lambda s: s[0] < z
        return lax.while_loop(cond, lambda s: (s[0] + 1, small(f(s[1]) + y)), (0.0, x))[1]

    return run


def in_while_cond(f):
    def run(x):
        y = x + 1
        cond = lambda s: (s[0] < 3) & (jnp.sum(small(f(s[1]))) + s[0] > 1)
        return lax.while_loop(cond, lambda s: (s[0] + 1, small(s[1] + y)), (0, x))[1]

    return run


def in_both_parts(f):
    return lambda x: (
        in_while_cond(f)(x)
        + lax.while_loop(
            lambda s: (jnp.sum(f(s)) > 1) & (s[0] < 100), lambda s: f(s) * 0 + 100 + x, x
        )
    )


def in_fori(f):
    return lambda x: lax.fori_loop(0, 2, lambda i, s: small(f(s) + i), x)


def in_cond(f):
    # The other branch captures another array, in another place.
    other = leaf(7)
    return lambda x: lax.cond(x[0] > 2, lambda y: other(y), lambda y: f(small(y)) + x, x + 1)


def in_one_branch(f):
    return lambda x: lax.cond(x[0] > 2, lambda y: y + x, lambda y: f(y), x + 1)


def in_switch(f):
    def run(x):
        branches = [lambda y: f(y), lambda y: y, lambda y: small(f(y)) + x, lambda y: f(f(y))]
        return sum(lax.switch(i, branches, x) for i in range(jnp.size(x) + 1))

    return run


def in_solve(f):
    def run(x):
        y = jnp.ones_like(x) + x - x
        matvec = lambda v: v * f(y) + v * y
        solve = lambda mv, b: f(b) - y
        return lax.custom_linear_solve(matvec, x, solve, lambda vm, b: f(f(b)) + y)

    return run


def in_symmetric_solve(f):
    def run(x):
        matvec = lambda v: v * f(x + 1)
        return lax.custom_linear_solve(matvec, x, lambda mv, b: mv(b) + f(b), symmetric=True)

    return run


def in_custom_jvp(f):
    function = jax.custom_jvp(lambda x: f(x) + 1)
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] * 5))
    return lambda x: function(x)


def in_custom_vjp(f):
    function = jax.custom_vjp(lambda x: f(x) + 1)
    function.defvjp(lambda x: (f(x) + 1, None), lambda _, t: (t * 5,))
    return lambda x: function(x)


def in_custom_vmap(f):
    function = jax.custom_batching.custom_vmap(lambda x: f(x) + 1)
    function.def_vmap(lambda size, batched, x: (jax.vmap(f)(x) + 1, batched[0]))
    return lambda x: function(x)


TRANSFORMABLE = (
    in_jit,
    in_checkpoint,
    in_closed_call,
    in_scan,
    in_while_body,
    in_while_cond,
    in_both_parts,
    in_fori,
    in_cond,
    in_one_branch,
    in_switch,
    in_solve,
    in_symmetric_solve,
)
RULES = (in_custom_jvp, in_custom_vjp, in_custom_vmap)
INNER = (in_jit, in_scan, in_while_body, in_while_cond, in_cond, in_solve, in_custom_jvp)
TRIPLES = (
    (in_while_body, in_cond, in_scan),
    (in_scan, in_custom_vjp, in_while_cond),
    (in_cond, in_checkpoint, in_solve),
    (in_custom_vmap, in_scan, in_custom_jvp),
    (in_solve, in_fori, in_switch),
    (in_custom_jvp, in_custom_vjp, in_one_branch),
    (in_jit, in_while_cond, in_jit),
)
NESTINGS = (
    *[(outer,) for outer in TRANSFORMABLE + RULES],
    *[(outer, inner) for outer in TRANSFORMABLE + RULES for inner in INNER],
    *TRIPLES,
)


def name(nesting):
    return "-".join([part.__name__[3:] for part in nesting])


def build(nesting, f):
    for part in reversed(nesting):
        f = part(f)
    return lambda x: small(f(small(x)))


# -- what is asked of a program -----------------------------------------------------------------------


def trace(function, *args):
    return compat.open_jaxpr(jax.make_jaxpr(function)(*(args or (X,))))


def lifted(function, *args, transformable=False):
    """The rewritten program. JAX checks the types of all of it, and its effects."""
    jaxpr, consts = lift_consts(*trace(function, *args), transformable)
    check_jaxpr(jaxpr)
    check_jits(jaxpr)
    assert len(jaxpr.invars) == len(consts) + len(args or (X,))
    return jaxpr, consts


def check_jits(jaxpr):
    """JAX does not compare these with the number of inputs."""
    for equation in jaxpr.eqns:
        for per_input in ("in_shardings", "in_layouts", "donated_invars"):
            assert len(equation.params.get(per_input, equation.invars)) == len(equation.invars)
        for inner in compat.inner_jaxprs(equation.params):
            check_jits(inner)


def inner_consts(jaxpr):
    """All consts of nested jaxprs."""
    found = []

    def look(value):
        if isinstance(value, compat.ClosedJaxpr):
            found.extend(value.consts)
        if isinstance(value, (tuple, list)):
            for item in value:
                look(item)
        for inner in compat.inner_jaxprs(value):
            found.extend(inner_consts(inner))

    for equation in jaxpr.eqns:
        for value in equation.params.values():
            look(value)
    return found


def run_as_it_is(jaxpr, consts, *args):
    """Compiles the jaxpr itself, as JAX does with what is traced (evaluating it traces it anew)."""
    count = len(jaxpr.outvars)
    same_inputs = jax.jit(lambda *inputs: [inputs[-1]] * count)
    [equation] = jax.make_jaxpr(same_inputs)(*consts, *args).eqns
    params = {**equation.params, "jaxpr": compat.close_jaxpr(jaxpr)}
    if "out_shardings" in params:
        params["out_shardings"] = params["out_shardings"][:1] * count
        params["out_layouts"] = params["out_layouts"][:1] * count
    return equation.primitive.bind(*consts, *args, **params)


def same_bits(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    assert [a.dtype for a in left] == [a.dtype for a in right]
    return [np.asarray(a).tobytes() for a in left] == [np.asarray(a).tobytes() for a in right]


def as_function(jaxpr):
    return jax.jit(compat.jaxpr_as_fun(jaxpr))


# -- each primitive, and nestings ---------------------------------------------------------------------


@pytest.mark.parametrize("nesting", NESTINGS, ids=name)
def test_lifts_all(nesting):
    function = build(nesting, leaf())
    assert inner_consts(trace(function)[0])
    jaxpr, consts = lifted(function)
    assert not inner_consts(jaxpr)
    keys = Canonicalizer("exec")
    key = keys.key(jaxpr)
    for other, equal in ((leaf(3), True), (leaf(minus=True), False)):
        again, again_consts = lifted(build(nesting, other))
        assert (keys.key(again) == key) is equal
        assert len(again_consts) == len(consts)


@pytest.mark.parametrize("nesting", NESTINGS[:: len(INNER) // 2] + TRIPLES, ids=name)
def test_computes_the_same(nesting):
    function = build(nesting, leaf())
    jaxpr, consts = lifted(function)
    expected = jax.jit(function)(X)
    assert same_bits(expected, as_function(jaxpr)(*consts, X))
    assert same_bits(expected, run_as_it_is(jaxpr, consts, X))
    # The captured arrays are read from where they are put now.
    other = build(nesting, leaf(3))
    expected = jax.jit(other)(X + 1)
    assert same_bits(expected, run_as_it_is(jaxpr, lifted(other)[1], X + 1))


@pytest.mark.parametrize("part", TRANSFORMABLE + RULES, ids=lambda part: part.__name__[3:])
def test_each_primitive_computes_the_same(part):
    function = build((part,), leaf())
    jaxpr, consts = lifted(function)
    for x in (X, X + 1, X * 5):
        expected = function(x)
        assert same_bits(expected, as_function(jaxpr)(*consts, x))
        assert same_bits(expected, run_as_it_is(jaxpr, consts, x))


# -- transformations ----------------------------------------------------------------------------------


def smooth(part):
    return {
        "scan": lambda f: lambda x: lax.scan(lambda s, z: (f(s) * z, s * s), x, jnp.arange(1.0, 3)),
        "cond": lambda f: lambda x: lax.cond(x[0] > 1, lambda y: f(y) * y, lambda y: y, x),
        "jit": in_jit,
        "checkpoint": in_checkpoint,
        "closed_call": in_closed_call,
        "fori": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, s: f(s) + i, x),
        "solve": lambda f: (
            lambda x: lax.custom_linear_solve(
                lambda v: v * f(x), f(x) * x, lambda mv, b: b / f(x), lambda vm, b: b / f(x)
            )
        ),
        "while": lambda f: (
            lambda x: lax.while_loop(lambda s: jnp.sum(f(s)) < 100, lambda s: f(s) + x, x)
        ),
    }[part]


@pytest.mark.parametrize(
    "part", ["scan", "cond", "jit", "checkpoint", "closed_call", "fori", "solve"]
)
def test_gradients_are_the_same(part):
    function = smooth(part)(leaf())
    jaxpr, consts = lifted(function, transformable=True)
    assert not inner_consts(jaxpr)
    total = lambda out: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(out))
    run = compat.jaxpr_as_fun(jaxpr)
    for x in (X, X - 4):
        expected = jax.jit(jax.value_and_grad(lambda x: total(function(x))))(x)
        got = jax.jit(jax.value_and_grad(lambda x: total(run(*consts, x))))(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, got)


@pytest.mark.parametrize("part", ["scan", "cond", "fori", "solve", "while"])
def test_forward_mode_and_vmap_are_the_same(part):
    function = smooth(part)(leaf())
    jaxpr, consts = lifted(function, transformable=True)
    run = lambda x: compat.jaxpr_as_fun(jaxpr)(*consts, x)
    for transform in (
        lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
        lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
    ):
        expected, got = jax.jit(transform(function))(X), jax.jit(transform(run))(X)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("part", RULES, ids=lambda part: part.__name__[3:])
def test_rules_are_left_alone_if_they_may_be_asked(part):
    function = part(leaf())
    jaxpr, consts = trace(function)
    new, new_consts = lift_consts(jaxpr, consts)
    assert new is jaxpr and new_consts == consts
    # Also behind others, from which the rest is lifted.
    ruled, plain = part(leaf()), leaf(3)
    both = in_scan(lambda x: ruled(x) + plain(x))
    jaxpr, consts = lifted(both, transformable=True)
    assert len(inner_consts(jaxpr)) == 2 and len(consts) >= 2
    if part is not in_custom_vmap:
        run = compat.jaxpr_as_fun(jaxpr)
        grads = [jax.grad(lambda x: jnp.sum(f(x)))(X) for f in (both, lambda x: run(*consts, x)[0])]
        assert same_bits(*grads)


# -- what is one, and what stays ----------------------------------------------------------------------


def test_one_array_is_one_input():
    c = jnp.arange(3.0)
    f, g = jax.jit(lambda x: x * c), jax.jit(lambda x: x + c)

    def function(x):
        y = lax.fori_loop(0, 2, lambda i, s: lax.cond(s[0] > i, f, g, s), x + c)
        return f(y) + lax.scan(lambda s, _: (g(f(s)), None), y, None, length=2)[0] + f(g(x))

    jaxpr, consts = lifted(function)
    assert len(consts) == 1 and consts[0] is c
    assert same_bits(jax.jit(function)(X), run_as_it_is(jaxpr, consts, X))


def test_arrays_of_two_types_are_two_inputs():
    c = np.ones(3)  # float64: JAX takes it for float32, and for what a function makes of it
    f = jax.jit(lambda x: x + jnp.asarray(c, jnp.float32))
    g = jax.jit(lambda x: x + c)
    jaxpr, consts = lifted(lambda x: in_scan(f)(x) + in_cond(g)(x))
    assert not inner_consts(jaxpr)
    assert all(v.aval.dtype == jnp.float32 for v in jaxpr.invars)


def test_sharing_is_kept():
    f = leaf()

    def function(x):
        branches = [lambda y: f(y), lambda y: f(y) * 2, lambda y: y]
        y = lax.fori_loop(0, 2, lambda i, s: f(s), f(x))
        return lax.switch(jnp.int32(y[0]), branches, y) + lax.switch(1, branches, f(y))

    def of_f(jaxpr):
        for equation in jaxpr.eqns:
            if equation.params.get("name") == "captures":
                yield equation.params["jaxpr"]
            for inner in compat.inner_jaxprs(equation.params):
                yield from of_f(inner)

    before, (after, _) = trace(function)[0], lifted(function)
    assert len({id(j) for j in of_f(before)}) == 1 == len({id(j) for j in of_f(after)})
    assert len(list(of_f(before))) == len(list(of_f(after))) > 4


def test_equal_branches_become_one_object():
    f, g = leaf(), leaf(1)

    def function(x):
        return sum([lax.switch(jnp.int32(x[i]), [f, g, in_jit(f)], x) for i in range(2)])

    jaxpr, consts = trace(function)
    # JAX traces a branch once. Here both equations get its very jaxprs.
    one, two = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    twins = {**two.params, "branches": one.params["branches"]}
    equations = [e.replace(params=twins) if e is two else e for e in jaxpr.eqns]
    jaxpr, consts = lift_consts(jaxpr.replace(eqns=equations), consts)
    first, second = [e.params["branches"] for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert len(consts) == 4 and len({id(b) for b in first}) == 3
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_equations_keep_where_they_stand():
    function = build((in_scan, in_cond), leaf())
    jaxpr, consts = trace(function)
    new, _ = lift_consts(jaxpr, consts)
    assert any(a is not b for a, b in zip(jaxpr.eqns, new.eqns))
    for a, b in zip(jaxpr.eqns, new.eqns, strict=True):
        assert a.ctx is b.ctx and a.source_info is b.source_info
        assert a.outvars is b.outvars and a.effects is b.effects
    assert new.outvars == jaxpr.outvars and new.invars[-1] is jaxpr.invars[-1]


def test_keys_and_scalars():
    key, count = jax.random.key(3), np.float32(2)

    @jax.jit
    def noisy(x):
        return x + jnp.floor(jax.random.uniform(key, x.shape) * 8) + np.asarray(count)

    function = build((in_fori, in_cond), noisy)
    jaxpr, consts = lifted(function)
    assert not inner_consts(jaxpr) and any(c is key for c in consts)
    assert same_bits(jax.jit(function)(X), run_as_it_is(jaxpr, consts, X))


def test_tracers_stand_in_another_order_than_arrays():
    def make(c, d, more=0):
        captures = jax.jit(lambda x: x * c)
        return in_scan(lambda x: (x + d) * d + captures(x) + more)

    c, d = X + 1, X + 2
    # As with `loop_jit`, which traces once with tracers in the place of arrays, and once with these.
    tracers = trace_program(lambda hidden, x: make(*hidden)(x), ([c, d], X))
    arrays = trace_program(lambda hidden, x: make(c, d)(x), ([], X))
    other = trace_program(lambda hidden, x: make(c, d, 1)(x), ([], X))
    assert arrays.deep and not tracers.deep
    assert Canonicalizer("exec").key(arrays.jaxpr)
    assert same_program(tracers, [c, d], arrays)
    assert not same_program(tracers, [c, d], other)


def test_references():
    f = leaf()

    def function(ref, x):
        own = jax.new_ref(x)

        @jax.jit
        def update(x):
            own[...] = f(own[...]) + x
            ref[0] = jnp.sum(f(x))
            return f(own[...])

        def step(i, s):
            own[1] = s[0]
            return lax.cond(s[0] > i, update, lambda s: s + ref[...], s)

        y = lax.fori_loop(0, 2, step, x)
        return lax.scan(lambda s, z: (small(update(s) * z), None), y, own[...])[0] + own[...]

    results = []
    for transform in (None, lift_consts):
        ref = jax.new_ref(X)
        jaxpr, consts = trace(function, ref, X)
        if transform is not None:
            jaxpr, consts = transform(jaxpr, consts)
            assert not inner_consts(jaxpr)
        check_jaxpr(jaxpr)
        Canonicalizer("exec").key(jaxpr) if transform is not None else None
        results.append([as_function(jaxpr)(*consts, ref, X), ref[...]])
    assert same_bits(*results)


def reduced(f):
    return lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: f(a + b)[0], (0,))


def sharded(f):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


@pytest.mark.parametrize("part", [reduced, sharded])
def test_what_has_no_place_for_operands_is_left_alone(part):
    jaxpr, consts = trace(part(leaf()))
    assert inner_consts(jaxpr)
    new, new_consts = lift_consts(jaxpr, consts, False)
    assert new is jaxpr and len(new_consts) == len(consts)
    with pytest.raises(Uninternable):
        Canonicalizer("exec").key(new)


def test_an_unknown_equation_is_left_alone(monkeypatch):
    function = build((in_while_body, in_scan), leaf())
    jaxpr, consts = trace(function)
    row = lifting._ROWS["scan"]
    for broken in ({}, {"jaxpr": None}):
        monkeypatch.setitem(
            lifting._ROWS, "scan", row._replace(find=lambda p: row.find({**broken}))
        )
        monkeypatch.setattr(
            lifting, "_nothing", {True: weakref.WeakSet(), False: weakref.WeakSet()}
        )
        new, new_consts = lift_consts(jaxpr, consts)
        assert inner_consts(new) and len(new_consts) == len(consts)


@pytest.mark.skipif(compat.FTTuple is None, reason="scan counts its consts")
def test_without_the_classes_of_scan_it_is_left_alone(monkeypatch):
    jaxpr, consts = trace(build((in_jit, in_scan), leaf()))
    monkeypatch.setattr(compat, "FTTuple", None)
    new, _ = lift_consts(jaxpr, consts)
    check_jaxpr(new)
    assert inner_consts(new)


def test_numbered_effects_are_left_alone():
    class Effect:
        input = 0

    assert compat.count_inputs({Effect()}) and not compat.count_inputs(set())
    Effect.input = compat.new_var(compat.ShapedArray((), jnp.float32))
    assert not compat.count_inputs({Effect()})


# -- nothing to lift ----------------------------------------------------------------------------------


def test_without_consts_nothing_is_made():
    f = jax.jit(lambda x: x + 1)
    for f in (in_fori(in_cond_without(f)), in_while_body(in_jit(f)), in_custom_jvp(in_scan(f))):
        jaxpr, consts = trace(f)
        new, new_consts = lift_consts(jaxpr, consts, False)
        assert new is jaxpr and len(new_consts) == len(consts)


def test_nothing_is_looked_for_twice(monkeypatch):
    jaxpr, consts = trace(in_fori(in_cond_without(jax.jit(lambda x: x + 1))))
    lift_consts(jaxpr, consts)
    looked = []
    inner = lifting._Lift.open
    monkeypatch.setattr(
        lifting._Lift, "open", lambda self, *args: looked.append(args) or inner(self, *args)
    )
    lift_consts(jaxpr, consts)
    assert len(looked) == 1


def in_cond_without(f):
    return lambda x: lax.cond(x[0] > 2, f, lambda y: y, x)


def test_nothing_is_kept_alive():
    def refs():
        c = jnp.arange(3.0)
        f = jax.jit(lambda x: x * c)
        jaxpr, consts = trace(lambda x: in_fori(f)(x) + in_fori(in_jit(lambda x: x))(x))
        new, new_consts = lift_consts(jaxpr, consts)
        return [weakref.ref(c), weakref.ref(jaxpr), weakref.ref(new)]

    before = {flag: len(known) for flag, known in lifting._nothing.items()}
    found = refs()
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in found] == [None] * 3
    assert all(len(known) <= before[flag] for flag, known in lifting._nothing.items())
