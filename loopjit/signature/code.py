"""What a code object is (its structural key) and what it reads from outside (its usage).

Both are computed once per code object, from its instructions alone, so that functions without source
(notebook cells, ``exec``, the REPL) are treated like any other.
"""

from __future__ import annotations

import dis
import struct
from collections.abc import Hashable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from loopjit.memo import LRU

# How a variable is used: `None` when the value escapes (it is passed on, called, compared, iterated ...),
# else a tree of the attributes that are read from it: {"lr": None, "opt": {"b1": None}}.
Usage = dict[str, "Usage"] | None

_UNREAD: Usage = {}
_CO_HAS_DOCSTRING = 0x4000000
_CONST_OPS = frozenset(dis.hasconst)
_LOCAL_OPS = "LOAD_FAST"  # a prefix: every version has other super-instructions
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME"})
_FREE_OPS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTR_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WRITE_ATTR_OPS = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_WRITE_GLOBAL_OPS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_WRITE_FREE_OPS = frozenset({"STORE_DEREF", "DELETE_DEREF"})


class CodeInfo(NamedTuple):
    """What is known of one code object, nested code included.

    Attributes:
      key: hashable; equal keys mean the same behaviour given the same captured values.
      reads: the usage of every global (or builtin) name that is read.
      frees: the usage of every free variable, in the order of ``co_freevars``.
      params: the usage of each parameter, by position and by name.
      writes: names of globals and free variables that the code rebinds, deletes or stores into.
      imports: what the code imports when it runs: ``"math"``, ``"jax.numpy"``, ``"math:sin"``.
      introspects: the code reads attributes that say where a function comes from.
    """

    code: CodeType
    key: Hashable
    reads: dict[str, Usage]
    frees: tuple[Usage, ...]
    params: dict[int | str, Usage]
    writes: tuple[str, ...]
    imports: tuple[str, ...]
    introspects: bool


# Attributes of functions that are not written down. Code that reads one of them from anything is opaque.
_INTROSPECTION = frozenset(
    "__qualname__ __module__ __doc__ __annotations__ __code__ __globals__ __closure__ __defaults__"
    " __kwdefaults__ __func__ __self__ __wrapped__ __builtins__ __subclasses__ __mro__ f_locals"
    " f_globals f_back gi_frame tb_frame".split()
)

# Keyed by id: hashing a code object hashes all of its constants. The entry keeps the code object alive.
_INFO: LRU[int, CodeInfo] = LRU(8192)


def code_info(code: CodeType) -> CodeInfo:
    """The structural key and the usage of ``code``, computed once."""
    info = _INFO.get(id(code))
    if info is None:
        info = _INFO.put(id(code), _analyse(code))
    return info


def merge(a: Usage, b: Usage) -> Usage:
    """The usage of a variable that is used both as ``a`` and as ``b``."""
    if a is None or b is None:
        return None
    out = dict(a)
    for name, usage in b.items():
        out[name] = merge(out[name], usage) if name in out else usage
    return out


def float_bits(x: float) -> Hashable:
    """A float by its bits: ``0.0`` and ``-0.0`` differ, a NaN equals itself."""
    return x if x == x and x != 0.0 else struct.pack("<d", x)


def constant_key(value: Any) -> Hashable:
    """A code constant by type and bits, recursively (``1``, ``1.0`` and ``True`` differ)."""
    kind = type(value)
    if kind is float:
        return (float, float_bits(value))
    if kind is complex:
        return (complex, float_bits(value.real), float_bits(value.imag))
    if kind is tuple:
        return (tuple, *[constant_key(v) for v in value])
    if kind is frozenset:
        # In iteration order: two equal sets may iterate differently, and the order is visible.
        return (frozenset, *[constant_key(v) for v in value])
    if kind is slice:  # a constant from Python 3.14 on
        return (slice, *[constant_key(v) for v in (value.start, value.stop, value.step)])
    if kind is CodeType:
        return code_info(value).key
    return (kind, value)


def _analyse(code: CodeType) -> CodeInfo:
    instructions = list(dis.get_instructions(code))
    nested = [code_info(c) for c in code.co_consts if isinstance(c, CodeType)]
    uses = _Uses(code, instructions, nested)
    # Instructions rather than `co_code`: constants count by type and bits where they are loaded, so that
    # a docstring, which is a constant that nothing loads, does not count.
    body = tuple(
        (i.opcode, constant_key(i.argval)) if i.opcode in _CONST_OPS else (i.opcode, i.arg)
        for i in instructions
    )
    key = (
        CodeType,
        body,
        code.co_name,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        code.co_flags & ~_CO_HAS_DOCSTRING,
        code.co_exceptiontable,  # what stands inside `try` is nowhere else
    )
    free = code.co_freevars
    params: dict[int | str, Usage] = {}
    for position, name in enumerate(uses.param_names):
        params[name] = uses.params.get(name, _UNREAD)
        if position < code.co_argcount:
            params[position] = params[name]
    return CodeInfo(
        code=code,
        key=key,
        reads=uses.globals,
        frees=tuple(uses.free.get(name, _UNREAD) for name in free),
        params=params,
        writes=tuple(sorted(uses.writes)),
        imports=tuple(sorted(uses.imports)),
        introspects=uses.introspects,
    )


