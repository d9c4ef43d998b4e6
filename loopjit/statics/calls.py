"""One spelling for all spellings of a call: ``f(x)``, ``f(x, 3)``, ``f(x, n=3)`` and ``f(n=3, x=x)``.

Arguments are bound as Python binds them, by what the code object says; a decorator that reports the
signature of what it wraps takes its arguments as it takes them, and they stay as they are.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from loopjit.signature.code import constant_key

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_BY_VALUE = (bool, int, float, complex, str, bytes, tuple)


class Parameters:
    """The parameters of a callable, and how to spell its calls.

    What can be passed by position is passed by position, the rest by name in the order of the signature.
    What is given and is the default all the same is left out: it is the function that has its defaults, and
    they are constants of its program, as under ``jax.jit``.

    Args:
      fun: the callable.
      stays: calls are left as they are.
    """

    def __init__(self, fun: Callable[..., Any], stays: bool = False):
        self._function, bound = _function_of(fun)
        self._stays = stays
        self.names: tuple[str, ...] = ()
        self.keyword_only: tuple[str, ...] = ()
        self._varargs: str | None = None
        self._takes_any_name = False
        self._positional_only = 0
        self.code: CodeType | None = None
        if self._function is None:
            return
        code = self.code = self._function.__code__
        positional = code.co_varnames[: code.co_argcount]
        end = code.co_argcount + code.co_kwonlyargcount
        self.keyword_only = code.co_varnames[code.co_argcount : end]
        if code.co_flags & inspect.CO_VARARGS:
            self._varargs = code.co_varnames[end]
        self._takes_any_name = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        self.names = positional[bound:]
        self._positional_only = max(code.co_posonlyargcount - bound, 0)

    def are_of(self, fun: Callable[..., Any]) -> bool:
        """Whether these are the parameters of ``fun``, which may have been changed in place."""
        function, _ = _function_of(fun)
        return function is self._function and (function is None or function.__code__ is self.code)

    @property
    def positional_defaults(self) -> tuple[Any, ...] | None:
        """Those of the last positional parameters."""
        return None if self._function is None or self._stays else self._function.__defaults__

    def path(self, key: int | str) -> str:
        """What the user calls an argument."""
        if isinstance(key, str):
            return key
        if key < len(self.names):
            return self.names[key]
        if self._varargs is not None:
            return f"{self._varargs}[{key - len(self.names)}]"
        return f"args[{key}]"

    def order(self, leaf: Any) -> int:
        """Sorts what has a ``path`` by the parameters."""
        names = [*self.names, *self.keyword_only]
        name = re.split(r"\W", leaf.path, maxsplit=1)[0]
        return names.index(name) if name in names else len(names)

    def spell(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The one spelling of a call. A call that Python would refuse comes back as it is."""
        function = self._function
        count, names = len(args), self.names
        if function is None or self._stays:
            return args, kwargs
        defaults = function.__defaults__ or ()
        first_default = len(names) - len(defaults)
        if not kwargs and not self.keyword_only and count <= first_default:
            return args, kwargs
        if count > len(names):  # nothing before the varargs can be left out
            if self._varargs is None or not kwargs:
                return args, kwargs
            first_default = len(names)
        rest = dict(kwargs)
        # What is taken by position only can be left out at the end.
        end = min(count, self._positional_only)
        while end > first_default and is_default(args[end - 1], defaults[end - 1 - first_default]):
            end -= 1
        values = list(args[:end])
        named: dict[str, Any] = {}
        left_out = end < self._positional_only
        if left_out and end < first_default:
            return args, kwargs  # one is missing
        for at in range(self._positional_only, len(names)):
            name = names[at]
            if at < count:
                value = args[at]
            elif name in rest:
                value = rest.pop(name)
            elif at < first_default:
                return args, kwargs  # it is missing
            else:
                left_out = True
                continue
            if at >= first_default and is_default(value, defaults[at - first_default]):
                left_out = True
            elif left_out:
                named[name] = value
            else:
                values.append(value)
        keyword_defaults = function.__kwdefaults__ or {}
        for name in self.keyword_only:
            if name in rest:
                value = rest.pop(name)
                if name not in keyword_defaults or not is_default(value, keyword_defaults[name]):
                    named[name] = value
            elif name not in keyword_defaults:
                return args, kwargs
        if rest and not self._takes_any_name:
            return args, kwargs
        if not rest.keys().isdisjoint(names[self._positional_only :]):
            return args, kwargs  # given twice
        return (*values, *args[len(names) :]), {**named, **rest}

    def defaults(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The defaults that such a call uses, by name."""
        function = self._function
        if function is None:
            return {}
        defaults = function.__defaults__ or ()
        left = zip(self.names[::-1], defaults[::-1], strict=False)
        used = {name: value for name, value in left if name not in self.names[: len(args)]}
        used.update(function.__kwdefaults__ or {})
        return {name: value for name, value in used.items() if name not in kwargs}


def _function_of(fun: Any) -> tuple[FunctionType | None, int]:
    """The Python function that binds the arguments, and how many of its parameters are bound."""
    if type(fun) is FunctionType:
        return fun, 0
    if type(fun) is MethodType:
        fun = fun.__func__
    else:
        fun = vars(type(fun)).get("__call__")
    return (fun, 1) if type(fun) is FunctionType and fun.__code__.co_argcount else (None, 0)


def is_default(value: Any, default: Any) -> bool:
    """Whether a value is, or is by type and bits, the default."""
    if value is default:
        return is_plain(default)
    if type(value) is not type(default):
        return False
    if type(default) is tuple and not all(map(is_plain, default)):
        return False
    return type(default) in _BY_VALUE and constant_key(value) == constant_key(default)


def is_plain(value: Any) -> bool:
    """Whether a default says all that it is by its identity: nobody can change it."""
    if type(value) in _BY_VALUE:
        return type(value) is not tuple or all(map(is_plain, value))
    return value is None or isinstance(value, (enum.Enum, np.generic, type))
