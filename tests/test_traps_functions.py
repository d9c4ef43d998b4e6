"""Two functions are equal when their code is, and all that it reads.

Each case below is a function in which a naive fingerprint misses one thing.
"""

import abc
import builtins
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import operator
import os
import random
import sys
import threading
import time
import types
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from traps import (
    ENTRIES,
    X,
    cases,
    change,
    check_change,
    check_difference,
    check_hit,
    difference,
    differs,
    function,
    module,
    same,
)

import loopjit
from counting import counting
from loopjit import loop_jit

DIFFERENCES = {}
CHANGES = {}
NAN = float("nan")
OTHER_NAN = np.uint64(0x7FF8000000000001).view(np.float64).item()

# --------------------------------------------------------------------------------------------
# Code
# --------------------------------------------------------------------------------------------


@difference(DIFFERENCES, "x * 2.0", "x * 3.0", "x + 2.0")
def body(text):
    return function(f"f = lambda x: {text}")


@difference(DIFFERENCES, "1", "1.0", "True")
def constant_of_another_type(text):
    return function(f"def f(x):\n    return x * len(type({text}).__name__)")


@difference(DIFFERENCES, "0.0", "-0.0")
def constant_zero(text):
    return function(f"def f(x):\n    return x * {text}")


@difference(DIFFERENCES, "(1, 2)", "(1, 2.0)", "(1, (2,))", "(True, 2)")
def constant_tuple(text):
    return function(f"def f(x):\n    return x * len(repr({text}))+ sum(map(ord, repr({text})))")


def _iterates(items):
    # The same code with another constant, which compares equal.
    code = (lambda x: [x := x * 3.0 + n for n in "constant"][-1]).__code__
    constants = tuple(frozenset(items) if c == "constant" else c for c in code.co_consts)
    return types.FunctionType(code.replace(co_consts=constants), {})


@difference(DIFFERENCES, [0, 8], [8, 0])
def constant_set(items):
    return _iterates(items)


@difference(DIFFERENCES, "sin", "cos")
def name_of_an_attribute(text):
    return function(f"def f(x):\n    return jnp.{text}(x)")


@difference(DIFFERENCES, "sum", "prod", "max")
def name_of_a_method(text):
    return function(f"def f(x):\n    y = x + 1.0\n    return x * y.{text}()")


@difference(DIFFERENCES, "a * 2 + b", "b * 2 + a")
def names_of_variables(text):
    return function(f"def f(x):\n    a, b = x, x[::-1]\n    return {text}")


@difference(DIFFERENCES, True, False)
def exception_table(inside):
    # The same instructions in the same order; only what stands inside of `try` differs.
    g = function(
        "def f(x):\n"
        "    try:\n"
        "        y = x * 2.0\n"
        "        z = {}['k']\n"
        "    except KeyError:\n"
        "        return x\n"
        "    return y\n"
    )
    if not inside:
        stripped = g.__code__.replace(co_exceptiontable=b"")
        g = types.FunctionType(stripped, g.__globals__, "f")

    def f(x):
        try:
            return g(x)
        except KeyError:
            return x * 5.0

    return f


@difference(DIFFERENCES, "finally", "else")
def finally_or_else(text):
    source = (
        "def f(x):\n"
        "    try:\n        y = x\n"
        "    except ValueError:\n        y = -x\n"
        "    {}:\n        y = y * 2.0\n"
        "    return y + len('{}')"
    )
    return function(source.format(text, text))


@difference(DIFFERENCES, "KeyError", "IndexError")
def exception_that_is_caught(text):
    source = (
        "def f(x):\n"
        "    try:\n"
        "        try:\n            return x * {{}}['k']\n"
        "        except {}:\n            return x * 2.0\n"
        "    except LookupError:\n        return x * 3.0\n"
    )
    return function(source.format(text))


@difference(
    DIFFERENCES,
    "def f(x, *a):\n    return x * len(a)",
    "def f(x, a=()):\n    return x * len(a) + 1",
)
def flags_and_arguments(source):
    return function(source)


@difference(DIFFERENCES, 2.0, 3.0)
def nested_three_deep(v):
    def outer(x):
        def middle(y):
            def inner(z):
                return z * v

            return inner(y) + 1.0

        return middle(x)

    return outer


@difference(DIFFERENCES, 2.0, 3.0)
def comprehension_and_walrus(v):
    return lambda x: sum([(y := x * i * v) for i in range(3)]) + y


@difference(DIFFERENCES, 2.0, 3.0)
def generator_expression(v):
    return lambda x: sum(x * v * i for i in range(3))


@difference(DIFFERENCES, 2.0, 3.0)
def class_inside(v):
    def f(x):
        class Local:
            scale = v

            def run(self, x):
                return x * self.scale

        return Local().run(x)

    return f


@difference(DIFFERENCES, 2.0, 3.0)
def match_statement(v):
    def f(x):
        match (v, 1):
            case (2.0, n):
                return x * n
            case _:
                return x * 5.0

    return f


# --------------------------------------------------------------------------------------------
# Defaults
# --------------------------------------------------------------------------------------------


@difference(DIFFERENCES, 2.0, 3.0, 2, True)
def default(v):
    return lambda x, k=v: x * k * len(type(k).__name__)


@difference(DIFFERENCES, 2.0, 3.0)
def keyword_default(v):
    def f(x, *, k=v):
        return x * k

    return f


@difference(DIFFERENCES, 2.0, 3.0)
def default_of_a_helper(v):
    def helper(x, k=v):
        return x * k

    return lambda x: helper(x)


@difference(DIFFERENCES, 2.0, 3.0)
def keyword_default_of_a_helper(v):
    def helper(x, *, k=v):
        return x * k

    return lambda x: helper(x)


@difference(DIFFERENCES, 2.0, 3.0)
def lambda_in_a_default(v):
    return lambda x, g=lambda y: y * v: g(x)


@difference(DIFFERENCES, 2.0, 3.0)
def array_as_default(v):
    w = jnp.asarray(np.float32(v))
    return lambda x, w=w: x * w


@difference(DIFFERENCES, 2.0, 3.0)
def list_as_default(v):
    return lambda x, w=[v, 1.0]: x * w[0] + w[1]


@difference(DIFFERENCES, 2.0, 3.0)
def defaults_and_stars(v):
    def f(x, /, a=v, *rest, b=v, **named):
        return x * a + b + len(rest) + len(named)

    return f


@difference(DIFFERENCES, 2.0, 3.0)
def defaults_under_vmap(v):
    return jax.vmap(lambda x, k=v: x * k)


@difference(DIFFERENCES, 2.0, 3.0)
def defaults_under_partial(v):
    return functools.partial(lambda a, x, k=v: x * k + a, 1.0)


@difference(DIFFERENCES, (1.0, 2.0), (1.0, 3.0), (2.0, 1.0))
def partial_of_partial(pair):
    inner = functools.partial(lambda a, b, x, c=0.5: x * a - b * c, pair[0])
    return functools.partial(inner, pair[1], c=2.0)


