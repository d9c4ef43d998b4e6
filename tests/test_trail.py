"""The shortest way of a call: taken while nothing has changed, and never when something has.

Each case makes a function and changes to what it captures. The same ``loop_jit`` object is called before and
after each of them, and must give what plain Python gives; before them it must have taken the shortest way.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import random
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traps import X, differs, module, same

import loopjit
from counting import counting
from loopjit import compat, loop_jit
from loopjit.engine import warm
from loopjit.transform import LoopJitted

CASES = {}
METHODS = {}
LONGER = {}
PATIENCE = 64 + 4


def case(table):
    def note(make):
        assert make.__name__ not in table
        table[make.__name__] = make
        return make

    return note


@contextlib.contextmanager
def ways():
    """The longer ways that calls take in the block."""
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_find", "_slow"):
            usual = getattr(LoopJitted, name)

            def noted(*args, usual=usual, name=name):
                taken.append(name)
                return usual(*args)

            patch.setattr(LoopJitted, name, noted)
        yield taken


@pytest.fixture(autouse=True)
def _untouched(monkeypatch):
    """Whatever was changed in JAX's configuration, and changed back, by tests before."""
    monkeypatch.setattr(compat.watch, "touched", False)


@pytest.fixture(params=["one device", "many devices"])
def _devices(request, monkeypatch):
    monkeypatch.setattr(warm, "_many", request.param == "many devices")


def number(v) -> float:
    """A number for what can be seen of a value."""
    total = 0
    for letter in repr((type(v).__name__, v)):
        total = (total * 31 + ord(letter)) % 100_003
    return float(total)


def arr(v=2.0, dtype=np.float32, shape=(3,)):
    return jnp.asarray(np.full(shape, v, dtype))


def setter(name, *values):
    """Changes that set an attribute to each of some values."""
    return lambda thing: [functools.partial(setattr, thing, name, v) for v in values]


def check(run, plain, changes, quick=True) -> None:
    for _ in range(3):
        same(run(X), plain(X))
    seen = plain(X)
    with ways() as taken:
        got = run(X)
    same(got, seen)
    assert bool(taken) is not quick
    unlike = 0
    for change in changes:
        change()
        want = plain(X)
        unlike += differs(seen, want)
        seen = want
        for _ in range(3):
            same(run(X), want)
    assert unlike or not changes, "the case does not change anything"


@pytest.mark.usefixtures("_devices")
@pytest.mark.parametrize("name", CASES)
def test_sees_changes(name):
    f, changes = CASES[name]()
    check(loop_jit(f), f, changes)


@pytest.mark.usefixtures("_devices")
@pytest.mark.parametrize("name", METHODS)
def test_sees_changes_of_self(name):
    m, changes = METHODS[name]()
    check(lambda x: m.run(x), lambda x: type(m).run.__wrapped__(m, x), changes)


@pytest.mark.parametrize("name", METHODS)
def test_sees_changes_of_the_object_of_a_bound_method(name):
    m, changes = METHODS[name]()
    f = types.MethodType(type(m).run.__wrapped__, m)
    check(loop_jit(f), f, changes)


@pytest.mark.parametrize("name", LONGER)
def test_goes_the_longer_way(name):
    f, changes = LONGER[name]()
    check(loop_jit(f), f, changes, quick=False)


@pytest.mark.parametrize("name", CASES)
def test_an_equal_function_finds_the_shortest_way(name):
    loop_jit(CASES[name]()[0])(X)
    f, changes = CASES[name]()
    run = loop_jit(f)
    for _ in range(PATIENCE):
        run(X)
    check(run, f, changes)


# --------------------------------------------------------------------------------------------
# Cells
# --------------------------------------------------------------------------------------------


def rebound(first, *others, read=None):
    """A function of a closure variable, and changes that bind it to other values."""
    v = first
    read = read or number

    def f(x):
        return x * read(v)

    def bind(value):
        nonlocal v
        v = value

    return f, [functools.partial(bind, value) for value in (*others, first)]


@case(CASES)
def numbers_in_a_cell():
    return rebound(1, True, 1.0, 1, 2, 0.0, -0.0, 0, False, None, "1", 10**30, 1j, 1 + 0j)


@case(CASES)
def numpy_scalars_in_a_cell():
    return rebound(np.float32(1), np.float64(1), 1.0, np.int32(1), np.int8(1), np.bool_(True))


@case(CASES)
def a_cell_that_is_emptied():
    v = 2.0

    def f(x):
        try:
            return x * v
        except NameError:
            return x * 7.0

    def empty():
        nonlocal v
        del v

    return f, [empty]


@case(CASES)
def tuples_in_a_cell():
    return rebound((1, 2), (1, 2.0), (1, True), (2, 1), (1, (2,)), (1,), (), [1, 2], (1, 2, 3))


@case(CASES)
def containers_in_a_cell():
    return rebound(
        [1, 2], [2, 1], [1, 2.0], (1, 2), {1: 2}, {True: 2}, {1: 2.0}, [1, [2]], [[1], 2]
    )


@case(CASES)
def kinds_of_containers_in_a_cell():
    ordered = collections.OrderedDict(a=1)
    return rebound([1, 2], (1, 2), [1, 2], {"a": 1}, ordered, {"a": 1}, [{"a": 1}], ({"a": 1},))


@case(CASES)
def a_list_that_changes():
    v = [1.0, 2.0, 3.0]

    def f(x):
        return x * number(v)

    return f, [
        lambda: v.__setitem__(1, 5.0),
        lambda: v.__setitem__(1, 5),
        lambda: v.append(4.0),
        lambda: v.reverse(),
        lambda: v.pop(),
        lambda: v.__setitem__(0, [1.0]),
        lambda: v[0].append(2.0),
        lambda: v.clear(),
        lambda: v.extend([1.0, 2.0, 3.0]),
        lambda: v.__setitem__(2, True),
        lambda: v.__setitem__(2, 1),
        lambda: v.__setitem__(0, 0.0),
        lambda: v.__setitem__(0, -0.0),
    ]


