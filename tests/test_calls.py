"""Random signatures and random spellings of calls: what Python binds is what is computed, once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import loopjit
from counting import counting
from loopjit import loop_jit

RELAXED = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def empty_caches(test: Any) -> Any:
    """An example must not depend on those before it: equal functions share what they know."""

    @functools.wraps(test)
    def wrapper(data: Any) -> None:
        loopjit.cache_clear()
        test(data)

    return wrapper


# ------------------------------------------------------------------------------------------------
# Functions
# ------------------------------------------------------------------------------------------------


def weigh(value: Any) -> Any:
    """A number for what an argument is, which tells places in containers apart."""
    if value is None:
        return 0.25
    if isinstance(value, str):
        return 10.0 * len(value)
    if isinstance(value, (tuple, list)):
        return 0.5 + sum((i + 2.0) * weigh(v) for i, v in enumerate(value))
    if isinstance(value, dict):
        return 0.75 + sum((len(k) + 3.0) * weigh(v) for k, v in sorted(value.items()))
    return jnp.sum(jnp.asarray(value)) * 1.0


@dataclasses.dataclass(frozen=True)
class Signature:
    """Parameters, each with a default or ``EMPTY``; those whose names start with ``n`` are sizes."""

    only: tuple[tuple[str, Any], ...]
    plain: tuple[tuple[str, Any], ...]
    star: bool
    named: tuple[tuple[str, Any], ...]
    stars: bool

    def function(self, binds_only: bool = False) -> Any:
        """Returns what each argument weighs, by name; the values of sizes are needed to trace it."""
        defaults = {}

        def spelled(parameter: tuple[str, Any]) -> str:
            name, default = parameter
            if default is EMPTY:
                return name
            defaults[f"_{name}"] = default
            return f"{name}=_{name}"

        parts = [spelled(p) for p in self.only] + ["/"] * bool(self.only)
        parts += [spelled(p) for p in self.plain]
        if self.star:
            parts.append("*rest")
        elif self.named:
            parts.append("*")
        parts += [spelled(p) for p in self.named] + ["**more"] * self.stars
        names = [name for name, _ in (*self.only, *self.plain, *self.named)]
        names += ["rest"] * self.star + ["more"] * self.stars
        items = [
            f"{n!r}: sum(i + 1.0 for i in range({n})) + 0.0 * {n}"
            if n[0] == "n"
            else f"{n!r}: weigh({n})"
            for n in names
        ]
        if binds_only:
            items = []
        space = {"weigh": weigh, **defaults}
        exec(f"def f({', '.join(parts)}):\n    return {{{', '.join(items)}}}", space)
        return space["f"]


EMPTY = inspect.Parameter.empty
ARRAYS = [np.arange(3.0, dtype=np.float32), np.array([2, 3]), np.float32(1.5)]
NUMBERS = st.one_of(st.integers(-3, 5), st.sampled_from([0.5, -1.5, 0.0, 2.0]), st.booleans())
PLAIN = st.one_of(NUMBERS, st.sampled_from(["", "a", "bcd"]), st.none())
LEAVES = st.one_of(PLAIN, st.sampled_from(ARRAYS), st.sampled_from(ARRAYS).map(jnp.asarray))
TREES = st.one_of(
    st.tuples(LEAVES, NUMBERS),
    st.lists(LEAVES, max_size=2),
    st.dictionaries(st.sampled_from(["k", "kk"]), LEAVES, max_size=2),
)
VALUES = st.one_of(LEAVES, TREES)
DEFAULTS = st.one_of(PLAIN, st.tuples(PLAIN, NUMBERS))
SIZES = st.integers(0, 4)


def value_of(name: str) -> st.SearchStrategy[Any]:
    return SIZES if name[0] == "n" else VALUES


def default_of(name: str) -> st.SearchStrategy[Any]:
    return SIZES if name[0] == "n" else DEFAULTS


@st.composite
def signatures(draw: Any) -> Signature:
    names = iter(draw(st.permutations(["a", "b", "n1", "d", "n2", "e", "g"])))
    counts = draw(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)))
    only, plain, named = [list(itertools.islice(names, count)) for count in counts]
    required = draw(st.integers(0, len(only) + len(plain)))
    positional = [
        (name, EMPTY if at < required else draw(default_of(name)))
        for at, name in enumerate([*only, *plain])
    ]
    keywords = [(name, draw(default_of(name)) if draw(st.booleans()) else EMPTY) for name in named]
    return Signature(
        tuple(positional[: len(only)]),
        tuple(positional[len(only) :]),
        draw(st.booleans()),
        tuple(keywords),
        draw(st.booleans()),
    )


@dataclasses.dataclass(frozen=True)
class Binding:
    """What each parameter gets; ``omitted`` are those that get their default."""

    values: dict[str, Any]
    omitted: frozenset[str]
    rest: tuple[Any, ...]
    more: dict[str, Any]


@st.composite
def bindings(draw: Any, signature: Signature) -> Binding:
    rest = tuple(draw(st.lists(VALUES, max_size=2))) if signature.star else ()
    more = {}
    if signature.stars:
        # A name that is positional-only is free for keywords.
        free = ["u", "nv", *[name for name, _ in signature.only]]
        more = draw(st.dictionaries(st.sampled_from(free), VALUES, max_size=2))
    values, omitted = {}, set()
    for name, default in (*signature.only, *signature.plain, *signature.named):
        if default is not EMPTY and draw(st.booleans()):
            values[name] = default
            omitted.add(name)
        else:
            values[name] = draw(value_of(name))
    return Binding(values, frozenset(omitted), rest, more)


def spell(draw: Any, s: Signature, b: Binding) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One of the spellings of a call."""
    positional = [name for name, _ in (*s.only, *s.plain)]
    if b.rest:
        by_position = len(positional)
    else:
        # Up to which parameter by position: one that is positional-only is left out with all after it.
        least = max([i + 1 for i, (n, _) in enumerate(s.only) if n not in b.omitted], default=0)
        by_position = draw(st.integers(least, len(positional)))
    args = [b.values[name] for name in positional[:by_position]]
    keywords = dict(b.more)
    for name in [*positional[by_position:], *[name for name, _ in s.named]]:
        may_be_named = name not in dict(s.only)
        if may_be_named and (name not in b.omitted or draw(st.booleans())):
            keywords[name] = b.values[name]
    # In any order, but for those of which the function can see the order.
    more = iter(b.more)
    order = [next(more) if n in b.more else n for n in draw(st.permutations(list(keywords)))]
    return (*args, *b.rest), {name: keywords[name] for name in order}


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(got) == sorted(want)
    for name, value in want.items():
        np.testing.assert_allclose(np.asarray(got[name]), np.asarray(value), rtol=1e-5)