@difference(DIFFERENCES, 2.0, 3.0)
def keyword_of_partial(v):
    return functools.partial(lambda x, k: x * k, k=v)


@difference(DIFFERENCES, 2.0, 3.0)
def tree_util_partial(v):
    return jax.tree_util.Partial(lambda k, x: x * k, v)


# --------------------------------------------------------------------------------------------
# Globals and helpers
# --------------------------------------------------------------------------------------------


@difference(DIFFERENCES, 2.0, 3.0, 2, -0.0, 0.0)
def global_scalar(v):
    return function("def f(x):\n    return x * K * len(type(K).__name__)", K=v)


@difference(DIFFERENCES, 2.0, 3.0)
def global_of_a_helper(v):
    return function("def h(x):\n    return x * K\ndef f(x):\n    return h(x)", K=v)


@difference(DIFFERENCES, 2.0, 3.0)
def global_of_a_helper_of_a_helper(v):
    source = "def g(x):\n    return x * K\ndef h(x):\n    return g(x)\ndef f(x):\n    return h(x)"
    return function(source, K=v)


@difference(DIFFERENCES, 2.0, 3.0)
def global_array(v):
    return function("def f(x):\n    return x * K", K=jnp.asarray(np.float32(v)))


@difference(DIFFERENCES, 2.0, 3.0)
def global_array_in_a_dict(v):
    return function("def f(x):\n    return x * K['w']", K={"w": jnp.asarray(np.float32(v))})


@difference(DIFFERENCES, 2.0, 3.0)
def global_numpy_array(v):
    return function("def f(x):\n    return x * K", K=np.array([v, 1, 1], np.float32))


@difference(DIFFERENCES, 2.0, 3.0)
def helper_in_a_global_list(v):
    return function("def f(x):\n    return H[0](x)", H=[lambda x: x * v])


@difference(DIFFERENCES, 2.0, 3.0)
def builtin_hidden_by_a_global(v):
    return function("def f(x):\n    return x * len(x)", len=lambda x: v)


@difference(DIFFERENCES, 2.0, 3.0)
def recursion_through_a_global(v):
    return function("def f(x, n=3):\n    return x if n == 0 else f(x * K, n - 1)", K=v)


@difference(DIFFERENCES, 2.0, 3.0)
def recursion_through_a_cell(v):
    def f(x, n=3):
        return x if n == 0 else f(x * v, n - 1)

    return f


@difference(DIFFERENCES, 2.0, 3.0)
def mutual_recursion(v):
    def even(x, n=4):
        return x if n == 0 else odd(x * v, n - 1)

    def odd(x, n):
        return even(x + 1.0, n - 1)

    return even


@difference(DIFFERENCES, 2.0, 3.0)
def mutual_recursion_of_globals(v):
    return function(
        "def f(x, n=4):\n    return x if n == 0 else g(x * K, n - 1)\n"
        "def g(x, n):\n    return f(x + 1.0, n - 1)",
        K=v,
    )


@difference(DIFFERENCES, 2.0, 3.0)
def global_helper_that_recurs_through_its_cell(v):
    def make():
        def power(x, n):
            return x if n == 0 else power(x * v, n - 1)

        return power

    return function("def f(x):\n    return H(x, 3)", H=make())


@difference(DIFFERENCES, 2.0, 3.0)
def two_closures_of_one_code(v):
    def times(k):
        return lambda x: x * k

    first, second = times(v), times(5.0)
    return lambda x: first(x) - second(x)


@difference(DIFFERENCES, (2.0, 5.0), (5.0, 2.0))
def two_global_closures_of_one_code(pair):
    def times(k):
        return lambda x: x * k

    a, b = map(times, pair)
    return function("def f(x):\n    return A(x) - 2.0 * B(x)", A=a, B=b)


@difference(DIFFERENCES, 2.0, 3.0)
def jitted_helper(v):
    helper = jax.jit(lambda x: x * v)
    return lambda x: helper(x)


@difference(DIFFERENCES, 2.0, 3.0)
def jitted_global_helper(v):
    return function("@jax.jit\ndef h(x):\n    return x * K\ndef f(x):\n    return h(x)", K=v)


@difference(DIFFERENCES, 2.0, 3.0)
def loop_jitted_helper(v):
    helper = loop_jit(lambda x: x * v)
    return lambda x: helper(x)


@difference(DIFFERENCES, (0,), (1,))
def options_of_a_jitted_helper(static):
    helper = jax.jit(lambda n, m, x: x * (n + 2 * m), static_argnums=static)
    # What is static is no array: its class can be seen.
    helper2 = jax.jit(lambda n, m, x: x if type(n) is int else -x, static_argnums=static)
    return lambda x: helper2(1, 2, x) + helper(1, 2, x)


@difference(DIFFERENCES, 2.0, 3.0)
def decorated_with_wraps(v):
    def decorate(g):
        @functools.wraps(g)
        def wrapper(*args):
            return g(*args) * v

        return wrapper

    return decorate(lambda x: x + 1.0)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def pretends_to_be_jax(v):
    @functools.wraps(jnp.sin)
    def sin(x):
        return x * v

    return lambda x: sin(x)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def global_that_pretends_to_be_jax(v):
    @functools.wraps(jnp.sin)
    def sin(x):
        return x * v

    return function("def f(x):\n    return H(x)", H=sin)


@difference(DIFFERENCES, 2.0, 3.0)
def pretends_to_be_a_module_of_jax(v):
    space = {"__name__": "jax.numpy", "K": v}
    exec("def h(x):\n    return x * K", space)
    return function("def f(x):\n    return h(x)", h=space["h"])


@difference(DIFFERENCES, 2.0, 3.0)
def checkpointed(v):
    return jax.checkpoint(lambda x: jnp.sin(x) * v)


@difference(DIFFERENCES, 2.0, 3.0)
def gradient(v):
    return jax.grad(lambda x: (x * x * v).sum())


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def cached_helper(v):
    @functools.lru_cache
    def factor(n):
        return v * n

    return lambda x: x * factor(2)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def singledispatched_helper(v):
    @functools.singledispatch
    def scale(n):
        return v * n

    scale.register(str, lambda n: 0.0)
    return lambda x: x * scale(2)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def contextmanager_helper(v):
    @contextlib.contextmanager
    def scaled():
        yield v

    def f(x):
        with scaled() as k:
            return x * k

    return f


@difference(DIFFERENCES, 2.0, 3.0)
def function_attribute(v):
    def helper(x):
        return x * helper.scale

    helper.scale = v
    return lambda x: helper(x)


@difference(DIFFERENCES, 2.0, 3.0)
def function_attribute_of_a_global(v):
    f = function("def h(x):\n    return x * h.scale\ndef f(x):\n    return h(x)")
    f.__globals__["h"].scale = v
    return f


