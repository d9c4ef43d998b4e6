"""Does ``loopjit.install()`` spare libraries what they compile again? Figures for README.rst here.

    python benchmarks/libraries.py [--json] [CASE ...]

Each case is a call as users write it, op by op, with fresh functions or objects and new data each
time, and the same hoisted by hand: one ``jax.jit`` made once, with the data as arguments. Stock JAX
and JAX with loopjit installed run in turns in one process; only ratios within a row mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import loopjit
from loopjit.__main__ import counting, duration, ratio, seconds, table

LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"
ROUNDS = 3  # of one call of stock JAX, which may take seconds, and several of all else
WARM = 2  # calls of each before anything is counted
TARGET = 1.3  # what is aimed at for installed / (tracing + by hand)

KEY = jax.random.key(0)
MATRIX = jnp.asarray(np.random.RandomState(0).randn(20, 5), jnp.float32)
BATCHES = [jnp.asarray(np.random.RandomState(k).randn(20), jnp.float32) for k in range(64)]
ONES = jnp.ones(5)

# ---------------------------------------------------------------------------------------------
# Cases

CASES = {}


def case(*modules):
    """Registers a case: given the modules, a pair of functions of the number of a call, fresh and
    by hand. Or one function of a batch, which is jitted as a whole where one hoists by hand."""

    def register(make):
        def calls():
            made = make(*map(importlib.import_module, modules))
            if isinstance(made, tuple):
                return made
            jitted = jax.jit(made)
            return lambda k: made(BATCHES[k]), lambda k: jitted(BATCHES[k])

        CASES[make.__name__] = calls

    return register


def loss(p, batch):
    return jnp.mean((MATRIX @ p - batch) ** 2) + 0.01 * jnp.sum(p**4)


@case("jax.scipy.sparse.linalg")
def cg(linalg):
    spd = MATRIX.T @ MATRIX + jnp.eye(5)
    return lambda b: linalg.cg(lambda v: spd @ v + b[0] ** 2 * v, MATRIX.T @ b)[0]


@case("jax.scipy.optimize")
def minimize_bfgs(optimize):
    return lambda b: optimize.minimize(lambda p: loss(p, b), ONES, method="BFGS").x


@case()
def lax_map():
    return lambda b: lax.map(lambda row: jnp.tanh(row * b[:5]) @ row, MATRIX)


@case("jax.experimental.ode")
def odeint(ode):
    times = jnp.linspace(0.0, 1.0, 5)
    return lambda b: ode.odeint(lambda y, t: -y * b[:5] ** 2 + jnp.sin(t), ONES, times)


@case()
def custom_root():
    def newton(f, x):
        return lax.fori_loop(0, 20, lambda i, x: x - f(x) / jax.grad(f)(x), x)

    def call(b):
        f = lambda x: x**3 + x - b.sum()
        return lax.custom_root(f, jnp.float32(1.0), newton, lambda g, y: y / g(1.0))

    return call


@case()
def custom_linear_solve():
    def richardson(matvec, b):
        return lax.fori_loop(0, 30, lambda i, x: x + 0.5 * (b - matvec(x)), jnp.zeros_like(b))

    def call(b):
        scale = 1.0 + 0.5 * jnp.tanh(b)
        return lax.custom_linear_solve(lambda v: scale * v, b, richardson, symmetric=True)

    return call


@case()
def jit_in_method():
    class Learner:
        """As in code around haiku: ``jax.jit`` in the place where it is needed."""

        def __init__(self, target):
            self.target = target

        def _loss(self, p):
            return loss(p, self.target)

        def update(self, p):
            value = jax.jit(self._loss)(p)

            @jax.jit
            def inner(p, value):
                return p - 0.1 * value * jax.grad(self._loss)(p)

            return inner(p, value)

    return lambda b: Learner(b).update(ONES)


def update_of(optimizer):
    state, value_and_grad = optimizer.init(ONES), jax.jit(jax.value_and_grad(loss))

    def call(b):
        value, grad = value_and_grad(ONES, b)
        more = dict(value=value, grad=grad, value_fn=lambda p: loss(p, b))
        return optimizer.update(grad, state, ONES, **more)[0]

    return call


@case("optax")
def optax_lbfgs(optax):
    return update_of(optax.lbfgs())  # with a zoom line search


@case("optax")
def optax_backtracking(optax):
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=10)
    return update_of(optax.chain(optax.sgd(1.0), search))


@case("jaxopt")
def jaxopt_lbfgs(jaxopt):
    return lambda b: jaxopt.LBFGS(lambda p: loss(p, b), maxiter=20).run(ONES).params


@case("jaxopt")
def jaxopt_lbfgs_batch(jaxopt):
    solver = jaxopt.LBFGS(loss, maxiter=20)  # one for all calls
    return lambda b: solver.run(ONES, b).params


@case("jaxopt")
def jaxopt_gradient_descent(jaxopt):
    return lambda b: jaxopt.GradientDescent(lambda p: loss(p, b), maxiter=20).run(ONES).params


def normal_model(numpyro):
    def model(y):
        mean = numpyro.sample("mean", numpyro.distributions.Normal(0, 1))
        scale = numpyro.sample("scale", numpyro.distributions.HalfNormal(1))
        numpyro.sample("y", numpyro.distributions.Normal(mean, scale), obs=y)

    return model


@case("numpyro", "numpyro.infer", "numpyro.infer.autoguide")
def numpyro_svi(numpyro, infer, autoguide):
    model = normal_model(numpyro)

    def call(b):
        guide, adam = autoguide.AutoNormal(model), numpyro.optim.Adam(1e-2)
        svi = infer.SVI(model, guide, adam, infer.Trace_ELBO())
        return svi.run(KEY, 50, b, progress_bar=False).params

    return call


@case("numpyro", "numpyro.infer")
def numpyro_mcmc(numpyro, infer):
    kernel = infer.NUTS(normal_model(numpyro))

    def call(b):
        mcmc = infer.MCMC(infer.NUTS(kernel.model), num_warmup=5, num_samples=5, progress_bar=False)
        mcmc.run(KEY, b)
        return mcmc.get_samples()["mean"]

    return call


def log_density(z, y):
    return -0.5 * jnp.sum((y - z) ** 2) - 0.5 * z**2


@case("blackjax")
def blackjax_nuts(blackjax):
    settings = dict(step_size=0.1, inverse_mass_matrix=jnp.ones(1))

    def call(b):
        nuts = blackjax.nuts(lambda z: log_density(z, b), **settings)

        def one(state, key):
            state, _ = nuts.step(key, state)
            return state, state.position

        return lax.scan(one, nuts.init(jnp.float32(0.0)), jax.random.split(KEY, 10))[1]

    return call


@case("blackjax")
def blackjax_adaptation(blackjax):
    def call(b):
        warmup = blackjax.window_adaptation(blackjax.nuts, lambda z: log_density(z, b))
        (_, parameters), _ = warmup.run(KEY, jnp.float32(0.0), num_steps=20)
        return parameters["step_size"]

    return call


@case("equinox")
def equinox_filter_jit(eqx):
    arrays, rest = eqx.partition(eqx.nn.MLP(5, 1, 8, 2, key=KEY), eqx.is_array)
    variants = [jax.tree.map(lambda a: a * (1 + 0.1 * k), arrays) for k in range(len(BATCHES))]
    jitted = jax.jit(lambda arrays: jax.vmap(eqx.combine(arrays, rest))(MATRIX))

    def fresh(k):
        model = eqx.combine(variants[k], rest)
        return eqx.filter_jit(lambda xs: jax.vmap(model)(xs))(MATRIX)

    return fresh, lambda k: jitted(variants[k])


@case("diffrax")
def diffrax_solve(diffrax):
    solver, steps = diffrax.Tsit5(), diffrax.PIDController(rtol=1e-4, atol=1e-6)

    def call(b):
        term = diffrax.ODETerm(lambda t, y, args: -y * b[:5] ** 2 + jnp.sin(t))
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, ONES, stepsize_controller=steps).ys

    return call


@case("optimistix")
def optimistix_root(optx):
    solver = optx.Newton(rtol=1e-5, atol=1e-5)
    return lambda b: optx.root_find(lambda y, args: y**3 + y - b[:5], solver, ONES).value


@case("optimistix")
def optimistix_least_squares(optx):
    def call(b):
        residuals = lambda p, args: MATRIX @ (p + 0.1 * jnp.sin(p)) - b
        return optx.least_squares(residuals, optx.LevenbergMarquardt(1e-5, 1e-5), ONES).value

    return call


@case("optax", "flax.linen")
def flax_linen(optax, nn):
    model, adam = nn.Dense(1), optax.adam(1e-2)
    start = model.init(KEY, MATRIX)

    def make():
        @jax.jit
        def train_step(params, state, batch):
            mse = lambda params: jnp.mean((model.apply(params, MATRIX)[:, 0] - batch) ** 2)
            updates, state = adam.update(jax.grad(mse)(params), state)
            return optax.apply_updates(params, updates), state

        return train_step

    def train(train_step, batch):
        params, state = start, adam.init(start)
        for _ in range(3):
            params, state = train_step(params, state, batch)
        return params

    by_hand = make()
    return lambda k: train(make(), BATCHES[k]), lambda k: train(by_hand, BATCHES[k])


@case("optax", "flax.nnx")
def flax_nnx(optax, nnx):
    adam = optax.adam(1e-2)
    definition, start = nnx.split(nnx.Linear(5, 1, rngs=nnx.Rngs(0)))

    def make():
        @nnx.jit
        def train_step(model, optimizer, batch):
            mse = lambda model: jnp.mean((model(MATRIX)[:, 0] - batch) ** 2)
            optimizer.update(model, nnx.grad(mse)(model))

        return train_step

    def train(train_step, batch):
        model = nnx.merge(definition, jax.tree.map(jnp.copy, start))
        optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
        for _ in range(3):
            train_step(model, optimizer, batch)
        return jax.tree.leaves(nnx.state(model))

    by_hand = make()
    return lambda k: train(make(), BATCHES[k]), lambda k: train(by_hand, BATCHES[k])


# ---------------------------------------------------------------------------------------------
# Measuring

_lowerings = []


def _on_event(event, duration_secs, **_):
    if event == LOWERING:
        _lowerings.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_event)


class Column:
    """One way to make the calls of a case.

    Args:
      call: given the number of a call.
      context: in which it is made.
    """

    def __init__(self, call, context=contextlib.nullcontext):
        self.call, self.context = call, context
        self.times, self.compiles, self.lowerings = [], 0, 0
        self.warm_s = min(self._seconds(k) for k in range(WARM))

    def _seconds(self, k):
        def call():
            self.result = self.call(k)
            return self.result

        with self.context():
            return seconds(call)

    def run(self, k):
        before = len(_lowerings)
        with counting() as work:
            self.times.append(self._seconds(k))
        self.compiles += work.compiles
        self.lowerings += len(_lowerings) - before

    def figures(self):
        calls = len(self.times)
        per_call = dict(compiles=self.compiles / calls, lowerings=self.lowerings / calls)
        return dict(median_s=statistics.median(self.times), **per_call)


def measure(name):
    """The figures of one case. AssertionError: the results are not the same."""
    fresh, by_hand = CASES[name]()
    stock = Column(fresh)
    ours = {"installed": Column(fresh, loopjit.installed), "by_hand": Column(by_hand)}
    often, untraceable = dict(ours), None
    try:
        often["tracing"] = Column(lambda k: jax.eval_shape(lambda: fresh(k)))
    except Exception as error:  # the call looks at values in Python
        untraceable = type(error).__name__
    calls = max(3, min(20, int(0.5 / sum(column.warm_s for column in often.values()))))
    for turn in range(ROUNDS):
        first = WARM + 20 * turn
        for k in reversed(range(first, first + calls)):
            for column in often.values():
                column.run(k)
        stock.run(first)
        for what, column in ours.items():
            for a, b in zip(*map(jax.tree.leaves, (column.result, stock.result)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=what)
    found = {what: column.figures() for what, column in {"stock": stock, **often}.items()}
    if untraceable:
        return {**found, "untraceable": untraceable}
    least_s = found["tracing"]["median_s"] + found["by_hand"]["median_s"]
    return {**found, "ratio": found["installed"]["median_s"] / least_s}


# ---------------------------------------------------------------------------------------------
# Telling


def row(name, found):
    if "error" in found:
        return [name, *["-"] * 7]
    stock, installed, traced = found["stock"], found["installed"], "tracing" in found
    return [
        name,
        *[f"{stock[what]:.3g} / {installed[what]:.3g}" for what in ("compiles", "lowerings")],
        *[duration(found[what]["median_s"]) for what in ("stock", "installed", "by_hand")],
        duration(found["tracing"]["median_s"]) if traced else "-",
        ratio(found["ratio"]) if traced else "-",
    ]


def remark(found):
    if "error" in found:
        return found["error"]
    said = []
    if found["installed"]["compiles"] or found["installed"]["lowerings"]:
        said.append("compiles again")
    if "untraceable" in found:
        said.append(f"cannot be traced as a whole ({found['untraceable']})")
    elif found["ratio"] > TARGET:
        said.append(f"more than {ratio(TARGET)}")
    return ", ".join(said)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="only the line for programs")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")  # what libraries use that JAX deprecates

    results = {}
    for name in options.cases or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            results[name] = measure(name)
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            results[name] = {"error": f"{type(error).__name__}: {said}"}
    versions = {"jax": jax.__version__, "python": sys.version.split()[0]}
    if not options.json:
        print(f"jax {versions['jax']}, Python {versions['python']}; per call, stock / installed\n")
        head = "case compiles lowerings stock installed by-hand tracing ratio"
        print(table(head.split(), [row(*item) for item in results.items()]) + "\n")
        for name, found in results.items():
            if remark(found):
                print(f"{name}: {remark(found)}")
    print(json.dumps({"versions": versions, "cases": results}))


if __name__ == "__main__":
    main()