# ------------------------------------------------------------------------------------------------
# The right calls
# ------------------------------------------------------------------------------------------------


@RELAXED
@given(st.data())
@empty_caches
def test_all_spellings_of_a_call_are_one_entry(data):
    signature = data.draw(signatures())
    binding = data.draw(bindings(signature))
    f = signature.function()
    g = loop_jit(f)
    args, kwargs = spell(data.draw, signature, binding)
    want = f(*args, **kwargs)
    same(g(*args, **kwargs), want)
    for _ in range(4):
        args, kwargs = spell(data.draw, signature, binding)
        with counting() as n:
            got = g(*args, **kwargs)
        assert (n.traces, n.compiles) == (0, 0), (inspect.signature(f), args, kwargs)
        same(got, f(*args, **kwargs))
        same(got, want)


@RELAXED
@given(st.data())
@empty_caches
def test_many_calls_of_one_function(data):
    signature = data.draw(signatures())
    f = signature.function()
    g = loop_jit(f)
    for _ in range(4):
        args, kwargs = spell(data.draw, signature, data.draw(bindings(signature)))
        same(g(*args, **kwargs), f(*args, **kwargs))


@RELAXED
@given(st.data())
@empty_caches
def test_numbers_that_are_only_used_cost_nothing(data):
    signature = data.draw(signatures())
    binding = data.draw(bindings(signature))
    # What is given the value of its default is the same call as if it were left out.
    defaults = dict((*signature.only, *signature.plain, *signature.named))
    numbers = [
        name
        for name, value in binding.values.items()
        if type(value) in (int, float, bool)
        and type(value) is not type(defaults[name])
        and name[0] != "n"
    ]
    assume(numbers)
    f = signature.function()
    g = loop_jit(f)
    args, kwargs = spell(data.draw, signature, binding)
    g(*args, **kwargs)
    kinds = {bool: st.booleans(), int: st.integers(-9, 9), float: st.sampled_from([0.25, 7.5])}
    values = {name: data.draw(kinds[type(binding.values[name])]) for name in numbers}
    other = dataclasses.replace(binding, values={**binding.values, **values})
    args, kwargs = spell(data.draw, signature, other)
    with counting() as n:
        got = g(*args, **kwargs)
    assert (n.traces, n.compiles) == (0, 0), (inspect.signature(f), args, kwargs)
    same(got, f(*args, **kwargs))