@case(CASES)
def a_dict_that_changes():
    v = {"a": 1.0, "b": 2.0, "c": 3.0}

    def f(x):
        return x * number(v)

    return f, [
        lambda: v.update(a=2.0),
        lambda: v.update(a=2),
        lambda: v.update(d=1.0),
        lambda: v.pop("d"),
        lambda: v.update(b=v.pop("b")),  # to the end
        lambda: v.update(b=True),
        lambda: v.update(b=1),
        lambda: v.update(a=[1.0]),
        lambda: v["a"].append(1.0),
        lambda: v.clear(),
        lambda: v.update({1: 1.0}),
        lambda: v.clear() or v.update({True: 1.0}),
        lambda: v.clear() or v.update({1.0: 1.0}),
    ]


@case(CASES)
def an_ordered_dict_that_changes():
    v = collections.OrderedDict(a=1.0, b=2.0)

    def f(x):
        return x * number(tuple(v.items()))

    return f, [lambda: v.move_to_end("a"), lambda: v.update(a=3.0), lambda: v.popitem()]


@case(CASES)
def a_list_in_a_tuple_in_a_dict():
    v = {"a": ([1.0],)}

    def f(x):
        return x * v["a"][0][0]

    return f, [
        lambda: v["a"][0].__setitem__(0, 2.0),
        lambda: v.update(a=([3.0],)),
        lambda: v.update(a=([4.0, 5.0],)),
    ]


@case(CASES)
def one_list_or_two():
    a, b = [1.0], [1.0]

    def f(x):
        return x * (2.0 if a is b else 3.0)

    def alias():
        nonlocal b
        b = a

    def part():
        nonlocal b
        b = [1.0]

    return f, [alias, part, alias]


@case(CASES)
def one_list_at_first():
    a = [1.0]
    b = {"a": a, "b": a}

    def f(x):
        return x * (2.0 if b["a"] is b["b"] else 3.0)

    return f, [lambda: b.update(b=[1.0]), lambda: b.update(a=b["b"])]


@case(CASES)
def one_function_or_two():
    a, b = (lambda x: x + 1.0), (lambda x: x + 1.0)

    def f(x):
        return a(x) * (2.0 if a is b else 3.0)

    def alias():
        nonlocal b
        b = a

    return f, [alias]


@case(CASES)
def one_object_or_two():
    a, b = Cfg(), Cfg()

    def f(x):
        return x * a.lr * b.lr * (2.0 if a is b else 3.0)

    def alias():
        nonlocal b
        b = a

    def part():
        nonlocal b
        b = Cfg()

    return f, [alias, part]


@case(CASES)
def arrays_in_cells():
    v, k = arr(), 2.0

    def f(x):
        return x * k * jnp.sum(v)

    def bind(value):
        nonlocal v
        v = value

    values = (
        arr(3.0),
        arr(3.0, shape=(4,)),
        arr(3, np.int32),
        np.full(3, 4.0, np.float32),
        2.5,
        arr(3.0),
        jnp.asarray(2.0),
        arr(3.0, np.float16),
        1,
    )
    return f, [functools.partial(bind, value) for value in values]


@case(CASES)
def kinds_of_arrays_in_a_cell():
    read = lambda v: v * (2.0 if isinstance(v, np.ndarray) else 3.0)
    return rebound(arr(2.0), np.full(3, 2.0, np.float32), read=read)


@case(CASES)
def arrays_in_containers():
    v = {"w": arr(2.0), "b": [arr(3.0), 1.0]}

    def f(x):
        return x * v["w"] + v["b"][0] * v["b"][1]

    def swap():
        v["w"], v["b"][0] = v["b"][0], v["w"]

    return f, [
        swap,
        lambda: v.update(w=arr(5.0)),
        lambda: v.update(w=arr(5.0, np.float16)),
        lambda: v["b"].__setitem__(1, arr(4.0)),
        lambda: v["b"].__setitem__(1, 4.0),
        lambda: v.update(w=3.0),
        lambda: v.update(b=[4.0, arr(3.0)]),
    ]


@case(CASES)
def a_tuple_of_arrays():
    v = (arr(2.0), 3.0)

    def f(x):
        return x * v[0] + v[1]

    def bind(value):
        nonlocal v
        v = value

    return f, [
        lambda: bind((arr(3.0), 3.0)),
        lambda: bind((arr(3.0), 4.0)),
        lambda: bind((4.0, arr(3.0))),
    ]


@case(CASES)
def a_library_function_in_a_cell():
    return rebound(jnp.sin, jnp.cos, jnp.tanh, read=lambda v: v(2.0))


@case(CASES)
def a_jitted_function_in_a_cell():
    k = [2.0]
    v = jax.jit(lambda y: y * k[0])

    def f(x):
        return v(x)

    def bind():
        nonlocal v
        v = jax.jit(lambda y: y * k[0] * 2.0)

    # What `jax.jit` traced once it does not trace again: a new one for each value.
    return f, [bind]


@case(CASES)
def options_of_a_jitted_function_in_a_cell():
    kind = lambda n: 2.0 if isinstance(n, int) else 3.0
    v = jax.jit(kind)

    def f(x):
        return x * v(1)

    def bind():
        nonlocal v
        v = jax.jit(kind, static_argnums=0)

    return f, [bind]


@case(CASES)
def a_staged_function_in_a_cell():
    k = [2.0]
    v = loop_jit(lambda y: y * k[0])

    def f(x):
        return v(x)

    def bind():
        nonlocal v
        v = loop_jit(lambda y: y * k[0] * 2.0)

    return f, [lambda: k.__setitem__(0, 3.0), bind, lambda: k.__setitem__(0, 4.0)]


@case(CASES)
def a_partial_in_a_cell():
    k = [1.0]
    v = functools.partial(lambda a, y, b: y * a + b[0], 2.0, b=k)

    def f(x):
        return v(x)

    def bind(value):
        nonlocal v
        v = value

    return f, [
        lambda: k.__setitem__(0, 3.0),
        lambda: bind(functools.partial(v.func, 3.0, b=k)),
        lambda: bind(functools.partial(v.func, 3.0, b=[4.0])),
        lambda: bind(functools.partial(lambda a, y, b: y * a - b[0], 3.0, b=[4.0])),
    ]


