"""Captured values count by type, content, order and aliasing; captured arrays never do."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import math
import operator
import re
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from traps import (
    ENTRIES,
    X,
    aligned,
    cases,
    change,
    check_change,
    check_difference,
    check_hit,
    difference,
    function,
    module,
    same,
)

import loopjit
from counting import counting
from loopjit import loop_jit

VALUES = {}
CHANGES = {}
NAN = float("nan")
OTHER_NAN = np.uint64(0x7FF8000000000001).view(np.float64).item()


def text_of(value) -> float:
    """A number for what can be seen of a value."""
    total = 0
    for letter in repr(value):
        total = (total * 31 + ord(letter)) % 100_003
    return float(total)


def arr(v, dtype=np.float32):
    return jnp.asarray(np.asarray(v, dtype))


# --------------------------------------------------------------------------------------------
# Scalars and containers
# --------------------------------------------------------------------------------------------


@difference(
    VALUES,
    0.0,
    -0.0,
    0,
    False,
    1.0,
    1,
    True,
    0j,
    np.float64(0),
    np.float32(0),
    np.int32(0),
    "",
    None,
)
def scalar(v):
    return lambda x: x + text_of((type(v).__name__, v))


@difference(VALUES, 0.0, -0.0)
def sign_of_zero(v):
    return lambda x: x * v


@difference(VALUES, NAN, -NAN, hits="")
def sign_of_nan(v):
    return lambda x: x * float(np.signbit(v)) + 1.0


@difference(VALUES, 0.5 + 0.0j, complex(0.5, -0.0))
def complex_number(v):
    return lambda x: x + float(np.signbit(v.imag))


@difference(VALUES, np.float32(2), np.float64(2), np.int8(2), np.uint8(2))
def numpy_scalar(v):
    return lambda x: x * v.dtype.num


@difference(VALUES, "ab", b"ab", "ba")
def string(v):
    return lambda x: x + text_of(v)


@difference(VALUES, range(0, 0), range(2, 2), range(0, 0, 5))
def empty_range(v):
    return lambda x: x + (v.start + 7.0 * v.step)


@difference(VALUES, range(0, 5, 10), range(0, 1, 7))
def range_of_one(v):
    return lambda x: x + v.step


@difference(VALUES, slice(0, 2), slice(0, 2.5), slice(False, 2), slice(0, 2, 1))
def slice_(v):
    return lambda x: x + text_of(v)


@difference(
    VALUES,
    [1, 2],
    [2, 1],
    (1, 2),
    [1, 2.0],
    [1, [2]],
    [True, 2],
    {1: 2},
    {True: 2},
    {1.0: 2},
    {1: 2, 3: 4},
    {3: 4, 1: 2},
    (1, (2,)),
    ((1,), 2),
    [],
    (),
    {},
    None,
    [None],
    "[1, 2]",
)
def container(v):
    return lambda x: x + text_of(v)


@difference(VALUES, {0, 8}, {8, 0})
def set_(v):
    return lambda x: x + float(next(iter(v)))


@difference(VALUES, (0, 8), (8, 0))
def frozen_set(v):
    v = frozenset(v)
    return lambda x: x + float(next(iter(v)))


@difference(VALUES, {"a"}, {"a", "b"}, frozenset({"a"}))
def set_of_strings(v):
    return lambda x: x + float(len(v)) + len(type(v).__name__)


@difference(VALUES, [1, 2], [2, 1])
def double_ended_queue(v):
    v = collections.deque(v)
    return lambda x: x + v[0]


@difference(VALUES, 2, 3, None)
def length_of_a_queue(n):
    v = collections.deque([1], maxlen=n)
    return lambda x: x + (v.maxlen or 9.0)


@difference(VALUES, [("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
def ordered_dict(items):
    v = collections.OrderedDict(items)
    return lambda x: x + list(v.values())[0]


@difference(VALUES, 2.0, 3.0, hits="L2")
def default_dict(n):
    v = collections.defaultdict(lambda: n)
    return lambda x: x * v["missing"]


@difference(VALUES, 2.0, 3.0, hits="")
def counter(n):
    v = collections.Counter(a=n)
    return lambda x: x * v["a"]


@difference(VALUES, [1, 2], [1, 3], hits="")
def subclass_of_a_queue(items):
    class Ring(collections.deque):
        pass

    return lambda x, v=Ring(items): x + v[1]


@difference(VALUES, [1, 2], [1, 3], hits="")
def subclass_of_list(items):
    class Items(list):
        pass

    v = Items(items)
    return lambda x: x + v[1]


@difference(VALUES, 2.0, 3.0, hits="")
def subclass_of_float(v):
    class Length(float):
        pass

    v = Length(v)
    return lambda x: x * v


@difference(VALUES, 2.0, 3.0, hits="")
def subclass_of_partial(v):
    class P(functools.partial):
        pass

    return P(lambda k, x: x * k, v)


@difference(VALUES, 2.0, 3.0, hits="")
def attribute_of_a_tuple(v):
    class T(tuple):
        pass

    t = T((1.0, 2.0))
    t.scale = v
    return lambda x: x * getattr(t, "scale", 1.0)


@difference(VALUES, 2.0, 3.0, hits="")
def array_and_attribute_of_a_tuple(v):
    class T(tuple):
        pass

    t = T((arr(v), 2.0))
    t.scale = v
    return lambda x: x * getattr(t, "scale", 1.0) + t[0]


@difference(VALUES, [1, 2], [1, 3], hits="")
def python_array(items):
    v = array.array("i", items)
    return lambda x: x + v[1]


@difference(VALUES, b"\x01\x02", b"\x01\x03")
def byte_array(items):
    v = bytearray(items)
    return lambda x: x + v[1]


@difference(VALUES, [1, 2], [1, 3], hits="")
def mapping_proxy(items):
    v = types.MappingProxyType({"a": items})
    return lambda x: x + v["a"][1]


@difference(VALUES, [1, 2], [1, 3], hits="")
def view_of_memory(items):
    v = memoryview(bytes(items))
    return lambda x: x + v[1]


@difference(VALUES, (1, 2), (1, 3), hits="")
def fraction(pair):
    v = fractions.Fraction(*pair)
    return lambda x: x * float(v)


@difference(VALUES, 0, 1, hits="")
def item_getter(n):
    v = operator.itemgetter(n)
    return lambda x: x + v((2.0, 3.0))


@difference(VALUES, True, False)
def one_list_twice_or_two_equal_ones(one):
    a = [1.0]
    b = a if one else [1.0]
    return lambda x: x if a is b else -x


@difference(VALUES, True, False)
def one_dict_twice_inside(one):
    a = {"k": 1.0}
    v = [a, a if one else {"k": 1.0}]
    return lambda x: x if v[0] is v[1] else -x


@difference(VALUES, True, False)
def one_object_twice(one):
    a = types.SimpleNamespace(k=1.0)
    b = a if one else types.SimpleNamespace(k=1.0)
    return lambda x: x if a is b else -x


@difference(VALUES, True, False, hits="L2")
def one_array_twice_or_two_equal_ones(one):
    a = arr(2.0)
    b = a if one else arr(2.0)
    return lambda x: x * a if a is b else -x * b


@difference(VALUES, True, False, hits="L2")
def a_sentinel(one):
    a = object()
    b = a if one else object()
    return lambda x: x if a is b else -x


@difference(VALUES, 2.0, 3.0)
def a_list_in_itself(v):
    a = [v]
    a.append(a)
    return lambda x: x * a[1][1][0]


# --------------------------------------------------------------------------------------------
# Objects
# --------------------------------------------------------------------------------------------


@difference(VALUES, 2.0, 3.0)
def namespace(v):
    o = types.SimpleNamespace(k=v)
    return lambda x: x * o.k


@difference(VALUES, 2.0, 3.0)
def namespace_passed_on(v):
    o = types.SimpleNamespace(k=v)
    helper = lambda o, x: x * o.k
    return lambda x: helper(o, x)


@difference(VALUES, 2.0, 3.0)
def chain_of_attributes(v):
    o = types.SimpleNamespace(a=types.SimpleNamespace(b={"c": v}))
    return lambda x: x * o.a.b["c"]


@difference(VALUES, 2.0, 3.0)
def frozen_dataclass(v):
    @dataclasses.dataclass(frozen=True)
    class P:
        a: float

    p = P(v)
    helper = lambda p, x: x * p.a
    return lambda x: helper(p, x)


@difference(VALUES, 2.0, 3.0)
def slotted_dataclass(v):
    @dataclasses.dataclass(slots=True, kw_only=True)
    class P:
        a: float

    p = P(a=v)
    helper = lambda p, x: x * p.a
    return lambda x: helper(p, x) + p.a


@difference(VALUES, 2.0, 3.0)
def inherited_dataclass(v):
    @dataclasses.dataclass
    class P:
        a: float

    @dataclasses.dataclass
    class Q(P):
        b: float = 1.0

        def run(self, x):
            return x * self.a + self.b

    q = Q(v)
    return lambda x: q.run(x)


@difference(VALUES, 2.0, 3.0)
def private_slots(v):
    class P:
        __slots__ = ("__k", "other")

        def __init__(self):
            self.__k = v

        def run(self, x):
            return x * self.__k

    p = P()
    return lambda x: p.run(x)


@difference(VALUES, 2.0, 3.0)
def lying_equality(v):
    class P:
        def __init__(self):
            self.k = v

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    p = P()
    return lambda x: x * p.k


@difference(VALUES, 2.0, 3.0, hits="")
def lying_equality_passed_on(v):
    class P:
        def __init__(self):
            self.k = v

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    p = P()
    return lambda x: x * {p: p.k}[p]


@difference(VALUES, 2.0, 3.0, hits="")
def treedef_with_a_lying_key(v):
    class Key:
        def __init__(self):
            self.k = v

        def __eq__(self, other):
            return isinstance(other, Key.__mro__[0]) or type(other).__name__ == "Key"

        def __hash__(self):
            return 0

        def __repr__(self):
            return "Key"

        def __lt__(self, other):
            return False

    tree = jax.tree.structure({Key(): 0})
    return lambda x: x * next(iter(jax.tree.unflatten(tree, [x]))).k


@difference(VALUES, {1: 0}, {True: 0}, {1.0: 0})
def treedef(v):
    tree = jax.tree.structure(v)
    return lambda x: x + text_of(next(iter(jax.tree.unflatten(tree, [0]))))


class Flags(enum.IntFlag, boundary=enum.KEEP):
    A = 1
    B = 2


class Plain(enum.Enum):
    A = 1
    B = 2
    AGAIN = 1


class Number(enum.IntEnum):
    A = 1
    B = 2


@difference(
    VALUES,
    Flags.A,
    Flags.B,
    Flags.A | Flags.B,
    Flags(0),
    Flags(8),
    Flags(16),
    Flags(9),
    Number.A,
    Number.B,
    1,
    2,
    hits="L2",
)
def enum_member(v):
    return lambda x: x + (int(v) + 100.0 * len(type(v).__name__))


@difference(VALUES, Plain.A, Plain.B)
def plain_enum(v):
    return lambda x: x * (v.value if v is Plain.A else 7.0)


@difference(VALUES, 2.0, 3.0)
def named_tuple(v):
    class P(typing.NamedTuple):
        a: float
        b: int = 1

    p = P(v)
    return lambda x: x * p.a


@difference(VALUES, 2.0, 3.0)
def named_tuple_of_arrays(v):
    P = collections.namedtuple("P", "a b")
    p = P(arr(v), 1.0)
    return lambda x: x * p.a + p.b + p[0]


@difference(VALUES, "append", "extend")
def method_of_a_container(name):
    def f(x):
        box = []
        getattr(box, name)([1.0, 2.0])
        return x * len(box)

    return f


@difference(VALUES, {"k": 2.0}, {"k": 3.0}, {})
def bound_method_of_a_dict(v):
    get = v.get
    return lambda x: x * get("k", 5.0)


# --------------------------------------------------------------------------------------------
# NumPy arrays
# --------------------------------------------------------------------------------------------


@difference(VALUES, [1, 2, 3], [1, 2, 4])
def numpy_array(v):
    w = np.array(v, np.float32)
    return lambda x: x * w


@difference(VALUES, [1, 2, 3], [1, 2, 4], hits="L2")
def large_numpy_array(v):
    w = np.tile(np.array(v, np.float32), (5000, 1))
    return lambda x: x * w[0]


@difference(VALUES, np.float32, np.int32, np.int8)
def dtype_of_a_numpy_array(dtype):
    w = np.zeros(12 // dtype().itemsize, dtype)
    return lambda x: x + w.dtype.num


@difference(VALUES, (2, 3), (3, 2), (6,))
def shape_of_a_numpy_array(shape):
    w = np.arange(6, dtype=np.float32).reshape(shape)
    return lambda x: x * w.ravel()[w.shape[0] % 6]


@difference(VALUES, "C", "F")
def memory_order_of_a_numpy_array(order):
    w = np.array([[1, 2, 3], [4, 5, 6]], np.float32, order=order)
    return lambda x: x * w.ravel(order="K")[1]


@difference(VALUES, True, False)
def one_numpy_array_twice(one):
    a = np.ones(3, np.float32)
    b = a if one else np.ones(3, np.float32)
    return lambda x: x if a is b else -x


@difference(VALUES, 2.0, 3.0)
def numpy_array_of_no_dimension(v):
    w = np.array(v, np.float32)
    return lambda x: x * w


@difference(VALUES, [2.0], [3.0], hits="")
def numpy_array_of_objects(v):
    w = np.empty(1, object)
    w[0] = v
    return lambda x: x * w[0][0]


@difference(VALUES, [True, False, True], [True, True, True])
def numpy_mask(v):
    w = np.array(v)
    return lambda x: x * x[w].sum()


@difference(VALUES, 2.0, 3.0, hits="")
def numpy_subclass(v):
    w = np.ma.masked_array([v, 1.0], [False, True])
    return lambda x: x * float(w[0])


# --------------------------------------------------------------------------------------------
# Arrays of JAX
# --------------------------------------------------------------------------------------------


@difference(VALUES, 2.0, 3.0)
def array_in_a_cell(v):
    w = arr(v)
    return lambda x: x * w


@difference(VALUES, 2.0, 3.0)
def array_in_containers(v):
    w = {"a": [arr(v), (arr(1.0),)], "b": collections.deque([arr(v)])}
    return lambda x: x * w["a"][0] + w["a"][1][0] * w["b"][0]


@difference(VALUES, 2.0, 3.0)
def array_in_two_functions(v):
    w = arr(v)
    a = lambda x: x * w
    b = lambda x: x + w
    return lambda x: a(b(x)) - w


@difference(VALUES, (2.0, 3.0), (3.0, 2.0), (2.0, 2.0))
def two_arrays(pair):
    a, b = map(arr, pair)
    return lambda x: x * a - b


@difference(VALUES, 2.0, 3.0)
def array_in_a_partial(v):
    return functools.partial(lambda w, x, k: x * w + k, arr(v), k=arr(v))


@difference(VALUES, 2.0, 3.0)
def array_in_a_jitted_helper(v):
    w = arr(v)
    helper = jax.jit(lambda x: x * w)
    return lambda x: helper(x)


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_an_object(v):
    o = types.SimpleNamespace(w=arr(v))
    return lambda x: x * o.w


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_a_module_like_object(v):
    class M:
        def __init__(self):
            self.w = arr(v)

        def run(self, x):
            return x * self.w

    return M().run


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_a_list_and_in_an_object(v):
    ws = [arr(v)]
    o = types.SimpleNamespace(ws=ws)
    return lambda x: x * ws[0] + o.ws[0]


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_an_object_and_in_a_list(v):
    bs = [arr(v)]
    a = types.SimpleNamespace(ws=bs)
    other = arr(v + 7.0)
    return lambda x: x * a.ws[0] + bs[0] * other


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_a_dict_and_in_an_object_passed_on(v):
    cs = {"w": arr(v)}
    o = types.SimpleNamespace(cs=cs)
    helper = lambda o, x: x * o.cs["w"]
    return lambda x: x * cs["w"] + helper(o, x)


@difference(VALUES, 2, 3, hits="L2")
def int_of_an_array(v):
    n = arr(v, np.int32)
    return lambda x: x * int(n)


@difference(VALUES, True, False, hits="L2")
def truth_of_an_array(v):
    flag = arr(v, np.bool_)
    return lambda x: x * 2.0 if flag else x


@difference(VALUES, 2, 3, hits="L2")
def array_as_a_size(v):
    n = arr(v, np.int32)
    return lambda x: x * jnp.arange(n).sum()


@difference(VALUES, [0, 2], [2, 2])
def array_as_an_index(v):
    i = arr(v, np.int32)
    return lambda x: x * x[i].sum()


@difference(VALUES, [True, False, True], [True, True, True], hits="L2")
def array_as_a_mask(v):
    m = arr(v, np.bool_)
    return lambda x: x * x[m].sum()


@difference(VALUES, [1.0, 2.0], [2.0, 1.0], [2.0], hits="L2")
def iteration_over_an_array(v):
    w = arr(v)

    def f(x):
        for item in w:
            x = x * item + 1.0
        return x

    return f


@difference(VALUES, [1.0, 2.0], [2.0, 1.0], hits="L2")
def list_of_an_array(v):
    w = arr(v)
    return lambda x: x * w.tolist()[0]


@difference(VALUES, [1.0, 2.0], [2.0, 1.0], hits="L2")
def numpy_of_an_array(v):
    w = arr(v)
    return lambda x: x * np.asarray(w)[0]


@difference(VALUES, 2, 3, hits="L2")
def int_of_an_array_where_errors_are_caught(v):
    n = arr(v, np.int32)

    def f(x):
        try:
            k = int(n)
        except Exception:
            k = -1
        return x * k

    return f


@difference(VALUES, True, False, hits="L2")
def truth_of_an_array_where_errors_are_caught(v):
    flag = arr(v, np.bool_)

    def f(x):
        try:
            on = bool(flag)
        except Exception:
            on = False
        return x * 2.0 if on else x

    return f


@difference(VALUES, 3, 7, hits="L2")
def one_value_of_an_array_that_counts(v):
    n = arr(v, np.int32)

    def f(x):
        try:
            k = int(n)
        except Exception:
            k = -1
        return x * 5.0 if k == 3 else x

    return f


@difference(VALUES, 3.0, 7.0, hits="L2")
def one_text_of_an_array_that_counts(v):
    w = arr(v)
    return lambda x: x * 5.0 if str(w) == "3.0" else x


@difference(VALUES, 2.0, 3.0, hits="L2")
def text_of_an_array(v):
    w = arr(v)
    return lambda x: (
        x * (2.0 if "2." in str(w) else 3.0) if "float32[" not in repr(w) else x * 0.0 - 1.0
    )


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_that_asks_whether_it_is_traced(v):
    w = arr(v)
    return lambda x: x * w if not isinstance(w, jax.core.Tracer) else -x


@difference(VALUES, 2.0, 3.0)
def method_of_an_array(v):
    w = arr([v, 1.0])
    total = w.sum
    return lambda x: x * total()


@difference(VALUES, 2.0, 3.0)
def update_of_an_array(v):
    w = arr([v, 1.0, 1.0])
    return lambda x: x * w.at[1].set(5.0).at[2].add(x[0])


@difference(VALUES, 2, 3, hits="L2")
def bound_of_a_loop(v):
    n = arr(v, np.int32)
    return lambda x: lax.fori_loop(0, n, lambda i, c: c * 2.0, x)


@difference(VALUES, np.float32, np.int32, np.bool_)
def dtype_of_an_array(dtype):
    w = arr(1, dtype)
    return lambda x: x * (w.dtype.num + 1)


@difference(VALUES, 1, 2, 3)
def shape_of_an_array(n):
    w = arr([1.0] * n)
    return lambda x: x * w.sum() * w.shape[0]


@difference(VALUES, 1, 2)
def typed_key(v):
    key = jax.random.key(v)
    return lambda x: x + jax.random.uniform(key)


@difference(VALUES, 1, 2)
def raw_key(v):
    key = jax.random.PRNGKey(v)
    return lambda x: x + jax.random.uniform(key)


@difference(VALUES, "threefry2x32", "rbg")
def kind_of_a_key(impl):
    key = jax.random.key(1, impl=impl)
    return lambda x: x + jax.random.uniform(key)


@difference(VALUES, 0, 1, hits="", entries=("loop_jit",))
def array_of_another_device(n):
    w = jax.device_put(np.float32(n + 2.0), jax.devices()[n])
    return lambda x: x * w


@difference(VALUES, jnp.sin, jnp.cos, jnp.tanh, lax.sign, jax.nn.relu, jax.nn.relu6, np.abs)
def function_of_a_library(op):
    return lambda x: op(5.0 * x - 3.0) if op is not np.abs else x * op(-7.0).astype(np.float32)


@difference(VALUES, max, min, sum, len)
def builtin(op):
    return lambda x: x * float(op([2.0, 3.0, 4.0, 5.0]))


@difference(VALUES, operator.add, operator.sub, math.hypot)
def c_function(op):
    return lambda x: x * float(op(4.0, 3.0))


@difference(VALUES, 0, 1)
def device(n):
    d = jax.devices()[n]
    return lambda x: x * (d.id + 1)


@difference(VALUES, ("a",), ("b",), (None,), ("a", None), (("a", "b"),))
def partition_spec(names):
    spec = jax.sharding.PartitionSpec(*names)
    return lambda x: x + text_of(tuple(spec))


@difference(VALUES, 1, 2)
def mesh(n):
    m = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("a",))
    return lambda x: x * m.size


@difference(VALUES, jnp.float32, jnp.int32, jnp.bfloat16, np.float16, bool, int)
def type_of_an_element(dtype):
    return lambda x: x + (text_of(np.dtype(dtype).name) + jnp.zeros(1, dtype).dtype.itemsize)


@difference(VALUES, np.dtype("f4"), np.dtype(">f4"), np.dtype("i4"))
def element_type(dtype):
    return lambda x: x + text_of(dtype.str)


@difference(VALUES, (3,), (4,))
def shape_and_type(shape):
    s = jax.ShapeDtypeStruct(shape, np.float32)
    return lambda x: x * s.shape[0]


@difference(VALUES, ["a", "b"], ["b", "a"])
def order_of_keywords(names):
    p = functools.partial(lambda **named: list(named), **dict.fromkeys(names, 1.0))
    return lambda x: x * (2.0 if p()[0] == "a" else 3.0)


@difference(VALUES, functools.partial, jax.tree_util.Partial, hits="L2")
def kind_of_partial(kind):
    p = kind(lambda x: x)
    return lambda x: p(x) * float(len(jax.tree.leaves(p)) + len(type(p).__module__))


@difference(VALUES, "x", "y", hits="")
def error(text):
    e = ValueError(text)
    return lambda x: x + text_of(str(e))


@difference(VALUES, "a+", "b+", hits="")
def pattern(text):
    p = re.compile(text)
    return lambda x: x * (2.0 if p.match("aa") else 3.0)


@difference(VALUES, "1.5", "2.5", hits="")
def decimal_number(text):
    d = decimal.Decimal(text)
    return lambda x: x * float(d)


@difference(VALUES, 1, 2, hits="")
def date(day):
    d = datetime.date(2000, 1, day)
    return lambda x: x * d.day


@difference(VALUES, 2.0, 3.0, hits="")
def raw_static_method(v):
    s = staticmethod(lambda x: x * v)
    return lambda x: s(x)


@difference(VALUES, 2.0, 3.0, hits="")
def method_of_a_float(v):
    times = v.__mul__
    return lambda x: x * times(2.0)


@difference(VALUES, 2.0, 3.0, hits="")
def weak_reference(v):
    o = Holder(v)
    _KEPT.append(o)
    r = weakref.ref(o)
    return lambda x: x * r().k


@difference(VALUES, 2.0, 3.0, hits="")
def user_dict(v):
    class D(collections.UserDict):
        pass

    d = D(k=v)
    return lambda x: x * d["k"]


@difference(VALUES, 2.0, 3.0, hits="")
def chain_map(v):
    d = collections.ChainMap({"a": 1.0}, {"k": v})
    return lambda x: x * d["k"]


@difference(VALUES, (1, 2), (1, 3), hits="")
def c_iterator_of_the_user(items):
    class It(itertools.chain):
        pass

    return lambda x: x * sum(It(items))


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_a_global_and_in_a_module(v):
    table = [arr(v)]
    m = module("m", "", TABLE=table)
    return function("def f(x):\n    return x * TABLE[0] + m.TABLE[0]", TABLE=table, m=m)


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_in_a_module_and_in_a_global(v):
    table = [arr(v)]
    a = module("a", "", TABLE=table)
    other = arr(v + 5.0)
    return function(
        "def f(x):\n    return x * a.TABLE[0] + z[0] * other", z=table, a=a, other=other
    )


@difference(VALUES, 2.0, 3.0, hits="L2")
def array_of_a_list_in_a_method_and_in_a_cell(v):
    ws = [arr(v)]
    run = Holder(ws).first
    return lambda x: x * ws[0] + run(x)


@difference(VALUES, 2.0, 3.0, hits="L2")
def list_shared_with_a_default(v):
    ws = [arr(v)]
    o = Holder(ws)
    return lambda x, ws=ws: x * ws[0] + o.first(x) + o.k[0]


class Holder:
    def __init__(self, k):
        self.k = k

    def first(self, x):
        return x * self.k[0]


_KEPT = []


@pytest.mark.parametrize(("name", "entry"), cases(VALUES))
def test_captures_that_differ(name, entry):
    check_difference(VALUES[name], entry)


@pytest.mark.parametrize(("name", "entry"), [c for c in cases(VALUES) if VALUES[c[0]].hits])
def test_a_fresh_equal_capture_hits(name, entry):
    check_hit(VALUES[name], entry)


_HOISTED = [
    "array_in_a_cell",
    "array_in_containers",
    "array_in_two_functions",
    "two_arrays",
    "array_in_a_partial",
    "array_in_a_jitted_helper",
    "update_of_an_array",
    "typed_key",
    "raw_key",
    "method_of_an_array",
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", _HOISTED)
def test_other_values_of_captured_arrays_hit(name, entry):
    case, (run, pick) = VALUES[name], ENTRIES[entry]
    run(case.make(case.values[0]))
    f = case.make(case.values[1])
    with counting() as n:
        out = jax.block_until_ready(run(f))
    assert (n.compiles, n.traces) == (0, 0)
    same(pick(out), f(X))


# --------------------------------------------------------------------------------------------
# Changes of what is captured
# --------------------------------------------------------------------------------------------


@change(CHANGES)
def a_list():
    v = [2.0]
    return (lambda x: x * v[0]), lambda: v.__setitem__(0, 3.0)


@change(CHANGES)
def a_nested_list():
    v = {"a": ([2.0],)}
    return (lambda x: x * v["a"][0][0]), lambda: v["a"][0].__setitem__(0, 3.0)


@change(CHANGES)
def order_of_a_dict():
    v = {"a": 2.0, "b": 3.0}
    return (lambda x: x * list(v.values())[0]), lambda: v.update(a=v.pop("a"))


@change(CHANGES)
def a_set():
    v = {2.0}
    return (lambda x: x * sum(v)), lambda: v.add(3.0)


@change(CHANGES)
def a_queue():
    v = collections.deque([2.0])
    return (lambda x: x * sum(v)), lambda: v.append(3.0)


@change(CHANGES)
def a_byte_array():
    v = bytearray(b"\x02")
    return (lambda x: x * v[0]), lambda: v.__setitem__(0, 3)


@change(CHANGES)
def a_numpy_array():
    v = np.array([2.0, 1.0, 1.0], np.float32)
    return (lambda x: x * v), lambda: v.__setitem__(0, 3.0)


@change(CHANGES)
def a_numpy_array_of_no_dimension():
    v = np.array(2.0, np.float32)
    return (lambda x: x * v), lambda: v.__setitem__((), 3.0)


@change(CHANGES)
def the_base_of_a_numpy_view():
    base = np.array([2.0, 1.0, 1.0], np.float32)
    v = base[:2]
    return (lambda x: x * v[0]), lambda: base.__setitem__(0, 3.0)


@change(CHANGES)
def an_array_that_aliases_numpy():
    host = aligned([2.0] * 16)
    v = jnp.asarray(host)
    if v.unsafe_buffer_pointer() != host.ctypes.data:
        v = jax.dlpack.from_dlpack(host)
    return (lambda x: x * v[0]), lambda: host.__setitem__(0, 3.0)


@change(CHANGES)
def an_array_that_aliases_numpy_and_is_read():
    host = aligned([2.0] * 16)
    v = jax.dlpack.from_dlpack(host)
    return (lambda x: x * float(np.asarray(v)[0])), lambda: host.__setitem__(0, 3.0)


@change(CHANGES)
def an_array_rebound():
    v = arr(2.0)

    def alter():
        nonlocal v
        v = arr(3.0)

    return (lambda x: x * v), alter


@change(CHANGES)
def an_array_becomes_a_float():
    v = arr(2.0)

    def alter():
        nonlocal v
        v = 3.0

    return (lambda x: x * v), alter


@change(CHANGES)
def an_array_that_is_read_rebound():
    v = arr(2, np.int32)

    def alter():
        nonlocal v
        v = arr(3, np.int32)

    return (lambda x: x * int(v)), alter


@change(CHANGES)
def an_array_in_an_object_rebound():
    o = types.SimpleNamespace(w=arr(2.0))
    return (lambda x: x * o.w), lambda: setattr(o, "w", arr(3.0))


@change(CHANGES)
def a_namespace():
    o = types.SimpleNamespace(k=2.0)
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@change(CHANGES)
def a_slot():
    class P:
        __slots__ = ("k",)

    p = P()
    p.k = 2.0
    return (lambda x: x * p.k), lambda: setattr(p, "k", 3.0)


@change(CHANGES)
def a_frozen_dataclass_forced():
    @dataclasses.dataclass(frozen=True)
    class P:
        a: float

    p = P(2.0)
    return (lambda x: x * p.a), lambda: object.__setattr__(p, "a", 3.0)


@change(CHANGES)
def the_list_of_a_partial():
    v = [2.0]
    return functools.partial(lambda v, x: x * v[0], v), lambda: v.__setitem__(0, 3.0)


@change(CHANGES)
def a_dict_whose_method_is_captured():
    v = {"k": 2.0}
    get = v.get
    return (lambda x: x * get("k")), lambda: v.update(k=3.0)


@pytest.mark.parametrize(("name", "entry"), cases(CHANGES))
def test_never_stale(name, entry):
    check_change(CHANGES[name], entry)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["numpy", "inside", "aligned", "asarray", "scalar"])
def test_a_numpy_array_that_was_traced_and_then_overwritten(kind, entry):
    """The program of equal content must hold a copy, not the array of the first user."""
    run, pick = ENTRIES[entry]

    def make(w):
        if kind == "inside":
            return lambda x: x * jnp.sin(w) + w
        if kind == "asarray":
            return lambda x: x * jnp.asarray(w)[:3] + jnp.asarray(w)[1]
        if kind == "scalar":
            return lambda x: x * w[0]
        return lambda x: x * w[:3]

    def new():
        return (
            aligned([2.0] * 16) if kind in ("aligned", "asarray") else np.full(3, 2.0, np.float32)
        )

    first = new()
    same(pick(run(make(first))), make(new())(X))
    first[:] = 7.0
    same(pick(run(make(new()))), make(new())(X))
    same(pick(run(make(first))), make(first)(X))
    second = new()
    f = loop_jit(make(second))
    same(f(X), make(new())(X))
    second[:] = 5.0
    same(f(X), make(second)(X))
    second[:] = 2.0
    same(f(X), make(new())(X))


def test_captured_arrays_of_other_kinds():
    def make(w):
        return lambda x: x * w

    half = X.astype(jnp.float16)
    kinds = [
        arr(2.0),
        arr(3.0),
        arr(2, np.int32),
        arr(2.0, np.float16),
        arr([2.0, 1.0, 1.0]),
        jnp.asarray(2.0) * 1,
        jax.jit(lambda: 2.0)(),
        jax.jit(lambda: 2)(),
        np.float32(2),
        np.float64(2),
        2.0,
        2,
        arr(2.0),
    ]
    for w in (*kinds, *reversed(kinds)):
        for x in (X, half):
            got, want = loop_jit(make(w))(x), jax.jit(make(w))(x)
            same(got, want)
            assert got.weak_type == want.weak_type


def test_captured_arrays_committed_elsewhere():
    def make(w):
        return lambda x: x * w

    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:3]), ("a",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    for w in (
        arr(2.0),
        jax.device_put(arr(3.0), devices[1]),
        jax.device_put(X, sharding),
        arr(4.0),
    ):
        for x in (X, jax.device_put(X, devices[2]), jax.device_put(X, sharding)):
            got, want = loop_jit(make(w))(x), jax.jit(make(w))(x)
            same(np.asarray(got), np.asarray(want))
            assert got.sharding.is_equivalent_to(want.sharding, 1)


def test_captured_arrays_that_are_deleted():
    def make(w):
        return lambda x: x * w

    same(loop_jit(make(arr(2.0)))(X), X * 2.0)
    dead = jnp.array(3.0)
    dead.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        loop_jit(make(dead))(X)
    same(loop_jit(make(arr(4.0)))(X), X * 4.0)


def test_a_captured_array_is_not_donated():
    w = jnp.array([1.0, 2.0, 3.0])

    def make():
        return lambda x: x * w

    for _ in range(3):
        x = jnp.array([1.0, 2.0, 3.0])
        same(loop_jit(make(), donate_argnums=0)(x), X * X)
        assert not w.is_deleted()


def test_the_bound_of_a_loop_can_still_be_differentiated():
    def make(n):
        return lambda x: lax.fori_loop(0, n, lambda i, c: c * c, x).sum()

    for k in (2, 3, 2):
        n = arr(k, np.int32)
        same(jax.grad(loop_jit(make(n)))(X), jax.grad(jax.jit(make(n)))(X))


# --------------------------------------------------------------------------------------------
# Tracers
# --------------------------------------------------------------------------------------------


def _closes_over(w):
    return lambda x: x * w


def _reads_through_an_object(w):
    o = types.SimpleNamespace(w=[w])
    return lambda x: x * o.w[0]


@pytest.mark.parametrize("make", [_closes_over, _reads_through_an_object])
def test_captured_tracers(make):
    entry = lambda w: loop_jit(make(w))(X).sum()
    stock = lambda w: make(w)(X).sum()
    for v in (2.0, 3.0):
        w = arr(v)
        same(jax.jit(entry)(w), stock(w))
        same(jax.grad(entry)(w), jax.grad(stock)(w))
        same(jax.hessian(entry)(w), jax.hessian(stock)(w))
        same(jax.vmap(entry)(X * w), jax.vmap(stock)(X * w))
        same(jax.vmap(jax.grad(entry))(X), jax.vmap(jax.grad(stock))(X))
        same(jax.jvp(entry, (w,), (w,)), jax.jvp(stock, (w,), (w,)))
        same(
            lax.scan(lambda c, w: (c + entry(w), None), w, X)[0],
            lax.scan(lambda c, w: (c + stock(w), None), w, X)[0],
        )
        same(entry(w), stock(w))


@pytest.mark.parametrize("make", [_closes_over, _reads_through_an_object])
def test_captured_tracers_in_loops(make):
    def loop(scan):
        return lambda w: scan(lambda c, _: (make(w)(c), None), X, None, length=2)[0].sum()

    for v in (2.0, 3.0):
        w = arr(v)
        ours, stock = loop(loopjit.lax.scan), loop(lax.scan)
        same(ours(w), stock(w))
        same(jax.grad(ours)(w), jax.grad(stock)(w))
        same(jax.vmap(ours)(X), jax.vmap(stock)(X))
        same(jax.jit(jax.grad(ours))(w), jax.grad(stock)(w))


def test_a_captured_tracer_whose_value_is_needed():
    def f(w):
        return loop_jit(lambda x: x if w else -x)(X).sum()

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(f)(arr(1.0))
    same(f(arr(1.0)), X.sum())
    same(f(arr(0.0)), -X.sum())


def test_tracers_do_not_leak():
    with jax.checking_leaks():
        same(jax.jit(lambda w: loop_jit(lambda x: x * w)(X))(arr(2.0)), X * 2.0)
    for _ in range(2):
        same(jax.jit(lambda w: loop_jit(lambda x: x * w)(X))(arr(2.0)), X * 2.0)


# --------------------------------------------------------------------------------------------
# Rules
# --------------------------------------------------------------------------------------------


def _jvp(k, w=None):
    @jax.custom_jvp
    def act(x):
        return jnp.sin(x)

    @act.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return act(x), t * k if w is None else t * k * w

    return lambda x: act(x).sum()


def _jvps(k, w=None):
    @jax.custom_jvp
    def act(x):
        return jnp.sin(x)

    act.defjvps(lambda t, ans, x: t * k if w is None else t * k * w)
    return lambda x: act(x).sum()


def _vjp(k, w=None):
    @jax.custom_vjp
    def act(x):
        return jnp.sin(x)

    act.defvjp(lambda x: (act(x), x), lambda x, g: (g * k if w is None else g * k * w,))
    return lambda x: act(x).sum()


def _vjp_of_the_forward_rule(k, w=None):
    @jax.custom_vjp
    def act(x):
        return jnp.sin(x)

    act.defvjp(lambda x: (act(x), x * k if w is None else x * k * w), lambda r, g: (g * r,))
    return lambda x: act(x).sum()


def _gradient(k, w=None):
    @jax.custom_gradient
    def act(x):
        return jnp.sin(x), lambda g: g * k if w is None else g * k * w

    return lambda x: act(x).sum()


RULES = [_jvp, _jvps, _vjp, _vjp_of_the_forward_rule, _gradient]


@pytest.mark.parametrize("make", RULES)
def test_equal_primals_with_other_rules(make):
    for k in (2.0, 3.0, 2.0):
        same(loop_jit(make(k))(X), jnp.sin(X).sum())
        same(jax.grad(loop_jit(make(k)))(X), jax.grad(make(k))(X))
        same(loop_jit(jax.grad(make(k)))(X), jax.grad(make(k))(X))
        same(jax.jit(jax.grad(loop_jit(make(k))))(X), jax.grad(make(k))(X))
        for w in (arr(2.0), arr(3.0)):
            same(jax.grad(loop_jit(make(k, w)))(X), jax.grad(make(k, w))(X))
            same(loop_jit(jax.grad(make(k, w)))(X), jax.grad(make(k, w))(X))
            ours = lambda w: jax.grad(loop_jit(make(k, w)))(X).sum()
            same(ours(w), jax.grad(make(k, w))(X).sum())


@pytest.mark.parametrize("make", RULES)
def test_rules_through_loops(make):
    def loop(scan, k):
        f = make(k)
        return lambda x: scan(lambda c, _: (c + f(x), None), X[0], None, length=2)[0]

    for k in (2.0, 3.0, 2.0):
        ours, stock = loop(loopjit.lax.scan, k), loop(lax.scan, k)
        same(ours(X), stock(X))
        same(jax.grad(ours)(X), jax.grad(stock)(X))


@pytest.mark.parametrize("make", RULES)
def test_a_rule_that_reads_what_changes(make):
    k = [2.0]

    class Scale:
        def __rmul__(self, t):
            return t * k[0]

        __array_priority__ = 1000

    def f(x):
        return make(k[0])(x)

    g = loop_jit(f)
    for value in (2.0, 3.0, 2.0):
        k[0] = value
        same(jax.grad(g)(X), jax.grad(make(value))(X))


def test_batching_rules():
    def make(k):
        @jax.custom_batching.custom_vmap
        def act(x):
            return x * 1.0

        @act.def_vmap
        def rule(size, batched, x):
            return x * k, True

        return lambda x: act(x)

    for k in (2.0, 3.0, 2.0):
        same(loop_jit(make(k))(X), X)
        same(jax.vmap(loop_jit(make(k)))(X), X * np.float32(k))
        same(loop_jit(jax.vmap(make(k)))(X), X * np.float32(k))


# --------------------------------------------------------------------------------------------
# Callbacks
# --------------------------------------------------------------------------------------------

SHAPE = jax.ShapeDtypeStruct((3,), np.float32)


def _pure(cb):
    return lambda x: jax.pure_callback(cb, SHAPE, x, vmap_method="sequential")


def _io(cb):
    return lambda x: jax.experimental.io_callback(cb, SHAPE, x)


def _debug(cb):
    def f(x):
        jax.debug.callback(cb, x)
        return x * 2.0

    return f


CALLBACKS = [_pure, _io, _debug]


@pytest.mark.parametrize("kind", [_pure, _io])
def test_callbacks_that_differ(kind):
    def make(k):
        return kind(lambda v: np.asarray(v) * np.float32(k))

    for entry, (run, pick) in ENTRIES.items():
        for k in (2.0, 3.0, 2.0):
            same(pick(run(make(k))), X * np.float32(k))


@pytest.mark.parametrize("kind", [_pure, _io])
def test_a_callback_that_captures_an_array(kind):
    def make(w):
        return kind(lambda v: np.asarray(v) * np.asarray(w))

    for entry, (run, pick) in ENTRIES.items():
        for k in (2.0, 3.0, 2.0):
            same(pick(run(make(arr(k)))), X * np.float32(k))


def _dict_item(box):
    def cb(v):
        box["n"] = box.get("n", 0) + 1
        return np.asarray(v)

    return cb


def _put(box, v):
    box["n"] = box.get("n", 0) + 1


def _helper(box):
    def cb(v):
        _put(box, v)
        return np.asarray(v)

    return cb


def _partial(box):
    def cb(box, v):
        _put(box, v)
        return np.asarray(v)

    return functools.partial(cb, box)


def _method(box):
    def cb(v):
        box.update(n=box.get("n", 0) + 1)
        return np.asarray(v)

    return cb


def _object(box):
    class Log:
        def __call__(self, v):
            box["n"] = box.get("n", 0) + 1
            return np.asarray(v)

    return Log()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", [_io, _debug])
@pytest.mark.parametrize("make", [_dict_item, _helper, _partial, _method, _object])
def test_a_callback_writes_to_what_it_captures(make, kind, entry):
    run, pick = ENTRIES[entry]
    boxes = [{}, {}, {}]
    for box in boxes:
        for count in (1, 2):
            jax.block_until_ready(run(kind(make(box))))
            jax.effects_barrier()
            assert box == {"n": count}
    f = kind(make(boxes[0]))
    jitted = loop_jit(f)
    for count in (3, 4, 5):
        jax.block_until_ready(jitted(X))
        jax.effects_barrier()
        assert boxes[0] == {"n": count}


@pytest.mark.parametrize("kind", [_pure, _io])
def test_a_callback_reads_what_changes(kind):
    table = {"k": np.float32(2.0)}
    f = loop_jit(kind(lambda v: np.asarray(v) * table["k"]))
    same(f(X), X * 2.0)
    table["k"] = np.float32(3.0)
    same(f(X), X * 3.0)
    same(f(X), X * 3.0)


def test_a_callback_that_changes_what_it_reads():
    table = {"k": 1.0}

    def cb(v):
        table["k"] += 1.0
        return np.asarray(v) * np.float32(table["k"])

    f = loop_jit(_io(cb))
    for want in (2.0, 3.0, 4.0):
        same(f(X), X * np.float32(want))


def test_two_loggers_with_one_primal():
    def make(log):
        def f(x):
            jax.debug.callback(lambda v: log.append(float(v)), x[0])
            return x * 2.0

        return f

    logs = [[], [], []]
    for log in logs:
        jax.block_until_ready(loop_jit(make(log))(X))
        jax.effects_barrier()
    assert logs == [[1.0]] * 3


def test_debug_prints(capfd):
    def make(text):
        def f(x):
            jax.debug.print(text + " {v}", v=x[0])
            return x

        return f

    for text in ("left", "right", "left"):
        jax.block_until_ready(loop_jit(make(text))(X))
        jax.effects_barrier()
        assert f"{text} 1.0" in capfd.readouterr().out


def test_names_that_count():
    from jax.ad_checkpoint import checkpoint_name

    def make(name):
        @functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("a")
        )
        def f(x):
            return checkpoint_name(jnp.sin(x), name) ** 2

        return f

    def saved(name):
        text = str(jax.make_jaxpr(jax.grad(lambda x: loop_jit(make(name))(x).sum()))(X))
        return text.count("sin"), text.count("cos")

    assert saved("a") == saved("a")
    assert saved("a") != saved("b")


def test_foreign_functions_that_differ():
    def make(target):
        return lambda x: jax.ffi.ffi_call(target, SHAPE)(x)

    texts = [loop_jit(make(t)).lower(X).as_text() for t in ("one_target", "other_target")]
    assert "one_target" in texts[0] and "other_target" in texts[1]
    for target in ("one_target", "other_target"):
        with pytest.raises(Exception, match=target):
            loop_jit(make(target))(X)


# --------------------------------------------------------------------------------------------
# What is looked at after the trace: rules, policies, results
# --------------------------------------------------------------------------------------------


def _rule_of_an_object(o):
    @jax.custom_jvp
    def act(x):
        return jnp.sin(x)

    act.defjvp(lambda p, t: (act(p[0]), t[0] * o.k[0]))
    return lambda x: act(x).sum()


def _rule_of_an_object_vjp(o):
    @jax.custom_vjp
    def act(x):
        return jnp.sin(x)

    act.defvjp(lambda x: (act(x), None), lambda r, g: (g * o.k[0],))
    return lambda x: act(x).sum()


def _rule_of_a_list(o):
    k = o.k

    @jax.custom_jvp
    def act(x):
        return jnp.sin(x)

    act.defjvp(lambda p, t: (act(p[0]), t[0] * k[0]))
    return lambda x: act(x).sum()


def _rule_of_an_object_jvps(o):
    @jax.custom_jvp
    def act(x):
        return jnp.sin(x)

    act.defjvps(lambda t, ans, x: t * o.k[0])
    return lambda x: act(x).sum()


@pytest.mark.parametrize(
    "make",
    [_rule_of_an_object, _rule_of_an_object_vjp, _rule_of_an_object_jvps, _rule_of_a_list],
)
@pytest.mark.parametrize("kind", [list, lambda v: np.array(v, np.float32)])
def test_a_rule_reads_what_others_change(make, kind):
    """The rule of a shared program must not see what happens to the captures of its first user."""
    first = Holder(kind([2.0]))
    f = make(first)
    same(loop_jit(f)(X), jnp.sin(X).sum())
    first.k[0] = 5.0
    other = Holder(kind([2.0]))
    same(jax.grad(loop_jit(make(other)))(X), jnp.full(3, 2.0))
    same(jax.grad(loop_jit(f))(X), jnp.full(3, 5.0))
    first.k[0] = 7.0
    same(jax.grad(loop_jit(make(Holder(kind([5.0])))))(X), jnp.full(3, 5.0))
    same(jax.grad(loop_jit(f))(X), jnp.full(3, 7.0))


def test_a_policy_reads_what_others_change():
    def make(o):
        policy = lambda prim, *_, **__: o.k
        return lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=policy)(x).sum()

    def text(f):
        return str(jax.make_jaxpr(jax.grad(f))(X)).count("sin")

    first = Holder(True)
    same(loop_jit(make(first))(X), make(first)(X))
    first.k = False
    for k in (True, False, True):
        same(jax.grad(loop_jit(make(Holder(k))))(X), jax.grad(make(Holder(k)))(X))
        assert text(loop_jit(make(Holder(k)))) == text(jax.jit(make(Holder(k))))


class Node:
    def __init__(self, x, aux):
        self.x, self.aux = x, aux


jax.tree_util.register_pytree_node(Node, lambda n: ((n.x,), n.aux), lambda aux, c: Node(c[0], aux))


def test_a_result_that_holds_what_was_captured():
    def make(box):
        return lambda x: Node(x * 2.0, box)

    class Box:
        def __init__(self, k):
            self.k = k

    first = Box(1)
    assert loop_jit(make(first))(X).aux is first
    other = Box(1)
    assert loop_jit(make(other))(X).aux is other
    first.k = 2
    assert loop_jit(make(Box(1)))(X).aux.k == 1
    assert loop_jit(make(Box(2)))(X).aux.k == 2


@pytest.mark.parametrize("kind", [lambda k: [k], lambda k: {0: k}])
def test_a_result_that_holds_a_captured_container(kind):
    def make(box):
        return lambda x: Node(x * 2.0, box)

    first = kind(1)
    loop_jit(make(first))(X)
    first[0] = 2
    assert loop_jit(make(kind(1)))(X).aux[0] == 1
    box = kind(1)
    assert loop_jit(make(box))(X).aux is box
    box[0] = 3
    assert loop_jit(make(box))(X).aux is box


def test_a_result_that_is_a_function():
    def make(w, k):
        g = lambda a, y: a * y * w * k
        return lambda x: jax.tree_util.Partial(g, x)

    for k in (2.0, 3.0, 2.0):
        for w in (arr(2.0), arr(5.0)):
            out = loop_jit(make(w, k))(X)
            same(out(X), X * X * w * np.float32(k))
            same(out(X), X * X * w * np.float32(k))


def test_a_result_that_is_a_pullback():
    def make(w, k):
        g = lambda x: jnp.sin(x) * w * k
        return lambda x: jax.vjp(g, x)

    for k in (2.0, 3.0, 2.0):
        for w in (arr(2.0), arr(5.0)):
            value, pull = loop_jit(make(w, k))(X)
            want, wants = make(w, k)(X)
            same(value, want)
            same(pull(X), wants(X))
            same(jax.jit(pull)(X), wants(X))


# --------------------------------------------------------------------------------------------
# Callbacks that write to globals and buffers
# --------------------------------------------------------------------------------------------

_SOURCES = {
    "global dict": ("LOG = {'n': 0}", "LOG['n'] = LOG['n'] + 1", lambda s: s["LOG"]["n"]),
    "global list": ("LOG = [0]", "LOG[0] += 1", lambda s: s["LOG"][0]),
    "global": ("N = 0", "global N; N = N + 1", lambda s: s["N"]),
    "helper": (
        "N = 0\ndef bump():\n    global N\n    N += 1",
        "bump()",
        lambda s: s["N"],
    ),
    "helper of a list": (
        "LOG = []\ndef bump(to):\n    to.append(1)",
        "bump(LOG)",
        lambda s: len(s["LOG"]),
    ),
    "buffer": ("LOG = np.zeros(1)", "LOG[0] += 1", lambda s: s["LOG"][0]),
    "object": (
        "class C:\n    n = 0\n    def bump(self):\n        self.n += 1\nLOG = C()",
        "LOG.bump()",
        lambda s: s["LOG"].n,
    ),
    "class": ("class C:\n    n = 0", "C.n += 1", lambda s: s["C"].n),
    "function attribute": ("def h():\n    pass\nh.n = 0", "h.n += 1", lambda s: s["h"].n),
    "default": ("LOG = [0]", "log[0] += 1", lambda s: s["LOG"][0]),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", _SOURCES)
def test_a_callback_counts_its_calls(name, entry):
    run, _ = ENTRIES[entry]
    head, body, read = _SOURCES[name]
    default = ", log=LOG" if name == "default" else ""
    f = function(
        f"{head}\ndef cb(v{default}):\n    {body}\n    return np.asarray(v)\n"
        "def f(x):\n    return jax.experimental.io_callback(cb, S, x)",
        S=SHAPE,
    )
    jitted = loop_jit(f)
    once = (lambda f: jitted(X)) if entry == "loop_jit" else run
    for count in range(1, 5):
        jax.block_until_ready(once(f))
        jax.effects_barrier()
        assert read(f.__globals__) == count


# --------------------------------------------------------------------------------------------
# Methods
# --------------------------------------------------------------------------------------------


def test_a_decorated_method():
    class M:
        bias = 1.0

        def __init__(self, k):
            self.k = k

        @loop_jit
        def run(self, x):
            return x * self.k + self.bias

    for k in (2.0, 3.0, 2, arr(2.0), arr(5.0), 2.0):
        m = M(k)
        same(m.run(X), X * k + 1.0)
        same(m.run(X), X * k + 1.0)
        m.k = 7.0
        same(m.run(X), X * 7.0 + 1.0)
        m.k = k
        same(m.run(X), X * k + 1.0)
    m = M(2.0)
    M.bias = 5.0
    same(m.run(X), X * 2.0 + 5.0)
    m.bias = 6.0
    same(m.run(X), X * 2.0 + 6.0)


def test_jitted_objects_whose_ids_are_used_again():
    def make(k):
        helper = jax.jit(lambda x: x * k)
        return lambda x: helper(x)

    for i in range(60):
        k = float(i % 3 + 2)
        same(loop_jit(make(k))(X), X * np.float32(k))


def test_functions_whose_ids_are_used_again():
    for i in range(60):
        k = float(i % 3 + 2)
        f = function(f"def h(x):\n    return x * K\ndef f(x):\n    return h(x) + {i % 2}", K=k)
        same(loop_jit(f)(X), X * np.float32(k) + i % 2)
        del f


def test_a_stale_trace_of_jax_is_not_kept_for_others():
    """What JAX remembers of one object must not be served to an equal one."""

    class M:
        def __init__(self, k):
            self.k = k

        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x):
            return x * self.k

        def run(self, x):
            return self.step(x)

        def scan(self, x):
            return lax.scan(self.body, x, None, length=1)[0]

        def body(self, c, _):
            return c * self.k, None

    for name in ("run", "scan"):
        m = M(2.0)
        same(loop_jit(getattr(m, name))(X), X * 2.0)
        m.k = 3.0
        loop_jit(getattr(m, name))(X)
        same(loop_jit(getattr(M(3.0), name))(X), X * 3.0)


# --------------------------------------------------------------------------------------------
# What a program holds on to
# --------------------------------------------------------------------------------------------


class Host:
    """Equal to others of its kind, but each counts its own calls."""

    def __init__(self, scale=2.0):
        self.scale = scale
        self.calls = []

    def on_host(self, x):
        self.calls.append(float(x))
        return np.float32(x * self.scale)

    @loop_jit
    def run(self, x):
        return jax.pure_callback(self.on_host, jax.ShapeDtypeStruct((), jnp.float32), x)


def test_equal_objects_have_their_own_callbacks():
    hosts = Host(), Host(), Host(3.0)
    for number in (1, 2, 3):
        for host in hosts:
            assert float(host.run(jnp.float32(number))) == number * host.scale
    assert [host.calls for host in hosts] == [[1.0, 2.0, 3.0]] * 3


def test_an_equal_object_in_the_place_of_a_captured_one():
    box = [Host()]
    first = box[0]

    @loop_jit
    def f(x):
        host = box[0]
        return jax.pure_callback(host.on_host, jax.ShapeDtypeStruct((), jnp.float32), x)

    f(jnp.float32(1.0))
    box[0] = second = Host()
    f(jnp.float32(2.0))
    f(jnp.float32(3.0))
    assert (first.calls, second.calls) == ([1.0], [2.0, 3.0])


def test_an_equal_list_in_the_place_of_one_that_a_callback_holds():
    box = types.SimpleNamespace(log=[])
    first = box.log

    @loop_jit
    def f(x):
        log = box.log
        jax.debug.callback(lambda v: log.append(float(v)), x)
        return x

    f(jnp.float32(1.0))
    jax.effects_barrier()
    assert first == [1.0]
    first.clear()
    box.log = second = []
    f(jnp.float32(2.0))
    jax.effects_barrier()
    assert (first, second) == ([], [2.0])


@dataclasses.dataclass
class Settings:
    factor: float = 2.0


def test_equal_settings_beside_a_callback_that_does_not_lead_to_them():
    seen = []

    @loop_jit
    def f(x, settings):
        jax.debug.callback(lambda v: None, x)
        jax.debug.print("{}", x)
        seen.append(1)
        return x * settings.factor

    f(jnp.float32(1.0), Settings())
    f(jnp.float32(1.0), Settings())
    before = len(seen)
    with counting() as n:
        f(jnp.float32(1.0), Settings())
    assert (n.compiles, len(seen)) == (0, before)


@pytest.mark.parametrize("how", ["item", "nonlocal", "append"])
def test_counting_traces_does_not_cause_traces(how):
    """Two kinds of calls in turn: the trace of one changes what the other captured."""
    counts, total = {"n": 0}, 0
    log = []

    def count_item():
        counts["n"] += 1

    def count_nonlocal():
        nonlocal total
        total += 1

    count = {"item": count_item, "nonlocal": count_nonlocal, "append": lambda: log.append(1)}[how]

    @loop_jit
    def f(x, n):
        count()
        return x[:n] * 2.0

    for _ in range(20):
        for size, n in ((3, 1), (3, 2), (4, 1)):
            np.testing.assert_array_equal(f(jnp.ones(size), n), np.full(n, 2.0))
    assert max(counts["n"], total, len(log)) <= 8


def test_what_the_user_changes_in_a_counter_is_seen():
    state = {"traces": 0, "scale": 2.0}

    @loop_jit
    def f(x, n):
        state["traces"] += 1
        return x[:n] * state["scale"]

    x = jnp.ones(3)
    for scale in (2.0, 3.0, 2.0):
        state["scale"] = scale
        for n in (1, 2, 1):
            np.testing.assert_array_equal(f(x, n), np.full(n, scale))