@RELAXED
@given(st.data())
@empty_caches
def test_spellings_with_declared_statics(data):
    signature = data.draw(signatures())
    binding = data.draw(bindings(signature))
    parameters = [name for name, _ in (*signature.only, *signature.plain)]
    by_name = [name for name, _ in (*signature.plain, *signature.named)]
    options: dict[str, Any] = {}
    if parameters and data.draw(st.booleans()):
        options["static_argnums"] = data.draw(st.integers(0, len(parameters) - 1))
    if by_name and data.draw(st.booleans()):
        options["static_argnames"] = data.draw(st.sampled_from(by_name))
    f = signature.function()
    g = loop_jit(f, **options)
    for at in range(3):
        args, kwargs = spell(data.draw, signature, binding)
        with counting() as n:
            got = g(*args, **kwargs)
        assert at == 0 or (n.traces, n.compiles) == (0, 0), (inspect.signature(f), options)
        same(got, f(*args, **kwargs))


# ------------------------------------------------------------------------------------------------
# The wrong ones
# ------------------------------------------------------------------------------------------------


@st.composite
def wrong_calls(draw: Any, s: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = spell(draw, s, draw(bindings(s)))
    for _ in range(draw(st.integers(1, 2))):
        change = draw(st.sampled_from(["drop", "unname", "add", "name"]))
        if change == "drop" and args:
            args = args[:-1]
        elif change == "unname" and kwargs:
            kwargs.pop(draw(st.sampled_from(sorted(kwargs))))
        elif change == "add":
            args = (*args, draw(PLAIN))
        else:
            names = [name for name, _ in (*s.only, *s.plain, *s.named)]
            kwargs[draw(st.sampled_from([*names, "unknown"]))] = draw(PLAIN)
    return args, kwargs


def words(error: BaseException) -> str:
    """The message, without the name of the function."""
    return re.sub(r"^[\w.<>]+\(\)", "f()", str(error))


@RELAXED
@given(st.data())
@empty_caches
def test_wrong_calls(data):
    signature = data.draw(signatures())
    args, kwargs = data.draw(wrong_calls(signature))
    wants = set()
    for names in (list(kwargs), sorted(kwargs)):  # of two mistakes jax.jit may find the other one
        try:
            signature.function(binds_only=True)(*args, **{name: kwargs[name] for name in names})
        except TypeError as error:
            wants.add(words(error))
    assume(wants)
    f = signature.function()
    g = loop_jit(f)
    if data.draw(st.booleans()):
        good = spell(data.draw, signature, data.draw(bindings(signature)))
        same(g(*good[0], **good[1]), f(*good[0], **good[1]))
    for _ in range(2):
        with pytest.raises(TypeError) as got:
            g(*args, **kwargs)
        assert words(got.value) in wants


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f(),
        lambda f: f(1, 2, 3, 4),
        lambda f: f(1, 2, unknown=3),
        lambda f: f(1, 2, b=3),
        lambda f: f(a=1, b=2),
        lambda f: f(1, b=2, a=3),
    ],
)
def test_wrong_calls_of_a_method_and_of_a_function(wrong):
    def f(a, /, b=1, *, c=2):
        return a + b + c

    class Model:
        def run(self, a, /, b=1, *, c=2):
            return a + b + c

        run_jitted = loop_jit(run)

    for plain, staged in (
        (f, loop_jit(f)),
        (Model().run, Model().run_jitted),
        (Model().run, loop_jit(Model().run)),
    ):
        with pytest.raises(TypeError) as want:
            wrong(plain)
        with pytest.raises(TypeError) as got:
            wrong(staged)
        assert words(got.value) == words(want.value)


def test_an_error_of_the_users_own_call_passes():
    def helper(a):
        return a

    f = loop_jit(lambda x: helper(x, 2))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"helper\(\) takes 1 positional argument but 2 were"):
            f(1.0)