@difference(DIFFERENCES, 2.0, 3.0)
def attribute_of_the_function_itself(v):
    def f(x):
        return x * f.scale

    f.scale = v
    return f


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def attribute_of_a_jitted_helper(v):
    helper = jax.jit(lambda x: x)
    helper.scale = v
    return lambda x: helper(x) * helper.scale


@difference(DIFFERENCES, "left", "righter")
def name_of_a_function(name):
    def helper(x):
        return x

    helper.__name__ = name
    return lambda x: helper(x) * len(helper.__name__)


@difference(DIFFERENCES, "left", "righter", hits="L2")
def name_of_a_function_passed_on(name):
    def helper(x):
        return x

    helper.__name__ = name
    return lambda x: helper(x) * len(getattr(helper, "__name__"))


@difference(DIFFERENCES, True, False)
def one_function_twice_or_two_equal_ones(one):
    def make():
        return lambda x: x * 2.0

    a = make()
    b = a if one else make()
    return lambda x: a(x) if a is b else -b(x)


@difference(DIFFERENCES, True, False)
def functions_as_keys(one):
    def make():
        return lambda x: x * 2.0

    a = make()
    b = a if one else make()
    return lambda x: x * len({a, b})


@difference(DIFFERENCES, True, False)
def a_function_told_by_identity(known):
    space = module(
        "acts",
        "def act(x):\n    return x * 2.0\n"
        "def like(x):\n    return x * 2.0\n"
        "def make(g):\n    return lambda x: g(x) if g is act else -g(x)\n",
    )
    return space.make(space.act if known else space.like)


@difference(DIFFERENCES, True, False)
def a_table_by_functions(known):
    space = module(
        "acts",
        "def act(x):\n    return x * 2.0\n"
        "def like(x):\n    return x * 2.0\n"
        "TABLE = {act: 5.0}\n"
        "def make(g):\n    return lambda x: g(x) * TABLE.get(g, 1.0)\n",
    )
    return space.make(space.act if known else space.like)


# --------------------------------------------------------------------------------------------
# Modules
# --------------------------------------------------------------------------------------------


@difference(DIFFERENCES, 2.0, 3.0)
def attribute_of_a_module(v):
    return function("def f(x):\n    return x * m.scale", m=module("m", f"scale = {v}"))


@difference(DIFFERENCES, 2.0, 3.0)
def function_of_a_module(v):
    m = module("m", f"scale = {v}\ndef h(x):\n    return x * scale")
    return function("def f(x):\n    return m.h(x)", m=m)


@difference(DIFFERENCES, 2.0, 3.0)
def function_from_a_module(v):
    m = module("m", f"scale = {v}\ndef h(x):\n    return x * scale")
    return function("def f(x):\n    return h(x)", h=m.h)


@difference(DIFFERENCES, 2.0, 3.0)
def attribute_chain_of_modules(v):
    m = module("m", "", inner=module("inner", f"class Cfg:\n    lr = {v}"))
    return function("def f(x):\n    return x * m.inner.Cfg.lr", m=m)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def array_of_a_module(v):
    m = module("m", "", w=jnp.asarray(np.float32(v)))
    return function("def f(x):\n    return x * m.w", m=m)


@difference(DIFFERENCES, 2.0, 3.0)
def module_in_a_cell(v):
    m = module("m", f"scale = {v}\ndef h(x):\n    return x * scale")
    return lambda x: m.h(x) + m.scale


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def getattr_of_a_module(v):
    m = module("m", f"scale = {v}")
    return lambda x: x * getattr(m, "scale")


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def lazy_attribute_of_a_module(v):
    m = module("m", f"def __getattr__(name):\n    return {v}")
    return function("def f(x):\n    return x * m.scale", m=m)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def reflection(v):
    return function("def f(x):\n    return x * globals()['K']", K=v)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def evaluation(v):
    return function("def f(x):\n    return x * eval('K')", K=v)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def reflection_through_the_module(v):
    return function("def f(x):\n    return x * builtins.eval('K')", K=v, builtins=builtins)


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def globals_through_a_function(v):
    def helper():
        pass

    g = function("def f():\n    return K", K=v)
    return lambda x: x * g.__globals__["K"]


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def closure_through_a_function(v):
    def g():
        return v

    return lambda x: x * g.__closure__[0].cell_contents


# --------------------------------------------------------------------------------------------
# Classes
# --------------------------------------------------------------------------------------------


def _class(v):
    class Scaler:
        factor = v

        def __init__(self, k=1.0):
            self.k = k

        def run(self, x):
            return x * self.factor * self.k

        def __call__(self, x):
            return self.run(x)

    return Scaler


@difference(DIFFERENCES, 2.0, 3.0)
def class_attribute(v):
    cls = _class(v)
    return lambda x: x * cls.factor


@difference(DIFFERENCES, 2.0, 3.0)
def class_that_is_constructed(v):
    cls = _class(v)
    return lambda x: cls(1.5).run(x)


@difference(DIFFERENCES, 2.0, 3.0)
def method_bound(v):
    return _class(v)(1.5).run


@difference(DIFFERENCES, 2.0, 3.0)
def method_of_a_captured_object(v):
    o = _class(2.0)(v)
    return lambda x: o.run(x)


@difference(DIFFERENCES, 2.0, 3.0)
def callable_object(v):
    return _class(2.0)(v)


@difference(DIFFERENCES, 2.0, 3.0)
def method_of_a_subclass(v):
    class Sub(_class(2.0)):
        def run(self, x):
            return super().run(x) * v

    return Sub(1.5).run


@difference(DIFFERENCES, 2.0, 3.0)
def attribute_of_a_base(v):
    class Base:
        factor = v

    class Sub(Base):
        def run(self, x):
            return x * self.factor

    return Sub().run


@difference(DIFFERENCES, 2.0, 3.0)
def class_method(v):
    class C:
        factor = v

        @classmethod
        def run(cls, x):
            return x * cls.factor

    return lambda x: C.run(x)


@difference(DIFFERENCES, 2.0, 3.0)
def static_method(v):
    class C:
        @staticmethod
        def run(x):
            return x * v

    return lambda x: C.run(x) + C().run(x)


@difference(DIFFERENCES, 2.0, 3.0)
def property_of_an_object(v):
    class C:
        @property
        def factor(self):
            return v

    o = C()
    return lambda x: x * o.factor


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def cached_property_of_an_object(v):
    class C:
        @functools.cached_property
        def factor(self):
            return v

    o = C()
    return lambda x: x * o.factor


@difference(DIFFERENCES, 2.0, 3.0)
def getattr_of_an_object(v):
    class C:
        def __getattr__(self, name):
            return v

    o = C()
    return lambda x: x * o.factor


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def getattribute_of_an_object(v):
    class C:
        factor = 1.0

        def __getattribute__(self, name):
            return v

    o = C()
    return lambda x: x * o.factor


@difference(DIFFERENCES, 2.0, 3.0)
def descriptor(v):
    class D:
        def __get__(self, instance, owner):
            return v

    class C:
        factor = D()

    o = C()
    return lambda x: x * o.factor


