"""When two jaxprs have one key: each rule must miss where it applies, and hit where it does not.

Every comparison is between two fresh traces of fresh functions.
"""

import enum
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from loopjit import compat
from loopjit.programs.canonical import Canonicalizer, Uninternable

MODES = ("full", "exec")


def ones():
    return jnp.ones(3)


def trace(function, *args):
    return compat.open_jaxpr(jax.make_jaxpr(function)(*(args or (ones(),))))[0]


def same(make_a, make_b, mode="full", rule_key=None, args=()):
    """Do the functions that `make_a` and `make_b` make have one key?"""
    keys = Canonicalizer(mode, rule_key)
    equal = keys.key(trace(make_a(), *args)) == keys.key(trace(make_b(), *args))
    # Freshly traced twins always hit, whatever the other one does.
    if rule_key is None:
        return equal
    assert keys.key(trace(make_a(), *args)) == keys.key(trace(make_a(), *args))
    return equal


def by_code(function):
    """A rule key for the functions of these tests: the code and the cells, as numbers."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    if not all(isinstance(cell, int | float | jax.custom_jvp | jax.custom_vjp) for cell in cells):
        return None
    return function.__code__, tuple([repr(c) for c in cells if isinstance(c, int | float)])


def refused(function, *args, mode="full"):
    with pytest.raises(Uninternable):
        Canonicalizer(mode).key(trace(function, *args))
    return True


# -- what does not count ---------------------------------------------------------------------------


def named(name):
    def function(x):
        return jnp.sin(x) + 1

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


def scoped(name):
    def function(x):
        with jax.named_scope(name):
            return jnp.sin(x) + 1

    return function


def one_line(x):
    return jnp.sin(x) * 2


def other_lines(some_other_name):
    first = jnp.sin(some_other_name)

    return first * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make_a", "make_b"),
    [
        (lambda: named("f"), lambda: named("g")),
        (lambda: scoped("f"), lambda: scoped("g")),
        (lambda: jax.named_call(one_line, name="f"), lambda: jax.named_call(one_line, name="g")),
        (lambda: one_line, lambda: other_lines),
    ],
    ids=["jit name", "name scope", "named call", "locations"],
)
def test_names_and_places_do_not_count(make_a, make_b, mode):
    assert same(make_a, make_b, mode)


# -- structure -------------------------------------------------------------------------------------

STRUCTURE = {
    "operation": (lambda: jnp.sin, lambda: jnp.cos),
    "operand order": (lambda: lambda x: jnp.sin(x) - x, lambda: lambda x: x - jnp.sin(x)),
    "which variable": (
        lambda: lambda x: (lambda a, b: a * a + b)(jnp.sin(x), jnp.cos(x)),
        lambda: lambda x: (lambda a, b: a * b + b)(jnp.sin(x), jnp.cos(x)),
    ),
    "output order": (
        lambda: lambda x: (jnp.sin(x), jnp.cos(x)),
        lambda: lambda x: (lambda a, b: (b, a))(jnp.sin(x), jnp.cos(x)),
    ),
    "outputs": (lambda: lambda x: x * 2, lambda: lambda x: (x * 2, x)),
    "dead code": (lambda: lambda x: x * 2, lambda: lambda x: (jnp.sin(x), x * 2)[1]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", STRUCTURE)
def test_structure(case, mode):
    make_a, make_b = STRUCTURE[case]
    assert same(make_a, make_a, mode)
    assert not same(make_a, make_b, mode)


def test_inputs_count():
    keys = Canonicalizer("full")

    def key(*args):
        return keys.key(trace(lambda x, *rest: x * 2, *args))

    assert key(ones()) == key(ones() * 7)
    assert key(ones()) != key(ones(), ones())
    assert key(ones()) != key(jnp.ones(4))
    assert key(ones()) != key(jnp.ones(3, jnp.int32))
    assert key(np.float32(1)) == key(np.float32(2))
    assert key(np.float32(1)) != key(1.0)  # weakly typed


AVALS = {
    "shape": lambda aval: aval.update(shape=(4,)),
    "dtype": lambda aval: aval.update(dtype=np.dtype("int32")),
    "weak type": lambda aval: aval.update(weak_type=True),
    "memory space": lambda aval: aval.update(memory_space=jax.memory.Space.Host),
    "sharding": lambda aval: explicitly_sharded(aval, P("i")),
    "spec": lambda aval: explicitly_sharded(aval, P(None)),
}


def explicitly_sharded(aval, spec):
    explicit = jax.sharding.AbstractMesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    return aval.update(sharding=NamedSharding(explicit, spec))


@pytest.mark.parametrize("where", ["input", "output", 2, True, 2.0, 2j, np.float32(2), "literal"])
def test_avals(where):
    """All parts of an aval count, wherever it stands, and even where the rest implies them."""
    jaxpr = trace(lambda x: x * np.float32(2))
    [equation], [x] = jaxpr.eqns, jaxpr.invars
    [y], literal = equation.outvars, equation.invars[1]

    def with_aval(make):
        aval = x.aval.update() if make is None else make(x.aval)
        if where == "input":
            var = compat.Var(aval)
            return jaxpr.replace(invars=[var], eqns=[], outvars=[])
        if where == "output":
            var = compat.Var(aval)
            return jaxpr.replace(eqns=[equation.replace(outvars=[var])], outvars=[var])
        value = literal.val if where == "literal" else where
        changed = equation.replace(invars=[x, compat.Literal(value, aval)])
        return jaxpr.replace(eqns=[changed], outvars=[y])

    keys = Canonicalizer("full")
    makes = [None, *AVALS.values()]
    first, second = ([keys.key(with_aval(make)) for make in makes] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(makes)


def test_counts_of_inputs_and_constvars():
    if compat.JAXPR_CARRIES_CONSTS:
        pytest.skip("a jaxpr without consts has no constvars")
    keys, jaxpr = Canonicalizer("full"), trace(lambda x, y: x * y, ones(), ones())
    x, y = jaxpr.invars
    as_const = jaxpr.replace(constvars=[x], invars=[y])
    assert keys.key(as_const) == keys.key(as_const)
    assert keys.key(as_const) != keys.key(jaxpr)


def test_x64():
    keys = Canonicalizer("full")

    def key(x64):
        with jax.enable_x64(x64):
            return keys.key(trace(lambda n: jnp.arange(3) * n, np.int32(2)))

    assert key(False) == key(False)
    assert key(True) == key(True)
    assert key(False) != key(True)


# -- literals --------------------------------------------------------------------------------------


def nan(payload):
    return np.array([0x7FC00000 | payload], np.uint32).view(np.float32)[0]


LITERALS = [
    0.0,
    -0.0,
    0,
    False,
    1,
    1.0,
    True,
    1j,
    -1j,
    2.5,
    float("inf"),
    np.float32(2.5),
    np.float32(0),
    np.float32(-0.0),
    np.float16(2.5),
    np.int8(1),
    np.int16(1),
    np.int32(1),
    np.uint8(1),
    nan(0),
    nan(1),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [lambda v: v, np.asarray], ids=["scalar", "0-d array"])
def test_literals_by_type_and_bits(mode, wrap):
    keys = Canonicalizer(mode)

    def functions():
        """The literal as an operand, and as an output."""
        return [lambda x, v=wrap(value): (x * v, v) for value in LITERALS]

    first, second = ([keys.key(trace(f)) for f in functions()] for _ in range(2))
    assert first == second
    if wrap is np.asarray:
        # JAX makes np.asarray(2.5), which is float64, the same as np.float32(2.5).
        texts = [jax.jit(f).lower(ones()).as_text() for f in functions()]
        pairs = [(i, j) for i in range(len(first)) for j in range(i) if first[i] == first[j]]
        assert all(texts[i] == texts[j] for i, j in pairs)
        assert len(set(first)) >= len(set(texts))
    else:
        assert len(set(first)) == len(first)


def test_weak_and_strong_literals_differ():
    make = lambda value: lambda: lambda x: value
    assert same(make(2.0), make(2.0))
    assert same(make(np.float32(2.0)), make(np.float32(2.0)))
    assert not same(make(2.0), make(np.float32(2.0)))


def test_output_literals():
    make = lambda value: lambda: lambda x: value
    assert same(make(0.0), make(0.0))
    assert not same(make(0.0), make(-0.0))
    assert not same(make(0), make(0.0))


def test_a_literal_is_read_again():
    """The user's 0-d array is inside of the jaxpr, and may change there."""
    keys, array = Canonicalizer("full"), np.array(2.0, np.float32)
    jaxpr = trace(lambda x: x * array)
    before = keys.key(jaxpr)
    assert keys.key(jaxpr) == before
    array[...] = 3.0
    assert keys.key(jaxpr) != before
    assert keys.key(trace(lambda x: x * np.array(3.0, np.float32))) == keys.key(jaxpr)


