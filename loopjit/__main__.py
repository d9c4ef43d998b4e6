"""``python -m loopjit``: what loops with fresh functions cost with and without loopjit.

The program of https://github.com/jax-ml/jax/issues/587: a loop called op by op with a lambda that
is made anew each time, which JAX compiles anew each time. Beside it stands what one would write
by hand to avoid that: one ``jax.jit`` around the loop, made once.

Options:
  --quick   fewer calls
  --json    the figures, for programs
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import loopjit

# ---------------------------------------------------------------------------------------------
# Measuring (benchmarks/first_step.py measures with this, too)

_COMPILE = "/jax/core/compile/backend_compile_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_events = {_COMPILE: 0, _TRACE: 0}

Call = Callable[[], Any]


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    if event in _events:
        _events[event] += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


@dataclasses.dataclass
class Work:
    """What JAX did in a block; complete when the block has ended."""

    compiles: int = 0
    traces: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Work]:
    """Counts compiles and traces by JAX's public monitoring events."""
    work, before = Work(), dict(_events)
    yield work
    work.compiles = _events[_COMPILE] - before[_COMPILE]
    work.traces = _events[_TRACE] - before[_TRACE]


def seconds(call: Call, times: int = 1) -> float:
    """Seconds per call, until the result of the last one is there."""
    start = time.perf_counter()
    for _ in range(times):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / times


@dataclasses.dataclass(frozen=True)
class Timing:
    """One way to run one program. ``compiles`` and ``traces`` are per later call."""

    first_s: float
    best_s: float
    median_s: float
    compiles: float
    traces: float


def measure(calls: Mapping[str, Call], *, budget_s: float = 0.5) -> dict[str, Timing]:
    """Times ``calls`` in turns, so that whatever disturbs the machine disturbs all of them.

    Args:
      calls: name to function of no arguments. The first call of each is timed by itself.
      budget_s: seconds to spend on each; slow ones get three rounds even if that is longer.
    """
    first = {name: seconds(call) for name, call in calls.items()}
    work, inner, rounds = {}, {}, {}
    for name, call in calls.items():
        with counting() as work[name]:
            estimate_s = min(seconds(call), seconds(call))
        inner[name] = max(1, min(200, int(0.01 / estimate_s)))  # 10 ms, well above the timer's
        rounds[name] = max(3, min(60, int(budget_s / (estimate_s * inner[name]))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(rounds.values())):
        for name, call in calls.items():
            # Slow ones sit out some turns, evenly, so that their few rounds span the whole run.
            if turn * rounds[name] % max(rounds.values()) < rounds[name]:
                samples[name].append(seconds(call, inner[name]))
    return {
        name: Timing(
            first_s=first[name],
            best_s=min(samples[name]),
            median_s=statistics.median(samples[name]),
            compiles=work[name].compiles / 2,
            traces=work[name].traces / 2,
        )
        for name in calls
    }


# ---------------------------------------------------------------------------------------------
# The programs


def programs() -> dict[str, dict[str, Call]]:
    """program -> way to run it -> a call that makes its functions anew (but for the last way)."""
    x0 = jnp.array(0.0)
    xs = jnp.ones(8)
    weights, v = jnp.eye(4) * 0.5, jnp.ones(4)
    mean = jax.jit(lambda x: jnp.mean(x - jnp.ones(10000)))  # the jitted body of the issue

    def fresh() -> Callable[[jax.Array], jax.Array]:
        return lambda x: lax.fori_loop(0, 5, lambda i, c: weights @ c, x)

    hand_while = jax.jit(lambda x: lax.while_loop(lambda x: x < 0, mean, x))
    hand_fori = jax.jit(lambda x: lax.fori_loop(0, 10, lambda i, a: a + i * 2.0, x))
    hand_scan = jax.jit(lambda a, xs: lax.scan(lambda a, x: (a + x, a * x), a, xs))
    hand_fresh = jax.jit(lambda w, x: lax.fori_loop(0, 5, lambda i, c: w @ c, x))
    ours = loopjit.lax
    return {
        "while_loop": {
            "jax.lax": lambda: lax.while_loop(lambda x: x < 0, mean, x0),
            "loopjit.lax": lambda: ours.while_loop(lambda x: x < 0, mean, x0),
            "jax.jit by hand": lambda: hand_while(x0),
        },
        "fori_loop": {
            "jax.lax": lambda: lax.fori_loop(0, 10, lambda i, a: a + i * 2.0, x0),
            "loopjit.lax": lambda: ours.fori_loop(0, 10, lambda i, a: a + i * 2.0, x0),
            "jax.jit by hand": lambda: hand_fori(x0),
        },
        "scan": {
            "jax.lax": lambda: lax.scan(lambda a, x: (a + x, a * x), x0, xs),
            "loopjit.lax": lambda: ours.scan(lambda a, x: (a + x, a * x), x0, xs),
            "jax.jit by hand": lambda: hand_scan(x0, xs),
        },
        "loop_jit": {
            "jax.jit(fresh)": lambda: jax.jit(fresh())(v),
            "loop_jit(fresh)": lambda: loopjit.loop_jit(fresh())(v),
            "jax.jit by hand": lambda: hand_fresh(weights, v),
        },
    }


# ---------------------------------------------------------------------------------------------
# Telling


def duration(s: float) -> str:
    """Three digits and a unit: ``41.2 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return f"{s / 1e-6:.3g} us"


def ratio(x: float) -> str:
    """``1.07x``, ``857x``."""
    return f"{x:.2f}x" if x < 10 else f"{x:.0f}x"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first two to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, ["-" * width for width in widths], *rows)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints, and returns 1 if loopjit compiled again what it had compiled before."""
    assert __doc__ is not None
    about, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(prog="python -m loopjit", description=about)
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--json", action="store_true", help="the figures, for programs")
    options = parser.parse_args(argv)

    results = {
        program: measure(ways, budget_s=0.1 if options.quick else 0.6)
        for program, ways in programs().items()
    }
    if options.json:
        as_dicts = {
            program: {way: dataclasses.asdict(timing) for way, timing in ways.items()}
            for program, ways in results.items()
        }
        print(json.dumps({"jax": jax.__version__, "programs": as_dicts}, indent=1))
    else:
        print(f"Loops whose functions are made anew at each call; jax {jax.__version__},", end=" ")
        print(f"{jax.devices()[0].device_kind}.\nCompiles and traces are per later call.\n")
        rows, summary = [], []
        for program, ways in results.items():
            stock, ours, hand = ways.values()
            for way, timing in ways.items():
                rows.append(
                    [
                        program if timing is stock else "",
                        way,
                        duration(timing.first_s),
                        duration(timing.median_s),
                        f"{timing.compiles:g}",
                        f"{timing.traces:g}",
                        ratio(timing.median_s / hand.median_s),
                    ]
                )
            summary.append(
                f"{program}: {ratio(stock.median_s / ours.median_s)} as fast as stock JAX,"
                f" {ratio(ours.median_s / hand.median_s)} the time of the hand-made jit"
            )
        print(
            table(
                ["program", "", "first call", "later", "compiles", "traces", "to by hand"],
                rows,
            )
        )
        print("\n" + "\n".join(summary))

    compiles = sum(list(ways.values())[1].compiles for ways in results.values())
    if not compiles:
        return 0
    if os.environ.get("LOOPJIT_DISABLE"):
        print("\nloopjit compiled again, since LOOPJIT_DISABLE is set.", file=sys.stderr)
        return 0
    print("\nloopjit compiled again what it had compiled before.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