@case(CASES)
def a_partial_of_an_array():
    v = functools.partial(jnp.multiply, arr(2.0))

    def f(x):
        return v(x)

    def bind():
        nonlocal v
        v = functools.partial(jnp.multiply, arr(3.0))

    return f, [bind]


@case(CASES)
def a_method_in_a_cell():
    m = Plain()
    v = m.scaled

    def f(x):
        return v(x)

    def other():
        nonlocal v
        v = m.shifted

    return f, [
        lambda: setattr(m, "k", 3.0),
        lambda: setattr(m, "w", arr(5.0)),
        other,
        lambda: setattr(m, "k", 4.0),
    ]


@case(CASES)
def a_custom_jvp_in_a_cell():
    k = [2.0]

    def make(k):
        @jax.custom_jvp
        def v(x):
            return x * k[0]

        @v.defjvp
        def rule(primals, tangents):
            return v(*primals), tangents[0]

        return v

    v = make(k)

    def f(x):
        return v(x)

    def bind():
        nonlocal v
        v = make([5.0])

    return f, [lambda: k.__setitem__(0, 3.0), bind]


# --------------------------------------------------------------------------------------------
# Functions
# --------------------------------------------------------------------------------------------


@case(CASES)
def a_default():
    def f(x, k=3.0):
        return x * k

    return f, [
        lambda: setattr(f, "__defaults__", (4.0,)),
        lambda: setattr(f, "__defaults__", (4,)),
        lambda: setattr(f, "__defaults__", (arr(5.0),)),
        lambda: setattr(f, "__defaults__", (arr(6.0),)),
    ]


@case(CASES)
def a_default_that_changes_in_place():
    k = [3.0]

    def f(x, k=k, w=arr(2.0)):
        return x * k[0] * w

    return f, [
        lambda: k.__setitem__(0, 4.0),
        lambda: setattr(f, "__defaults__", (k, arr(3.0))),
        lambda: setattr(f, "__defaults__", ([5.0], arr(3.0))),
    ]


@case(CASES)
def a_keyword_default():
    def f(x, *, k=3.0, w=arr(2.0)):
        return x * k * w

    return f, [
        lambda: f.__kwdefaults__.update(k=4.0),
        lambda: f.__kwdefaults__.update(w=arr(5.0)),
        lambda: f.__kwdefaults__.update(w=5.0),
        lambda: setattr(f, "__kwdefaults__", {"k": 7.0, "w": 1.0}),
    ]


@case(CASES)
def its_own_code():
    def f(x):
        return x * 2.0

    def g(x):
        return x * 3.0

    return f, [lambda: setattr(f, "__code__", g.__code__)]


@case(CASES)
def its_own_code_with_cells():
    v = 2.0

    def f(x):
        return x * v

    def g(x):
        return x + v

    return f, [lambda: setattr(f, "__code__", g.__code__)]


def _helpers():
    k = [1.0]

    def helper(x, a=2.0, *, b=3.0):
        return x * a * b + k[0]

    def other(x, a=2.0, *, b=3.0):
        return x * a * b - k[0]

    return k, helper, other


def _changes_of_a_helper(k, helper, other):
    return [
        lambda: k.__setitem__(0, 2.0),
        lambda: setattr(helper, "__defaults__", (4.0,)),
        lambda: helper.__kwdefaults__.update(b=5.0),
        lambda: setattr(helper, "__kwdefaults__", {"b": 6.0}),
        lambda: setattr(helper, "__code__", other.__code__),
        lambda: k.__setitem__(0, 3.0),
    ]


@case(CASES)
def a_helper_in_a_cell():
    k, helper, other = _helpers()
    changes = _changes_of_a_helper(k, helper, other)

    def f(x):
        return helper(x)

    def bind():
        nonlocal helper
        helper = other

    def again():
        nonlocal helper
        helper = lambda x: x * 7.0

    return f, [*changes, again, bind, again]


@case(CASES)
def a_helper_of_a_helper_in_a_cell():
    k, helper, other = _helpers()
    outer = lambda x: helper(x) + 1.0

    def f(x):
        return outer(x)

    return f, _changes_of_a_helper(k, helper, other)


@case(CASES)
def a_helper_in_globals():
    k, helper, other = _helpers()
    user = module("user", "def f(x): return helper(x)", helper=helper)
    return user.f, [
        *_changes_of_a_helper(k, helper, other),
        lambda: setattr(user, "helper", lambda x: x * 7.0),
        lambda: setattr(user, "helper", helper),
    ]


@case(CASES)
def a_cell_of_a_helper_in_globals():
    k = 2.0

    def helper(x):
        return x * k

    def bind(value):
        nonlocal k
        k = value

    user = module("user", "def f(x): return helper(x)", helper=helper)
    return user.f, [lambda: bind(3.0), lambda: bind(3), lambda: bind(arr(4.0)), lambda: bind(True)]


@case(CASES)
def what_a_helper_in_globals_is_given():
    source = """
def helper(x, *, b):
    return x * b
def f(x):
    try:
        x = helper(x)
    except TypeError:
        x = x * 7.0
    return x + getattr(helper, "k", 3.0) + number(helper.__name__)
"""
    user = module("user", source, number=number)
    return user.f, [
        lambda: setattr(user.helper, "k", 4.0),
        lambda: setattr(user.helper, "k", 5.0),
        lambda: setattr(user.helper, "__name__", "other"),
        lambda: setattr(user.helper, "__kwdefaults__", {"b": 2.0}),
        lambda: setattr(user.helper, "__kwdefaults__", None),
    ]


@case(CASES)
def a_helper_whose_global_changes():
    source = "K = 2.0\ndef helper(x): return x * K\ndef f(x): return helper(x)"
    user = module("user", source)
    return user.f, [
        *setter("K", 3.0, 3, True, 1)(user),
        lambda: delattr(user, "helper") or _put(user),
    ]


def _put(user):
    user.helper = lambda x: x * 9.0