@difference(DIFFERENCES, 2.0, 3.0)
def descriptor_read_through_the_class(v):
    class D:
        def __get__(self, instance, owner):
            return types.SimpleNamespace(k=v)

    class C:
        factor = D()

    return lambda x: x * C.factor.k


@difference(DIFFERENCES, 2.0, 3.0, hits="L2")
def metaclass(v):
    class M(type):
        @property
        def factor(cls):
            return v

    class C(metaclass=M):
        pass

    return lambda x: x * C.factor


@difference(DIFFERENCES, 2.0, 3.0)
def operators_of_a_class(v):
    class C:
        def __rmul__(self, x):
            return x * v

        __array_priority__ = 1000
        __array_ufunc__ = None

    o = C()
    return lambda x: C.__rmul__(o, x)


@difference(DIFFERENCES, True, False)
def class_of_an_object_or_another_like_it(one):
    def make():
        class C:
            pass

        return C

    a = make()
    o = (a if one else make())()
    return lambda x: x * 2.0 if isinstance(o, a) else x


@difference(DIFFERENCES, True, False)
def exceptions_alike(one):
    def make():
        class Stop(Exception):
            pass

        return Stop

    a = make()
    b = a if one else make()

    def f(x):
        try:
            try:
                raise a
            except b:
                return x * 2.0
        except Exception:
            return x * 3.0

    return f


@difference(DIFFERENCES, True, False, hits="L2")
def registered_with_an_abstract_class(registered):
    class Shape(abc.ABC):
        pass

    class Round:
        pass

    if registered:
        Shape.register(Round)
    o = Round()
    return lambda x: x * 2.0 if isinstance(o, Shape) else x


@difference(DIFFERENCES, ("a", "b"), ("b", "a"))
def match_args(names):
    class P:
        __match_args__ = names

        def __init__(self):
            self.a, self.b = 2.0, 3.0

    p = P()

    def f(x):
        match p:
            case P(u, w):
                return x * u - w

    return f


@difference(DIFFERENCES, True, False)
def dataclass_field_that_is_not_compared(compare):
    @dataclasses.dataclass
    class P:
        a: float
        b: float = dataclasses.field(compare=compare)

    return lambda x: x if P(1.0, 2.0) == P(1.0, 3.0) else x * 2.0


@difference(DIFFERENCES, 2.0, 3.0)
def dataclass_field_metadata(v):
    @dataclasses.dataclass
    class P:
        a: float = dataclasses.field(default=1.0, metadata={"scale": v})

    return lambda x: x * dataclasses.fields(P)[0].metadata["scale"]


@difference(DIFFERENCES, 2.0, 3.0)
def dataclass_default(v):
    @dataclasses.dataclass
    class P:
        a: float = v

    return lambda x: x * P().a


@difference(DIFFERENCES, 2.0, 3.0)
def dataclass_default_factory(v):
    @dataclasses.dataclass
    class P:
        a: list = dataclasses.field(default_factory=lambda: [v])

    return lambda x: x * P().a[0]


@difference(DIFFERENCES, 2.0, 3.0)
def dataclass_post_init(v):
    @dataclasses.dataclass
    class P:
        a: float = 1.0

        def __post_init__(self):
            self.b = v

    return lambda x: x * P().b


@difference(DIFFERENCES, 2.0, 3.0)
def dataclass_made_by_exec_with_its_own_init(v):
    space = {"dataclasses": dataclasses}
    exec(
        "@dataclasses.dataclass(init=False)\n"
        "class P:\n"
        "    a: float = 1.0\n"
        "    def __init__(self):\n"
        f"        self.a = {v}\n",
        space,
    )
    cls = space["P"]
    return lambda x: x * cls().a


@difference(DIFFERENCES, 2.0, 3.0)
def named_tuple_default(v):
    class P(typing.NamedTuple):
        a: float = v

        def run(self, x):
            return x * self.a

    return lambda x: P().run(x)


@difference(DIFFERENCES, ("a", "b"), ("b", "a"))
def fields_of_a_named_tuple(names):
    cls = collections.namedtuple("P", names)
    return lambda x: x * cls(2.0, 3.0).a


@difference(DIFFERENCES, 2.0, 3.0)
def private_attribute_of_an_enum(v):
    class Mode(enum.Enum):
        __scale = v
        A = 1

        def run(self, x):
            return x * self.__scale

    return lambda x: Mode.A.run(x)


@difference(DIFFERENCES, 2.0, 3.0)
def method_of_an_enum(v):
    class Mode(enum.Enum):
        A = 1

        def run(self, x):
            return x * v

    return lambda x: Mode.A.run(x)


@difference(DIFFERENCES, 2.0, 3.0)
def value_of_an_enum(v):
    class Mode(enum.Enum):
        A = v

    return lambda x: x * Mode.A.value


@difference(DIFFERENCES, 2.0, 3.0)
def abstract_class(v):
    class Base(abc.ABC):
        @abc.abstractmethod
        def run(self, x): ...

    class Sub(Base):
        def run(self, x):
            return x * v

    o = Sub()
    return lambda x: o.run(x)


@difference(DIFFERENCES, 2.0, 3.0, hits="")
def generic_class(v):
    T = typing.TypeVar("T")

    class Box(typing.Generic[T]):
        def run(self, x):
            return x * v

    o = Box()
    return lambda x: o.run(x)


@pytest.mark.parametrize(("name", "entry"), cases(DIFFERENCES))
def test_functions_that_differ_in_one_thing(name, entry):
    check_difference(DIFFERENCES[name], entry)


@pytest.mark.parametrize(
    ("name", "entry"), [c for c in cases(DIFFERENCES) if DIFFERENCES[c[0]].hits]
)
def test_a_fresh_equal_function_hits(name, entry):
    check_hit(DIFFERENCES[name], entry)


# --------------------------------------------------------------------------------------------
# Never stale
# --------------------------------------------------------------------------------------------


@change(CHANGES)
def a_global():
    f = function("def f(x):\n    return x * K", K=2.0)
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_another_type():
    f = function("def f(x):\n    return x * K", K=2)
    return f, lambda: f.__globals__.update(K=jnp.asarray(np.float32(5.0)))


@change(CHANGES)
def a_global_that_hides_a_builtin():
    f = function("def f(x):\n    return x * len(x)")
    return f, lambda: f.__globals__.update(len=lambda x: 7.0)


@change(CHANGES)
def a_global_that_appears():
    f = function(
        "def f(x):\n    try:\n        return x * K\n    except NameError:\n        return x"
    )
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_that_disappears():
    f = function(
        "def f(x):\n    try:\n        return x * K\n    except NameError:\n        return x", K=2.0
    )
    return f, lambda: f.__globals__.pop("K")


@change(CHANGES)
def a_global_array_rebound():
    f = function("def f(x):\n    return x * K", K=jnp.asarray(np.float32(2.0)))
    return f, lambda: f.__globals__.update(K=jnp.asarray(np.float32(3.0)))


