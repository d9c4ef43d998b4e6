"""What libraries do with JAX finds its programs again: process-wide hooks, put in and taken out.

Two places of JAX are hooked: the impl rules of loops that are called op by op (public), and the function
that runs what ``jax.jit`` has traced and its C++ dispatch does not know yet (private). In both, a program
that is structurally equal to one that ran before is replaced by that one, so that JAX finds the executable.
Warm calls of jitted functions come by neither place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from loopjit import compat, lax as loops
from loopjit.engine.state import COUNTS, MAX_SHARED, SHARED
from loopjit.errors import LoopJitTypeError, LoopJitValueError, LoopJitWarning
from loopjit.transform import DISABLED


def install(*, jit: bool = True, lax: bool = False, max_programs: int | None = None) -> None:
    """Lets JAX itself find its programs again, in the whole process, until :func:`uninstall`.

    From now on a loop of ``jax.lax`` that is called op by op, and ``jax.jit`` of a fresh function, also
    inside of libraries that were imported before, compile only if no structurally equal program ran before.
    They are traced as always. Results are those of JAX: bitwise for loops; for ``jax.jit`` of fresh functions
    those of the same program with its captured arrays passed as arguments (XLA computes with captured
    constants while it compiles, so that the last bits may differ). Under ``jax_disable_jit``,
    ``jax_debug_nans``, ``jax_debug_infs`` and leak checking nothing is shared.

    Installs count: the hooks stay until each is taken back by one :func:`uninstall`. On a JAX whose insides
    are not as expected there is one warning, and nothing is hooked. ``LOOPJIT_INSTALL=1`` in the environment
    installs when ``loopjit`` is imported; with ``LOOPJIT_DISABLE=1`` this function does nothing.

    Args:
      jit: whether ``jax.jit`` of fresh functions is included. It needs a private place of JAX; the loops do
        not.
      lax: whether the loops of :mod:`loopjit.lax` stand in the place of those of ``jax.lax`` (``while_loop``,
        ``fori_loop``, ``scan``, ``map``, ``cond``, ``switch``, ``associative_scan``), for whoever looks them
        up there. They find a program by the functions, without tracing them. A loop whose functions cannot be
        compared costs two or three traces more, the first two times.
      max_programs: how many programs are remembered at most; what was used longest ago goes first. They
        hold on to their executables, about 1.5 MB each on a CPU. By default 512. Where installs are nested,
        that of the innermost that says one counts.

    Raises:
      TypeError: ``jit`` or ``lax`` is no bool, or ``max_programs`` no integer.
      ValueError: ``max_programs`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp, loopjit
      >>> def double_until(limit, x):  # somewhere in a library
      ...   return jax.lax.while_loop(lambda x: x < limit, lambda x: x * 2.0, x)
      >>> loopjit.install()
      >>> float(double_until(10.0, jnp.float32(1.0)))  # a second call compiles nothing
      16.0
      >>> loopjit.uninstall()
    """
    _add(_Layer(jit, lax, max_programs), stacklevel=3)


def uninstall() -> None:
    """Takes back the latest :func:`install`; JAX is as it was when all are taken back.

    Where another library has put a hook of its own on top meanwhile, ours stays below it and does nothing.
    Without an install it does nothing.

    Example:
      >>> import loopjit
      >>> loopjit.install()
      >>> loopjit.uninstall()
    """
    with _lock:
        if _layers:
            _layers.pop()
            _settle()


@contextlib.contextmanager
def installed(
    *, jit: bool = True, lax: bool = False, max_programs: int | None = None
) -> Iterator[None]:
    """:func:`install` for the length of a ``with`` statement (or of a function, as a decorator).

    The whole process is concerned, other threads too. What is installed already stays so.

    Args:
      jit: as in :func:`install`.
      lax: as in :func:`install`.
      max_programs: as in :func:`install`.

    Example:
      >>> import jax, jax.numpy as jnp, loopjit
      >>> with loopjit.installed():
      ...   float(jax.jit(lambda x: x + 1.0)(jnp.float32(1.0)))
      2.0
    """
    layer = _Layer(jit, lax, max_programs)
    _add(layer, stacklevel=4)  # contextlib is between
    try:
        yield
    finally:
        with _lock:
            if layer in _layers:  # not if somebody has uninstalled once too often
                _layers.remove(layer)
                _settle()


class _Layer:
    """One install (compared by identity)."""

    def __init__(self, jit: bool, lax: bool, max_programs: int | None):
        for name, value in (("jit", jit), ("lax", lax)):
            if not isinstance(value, bool):
                raise LoopJitTypeError(f"{name}: expected True or False, not {value!r}")
        if max_programs is not None and type(max_programs) is not int:
            raise LoopJitTypeError(
                f"max_programs: expected an integer or None, not {max_programs!r}"
            )
        if max_programs is not None and max_programs < 1:
            raise LoopJitValueError(f"max_programs: expected at least 1, not {max_programs}")
        self.jit = jit
        self.lax = lax
        self.max_programs = max_programs
        self.inert = False


class _Hook:
    """A function of ours in one place of JAX.

    Args:
      read, write: the place.
      make: given this hook, makes the function; it has to pass through when the hook is not ``active``.

    Attributes:
      active: whether it is in force.
      before: what stood there before.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        make: Callable[[_Hook], Any],
    ):
        self._read, self._write = read, write
        self.active = True
        self.before = read()
        self._ours = make(self)
        write(self._ours)

    def leave(self) -> None:
        """Takes it out, or leaves it below what another library has put on top of it."""
        self.active = False
        if self._read() is self._ours:
            self._write(self.before)


_lock = threading.RLock()
_layers: list[_Layer] = []
_warned = False
# What is in force.
_loops: list[_Hook] = []
_jit: list[_Hook] = []
_lax: list[_Hook] = []


def _add(layer: _Layer, stacklevel: int) -> None:
    global _warned
    if DISABLED:
        return
    with _lock:
        unknown = compat.unknown_in_loops() if not _loops else None
        if layer.jit and not _jit and unknown is None:
            unknown = compat.unknown_in_jit()
        if unknown is not None:
            layer.inert = True
            if not _warned:
                _warned = True
                warnings.warn(
                    f"loopjit.install() does not know this version of JAX ({unknown}) and leaves it as it "
                    "is: libraries compile as without it."
                    + " loopjit.install(jit=False) may work."
                    * layer.jit,
                    LoopJitWarning,
                    stacklevel=stacklevel,
                )
        _layers.append(layer)
        _settle()


def _settle() -> None:
    """Puts hooks in, or takes them out, as the layers want."""
    wanted = [layer for layer in _layers if not layer.inert]
    bounds = [layer.max_programs for layer in wanted if layer.max_programs is not None]
    SHARED.limit(bounds[-1] if bounds else MAX_SHARED)
    SHARED.active = bool(wanted)
    _switch(_loops, bool(wanted), lambda: map(_loop_hook, compat.EAGER_PRIMITIVES))
    _switch(_jit, any(layer.jit for layer in wanted), lambda: [_jit_hook()])
    _switch(_lax, any(layer.lax for layer in wanted), lambda: map(_lax_hook, loops.LOOPS))


def _switch(hooks: list[_Hook], on: bool, make: Callable[[], Iterable[_Hook]]) -> None:
    if on and not hooks:
        hooks.extend(make())
    while hooks and not on:
        hooks.pop().leave()


def _jit_hook() -> _Hook:
    return _Hook(compat.get_runner, compat.set_runner, _make_runner)


def _lax_hook(name: str) -> _Hook:
    make = functools.partial(_make_loop, name)
    return _Hook(lambda: getattr(jax.lax, name), lambda f: setattr(jax.lax, name, f), make)


def _make_loop(name: str, hook: _Hook) -> Callable[..., Any]:
    original, ours = hook.before, getattr(loops, name)

    @functools.wraps(original)
    def loop(*args: Any, **kwargs: Any) -> Any:
        if not hook.active or compat.is_tracing():
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    # So that it is pickled by the name under which it is found.
    loop.__module__, loop.__qualname__ = "jax.lax", name
    return loop


def _loop_hook(primitive: Any) -> _Hook:
    make = functools.partial(_make_rule, primitive)
    return _Hook(lambda: primitive.impl, primitive.def_impl, make)


def _make_rule(primitive: Any, hook: _Hook) -> Callable[..., Any]:
    original, usual = hook.before, compat.compiles_op_by_op(primitive)

    def rule(*args: Any, **params: Any) -> Any:
        if not hook.active or _steps_aside():
            return original(*args, **params)
        operation = SHARED.operation(primitive, params)
        if operation is None:
            return original(*args, **params)
        out = operation.call(*args) if usual else original(*args, **operation.params)
        if operation.found:
            COUNTS.interned += 1
        elif not _jit:  # else it was counted when its program ran
            COUNTS.misses += 1
        operation.found = True
        return out

    return rule


def _make_runner(hook: _Hook) -> Callable[..., Any]:
    original = hook.before

    @functools.wraps(original)
    def runner(*args: Any, **params: Any) -> Any:
        if not hook.active or _steps_aside() or compat.donates_in_vain(params):
            return original(*args, **params)
        place = functools.partial(compat.only_device, args, params)
        shared, is_new = SHARED.programs.find(params["jaxpr"], place)
        if shared is None or (shared.consts and shared.device != place()):
            return original(*args, **params)
        home, consts, _, found = shared
        if is_new:
            COUNTS.interned += found
            COUNTS.misses += not found
            home.name = home.name or params["name"]
        if home.once.is_called_here():
            return original(*args, **params)
        params["jaxpr"], params["name"] = home.jaxpr, home.name
        if consts:
            return home.once.call(compat.run_with_consts, original, consts, args, params)
        if home.once.done:
            return original(*args, **params)
        return home.once.call(original, *args, **params)

    return runner


def _steps_aside() -> bool:
    return compat.watch.touched and compat.bypass()


if os.environ.get("LOOPJIT_INSTALL", "").lower() not in ("", "0", "false"):
    install()