@case(CASES)
def a_fresh_helper_with_other_arrays():
    helper = None

    def bind(w, k=1.0):
        nonlocal helper
        helper = lambda x: x * w * k

    bind(arr(2.0))

    def f(x):
        return helper(x)

    return f, [
        lambda: bind(arr(3.0)),
        lambda: bind(arr(3.0), 2.0),
        lambda: bind(4.0),
        lambda: bind(arr(3.0, np.float16)),
    ]


@case(CASES)
def a_helper_with_other_globals():
    helper = module("lib", "K = 2.0\ndef g(x): return x * K").g

    def f(x):
        return helper(x)

    def bind():
        nonlocal helper
        helper = types.FunctionType(helper.__code__, {**helper.__globals__, "K": 3.0})

    return f, [bind]


@case(CASES)
def what_jax_wraps():
    k, helper, other = _helpers()
    return jax.vmap(lambda x: helper(x)), _changes_of_a_helper(k, helper, other)


@case(CASES)
def a_partial():
    k, helper, other = _helpers()
    f = functools.partial(helper, a=2.0)
    return f, [
        lambda: k.__setitem__(0, 2.0),
        lambda: f.keywords.update(a=4.0),
        lambda: helper.__kwdefaults__.update(b=5.0),
        lambda: setattr(helper, "__code__", other.__code__),
    ]


@case(CASES)
def a_function_with_its_name():
    def helper(x):
        return x * 2.0

    def f(x):
        return helper(x) * number(helper.__name__)

    return f, [lambda: setattr(helper, "__name__", "other")]


@case(CASES)
def a_function_that_is_given_attributes():
    def helper(x):
        return x * 2.0

    def f(x):
        return helper(x) * getattr(helper, "k", 3.0)

    return f, [lambda: setattr(helper, "k", 4.0), lambda: setattr(helper, "k", 5.0)]


@case(CASES)
def itself():
    def f(x):
        return x * getattr(f, "k", 3.0)

    return f, [lambda: setattr(f, "k", 4.0), lambda: setattr(f, "k", 5.0)]


# --------------------------------------------------------------------------------------------
# Globals
# --------------------------------------------------------------------------------------------


@case(CASES)
def numbers_in_globals():
    user = module("user", "G = 1\ndef f(x): return x * number(G)", number=number)
    return user.f, setter("G", 1.0, True, 1, 0.0, -0.0, 0, "a", (1,), [1], 1)(user)


@case(CASES)
def arrays_in_globals():
    user = module("user", "def f(x): return x * G", G=arr(2.0))
    values = (
        arr(3.0),
        arr(3, np.int32),
        jnp.asarray(2.0),
        3.0,
        np.full(3, 4.0, np.float32),
        arr(3.0),
    )
    return user.f, setter("G", *values)(user)


@case(CASES)
def settings_in_globals():
    user = module("user", "def f(x): return x * cfg.lr", cfg=Cfg())
    return user.f, [
        lambda: setattr(user.cfg, "lr", 0.2),
        lambda: setattr(user.cfg, "lr", 1),
        lambda: setattr(user.cfg, "lr", True),
        lambda: setattr(user, "cfg", Cfg(0.4)),
        lambda: setattr(user, "cfg", types.SimpleNamespace(lr=0.5)),
        lambda: setattr(user.cfg, "lr", 0.6),
        lambda: setattr(user, "cfg", Cfg(arr(3.0))),
        lambda: setattr(user.cfg, "lr", arr(4.0)),
    ]


@case(CASES)
def a_list_in_globals():
    user = module("user", "L = [1.0, 2.0]\ndef f(x): return x * L[0]")
    return user.f, [
        lambda: user.L.__setitem__(0, 3.0),
        lambda: setattr(user, "L", [4.0, 2.0]),
        lambda: user.L.insert(0, 5.0),
    ]


@case(CASES)
def a_dict_in_globals():
    user = module("user", "D = {'a': 1.0, 'b': 2}\ndef f(x): return x * next(iter(D.values()))")
    return user.f, [
        lambda: user.D.update(a=3.0),
        lambda: user.D.update(a=user.D.pop("a")),
        lambda: setattr(user, "D", {"a": 4.0}),
    ]


@case(CASES)
def a_builtin_that_is_hidden():
    user = module("user", "def f(x): return x * abs(-2.0)")
    return user.f, [lambda: setattr(user, "abs", lambda v: 7.0), lambda: delattr(user, "abs")]


@case(CASES)
def a_module_in_globals():
    lib = module("lib", "K = 2.0\nW = jnp.ones(3)\ndef g(x): return x + K")
    user = module("user", "def f(x): return lib.g(x) * lib.K", lib=lib)
    return user.f, [
        lambda: setattr(lib, "K", 3.0),
        lambda: setattr(lib, "g", lambda x: x - 1.0),
        lambda: setattr(user, "lib", types.SimpleNamespace(g=lambda x: x, K=5.0)),
    ]


@case(CASES)
def a_module_in_a_cell():
    lib = module("lib", "K = 2.0\nL = [1.0]\ndef g(x): return x + K")

    def f(x):
        return lib.g(x) * lib.K + lib.L[0]

    def bind():
        nonlocal lib
        lib = module("lib", "K = 4.0\nL = [1.0]\ndef g(x): return x + K")

    return f, [
        lambda: setattr(lib, "K", 3.0),
        lambda: lib.L.__setitem__(0, 2.0),
        lambda: setattr(lib, "g", lambda x: x - 1.0),
        bind,
    ]


@case(CASES)
def an_attribute_of_a_class():
    class Base:
        lr = 0.5

    class Settings(Base):
        pass

    user = module("user", "def f(x): return x * C.lr", C=Settings)
    return user.f, [
        lambda: setattr(Base, "lr", 0.75),
        lambda: setattr(Settings, "lr", 0.25),
        lambda: delattr(Settings, "lr"),
    ]


@case(CASES)
def bases_of_a_class():
    class Base:
        lr = 0.5

    class Other:
        lr = 0.75

    class Settings(Base):
        pass

    user = module("user", "def f(x): return x * C.lr", C=Settings)
    return user.f, [lambda: setattr(Settings, "__bases__", (Other,))]


