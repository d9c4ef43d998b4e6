"""With ``install()`` results, errors and side effects are what they are without it."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installs import XS, X, arr, check, look, outcome, result
from jax import lax
from jax.experimental import checkify
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from traps import aligned

import loopjit
from counting import counting


def check_same(run, *args, exact=True, times=2, fails=False):
    """The same outcome with and without install, the first time and later."""
    want = (outcome if fails else result)(run, *args)
    with loopjit.installed():
        for _ in range(times):
            check(outcome(run, *args), want, exact)
    return want


# --------------------------------------------------------------------------------------------
# Where results are
# --------------------------------------------------------------------------------------------

ROWS = np.arange(24.0, dtype=np.float32).reshape(8, 3)


def _split():
    return NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))


def _whole():
    return NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P())


PLACES = {
    "numpy": lambda a: a,
    "uncommitted": jnp.asarray,
    "committed": lambda a: jax.device_put(a, jax.devices()[0]),
    "elsewhere": lambda a: jax.device_put(a, jax.devices()[3]),
    "uncommitted elsewhere": lambda a: _uncommitted(a, 3),
    "split": lambda a: jax.device_put(a, _split()),
    "replicated": lambda a: jax.device_put(a, _whole()),
}


def _uncommitted(a, n):
    with jax.default_device(jax.devices()[n]):
        return jnp.asarray(a)


def _attributes(out):
    return [
        (a.dtype, a.weak_type, a.shape, a.committed, a.sharding, type(a.sharding))
        for a in jax.tree.leaves(out)
    ]


@pytest.mark.parametrize("of_capture", PLACES)
@pytest.mark.parametrize("of_argument", PLACES)
def test_placement_of_jitted_functions(of_argument, of_capture):
    def run(k):
        x, w = PLACES[of_argument](ROWS), PLACES[of_capture](ROWS + np.float32(k))
        f = jax.jit(lambda x: (x * w, w, jnp.sin(w), x + 1, (x * w).sum(0), w.T @ x))
        return f(x), f(x)

    wants = [result(run, k) for k in (1, 2)]
    with loopjit.installed():
        for k, want in zip((1, 2, 1), (*wants, wants[0]), strict=True):
            check(outcome(run, k), want, exact=False)


@pytest.mark.parametrize("of_capture", PLACES)
@pytest.mark.parametrize("of_argument", ["uncommitted", "elsewhere", "split"])
def test_placement_of_loops(of_argument, of_capture):
    def run():
        x, w = PLACES[of_argument](ROWS), PLACES[of_capture](ROWS + 1)
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * w), (0, x))

    check_same(run, fails=True)  # where two of them are committed


@pytest.mark.parametrize("order", ["", "r"])
@pytest.mark.parametrize("place", PLACES)
def test_one_function_with_arguments_in_other_places(place, order):
    """The same jitted object, whose captured arrays follow the arguments."""

    def run():
        w = jnp.asarray(ROWS)
        f = jax.jit(lambda x: (x * w, w, jnp.sin(w), w.T @ x))
        places = [PLACES["uncommitted"], PLACES[place], PLACES["elsewhere"], PLACES["numpy"]]
        return [f(put(ROWS)) for put in (reversed(places) if order else places)]

    check_same(run, exact=False)


@pytest.mark.parametrize("n", [0, 2])
def test_the_default_device_changes(n):
    def run():
        w = jnp.asarray(ROWS)
        f, g = (jax.jit(lambda x: x * w) for _ in range(2))
        out = [f(ROWS)]
        with jax.default_device(jax.devices()[n]):
            out += [f(ROWS), g(ROWS), lax.map(lambda x: x * w[0], ROWS)]
        return [*out, f(ROWS), g(ROWS)]

    check_same(run, exact=False)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_captured_arrays_under_a_mesh(kind):
    types = (getattr(jax.sharding.AxisType, kind),)

    def run(spec):
        w = arr(np.arange(8.0))
        mesh = jax.make_mesh((8,), ("a",), axis_types=types)
        x = np.ones(8, np.float32)
        with jax.set_mesh(mesh):
            sharding = NamedSharding(mesh, spec)
            inner = lambda x: lax.with_sharding_constraint(x * w, sharding)
            f = jax.jit(inner if kind == "Auto" else lambda x: x * w)
            return f(x), jax.jit(lambda x: (x * w, w))(jax.device_put(x, sharding))

    for spec in (P(), P("a"), P()):
        check_same(run, spec, exact=False)


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")])
def test_constraints_inside(spec):
    """Nothing but the program itself says that it runs on several devices."""

    def run(k):
        w = arr(np.full((8, 8), k))
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), spec)
        inner = lambda x: lax.with_sharding_constraint(x * w, sharding)
        f = jax.jit(lambda x: (inner(x), w, w @ x))
        g = jax.jit(lambda x: lax.cond(x[0, 0] > 0, inner, lambda x: x - w, x))
        x = np.ones((8, 8), np.float32)
        return f(x), f(x), outcome(g, x)[:1], lax.fori_loop(0, 2, lambda i, c: inner(c), x)

    wants = [result(run, k) for k in (2.0, 3.0)]
    with loopjit.installed():
        for i in (0, 1, 0):
            check(outcome(run, (2.0, 3.0)[i]), wants[i], exact=False)


def test_arrays_in_another_memory():
    kinds = {m.kind for m in jax.devices()[0].addressable_memories()}
    other = sorted(kinds - {jax.devices()[0].default_memory().kind})
    if not other:
        pytest.skip("there is one memory")

    def run():
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=other[0])
        w = jax.device_put(arr([1.0, 2.0, 3.0]), place)
        f = jax.jit(lambda x: (x * 2, w))
        return f(X), f(X)

    check_same(run)


def test_shardings_that_the_compiler_chooses():
    def run():
        w = jax.device_put(ROWS, _split())
        x = jax.device_put(ROWS, _split())
        total = jax.jit(lambda x: (x * w).sum(0))
        return total(x), jax.jit(lambda x: x.T @ x)(x), jax.jit(lambda x: jnp.ones(8) * x.sum())(x)

    check_same(run, exact=False)


@pytest.mark.parametrize("kind", ["in", "out", "both"])
def test_shardings_that_are_asked_for(kind):
    def run(sharding):
        w = arr(ROWS)
        options = {}
        if kind != "out":
            options["in_shardings"] = sharding
        if kind != "in":
            options["out_shardings"] = sharding
        f = jax.jit(lambda x: (x * w, w, jnp.sin(w), x @ (w.T @ x)), **options)
        return f(ROWS), f(ROWS)

    for sharding in (_split(), _whole()):
        check_same(run, sharding, exact=False)


def test_weak_types():
    def run():
        w, v = jnp.asarray(2.0), jnp.asarray(2)
        return (
            jax.jit(lambda x: (x * w, w, v, w * v, 1.0, 2, True))(X),
            jax.jit(lambda x: (x * w, v))(1),
            jax.jit(lambda: (w, v))(),
            lax.scan(lambda c, _: (c * 1.0, w * 1), 1.0, None, length=2),
            lax.cond(True, lambda: w, lambda: 2.0),
        )

    check_same(run, exact=False)


def test_results_that_are_arguments_or_captures():
    """JAX may hand on an array; nobody must be able to delete one of ours."""
    w = arr([1.0, 2.0])

    def run():
        x = arr([3.0, 4.0])
        f = jax.jit(lambda x: (x, w, w, x))
        first, second = f(x), f(x)
        for out in first:
            out.delete()
        return second, f(x), w, lax.map(lambda _: w, X)

    check_same(run, times=3)


# --------------------------------------------------------------------------------------------
# Captured arrays that change after the first call
# --------------------------------------------------------------------------------------------


def _deletes(w):
    w.delete()


def _donates(w):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.jit(lambda w: w + 1, donate_argnums=0)(w)


@pytest.mark.parametrize("end", [_deletes, _donates])
@pytest.mark.parametrize("loop", [False, True])
def test_a_captured_array_is_gone(end, loop):
    def run(k):
        w = jnp.asarray(np.full(3, k, np.float32)) + 0
        body = (lambda x: lax.map(lambda y: y * w, x)) if loop else (lambda x: x * w)
        f, g = jax.jit(body), jax.jit(lambda x: body(x))
        out = [f(X)]
        end(w)
        assert w.is_deleted()
        return [*out, outcome(f, X), outcome(f, XS), outcome(g, X)]

    wants = [run(k) for k in (2.0, 3.0)]
    with loopjit.installed():
        for k, want in zip((2.0, 3.0, 2.0), (*wants, wants[0]), strict=True):
            first, *later = run(k)
            check(look(first), look(want[0]), exact=False)
            for got, expected in zip(later, want[1:], strict=True):
                check(got, expected, exact=False)


def test_captured_numpy_memory_is_overwritten():
    def run(k):
        w = aligned([k] * 16)
        shared = jax.dlpack.from_dlpack(aligned([k] * 16))
        f = jax.jit(lambda x: (x * w[:3], jnp.asarray(w)[:3] * x, np.float32(w[0]) * x))
        g = jax.jit(lambda x: x * w)
        out = [f(X), g(np.ones(16, np.float32))]
        w[:] = 7.0
        fresh = jax.jit(lambda x: x * w)
        out += [f(X), g(np.ones(16, np.float32)), fresh(np.ones(16, np.float32))]
        w[:] = 8.0
        return [*out, fresh(np.ones(16, np.float32)), fresh(np.ones((1, 16), np.float32))]

    for k in (2.0, 3.0, 7.0):
        check_same(run, k, exact=False)


def test_an_array_that_shares_numpy_memory():
    """Its copy is made when the function is called, not some time later."""

    def run(k):
        host = aligned([k] * 3_000_000)
        w = jax.dlpack.from_dlpack(host)
        f = jax.jit(lambda x: x * w[:3] + w[-3:])
        out = [f(X)]
        host[:] = 7.0
        return [*out, f(X)]

    for k in (2.0, 3.0):
        check_same(run, k, exact=False)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16])
def test_a_captured_array_with_another_layout(dtype):
    format = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))

    def run(k):
        c = jax.device_put(np.arange(12).reshape(3, 4).astype(dtype) + dtype(k), format)
        f = jax.jit(lambda x: (x + c, c))
        x = np.ones((3, 4), dtype)
        return f(x), f(x)

    for k in (2.0, 3.0):
        check_same(run, k)


MESH_OF_ONE = Mesh(np.array(jax.devices()[-1:]), ("a",))


@pytest.mark.parametrize("spec", [P(), P("a")])
@pytest.mark.parametrize("where", ["argument", "result", "inside", "below", "context"])
def test_a_mesh_of_one_device(where, spec):
    """Results say by which mesh they are distributed, and a captured array must not change that."""
    sharding = NamedSharding(MESH_OF_ONE, spec)

    def run(k):
        c = jax.device_put(np.full(4, k, np.float32), jax.devices()[-1])
        x = jax.device_put(np.ones(4, np.float32), sharding if where == "argument" else None)
        f = lambda x: x + c
        if where == "inside":
            f = lambda x: jax.lax.with_sharding_constraint(x + c, sharding)
        if where == "below":
            f = lambda x: jax.jit(lambda x: x * c, out_shardings=sharding)(x + c)
        options = {"out_shardings": sharding} if where == "result" else {}
        with jax.set_mesh(MESH_OF_ONE) if where == "context" else contextlib.nullcontext():
            return jax.jit(lambda x: f(x), **options)(x)

    for k in (2.0, 3.0):
        check_same(run, k)


def test_the_same_array_captured_and_donated():
    def run():
        c = jnp.asarray(np.ones(1000, np.float32)) + 0
        f = jax.jit(lambda x: x * 2 + c, donate_argnums=0)
        first = f(c)
        return first, c.is_deleted(), f(jnp.asarray(np.ones(1000, np.float32)) + 0)

    check_same(run)


def test_donation_deletes_what_it_deletes():
    def run(k):
        w = arr([k, 1, 1])
        f = jax.jit(lambda x, y: (x * w, y + 1), donate_argnums=(0, 1))
        out = []
        for _ in range(3):
            x, y = X + 0, X + 1
            out.append((f(x, y), x.is_deleted(), y.is_deleted()))
        return out, w

    for k in (2.0, 3.0):
        check_same(run, k, exact=False)


def _warnings(run):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [(w.category, str(w.message)) for w in seen]


def _donates_in_vain():
    w = arr(2.0)
    jax.jit(lambda x: (x * w).sum(), donate_argnums=0)(X + 0)


def _captures_much():
    w = arr(np.ones(1000))
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 1000)
    try:
        jax.jit(lambda x: x * w)(np.ones(1000, np.float32))
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)


@pytest.mark.parametrize("run", [_donates_in_vain, _captures_much])
def test_warnings_come_each_time(run):
    want = _warnings(run)
    assert len(want) == 1
    with loopjit.installed():
        for _ in range(3):
            assert _warnings(run) == want


# --------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------


def _carry_of_another_type():
    return lax.while_loop(lambda c: c < 3, lambda c: jnp.asarray(c, np.float32), 0)


def _carry_of_another_shape():
    return lax.scan(lambda c, x: (jnp.stack([c, c]), x), X[0], X)


def _carry_of_another_tree():
    return lax.fori_loop(0, 2, lambda i, c: (c, c), X)


def _branches_of_other_types():
    return lax.cond(True, lambda x: x, lambda x: x[0], X)


def _condition_that_is_no_bool():
    return lax.while_loop(lambda c: c, lambda c: c, X)


def _lengths_that_differ():
    return lax.scan(lambda c, x: (c, x), 0, (X, X[:2]))


def _reverse_mode_through_while():
    return jax.grad(lambda x: lax.while_loop(lambda c: c < 3, lambda c: c * 2, x))(X[0])


def _concretization():
    return jax.jit(lambda x: x if x[0] > 0 else -x)(X)


def _conversion():
    return jax.jit(lambda x: np.asarray(x))(X)


def _size():
    return jax.jit(lambda n: jnp.zeros(n))(3)


def _no_array():
    return jax.jit(lambda x: x)("text")


def _no_array_beside_a_capture():
    return jax.jit(lambda x, y: (x, X))(X, object())


def _unhashable_static():
    return jax.jit(lambda x, n: x, static_argnums=1)(X, [1])


def _missing_argument():
    return jax.jit(lambda x, y: x)(X)


def _no_array_returned():
    return jax.jit(lambda x: "text")(X)


def _raises():
    def f(x):
        raise KeyError("mine")

    return jax.jit(f)(X)


def _devices_that_differ():
    return jax.jit(lambda x, y: x + y)(*_on(1, 2))


def _devices_that_differ_beside_a_capture():
    w = arr([1.0, 2.0, 3.0])
    return jax.jit(lambda x, y: x + y * w)(*_on(1, 2))


def _devices_that_differ_beside_two_captures():
    w, v = arr([1.0, 2.0, 3.0]), np.ones(3, np.float32)
    return jax.jit(lambda first, second, third: first + third * w + v)(*_on(1, 0, 2))


def _devices_that_differ_in_a_loop():
    x, y = _on(1, 2)
    return lax.fori_loop(0, 2, lambda i, c: (c[0] + c[1], c[1]), (x, y))


def _on(*numbers):
    return [jax.device_put(X, jax.devices()[n]) for n in numbers]


def _out_of_place():
    w = arr([1.0, 2.0, 3.0])
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("a",)), P())
    return jax.jit(lambda x: x * w, in_shardings=sharding)(*_on(5))


def _does_not_divide():
    w = arr([1.0, 2.0, 3.0])
    return jax.jit(lambda x: x * w, in_shardings=_split())(X)


def _deleted_argument():
    x = X + 0
    x.delete()
    w = arr(2.0)
    return jax.jit(lambda x: x * w)(x)


def _deleted_capture():
    w = X + 0
    w.delete()
    return jax.jit(lambda x: x * w)(X)


def _deleted_capture_of_a_loop():
    w = X + 0
    w.delete()
    return lax.map(lambda x: x * w, X)


def _fails_on_host():
    def cb(v):
        raise KeyError("on the host")

    return jax.jit(lambda x: jax.pure_callback(cb, jax.ShapeDtypeStruct((3,), np.float32), x))(X)


def _wrong_shape_on_host():
    return jax.jit(
        lambda x: jax.pure_callback(
            lambda v: np.zeros(2, np.float32), jax.ShapeDtypeStruct((3,), np.float32), x
        )
    )(X)


def _unknown_compiler_option():
    return jax.jit(lambda x: x * 2, compiler_options={"xla_no_such_option": 1})(X)


def _leaked_tracer():
    kept = []
    jax.jit(lambda x: (kept.append(x), x)[1])(X)
    return jax.jit(lambda x: x + kept[0])(X)


def _closed_over_ref():
    ref = jax.new_ref(arr([1.0, 2.0, 3.0]))

    def f(x):
        ref[...] = ref[...] + x
        return ref[...] * 2

    out = [jax.jit(f)(X), jax.jit(lambda x: f(x))(X), jax.jit(lambda x: f(x))(X)]
    return [*out, ref[...]]


def _ref_argument():
    ref = jax.new_ref(arr([1.0, 2.0, 3.0]))

    def f(ref, x):
        ref[...] = ref[...] * x

    jax.jit(f)(ref, X)
    jax.jit(lambda r, x: f(r, x))(ref, X)
    return ref[...]


def _ref_inside():
    def f(x):
        ref = jax.new_ref(x)
        ref[0] = 5.0
        return ref[...]

    return jax.jit(f)(X), lax.map(f, XS)


def _checkify(v):
    def f(x):
        checkify.check(x[0] > v, "too small: {x}", x=x[0])
        return x * 2

    error, out = jax.jit(checkify.checkify(f))(X)
    return outcome(error.throw), out


def _checkified_loop():
    def f(x):
        return lax.fori_loop(0, 2, lambda i, c: (checkify.check(i < 1, "late {i}", i=i), c)[1], x)

    error, out = checkify.checkify(f)(X)
    return outcome(error.throw), out


ERRORS = [
    value for name, value in list(globals().items()) if name.startswith("_") and callable(value)
]
ERRORS = ERRORS[ERRORS.index(_carry_of_another_type) :]
ERRORS = [f for f in ERRORS if f not in (_on, _checkify)]


@pytest.mark.parametrize("run", ERRORS)
def test_errors(run):
    if run in (_fails_on_host, _wrong_shape_on_host):  # with traces of the stack inside
        want = outcome(run)
        with loopjit.installed():
            for _ in range(2):
                kind, text = outcome(run)
                assert kind is want[0] and text.splitlines()[0] == want[1].splitlines()[0]
                assert ("on the host" in text) == ("on the host" in want[1])
        return
    check_same(run, exact=False, fails=True)


@pytest.mark.parametrize("v", [0.0, 5.0])
def test_checkify(v):
    check_same(_checkify, v)


@pytest.mark.parametrize("run", ERRORS)
def test_what_follows_an_error_is_right(run):
    with loopjit.installed():
        outcome(run)
        w = arr(2.0)
        np.testing.assert_allclose(jax.jit(lambda x: x * w)(X), X * 2)
        np.testing.assert_allclose(lax.map(lambda x: x * w, X), X * 2)


def test_a_callback_that_fails_at_first():
    fails = [True]

    def make():
        def cb(v):
            if fails[0]:
                raise KeyError("on the host")
            return np.asarray(v) * 2

        return jax.jit(lambda x: jax.pure_callback(cb, jax.ShapeDtypeStruct((3,), np.float32), x))

    with loopjit.installed():
        f = make()
        with pytest.raises(Exception, match="on the host"):
            jax.block_until_ready(f(X))
        fails[0] = False
        np.testing.assert_array_equal(f(X), X * 2)
        np.testing.assert_array_equal(make()(X), X * 2)


# --------------------------------------------------------------------------------------------
# What else can be seen
# --------------------------------------------------------------------------------------------


def test_stages():
    w = arr(2.0)
    make = lambda: jax.jit(lambda x: jnp.sin(x) * w)
    want = make().lower(X).as_text(), str(jax.make_jaxpr(make())(X)), jax.eval_shape(make(), X)
    with loopjit.installed():
        make()(X)
        f = make()
        f(X)
        for g in (f, make()):
            assert g.lower(X).as_text() == want[0]
            assert str(jax.make_jaxpr(g)(X)) == want[1]
            assert jax.eval_shape(g, X) == want[2]
            np.testing.assert_allclose(g.lower(X).compile()(X), make()(X), rtol=1e-6)


def test_what_was_called_is_not_compiled_again():
    def run():
        f = jax.jit(lambda x: jnp.sin(x) * 2)
        f(X)
        with counting() as n:
            f.lower(X).compile()(X)
        return n.compiles

    want = run()
    with loopjit.installed():
        assert run() <= want


def test_traces_are_made_as_ever():
    def run():
        log = []
        f = jax.jit(lambda x: (log.append(1), x * 2)[1])
        f(X), f(X), f(XS)
        lax.fori_loop(0, 2, lambda i, c: (log.append(2), c)[1], X)
        return log

    want = run()
    with loopjit.installed():
        assert run() == run() == want


def test_the_state_of_a_jitted_object():
    def run():
        w = arr(2.0)
        f = jax.jit(lambda x: x * w)
        f(X), f(X), f(XS)
        size = f._cache_size()
        f.clear_cache()
        return size, f._cache_size(), f(X), f._cache_size()

    check_same(run, exact=False)


def test_profiles_name_the_first_function():
    def named(name):
        def f(x):
            return jnp.sin(x) * 3

        f.__name__ = name
        return f

    with loopjit.installed():
        first, second = jax.jit(named("first")), jax.jit(named("second"))
        first(X)
        with counting() as n:
            second(X)
        assert n.compiles == 0
        # Texts are made from the function that is asked.
        assert "jit_second" in second.lower(X).as_text()


def test_random_numbers():
    def run(seed):
        key = jax.random.key(seed)
        draw = jax.jit(lambda n: jax.random.normal(jax.random.fold_in(key, n), (3,)))
        loop = lax.scan(
            lambda k, _: (jax.random.split(k)[0], jax.random.bits(k)), key, None, length=3
        )
        return draw(1), loop

    for seed in (0, 1):
        check_same(run, seed, exact=False)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_empty_and_single(size):
    def run():
        xs = np.ones((size, 2), np.float32)
        w = arr(2.0)
        return (
            lax.map(lambda x: x * w, xs),
            jax.jit(lambda x: x * w)(xs),
            lax.fori_loop(0, size, lambda i, c: c * w, X),
        )

    check_same(run)


def test_nothing_to_compute():
    def run():
        w = arr(2.0)
        return (
            jax.jit(lambda: None)(),
            jax.jit(lambda x: None)(X),
            jax.jit(lambda x: (w, w))(X),
            jax.jit(lambda x: x)(X),
            jax.jit(lambda: 3)(),
            jax.jit(lambda t: t)({"a": X, "b": (None, 2)}),
        )

    check_same(run)


def test_x64():
    def run():
        with jax.enable_x64(True):
            w = jnp.asarray(np.array([1.0, 2.0, 3.0]))
            return jax.jit(lambda x: x * w + 1)(2), lax.map(lambda y: y * w, w)

    check_same(run)
    with jax.enable_x64(True):
        w = jnp.asarray(np.array([1.0, 2.0, 3.0]))
    check_same(lambda: jax.jit(lambda x: (x * w[0], w))(2.0), fails=True)  # a warning


def test_pmap_and_shard_map():
    def run(k):
        w = arr(k)
        mesh = Mesh(np.array(jax.devices()), ("a",))
        f = jax.shard_map(lambda x: lax.psum(x * w, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
        return jax.jit(f)(ROWS), f(ROWS)

    for k in (2.0, 3.0):
        check_same(run, k, exact=False)
