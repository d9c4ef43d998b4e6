"""Does loopjit cost what a hand-hoisted ``jax.jit`` costs? Figures for README.rst in this folder.

    python benchmarks/first_step.py [--quick] [--json] [--section NAME]

All times are taken in turns within one process, with the outputs blocked on; only ratios between
columns of one run mean anything. ``equinox`` is one more column where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import loopjit
import loopjit.lax
from loopjit import loop_jit
from loopjit.__main__ import counting, duration, measure, ratio, seconds, table

if importlib.util.find_spec("equinox"):
    import equinox
else:
    equinox = None

# The columns, in the order in which they are printed.
STOCK, JIT, FILTER_JIT = "jax op by op", "jax.jit(fresh)", "filter_jit(fresh)"
OURS, HAND = "loopjit", "jax.jit by hand"


def as_rows(measured, reference=HAND):
    """One record per column, with the ratios to the reference column."""
    base = measured[reference]
    return [
        {
            "column": column,
            **dataclasses.asdict(timing),
            "best_ratio": timing.best_s / base.best_s,
            "median_ratio": timing.median_s / base.median_s,
        }
        for column, timing in measured.items()
    ]


# ---------------------------------------------------------------------------------------------
# Fresh functions


def fresh_programs():
    """program -> (function of ``L`` that makes a fresh function, arguments, how to hoist by hand).

    ``L`` is ``jax.lax`` or ``loopjit.lax``: the program is the same in all columns. Hoisting is
    one ``jax.jit`` around the whole program, unless said otherwise.
    """
    x0, xs, v = jnp.array(0.0), jnp.ones(8), jnp.ones(4)
    vs, weights = jnp.ones((16, 4)), jnp.eye(4) * 0.5
    mean = jax.jit(lambda x: jnp.mean(x - jnp.ones(10000)))

    def while_loop(L):
        return lambda x: L.while_loop(lambda x: x < 0, mean, x)

    def fori_loop(L):
        return lambda x: L.fori_loop(0, 10, lambda i, a: a + i * 2.0, x)

    def scan(L):
        return lambda a, xs: L.scan(lambda a, x: (a + x, a * x), a, xs)

    def cond(L):
        # The predicate comes from outside: a comparison op by op costs as much as the whole program.
        return lambda p, x: L.cond(p, lambda x: x + 1.0, lambda x: x * 2.0, x)

    def grad_scan(L):
        return jax.grad(lambda a, xs: L.scan(lambda a, x: (jnp.sin(a) + x, a * x), a, xs)[0])

    def vmap_while(L):
        return jax.vmap(lambda x: L.while_loop(lambda c: c.sum() < 9.0, lambda c: c * 1.5, x))

    def captured(L):
        return lambda x: L.fori_loop(0, 5, lambda i, c: weights @ c, x)

    def hoist_captured():
        jitted = jax.jit(lambda w, x: lax.fori_loop(0, 5, lambda i, c: w @ c, x))
        return lambda: jitted(weights, v)

    return {
        "while_loop": (while_loop, (x0,), None),
        "fori_loop": (fori_loop, (x0,), None),
        "scan": (scan, (x0, xs), None),
        "cond": (cond, (jnp.array(True), x0), None),
        "grad(scan)": (grad_scan, (x0, xs), None),
        "vmap(while_loop)": (vmap_while, (vs,), None),
        "fori_loop, array captured": (captured, (v,), hoist_captured),
    }


def fresh_functions(quick):
    """Loops called op by op with fresh functions, and the same under a fresh loop_jit."""
    results = {}
    for name, (make, args, hoist) in fresh_programs().items():

        def hoist_whole():
            jitted = jax.jit(make(lax))
            return lambda: jitted(*args)

        for title, ours in (
            (name, lambda: make(loopjit.lax)(*args)),
            (f"loop_jit({name})", lambda: loop_jit(make(lax))(*args)),
        ):
            columns = {
                STOCK: lambda: make(lax)(*args),
                JIT: lambda: jax.jit(make(lax))(*args),
                FILTER_JIT: lambda: equinox.filter_jit(make(lax))(*args),
                OURS: ours,
                HAND: (hoist or hoist_whole)(),
            }
            if equinox is None:
                del columns[FILTER_JIT]
            results[title] = as_rows(measure(columns, budget_s=0.1 if quick else 0.5))
    return results


# ---------------------------------------------------------------------------------------------
# Warm calls of one decorated function

GAIN = 2.0


def warm_dispatch(quick):
    """One function, decorated once, called again and again."""

    def static(params, mode):  # a static string, and a global to guard
        return jax.tree.map(lambda a: a * GAIN if mode == "double" else a, params)

    def plain(params):  # nothing static, no global, no closure
        return [a + a for a in params.values()]

    results = {}
    for leaves in (1, 10, 100):
        params = {f"k{i}": jnp.ones(4) for i in range(leaves)}
        for what, fun, args, names in (
            ("a static string", static, (params, "double"), ("mode",)),
            ("nothing static or guarded", plain, (params,), None),
        ):
            jitted = jax.jit(fun, static_argnames=names)
            ours = loop_jit(fun)
            columns = {OURS: lambda: ours(*args), "jax.jit": lambda: jitted(*args)}
            if equinox:
                filtered = equinox.filter_jit(fun)
                columns = {"equinox.filter_jit": lambda: filtered(*args), **columns}
            measured = measure(columns, budget_s=0.2 if quick else 1.0)
            leaf = "leaf" if leaves == 1 else "leaves"
            results[f"{leaves} {leaf}, {what}"] = as_rows(measured, reference="jax.jit")
    return results


# ---------------------------------------------------------------------------------------------
# A cell run again

CELL = """\
def step(c):
    return jnp.tanh(W @ c) + GAIN