@case(CASES)
def a_list_of_a_class():
    class Settings:
        lr: typing.ClassVar = [0.5]

    user = module("user", "def f(x): return x * C.lr[0]", C=Settings)
    return user.f, [
        lambda: Settings.lr.__setitem__(0, 0.75),
        lambda: setattr(Settings, "lr", [1.5]),
    ]


@case(CASES)
def a_class_that_is_called():
    class Thing:
        k = 2.0

        def __init__(self, x):
            self.x = x

        def get(self):
            return self.x * self.k

    def f(x):
        return Thing(x).get()

    def init(self, x):
        self.x = x * 5.0

    def bind():
        nonlocal Thing

        class Thing:
            def __init__(self, x):
                self.x = x

            def get(self):
                return self.x * 9.0

    return f, [
        lambda: setattr(Thing, "k", 3.0),
        lambda: setattr(Thing, "get", lambda self: self.x * 4.0),
        lambda: setattr(Thing, "__init__", init),
        bind,
    ]


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@case(CASES)
def a_member_of_an_enum():
    return rebound(Mode.FAST, Mode.SLOW, read=lambda v: 2.0 if v is Mode.FAST else 3.0)


@case(CASES)
def a_class_of_an_enum():
    class Kind(enum.Enum):
        A = 1

        def scale(self):
            return 2.0

    v = Kind.A

    def f(x):
        return x * v.scale() * v.value

    return f, [
        lambda: setattr(Kind, "scale", lambda self: 3.0),
        lambda: setattr(v, "_value_", 5),
    ]


# --------------------------------------------------------------------------------------------
# Objects
# --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cfg:
    lr: typing.Any = 0.1
    steps: int = 3


class Plain:
    def __init__(self):
        self.w = arr(2.0)
        self.k = 2.0

    def scaled(self, x):
        return x * self.w * self.k

    def shifted(self, x):
        return x + self.w * self.k


@case(CASES)
def an_object_with_slots():
    class Slots:
        __slots__ = ("a", "b")

        def __init__(self):
            self.a, self.b = 2.0, 3.0

    v, w = Slots(), Slots()

    def all_of(v):
        return number((v.a, v.b))

    def f(x):
        return x * v.a * v.b + all_of(w)

    return f, [*setter("a", 3.0, 3, 4.0)(v), *setter("b", 3, True, [1.0])(w)]


@case(CASES)
def a_property():
    class Settings:
        k = 2.0

        @property
        def lr(self):
            return self.k

    v = Settings()
    return (lambda x: x * v.lr), [lambda: setattr(v, "k", 3.0)]


@case(CASES)
def an_object_that_is_passed_on():
    v = Cfg()

    def read(cfg):
        return cfg.lr * cfg.steps

    def f(x):
        return x * read(v)

    return f, [
        lambda: setattr(v, "lr", 0.2),
        lambda: setattr(v, "steps", 3.0) or setattr(v, "lr", 0.3),
        lambda: setattr(v, "steps", 4),
    ]


@case(CASES)
def classes_of_equal_objects():
    class Other(Cfg):
        def __eq__(self, other):
            return False

    v = Cfg()

    def f(x):
        return x * number(v)

    def bind(cls):
        nonlocal v
        v = cls()

    def turn(cls):
        v.__class__ = cls

    return f, [functools.partial(how, cls) for how in (bind, turn) for cls in (Other, Cfg)]


@case(CASES)
def operators_of_an_object():
    class Scale:
        def __init__(self, k):
            self.k = k

        def __rmul__(self, x):
            return x * self.k

        def __call__(self, x):
            return x + self.k

    v = Scale(2.0)

    def f(x):
        return v(x) * v.k + v.__rmul__(x)

    return f, [
        lambda: setattr(v, "k", 3.0),
        lambda: setattr(Scale, "__call__", lambda self, x: x - self.k),
        lambda: setattr(Scale, "__rmul__", lambda self, x: x),
        lambda: setattr(v, "k", arr(3.0)),
    ]


@case(CASES)
def a_named_tuple():
    class Pair(typing.NamedTuple):
        a: typing.Any
        b: typing.Any

    v = Pair(2.0, arr(3.0))

    def f(x):
        return x * v.a + v.b

    def bind(a, b):
        nonlocal v
        v = Pair(a, b)

    return f, [
        lambda: bind(3.0, arr(3.0)),
        lambda: bind(3.0, arr(4.0)),
        lambda: bind(arr(3.0), 4.0),
    ]


@case(CASES)
def a_simple_namespace():
    v = types.SimpleNamespace(a=2.0, b=[3.0])

    def f(x):
        return x * v.a + v.b[0]

    return f, [
        lambda: setattr(v, "a", 3.0),
        lambda: v.b.__setitem__(0, 4.0),
        lambda: setattr(v, "b", [5.0]),
    ]


@case(CASES)
def a_simple_namespace_that_is_passed_on():
    v = types.SimpleNamespace(a=2.0)

    def f(x):
        return x * number(v)

    return f, [lambda: setattr(v, "a", 3.0), lambda: setattr(v, "b", 4.0)]


@case(CASES)
def objects_in_objects():
    outer = Cfg(Cfg(2.0))

    def f(x):
        return x * outer.lr.lr

    return f, [
        lambda: setattr(outer.lr, "lr", 3.0),
        lambda: setattr(outer, "lr", Cfg(4.0)),
        lambda: setattr(outer.lr, "lr", arr(5.0)),
        lambda: setattr(outer.lr, "lr", arr(6.0)),
    ]


# --------------------------------------------------------------------------------------------
# Methods
# --------------------------------------------------------------------------------------------


def model(**attributes):
    class Base:
        c = 2.0
        L: typing.ClassVar = [1.0]

        def part(self, x):
            return x + self.k

    class Model(Base):
        def __init__(self):
            self.w = arr(2.0)
            self.k = 2.0
            self.fn = jnp.sin
            self.layers = [arr(1.0), 3.0]
            self.table = {"a": 1.0}

        @staticmethod
        def fixed(x):
            return x * 0.5

        @loop_jit
        def run(self, x):
            x = self.fn(x * self.w) * self.k + self.c
            x = self.part(x) + self.layers[0] * self.layers[1]
            return self.fixed(x) * self.L[0] + self.table["a"]

    return Base, Model, Model()


