"""``loop_jit``: stages a whole function, loops included, into programs that equal functions share."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax

from loopjit import compat
from loopjit.engine import trail
from loopjit.engine.call import Target
from loopjit.engine.fast import Fast
from loopjit.engine.job import Job
from loopjit.engine.state import (
    COUNTS,
    STATES,
    CacheInfo,
    Counts,
    State,
    signature_of,
)
from loopjit.engine.warm import Found, fast_call, find_state
from loopjit.errors import LoopJitTypeError, LoopJitValueError, LoopJitWarning, StrictError
from loopjit.memo import LRU
from loopjit.options import PLAIN, Options
from loopjit.programs.program import Mismatch
from loopjit.signature.arguments import Layout, is_traced, layout_of
from loopjit.signature.code import Usage, code_info
from loopjit.signature.describe import KINDS, Description, describe
from loopjit.signature.host import fits, rank
from loopjit.signature.replace import REPLACERS, Replacer
from loopjit.statics import report
from loopjit.statics.calls import Parameters

P = ParamSpec("P")
R = TypeVar("R")

DISABLED = os.environ.get("LOOPJIT_DISABLE", "").lower() not in ("", "0", "false")

_JIT_OPTIONS = tuple(
    name for name in inspect.signature(jax.jit).parameters if name not in ("fun", "f")
)
_OUR_OPTIONS = ("max_programs", "strict", "traced_argnames")
_INLINED = frozenset({"static_argnums", "static_argnames"})
"""Options of ``jax.jit`` that say nothing about the program itself."""
_PLAIN_INTS = frozenset({int, bool})
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ABSENT: Any = object()
_PATIENCE = 64
"""So many calls go a longer way before it is tried again to find the shortest; each time twice as many."""
_MOST_PATIENCE = 1 << 16
_watch = compat.watch
_log = logging.getLogger("loopjit")


def _forwarded(name: str) -> Any:
    """An attribute of the wrapped function, to be read and to be set."""

    def get(self: Any) -> Any:
        return getattr(self.__wrapped__, name)

    def put(self: Any, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    return property(get, put)


class LoopJitted(Generic[P, R]):
    """A function staged by :func:`loop_jit`.

    Calling it runs a compiled program. It is a descriptor, so that it works as a method, and has the name,
    the docstring, the signature and the attributes of the function that it wraps.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "__wrapped__",
        "_counts",
        "_epoch",
        "_fast",
        "_left",
        "_options",
        "_own",
        "_parameters",
        "_patience",
        "_plain",
    )

    def __init__(self, fun: Callable[P, R], options: Options = PLAIN):
        self.__wrapped__ = fun
        self._options = options
        self._fast: Fast | None = None
        self._left = self._patience = _PATIENCE
        self._own: LRU[Hashable, State] | None = None
        self._parameters: Parameters | None = None
        self.__doc__ = getattr(fun, "__doc__", None)
        self.__module__ = getattr(fun, "__module__", "")

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        fast = self._fast
        if fast is not None:
            hidden = fast.check(self.__wrapped__)
            if hidden is not None and not (fast.numbers and not compat.trace_state_is_clean()):
                quick = fast.quick
                static = fast.static
                try:
                    spelled: Any = args
                    if kwargs or len(args) > fast.required:
                        spelled = fast.spell(args, kwargs)
                    if quick is not None:
                        out = quick(hidden, *spelled) if hidden else quick(*spelled)
                    elif static is not None and type(spelled[static]) in fast.by_value:
                        value = spelled[static]
                        call = fast.by_value[type(value)][value]
                        rest = spelled[:static]
                        if len(spelled) > static + 1:
                            rest += spelled[static + 1 :]
                        out = call(hidden, *rest) if hidden else call(*rest)
                    else:
                        out = fast.call(hidden, spelled)
                except LookupError:
                    pass  # not known here: go the longer way
                except (Mismatch, TypeError, OverflowError):
                    return self._slow(args, kwargs)
                else:
                    fast.hits += 1
                    return out
        given, names = args, kwargs
        fun = self.__wrapped__
        if (
            kwargs
            or type(fun) is not types.FunctionType
            or (fun.__defaults__ or fun.__kwdefaults__) is not None
        ):
            args, kwargs = self._params().spell(args, kwargs)  # type: ignore[assignment]
        self._left -= 1
        if self._left <= 0 and not kwargs:
            # Called again and again the longer way: there what is needed for the shortest one is found.
            self._left = self._patience = min(2 * self._patience, _MOST_PATIENCE)
            return self._slow(given, names)
        if not compat.trace_state_is_clean() and self._is_inlined(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        try:
            out = fast_call(self._find(), args, kwargs)
        except (Mismatch, TypeError, OverflowError):
            # TypeError: a leaf that JAX cannot trace, inside of a container where there was none
            # before; or an error of the user's, which comes again.
            return self._slow(args, kwargs)
        if self._own is not None:
            self._counts.hits += 1
        COUNTS.hits += 1
        if fast is not None and not kwargs:
            fast.knows(given, names)
        return out

    def _params(self) -> Parameters:
        parameters = self._parameters
        if parameters is None or not parameters.are_of(self.__wrapped__):
            # Shardings are given for the arguments as they stand.
            stays = "in_shardings" in self._options.jit
            parameters = self._parameters = Parameters(self.__wrapped__, stays)
        return parameters

    def _is_inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call within a trace is traced in place: so that ints given to it stay ints."""
        return (
            not DISABLED
            and self._options.jit.keys() <= _INLINED
            and not _PLAIN_INTS.isdisjoint(map(type, jax.tree_util.tree_leaves((args, kwargs))))
            and compat.is_tracing()
        )

    def _find(self) -> Found:
        """What is known of the function as it is now."""
        found = find_state((self.__wrapped__,), self._options.key)
        if found[0] is not None or self._own is None or self._epoch is not _watch.epoch:
            return found
        if _watch.touched and compat.bypass():
            return found
        signature = signature_of((self.__wrapped__,), self._options.key, False, self._counts.holds)
        return self._own.peek(signature.key), [], signature.pinned

    def _slow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, names = args, kwargs
        args, kwargs = self._params().spell(args, kwargs)
        if not compat.trace_state_is_clean() and self._is_inlined(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        if DISABLED or compat.bypass():
            return self._jax_jit(args, kwargs)(*args, **kwargs)
        job = self._job(args, kwargs)
        try:
            out = job.run()
        except (StrictError, RuntimeError, LoopJitWarning):
            raise
        except Exception:
            _log.debug("%s: left to jax.jit", job.target.name, exc_info=True)
            if job.ran:
                return job.out
            # If it is the caller's doing, JAX says so in its own words, with the caller's names.
        else:
            self._settle(job, given, names)
            return out
        return self._explained(job, args, kwargs)

    def _explained(self, job: Job, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call under ``jax.jit``; if that fails, too, with a note on what we know."""
        note, layout = job.statics.note, job.statics.users
        del job  # it holds errors, and these hold tracers
        try:
            if any(type(x) is int and not fits(x) for x in jax.tree_util.tree_leaves(args)):
                return self._plain_jit()(*args, **kwargs)
            return self._under_jit(layout, args, kwargs)(*args, **kwargs)
        except Exception as error:
            if note is not None:
                report.add_note(error, note)
            raise

    def _job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        if self._own is None or self._epoch is not compat.watch.epoch:
            self._reset()
        return Job(self._target(), args, kwargs)

    def _reset(self) -> None:
        self._epoch = compat.watch.epoch
        self._counts = Counts()
        self._plain: LRU[Hashable, Any] = LRU(8)
        self._own = LRU(self._options.max_programs)

    def _target(self) -> Target:
        options = self._options
        fun = self.__wrapped__
        return Target(
            (fun,),
            _first,
            _name(fun),
            options.key,
            options.for_layout,
            options.explicit,
            self._own,
            self._counts,
            options.strict,
            promotes=True,
            traced=options.traced,
            parameters=self._params(),
            usages=_usages(fun),
            max_programs=options.max_programs,
        )

    def _settle(self, job: Job, given: tuple[Any, ...], names: dict[str, Any]) -> None:
        """Remembers the program for the next call, where a trail says all that can change."""
        if not hasattr(job, "used") or compat.watch.touched or job.used.state.private:
            return
        fun, state, fast = self.__wrapped__, job.used.state, self._fast
        if fast is None or fast.state is not state or fast.check(fun) is None:
            if fast is not None:
                self._counts.hits += fast.hits
                if fast.hits >= self._patience:
                    self._left = self._patience = _PATIENCE
            shared = self._own is None or all(own is not state for own in self._own.values())
            states = STATES if shared or self._own is None else self._own
            check = trail.trail_of(fun, self._options.key, state, states, shared)
            fast = self._fast = (
                None
                if check is None
                else Fast(check, state, shared, self._params(), self._params().positional_defaults)
            )
        if fast is not None:
            if fast.learn(job):
                self._left = self._patience = max(self._patience // 2, _PATIENCE)
            if not job.call.kwargs:
                fast.knows(given, names)

    # -- as jax.jit -----------------------------------------------------------------------------------

    def _jax_jit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function under ``jax.jit``, with the leaves fixed that must be."""
        layout = None
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        if not DISABLED and any(rank(leaf) is not None for leaf in leaves):
            try:
                layout = self._job(args, kwargs).layout()
            except Exception:
                _log.debug("%s: not analysed", _name(self.__wrapped__), exc_info=True)
        return self._under_jit(layout, args, kwargs)

    def _under_jit(
        self, layout: Layout | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if layout is None:
            layout = layout_of(args, kwargs, self._options.explicit, Description(hoist=False))
        if not layout.all_traced and not (
            not layout.promoted and self._is_jax_static(args, kwargs)
        ):
            return _WithStatics(self.__wrapped__, layout, self._options)
        return self._plain_jit()

    def _plain_jit(self) -> Any:
        if self._own is None:
            self._reset()
        # A new one for each state of what is captured: `jax.jit` does not notice that it changes.
        key = signature_of((self.__wrapped__,), self._options.key, hoist=False).key
        plain = self._plain.get(key)
        return plain or self._plain.put(
            key, jax.jit(_forward(self.__wrapped__), **self._options.jit)
        )

    def _is_jax_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what is static is declared, and hashable, as ``jax.jit`` wants it."""
        explicit = self._options.explicit(args, kwargs)
        if not explicit:
            return False
        rest = [v for k, v in [*enumerate(args), *kwargs.items()] if k not in explicit]
        if not all(is_traced(leaf) for leaf in jax.tree_util.tree_leaves(rest)):
            return False
        try:
            hash(tuple([args[k] if isinstance(k, int) else kwargs[k] for k in explicit]))
        except TypeError:
            return False
        return True

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Lowers the function for these arguments, as ``jax.jit(fun).lower`` does."""
        args, kwargs = self._params().spell(args, kwargs)  # type: ignore[assignment]
        return self._jax_jit(args, kwargs).lower(*args, **kwargs)

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces the function for these arguments, as ``jax.jit(fun).trace`` does."""
        args, kwargs = self._params().spell(args, kwargs)  # type: ignore[assignment]
        return self._jax_jit(args, kwargs).trace(*args, **kwargs)

    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Shapes and dtypes of the results, as ``jax.eval_shape`` gives them."""
        args, kwargs = self._params().spell(args, kwargs)  # type: ignore[assignment]
        return self._jax_jit(args, kwargs).eval_shape(*args, **kwargs)

    # -- cache ----------------------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Forgets the programs of this function, and of all that are equal to it."""
        self._fast = None
        state = self._shared_state()
        if state is not None:
            state.clear_sites()
            state.programs.clear()
        self._own = None

    def _shared_state(self) -> State | None:
        signature = signature_of((self.__wrapped__,), self._options.key)
        return None if signature.reasons else STATES.get(signature.key)

    def cache_info(self) -> CacheInfo:
        """What happened to the calls of this function object, see :class:`loopjit.CacheInfo`."""
        counts = Counts() if self._own is None else self._counts
        return CacheInfo(
            counts.hits + (0 if self._fast is None else self._fast.hits),
            counts.interned,
            counts.misses,
            len(self.signatures),
            self._options.max_programs,
        )

    @property
    def statics(self) -> report.Statics:
        """The leaves of the arguments in all calls so far: which are static, and why.

        Returns:
          A tuple of :class:`loopjit.LeafInfo`, whose text is a table.

        Example:
          >>> import jax.numpy as jnp
          >>> from loopjit import loop_jit
          >>> @loop_jit
          ... def power(x, n, scale):
          ...     for _ in range(n):
          ...         x = x * scale
          ...     return x
          >>> float(power(jnp.float32(1.0), 3, 2.0))
          8.0
          >>> [leaf.path for leaf in power.statics if leaf.static]
          ['n']
        """
        leaves: dict[str, report.LeafInfo] = {}
        for state in self._states():
            for path, info in state.leaves.items():
                if info.static or path not in leaves:
                    leaves[path] = info
        return report.Statics(sorted(leaves.values(), key=self._params().order))

    def _states(self) -> list[State]:
        states = [] if self._own is None else self._own.values()
        shared = self._shared_state()
        return states if shared is None else [shared, *states]

    @property
    def signatures(self) -> tuple[Any, ...]:
        """The avals of the inputs of each program of this function (captured arrays come first)."""
        return tuple(
            tuple(entry.program.avals[len(entry.consts) :])
            for state in self._states()
            for entry in state.programs.values()
        )

    # -- as a function --------------------------------------------------------------------------------

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not yet initialised: copying and unpickling ask
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    # `%autoreload` changes decorated functions in place through these.
    __code__ = _forwarded("__code__")
    __defaults__ = _forwarded("__defaults__")
    __kwdefaults__ = _forwarded("__kwdefaults__")

    def __repr__(self) -> str:
        fun = self.__wrapped__
        return f"<loop_jit of {getattr(fun, '__qualname__', type(fun).__qualname__)}>"

    def __reduce__(self) -> Any:
        return _rebuild, (self.__wrapped__, self._options.jit, self._options.ours)


def _forward(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A new function that does the same: ``jax.jit`` knows functions by identity."""

    @functools.wraps(fun)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return _stand_in(forward, fun)


def _stand_in(function: Any, fun: Any) -> Any:
    """Lets errors of JAX, which name functions by their code, name the user's function."""
    code = getattr(fun, "__code__", None)
    if isinstance(code, types.CodeType):
        function.__code__ = function.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name
        )
    return function


def _first(fun: Callable[..., Any]) -> Callable[..., Any]:
    return fun


def _usages(fun: Any) -> dict[int | str, Usage] | None:
    return code_info(fun.__code__).params if type(fun) is types.FunctionType else None


def _name(fun: Any) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    name = getattr(fun, "__name__", None) or type(fun).__name__
    return name if isinstance(name, str) else "loop_jit"


def _rebuild(
    fun: Callable[..., Any], jit: dict[str, Any], ours: dict[str, Any]
) -> LoopJitted[..., Any]:
    return LoopJitted(fun, Options(fun, jit, ours) if jit or ours else PLAIN)


class _WithStatics:
    """``jax.jit`` of a function some of whose leaves are fixed, for ``lower`` and its like."""

    def __init__(self, fun: Callable[..., Any], layout: Layout, options: Options):
        self._fun = fun
        self._layout = layout
        self._options = options

    def _jitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        dynamic, keywords = self._layout.split(args, kwargs, Description(hoist=False))
        build = self._layout.rebuild(args, kwargs, lambda value, usage=None: value)
        options = self._options.for_layout(self._layout, args, kwargs, 0)

        def run(*dynamic: Any, **keywords: Any) -> Any:
            new_args, new_kwargs = build(dynamic, keywords)
            return self._fun(*new_args, **new_kwargs)

        run.__name__ = run.__qualname__ = _name(self._fun)
        return jax.jit(_stand_in(run, self._fun), **options.jit), dynamic, keywords

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted, dynamic, keywords = self._jitted(args, kwargs)
        return jitted(*dynamic, **keywords)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted, dynamic, keywords = self._jitted(args, kwargs)
        return jitted.lower(*dynamic, **keywords)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted, dynamic, keywords = self._jitted(args, kwargs)
        return jitted.trace(*dynamic, **keywords)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted, dynamic, keywords = self._jitted(args, kwargs)
        return jitted.eval_shape(*dynamic, **keywords)


@overload
def loop_jit(fun: Callable[P, R], /) -> LoopJitted[P, R]: ...
@overload
def loop_jit(fun: Callable[P, R], /, **options: Any) -> LoopJitted[P, R]: ...
@overload
def loop_jit(**options: Any) -> Callable[[Callable[P, R]], LoopJitted[P, R]]: ...


def loop_jit(fun: Any = _ABSENT, /, **options: Any) -> Any:
    """Stages a function, loops and all, into one compiled program that equal functions share.

    Like :func:`jax.jit`, but the program is found by what the function *is*: its code and all that it
    captures, recursively. A fresh lambda, a re-run notebook cell, a bound method or a partial that equals
    one seen before is neither traced nor compiled. Captured arrays become hidden inputs, so their values
    do not count. A changed global, closure variable or attribute is noticed.

    What JAX cannot trace (strings, callables, enums, settings objects, also unhashable ones, and also as
    leaves of containers) is static by value. Numbers, and small arrays of ints or bools, become static, leaf
    by leaf, where the function needs their values: see the attribute ``statics`` of the result.

    Args:
      fun: the function: any callable, also a method, a :func:`functools.partial`, or the result of
        ``jax.grad``, ``jax.vmap`` and the like. Left out, a decorator with these options is returned.
      **options: every option of :func:`jax.jit`, with its meaning, and:

        - ``max_programs`` (int): how many versions of a function are remembered that cannot be shared
          with equal ones (default 256).
        - ``strict`` (bool): raise :class:`loopjit.StrictError` where something captured is not
          understood, instead of tracing each fresh function, or where an array had to be read to the
          host.
        - ``traced_argnames`` (str or sequence of str): arguments whose numbers never become static: where
          their values are needed, JAX's error is raised.

    Returns:
      A callable with the attributes of the function, and ``lower``, ``trace``, ``eval_shape``,
      ``clear_cache``, ``cache_info``, ``signatures`` and ``statics``.

    Raises:
      TypeError: ``fun`` is not callable, is a generator or a coroutine function, or an option is unknown.
      ValueError: a static or donated argument does not exist.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from loopjit import loop_jit
      >>> def grow(x, rate):
      ...     return loop_jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, v: v * rate, x))(x)
      >>> float(grow(jnp.float32(1.0), jnp.float32(2.0)))
      8.0
      >>> float(grow(jnp.float32(1.0), jnp.float32(3.0)))  # neither traced nor compiled again
      27.0
    """
    ours: dict[str, Any] = {}
    if options:
        _check_options(options)
        ours = {name: options.pop(name) for name in _OUR_OPTIONS if name in options}
    if fun is _ABSENT:
        return lambda f: loop_jit(f, **ours, **options)
    if isinstance(fun, (staticmethod, classmethod)):  # @loop_jit above @staticmethod
        return type(fun)(loop_jit(fun.__func__, **ours, **options))
    _check_function(fun)
    try:
        weakref.ref(fun)
    except TypeError:  # `jax.jit` needs weak references, which a NumPy ufunc does not allow
        fun = _forward(fun)
    if not options and not ours:
        return LoopJitted(fun)
    if options:
        jax.jit(fun, **options)  # raises what JAX raises for options that make no sense
    if "traced_argnames" in ours:
        ours["traced_argnames"] = _traced_argnames(fun, ours["traced_argnames"])
    out = _rebuild(fun, options, ours)
    for name, one, other in out._options.contradictions():
        raise LoopJitValueError(
            f"The argument {name!r} of {_name(fun)} is declared {one}, and it is {other}: it cannot be"
            " both. Take it off one of the options."
        )
    return out


def _traced_argnames(fun: Any, names: Any) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return names
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in names:
            if name not in parameters:
                raise LoopJitValueError(
                    f"traced_argnames names {name!r}, but {_name(fun)} has no such parameter. Its"
                    f" parameters are: {', '.join(parameters)}."
                )
    return names


def _check_options(options: dict[str, Any]) -> None:
    unknown = [name for name in options if name not in _JIT_OPTIONS and name not in _OUR_OPTIONS]
    if unknown:
        raise LoopJitTypeError(
            f"loop_jit got an unknown option {unknown[0]!r}. Its options are those of jax.jit ("
            f"{', '.join(_JIT_OPTIONS)}) and {', '.join(_OUR_OPTIONS)}."
        )
    names = options.get("traced_argnames", ())
    if not (isinstance(names, str) or all(isinstance(name, str) for name in names)):
        raise LoopJitTypeError(
            f"traced_argnames must be a str or a sequence of str, got {names!r}."
        )
    count = options.get("max_programs", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise LoopJitValueError(f"max_programs must be a positive int, got {count!r}.")


def _check_function(fun: Any) -> None:
    if type(fun) is types.FunctionType:
        flags = fun.__code__.co_flags
        if not flags & _RESUMABLE:
            return
    elif not callable(fun):
        raise LoopJitTypeError(
            f"Expected a callable value, got {fun!r} of type {type(fun).__name__} as fun of loop_jit."
            " Options are passed by name: @loop_jit(static_argnames=...)."
        )
    for test, what in (
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if test(fun):
            raise LoopJitTypeError(
                f"Expected a function, got {what}: {fun!r}, as fun of loop_jit."
                " Return the results (stack them, or use jax.lax.scan) instead."
            )


def _describe_loop_jitted(value: LoopJitted[..., Any], usage: Usage, d: Description) -> None:
    d.out += (LoopJitted, value._options.key)
    if not d.again(value):
        describe(value.__wrapped__, None, d)


def _replace_loop_jitted(r: Replacer, value: LoopJitted[..., Any], usage: Usage) -> Any:
    return r.once(value, lambda: LoopJitted(r.value(value.__wrapped__), value._options))


def _watch_loop_jitted(w: Any, expression: str, value: LoopJitted[..., Any], usage: Usage) -> None:
    name = w.typed(expression, value)
    w.same(f"{name}._options", value._options)
    if not w.again(name, value):
        w.value(f"{name}.__wrapped__", value.__wrapped__, None)


KINDS[LoopJitted] = _describe_loop_jitted
trail.KINDS[LoopJitted] = _watch_loop_jitted
REPLACERS[LoopJitted] = _replace_loop_jitted

__all__ = ["LoopJitted", "loop_jit"]
