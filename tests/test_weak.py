"""Programs that differ in weak types alone are compiled once, and others are not taken for such."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from counting import counting
from loopjit import loop_jit
from loopjit.programs import weak

ONE = jnp.float32(1.0)


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def follow(step, first, times=4):
    """Feeds a step its own output; the compiles of each call, and whether types are those of jax.jit."""
    f, j = loop_jit(step), jax.jit(step)
    ours, stock, compiles = first, first, []
    for _ in range(times):
        with counting() as n:
            ours = jax.block_until_ready(f(ours))
        compiles.append(n.compiles)
        stock = j(stock)
        assert types(ours) == types(stock)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, stock)
    return compiles


STEPS = {
    "a sum": (lambda x: jnp.sin(x) + np.float32(1.0), 1.0),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i, x) + np.float32(1.0), 1.0),
    "two leaves": (lambda t: (t[0] * t[1] + np.float32(1.0), t[1] - np.float32(2.0)), (1.0, 2.0)),
    "a captured array": (lambda x: x * 0.5 + ONE, 1.0),
    "an int": (lambda n: n * 2 + np.int32(1), 3),
    "complex": (lambda z: z * 1j + np.complex64(1.0), 1.0 + 2.0j),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_fed_its_own_output_is_compiled_once(name):
    assert follow(*STEPS[name]) == [1, 0, 0, 0]


def test_a_weak_array_is_as_good_as_a_number():
    assert follow(STEPS["a sum"][0], jnp.asarray(1.0)) == [1, 0, 0, 0]


def test_from_strong_to_weak():
    f = loop_jit(STEPS["a sum"][0])
    strong = f(ONE)
    with counting() as n:
        out = f(1.0)
    assert n.compiles == 0 and not out.weak_type
    np.testing.assert_array_equal(out, strong)


def test_a_fresh_equal_step():
    def make():
        return lambda x: x * 0.5 + ONE

    x = loop_jit(make())(1.0)
    with counting() as n:
        loop_jit(make())(x)
        loop_jit(make())(2.0)
    assert n.compiles == 0


def test_results_that_stay_weak_are_another_program():
    """The type of the result is part of what is compiled."""
    f = loop_jit(lambda x: x * 2.0)
    assert f(1.0).weak_type and not f(ONE).weak_type
    assert f(1.0).weak_type and not f(ONE).weak_type


def test_another_input_is_used():
    """Inputs that are not used are in no program's text; here the texts are the same."""
    f = loop_jit(lambda a, b: (a if jax.typeof(a).weak_type else b) + np.float32(1.0))
    for _ in range(2):
        assert float(f(1.0, 2.0)) == 2.0
        assert float(f(ONE, jnp.float32(2.0))) == 3.0
        assert float(f(ONE, 2.0)) == 3.0
        assert float(f(1.0, jnp.float32(2.0))) == 2.0


def test_promotion_that_depends_on_it():
    f = loop_jit(lambda x, n: x * n + np.float32(1.0))
    half = jnp.ones(2, jnp.bfloat16)
    for n in (3.0, jnp.float32(3.0), 3.0):
        assert jax.typeof(f(half, n)) == jax.typeof(half * n + np.float32(1.0))
        np.testing.assert_array_equal(f(half, n), half * n + np.float32(1.0))


def test_programs_that_ask_for_it():
    f = loop_jit(lambda x: (x if jax.typeof(x).weak_type else x + 1.0) + np.float32(1.0))
    for _ in range(2):
        assert (float(f(1.0)), float(f(ONE))) == (2.0, 3.0)


def test_transformations_of_both():
    f = loop_jit(STEPS["a sum"][0])
    y = f(1.0)
    f(y)
    for x in (0.5, jnp.float32(0.5)):
        np.testing.assert_allclose(jax.grad(f)(x), jnp.cos(0.5), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(f)(x), jnp.sin(0.5) + 1.0, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(jnp.ones(3)), np.full(3, jnp.sin(1.0) + 1.0), rtol=1e-6)


