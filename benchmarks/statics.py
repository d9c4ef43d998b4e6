"""What does it cost that nobody writes ``static_argnums``? Figures for README.rst in this folder.

    python benchmarks/statics.py [--quick] [--json] [--section NAME]

Measured as in ``first_step.py``: columns in turns in one process, only ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
from jax import lax

import loopjit
from loopjit import loop_jit
from loopjit.__main__ import duration, measure, ratio, seconds, table

OURS, HAND = "loopjit", "jax.jit by hand"
GAIN = 2.0


def as_rows(measured):
    """The ratios to jax.jit with everything declared by hand."""
    base = measured[HAND]
    return {
        column: {
            "best_s": timing.best_s,
            "best_ratio": timing.best_s / base.best_s,
            "median_ratio": timing.median_s / base.median_s,
        }
        for column, timing in measured.items()
    }


# ---------------------------------------------------------------------------------------------
# Warm calls


def warm_calls():
    """name -> (function, arguments, keywords, what jax.jit has to be told)."""

    def mode(params, mode, k):  # a string, and a number that is traced
        return jax.tree.map(lambda a: a * k if mode == "m" else a, params)

    def number(params, n):  # a number whose value is needed
        return jax.tree.map(lambda a: a[:n], params)

    def flag(params, train=False):
        return jax.tree.map(lambda a: a * 0.5 if train else a, params)

    def several(params, mode, train, n):
        return jax.tree.map(lambda a: a[:n] * 2.0 if train and mode == "m" else a, params)

    found = {}
    for leaves in (1, 10, 100):
        params = {f"k{i}": jnp.ones(4) for i in range(leaves)}
        size = f"{leaves} {'leaf' if leaves == 1 else 'leaves'}"
        found[f"{size}, a string"] = (mode, (params, "m", 2.0), {}, ("mode",))
        found[f"{size}, an int that is needed"] = (number, (params, 3), {}, ("n",))
        found[f"{size}, the same by name"] = (number, (params,), {"n": 3}, ("n",))
        found[f"{size}, a default"] = (flag, (params,), {}, ("train",))
        found[f"{size}, a string, a flag and an int"] = (
            several,
            (params, "m", True, 3),
            {},
            ("mode", "train", "n"),
        )
        found[f"{size}, a flag by name"] = (flag, (params,), {"train": True}, ("train",))
    return found


def dispatch(quick):
    """Warm calls of one decorated function, against jax.jit with static_argnames."""
    results = {}
    for name, (fun, args, kwargs, static) in warm_calls().items():
        by_hand, ours = jax.jit(fun, static_argnames=static), loop_jit(fun)
        columns = {
            OURS: lambda: ours(*args, **kwargs),
            HAND: lambda: by_hand(*args, **kwargs),
        }
        results[name] = as_rows(measure(columns, budget_s=0.2 if quick else 1.0))
    return results


# ---------------------------------------------------------------------------------------------
# What is captured may change


class Settings:
    def __init__(self):
        self.lr, self.momentum = 0.1, 0.9


class Model:
    def __init__(self):
        self.w, self.scale, self.act = jnp.ones(4), 0.5, jnp.tanh

    @loop_jit
    def run(self, x):
        return self.act(x * self.w) * self.scale


SETTINGS, SIZES, WEIGHTS = Settings(), [1.0, 2.0], jnp.ones(4)


def captures():
    """name -> (function that looks at what may change, how to call it)."""
    a, w, table_, x = 0.5, jnp.ones(4), {"a": 2.0}, jnp.ones(4)
    model = Model()
    plain = {
        "nothing": lambda x: x * 2.0,
        "a global number": lambda x: x * GAIN,
        "a global array": lambda x: x * WEIGHTS,
        "attributes of a global object": lambda x: x * SETTINGS.lr + SETTINGS.momentum,
        "a global list": lambda x: x * SIZES[0],
        "a number and an array in a closure": lambda x: x * a * w,
        "a dict in a closure": lambda x: x * table_["a"],
    }
    found = {name: (jax.jit(f), loop_jit(f), (x,)) for name, f in plain.items()}
    found["a method, arrays on self"] = (
        jax.jit(lambda w, x: jnp.tanh(x * w) * 0.5),
        lambda _, x: model.run(x),
        (model.w, x),
    )
    return found


def never_stale(quick):
    """Warm calls of functions whose captures are looked at each time; microseconds above jax.jit."""
    results = {}
    for name, (by_hand, ours, args) in captures().items():
        columns = {OURS: lambda: ours(*args), HAND: lambda: by_hand(*args)}
        rows = as_rows(measure(columns, budget_s=0.2 if quick else 1.0))
        rows["above_us"] = 1e6 * (rows[OURS]["best_s"] - rows[HAND]["best_s"])
        results[name] = rows
    return results


# ---------------------------------------------------------------------------------------------
# The first call


def first_calls(quick):
    """How much longer the first call takes, in which the leaves are found."""

    def size(x, n):
        for i in range(n):
            x = jnp.sin(x) * jnp.arange(n).sum() + i
        return x

    def settings(x, cfg):
        if cfg["norm"]:
            x = x / jnp.linalg.norm(x)
        return lax.scan(lambda c, _: (c * cfg["rate"], None), x, length=cfg["steps"])[0]

    x, cfg = jnp.ones(8), {"norm": True, "rate": 0.5, "steps": 10}
    results = {}
    for name, fun, args, fixed in (
        ("an int", size, (x, 5), lambda x: size(x, 5)),
        ("a flag and an int in a dict", settings, (x, cfg), lambda x: settings(x, cfg)),
    ):
        times = {OURS: [], HAND: []}
        for _ in range(3 if quick else 7):
            jax.clear_caches()
            times[HAND].append(seconds(lambda: jax.jit(fixed)(x)))
            jax.clear_caches()
            times[OURS].append(seconds(lambda: loop_jit(fun)(*args)))
        best = {column: min(values) for column, values in times.items()}
        results[name] = {
            column: {"best_s": best[column], "best_ratio": best[column] / best[HAND]}
            for column in best
        }
    return results


# ---------------------------------------------------------------------------------------------
# Which leaves are chosen


def accuracy(quick):
    """On the set of functions of the tests: are exactly the needed leaves chosen, in how many traces?"""
    sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests"))
    from statics_cases import CASES

    exact = wrong = traces = 0
    for case in CASES:
        loopjit.cache_clear()
        expected = case.function(*case.args, **case.kwargs)
        staged = loop_jit(case.function)
        runs = []

        def profile(frame, event, _, code=case.function.__code__, runs=runs):
            if event == "call" and frame.f_code is code:
                runs.append(frame)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.setprofile(profile)
            try:
                out = staged(*case.args, **case.kwargs)
            finally:
                sys.setprofile(None)
        same = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5)), out, expected)
        wrong += not all(jax.tree.leaves(same))
        left = {leaf.path for leaf in staged.statics if "default" in leaf.reason}
        chosen = {leaf.path for leaf in staged.statics if leaf.static}
        exact += chosen - left == case.needed - left
        traces += len(runs)
    return {
        "functions": len(CASES),
        "exact": exact,
        "wrong results": wrong,
        "traces per function": traces / len(CASES),
    }


SECTIONS = {
    "dispatch": dispatch,
    "captures": never_stale,
    "first": first_calls,
    "accuracy": accuracy,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, action="append")
    options = parser.parse_args()
    results = {name: SECTIONS[name](options.quick) for name in options.section or SECTIONS}
    if options.json:
        print(json.dumps({"jax": jax.__version__, **results}, indent=1))
        return
    print(f"jax {jax.__version__}, loopjit {loopjit.__version__}\n")
    for name in ("dispatch", "captures", "first"):
        if name not in results:
            continue
        header = (name, "jax.jit by hand", "loopjit", "best ratio")
        if name == "captures":
            header = (*header, "above")
        rows = []
        for title, columns in results[name].items():
            ours, hand = columns[OURS], columns[HAND]
            row = (
                title,
                duration(hand["best_s"]),
                duration(ours["best_s"]),
                ratio(ours["best_ratio"]),
            )
            if name == "captures":
                row = (*row, f"{columns['above_us']:+.2f} us")
            rows.append(row)
        print(table(header, rows), "\n")
    if "accuracy" in results:
        for what, figure in results["accuracy"].items():
            print(f"{what}: {figure:.3g}" if isinstance(figure, float) else f"{what}: {figure}")


if __name__ == "__main__":
    main()
