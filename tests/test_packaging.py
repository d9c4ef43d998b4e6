"""What is shipped, what an import costs, and which way imports flow."""

import ast
import pathlib
import subprocess
import sys

import pytest

import loopjit

PACKAGE = pathlib.Path(loopjit.__file__).parent
ROOT = PACKAGE.parent


def run_python(*args):
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )


# ---------------------------------------------------------------------------------------------
# Importing loopjit is cheap

HEAVY = ("chex", "IPython", "equinox", "tqdm")


def imported_by(statement):
    """Those of HEAVY that a fresh Python holds after ``statement``."""
    code = f"import sys\n{statement}\nprint(*(m for m in {HEAVY} if m in sys.modules))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_pulls_in_nothing_heavy():
    assert imported_by("import loopjit") == []


@pytest.mark.parametrize("module", ["chex", "IPython"])
def test_the_import_test_can_fail(module):
    assert module in imported_by(f"import loopjit, {module}")


# ---------------------------------------------------------------------------------------------
# What is shipped


def test_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_main_program_runs():
    done = run_python("-m", "loopjit", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("while_loop", "fori_loop", "scan", "loop_jit"):
        assert name in done.stdout


def test_main_program_fails_where_loopjit_compiles_again():
    pretend = "import jax, loopjit; loopjit.lax, loopjit.loop_jit = jax.lax, jax.jit"
    done = run_python(
        "-c", f"{pretend}\nfrom loopjit.__main__ import main\nexit(main(['--quick']))"
    )
    assert done.returncode == 1
    assert "compiled again" in done.stderr


# ---------------------------------------------------------------------------------------------
# Imports flow downwards

LAYERS = [
    {"__main__"},
    {"__init__", "testing", "ipython", "reports"},
    {"transform", "lax", "install"},
    {"engine", "options"},
    {"statics", "signature", "programs", "staging", "store"},
    {"memo"},
    {"errors", "compat"},
]
LEAVES = {"testing", "ipython", "reports"}  # they import the engine, never the other way round
PRIVATE = ("jax._src", "jax.extend", "jax.interpreters")  # for compat.py alone
HEIGHT = {name: -depth for depth, layer in enumerate(LAYERS) for name in layer}


def place(module):
    """Of ``loopjit.programs.intern`` its entry in LAYERS, ``programs``."""
    return (module.split(".") + ["__init__"])[1]


def mentioned_modules(tree, module, is_package):
    """(line, dotted name) of what is imported, or reached as an attribute of jax."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                parents = module.split(".")
                parents = parents[: len(parents) - level + is_package] if level else []
                source = ".".join(parents + ([source] if source else []))
                yield from ((node.lineno, f"{source}.{name.name}") for name in names)
            case ast.Attribute():
                if (dotted := ast.unparse(node)).startswith("jax."):
                    yield node.lineno, dotted
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def is_within(name, module):
    return name == module or name.startswith(module + ".")


def broken_rules(path, source, module):
    """'file:line: what is wrong' for each line that breaks a rule."""
    here = place(module)
    if here not in HEIGHT:
        yield f"{path}:1: {here} has no place in LAYERS (tests/test_packaging.py)"
        return
    is_package = path.name == "__init__.py"
    for line, name in mentioned_modules(ast.parse(source), module, is_package):
        if here != "compat" and any(is_within(name, private) for private in PRIVATE):
            yield f"{path}:{line}: {name}: only compat.py may name private JAX"
        if not is_within(name, "loopjit"):
            continue
        there = place(name)
        if there not in HEIGHT:  # `from loopjit import loop_jit`: a name from the front door
            there = "__init__"
        if there == here:
            continue
        if there in LEAVES and here not in LEAVES and here not in ("__init__", "__main__"):
            yield f"{path}:{line}: {here} imports {there}, a leaf: emit an event instead"
        elif HEIGHT[there] > HEIGHT[here]:
            yield f"{path}:{line}: {here} imports {there}, which stands above it"


def test_imports_flow_downwards():
    broken = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        broken += broken_rules(path.relative_to(ROOT), path.read_text(encoding="utf-8"), module)
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("loopjit.signature.values", "from loopjit import transform", "stands above"),
        ("loopjit.signature.values", "from .. import transform", "stands above"),
        ("loopjit.signature.values", "def f():\n    from ..lax import scan", "values.py:2"),
        ("loopjit.programs", "from loopjit import loop_jit", "imports __init__"),
        ("loopjit.errors", "import loopjit.programs.memo", "imports programs"),
        ("loopjit.transform", "from loopjit.reports import html", "a leaf"),
        ("loopjit.lax", "from jax._src import core", "private JAX"),
        ("loopjit.lax", "from jax.extend.core import primitives", "private JAX"),
        ("loopjit.lax", "import jax\njax.interpreters.mlir", "lax.py:2"),
        ("loopjit.lax", "import importlib\nimportlib.import_module('jax._src.core')", "private"),
        ("loopjit.elsewhere", "", "no place"),
    ],
)
def test_the_flow_test_can_fail(module, source, complaint):
    path = pathlib.Path(module.replace(".", "/") + ".py")
    assert any(complaint in line for line in broken_rules(path, source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("loopjit.transform", "from .signature import functions\nfrom . import compat"),
        ("loopjit.transform", "from loopjit import lax, errors"),
        ("loopjit.signature.values", "from ..errors import OpaqueError\nfrom . import guards"),
        ("loopjit.signature.values", "import jax\njax.lax.scan\nfrom jax import numpy"),
        ("loopjit.compat", "from jax._src import core"),
        ("loopjit.reports.html", "from ..programs import memo"),
    ],
)
def test_the_flow_test_lets_pass(module, source):
    path = pathlib.Path(module.replace(".", "/") + ".py")
    assert list(broken_rules(path, source, module)) == []
