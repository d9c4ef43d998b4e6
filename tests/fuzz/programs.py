"""Random programs: equal keys must mean equal StableHLO, and in mode "full" equal transforms.

A program is first a tree of choices, so that three kinds of pairs can be made on purpose: twins
(the same tree, built again from fresh functions), mutants (one choice changed), and strangers.

Run ``python -m tests.fuzz.programs N SEED`` for a longer search.
"""

import hashlib
import os
import random
import re
import sys
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

from loopjit import compat
from loopjit.programs.canonical import Canonicalizer, Uninternable

NUMBERS = [
    0.0,
    -0.0,
    0,
    False,
    1.0,
    1,
    True,
    -1,
    2,
    2.0,
    0.1,
    float("nan"),
    -float("nan"),
    float("inf"),
    np.float32(0.1),
    np.float32(2),
    np.float32(-0.0),
    np.float16(2),
    np.int32(2),
    np.int8(2),
    np.bool_(True),
    np.array(2.0, np.float32),
    np.array(-0.0, np.float32),
    np.array([0x7FC00001], np.uint32).view(np.float32)[0],
]
BOOLS = [False, True]
POLICIES = [
    None,
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    ("a",),
    ("b",),
]


def _policy(choice):
    if isinstance(choice, tuple):
        return jax.checkpoint_policies.save_only_these_names(*choice)
    return choice and getattr(jax.checkpoint_policies, choice)


def _with_jvp(scale, by_argument):
    function = jax.custom_jvp(lambda x: jnp.sin(x))
    if by_argument:
        function.defjvps(lambda t, out, x: t * scale)
    else:
        function.defjvp(lambda p, t: (function(*p), t[0] * scale))
    return lambda x: function(x)


def _with_vjp(scale, nondiff):
    if nondiff:
        function = jax.custom_vjp(lambda x, n: jnp.sin(x) * 2, nondiff_argnums=(1,))
        function.defvjp(lambda x, n: (function(x, n), None), lambda n, r, t: (t * n,))
        return lambda x: function(x, scale)
    function = jax.custom_vjp(lambda x: jnp.sin(x))
    function.defvjp(lambda x: (function(x), None), lambda r, t: (t * scale,))
    return lambda x: function(x)


def _with_vmap(scale):
    function = jax.custom_batching.custom_vmap(lambda x: jnp.abs(x))
    function.def_vmap(lambda size, batched, x: (jnp.abs(x) * scale, True))
    return lambda x: lax.stop_gradient(function(x)) * x


def _captured(seed):
    array = jnp.asarray(np.random.RandomState(seed).rand(3), jnp.float32)
    return lambda x: x * array


def _metadata(f, key, value):
    def function(x):
        with set_xla_metadata(**{key: value}):
            return f(x)

    return function


def _scoped(f, name):
    def function(x):
        with jax.named_scope(name):
            return f(x)

    return function


