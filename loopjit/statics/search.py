"""Finds the leaves that must be static where JAX's error does not name them: by trying."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loopjit.signature.arguments import OnHost, Place, Promoted

Attempt = Callable[[Promoted], bool]
"""Whether it works with these leaves static."""

_GUESSES = 3


def find_needed(
    works: Attempt, candidates: Sequence[Place | OnHost], guesses: Sequence[Place]
) -> Promoted | None:
    """The smallest set of leaves that makes it work, as far as leaving out one after another can tell.

    Args:
      works: one attempt is one trace.
      candidates: the leaves that may be static, the likeliest first.
      guesses: some of them, to be tried first, each alone.

    Returns:
      None if not even all candidates together make it work.
    """
    if len(candidates) > 1:
        for place in [p for p in guesses if p in candidates][:_GUESSES]:
            if works(frozenset([place])):
                return frozenset([place])
    if not candidates or not works(frozenset(candidates)):
        return None
    return without_needless(works, candidates)


def without_needless(works: Attempt, candidates: Sequence[Place | OnHost]) -> Promoted:
    """Of leaves that together make it work, those that are needed; the unlikeliest are given back first."""
    needed = frozenset(candidates)
    groups = [list(reversed(candidates))]
    while groups:
        group = groups.pop()
        rest = needed.difference(group)
        if rest and works(rest):
            needed = rest
        elif len(group) > 1:  # together they cannot be missed: some of them, perhaps
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return needed