@case(METHODS)
def numbers_of_self():
    _, _, m = model()
    return m, setter("k", 3.0, 3, True, 1, 1.0, 0.0, -0.0, arr(2.0), arr(3.0), 2.0)(m)


@case(METHODS)
def arrays_of_self():
    _, _, m = model()
    values = (
        arr(3.0),
        arr(3, np.int32),
        jnp.asarray(2.0),
        3.0,
        np.full(3, 4.0, np.float32),
        arr(3.0),
    )
    return m, setter("w", *values)(m)


@case(METHODS)
def functions_of_self():
    _, _, m = model()
    return m, setter("fn", jnp.cos, lambda x: x * 2.0, lambda x: x * 3.0, jnp.sin)(m)


@case(METHODS)
def containers_of_self():
    Base, _, m = model()
    return m, [
        lambda: m.layers.__setitem__(0, arr(3.0)),
        lambda: m.layers.__setitem__(0, 3.0),
        lambda: m.layers.reverse(),
        lambda: m.layers.insert(0, 5.0),
        lambda: m.table.update(a=2.0),
        lambda: m.table.update(b=2.0),
        lambda: m.table.clear() or m.table.update(a=arr(2.0)),
        lambda: Base.L.__setitem__(0, 3.0),
    ]


@case(METHODS)
def attributes_of_its_class():
    Base, Model, m = model()
    return m, [
        lambda: setattr(Base, "c", 3.0),
        lambda: setattr(Model, "c", 4.0),
        lambda: setattr(m, "c", 5.0),  # hides that of the class
        lambda: delattr(m, "c"),
        lambda: delattr(Model, "c"),
        lambda: setattr(Base, "L", [7.0]),
    ]


@case(METHODS)
def properties_of_its_class():
    _, Model, m = model()
    return m, [
        lambda: setattr(Model, "k", property(lambda self: 4.0)),
        lambda: setattr(Model, "k", property(lambda self: self.w * 2.0)),
        lambda: setattr(m, "w", arr(5.0)),
        lambda: delattr(Model, "k"),
        lambda: setattr(Model, "c", property(lambda self: 8.0)),
    ]


@case(METHODS)
def a_property_that_gives_the_same():
    _, Model, m = model()
    two = m.k
    now = [two]
    return m, [
        lambda: setattr(Model, "k", property(lambda self: now[0])),
        lambda: now.__setitem__(0, 3.0),
        lambda: now.__setitem__(0, arr(3.0)),
    ]


@case(METHODS)
def reading_attributes_differently():
    _, Model, m = model()

    def read(self, name):
        return 9.0 if name == "k" else object.__getattribute__(self, name)

    return m, [
        lambda: setattr(Model, "__getattribute__", read),
        lambda: delattr(Model, "__getattribute__"),
        lambda: setattr(Model, "__getattr__", lambda self, name: 11.0) or delattr(m, "k"),
    ]


@case(METHODS)
def methods_of_its_class():
    Base, Model, m = model()
    part = Base.part

    def other(self, x):
        return x - self.k * 3.0

    return m, [
        lambda: setattr(Base, "part", other),
        lambda: setattr(m, "part", lambda x: x * 4.0),
        lambda: setattr(m, "part", types.MethodType(part, m)),
        lambda: setattr(m, "part", types.MethodType(other, Model())),
        lambda: delattr(m, "part"),
        lambda: setattr(Model, "part", lambda self, x: x * 5.0),
        lambda: setattr(Model, "part", staticmethod(lambda x: x * 6.0)),
        lambda: delattr(Model, "part"),
        lambda: setattr(part, "__code__", other.__code__) or setattr(Base, "part", part),
        lambda: setattr(Model, "fixed", staticmethod(lambda x: x)),
    ]


@case(METHODS)
def a_method_of_another_object():
    Base, Model, m = model()
    other = Model()
    other.k = 7.0
    return m, [
        lambda: setattr(m, "part", other.part),
        lambda: setattr(m, "part", types.MethodType(Base.part, m)),
    ]


@case(METHODS)
def its_class():
    _, Model, m = model()

    class Other(Model):
        c = 7.0

    class Another(Model):
        def part(self, x):
            return x * 8.0

    return m, [
        lambda: setattr(m, "__class__", Other),
        lambda: setattr(m, "__class__", Another),
        lambda: setattr(m, "__class__", Model),
        lambda: setattr(Model, "__bases__", (type("New", Model.__bases__, {"c": 12.0}),)),
    ]


@case(METHODS)
def what_its_code_reads():
    _, Model, m = model()
    _, Other, _ = model()

    def run(self, x):
        return x * self.k

    return m, [
        lambda: setattr(m, "unread", 1.0),
        lambda: setattr(Model.run.__wrapped__, "__code__", run.__code__),
    ]


@case(METHODS)
def a_self_that_is_passed_on():
    def use(model, x):
        return x * model.k + model.w

    class Model:
        def __init__(self):
            self.k, self.w = 2.0, arr(2.0)

        @loop_jit
        def run(self, x):
            return use(self, x)

    m = Model()
    return m, [
        lambda: setattr(m, "k", 3.0),
        lambda: setattr(m, "w", arr(3.0)),
        lambda: setattr(Model, "k", property(lambda self: 4.0)),
    ]


# --------------------------------------------------------------------------------------------
# What has no trail
# --------------------------------------------------------------------------------------------


@case(LONGER)
def a_numpy_array():
    v = np.array([2.0, 1.0, 1.0], np.float32)
    return (lambda x: x * v), [lambda: v.__setitem__(0, 3.0)]


@case(LONGER)
def a_structured_numpy_scalar():
    v = np.array([(2.0,)], [("a", np.float32)])[0]
    return (lambda x: x * float(v["a"])), [lambda: v.__setitem__("a", 3.0)]


@case(LONGER)
def a_numpy_array_of_an_object():
    v = Cfg(np.ones(3, np.float32))
    return (lambda x: x * v.lr), [lambda: v.lr.__setitem__(0, 3.0)]