def test_other_settings_are_other_programs():
    f = loop_jit(lambda x: x * np.float32(0.1) + np.float32(1.0))
    with jax.enable_x64(True):
        assert types(f(1.0)) == types(jax.jit(f.__wrapped__)(1.0))
        assert types(f(jnp.float32(1.0))) == types(jax.jit(f.__wrapped__)(jnp.float32(1.0)))
    assert types(f(ONE)) == types(jax.jit(f.__wrapped__)(ONE))


def test_an_array_on_another_device():
    f = loop_jit(STEPS["a sum"][0])
    f(1.0)
    there = jax.device_put(ONE, jax.devices()[1])
    assert f(there).devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(f(there), f(1.0))


def test_donated_inputs():
    f = loop_jit(STEPS["a sum"][0], donate_argnums=0)
    x = f(1.0)
    y = f(x)
    assert x.is_deleted() and float(f(y)) > 0.0


# ---------------------------------------------------------------------------------------------
# The text that is compared


class Lowered:
    def __init__(self, text):
        self._text = text

    def as_text(self):
        return self._text


def same(a, b):
    return weak._text(Lowered(a)) == weak._text(Lowered(b))


PLAIN = """
  func.func public @main(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.sine %arg0 : tensor<f32>
    %1 = stablehlo.add %0, %arg0 : tensor<f32>
    return %1 : tensor<f32>
  }"""


def test_conversions_to_the_same_type_do_not_count():
    converted = PLAIN.replace(
        "%1 = stablehlo.add %0,",
        "%1 = stablehlo.convert %0 : tensor<f32>\n    %2 = stablehlo.add %1,",
    )
    assert same(PLAIN, converted.replace("return %1", "return %2"))
    assert not same(PLAIN, converted)  # the conversion is returned, not the sum


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add %0, %arg0", "add %arg0, %0"),
        ("return %1", "return %0"),
        ("sine", "cosine"),
        ("tensor<f32>", "tensor<f64>"),
        (
            "%0 = stablehlo.sine %arg0 : tensor<f32>",
            "%0 = stablehlo.convert %arg0 : (tensor<f32>) -> tensor<f32>",
        ),
    ],
)
def test_everything_else_counts(old, new):
    assert not same(PLAIN, PLAIN.replace(old, new))


REGIONS = """
  func.func public @main(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = "stablehlo.case"(%arg0) ({
      %1 = stablehlo.convert %arg0 : tensor<f32>
      %2 = stablehlo.sine %1 : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }, {
      %1 = stablehlo.cosine %arg0 : tensor<f32>
      %2 = stablehlo.sine %1 : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }) : (tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }"""


def test_names_are_used_again_in_other_regions():
    """The second region has a %1 of its own, which is not what was converted in the first."""
    other = REGIONS.replace("%1 = stablehlo.cosine %arg0", "%1 = stablehlo.tan %arg0")
    assert same(REGIONS, REGIONS) and not same(REGIONS, other)
    skipping = REGIONS.replace(
        "%2 = stablehlo.sine %1 : tensor<f32>\n      stablehlo.return %2 : tensor<f32>\n    })",
        "%2 = stablehlo.sine %arg0 : tensor<f32>\n      stablehlo.return %2 : tensor<f32>\n    })",
    )
    assert not same(REGIONS, skipping)


def test_texts_of_jax_are_understood():
    def text(x):
        step = lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 0.5, c), x + np.float32(1.0), length=3)
        return weak._text(jax.jit(step).lower(x))

    assert text(1.0) == text(ONE)
    assert text(1.0) != text(jnp.ones(2))


def test_parts_of_several_results_are_not_mixed_up():
    text = """
    %0:2 = func.call @f(%arg0) : (tensor<f32>) -> (tensor<f32>, tensor<f32>)
    %1 = stablehlo.convert %0#0 : tensor<f32>
    return %1 : tensor<f32>"""
    plain = text.replace("    %1 = stablehlo.convert %0#0 : tensor<f32>\n", "")
    assert same(text, plain.replace("return %1", "return %0#0"))
    assert not same(text, plain.replace("return %1", "return %0#1"))


def test_nothing_is_shared_where_jax_is_not_as_expected(monkeypatch):
    monkeypatch.setattr("loopjit.compat.share_executable", lambda have, want: None)
    compiles = follow(functools.partial(STEPS["a sum"][0]), 1.0)
    assert compiles == [1, 1, 0, 0]