@change(CHANGES)
def a_global_list_mutated():
    f = function("def f(x):\n    return x * K[0]", K=[2.0])
    return f, lambda: f.__globals__["K"].__setitem__(0, 3.0)


@change(CHANGES)
def a_closure_variable():
    v = 2.0

    def alter():
        nonlocal v
        v = 3.0

    return (lambda x: x * v), alter


@change(CHANGES)
def a_closure_variable_from_outside():
    def make(v):
        return lambda x: x * v

    f = make(2.0)
    return f, lambda: setattr(f.__closure__[0], "cell_contents", 3.0)


@change(CHANGES)
def a_helper_in_a_cell():
    def helper(x):
        return x * 2.0

    def alter():
        nonlocal helper

        def helper(x):
            return x * 3.0

    return (lambda x: helper(x)), alter


@change(CHANGES)
def a_helper_in_a_global():
    f = function("def h(x):\n    return x * 2.0\ndef f(x):\n    return h(x)")
    return f, lambda: exec("def h(x):\n    return x * 3.0", f.__globals__)


@change(CHANGES)
def a_global_of_a_global_helper():
    f = function("def h(x):\n    return x * K\ndef f(x):\n    return h(x)", K=2.0)
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_helper_in_a_cell():
    h = function("def f(x):\n    return x * K", K=2.0)
    return (lambda x: h(x)), lambda: h.__globals__.update(K=3.0)


@change(CHANGES)
def a_closure_variable_of_a_global_helper():
    v = 2.0

    def alter():
        nonlocal v
        v = 3.0

    return function("def f(x):\n    return H(x)", H=lambda x: x * v), alter


@change(CHANGES)
def the_code_in_place():
    f = function("def f(x):\n    return x * 2.0")
    return f, lambda: setattr(f, "__code__", (lambda x: x * 3.0).__code__)


@change(CHANGES)
def the_defaults_in_place():
    def f(x, k=2.0):
        return x * k

    return f, lambda: setattr(f, "__defaults__", (3.0,))


@change(CHANGES)
def the_keyword_defaults_in_place():
    def f(x, *, k=2.0):
        return x * k

    return f, lambda: setattr(f, "__kwdefaults__", {"k": 3.0})


@change(CHANGES)
def the_content_of_the_keyword_defaults():
    def f(x, *, k=2.0):
        return x * k

    return f, lambda: f.__kwdefaults__.update(k=3.0)


def _helper_case(**attributes):
    f = function("def h(x, a=2.0, *, b=1.0):\n    return x * a + b\ndef f(x):\n    return h(x)")
    h = f.__globals__["h"]

    def alter():
        for name, value in attributes.items():
            setattr(h, name, value)

    return f, alter


@change(CHANGES)
def the_code_of_a_global_helper():
    return _helper_case(__code__=(lambda x, a=1, *, b=2: x - b).__code__)


@change(CHANGES)
def the_defaults_of_a_global_helper():
    return _helper_case(__defaults__=(3.0,))


@change(CHANGES)
def the_keyword_defaults_of_a_global_helper():
    return _helper_case(__kwdefaults__={"b": 3.0})


@change(CHANGES)
def the_code_of_a_helper_in_a_cell():
    def h(x):
        return x * 2.0

    def other(x):
        return x * 3.0

    return (lambda x: h(x)), lambda: setattr(h, "__code__", other.__code__)


@change(CHANGES)
def a_function_attribute():
    f = function("def h(x):\n    return x * h.scale\ndef f(x):\n    return h(x)")
    h = f.__globals__["h"]
    h.scale = 2.0
    return f, lambda: setattr(h, "scale", 3.0)


@change(CHANGES)
def an_attribute_of_a_function_in_a_cell():
    def h(x):
        return x * h.scale

    h.scale = 2.0
    return (lambda x: h(x)), lambda: setattr(h, "scale", 3.0)


@change(CHANGES)
def a_module_attribute():
    m = module("m", "scale = 2.0")
    return function("def f(x):\n    return x * m.scale", m=m), lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_module_attribute_in_a_cell():
    m = module("m", "scale = 2.0")
    return (lambda x: x * m.scale), lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_function_of_a_module():
    m = module("m", "def h(x):\n    return x * 2.0")
    f = function("def f(x):\n    return m.h(x)", m=m)
    return f, lambda: setattr(m, "h", lambda x: x * 3.0)


@change(CHANGES)
def a_global_of_a_function_of_a_module():
    m = module("m", "scale = 2.0\ndef h(x):\n    return x * scale")
    return function("def f(x):\n    return m.h(x)", m=m), lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_global_of_a_scan_body_in_a_module():
    m = module("m", "scale = 2.0\ndef step(c, _):\n    return c * scale, None")
    f = function("def f(x):\n    return lax.scan(m.step, x, None, length=2)[0]", m=m)
    return f, lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_global_of_a_scan_body():
    f = function(
        "def step(c, _):\n    return c * K, None\n"
        "def f(x):\n    return lax.scan(step, x, None, length=2)[0]",
        K=2.0,
    )
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_while_body_in_a_module():
    m = module(
        "m",
        "scale = 2.0\ndef cond(c):\n    return c[0] < 20.0\ndef step(c):\n    return c * scale",
    )
    f = function("def f(x):\n    return lax.while_loop(m.cond, m.step, x)", m=m)
    return f, lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_global_of_a_checkpointed_function_of_a_module():
    m = module("m", "scale = 2.0\n@jax.checkpoint\ndef h(x):\n    return x * scale")
    return function("def f(x):\n    return m.h(x)", m=m), lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_global_of_a_jitted_helper():
    f = function("@jax.jit\ndef h(x):\n    return x * K\ndef f(x):\n    return h(x)", K=2.0)
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_jitted_helper_in_a_cell():
    g = function("def f(x):\n    return x * K", K=2.0)
    h = jax.jit(g)
    return (lambda x: h(x)), lambda: g.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_jitted_helper_in_a_list():
    g = function("def f(x):\n    return x * K", K=2.0)
    h = [jax.jit(g)]
    return (lambda x: h[0](x)), lambda: g.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_jitted_helper_in_a_module():
    m = module("m", "scale = 2.0\n@jax.jit\ndef h(x):\n    return x * scale")
    return function("def f(x):\n    return m.h(x)", m=m), lambda: setattr(m, "scale", 3.0)


@change(CHANGES)
def a_global_of_a_jitted_helper_in_an_object():
    g = function("def f(x):\n    return x * K", K=2.0)
    o = types.SimpleNamespace(h=jax.jit(g))
    return (lambda x: o.h(x)), lambda: g.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_jitted_method():
    f = function(
        "from functools import partial\n"
        "class C:\n"
        "    @partial(jax.jit, static_argnums=0)\n"
        "    def run(self, x):\n        return x * K\n"
        "o = C()\n"
        "def f(x):\n    return o.run(x)",
        K=2.0,
    )
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_global_of_a_loop_jitted_helper():
    f = function(
        "@loop_jit\ndef h(x):\n    return x * K\ndef f(x):\n    return h(x)",
        K=2.0,
        loop_jit=loop_jit,
    )
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def a_library_function_replaced():
    fake = module("fake", "scale = 2.0\ndef op(x):\n    return x * scale")
    jnp.trap_op = fake.op
    f = function("def f(x):\n    return jnp.trap_op(x)")
    return f, lambda: setattr(fake, "scale", 3.0)