class _Uses:
    """Collects what one code object, with its nested code, reads and writes outside of itself."""

    def __init__(self, code: CodeType, instructions: list[dis.Instruction], nested: list[CodeInfo]):
        self.globals: dict[str, Usage] = {}
        self.free: dict[str, Usage] = {}
        self.params: dict[str, Usage] = {}
        self.writes: set[str] = set()
        self.imports: set[str] = set()
        self.introspects = any(
            i.argval in _INTROSPECTION and not _of_class(instructions, at)
            for at, i in enumerate(instructions)
            if i.opname in _ATTR_OPS
        )
        self._free_names = frozenset(code.co_freevars)
        self._cells = self._free_names.union(code.co_cellvars)
        count = code.co_argcount + code.co_kwonlyargcount
        self.param_names = code.co_varnames[:count]
        self._param_names = frozenset(self.param_names)
        for at, instruction in enumerate(instructions):
            self._visit(instructions, at, instruction)
        for info in nested:
            for name, usage in info.reads.items():
                self._add(self.globals, name, usage)
            self.writes.update(w for w in info.writes if w not in code.co_cellvars)
            self.imports.update(info.imports)
            self.introspects = self.introspects or info.introspects
            for name, usage in zip(info.code.co_freevars, info.frees, strict=True):
                if name in self._free_names:
                    self._add(self.free, name, usage)
                elif name in self._param_names:
                    self._add(self.params, name, usage)

    @staticmethod
    def _add(table: dict[str, Usage], name: str, usage: Usage) -> None:
        table[name] = merge(table[name], usage) if name in table else usage

    def _visit(self, instructions: list[dis.Instruction], at: int, i: dis.Instruction) -> None:
        op = i.opname
        if op in _GLOBAL_OPS:
            self._read(self.globals, i.argval, instructions, at)
        elif op in _FREE_OPS:
            if i.argval in self._free_names:
                self._read(self.free, i.argval, instructions, at)
            elif i.argval in self._param_names:
                self._read(self.params, i.argval, instructions, at)
        elif op.startswith(_LOCAL_OPS) or op == "STORE_FAST_LOAD_FAST":
            names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            loaded = names[1:] if op == "STORE_FAST_LOAD_FAST" else names
            if op == "STORE_FAST_LOAD_FAST":
                self._rebound(names[0])
            for position, name in enumerate(loaded):
                # Loading the cell of a variable only builds a closure: the nested code says what it reads.
                if name in self._param_names and name not in self._cells:
                    last = position == len(loaded) - 1
                    self._read(self.params, name, instructions, at if last else None)
        elif op in ("STORE_FAST", "DELETE_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_MAYBE_NULL"):
            for name in i.argval if isinstance(i.argval, tuple) else (i.argval,):
                self._rebound(name)
        elif op in _WRITE_GLOBAL_OPS:
            self.writes.add(i.argval)
        elif op in _WRITE_FREE_OPS:
            if i.argval in self._free_names:
                self.writes.add(i.argval)
            else:
                self._rebound(i.argval)
        elif op == "IMPORT_NAME":
            self._import(instructions, at, i.argval)

    def _import(self, instructions: list[dis.Instruction], at: int, module: str) -> None:
        names = instructions[at - 1]
        if names.opcode not in _CONST_OPS:
            self.imports.add("?")  # not what a compiler writes
        elif names.argval:
            self.imports.update(f"{module}:{name}" for name in names.argval)
        elif instructions[at + 1].opname == "IMPORT_FROM":  # import a.b as c
            self.imports.add(module)
        else:
            self.imports.add(module.partition(".")[0])

    def _rebound(self, name: str) -> None:
        # A parameter that is assigned to is no longer the argument: what is read from it says nothing.
        if name in self._param_names:
            self.params[name] = None

    def _read(
        self,
        table: dict[str, Usage],
        name: str,
        instructions: list[dis.Instruction],
        at: int | None,
    ) -> None:
        chain: list[str] = []
        if at is not None:
            for follow in _following(instructions, at):
                if follow.opname in _ATTR_OPS:
                    chain.append(follow.argval)
                    continue
                # Writes to a parameter are seen by comparing what is captured before and after a trace.
                if follow.opname in _WRITE_ATTR_OPS and table is not self.params:
                    self.writes.add(name)
                break
        usage: Usage = None
        for attribute in reversed(chain):
            usage = {attribute: usage}
        self._add(table, name, usage)


def _of_class(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether an attribute is read from ``something.__class__``: what a class says of itself counts."""
    before = instructions[at - 1]
    own = instructions[at].argval in ("__qualname__", "__module__")
    return own and before.opname in _ATTR_OPS and before.argval == "__class__"


def _following(instructions: list[dis.Instruction], at: int) -> Iterator[dis.Instruction]:
    """The instructions right after ``at``, as long as nothing else can jump there with another value."""
    for i in instructions[at + 1 :]:
        if i.is_jump_target:
            return
        if i.opname not in ("CACHE", "PRECALL"):
            yield i