@case(LONGER)
def a_set():
    v = {1.0, 2.0}
    return (lambda x: x * sum(v)), [lambda: v.add(3.0), lambda: v.clear()]


@case(LONGER)
def a_long_list():
    v = [1.0] * 100
    return (lambda x: x * sum(v)), [lambda: v.append(3.0)]


@case(LONGER)
def a_value_that_is_looked_at():
    v = arr(2.0)

    def f(x):
        return x * float(np.asarray(v)[0])

    def bind():
        nonlocal v
        v = arr(3.0)

    return f, [bind]


# --------------------------------------------------------------------------------------------
# Ways
# --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_devices")
def test_changed_arrays_compile_nothing():
    _, _, m = model()
    w = arr(2.0)
    values = [arr(float(i)) for i in range(5)]

    def f(x):
        return x * w

    jitted = loop_jit(f)
    jax.block_until_ready((jitted(X), m.run(X)))
    with ways() as taken, counting() as n:
        for w in values:
            m.w = m.layers[0] = w
            jax.block_until_ready((jitted(X), m.run(X)))
    assert not taken and (n.compiles, n.traces) == (0, 0)
    same(jitted(X), X * 4.0)
    same(m.run(X), type(m).run.__wrapped__(m, X))


def test_counts_hits():
    v = [1.0]
    jitted = loop_jit(lambda x: x * v[0])
    for _ in range(10):
        jitted(X)
    v[0] = 2.0
    for _ in range(10):
        jitted(X)
    info = jitted.cache_info()
    assert (info.hits, info.misses + info.interned) == (18, 2)
    assert loopjit.cache_info().hits == 18


def test_other_arguments_on_the_shortest_way():
    w = arr(2.0)
    jitted = loop_jit(lambda x, y: x * w + y)
    arguments = [(X, 1.0), (X, X), (X.astype(np.float16), X), (X, arr(1.0, shape=(1,)))]
    for _ in range(2):
        for args in arguments:
            same(jitted(*args), args[0] * w + args[1])
    with ways() as taken:
        for args in arguments:
            same(jitted(*args), args[0] * w + args[1])
    assert not taken


@pytest.mark.usefixtures("_devices")
def test_a_string_beside_what_is_captured():
    w = arr(2.0)

    def f(x, how):
        return x * w if how == "times" else x + w

    jitted = loop_jit(f)
    for w in (arr(2.0), arr(3.0), 4.0, 5.0, arr(2.0)):
        for how in ("times", "plus", "times", "plus"):
            same(jitted(X, how), f(X, how))


@pytest.mark.usefixtures("_devices")
def test_many_objects():
    _, Model, _ = model()
    many = [Model() for _ in range(5)]
    for i, m in enumerate(many):
        m.k = float(i % 3)
        m.w = arr(float(i))
    for _ in range(3):
        for m in many:
            same(m.run(X), Model.run.__wrapped__(m, X))
    with ways() as taken:
        for m in many:
            same(m.run(X), Model.run.__wrapped__(m, X))
    assert not taken
    for m in many:
        m.k += 1.0
        same(m.run(X), Model.run.__wrapped__(m, X))


def test_objects_at_the_address_of_dead_ones():
    _, Model, m = model()
    m.run(X)
    addresses = collections.Counter()
    for i in range(200):
        m = Model()
        m.k, m.w = float(i % 7), arr(float(i % 5))
        addresses[id(m)] += 1
        same(m.run(X), Model.run.__wrapped__(m, X))
        del m
    assert addresses.most_common(1)[0][1] > 1


def test_a_method_with_other_arguments():
    class Model:
        k = 2.0

        @loop_jit
        def run(self, x, y):
            return x * self.k + y

    m = Model()
    for _ in range(3):
        for args in [(X, 1.0), (X, X), (X, 2), (X.astype(np.float16), X)]:
            same(m.run(*args), Model.run.__wrapped__(m, *args))


def test_functions_as_arguments():
    k = [2.0]
    w = arr(3.0)

    def helper(x):
        return x * k[0] * w

    def f(x, g):
        return g(x) + 1.0

    jitted = loop_jit(f)
    for g in (helper, jnp.sin, helper, lambda x: x * k[0], lambda x: x * k[0]):
        for k[0] in (2.0, 3.0):
            for w in (arr(3.0), arr(4.0), 5.0):
                for _ in range(2):
                    same(jitted(X, g), f(X, g))


def test_a_jitted_function_that_changes_in_place():
    k = [2.0]
    v = jax.jit(lambda y: y * k[0])
    jitted = loop_jit(lambda x: v(x))
    for k[0] in (2.0, 3.0, 3):  # `jax.jit` itself would not see it
        for _ in range(3):
            same(jitted(X), X * k[0])


def test_gradients_of_what_is_captured():
    scale = 3.0
    jitted = loop_jit(lambda x: jnp.sum(x * w * scale))

    w = arr(2.0)
    for _ in range(3):
        jitted(X)

    def loss(v):
        nonlocal w
        w = v
        return jitted(X)

    for _ in range(2):
        same(jax.grad(loss)(arr(5.0)), X * 3.0)
        w = arr(2.0)
        same(jitted(X), jnp.sum(X * w * 3.0))


def test_transformations_of_a_method():
    _, Model, m = model()
    plain = functools.partial(Model.run.__wrapped__, m)
    for _ in range(3):
        m.run(X)
    for _ in range(2):
        same(jax.vmap(m.run)(jnp.stack([X, X])), jax.vmap(plain)(jnp.stack([X, X])))
        same(jax.grad(lambda x: m.run(x).sum())(X), jax.grad(lambda x: plain(x).sum())(X))
        same(jax.jit(m.run)(X), plain(X))
        same(m.run(X), plain(X))


def test_arrays_on_other_devices():
    w = arr(2.0)
    jitted = loop_jit(lambda x: x * w)
    for _ in range(3):
        jitted(X)
    w = jax.device_put(arr(3.0), jax.devices()[1])
    for _ in range(3):
        assert same(jitted(X), X * 3.0) is None
    there = jax.device_put(X, jax.devices()[1])
    assert jitted(there).devices() == {jax.devices()[1]}
    w = arr(2.0)
    same(jitted(X), X * 2.0)