# For each kind of node: the choices, the number of children, and how to build it.
NODES = {
    "add": ([NUMBERS], 0, lambda n: lambda x: x + n),
    "mul": ([NUMBERS], 0, lambda n: lambda x: x * n),
    "sub": ([NUMBERS], 0, lambda n: lambda x: n - x),
    "where": ([NUMBERS, NUMBERS], 0, lambda n, m: lambda x: jnp.where(x > n, x, x * m)),
    "power": ([[2, 3, -1]], 0, lambda n: lambda x: lax.integer_pow(x, n)),
    "unary": (
        [["sin", "cos", "exp", "tanh", "flip", "cumsum", "sort", "square"]],
        0,
        lambda name: lambda x: getattr(jnp, name)(x),
    ),
    "nn": (
        [["relu", "silu", "softmax", "relu6", "softplus", "gelu"]],
        0,
        lambda name: lambda x: getattr(jax.nn, name)(x),
    ),
    "roll": ([[1, 2]], 0, lambda n: lambda x: jnp.roll(x, n)),
    "index": ([[0, 1, 2]], 0, lambda i: lambda x: x * x[i]),
    "update": ([[0, 1], NUMBERS], 0, lambda i, n: lambda x: x.at[i].add(n)),
    "clip": ([NUMBERS, [1, 1.0, 2.0]], 0, lambda n, m: lambda x: jnp.clip(x, n, m)),
    "cast": (
        [["float16", "bfloat16", "int32", "int8", "float32"]],
        0,
        lambda t: lambda x: x.astype(t).astype(jnp.float32),
    ),
    "dot": (
        [["highest", "default", None], [None, "float32"]],
        0,
        lambda p, t: lambda x: jnp.dot(x, x, precision=p, preferred_element_type=t) * x,
    ),
    "conv": ([["same", "full"]], 0, lambda m: lambda x: jnp.convolve(x, x, mode=m)[:3]),
    "reduce": (
        [["sum", "max", "prod", "mean"], BOOLS],
        0,
        lambda name, keep: lambda x: x - getattr(jnp, name)(x, keepdims=keep),
    ),
    "random": ([[0, 1], ["uniform", "normal"]], 0,
               lambda s, d: lambda x: x + getattr(jax.random, d)(jax.random.key(s), (3,))),
    "argument": ([NUMBERS], 0, lambda n: lambda x: jax.jit(lambda a, b: a * b)(x, n)),
    "captured": ([[0, 1]], 0, _captured),
    "jvp": ([[1.0, 2.0, 2], BOOLS], 0, _with_jvp),
    "vjp": ([[1.0, 2.0, 2], BOOLS], 0, _with_vjp),
    "vmap rule": ([[1.0, 2.0]], 0, _with_vmap),
    "policy": ([POLICIES], 0, lambda p: _saving(p)),
    "name": ([["a", "b"]], 1, lambda f, name: lambda x: checkpoint_name(f(x), name)),
    "remat": (
        [POLICIES, BOOLS],
        1,
        lambda f, p, c: lambda x: jax.checkpoint(f, policy=_policy(p), prevent_cse=c)(x),
    ),
    "metadata": ([["k", "l"], ["a", "b"]], 1, _metadata),
    "scope": ([["a", "b"]], 1, _scoped),
    "compose": ([], 2, lambda f, g: lambda x: g(f(x))),
    "wire": ([[0, 1, 2], [0, 1, 2]], 2, lambda f, g, i, j: _wired(f, g, i, j)),
    "fori": ([[2, 3]], 1, lambda f, n: lambda x: lax.fori_loop(0, n, lambda i, c: f(c), x)),
    "while": (
        [[2, 3]],
        1,
        lambda f, n: lambda x: lax.while_loop(
            lambda c: c[1] < n, lambda c: (f(c[0]), c[1] + 1), (x, 0)
        )[0],
    ),
    "scan": (
        [[1, 2], BOOLS, [2, 4]],
        1,
        lambda f, unroll, reverse, n: lambda x: lax.scan(
            lambda c, s: (f(c) * s, None), x, jnp.arange(float(n)), unroll=unroll, reverse=reverse
        )[0],
    ),
    "cond": ([NUMBERS], 2, lambda f, g, n: lambda x: lax.cond(x[0] > n, f, g, x)),
    "jit": (
        [BOOLS, BOOLS],
        1,
        lambda f, inline, keep: lambda x: jax.jit(f, inline=inline, keep_unused=keep)(x),
    ),
    "vmap": (
        [],
        1,
        lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x * 2])).sum(0),
    ),
    "precision": ([["highest", "default"]], 1, lambda f, p: _precise(f, p)),
}  # fmt: skip
_LEAVES = [kind for kind, (_, children, _) in NODES.items() if not children]
_INNER = [kind for kind, (_, children, _) in NODES.items() if children]


def _wired(f, g, i, j):
    def function(x):
        values = x, f(x), g(x)
        return values[i] - 2 * values[j]

    return function


def _saving(policy):
    def function(x):
        return jnp.sin(checkpoint_name(jnp.dot(jnp.sin(x), jnp.cos(x)), "a") * x)

    return jax.checkpoint(function, policy=_policy(policy))


def _precise(f, precision):
    def function(x):
        with jax.default_matmul_precision(precision):
            return f(x)

    return function


def choose(rng, depth=0):
    """A random tree: (kind, children, the number of each choice)."""
    kind = rng.choice(_INNER if rng.random() < (0.8, 0.6, 0.3, 0)[depth] else _LEAVES)
    options, children, _ = NODES[kind]
    return (
        kind,
        tuple(choose(rng, depth + 1) for _ in range(children)),
        tuple(rng.randrange(len(choices)) for choices in options),
    )


def mutate(rng, tree):
    """The same tree with one choice changed, to the next one (they are easily confused) or any."""
    kind, children, picks = tree
    if children and (not picks or rng.random() < 0.6):
        where = rng.randrange(len(children))
        changed = mutate(rng, children[where])
        return (kind, (*children[:where], changed, *children[where + 1 :]), picks)
    if not picks:
        return choose(rng, depth=2)
    where = rng.randrange(len(picks))
    count = len(NODES[kind][0][where])
    pick = (picks[where] + 1) % count if rng.random() < 0.6 else rng.randrange(count)
    return (kind, children, (*picks[:where], pick, *picks[where + 1 :]))