def test_a_tracer_in_a_literal_is_refused():
    jaxpr = trace(lambda x: x * 2.0)
    seen = []

    def outer(y):
        [equation] = jaxpr.eqns
        literal = compat.Literal(y, equation.invars[1].aval)
        bad = jaxpr.replace(eqns=[equation.replace(invars=[equation.invars[0], literal])])
        with pytest.raises(Uninternable, match="tracer"):
            Canonicalizer("full").key(bad)
        seen.append(True)
        return y

    jax.make_jaxpr(outer)(1.0)
    assert seen


# -- the context of an equation --------------------------------------------------------------------


def with_metadata(**metadata):
    def function(x):
        with set_xla_metadata(**metadata):
            return x * 2

    return function


def with_precision(precision):
    def function(x):
        with jax.default_matmul_precision(precision):
            return jnp.dot(x, x)

    return function


def with_compute_on(where):
    def function(x):
        return _compute_on(lambda y: y * 2, where)(x)

    return function


def _compute_on(function, where):
    from jax.experimental.compute_on import compute_on

    try:
        manager = compute_on(where)  # until 0.11: a context manager
    except TypeError:
        space = jax.memory.Space.Device
        return compute_on(compute_type=where, out_memory_spaces=space)(function)

    def wrapped(x):
        with manager:
            return function(x)

    return wrapped


