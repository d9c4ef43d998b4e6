"""Which modules, classes and callables count by identity, because they are pure and nobody redefines them.

The list is an allow-list: what is not on it is user code, and is looked into.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import inspect
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType

# Pure packages: their functions depend on their arguments and on JAX's trace context alone.
_PURE_ROOTS = frozenset(
    "abc cmath collections copy dataclasses enum functools itertools jax jaxlib loopjit math ml_dtypes"
    " numbers numpy operator opt_einsum string types typing typing_extensions _operator _collections"
    " _collections_abc _functools _abc _typing genericpath".split()
)
# Parts of them that hold state, read the world or write to it.
_IMPURE_MODULES = (
    "jax.config",
    "loopjit.engine",
    "loopjit.signature",
    "jax.distributed",
    "jax.monitoring",
    "jax.profiler",
    "jax._src.config",
    "jax._src.distributed",
    "jax._src.monitoring",
    "jax._src.profiler",
    "jax.experimental.multihost_utils",
    "numpy.random",
    "numpy.ctypeslib",
    "numpy.lib.npyio",
    "numpy.lib._npyio_impl",
    "numpy.lib.format",
    "numpy.testing",
)
_IMPURE_NAMES = frozenset(
    "load save savez savez_compressed savetxt loadtxt genfromtxt fromfile memmap DataSource fromregex"
    " seterr geterr seterrcall geterrcall setbufsize getbufsize errstate set_printoptions"
    " get_printoptions printoptions show_config show_runtime"
    " cache_info cache_clear clear_caches clear_backends live_arrays effects_barrier config"
    " lru_cache cache cached_property singledispatch singledispatchmethod count tee cycle".split()
)
_PURE_BUILTINS = frozenset(
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate"
    " filter float format frozenset getattr hasattr hex int isinstance issubclass iter len list map max"
    " min next object oct ord pow property range repr reversed round set slice sorted staticmethod str"
    " sum super tuple type zip Ellipsis NotImplemented True False None __build_class__".split()
)
# Modules whose public attributes are known by identity, however bound (`from jax.numpy import sin`).
_INDEXED = (
    "jax jax.numpy jax.lax jax.nn jax.nn.initializers jax.random jax.tree jax.tree_util jax.scipy"
    " jax.scipy.linalg jax.scipy.special jax.scipy.stats jax.scipy.optimize jax.scipy.signal"
    " jax.scipy.sparse.linalg jax.numpy.linalg jax.numpy.fft jax.ops jax.image jax.dtypes jax.sharding"
    " jax.errors jax.custom_derivatives jax.custom_batching jax.ad_checkpoint jax.checkpoint_policies"
    " jax.debug jax.flatten_util numpy numpy.linalg numpy.fft math cmath operator functools itertools"
    " collections dataclasses typing copy"
).split()

_index: dict[int, object] = {}


def is_pure_module(module: ModuleType) -> bool:
    """Whether the attributes of ``module`` may be trusted by identity."""
    name = getattr(module, "__name__", "")
    return (
        isinstance(name, str)
        and name.partition(".")[0] in _PURE_ROOTS
        and sys.modules.get(name) is module
        and not _impure(name)
    )


# Modules all of whose attributes are pure: they may be imported when a function runs.
_WHOLLY_PURE = frozenset(
    "cmath math operator numbers dataclasses enum typing typing_extensions __future__ abc"
    " jax.numpy jax.lax jax.nn jax.random jax.tree jax.tree_util jax.scipy jax.scipy.special"
    " jax.scipy.stats jax.scipy.linalg".split()
)


def is_pure_import(what: str) -> bool:
    """Whether importing ``"module"`` or ``"module:name"`` inside of a function brings in nothing stateful."""
    module_name, _, name = what.partition(":")
    if not name:
        return what in _WHOLLY_PURE
    if f"{module_name}.{name}" in _WHOLLY_PURE:
        return True
    module = sys.modules.get(module_name)
    if module is None or not is_pure_module(module) or name in _IMPURE_NAMES:
        return False
    return is_known(vars(module).get(name))


def is_pure_attribute(module: ModuleType, name: str) -> bool:
    """Whether ``module.name`` may be trusted, given that the module is pure."""
    return name not in _IMPURE_NAMES or module.__name__.partition(".")[0] not in _PURE_ROOTS


def is_pure_builtin(name: str, value: object) -> bool:
    """Whether the builtin ``name`` is pure: ``len`` is, ``print`` and ``globals`` are not."""
    if name in _PURE_BUILTINS:
        return True
    return isinstance(value, type) and issubclass(value, BaseException)


def is_known(value: object) -> bool:
    """Whether ``value`` is a public, pure object of a trusted module, known by identity."""
    if not _index:
        _build_index()
    return id(value) in _index


def is_pure_function(fn: FunctionType) -> bool:
    """Whether the *code* of a Python function belongs to a trusted module (its closure may not)."""
    # By the globals it runs in: `functools.wraps` copies `__module__` onto user code.
    name = fn.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return (
        module is not None
        and module.__dict__ is fn.__globals__
        and is_pure_module(module)
        and fn.__name__ not in _IMPURE_NAMES
    )


def is_pure_class(cls: type) -> bool:
    """Whether ``cls`` is a class of a trusted module, found there under its own name."""
    if cls.__module__ == "builtins":
        return getattr(builtins, cls.__name__, None) is cls and is_pure_builtin(cls.__name__, cls)
    module = sys.modules.get(cls.__module__)
    if module is None or not is_pure_module(module) or cls.__name__ in _IMPURE_NAMES:
        return False
    if getattr(module, cls.__name__, None) is cls:
        return True
    # jaxlib and NumPy classes live in extension modules under a public name of another module.
    return cls.__module__.partition(".")[0] in ("jaxlib", "numpy") and not cls.__flags__ & (1 << 9)


def is_pure_c_function(fn: BuiltinFunctionType) -> bool:
    """Whether a C function (not a bound method of some object) belongs to a trusted module."""
    owner = fn.__self__
    if owner is builtins:
        return is_pure_builtin(fn.__name__, fn)
    if isinstance(owner, ModuleType):
        return is_pure_module(owner) and fn.__name__ not in _IMPURE_NAMES
    if isinstance(owner, type):  # tuple.__new__, dict.fromkeys
        return is_pure_class(owner)
    return False


def _impure(name: str) -> bool:
    return any(name == m or name.startswith(m + ".") for m in _IMPURE_MODULES)


def _build_index() -> None:
    found: dict[int, object] = {}
    for name in _INDEXED:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or attribute in _IMPURE_NAMES:
                continue
            if callable(value) and not isinstance(value, ModuleType):
                if isinstance(value, BuiltinFunctionType) and not is_pure_c_function(value):
                    if isinstance(value.__self__, ModuleType):
                        continue
                found[id(value)] = value  # the reference keeps the id from being used again
    factory = getattr(dataclasses, "_HAS_DEFAULT_FACTORY", dataclasses.MISSING)
    for value in (dataclasses.MISSING, dataclasses.KW_ONLY, inspect.Parameter.empty, factory):
        found[id(value)] = value
    _index.update(found)
