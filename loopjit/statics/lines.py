"""The user's line, in a traceback or on the stack."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType

_OURS = frozenset({"jax", "jaxlib", "loopjit", "numpy"}) | sys.stdlib_module_names
_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib", "stdlib")}
)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is not of JAX, NumPy, Python or loopjit."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS


def line_of(traceback: TracebackType | None, inside: CodeType) -> str | None:
    """The innermost line of the user's below the function with the code ``inside``.

    Returns:
      ``"model.py:12: range(n)"``; None where no line of the user's is involved.
    """
    frames = list(_walk(traceback))
    starts = [at for at, (frame, _, _) in enumerate(frames) if frame.f_code is inside]
    return _innermost(frames[starts[-1] + 1 if starts else 0 :])


def line_here(inside: CodeType) -> str | None:
    """The innermost line of the user's that is running, called by the function with ``inside``."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not inside:
        frames.append((frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return _innermost(frames[::-1])


Spot = tuple[FrameType, int, int]  # a frame, its instruction and its line


def _walk(traceback: TracebackType | None) -> Iterator[Spot]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno
        traceback = traceback.tb_next


def _innermost(frames: list[Spot]) -> str | None:
    mine = [at for at in frames if is_users(at[0])]
    # A library's line says less than the line that calls the library.
    own = [at for at in mine if not at[0].f_code.co_filename.startswith(_INSTALLED)]
    for frame, instruction, number in (own or mine)[-1:]:
        code = frame.f_code
        text = _text(code, instruction, number)
        name = os.path.basename(code.co_filename)
        return f"{name}:{number}: {text}" if text else f"{name}:{number}"
    return None


def _text(code: CodeType, instruction: int, number: int) -> str:
    """The expression that was being evaluated, or else the line."""
    line = linecache.getline(code.co_filename, number)
    spots = itertools.islice(code.co_positions(), instruction // 2, None)
    start, end, first, last = next(spots, (None, None, None, None))
    if start == end == number and first is not None and last is not None:
        return line.encode()[first:last].decode(errors="replace")
    return line.strip()