CONTEXTS = {
    "xla metadata": (lambda: with_metadata(a="1"), lambda: with_metadata(a="2")),
    "no metadata": (lambda: with_metadata(a="1"), lambda: lambda x: x * 2),
    "matmul precision": (lambda: with_precision("highest"), lambda: with_precision("default")),
    "threefry": (
        lambda: lambda x: x + jax.random.uniform(jax.random.key(0), (3,)),
        lambda: unpartitionable(lambda x: x + jax.random.uniform(jax.random.key(0), (3,))),
    ),
}


def unpartitionable(function):
    def wrapped(x):
        with jax.threefry_partitionable(False):
            return function(x)

    return wrapped


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CONTEXTS)
def test_context(case, mode):
    make_a, make_b = CONTEXTS[case]
    assert same(make_a, make_a, mode)
    assert same(make_b, make_b, mode)
    assert not same(make_a, make_b, mode)


@pytest.mark.parametrize("mode", MODES)
def test_compute_on(mode):
    make = lambda: with_compute_on("device_host")
    assert same(make, make, mode)
    assert not same(make, lambda: lambda x: x * 2, mode)


# -- parameters ------------------------------------------------------------------------------------


def scan_with(**options):
    xs = options.pop("xs", 4)
    return lambda x: lax.scan(lambda c, s: (c * s, c), x, jnp.arange(float(xs)), **options)


def switch_of(*branches):
    return lambda x: lax.switch(x[0].astype(int), branches, x)


def jit_with(**options):
    def function(x):
        return jax.jit(lambda y: y * 2, **options)(x)

    return function


def mesh(*names):
    shape = (2,) * len(names)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def constrained(spec, names=("i", "j"), **options):
    def function(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh(*names), spec, **options))

    return function


def ffi(target, **attributes):
    def function(x):
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((3,), jnp.float32))(x, **attributes)

    return function


def saved_as(name):
    return lambda x: checkpoint_name(jnp.sin(x), name)


def dot(precision):
    return lambda x: jnp.dot(x, x, precision=precision)


def sort(**options):
    return lambda x: lax.sort(x, **options)


def moved(memory_kind):
    def function(x):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
        return jax.device_put(x, sharding)

    return function


def device(index):
    return lambda x: jax.device_put(x, jax.devices()[index])


