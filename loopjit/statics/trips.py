"""Which inputs of a program decide how often its ``while`` loops run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopjit import compat

Inputs = frozenset[int]
_NONE: Inputs = frozenset()


def bounding_inputs(jaxpr: Any) -> Inputs:
    """The numbers of the inputs that the condition of some ``while`` loop depends on.

    A hint, not a proof: whoever uses it tries whether the loop is gone with the input fixed.
    """
    return _follow(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))])[1]


def _follow(jaxpr: Any, inputs: Sequence[Inputs]) -> tuple[list[Inputs], Inputs]:
    """What each output depends on, and what the loops inside depend on."""
    depends: dict[Any, Inputs] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> Inputs:
        return _NONE if isinstance(atom, compat.Literal) else depends.get(atom, _NONE)

    bounding = _NONE
    for equation in jaxpr.eqns:
        given = [of(atom) for atom in equation.invars]
        everything = _NONE.union(*given)
        outputs = [everything] * len(equation.outvars)
        if equation.primitive.name == "while":
            outputs, found = _follow_while(equation.params, given)
            bounding |= found
        else:
            for inner in compat.inner_jaxprs(equation.params):
                # `cond` has one input more than its branches: which of them is taken.
                at = len(given) - len(inner.invars)
                at_hand = given[at:] if at >= 0 else [everything] * len(inner.invars)
                bounding |= _follow(inner, at_hand)[1]
        depends.update(zip(equation.outvars, outputs, strict=True))
    return [of(atom) for atom in jaxpr.outvars], bounding


def _follow_while(params: dict[str, Any], given: list[Inputs]) -> tuple[list[Inputs], Inputs]:
    [condition], [body] = map(compat.inner_jaxprs, (params["cond_jaxpr"], params["body_jaxpr"]))
    start = params["cond_nconsts"]
    middle = start + params["body_nconsts"]
    for_condition, for_body, carry = given[:start], given[start:middle], given[middle:]
    while True:  # what a step makes of the carry is what the next step gets
        after, inside = _follow(body, [*for_body, *carry])
        more = [a | b for a, b in zip(carry, after, strict=True)]
        if more == carry:
            break
        carry = more
    [decides], within = _follow(condition, [*for_condition, *carry])
    return carry, decides | inside | within
