"""What surrounds a call counts: configuration, meshes, named axes, modes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from traps import XS, X, same

import loopjit
from counting import counting
from loopjit import compat, loop_jit


def _products():
    return lambda x: jnp.dot(jnp.outer(x, x) * 1.001, jnp.outer(x, x) * 0.999)


def _bits():
    return lambda x: jax.random.bits(jax.random.key(7), (3,))


def _raw_key():
    return lambda x: jax.random.PRNGKey(3)


def _range():
    return lambda x: jnp.arange(3) + jnp.asarray(1.0).astype(float)


def _promotion():
    return lambda x: x.astype(np.int16) * jnp.asarray(np.ones(3, np.float16))


CONTEXTS = {
    "x64": (lambda: jax.enable_x64(True), _range),
    "prng": (lambda: jax.default_prng_impl("rbg"), _bits),
    "prng of a raw key": (lambda: jax.default_prng_impl("rbg"), _raw_key),
    "custom keys": (lambda: jax.enable_custom_prng(True), _raw_key),
    "partitionable": (lambda: jax.threefry_partitionable(False), _bits),
    "device": (lambda: jax.default_device(jax.devices()[3]), lambda: lambda: jnp.ones(3) * 2.0),
}


def _result(f, args):
    out = f(*args)
    return out, out.dtype, out.devices()


def _args(make):
    return (np.array([1.0, 2.0, 3.0], np.float32),) if make().__code__.co_argcount else ()


def _equal(got, want):
    assert got[1:] == want[1:]
    same(got[0], want[0])


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("first", ["without", "within"])
def test_contexts(name, first):
    context, make = CONTEXTS[name]
    args = _args(make)
    one = loop_jit(make())
    order = (False, True, False, True) if first == "without" else (True, False, True, False)
    results = []
    for within in order:
        with context() if within else contextlib.nullcontext():
            want = _result(jax.jit(make()), args)
            _equal(_result(one, args), want)
            _equal(_result(one, args), want)
            _equal(_result(loop_jit(make()), args), want)
            results.append(want)
    (a, *_), (b, *_) = results[:2]
    assert (
        results[0][1:] != results[1][1:]
        or a.shape != b.shape
        or np.any(np.asarray(a) != np.asarray(b))
    )


def _loops():
    return {
        "scan": lambda: loopjit.lax.scan(
            lambda c, _: (c, jax.random.bits(jax.random.key(5), dtype=np.uint32)),
            X[0],
            None,
            length=2,
        )[1],
        "map": lambda: loopjit.lax.map(
            lambda x: jax.random.bits(jax.random.key(5), dtype=np.uint32), X
        ),
        "while_loop": lambda: loopjit.lax.while_loop(
            lambda c: c[0] < 1,
            lambda c: (c[0] + 1, jax.random.bits(jax.random.key(5), dtype=np.uint32)),
            (0, np.uint32(0)),
        )[1],
        "cond": lambda: loopjit.lax.cond(
            True, lambda: jax.random.bits(jax.random.key(5), dtype=np.uint32), lambda: np.uint32(0)
        ),
        "switch": lambda: loopjit.lax.switch(
            0, [lambda: jax.random.bits(jax.random.key(5), dtype=np.uint32), lambda: np.uint32(0)]
        ),
        "fori_loop": lambda: loopjit.lax.fori_loop(
            0, 1, lambda i, c: jax.random.bits(jax.random.key(5), dtype=np.uint32), np.uint32(0)
        ),
        "associative_scan": lambda: loopjit.lax.associative_scan(
            lambda a, b: a + jax.random.bits(jax.random.key(5), (1,), np.uint32).astype(np.float32),
            X[:2],
        ),
    }


@pytest.mark.parametrize("name", _loops())
def test_contexts_of_loops(name):
    run = lambda: _loops()[name]()
    default = run()
    with jax.default_prng_impl("rbg"):
        other = run()
        same(run(), other)
    same(run(), default)
    assert np.any(np.asarray(default) != np.asarray(other))
    with jax.enable_x64(True):
        run()
    same(run(), default)


@pytest.mark.parametrize("kind", ["update", "context"])
def test_a_setting_that_is_updated(kind):
    f = loop_jit(_bits())
    before = f(X)
    if kind == "update":
        jax.config.update("jax_default_prng_impl", "rbg")
        try:
            within = f(X), loop_jit(_bits())(X)
        finally:
            jax.config.update("jax_default_prng_impl", "threefry2x32")
    else:
        with jax.default_prng_impl("rbg"):
            within = f(X), loop_jit(_bits())(X)
    same(within[0], within[1])
    assert np.any(np.asarray(within[0]) != np.asarray(before))
    same(f(X), before)
    same(loop_jit(_bits())(X), before)


def test_the_precision_of_products():
    for precision in (None, "highest", "bfloat16", None, "highest"):
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            one = loop_jit(_products())
            want = str(jax.make_jaxpr(_products())(X))
            one(X)
            assert str(jax.make_jaxpr(lambda x: one(x))(X)).count("HIGHEST") == (
                want.count("HIGHEST")
            )
            assert str(jax.make_jaxpr(lambda x: loop_jit(_products())(x))(X)).count(
                "BF16"
            ) == want.count("BF16")


def test_promotion():
    one = loop_jit(_promotion())
    for now in ("standard", "strict", "standard", "strict"):
        with jax.numpy_dtype_promotion(now):
            for f in (one, loop_jit(_promotion())):
                if now == "strict":
                    with pytest.raises(Exception, match="promotion"):
                        f(X)
                else:
                    same(f(X), X.astype(np.float16))


def test_rank_promotion():
    f = loop_jit(lambda x: x + jnp.ones((1, 3)))
    f(X)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
        f(X)
    f(X)


def test_legacy_keys():
    f = loop_jit(lambda x: x + jax.random.uniform(jax.random.PRNGKey(0)))
    f(X)
    with jax.legacy_prng_key("error"), pytest.raises(ValueError, match="[Ll]egacy"):
        f(X)
    with jax.legacy_prng_key("error"), pytest.raises(ValueError, match="[Ll]egacy"):
        loop_jit(lambda x: x + jax.random.uniform(jax.random.PRNGKey(0)))(X)
    f(X)


def test_named_axes():
    def make():
        return lambda x: lax.axis_size("i") * x + lax.axis_index("i")

    one = loop_jit(make())
    for n in (2, 3, 2):
        xs = jnp.ones((n,))
        want = jax.vmap(make(), axis_name="i")(xs)
        same(jax.vmap(one, axis_name="i")(xs), want)
        same(jax.vmap(lambda x: loop_jit(make())(x), axis_name="i")(xs), want)
    with pytest.raises(NameError):
        one(X)
    nested = lambda f: jax.vmap(jax.vmap(f, axis_name="i"), axis_name="j")(jnp.ones((2, 3)))
    flipped = lambda f: jax.vmap(jax.vmap(f, axis_name="j"), axis_name="i")(jnp.ones((2, 3)))
    for _ in range(2):
        same(nested(one), nested(make()))
        same(flipped(one), flipped(make()))


def test_named_axes_of_loops():
    step = lambda c, _: (c + lax.psum(c, "i"), None)
    f = lambda scan: lambda x: scan(step, x, None, length=2)[0]
    for n in (2, 3, 2):
        xs = jnp.arange(1.0, n + 1.0)
        same(
            jax.vmap(f(loopjit.lax.scan), axis_name="i")(xs),
            jax.vmap(f(lax.scan), axis_name="i")(xs),
        )


def test_meshes():
    from jax.sharding import PartitionSpec as P

    def make():
        return lambda x: lax.with_sharding_constraint(x * 2.0, P("a"))

    x = np.ones(6, np.float32)
    one = loop_jit(make())
    for count in (2, 3, 2):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("a",))
        with jax.set_mesh(mesh):
            want = jax.jit(make())(x)
            for f in (one, loop_jit(make())):
                got = f(x)
                same(np.asarray(got), np.asarray(want))
                assert got.sharding.is_equivalent_to(want.sharding, 1)
    for f in (one, loop_jit(make())):
        with pytest.raises(Exception, match="mesh"):
            f(x)


def test_the_abstract_mesh():
    def make():
        return lambda x: x * len(jax.sharding.get_abstract_mesh().axis_names)

    one = loop_jit(make())
    for names in (("a",), ("a", "b"), ("a",)):
        mesh = jax.make_mesh((1,) * len(names), names)
        with jax.set_mesh(mesh):
            same(np.asarray(one(np.ones(3, np.float32))), np.full(3, len(names), np.float32))
            same(
                np.asarray(loop_jit(make())(np.ones(3, np.float32))),
                np.full(3, len(names), np.float32),
            )
    same(one(X), X * 0.0)


def test_metadata_and_placement_of_computations():
    from jax.experimental import xla_metadata
    from jax.experimental.compute_on import compute_on

    def make():
        return lambda x: jnp.sin(x)

    contexts = [
        contextlib.nullcontext,
        lambda: xla_metadata.set_xla_metadata(k="1"),
        lambda: xla_metadata.set_xla_metadata(k="2"),
        contextlib.nullcontext,
    ]
    with contextlib.suppress(TypeError):  # since 0.12 it decorates functions
        with compute_on("device_host"):
            contexts.insert(3, lambda: compute_on("device_host"))
    one = loop_jit(make())
    for context in contexts:
        with context():
            lowered = jax.jit(lambda x: one(x)).lower(X).as_text()
            fresh = jax.jit(lambda x: loop_jit(make())(x)).lower(X).as_text()
            want = jax.jit(lambda x: jax.jit(make())(x)).lower(X).as_text()
        for text in (lowered, fresh):
            for word in ('k = "1"', 'k = "2"', "_xla_compute_type", "mhlo.frontend_attributes"):
                assert (word in text) == (word in want), word


def test_disabled_jit():
    calls = []

    def make():
        def f(x):
            calls.append(type(x))
            return x * 2.0

        return f

    one = loop_jit(make())
    one(X), one(X)
    with jax.disable_jit():
        calls.clear()
        one(X), one(X)
        loop_jit(lambda x: x if x[0] > 0 else -x)(X)
        assert len(calls) == 2 and not any(issubclass(c, jax.core.Tracer) for c in calls)
        assert loopjit.lax.while_loop(lambda x: bool(x < 3), lambda x: x + 1, 0) == 3
    same(one(X), X * 2.0)


def test_nans():
    def make():
        return lambda x: x / (x - x)

    one = loop_jit(make())
    one(X)
    for _ in range(2):
        with jax.debug_nans(True):
            with pytest.raises(FloatingPointError):
                one(X * 0.0)
            with pytest.raises(FloatingPointError):
                loop_jit(make())(X * 0.0)
        assert np.isnan(one(X * 0.0)).all()
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError):
            one(X * 0.0)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert np.isnan(one(X * 0.0)).all()


def test_leaks():
    leaked = []

    def make():
        def f(x):
            leaked.append(x)
            return x * 2.0

        return f

    loop_jit(make())(X)
    with jax.checking_leaks(), pytest.raises(Exception, match="[Ll]eak"):
        loop_jit(make())(X)
    leaked.clear()
    same(loop_jit(make())(X), X * 2.0)


def test_compile_time_evaluation():
    def outer(x):
        with jax.ensure_compile_time_eval():
            n = loop_jit(lambda a: a.sum())(jnp.arange(3))
            m = loopjit.lax.fori_loop(0, 3, lambda i, c: c + i, 0)
            assert int(n) == 3 and int(m) == 3
        return loop_jit(lambda x: x * int(n))(x)

    for _ in range(2):
        same(jax.jit(outer)(X), X * 3.0)
        same(outer(X), X * 3.0)


@pytest.mark.parametrize(
    "inside", [lambda f: f, jax.jit, jax.vmap, lambda f: lambda x: lax.map(f, x)]
)
def test_the_same_function_inside_and_outside_of_transformations(inside):
    def make():
        return lambda x: jnp.sin(x) * jnp.arange(1.0, 2.0)[0]

    one = loop_jit(make())
    for _ in range(2):
        same(inside(one)(XS), inside(make())(XS))
        same(one(XS), make()(XS))
        same(jax.grad(lambda x: inside(one)(x).sum())(XS), jax.grad(lambda x: make()(x).sum())(XS))
        same(jax.jit(jax.grad(lambda x: one(x).sum()))(XS), jax.grad(lambda x: make()(x).sum())(XS))


def test_contexts_inside_of_the_function():
    def make(impl):
        def f(x):
            with jax.default_prng_impl(impl):
                return jax.random.bits(jax.random.key(1))

        return f

    for impl in ("threefry2x32", "rbg", "threefry2x32"):
        same(loop_jit(make(impl))(X), make(impl)(X))


def test_a_context_that_repeats_hits():
    f = loop_jit(_bits())
    for _ in range(2):
        f(X)
        with jax.default_prng_impl("rbg"):
            f(X)
            loop_jit(_bits())(X)
        with jax.enable_x64(True):
            f(X)
    with counting() as n:
        f(X)
        with jax.default_prng_impl("rbg"):
            f(X)
            loop_jit(_bits())(X)
        with jax.enable_x64(True):
            f(X)
    assert n.compiles == 0


# Boolean settings that are in no key: none of them changes what is traced, lowered or computed.
_HARMLESS = (
    "jax2tf_ serialization export captured_constants leaked_clients log_ explain_ distributed"
    " persistent_cache compilation_cache in_locations share_binary pgle disallow_mesh no_tracing"
    " unsafe_xla_runtime_errors thread_guard recoverability preemption num_cpu topology pprint"
    " use_cpp_shard_args unzip_debug_locations"
).split()


def test_every_setting_is_in_a_key_or_known_to_be_harmless():
    states = compat.find_private("jax._src.config.config_states") or {}
    forgotten = []
    for name, state in states.items():
        value = getattr(jax.config, name, None)
        known = name in compat._EXTRA or name in compat._BYPASS
        if known or type(value) is not bool or any(word in name for word in _HARMLESS):
            continue
        before = compat.trace_context()
        try:
            with state(not value):
                after = compat.trace_context()
        except Exception:  # a setting of the process, or one that is not for this machine
            continue
        if before == after:
            forgotten.append(name)
    assert not forgotten
