"""Arrays that a nested ``jax.jit`` captured become inputs, so that their values do not count."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from loopjit import compat

_Params = dict[str, Any]
_Key = tuple[Any, ...]  # stands for a const: its identity, and the abstract value it is taken for
_Group = tuple[tuple[Any, ...], int]  # jaxprs with one list of operands, and where that list begins


class Lifted(NamedTuple):
    """A program without consts in the functions that it calls.

    Attributes:
      jaxpr: open.
      consts: its first inputs. An array that is captured several times is one.
      deep: some were in a loop or a branch, and not just in functions that are called. (Had they been
        tracers, JAX would have made operands of them in another order.)
    """

    jaxpr: Any
    consts: list[Any]
    deep: bool


def lift(jaxpr: Any, consts: Sequence[Any], transformable: bool = True) -> Lifted:
    """Moves the consts of functions that a jaxpr calls, in loops and branches too, to its front.

    What cannot be moved stays where it is: a jaxpr with such a const is not interned.

    Args:
      jaxpr: open; its first inputs are ``consts``.
      consts: of the jaxpr.
      transformable: leave functions with rules of their own (``jax.custom_jvp`` ...) as they are. Lowering
        reads nothing but the function, so that False is for programs that are about to run.
    """
    if _is_fixed(jaxpr):
        return Lifted(jaxpr, list(consts), False)
    one_pass = _Lift(transformable)
    new, keys = one_pass.open(jaxpr, consts)
    return Lifted(new, [one_pass.consts[key[0]] for key in keys], one_pass.deep)


class _Unknown(Exception):
    """An equation that is not as we know it."""


class _Row(NamedTuple):
    """A primitive that holds jaxprs. Both functions raise `KeyError` or `_Unknown` to be left alone.

    Attributes:
      find: the jaxprs in its parameters.
      change: the parameters that change, given all, the new jaxprs, and how many operands each group gets.
    """

    find: Callable[[_Params], list[_Group]]
    change: Callable[[_Params, list[tuple[Any, ...]], list[int]], _Params]


# The jaxprs below which there is nothing to lift. They are the same at each trace that meets them.
_nothing: dict[bool, weakref.WeakSet[Any]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}


class _Lift:
    """One pass. A jaxpr that is met twice becomes one new jaxpr.

    Attributes:
      consts: by identity.
      deep: see `Lifted`.
    """

    def __init__(self, transformable: bool) -> None:
        self.consts: dict[int, Any] = {}
        self.deep = False
        self._rows = _ROWS if transformable else {**_ROWS, **_RULES}
        self._nothing = _nothing[transformable]
        self._lifted: dict[int, tuple[Any, list[_Key]]] = {}
        self._widened: dict[Any, Any] = {}

    def open(self, jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[_Key]]:
        """An open jaxpr that takes all consts from below before its own, and what it takes first."""
        pool: dict[_Key, Any] = {}
        for var, const in zip(jaxpr.invars, consts, strict=False):
            key: _Key = (id(const), var.aval)
            while key in pool:
                key = (*key, "again")
            pool[key] = var
            self.consts[id(const)] = const
        own = list(pool)
        rows = self._rows
        equations = [
            self._equation(rows[e.primitive.name], e, pool) if e.primitive.name in rows else e
            for e in jaxpr.eqns
        ]
        if all(map(operator.is_, equations, jaxpr.eqns)):
            return jaxpr, own
        lifted = list(pool)[len(own) :]
        invars = [*[pool[key] for key in lifted], *jaxpr.invars]
        return compat.replace_jaxpr(jaxpr, invars=invars, eqns=equations), [*lifted, *own]

    def _equation(self, row: _Row, equation: Any, pool: dict[_Key, Any]) -> Any:
        params = equation.params
        try:
            groups = row.find(params)
            nested = [[self._nested(jaxpr) for jaxpr in jaxprs] for jaxprs, _ in groups]
            # Jaxprs with one list of operands all take what one of them takes.
            fronts = [list(dict.fromkeys(k for _, keys in group for k in keys)) for group in nested]
            if not any(fronts) or compat.count_inputs(equation.effects):
                return equation
            new = [
                tuple([self._widen(jaxpr, keys, front) for jaxpr, keys in group])
                for group, front in zip(nested, fronts, strict=True)
            ]
            params = {**params, **row.change(params, new, [len(front) for front in fronts])}
        except (KeyError, _Unknown):
            return equation
        self.deep |= equation.primitive.name not in _CALLS
        added = []
        for front in fronts:
            for key in front:
                if key not in pool:
                    pool[key] = compat.new_var(key[1])
            added.append([pool[key] for key in front])
        operands = list(equation.invars)
        for (_, place), variables in reversed(list(zip(groups, added, strict=True))):
            operands[place:place] = variables
        return equation.replace(invars=operands, params=params)

    def _nested(self, jaxpr: Any) -> tuple[Any, list[_Key]]:
        """What comes of a jaxpr in a parameter, and what it takes first."""
        if jaxpr in self._nothing:
            return jaxpr, []
        known = self._lifted.get(id(jaxpr))
        if known is not None:
            return known
        closed = isinstance(jaxpr, compat.ClosedJaxpr)
        if not closed and not isinstance(jaxpr, compat.Jaxpr):
            raise _Unknown
        inner, consts = compat.open_jaxpr(jaxpr) if closed else (jaxpr, [])
        if _is_fixed(inner) or not all(map(_can_move, inner.invars, consts)):
            raise _Unknown
        new, keys = self.open(inner, consts)
        if not keys:
            self._nothing.add(jaxpr)
            return jaxpr, []
        known = self._lifted[id(jaxpr)] = (compat.close_jaxpr(new) if closed else new, keys)
        return known

    def _widen(self, jaxpr: Any, keys: list[_Key], front: list[_Key]) -> Any:
        """A branch that takes ``front`` first, instead of ``keys``."""
        if keys == front:
            return jaxpr
        places = [keys.index(key) if key in keys else key[1] for key in front]
        name = (id(jaxpr), *places)
        if name not in self._widened:
            inner, _ = compat.open_jaxpr(jaxpr)  # it has no consts
            own = dict(zip(keys, inner.invars, strict=False))
            first = [own.get(key) or compat.new_var(key[1]) for key in front]
            invars = [*first, *inner.invars[len(keys) :]]
            inner = compat.replace_jaxpr(inner, invars=invars, eqns=inner.eqns)
            self._widened[name] = compat.close_jaxpr(inner)
        return self._widened[name]


def _is_fixed(jaxpr: Any) -> bool:
    """Whether a jaxpr cannot get more inputs."""
    return getattr(jaxpr, "is_high", False) or compat.count_inputs(jaxpr.effects)


def _can_move(var: Any, const: Any) -> bool:
    """Whether a const is a plain array (or a tracer that stands for one), not a reference."""
    return (
        isinstance(const, (jax.Array, np.ndarray, np.generic))
        and type(var.aval) is compat.ShapedArray
        and compat.new_var(var.aval) is not None
    )


def _calls(name: str, change: Callable[[_Params, int], _Params] = lambda params, more: {}) -> _Row:
    """A primitive that gives all its operands to one jaxpr."""
    return _Row(
        lambda params: [((params[name],), 0)],
        lambda params, new, more: {name: new[0][0], **change(params, more[0])},
    )


def _jit(params: _Params, more: int) -> _Params:
    per_input = {"in_shardings": compat.UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    return {name: (*[value] * more, *params[name]) for name, value in per_input.items()}


def _checkpoint(params: _Params, more: int) -> _Params:
    if isinstance(params["prevent_cse"], tuple):  # one value for each input
        raise _Unknown
    return {}


def _scan(params: _Params, more: int) -> _Params:
    if "num_consts" in params:
        return _more_consts(params, more)
    grown = compat.more_scan_consts(params["ft_in"], more)
    if grown is None:
        raise _Unknown
    return {"ft_in": grown}


def _more_consts(params: _Params, more: int) -> _Params:
    return {"num_consts": params["num_consts"] + more}


def _change_while(params: _Params, new: list[tuple[Any, ...]], more: list[int]) -> _Params:
    return {
        "cond_jaxpr": new[0][0],
        "cond_nconsts": params["cond_nconsts"] + more[0],
        "body_jaxpr": new[1][0],
        "body_nconsts": params["body_nconsts"] + more[1],
    }


def _find_solve(params: _Params) -> list[_Group]:
    lengths = params["const_lengths"]
    places = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        (() if jaxpr is None else (jaxpr,), place)
        for jaxpr, place in zip(params["jaxprs"], places, strict=True)
    ]


def _change_solve(params: _Params, new: list[tuple[Any, ...]], more: list[int]) -> _Params:
    jaxprs, lengths = params["jaxprs"], params["const_lengths"]
    return {
        "jaxprs": type(jaxprs)(*[group[0] if group else None for group in new]),
        "const_lengths": type(lengths)(*map(operator.add, lengths, more)),
    }


_CALLS: dict[str, _Row] = {
    **dict.fromkeys(("jit", "pjit"), _calls("jaxpr", _jit)),
    **dict.fromkeys(("checkpoint", "remat2"), _calls("jaxpr", _checkpoint)),
    **dict.fromkeys(("call", "core_call", "closed_call", "eval_jaxpr"), _calls("call_jaxpr")),
}
_ROWS: dict[str, _Row] = {
    **_CALLS,
    "scan": _calls("jaxpr", _scan),
    "while": _Row(
        lambda p: [((p["cond_jaxpr"],), 0), ((p["body_jaxpr"],), p["cond_nconsts"])], _change_while
    ),
    # After the index.
    "cond": _Row(lambda p: [(p["branches"], 1)], lambda p, new, more: {"branches": new[0]}),
    "custom_linear_solve": _Row(_find_solve, _change_solve),
}
# Functions with rules of their own: the rules are not told of consts that are added.
_RULES: dict[str, _Row] = {
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _calls("call_jaxpr", _more_consts)),
    "custom_vmap_call": _calls("call"),
}