def _object_case(cls_source, alter, run="def f(x):\n    return o.run(x)"):
    f = function(f"{cls_source}\no = C()\n{run}")
    space = f.__globals__
    return f, lambda: alter(space["o"], space["C"])


_PLAIN_CLASS = """
class Base:
    bias = 0.5
    def shift(self, x):
        return x + self.bias
class C(Base):
    factor = 2.0
    def __init__(self):
        self.k = 2.0
        self.items = [2.0]
        self.named = {"a": 2.0}
    def run(self, x):
        return self.shift(x * self.k * self.factor * self.items[0] * self.named["a"])
"""


@change(CHANGES)
def an_attribute_of_an_object():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(o, "k", 3.0))


@change(CHANGES)
def a_list_in_an_object():
    return _object_case(_PLAIN_CLASS, lambda o, C: o.items.__setitem__(0, 3.0))


@change(CHANGES)
def a_dict_in_an_object():
    return _object_case(_PLAIN_CLASS, lambda o, C: o.named.update(a=3.0))


@change(CHANGES)
def a_class_attribute():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(C, "factor", 3.0))


@change(CHANGES)
def a_class_attribute_hidden_by_the_object():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(o, "factor", 3.0))


@change(CHANGES)
def an_attribute_of_a_base_hidden_by_the_class():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(C, "bias", 3.0))


@change(CHANGES)
def an_attribute_of_a_base():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(C.__mro__[1], "bias", 3.0))


@change(CHANGES)
def a_method_patched():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(C, "run", lambda self, x: x * 7.0))


@change(CHANGES)
def a_method_of_a_base_patched():
    return _object_case(
        _PLAIN_CLASS, lambda o, C: setattr(C.__mro__[1], "shift", lambda self, x: x * 7.0)
    )


@change(CHANGES)
def a_method_patched_on_the_object():
    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(o, "run", lambda x: x * 7.0))


@change(CHANGES)
def the_code_of_a_method_in_place():
    return _object_case(
        _PLAIN_CLASS, lambda o, C: setattr(C.run, "__code__", (lambda self, x: x * 7.0).__code__)
    )


@change(CHANGES)
def the_class_of_an_object():
    class Other:
        def run(self, x):
            return x * 7.0

    return _object_case(_PLAIN_CLASS, lambda o, C: setattr(o, "__class__", Other))


@change(CHANGES)
def an_attribute_becomes_a_property():
    return _object_case(
        "class C:\n    factor = 2.0",
        lambda o, C: setattr(C, "factor", property(lambda self: 3.0)),
        "def f(x):\n    return x * o.factor",
    )


@change(CHANGES)
def what_a_property_reads():
    return _object_case(
        "class C:\n    K = 2.0\n    @property\n    def factor(self):\n        return self.K",
        lambda o, C: setattr(C, "K", 3.0),
        "def f(x):\n    return x * o.factor",
    )


@change(CHANGES)
def what_getattr_reads():
    return _object_case(
        "class C:\n    K = 2.0\n    def __getattr__(self, name):\n        return self.K",
        lambda o, C: setattr(C, "K", 3.0),
        "def f(x):\n    return x * o.factor",
    )


@change(CHANGES)
def an_attribute_that_getattr_made_up():
    return _object_case(
        "class C:\n    def __getattr__(self, name):\n        return 2.0",
        lambda o, C: setattr(o, "factor", 3.0),
        "def f(x):\n    return x * o.factor",
    )


@change(CHANGES)
def a_class_attribute_read_through_the_class():
    return _object_case(
        "class C:\n    lr = 2.0",
        lambda o, C: setattr(C, "lr", 3.0),
        "def f(x):\n    return x * C.lr",
    )


@change(CHANGES)
def a_class_attribute_read_by_a_class_method():
    return _object_case(
        "class C:\n    lr = 2.0\n    @classmethod\n    def run(cls, x):\n        return x * cls.lr",
        lambda o, C: setattr(C, "lr", 3.0),
        "def f(x):\n    return C.run(x)",
    )


@change(CHANGES)
def a_descriptor_read_through_the_class():
    return _object_case(
        "class D:\n    def __init__(self):\n        self.k = 1.0\n        self.hidden = [2.0]\n"
        "    def __get__(self, o, t):\n        return self.hidden\n"
        "class C:\n    lr = D()",
        lambda o, C: C.lr.__setitem__(0, 3.0),
        "def f(x):\n    return x * C.lr[0]",
    )


@change(CHANGES)
def an_attribute_read_by_a_method_that_scans():
    return _object_case(
        "class C:\n    k = 2.0\n"
        "    def step(self, c, _):\n        return c * self.k, None\n"
        "    def run(self, x):\n        return lax.scan(self.step, x, None, length=2)[0]",
        lambda o, C: setattr(o, "k", 3.0),
    )


@change(CHANGES)
def an_attribute_read_by_a_jitted_method():
    return _object_case(
        "import functools\nclass C:\n    k = 2.0\n"
        "    @functools.partial(jax.jit, static_argnums=0)\n"
        "    def run(self, x):\n        return x * self.k",
        lambda o, C: setattr(o, "k", 3.0),
    )


@change(CHANGES)
def a_class_registered_with_an_abstract_one():
    class Round:
        pass

    class Shape(abc.ABC):
        pass

    o = Round()
    return (lambda x: x * 2.0 if isinstance(o, Shape) else x), lambda: Shape.register(Round)


@change(CHANGES)
def a_class_defined_again():
    f = function(
        "class C:\n    pass\no = C()\ndef f(x):\n    return x * 2.0 if isinstance(o, C) else x"
    )
    return f, lambda: exec("class C:\n    pass", f.__globals__)


@change(CHANGES)
def a_class_that_is_constructed():
    f = function(
        "class C:\n    def run(self, x):\n        return x * 2.0\ndef f(x):\n    return C().run(x)"
    )
    return f, lambda: setattr(f.__globals__["C"], "run", lambda self, x: x * 3.0)


@change(CHANGES)
def an_enum_attribute():
    class Mode(enum.Enum):
        A = 1

    Mode.A.scale = 2.0
    return (lambda x: x * Mode.A.scale), lambda: setattr(Mode.A, "scale", 3.0)


@change(CHANGES)
def an_attribute_of_an_enum_member():
    class Mode(enum.Enum):
        A = 1

    mode = Mode.A
    mode.scale = 2.0
    return (lambda x: x * mode.scale), lambda: setattr(mode, "scale", 3.0)


