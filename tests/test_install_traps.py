"""The traps of ``loop_jit``, set for JAX itself with ``install()``: fresh functions that differ in one thing.

JAX traces each of them, so a wrong hit could only come from what is compared after the trace.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
import test_traps_captures
import test_traps_functions
from installs import XS, X, check, look, outcome
from jax import lax

import loopjit

DIFFERENCES = {**test_traps_functions.DIFFERENCES, **test_traps_captures.VALUES}
CHANGES = {
    f"{module.__name__}.{name}": make
    for module in (test_traps_functions, test_traps_captures)
    for name, make in module.CHANGES.items()
}


def _stacked(outs):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


# How a fresh function is run, and what gives the same without a program for each function.
ENTRIES = {
    "jit": (lambda f: jax.jit(lambda x: f(x))(X), lambda f: f(X)),
    "while": (
        lambda f: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, X))[1],
        lambda f: f(X),
    ),
    "map": (lambda f: lax.map(f, XS), lambda f: _stacked(map(f, XS))),
    "grad": (
        lambda f: jax.grad(lambda x: jax.jit(lambda x: f(x).sum())(x))(X),
        lambda f: jax.grad(lambda x: f(x).sum())(X),
    ),
    "vmap": (lambda f: jax.vmap(jax.jit(lambda x: f(x)))(XS), lambda f: jax.vmap(f)(XS)),
    "cond": (lambda f: lax.cond(True, f, lambda x: -f(x), X), lambda f: f(X)),
}
_CASES = list(itertools.product(DIFFERENCES, ENTRIES))


@pytest.mark.parametrize(("name", "entry"), _CASES)
def test_functions_that_differ_in_one_thing(name, entry):
    case, (entry, plain) = DIFFERENCES[name], ENTRIES[entry]
    run = lambda v: entry(case.make(v))
    wants = [outcome(lambda v: plain(case.make(v)), v) for v in case.values]
    with loopjit.installed():
        gots = [outcome(run, v) for v in (*case.values, *case.values)]
    for v, got, want in zip(case.values * 2, gots, wants * 2, strict=True):
        try:
            check(got, want, exact=False)
        except AssertionError:  # where a trace differs from plain Python
            check(got, outcome(run, v), exact=False)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes(name):
    def scenario():
        f, alter = CHANGES[name]()
        run = lambda f: look(ENTRIES["jit"][0](f))
        jitted = jax.jit(lambda x: f(x))
        seen = [run(f), look(jitted(X))]
        alter()
        return [*seen, run(f), look(jitted(X))]

    wants = scenario()
    with loopjit.installed():
        for _ in range(2):
            for got, want in zip(scenario(), wants, strict=True):
                check(got, want, exact=False)