@DECORATOR
def run(x):
    return lax.fori_loop(0, 20, lambda i, c: step(c), x)

out = run(x)
"""


def rerun_cell(quick):
    """The same source executed again in one namespace, as in a notebook."""
    edits = {
        "first": ("", CELL),
        "again": ("", CELL),
        "comment edited": ("", CELL.replace("@DEC", "# a remark\n\n@DEC")),
        "moved": ("", "\n\n\n" + CELL),
        "global changed": ("GAIN = 0.25\n", CELL),
        "global changed, again": ("GAIN = 0.125\n", CELL),
    }
    results = {}
    for column, decorator in (("jax.jit", jax.jit), (OURS, loop_jit)):
        namespace = {"jnp": jnp, "lax": lax, "DECORATOR": decorator, "GAIN": 0.5}
        namespace |= {"W": jnp.eye(8) * 0.3, "x": jnp.ones(8)}
        before = None
        for edit, (prelude, source) in edits.items():
            exec(prelude, namespace)
            code = compile(source, f"<cell {edit}>", "exec")

            def run_cell(code=code, namespace=namespace):
                exec(code, namespace)
                return namespace["out"]

            with counting() as work:
                first_s = seconds(run_cell)
            out = namespace["out"]
            changed = before is not None and bool((out != before).any())
            assert changed == edit.startswith("global changed"), f"{column}: a stale result"
            before = out
            row = {"column": column, "seconds": first_s, **dataclasses.asdict(work)}
            results.setdefault(edit, []).append(row)
    return results


# ---------------------------------------------------------------------------------------------
# Interning


def interning(quick):
    """What it costs to find a jaxpr that is known, next to the trace that made it."""
    from loopjit.compat import open_jaxpr
    from loopjit.programs.intern import Interner

    def jnp_program(equations):
        def fun(x):
            for i in range(equations // 2):
                x = jnp.sin(x) * (1.0 + i % 7)
            return x

        return fun

    def lax_program(equations):  # bare primitives, the fastest to trace
        def fun(x):
            for _ in range(equations // 2):
                x = lax.add(lax.sin(x), x)
            return x

        return fun

    results, x = {}, jnp.ones(4)
    for what, program in (("jnp", jnp_program), ("bare lax", lax_program)):
        for equations in (10, 100, 1000, 10000):
            interner = Interner("full")
            traces, interns, known = [], [], set()
            for _ in range(max(3, min(100, (2000 if quick else 40000) // equations))):
                start = time.perf_counter()
                closed = jax.make_jaxpr(program(equations))(x)
                traced = time.perf_counter()
                jaxpr, _ = open_jaxpr(closed)
                canonical = interner.intern(jaxpr)
                interns.append(time.perf_counter() - traced)
                traces.append(traced - start)
                known.add(canonical)
            assert canonical is not None and known == {canonical}
            del interns[0]  # the miss, which inserts; all others find it
            share = min(interns) / min(traces)
            results[f"{len(jaxpr.eqns)} equations, {what}"] = [
                {"column": "make_jaxpr", "best_s": min(traces), "best_ratio": 1.0},
                {"column": "intern", "best_s": min(interns), "best_ratio": share},
            ]
    return results


# ---------------------------------------------------------------------------------------------
# Memory


def resident_mb():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_growth(quick):
    """How memory grows with fresh lambdas, each with a new captured array, after warm-up."""
    x = jnp.ones(16)

    def ours():
        w = x * 1.0
        loopjit.lax.fori_loop(0, 3, lambda i, c: c * w + 1.0, x)
        return loop_jit(lambda y: lax.while_loop(lambda c: c.sum() < 0, lambda c: c + w, y))(x)

    def stock():
        w = x * 1.0
        return lax.fori_loop(0, 3, lambda i, c: c * w + 1.0, x)

    results = {}
    for column, call, warmup, lambdas in (
        (OURS, ours, 500, 2000 if quick else 10000),
        (STOCK, stock, 20, 100 if quick else 300),
    ):
        seconds(call, warmup)
        gc.collect()
        before = resident_mb()
        with counting() as work:
            seconds(call, lambdas)
        gc.collect()
        growth_mb = resident_mb() - before
        row = {"column": column, "calls": lambdas, "growth_mb": growth_mb, **vars(work)}
        results[f"{column}, {lambdas:,} calls"] = [row]
    return results


def memory(quick):
    """How memory grows with fresh lambdas, in a process where nothing else was compiled."""
    if not os.path.exists("/proc/self/statm"):
        return {}
    child = [sys.executable, __file__, "--section", "memory-here", "--json"]
    done = subprocess.run(child + ["--quick"] * quick, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)["memory-here"]


# ---------------------------------------------------------------------------------------------
# Telling

SECTIONS: dict[str, Callable] = {
    "fresh": fresh_functions,
    "dispatch": warm_dispatch,
    "cell": rerun_cell,
    "interning": interning,
    "memory": memory,
    "memory-here": memory_growth,
}
FORMATS = {
    "column": str,
    "best_ratio": ratio,
    "median_ratio": ratio,
    "growth_mb": "{:+.1f}".format,
    "compiles": "{:g}".format,
    "traces": "{:g}".format,
    "calls": "{:,}".format,
}


def cell(key, value):
    return duration(value) if key.endswith("_s") or key == "seconds" else FORMATS[key](value)


def main():
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="fewer calls: within a minute")
    parser.add_argument("--json", action="store_true", help="the figures, for programs")
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only this one")
    options = parser.parse_args()

    results = {}
    for section in options.section or [name for name in SECTIONS if name != "memory-here"]:
        results[section] = SECTIONS[section](options.quick)
        if options.json or not results[section]:
            continue
        print(f"\n{SECTIONS[section].__doc__.strip()}\n")
        keys = list(next(iter(results[section].values()))[0])
        rows = [
            [name if i == 0 else "", *(cell(key, row[key]) for key in keys)]
            for name, rows in results[section].items()
            for i, row in enumerate(rows)
        ]
        print(table(["", *(key.replace("_", " ") for key in keys)], rows), flush=True)
    if options.json:
        versions = {"jax": jax.__version__, "python": sys.version.split()[0]}
        print(json.dumps({"versions": versions, **results}, indent=1))


if __name__ == "__main__":
    main()