def test_clearing():
    v = [1.0]
    jitted = loop_jit(lambda x: x * v[0])
    for clear in (jitted.clear_cache, loopjit.cache_clear, jax.clear_caches):
        for _ in range(3):
            jitted(X)
        clear()
        with counting() as n:
            same(jitted(X), X)
        assert n.compiles + n.traces >= 1


def test_the_function_itself_is_replaced():
    a, b = 2.0, 3.0
    jitted = loop_jit(lambda x: x * a)
    for _ in range(3):
        jitted(X)
    jitted.__wrapped__ = lambda x: x * b
    same(jitted(X), X * 3.0)


# --------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------


class Kept:
    """An object that tells whether it is alive, with a list of arrays."""

    def __init__(self):
        self.w = arr(2.0)
        self.k = 3.0
        self.all = [self.w]


def _global(v):
    user = module("user", "def f(x): return x * v.w * v.k * v.all[0]", v=v)
    return user.f, lambda: delattr(user, "v")


def _cell(v):
    def f(x):
        return x * v.w * v.k * v.all[0]

    def forget():
        nonlocal v
        v = None

    return f, forget


def _helper(v):
    helper = lambda x: x * v.w * v.k * v.all[0]

    def f(x):
        return helper(x)

    def forget():
        nonlocal helper, v
        helper = v = None

    return f, forget


def _passed_on(v):
    def read(v, x):
        return x * v.w * v.all[0]

    def f(x):
        return read(v, x)

    def forget():
        nonlocal v
        v = None

    return f, forget


@pytest.mark.parametrize("make", [_global, _cell, _helper, _passed_on])
def test_a_trail_keeps_nothing_alive(make):
    v = Kept()
    alive = weakref.ref(v), weakref.ref(v.w)
    f, forget = make(v)
    del v
    jitted = loop_jit(f)
    for _ in range(3):
        jax.block_until_ready(jitted(X))
    with ways() as taken:
        jitted(X)
    assert not taken
    forget()
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_trail_of_self_keeps_nothing_alive():
    _, _, m = model()
    alive = weakref.ref(m), weakref.ref(m.w)
    for _ in range(3):
        m.run(X)
    del m
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_fresh_functions_leave_nothing():
    def make(w):
        return loop_jit(lambda x: x * w)

    make(arr(1.0))(X)
    gone = []
    for i in range(20):
        f = make(arr(float(i)))
        for _ in range(PATIENCE):
            f(X)
        gone.append(weakref.ref(f.__wrapped__))
        assert f._fast is not None
        del f
    gc.collect()
    assert not any(one() for one in gone)


def test_numbers_of_objects_are_bounded():
    class Model:
        @loop_jit
        def run(self, x):
            return x * self.k

    models = [Model() for _ in range(1500)]
    for m in models:
        m.k = 2.0
        m.run(X)
        m.k = 3.0
        m.run(X)
    receivers = Model.run._fast.receivers
    assert len(receivers._by_id) <= 1024 and len(receivers._recent) <= 8


# --------------------------------------------------------------------------------------------
# At random
# --------------------------------------------------------------------------------------------

VALUES = (
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: -0.0,
    lambda: 0.0,
    lambda: "a",
    lambda: (1, 2.0),
    lambda: arr(2.0),
    lambda: arr(3.0),
    lambda: arr(2.0, np.float16),
    lambda: [1.0, arr(2.0)],
    lambda: {"a": 1, "b": [2.0]},
    lambda: Cfg(2.0),
    lambda: Cfg(arr(2.0)),
    lambda: types.SimpleNamespace(lr=2.0),
    lambda: np.ones(3, np.float32),
    lambda: jnp.sin,
    lambda: functools.partial(jnp.add, 2.0),
)


def total(v, x):
    """Uses all of a value."""
    if isinstance(v, (list, tuple)):
        for i, item in enumerate(v):
            x = total(item, x) * (1.0 + i)
        return x
    if isinstance(v, dict):
        return total(list(v.items()), x)
    if isinstance(v, (Cfg, types.SimpleNamespace)):
        return total(v.lr, x) * len(type(v).__name__)
    if callable(v):
        return v(x)
    if isinstance(v, (int, float, str)):
        return x + number(v)
    return x * v + v.dtype.itemsize


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("_devices")
def test_random_changes(seed):
    chance = random.Random(seed)
    pick = lambda: chance.choice(VALUES)()
    user = module("user", "def f(x): return total(g, x) + h.lr * total(h.steps, x)", total=total)
    user.g, user.h = pick(), Cfg(2.0, pick())
    a, b = pick(), [pick(), pick()]

    def f(x):
        return user.f(x) + total(a, x) * total(b, x)

    f = types.FunctionType(
        f.__code__, {**globals(), "user": user}, "f", None, _cells(f, a, b, user)
    )
    cell = f.__closure__[f.__code__.co_freevars.index("a")]

    class Model:
        def __init__(self):
            self.p, self.q = pick(), {"a": pick()}

        @loop_jit
        def run(self, x):
            return total(self.p, x) + total(self.q, x)

    m = Model()
    places = [
        lambda v: setattr(user, "g", v),
        lambda v: setattr(user.h, "steps", v),
        lambda v: setattr(user, "h", Cfg(chance.choice([2.0, 3.0]), v)),
        lambda v: setattr(cell, "cell_contents", v),
        lambda v: b.__setitem__(chance.randrange(len(b)), v),
        lambda v: b.append(v) if len(b) < 3 else b.pop(),
        lambda v: setattr(m, "p", v),
        lambda v: m.q.update(a=v),
        lambda v: m.q.update(b=v) if len(m.q) < 2 else m.q.pop("a", None),
        lambda v: setattr(m, "q", {"a": v}),
    ]
    jitted = loop_jit(f)
    for _ in range(25):
        chance.choice(places)(pick())
        for _ in range(2):
            same(jitted(X), f(X))
            same(m.run(X), Model.run.__wrapped__(m, X))


def _cells(f, a, b, user):
    values = {"a": a, "b": b, "user": user}
    return tuple(types.CellType(values[name]) for name in f.__code__.co_freevars)
