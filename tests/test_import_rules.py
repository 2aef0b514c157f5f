"""Who may import whom.

Folders import those above them in tools/house.yaml, and no files import each other when they load:
tools.house computes both. Which libraries a package may use is listed in `RULES`. Two kinds of test
hold them: one reads every import statement, so that one inside a function or under `TYPE_CHECKING`
counts too; the other imports a package in a fresh process and listens for what that loads. Each
comes with a test that it can fail.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tools.house import LOAD, House, rules

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tpu_configs", "mesh_utils", "xla_dtensor")
HEAVY = ("torch", "torch_xla", "torchax", "jax", "jaxlib", "orbax")


@dataclass(frozen=True)
class Rule:
    """What the modules that match `modules` may import, besides the standard library.

    Names stand for themselves and everything below them. `on_use` is allowed inside functions only,
    `never` is refused although `allowed` would admit it.
    """

    modules: str
    allowed: tuple[str, ...]
    on_use: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


JAX_FILES = "xla_dtensor.runtimes.jax"
TORCH_XLA_FILES = "xla_dtensor.runtimes.torch_xla"
CLI_FILES = ("xla_dtensor.cli", "xla_dtensor.__main__")

BELOW_CORE = ("numpy", "mesh_utils")
CORE = (*BELOW_CORE, "xla_dtensor.core", "xla_dtensor.versions")
REPORT = (*CORE, "xla_dtensor.report")
RUNTIME = (*REPORT, "torch", "ml_dtypes", "xla_dtensor.runtimes")

CLIENTS = (
    *("accelerate", "lightning", "lightning_utilities", "peft", "spmd_types", "torchmetrics"),
    *("torchtitan", "transformers", "trl"),
)

# The first rule whose pattern matches a module's name holds for it.
RULES = (
    Rule("tpu_configs*", ()),
    Rule(
        "mesh_utils.jax_compat",
        ("numpy", "yaml", "tpu_configs", "mesh_utils"),
        on_use=("jax.experimental.mesh_utils",),
    ),
    Rule("mesh_utils.argument_types", ("mesh_utils.errors",), on_use=("typeguard",)),
    Rule("mesh_utils.launch.text", ("tpu_configs", "mesh_utils"), on_use=("jinja2", "yaml")),
    Rule("mesh_utils*", ("numpy", "yaml", "tpu_configs", "mesh_utils")),
    Rule("xla_dtensor.versions", ()),  # the doctor starts without any package
    Rule("xla_dtensor.core*", (*BELOW_CORE, "xla_dtensor.core")),
    Rule("xla_dtensor.report*", REPORT, on_use=("jinja2", "rich")),
    Rule(JAX_FILES, (*RUNTIME, "jax", "jaxlib", "torchax"), never=(TORCH_XLA_FILES,)),
    Rule(TORCH_XLA_FILES, (*RUNTIME, "torch_xla"), never=(JAX_FILES,)),
    # base.py, registry.py: a runtime is loaded by name.
    Rule("xla_dtensor.runtimes*", RUNTIME, never=(JAX_FILES, TORCH_XLA_FILES)),
    *(
        Rule(
            cli,
            (*BELOW_CORE, "yaml", "xla_dtensor"),
            on_use=("torch", "rich"),
            never=(JAX_FILES, TORCH_XLA_FILES),
        )
        for cli in CLI_FILES
    ),
    Rule(
        "xla_dtensor.hosts.checkpoint.orbax",  # loaded by name, when it is asked for
        (*BELOW_CORE, "orbax.checkpoint", "torch", "xla_dtensor"),
        never=(JAX_FILES, TORCH_XLA_FILES, *CLI_FILES),
    ),
    Rule(
        "xla_dtensor.integrations*",  # each imported by its user
        (*BELOW_CORE, *CLIENTS, "torch", "xla_dtensor"),
        never=(JAX_FILES, TORCH_XLA_FILES, *CLI_FILES),
    ),
    Rule(
        "xla_dtensor*",
        (*BELOW_CORE, "yaml", "torch", "xla_dtensor"),
        on_use=("fsspec", "huggingface_hub", "rich", "safetensors", "tqdm", "transformers"),
        never=(JAX_FILES, TORCH_XLA_FILES, *CLI_FILES),
    ),
)


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    target: str
    line: int
    in_function: bool
    by_name: bool = False


class ImportReader(ast.NodeVisitor):
    """Collects the imports of one module, `importlib.import_module("...")` included."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.package = module if is_package else module.rpartition(".")[0]
        self.depth = 0
        self.found: list[Import] = []

    def add(self, target: str, node: ast.stmt | ast.expr, by_name: bool = False) -> None:
        self.found.append(Import(target, node.lineno, self.depth > 0, by_name))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
        for alias in node.names:
            self.add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        name = node.func.id if isinstance(node.func, ast.Name) else name
        first = node.args[0] if node.args else None
        if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
            self.add(str(first.value), node, by_name=True)
        self.generic_visit(node)

    def visit_function(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_function


def matches(target: str, pattern: str) -> bool:
    """True when `target` is what the pattern names, or lies below it."""
    return fnmatchcase(target, pattern) or fnmatchcase(target, f"{pattern}.*")


def is_allowed(found: Import, rule: Rule) -> bool:
    top = found.target.partition(".")[0]
    if top in sys.stdlib_module_names or (found.by_name and top in PACKAGES):
        return True
    if any(matches(found.target, pattern) for pattern in rule.never):
        return False
    allowed = rule.allowed + (rule.on_use if found.in_function else ())
    return any(matches(found.target, pattern) for pattern in allowed)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(root: Path) -> Iterator[str]:
    """One line for each import under `root` that its module's rule does not admit."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        module = module_name(path, root)
        rule = next(rule for rule in RULES if matches(module, rule.modules))
        reader = ImportReader(module, is_package=path.name == "__init__.py")
        reader.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        for found in reader.found:
            if not is_allowed(found, rule):
                where = f"{path.relative_to(root)}:{found.line}"
                yield f"{where} imports {found.target}; {rule.modules} may not"


def test_layers() -> None:
    assert list(violations(ROOT)) == []


def test_folders() -> None:
    house = House(*rules(), ROOT)
    assert [str(one) for one in house.down()] == []
    assert house.needless() == []
    assert house.circles(LOAD) == []


def test_rules_see_the_project() -> None:
    modules = [module_name(p, ROOT) for name in PACKAGES for p in (ROOT / name).rglob("*.py")]
    assert {"mesh_utils", "xla_dtensor.core", "tpu_configs"} <= set(modules)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tpu_configs/__init__.py", "import numpy"),
        ("mesh_utils/mesh.py", "import torch"),
        ("mesh_utils/mesh.py", "import xla_dtensor"),
        ("mesh_utils/mesh.py", "def search():\n    import jax.experimental.mesh_utils"),
        ("mesh_utils/jax_compat.py", "from jax.experimental import mesh_utils"),
        ("mesh_utils/network.py", "def search():\n    from jax.experimental import mesh_utils"),
        ("mesh_utils/jax_compat.py", "def search():\n    import jax.numpy"),
        ("xla_dtensor/core/layout.py", "def late():\n    from torch import Tensor"),
        ("xla_dtensor/core/layout.py", "import yaml"),
        ("xla_dtensor/core/layout.py", "if TYPE_CHECKING:\n    import jax"),
        ("xla_dtensor/core/layout.py", "from ..dtensor import DTensor"),
        ("xla_dtensor/core/layout.py", "from xla_dtensor import DTensor"),
        ("xla_dtensor/core/__init__.py", "from .. import api"),
        ("xla_dtensor/report/reading.py", "import torch"),
        ("xla_dtensor/report/reading.py", "from xla_dtensor.runtimes import base"),
        ("xla_dtensor/runtimes/base.py", "import jax"),
        ("xla_dtensor/runtimes/base.py", "importlib.import_module('torch_xla')"),
        ("xla_dtensor/runtimes/registry.py", "from xla_dtensor.runtimes.jax import runtime"),
        ("xla_dtensor/runtimes/registry.py", "from .torch_xla.runtime import TorchXlaRuntime"),
        ("xla_dtensor/runtimes/torch_xla/runtime.py", "import jax"),
        ("xla_dtensor/runtimes/torch_xla/runtime.py", "def late():\n    import torchax"),
        ("xla_dtensor/runtimes/jax/runtime.py", "import torch_xla.runtime as xr"),
        ("xla_dtensor/runtimes/jax/lower/matmul.py", "__import__('torch_xla')"),
        ("xla_dtensor/runtimes/jax/runtime.py", "from xla_dtensor.dtensor.dtensor import DTensor"),
        ("xla_dtensor/dtensor/dtensor.py", "import jax"),
        (
            "xla_dtensor/dtensor/dtensor.py",
            "from xla_dtensor.runtimes.jax.runtime import JaxRuntime",
        ),
        ("xla_dtensor/dtensor/dtensor.py", "from xla_dtensor import cli"),
        ("xla_dtensor/dtensor/dtensor.py", "import rich"),
        ("xla_dtensor/hosts/checkpoint/restore.py", "import orbax.checkpoint"),
        ("xla_dtensor/hosts/checkpoint/orbax.py", "import jax"),
        ("xla_dtensor/cli/subcommand.py", "import torch"),
    ],
)
def test_layers_can_fail(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert len(list(violations(tmp_path))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "mesh_utils/jax_compat.py",
            "def found():\n    from jax.experimental import mesh_utils",
        ),
        ("xla_dtensor/core/layout.py", "import functools\nfrom mesh_utils import Mesh"),
        ("xla_dtensor/core/__init__.py", "from .layout import Layout"),
        ("xla_dtensor/runtimes/registry.py", "import_module('xla_dtensor.runtimes.jax.runtime')"),
        ("xla_dtensor/runtimes/jax/lower/matmul.py", "import jax.numpy as jnp, torch"),
        ("xla_dtensor/cli/subcommand.py", "def run():\n    import torch"),
        (
            "xla_dtensor/__init__.py",
            "if TYPE_CHECKING:\n    from xla_dtensor.dtensor.api import ones",
        ),
    ],
)
def test_layers_admit(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert list(violations(tmp_path)) == []


# The listener stands first among the finders, so that it hears of each package that is looked for,
# also where that package is not installed.
LISTEN = """
import importlib, json, sys
heavy, asked = sys.argv[2].split(","), []

class Listener:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            asked.append(name)

sys.meta_path.insert(0, Listener())
importlib.import_module(sys.argv[1])
print(json.dumps(asked))
"""


def heavy_imports(module: str, folder: Path) -> list[str]:
    """The heavy packages that a fresh process looks for when it imports `module`."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", LISTEN, module, ",".join(HEAVY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "module", ["tpu_configs", "mesh_utils", "xla_dtensor.core", "xla_dtensor.report", "xla_dtensor"]
)
def test_import_is_light(module: str, tmp_path: Path) -> None:
    assert heavy_imports(module, tmp_path) == []


def test_orbax_is_loaded_when_asked_for(tmp_path: Path) -> None:
    loaded = heavy_imports("xla_dtensor.checkpoint", tmp_path)
    assert not [name for name in loaded if name.startswith(("orbax", "jax"))]


@pytest.mark.parametrize("heavy", HEAVY)
def test_import_is_light_can_fail(heavy: str, tmp_path: Path) -> None:
    (tmp_path / f"{heavy}.py").write_text("")
    (tmp_path / "offender.py").write_text("import offender_inner")
    (tmp_path / "offender_inner.py").write_text(f"try:\n    import {heavy}\nexcept Exception: ...")
    assert heavy_imports("offender", tmp_path) == [heavy]