def build(tree):
    """A fresh function from float32[3] to float32[3]."""
    kind, children, picks = tree
    options, _, make = NODES[kind]
    values = [choices[pick] for choices, pick in zip(options, picks, strict=True)]
    function = make(*[build(child) for child in children], *values)
    return lambda x: function(x).astype(jnp.float32)


def rule_key(function):
    """Vouches for functions that capture numbers only (and the primal that the rule calls)."""
    captured = []
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        if isinstance(value, int | float):
            captured.append((type(value), repr(value)))
        elif isinstance(value, set | frozenset):  # the names of a remat policy
            captured.append(frozenset(value))
        elif not isinstance(value, jax.custom_jvp | jax.custom_vjp):
            return None
    return function.__code__, tuple(captured)


def text(lowered):
    """StableHLO without the names of functions, which come from Python."""
    source = lowered.as_text()
    names = re.findall(r"func\.func \w+ @([\w.$-]+)", source)
    order = {name: f"f{index}" for index, name in enumerate(dict.fromkeys(names))}
    source = re.sub(r"@([\w.$-]+)", lambda m: "@" + order.get(m[1], m[1]), source)
    source = re.sub(r"module @\S+", "module", source)
    return hashlib.sha256(source.encode()).hexdigest()


class Report(NamedTuple):
    """What a search found.

    Attributes:
        programs: how many were compared.
        refused: how many had no key.
        wrong: pairs with equal keys and different programs (tree, tree, mode): all of them bugs.
        twins: how many programs were built a second time.
        missed: those of them that got another key, in mode "full" and in mode "exec".
        keys: distinct keys (mode "full", "exec").
        texts: distinct programs: with their gradient, and alone.
        seconds: how long it took.
    """

    programs: int
    refused: int
    wrong: list
    twins: int
    missed: tuple[list, list]
    keys: tuple
    texts: tuple
    seconds: float


def search(count, seed=0):
    """Compares `count` random programs with each other."""
    rng, start = random.Random(seed), time.perf_counter()
    argument = jnp.arange(1.0, 4.0)
    keyers = [Canonicalizer(mode, rule_key) for mode in ("full", "exec")]
    groups = [{}, {}]
    wrong, refused, programs, twins, missed = [], 0, 0, 0, ([], [])
    trees, seen = [], {}
    while programs + refused < count:
        draw = rng.random()
        if trees and draw < 0.15:
            tree = rng.choice(trees)
        elif trees and draw < 0.6:
            tree = mutate(rng, rng.choice(trees))
        else:
            tree = choose(rng)
        try:
            closed = jax.make_jaxpr(build(tree))(argument)
        except (TypeError, OverflowError, ValueError):
            continue  # not every number fits everywhere
        jaxpr, consts = compat.open_jaxpr(closed)
        try:
            keys = [keyer.key(jaxpr) for keyer in keyers]
        except Uninternable:
            refused += 1
            continue
        programs += 1
        trees.append(tree)
        function = compat.jaxpr_as_fun(jaxpr)
        inputs = (*consts, argument)
        alone = text(jax.jit(function).lower(*inputs))
        try:
            gradient = jax.grad(lambda *args: function(*args)[0].sum(), argnums=len(consts))
            transformed = text(jax.jit(gradient).lower(*inputs))
        except ValueError:  # while loops have no reverse mode
            transformed = "no reverse mode"
        vmapped = jax.vmap(function, in_axes=(*[None] * len(consts), 0))
        batched = text(jax.jit(vmapped).lower(*consts, jnp.stack([argument] * 2)))
        for index, (key, value) in enumerate(
            zip(keys, ((alone, transformed, batched), alone), strict=True)
        ):
            first, other = groups[index].setdefault(key, (value, tree))
            if first != value:
                wrong.append((other, tree, keyers[index].mode))
        if tree in seen:
            twins += 1
            for trees_missed, first, second in zip(missed, seen[tree], keys, strict=True):
                if first != second:
                    trees_missed.append(tree)
        seen.setdefault(tree, keys)
    texts = {value for value, _ in groups[0].values()}
    return Report(
        programs,
        refused,
        wrong,
        twins,
        missed,
        tuple(len(group) for group in groups),
        (len(texts), len({alone for alone, *_ in texts})),
        time.perf_counter() - start,
    )


def main(arguments):
    count, seed = (int(argument) for argument in (*arguments, "2000", "0")[:2])
    report = search(count, seed)
    for tree in report.missed[0]:
        print("missed", tree)
    for pair in report.wrong:
        print("WRONG", *pair)
    print(jax.__version__, report._replace(missed=tuple(map(len, report.missed))))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
