"""Counts what JAX compiles, lowers and traces, from JAX's own public monitoring events.

    from counting import counting

    with counting() as n:
        jax.block_until_ready(f(x))
    assert (n.compiles, n.traces) == (0, 0)

Build inputs outside of the block: ``jnp.ones`` compiles too. One trace event can cover several
functions (an eager ``while_loop`` reports its condition and body as one). And a function that
counts its own calls writes to what it captures, which is itself a reason to trace it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import jax

_COMPILE = "/jax/core/compile/backend_compile_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_total = {_COMPILE: 0, _LOWER: 0, _TRACE: 0}
_lock = threading.Lock()


def _listen(event: str, duration_secs: float, **_: object) -> None:
    if event in _total:
        with _lock:
            _total[event] += 1


# Once per process and for good: taking a listener away again is private in JAX.
jax.monitoring.register_event_duration_secs_listener(_listen)


@dataclasses.dataclass
class Counts:
    """Filled in when the block ends."""

    compiles: int = 0
    lowers: int = 0
    traces: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts the compiles, lowerings and traces of all threads while the block runs."""
    counts, before = Counts(), dict(_total)
    try:
        yield counts
    finally:
        counts.compiles = _total[_COMPILE] - before[_COMPILE]
        counts.lowers = _total[_LOWER] - before[_LOWER]
        counts.traces = _total[_TRACE] - before[_TRACE]
