"""With ``loopjit.install()`` programs that are equal compile once, and nothing else can be noticed."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installs import XS, X, arr, check_saved
from jax import jit as jit_bound_early, lax

import loopjit
from counting import counting

# --------------------------------------------------------------------------------------------
# Loops that are called op by op
# --------------------------------------------------------------------------------------------


def _while(v):
    w = arr(v)
    return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * w), (0, x))[1]


def _fori(v):
    w = arr(v)
    return lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * w + i, x)


def _fori_with_a_traced_bound(v):
    w, n = arr(v), arr(3, np.int32)
    return lambda x: lax.fori_loop(0, n, lambda i, c: jnp.sin(c) * w + i, x)


def _scan(v):
    w = arr(v)
    return lambda x: lax.scan(lambda c, y: (c * w + y, jnp.sin(c)), x[0], x)


def _scan_with_jitted_body(v):
    w = arr(v)
    step = jax.jit(lambda c, y, w: c * w + y)
    return lambda x: lax.scan(lambda c, y: (step(c, y, w), c), x[0], x)


def _scan_with_a_capture_of_its_jitted_body(v):
    w = arr(v)
    step = jax.jit(lambda c, y: c * w + y)
    return lambda x: lax.scan(lambda c, y: (step(c, y), c), x[0], x)


def _cond(v):
    w = arr(v)
    return lambda x: lax.cond(w > 2.5, lambda x: jnp.sin(x) * w, lambda x: x - w, x)


def _switch(v):
    w, k = arr(v), arr(int(v) - 2, np.int32)
    return lambda x: lax.switch(k, [lambda x: x * w, jnp.sin, lambda x: -x], x)


def _map(v):
    w = arr(v)
    return lambda x: lax.map(lambda y: jnp.cos(y) * w, x)


def _map_in_batches(v):
    w = arr(v)
    return lambda x: lax.map(lambda y: jnp.cos(y) * w, x, batch_size=2)


def _associative_scan_of_a_loop(v):
    w = arr(v)
    step = lambda i, c: c * w
    return lambda x: lax.associative_scan(lambda a, b: lax.fori_loop(0, 2, step, a + b), x)


def _reduce(v):
    w = arr(v)
    return lambda x: lax.reduce(x * w, np.float32(0), lambda a, b: a + 2 * b, (0,))


def _reduce_window(v):
    w = arr(v)
    return lambda x: lax.reduce_window(
        x * w, np.float32(1), lambda a, b: a * b + b, (2,), (1,), "VALID"
    )


def _linear_solve(v):
    w = arr(v)

    def solve(matvec, b):
        return lax.fori_loop(0, 3, lambda i, c: c + 0.1 * (b - matvec(c)), b)

    return lambda x: lax.custom_linear_solve(
        lambda y: y * w, x, solve, transpose_solve=solve, symmetric=True
    )


def _root(v):
    w = arr(v)

    def solve(g, x):
        return lax.while_loop(lambda c: jnp.abs(g(c)) > 1e-3, lambda c: c - 0.5 * g(c) / w, x)

    return lambda x: lax.custom_root(lambda y: w * y - x[0], x[0], solve, lambda g, b: b / g(1.0))


def _checkpoint(v):
    w = arr(v)
    return lambda x: jax.checkpoint(
        lambda x: lax.scan(lambda c, y: (jnp.sin(c) * w, c), x, None, length=3)[0]
    )(x)


def _custom_jvp(v):
    w = arr(v)

    @jax.custom_jvp
    def f(x):
        return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x)

    f.defjvp(lambda p, t: (f(p[0]), lax.fori_loop(0, 3, lambda i, c: c * w, t[0])))
    return f


def _custom_vjp(v):
    w = arr(v)

    @jax.custom_vjp
    def f(x):
        return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x)

    f.defvjp(
        lambda x: (f(x), x), lambda x, g: (lax.while_loop(lambda c: c[0] < 9, lambda c: c * w, g),)
    )
    return f


def _vectorize(v):
    w = arr(v)
    return lambda x: jnp.vectorize(lambda y: lax.fori_loop(0, 3, lambda i, c: c * w, y))(x)


def _cg(v):
    w = arr(v)
    return lambda x: jax.scipy.sparse.linalg.cg(lambda y: y * w, x, maxiter=3)[0]


LOOPS = [
    _while,
    _fori,
    _fori_with_a_traced_bound,
    _scan,
    _scan_with_jitted_body,
    _scan_with_a_capture_of_its_jitted_body,
    _cond,
    _switch,
    _map,
    _map_in_batches,
    _associative_scan_of_a_loop,
    _reduce,
    _reduce_window,
    _linear_solve,
    _root,
    _checkpoint,
    _custom_jvp,
    _custom_vjp,
    _vectorize,
    _cg,
]
FORWARDS = {_while, _fori_with_a_traced_bound}  # no reverse mode
NEITHER = {_reduce, _reduce_window}


def _total(f):
    return lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(f(x)))


WAYS = {
    "call": lambda f: f(X),
    "vmap": lambda f: jax.vmap(f)(XS),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "grad": lambda f: jax.grad(_total(f))(X),
    "value_and_grad": lambda f: jax.value_and_grad(_total(f))(X),
    "vjp": lambda f: jax.vjp(_total(f), X)[1](np.float32(1)),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "jacrev": lambda f: jax.jacrev(f)(X),
    "hessian": lambda f: jax.hessian(_total(f))(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(_total(f)))(XS),
}
BACKWARDS = {"grad", "value_and_grad", "vjp", "jacrev", "hessian", "vmap of grad"}


@pytest.mark.parametrize("make", LOOPS)
def test_loops(make):
    check_saved(lambda v: make(v)(X))


@pytest.mark.parametrize("make", [_while, _scan, _cond, _reduce, _cg])
def test_loops_without_jit(make):
    check_saved(lambda v: make(v)(X), jit=False)


# Each loop under some of the transformations, and each transformation on some of the loops.
_PAIRS = [
    (make, way)
    for i, make in enumerate(LOOPS)
    for j, way in enumerate(list(WAYS)[1:])
    if (i + j) % 7 == 0
    and not (make in FORWARDS and way in BACKWARDS)
    and not (make in NEITHER and way != "vmap")
    and not (make is _custom_vjp and way in ("jvp", "linearize", "jacfwd", "hessian"))
]


@pytest.mark.parametrize(("make", "way"), _PAIRS)
def test_loops_that_are_transformed(make, way):
    check_saved(lambda v: WAYS[way](make(v)))


# --------------------------------------------------------------------------------------------
# Functions that are jitted
# --------------------------------------------------------------------------------------------


def _lambda(v):
    w = arr(v)
    return jax.jit(lambda x: jnp.sin(x) * w)


def _bound_early(v):
    w = arr(v)
    return jit_bound_early(lambda x: jnp.sin(x) * w)


def _scaled_by(w):
    def scaled(x):
        return jnp.sin(x) * w

    return scaled


def _of_a_helper(v):
    return jax.jit(_scaled_by(arr(v)))


class Model:
    def __init__(self, w):
        self.w = w

    def run(self, x):
        return jnp.sin(x) * self.w

    def __call__(self, x):
        return jnp.sin(x) * self.w

    def jitted(self, x):
        @jax.jit
        def inner(x):
            return jnp.sin(x) * self.w

        return inner(x)

    @functools.partial(jax.jit, static_argnums=0)
    def jitted_method(self, x):
        return jnp.sin(x) * self.w


def _bound_method(v):
    return jax.jit(Model(arr(v)).run)


def _callable_object(v):
    return jax.jit(Model(arr(v)))


def _inside_of_a_method(v):
    return Model(arr(v)).jitted


def _static_self(v):
    return Model(arr(v)).jitted_method


def _partial(v):
    return jax.jit(partial(lambda w, x: jnp.sin(x) * w, arr(v)))


def _partial_of_jit(v):
    w = arr(v)

    @partial(jax.jit, static_argnums=1)
    def f(x, n=2):
        return jnp.sin(x) * w * n

    return lambda x: f(x, 3)


def _static_names(v):
    w = arr(v)
    f = jax.jit(lambda x, *, n: jnp.sin(x) * w * n, static_argnames="n")
    return lambda x: f(x, n=3)


def _static_function(v):
    f = jax.jit(lambda x, g: g(x), static_argnums=1)
    w = arr(v)
    return lambda x: f(x, lambda x: jnp.sin(x) * w)


def _donated(v):
    w = arr(v)
    f = jax.jit(lambda x: jnp.sin(x) * w, donate_argnums=0)
    return lambda x: f(x + 0) if isinstance(x, jax.core.Tracer) else f(jnp.array(x))


def _placed(v):  # on one device: what is captured is not shared on several
    place = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    w = arr(v)
    return jax.jit(lambda x: jnp.sin(x) * w, in_shardings=place, out_shardings=place)


def _distributed(v):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda x: jnp.sin(x) * 2, in_shardings=split, out_shardings=whole)


def _with_compiler_options(v):
    w = arr(v)
    options = {"xla_embed_ir_in_executable": True}
    return jax.jit(lambda x: jnp.sin(x) * w, compiler_options=options)


def _unused_kept(v):
    w = arr(v)
    f = jax.jit(lambda x, y: jnp.sin(x) * w, keep_unused=True)
    return lambda x: f(x, 1.0)


def _unused(v):
    w, other = arr(v), arr(v)
    f = jax.jit(lambda x, y: (other * 2, jnp.sin(x) * w)[1])
    return lambda x: f(x, 1.0)


def _inlined(v):
    w = arr(v)
    return jax.jit(lambda x: jnp.sin(x) * w, inline=True)


def _nested(v):
    w = arr(v)
    inner = jax.jit(lambda x: jnp.sin(x) * w)
    return jax.jit(lambda x: inner(inner(x)) + w)


def _captured_in_a_loop_inside(v):
    w = arr(v)
    step = jax.jit(lambda c: jnp.sin(c) * w)
    f = jax.jit(lambda x: lax.cond(x[0] > 0, lambda x: lax.map(step, x), lambda x: -step(x), x))
    return jax.jit(lambda x: f(x) + step(x))


def _loop_inside(v):
    w = arr(v)
    return jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * w, x))


def _jit_of_vmap(v):
    w = arr(v)
    f = jax.vmap(lambda x: jnp.sin(x) * w)
    return jax.jit(lambda x: f(x))


def _jit_of_grad(v):
    w = arr(v)
    return jax.jit(jax.grad(lambda x: (jnp.sin(x) * w).sum()))


def _without_arguments(v):
    w = arr(v)
    return lambda x: x * jax.jit(lambda: jnp.sin(w))()


def _no_captures(v):
    return jax.jit(lambda x: jnp.sin(x) * 2)


def _tree(v):
    w = {"a": arr(v), "b": [arr([v, v, v]), arr(v)]}
    f = jax.jit(lambda x, y: {"c": x["x"] * w["a"], "d": w["b"][0] * y, "e": w["b"][1]})
    return lambda x: f({"x": x}, x)["c"]


def _custom_jvp_inside(v):
    w = arr(v)

    @jax.custom_jvp
    def act(x):
        return jnp.sin(x)

    act.defjvp(lambda p, t: (act(p[0]), t[0] * w))
    return jax.jit(lambda x: act(x) * 2)


def _custom_vjp_inside(v):
    w = arr(v)

    @jax.custom_vjp
    def act(x):
        return jnp.sin(x)

    act.defvjp(lambda x: (act(x), None), lambda _, g: (g * w,))
    return jax.jit(lambda x: act(x) * 2)


def _checkpoint_inside(v):
    w = arr(v)
    return jax.jit(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * w)))


JITTED = [
    _lambda,
    _bound_early,
    _of_a_helper,
    _bound_method,
    _callable_object,
    _inside_of_a_method,
    _static_self,
    _partial,
    _partial_of_jit,
    _static_names,
    _static_function,
    _donated,
    _placed,
    _distributed,
    _with_compiler_options,
    _unused_kept,
    _unused,
    _inlined,
    _nested,
    _loop_inside,
    _captured_in_a_loop_inside,
    _jit_of_vmap,
    _jit_of_grad,
    _without_arguments,
    _no_captures,
    _tree,
    _custom_jvp_inside,
    _custom_vjp_inside,
    _checkpoint_inside,
]


@pytest.mark.parametrize("make", JITTED)
def test_jit(make):
    check_saved(lambda v: make(v)(X), exact=False)


_PAIRS = [
    (make, way)
    for i, make in enumerate(JITTED)
    for j, way in enumerate(list(WAYS)[1:])
    if (i + j) % 9 == 0
    and not (make is _custom_vjp_inside and way in ("jvp", "linearize", "jacfwd", "hessian"))
    and not (make is _distributed and "vmap" in way)
    and make is not _with_compiler_options
]


@pytest.mark.parametrize(("make", "way"), _PAIRS)
def test_jit_that_is_transformed(make, way):
    check_saved(lambda v: WAYS[way](make(v)), exact=False)


def test_jit_is_as_ever_without_jit():
    with loopjit.installed(jit=False):
        for _ in range(2):
            with counting() as n:
                _lambda(2.0)(X)
            assert n.compiles == 1


def test_jitted_before_the_install():
    first, second = _lambda(2.0), _lambda(3.0)
    want = second(X) + 0
    third = _lambda(3.0)
    with loopjit.installed():
        first(X)
        with counting() as n:
            got = third(X)
        assert n.compiles == 0
    np.testing.assert_array_equal(got, want)


def test_a_warm_function_does_not_come_by():
    f = _lambda(2.0)
    with loopjit.installed():
        f(X)
        before = loopjit.cache_info()
        with counting() as n:
            for _ in range(5):
                f(X)
        assert loopjit.cache_info() == before
        assert (n.compiles, n.lowers, n.traces) == (0, 0, 0)


def test_what_is_counted():
    with loopjit.installed():
        for make, args in ((_lambda, X), (_while, X), (_no_captures, X)):
            loopjit.cache_clear()
            for found in (0, 1, 2):
                make(2.0)(args)
                info = loopjit.cache_info()
                assert (info.misses, info.interned) == (1, found)
        loopjit.cache_clear()
        f = _no_captures(2.0)
        f(X), f(jax.device_put(X, jax.devices()[3]))
        info = loopjit.cache_info()
        assert (info.misses, info.interned) == (1, 0)
    with loopjit.installed(jit=False):
        loopjit.cache_clear()
        for found in (0, 1, 2):
            _while(2.0)(X)
            info = loopjit.cache_info()
            assert (info.misses, info.interned) == (1, found)


def test_equinox():
    eqx = pytest.importorskip("equinox")

    def run(v):
        w = arr(v)
        f = eqx.filter_jit(lambda x, n: jnp.sin(x) * w * n)
        g = eqx.filter_jit(eqx.filter_value_and_grad(lambda x: (jnp.sin(x) * w).sum()))
        return f(X, 2), g(X)

    check_saved(run, exact=False)


# --------------------------------------------------------------------------------------------
# What is captured
# --------------------------------------------------------------------------------------------

CAPTURED = {
    "float32": arr,
    "vector": lambda v: arr([v, v + 1, v + 2]),
    "numpy": lambda v: np.array([v, 1, 1], np.float32),
    "large numpy": lambda v: np.full((500, 3), v, np.float32)[:, ::-1],
    "float64 numpy": lambda v: np.array([v, 1, 1]),
    "int": lambda v: arr(v, np.int32),
    "int8": lambda v: arr(v, np.int8),
    "bool": lambda v: arr(v > 2.5, np.bool_),
    "complex": lambda v: arr(v + 1j, np.complex64),
    "bfloat16": lambda v: arr([v, 1, 1], jnp.bfloat16),
    "int4": lambda v: arr([v, 1, 1], jnp.int4),
    "float8": lambda v: arr([v, 1, 1], jnp.float8_e4m3fn),
    "typed key": lambda v: jax.random.key(np.uint32(v)),
    "typed keys": lambda v: jax.random.split(jax.random.key(np.uint32(v)), 3),
    "other keys": lambda v: jax.random.key(np.uint32(v), impl="rbg"),
    "raw key": lambda v: jax.random.PRNGKey(np.uint32(v)),
    "weak": lambda v: jnp.asarray(v),
    "weak int": lambda v: jnp.asarray(int(v)),
    "empty": lambda v: arr(np.zeros((0, 3))),
    "committed": lambda v: jax.device_put(arr(v), jax.devices()[0]),
}


def _uses(w):
    if jnp.issubdtype(w.dtype, jax.dtypes.prng_key):
        return lambda x: (x + jax.random.uniform(w if w.ndim == 0 else w[0]), w)
    if w.dtype == np.uint32:
        return lambda x: (x + jax.random.uniform(w), w)
    return lambda x: (x * w.astype(x.dtype) if w.dtype.itemsize == 1 else x * w, w)


@pytest.mark.parametrize("kind", CAPTURED)
def test_other_values_of_captured_arrays(kind):
    check_saved(lambda v: jax.jit(_uses(CAPTURED[kind](v)))(X), exact=False)


@pytest.mark.parametrize("kind", ["vector", "numpy", "bfloat16", "typed key", "weak", "int4"])
def test_other_values_of_arrays_captured_in_a_loop(kind):
    def run(v):
        f = _uses(CAPTURED[kind](v))
        return lax.scan(lambda c, x: (c + 1, f(x)), 0, XS)

    check_saved(run)