# Each group: programs that differ from each other.
PARAMETERS = {
    "scan": [
        lambda: scan_with(),
        lambda: scan_with(unroll=2),
        lambda: scan_with(reverse=True),
        lambda: scan_with(xs=5),
    ],
    "cond": [
        lambda: switch_of(jnp.sin, jnp.cos),
        lambda: switch_of(jnp.cos, jnp.sin),
        lambda: switch_of(jnp.sin, jnp.cos, jnp.sin),
    ],
    "dot precision": [lambda: dot("highest"), lambda: dot("default"), lambda: dot(None)],
    "integer_pow": [lambda: lambda x: x**2, lambda: lambda x: x**3],
    "sort": [lambda: sort(), lambda: sort(is_stable=False)],
    "inline": [lambda: jit_with(), lambda: jit_with(keep_unused=True)],
    "donate": [lambda: jit_with(), lambda: jit_with(donate_argnums=0)],
    "sharding": [
        lambda: constrained(P("i")),
        lambda: constrained(P("j")),
        lambda: constrained(P(None)),
        lambda: constrained(P("i"), ("i", "k")),
        lambda: constrained(P("i"), memory_kind="unpinned_host"),
    ],
    "device": [lambda: device(0), lambda: device(1)],
    "ffi target": [lambda: ffi("a"), lambda: ffi("b")],
    "ffi scalar": [
        lambda: ffi("a", n=0),
        lambda: ffi("a", n=False),
        lambda: ffi("a", n=np.float32(0)),
        lambda: ffi("a", n=np.float32(-0.0)),
        lambda: ffi("a", n=np.float64(0)),
        lambda: ffi("a", n="0"),
    ],
    "ffi array": [
        lambda: ffi("a", n=np.array([0.0])),
        lambda: ffi("a", n=np.array([-0.0])),
        lambda: ffi("a", n=np.array([0])),
        lambda: ffi("a", n=np.array([[0.0]])),
    ],
    "checkpoint_name": [lambda: saved_as("a"), lambda: saved_as("b")],
    "reduce_precision": [
        lambda: lambda x: lax.reduce_precision(x, 8, 10),
        lambda: lambda x: lax.reduce_precision(x, 8, 9),
    ],
    "loop": [
        lambda: lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x),
        lambda: lambda x: lax.fori_loop(0, 4, lambda i, c: c * 2, x),
        lambda: lambda x: lax.fori_loop(0, 3, lambda i, c: c * 3, x),
        lambda: lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: c * 2, x),
        lambda: lambda x: lax.while_loop(lambda c: c[0] < 4, lambda c: c * 2, x),
    ],
    "conv": [
        lambda: lambda x: jnp.convolve(x, x, "same"),
        lambda: lambda x: jnp.convolve(x, x, "full"),
    ],
    "remat": [
        lambda: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
        lambda: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=False),
    ],
    "composite": [
        lambda: lambda x: lax.composite(lambda y: jnp.sin(y), name="a.b")(x),
        lambda: lambda x: lax.composite(lambda y: jnp.sin(y), name="a.c")(x),
        lambda: lambda x: lax.composite(lambda y: jnp.sin(y), name="a.b", version=1)(x),
    ],
    "effects": [
        lambda: lambda x: io_callback(print, None, x, ordered=False),
        lambda: lambda x: io_callback(print, None, x, ordered=True),
    ],
    "debug print": [
        lambda: lambda x: jax.debug.print("a {}", x),
        lambda: lambda x: jax.debug.print("b {}", x),
        lambda: lambda x: jax.debug.print("a {}", x, ordered=True),
    ],
    "random": [
        lambda: lambda x: x + jax.random.uniform(jax.random.key(0), (3,)),
        lambda: lambda x: x + jax.random.uniform(jax.random.key(1), (3,)),
        lambda: lambda x: x + jax.random.uniform(jax.random.key(0, impl="rbg"), (3,)),
    ],
    "linear solve": [
        lambda: solve(symmetric=True, scale=2.0),
        lambda: solve(symmetric=False, scale=2.0),
        lambda: solve(symmetric=True, scale=3.0),
    ],
}


def solve(symmetric, scale):
    def function(x):
        return lax.custom_linear_solve(
            lambda v: v * scale,
            x,
            lambda matvec, b: b / scale,
            lambda vecmat, b: b / scale,
            symmetric=symmetric,
        )

    return function


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", PARAMETERS)
def test_parameters(group, mode):
    keys = Canonicalizer(mode)
    first = [keys.key(trace(make())) for make in PARAMETERS[group]]
    second = [keys.key(trace(make())) for make in PARAMETERS[group]]
    assert first == second
    assert len(set(first)) == len(first)
    # Also when two hashes happen to be equal.
    parts = [key.parts for key in first]
    assert all(parts[i] != parts[j] for i in range(len(parts)) for j in range(i))


def test_a_jit_that_is_inlined_while_tracing_is_no_equation():
    assert not same(lambda: jit_with(), lambda: jit_with(inline=True))


def test_jit_shardings():
    def make(spec):
        sharding = NamedSharding(mesh("i", "j"), spec)
        return lambda: jit_with(in_shardings=sharding, out_shardings=sharding)

    args = (jnp.ones(4),)
    assert same(make(P("i")), make(P("i")), args=args)
    assert not same(make(P("i")), make(P("j")), args=args)
    assert not same(make(P("i")), lambda: jit_with(), args=args)


def test_explicit_shardings_are_part_of_the_aval():
    explicit = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    keys = Canonicalizer("full")

    def key(spec):
        with jax.set_mesh(explicit):
            return keys.key(trace(lambda x: jax.sharding.reshard(x, spec) * 2, jnp.ones(4)))

    assert key(P("i")) == key(P("i"))
    assert key(P("i")) != key(P(None))


def test_layouts():
    from jax.experimental.layout import Layout, with_layout_constraint

    make = lambda *order: lambda: lambda x: with_layout_constraint(x, Layout(major_to_minor=order))
    args = (jnp.ones((2, 3)),)
    assert same(make(0, 1), make(0, 1), args=args)
    assert not same(make(0, 1), make(1, 0), args=args)


def test_references():
    def make(index, value):
        def function(x):
            ref = jax.new_ref(x)
            ref[index] = value
            return ref[...]

        return lambda: function

    assert same(make(0, 3.0), make(0, 3.0))
    assert not same(make(0, 3.0), make(1, 3.0))
    assert not same(make(0, 3.0), make(0, 4.0))


def test_references_as_inputs_and_their_effects():
    read = lambda: lambda r, s: r[...]
    write = lambda: lambda r, s: r.__setitem__(0, 1.0)
    swap = lambda: lambda r, s: s[...]
    args = (jax.new_ref(ones()), jax.new_ref(ones()))
    assert same(read, read, args=args)
    assert same(write, write, args=args)
    assert not same(read, swap, args=args)
    assert not same(read, write, args=args)


