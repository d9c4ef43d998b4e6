"""Arrays that a nested ``jax.jit`` captured become inputs, so that their values do not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopjit import compat

_JIT = {"in_shardings": compat.UNSPECIFIED, "in_layouts": None, "donated_invars": False}
# By primitive: the parameters that have one value for each input, and that of an input that is added.
_PER_INPUT: dict[str, dict[str, Any]] = {"jit": _JIT, "pjit": _JIT, "checkpoint": {}, "remat2": {}}


def lift_consts(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Moves the consts of jitted (and checkpointed) functions that a jaxpr calls to its front.

    (Consts of functions that are jitted inside of loops and branches stay where they are: a jaxpr with
    these is not interned.)

    Args:
      jaxpr: open; its first inputs are ``consts``.
      consts: of the jaxpr.

    Returns:
      An open jaxpr that does the same, and its consts.
    """
    lifted: list[tuple[Any, Any]] = []  # (variable, const)
    equations = [_lift(equation, lifted) for equation in jaxpr.eqns]
    if not lifted:
        return jaxpr, list(consts)
    variables = [v for v, _ in lifted]
    new = compat.replace_jaxpr(jaxpr, invars=[*variables, *jaxpr.invars], eqns=equations)
    return new, [*[c for _, c in lifted], *consts]


def _lift(equation: Any, lifted: list[tuple[Any, Any]]) -> Any:
    params = equation.params
    added = _PER_INPUT.get(equation.primitive.name)
    if (
        added is None
        or not added.keys() <= params.keys()
        or isinstance(params.get("prevent_cse"), tuple)
    ):
        return equation
    closed = isinstance(params["jaxpr"], compat.ClosedJaxpr)
    inner, consts = lift_consts(
        *(compat.open_jaxpr(params["jaxpr"]) if closed else (params["jaxpr"], ()))
    )
    if not consts:
        return equation
    front = []
    for var, const in zip(inner.invars, consts, strict=False):
        # One array that is captured by several functions is one input.
        known = [v for v, c in lifted if c is const and v.aval == var.aval]
        if not known:
            outer = compat.new_var(var.aval)
            if outer is None:
                return equation
            lifted.append((outer, const))
            known = [outer]
        front.append(known[0])
    per_input = {name: (*[value] * len(front), *params[name]) for name, value in added.items()}
    return equation.replace(
        invars=[*front, *equation.invars],
        params={**params, **per_input, "jaxpr": compat.close_jaxpr(inner) if closed else inner},
    )