@change(CHANGES)
def a_global_that_cannot_be_traced_by_value_at_first():
    # The trace raises, and stock JAX takes over; after the change it does not raise.
    f = function(
        "def act(x):\n    return x\nTABLE = {act: 1.0}\n"
        "def make(g):\n    return lambda x: x * TABLE[g] * K\nf = make(act)",
        K=2.0,
    )
    return f, lambda: f.__globals__.update(K=3.0)


@change(CHANGES)
def the_environment():
    os.environ["LOOPJIT_TRAP"] = "2.0"
    f = function("def f(x):\n    return x * float(os.environ['LOOPJIT_TRAP'])", os=os)
    return f, lambda: os.environ.update(LOOPJIT_TRAP="3.0")


@pytest.mark.parametrize(("name", "entry"), cases(CHANGES))
def test_never_stale(name, entry):
    check_change(CHANGES[name], entry)


# --------------------------------------------------------------------------------------------
# What reads the world is run again for each fresh function
# --------------------------------------------------------------------------------------------

_local = threading.local()
_variable = contextvars.ContextVar("scale")
_iterator = itertools.count(2)


def _import_numpy(x):
    import numpy

    return x * numpy.random.rand()


def _import_from_numpy(x):
    from numpy.random import rand

    return x * rand()


def _import_random(x):
    import random

    return x * random.random()


def _import_builtins(x):
    import builtins

    return x * builtins.eval("_world[0]")


_world = [0.0]


def _next_world():
    _world[0] += 1.0
    _local.scale = _world[0]
    _variable.set(_world[0])
    os.environ["LOOPJIT_TRAP"] = str(_world[0])


WORLD = {
    "np.random": lambda x: x * np.random.rand(),
    "np.random.default_rng": lambda x: x * np.random.default_rng().random(),
    "random": lambda x: x * random.random(),
    "time": lambda x: x * (time.perf_counter_ns() % 1_000_003),  # far apart, also after hours
    "environ": lambda x: x * float(os.environ["LOOPJIT_TRAP"]),
    "getenv": lambda x: x * float(os.getenv("LOOPJIT_TRAP")),
    "globals": lambda x: x * globals()["_world"][0],
    "vars": lambda x: x * vars(sys.modules[__name__])["_world"][0],
    "sys.modules": lambda x: x * sys.modules[__name__]._world[0],
    "eval": lambda x: x * eval("_world[0]"),
    "builtins.eval": lambda x: x * builtins.eval("_world[0]"),
    "import_module": lambda x: x * importlib.import_module(__name__)._world[0],
    "frame": lambda x: x * inspect.currentframe().f_globals["_world"][0],
    "local": lambda x: x * _local.scale,
    "contextvar": lambda x: x * _variable.get(),
    "iterator": lambda x: x * next(_iterator),
    "id": lambda x: x * (id(object()) % 97 + 100.0 * _world[0]),
    "import numpy": _import_numpy,
    "from numpy.random import": _import_from_numpy,
    "import random": _import_random,
    "import builtins": _import_builtins,
}


def _fresh(f):
    return types.FunctionType(f.__code__, f.__globals__, f.__name__)


@pytest.mark.parametrize(("name", "entry"), cases(WORLD))
def test_what_reads_the_world_is_read_again(name, entry):
    run, pick = ENTRIES[entry]
    outs = []
    for _ in range(3):
        _next_world()
        outs.append(np.asarray(pick(run(_fresh(WORLD[name])))))
    assert differs(outs[0], outs[1]) and differs(outs[1], outs[2])


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_captured_iterator_moves_on(entry):
    run, pick = ENTRIES[entry]

    def make(source):
        return lambda x: x * next(source)

    for source in (iter([2.0, 3.0, 4.0]), (float(n) for n in (2, 3, 4)), itertools.count(2.0)):
        for want in (2.0, 3.0, 4.0):
            same(pick(run(make(source))), X * np.float32(want))


@pytest.mark.parametrize("entry", ENTRIES)
def test_warnings_and_prints_come_again(entry, capsys):
    run, _ = ENTRIES[entry]

    def make():
        def f(x):
            print("traced")
            warnings.warn("careful", stacklevel=1)
            return x * 2.0

        return f

    for _ in range(2):
        with pytest.warns(UserWarning, match="careful"):
            run(make())
        assert "traced" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------
# Side effects while tracing
# --------------------------------------------------------------------------------------------


def _append(box):
    def f(x):
        box.append(x.shape)
        return x * 2.0

    return f


def _item(box):
    def f(x):
        box[:] = [x.shape]
        return x * 2.0

    return f


def _put(box, value):
    box.extend([value])


def _through_a_helper(box):
    def f(x):
        _put(box, x.shape)
        return x * 2.0

    return f


def _through_a_bound_method(box):
    add = box.append

    def f(x):
        add(x.shape)
        return x * 2.0

    return f


def _through_operator(box):
    def f(x):
        operator.iadd(box, [x.shape])
        return x * 2.0

    return f


def _through_a_default(box):
    def f(x, box=box):
        box.append(x.shape)
        return x * 2.0

    return f


def _through_a_partial(box):
    def f(box, x):
        box.append(x.shape)
        return x * 2.0

    return functools.partial(f, box)


def _through_an_object(box):
    o = types.SimpleNamespace(box=box)

    def f(x):
        o.box.append(x.shape)
        return x * 2.0

    return f


def _through_an_item_of_an_object(box):
    o = types.SimpleNamespace(box=box)
    box.append(None)

    def f(x):
        operator.setitem(o.box, 0, x.shape)
        return x * 2.0

    return f