def test_effects_count_even_where_the_primitives_imply_them():
    read, write = (effect for effect in sorted(compat.INPUT_EFFECTS, key=str)[-2:])
    jaxpr = trace(lambda r, s: None, jax.new_ref(ones()), jax.new_ref(ones()))
    r, s = jaxpr.invars
    keys = Canonicalizer("full")
    effects = [set(), {read(r)}, {read(s)}, {read(r), read(s)}, {write(r)}, {read(r), write(s)}]
    first, second = ([keys.key(jaxpr.replace(effects=e)) for e in effects] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(effects)


def test_the_kind_of_a_reference_counts_although_its_eq_ignores_it():
    keys = Canonicalizer("full")

    def key(kind):
        jaxpr = trace(lambda x: x)
        aval = compat.AbstractRef(jaxpr.invars[0].aval, None, kind)
        var = compat.Var(aval)
        return keys.key(jaxpr.replace(invars=[var], outvars=[]))

    assert compat.AbstractRef(trace(lambda x: x).invars[0].aval, None, "a") is not None
    assert key("a") == key("a")
    assert key("a") != key("b")


def test_axis_names():
    make = lambda name: lambda: jax.vmap(lambda x: lax.psum(x, name), axis_name=name)
    assert same(make("i"), make("i"))

    def sharded(name):
        names = mesh(name)
        return lambda: jax.shard_map(
            lambda x: x + lax.axis_index(name), mesh=names, in_specs=P(name), out_specs=P(name)
        )

    args = (jnp.arange(4),)
    assert same(sharded("i"), sharded("i"), args=args)
    assert not same(sharded("i"), sharded("j"), args=args)


# -- nested jaxprs ---------------------------------------------------------------------------------


def deep(literal, unroll=1):
    def function(x):
        def body(c, s):
            c = lax.while_loop(
                lambda v: v[0] < s,
                lambda v: lax.cond(v[0] > 1, lambda u: u * literal, lambda u: u + 1, v),
                c,
            )
            return c, jax.nn.silu(c)

        return lax.scan(body, x, jnp.arange(3.0), unroll=unroll)

    return function


@pytest.mark.parametrize("mode", MODES)
def test_nested_three_deep(mode):
    assert same(lambda: deep(2.0), lambda: deep(2.0), mode)
    assert not same(lambda: deep(0.0), lambda: deep(-0.0), mode)
    assert not same(lambda: deep(2.0), lambda: deep(2.0, unroll=3), mode)


@pytest.mark.parametrize("make", [jnp.ones, np.ones], ids=["jax", "numpy"])
def test_captured_arrays_are_inputs(make):
    def function(scale):
        array = make(3, dtype=np.float32) * scale
        return lambda x: lax.fori_loop(0, 3, lambda i, c: c * array, x)

    assert same(lambda: function(2), lambda: function(3))
    closed = jax.make_jaxpr(function(2))(ones())
    opened, consts = compat.open_jaxpr(closed)
    assert len(consts) == 1
    assert not getattr(opened, "consts", ())
    assert not opened.constvars
    np.testing.assert_array_equal(compat.jaxpr_as_fun(opened)(*consts, ones())[0], np.full(3, 8.0))


def test_a_const_in_a_nested_jaxpr_is_refused():
    array = jnp.arange(3.0)
    assert refused(lambda x: jax.jit(lambda y: y * array)(x))


def test_sharing_of_nested_jaxprs_is_not_exponential():
    def chain(depth):
        function = lambda x: x + 1
        for _ in range(depth):
            function = (lambda inner: jax.jit(lambda x: inner(inner(x))))(function)
        return function

    keys = Canonicalizer("full")
    a, b = keys.key(trace(chain(40))), keys.key(trace(chain(40)))
    assert a == b
    assert a.equations > 2**40
    assert a != keys.key(trace(chain(39)))


# -- refused ---------------------------------------------------------------------------------------


MADE_UP = jax.extend.core.Primitive("made_up")
MADE_UP.def_abstract_eval(lambda x: x)


def with_parameters(**params):
    """A program of one equation with these parameters (JAX itself would conflate some of them)."""
    jaxpr = trace(lambda x: MADE_UP.bind(x))
    return jaxpr.replace(eqns=[jaxpr.eqns[0].replace(params=params)])


class Lying:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class LyingTuple(tuple):
    __eq__ = Lying.__eq__
    __hash__ = Lying.__hash__


class LyingColour(enum.Enum):
    RED = 1
    BLUE = 2
    __eq__ = Lying.__eq__
    __hash__ = Lying.__hash__


class Node:
    def __init__(self, x, meta):
        self.x, self.meta = x, meta


jax.tree_util.register_dataclass(Node, data_fields=["x"], meta_fields=["meta"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "value",
    [
        Lying(),
        LyingTuple(),
        [1],
        {"a": 1},
        {1},
        np.ones(2),
        jnp.ones,
        bytearray(b"a"),
        1 + Fraction(1, 2),
        jax.tree.structure(Node(0, Lying())),
        jax.tree.structure(Node(0, (Lying(),))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unknown_parameters_are_refused(value, mode):
    if value is jnp.ones:
        value = jnp.ones(2)  # not while collecting
    for v in (value, (value,), ((0, (value,)),)):
        with pytest.raises(Uninternable):
            Canonicalizer(mode).key(with_parameters(value=v))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: (v, "b"), lambda v: ((v,), frozenset([v]))]
)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0, False),
        (0, None),
        (0.0, -0.0),
        (0, 0.0),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((1, (0.0,)), (1, (-0.0,))),
        (complex(0, 1), complex(-0.0, 1)),
        ("a", b"a"),
        (np.float32(1), np.float64(1)),
        (np.float32(0), np.float32(-0.0)),
        (np.int32(1), 1),
        (np.bool_(True), True),
        (np.dtype("float32"), "float32"),
        (np.dtype("float32"), np.float32),
        (frozenset([1]), frozenset([True])),
        (frozenset([0.0]), frozenset([-0.0])),
        (LyingColour.RED, LyingColour.BLUE),
        (lax.Precision.HIGH, lax.Precision.HIGHEST),
        (None, ()),
        ((), frozenset()),
        (jax.tree.structure({1: 0}), jax.tree.structure({True: 0})),
        (jax.tree.structure({1: 0}), jax.tree.structure({1.0: 0})),
        (jax.tree.structure((0, 0)), jax.tree.structure([0, 0])),
        (jax.tree.structure((0, None)), jax.tree.structure((None, 0))),
        (jax.tree.structure(Node(0, 0.0)), jax.tree.structure(Node(0, -0.0))),
        (jax.tree.structure(Node(0, 1)), jax.tree.structure(Node(0, True))),
        (test_structure, test_context),
        (np.sin, np.cos),
        (int, bool),
        (float("nan"), -float("nan")),
        (70, 71),
        (-1, -2),  # CPython gives them one hash
        (P("i"), P("j")),
        (P("i"), ("i",)),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_parameters_by_type_and_bits(a, b, wrap, mode):
    keys = Canonicalizer(mode)
    key = lambda value: keys.key(with_parameters(value=wrap(value)))
    assert key(a) == key(a)
    assert key(b) == key(b)
    assert key(a) != key(b)
    assert key(a).parts != key(b).parts


def test_the_names_of_parameters_count():
    keys = Canonicalizer("full")
    key = lambda **params: keys.key(with_parameters(**params))
    assert key(a=1, b=2) == key(b=2, a=1)
    assert key(a=1) != key(b=1)
    assert key(a=1) != key(a=1, b=2)
    assert key(a=1, b=2) != key(a=2, b=1)
    assert key(a=1) != key()
    assert key(a=1) == key(a=1)


def test_a_primitive_with_an_eq_of_its_own_is_refused():
    class Lying(jax.extend.core.Primitive):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    primitive = Lying("lying")
    primitive.def_abstract_eval(lambda x: x)
    assert refused(lambda x: primitive.bind(x))


def test_an_unknown_effect_is_refused():
    class Strange(jax.extend.core.Effect):
        pass

    jaxpr = trace(lambda x: x * 2)
    with pytest.raises(Uninternable, match="Strange"):
        Canonicalizer("full").key(jaxpr.replace(effects={Strange()}))


def test_an_open_term_is_refused():
    jaxpr = trace(lambda x: x * 2)
    with pytest.raises(Uninternable):
        Canonicalizer("full").key(jaxpr.replace(invars=[]))


def test_unknown_modes():
    with pytest.raises(ValueError, match="mode"):
        Canonicalizer("other")


# -- rules -----------------------------------------------------------------------------------------


def jvp_with(scale, **options):
    def make():
        @functools.partial(jax.custom_jvp, **options)
        def function(x, *rest):
            return jnp.sin(x)

        @function.defjvp
        def rule(*args):
            primals, tangents = args[-2:]
            return function(*primals, *args[:-2]), tangents[0] * scale

        return lambda x: function(x, *[7 for _ in options.get("nondiff_argnums", ())])

    return make


def vjp_with(scale, forward=1):
    def make():
        @jax.custom_vjp
        def function(x):
            return jnp.sin(x)

        def fwd(x):
            return function(x), x * forward

        def bwd(residual, cotangent):
            return (cotangent * scale * residual,)

        function.defvjp(fwd, bwd)
        return lambda x: function(x)

    return make


def vmap_with(scale):
    def make():
        @jax.custom_batching.custom_vmap
        def function(x):
            return jnp.sin(x)

        @function.def_vmap
        def rule(axis_size, in_batched, x):
            return jnp.sin(x) * scale, True

        return lambda x: function(x)

    return make


@pytest.mark.parametrize("kind", [jvp_with, vjp_with, vmap_with])
def test_rules(kind):
    assert same(kind(1), kind(2), "exec")
    assert not same(kind(1), kind(2), "full")
    # Nobody vouches for the rules: two traces are two rules.
    assert not same(kind(1), kind(1), "full")
    assert not same(kind(1), kind(1), "full", rule_key=None)
    # Somebody does.
    assert same(kind(1), kind(1), "full", by_code)
    assert not same(kind(1), kind(2), "full", by_code)


def test_the_forward_rule_counts_too():
    assert not same(vjp_with(1, forward=1), vjp_with(1, forward=2), "full", by_code)


def test_one_rule_function_whose_captures_change():
    """It is the same function object both times, but no longer the same rule."""
    scale = 1.0

    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda p, t: (function(*p), t[0] * scale))
    keys = {rule_key: Canonicalizer("full", rule_key) for rule_key in (None, by_code)}
    jaxprs = [trace(lambda x: function(x))]
    before = {rule_key: keys[rule_key].key(jaxprs[0]) for rule_key in keys}
    scale = 2.0
    for rule_key in keys:
        jaxprs.append(trace(lambda x: function(x)))
        assert keys[rule_key].key(jaxprs[-1]) != before[rule_key]
    scale = 1.0
    jaxprs.append(trace(lambda x: function(x)))
    assert keys[by_code].key(jaxprs[-1]) == before[by_code]


def test_fixed_arguments_of_rules():
    def with_fixed(value):
        def make():
            @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
            def function(x, n):
                return jnp.sin(x)

            function.defjvp(lambda n, p, t: (function(*p, n), t[0] * n))
            return lambda x: function(x, value)

        return make

    assert same(with_fixed(1), with_fixed(1), "full", by_code)
    assert not same(with_fixed(1), with_fixed(2), "full", by_code)
    assert not same(with_fixed(1), with_fixed(1.0), "full", by_code)
    # A list may change, and nobody vouches for it.
    keys = Canonicalizer("full", by_code)
    assert keys.key(trace(with_fixed([1])())) != keys.key(trace(with_fixed([1])()))


def test_fixed_arguments_of_vjp_rules():
    def with_fixed(value):
        def make():
            @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
            def function(x, n):
                return jnp.sin(x)

            function.defvjp(lambda x, n: (function(x, n), None), lambda n, r, g: (g * n,))
            return lambda x: function(x, value)

        return make

    assert same(with_fixed(1), with_fixed(1), "full", by_code)
    assert not same(with_fixed(1), with_fixed(2), "full", by_code)
    assert not same(with_fixed(0.0), with_fixed(-0.0), "full", by_code)


def test_symbolic_zeros_count():
    def make(symbolic_zeros):
        def inner():
            @jax.custom_jvp
            def function(x):
                return jnp.sin(x)

            rule = lambda p, t: (jnp.sin(*p), t[0])
            function.defjvp(rule, symbolic_zeros=symbolic_zeros)
            return lambda x: function(x)

        return inner

    assert same(make(False), make(False), "full", by_code)
    assert not same(make(False), make(True), "full", by_code)


def test_the_tree_of_the_arguments_of_a_rule_counts():
    def make(pack):
        def inner():
            @jax.custom_jvp
            def function(tree):
                return jnp.sin(jax.tree.leaves(tree)[0])

            function.defjvp(lambda p, t: (function(*p), jax.tree.leaves(t)[0] * 2))
            return lambda x: function(pack(x))

        return inner

    assert same(make(lambda x: {1: x}), make(lambda x: {1: x}), "full", by_code)
    assert not same(make(lambda x: {1: x}), make(lambda x: {True: x}), "full", by_code)
    assert not same(make(lambda x: (x,)), make(lambda x: [x]), "full", by_code)


def test_rules_depend_on_the_context():
    """A thunk traces its rule once, in the context it was asked in."""
    make = jvp_with(1)
    keys = Canonicalizer("full", by_code)
    plain = keys.key(trace(make()))
    with jax.default_matmul_precision("highest"):
        precise = keys.key(trace(make()))
    assert plain != precise
    assert plain == keys.key(trace(make()))


@pytest.mark.parametrize(
    "function",
    [jax.nn.relu, jax.nn.silu, jax.nn.softmax, jax.nn.relu6, jax.nn.softplus, jax.nn.gelu,
     jnp.sinc, jax.nn.logsumexp, jax.scipy.special.logit],
    ids=lambda f: getattr(f, "__name__", "f"),
)  # fmt: skip
def test_the_rules_of_jax_itself(function):
    make = lambda: lambda x: function(x * 0.3)
    assert same(make, make, "full")


def test_rules_of_jax_on_other_primals():
    """`defjvps` calls the primal again, so it is a rule of JAX only if the primal is JAX's too."""

    def make(scale):
        def inner():
            function = jax.custom_jvp(lambda x: jnp.sin(x) * scale)
            function.defjvps(lambda t, ans, x: t * ans)
            return lambda x: function(x)

        return inner

    assert not same(make(1.0), make(1.0), "full")
    assert same(make(1.0), make(1.0), "full", by_code)
    assert not same(make(1.0), make(2.0), "full", by_code)

    def around(primal):
        def inner():
            function = jax.custom_jvp(primal())
            function.defjvps(lax.clamp)
            return lambda x: function(x)

        return inner

    assert compat.is_own_function(lax.clamp)
    assert same(around(lambda: jnp.sin), around(lambda: jnp.sin), "full")
    mine = lambda: lambda x: jnp.sin(x)
    assert not same(around(mine), around(mine), "full")
    assert same(around(mine), around(mine), "full", by_code)


def test_borrowed_names_do_not_make_a_rule_of_jax():
    @functools.wraps(jnp.sin)
    def impostor(x):
        return x

    assert impostor.__module__.startswith("jax")
    assert not compat.is_own_function(impostor)
    assert compat.is_own_function(jax.nn.softmax)


def policies(name):
    by_name = jax.checkpoint_policies.save_only_these_names(name)
    return lambda: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=by_name)


def test_remat_policies():
    saveable = jax.checkpoint_policies.everything_saveable
    with_policy = lambda policy: lambda: jax.checkpoint(lambda x: jnp.sin(x), policy=policy)
    assert same(with_policy(saveable), with_policy(saveable), "full")
    assert not same(with_policy(saveable), with_policy(None), "full")
    assert not same(policies("a"), policies("b"), "full")
    assert same(with_policy(saveable), with_policy(None), "exec")
    assert same(policies("a"), policies("b"), "exec")


def test_custom_reducers():
    make = lambda scale: lambda: lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * scale, (0,))
    assert same(make(1.0), make(1.0), "exec")
    assert not same(make(1.0), make(2.0), "exec")
    assert not same(make(1.0), make(2.0), "full", by_code)


# -- callbacks -------------------------------------------------------------------------------------


def called(callback):
    return lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct((3,), jnp.float32), x)


def test_callbacks_by_identity():
    one, other = lambda v: v, lambda v: v
    for mode in MODES:
        assert same(lambda: called(one), lambda: called(one), mode)
        assert not same(lambda: called(one), lambda: called(other), mode)


def test_callbacks_that_capture_nothing_may_be_equal():
    def fresh():
        return called(lambda v: v * 2)

    def capturing(number):
        return lambda: called(lambda v: v * number)

    def with_default(log):
        return lambda: called(lambda v, log=log: v)

    keys = Canonicalizer("full", by_code)
    assert keys.key(trace(fresh())) == keys.key(trace(fresh()))
    for make in (capturing(2), with_default([])):
        assert keys.key(trace(make())) != keys.key(trace(make()))