WRITES = [
    _append,
    _item,
    _through_a_helper,
    _through_a_bound_method,
    _through_operator,
    _through_a_default,
    _through_a_partial,
    _through_an_object,
    _through_an_item_of_an_object,
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("make", WRITES)
def test_what_a_trace_writes_is_written_for_each_fresh_function(make, entry):
    run, pick = ENTRIES[entry]
    for _ in range(3):
        box = []
        same(pick(run(make(box))), X * 2.0)
        assert box and set(box) == {(3,)}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_a_trace_writes_into_sets_and_buffers(entry):
    run, pick = ENTRIES[entry]

    def add(target, item):
        target.add(item)

    def fill(target, n):
        target[0] = n

    def store(target, item):
        object.__setattr__(target, "shape", item)

    def make(seen, buffer, o):
        def f(x):
            add(seen, x.shape)
            fill(buffer, x.shape[0])
            store(o, x.shape)
            return x * 2.0

        return f

    for _ in range(3):
        seen, buffer, o = set(), np.zeros(1), types.SimpleNamespace()
        same(pick(run(make(seen, buffer, o))), X * 2.0)
        assert seen == {(3,)} and buffer[0] == 3 and o.shape == (3,)


@pytest.mark.parametrize("entry", ENTRIES)
def test_dict_attribute_global_and_nonlocal_writes(entry):
    run, pick = ENTRIES[entry]

    def store(target, key, value):
        target[key] = value

    def make(box, o, m):
        count = 0

        def f(x):
            nonlocal count
            count += 1
            store(box, "shape", x.shape)
            setattr(o, "shape", x.shape)
            m.shape = x.shape
            return x * 2.0

        return f, lambda: count

    for _ in range(2):
        box, o, m = {}, types.SimpleNamespace(), module("m", "")
        f, count = make(box, o, m)
        same(pick(run(f)), X * 2.0)
        assert box == {"shape": (3,)}
        assert o.shape == m.shape == (3,)
        assert count() >= 1


def test_a_trace_counter_does_not_trace_each_call():
    traces = []

    @loop_jit
    def f(x):
        traces.append(1)
        return x * 2.0

    for _ in range(5):
        f(X)
    assert len(traces) == 1


def test_a_trace_counter_in_a_dict_does_not_trace_each_call():
    traces = {"n": 0}

    @loop_jit
    def f(x):
        traces["n"] += 1
        return x * 2.0

    f(X), f(X)
    count = traces["n"]
    for _ in range(5):
        f(X)
    assert traces["n"] == count


def test_what_is_written_while_tracing_is_seen_by_the_function():
    def make():
        memo = {}

        def f(x):
            if "k" not in memo:
                memo["k"] = 2.0
                return x * memo["k"]
            return x * 5.0

        return f

    for _ in range(3):
        same(loop_jit(make())(X), X * 2.0)


def test_a_function_that_raises_at_first():
    space = module(
        "m",
        "ok = False\ndef f(x):\n    if not ok:\n        raise KeyError('no')\n    return x * K",
        K=2.0,
    )
    f = loop_jit(space.f)
    for _ in range(2):
        with pytest.raises(KeyError):
            f(X)
    space.ok = True
    same(f(X), X * 2.0)
    space.K = 3.0
    same(f(X), X * 3.0)
    space.ok = False
    with pytest.raises(KeyError):
        f(X)
    with pytest.raises(KeyError):
        loop_jit(_fresh(space.f))(X)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError])
def test_a_fresh_function_that_raises(kind):
    def make(fails):
        def f(x):
            if fails:
                raise kind("no")
            return x

        return f

    for fails in (True, False, True):
        if fails:
            with pytest.raises(kind, match="no"):
                loop_jit(make(fails))(X)
        else:
            same(loop_jit(make(fails))(X), X)


# --------------------------------------------------------------------------------------------
# What is not code
# --------------------------------------------------------------------------------------------

_SAME = [
    "def f(x):\n    return x * 2.0",
    "\n\n# a comment\ndef f(x):\n    return x * 2.0",
    "def f(x):\n    '''A docstring.'''\n    return x * 2.0",
    "def f(x):\n    '''Another one.'''\n    return x * 2.0  # a comment",
    "def f(x: float) -> float:\n\n    return (\n        x *\n        2.0\n    )",
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("source", _SAME)
def test_a_cell_run_again_hits(source, entry):
    run, pick = ENTRIES[entry]
    run(function(_SAME[0]))
    with counting() as n:
        out = run(function(source))
    same(pick(out), X * 2.0)
    assert (n.compiles, n.traces) == (0, 0)


def test_a_module_loaded_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "trap_module.py"
    path.write_text("scale = 2.0\ndef step(x):\n    return x * scale\n")
    m = importlib.import_module("trap_module")
    f = loop_jit(lambda x: m.step(x))
    same(f(X), X * 2.0)
    path.write_text("# again\nscale = 2.0\ndef step(x):\n    return x * scale\n")
    importlib.reload(m)
    same(f(X), X * 2.0)
    path.write_text("scale = 3.0000\ndef step(x):\n    return x * scale\n")
    importlib.reload(m)
    same(f(X), X * 3.0)
    del sys.modules["trap_module"]


def test_many_nested_closures():
    f = lambda x: x + 1.0
    for _ in range(300):
        f = (lambda g: lambda x: g(x))(f)
    same(loop_jit(f)(X), X + 1.0)


def test_a_function_reached_in_many_ways():
    f = lambda x: x
    for _ in range(16):
        f = (lambda g, h: lambda x: g(x) if x is None else h(x))(f, f)
    start = time.perf_counter()
    same(loop_jit(f)(X), X)
    assert time.perf_counter() - start < 5.0  # milliseconds, or hours


def test_composed_transformations():
    def make(v):
        return lambda x: jnp.sum(jnp.sin(x) * v)

    for v in (2.0, 3.0, 2.0):
        f = make(v)
        same(jax.grad(loop_jit(make(v)))(X), jax.grad(f)(X))
        same(jax.vmap(loop_jit(make(v)))(X), jax.vmap(f)(X))
        same(jax.jit(loop_jit(make(v)))(X), f(X))
        same(loop_jit(jax.grad(make(v)))(X), jax.grad(f)(X))
        same(loop_jit(jax.vmap(make(v)))(X), jax.vmap(f)(X))
        same(jax.jvp(loop_jit(make(v)), (X,), (X,)), jax.jvp(f, (X,), (X,)))


def test_lax_roots_that_differ():
    def times(v):
        return lambda x: x * v

    def below(v):
        return lambda x: x[0] < v

    for a, b in ((2.0, 10.0), (3.0, 10.0), (2.0, 50.0), (2.0, 10.0)):
        same(
            loopjit.lax.while_loop(below(b), times(a), X),
            lax.while_loop(below(b), times(a), X),
        )
        same(loopjit.lax.cond(a < 2.5, times(a), times(b), X), X * np.float32(a if a < 2.5 else b))
        same(loopjit.lax.switch(1, [times(b), times(a)], X), X * np.float32(a))
        same(
            loopjit.lax.fori_loop(0, int(a), lambda i, x: x * b + i, X),
            lax.fori_loop(0, int(a), lambda i, x: x * b + i, X),
        )
        same(
            loopjit.lax.scan(lambda c, x: (c * a + x, c), X[0], X),
            lax.scan(lambda c, x: (c * a + x, c), X[0], X),
        )
        same(
            loopjit.lax.associative_scan(lambda p, q: p * q * a, X),
            lax.associative_scan(lambda p, q: p * q * a, X),
        )


def test_lax_options_that_differ():
    body = lambda c, x: (c * 2.0 + x, c)
    for length, reverse, unroll in (
        (3, False, 1),
        (3, True, 1),
        (None, False, 2),
        (3, False, True),
    ):
        same(
            loopjit.lax.scan(body, X[0], X, length, reverse, unroll),
            lax.scan(body, X[0], X, length, reverse, unroll),
        )
    for n in (1, 2, np.int32(2), jnp.int32(2), np.int64(3)):
        same(
            loopjit.lax.fori_loop(0, n, lambda i, x: x + i, X),
            lax.fori_loop(0, n, lambda i, x: x + i, X),
        )
    for axis in (0, 1):
        y = jnp.outer(X, X)
        same(
            loopjit.lax.associative_scan(jnp.add, y, axis=axis),
            lax.associative_scan(jnp.add, y, axis=axis),
        )