def test_the_callbacks_of_a_program():
    def one(x):
        return x

    def two(x):
        return x

    def both(x):
        def body(c):
            return jax.pure_callback(two, jax.ShapeDtypeStruct((3,), jnp.float32), c)

        x = jax.pure_callback(one, jax.ShapeDtypeStruct((3,), jnp.float32), x)
        return lax.while_loop(lambda c: c[0] < 0, lambda c: jax.jit(body)(c), x)

    keys = Canonicalizer("exec")
    assert keys.key(trace(both)).callbacks == (one, two)
    assert keys.key(trace(lambda x: x + 1)).callbacks == ()


@pytest.mark.parametrize("mode", MODES)
def test_marks_are_nothing_but_themselves(mode):
    keys, mark = Canonicalizer(mode), object()
    key = keys.key(with_parameters(value=(mark,)))
    assert key == keys.key(with_parameters(value=(mark,)))
    assert key != keys.key(with_parameters(value=(object(),)))


def test_the_arguments_of_callbacks():
    callback = lambda tree: np.ones(3, np.float32)
    result = jax.ShapeDtypeStruct((3,), jnp.float32)
    make = lambda pack: lambda: lambda x: jax.pure_callback(callback, result, pack(x))
    assert same(make(lambda x: {1: x}), make(lambda x: {1: x}))
    assert not same(make(lambda x: {1: x}), make(lambda x: {True: x}))


@pytest.mark.parametrize("mode", MODES)
def test_the_key_keeps_alive_what_it_compares_by_identity(mode):
    """The id of a freed function may be given to the next one."""
    keys, seen = Canonicalizer(mode), []
    for _ in range(50):
        seen.append(keys.key(trace(called(lambda v: v))))
    assert len(set(seen)) == len(seen)
