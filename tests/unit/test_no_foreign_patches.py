"""The house rule that only seams patches foreign code: no other file assigns to foreign modules or classes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import training_xpu

PACKAGE = Path(training_xpu.__file__).parent
# torch's own documented switches are settings, not patches.
# A program's streams are its own.
SETTINGS = (
    "sys.stdin",
    "sys.stdout",
    "sys.stderr",
    "torch.backends.",
    "torch._dynamo.config.",
    "torch._inductor.config.",
    "datasets.config.",
)


def foreign_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> full name of everything imported from outside the package and the standard library's reach."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {local: full for local, full in names.items() if full.partition(".")[0] != "training_xpu"}


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def patches_in(source: str) -> list[str]:
    tree = ast.parse(source)
    foreign = foreign_names(tree)
    found: list[str] = []

    def check(target: ast.AST, line: int) -> None:
        name = dotted(target)
        if name is None:
            return
        root, _, rest = name.partition(".")
        full = f"{foreign[root]}.{rest}" if root in foreign else ""
        if full and rest and not full.startswith(SETTINGS):
            found.append(f"line {line}: {full}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute):
                        check(part, node.lineno)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            check(node.target, node.lineno)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    check(target, node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            name = dotted(node.args[0]) if node.args else None
            if name is not None and name.partition(".")[0] in foreign:
                found.append(f"line {node.lineno}: setattr on {name}")
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(PACKAGE.rglob("*.py")) if "seams" not in p.relative_to(PACKAGE).parts],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_only_seams_patches_foreign_code(path: Path) -> None:
    assert patches_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compile = None",
        "import torch.nn as nn\nnn.Module.compile = None",
        "from torch.nn import Module\nModule.compile, x = 1, 2",
        "import torch\nsetattr(torch.nn.Module, 'compile', None)",
        "def f():\n    import deepspeed\n    del deepspeed.initialize",
        "import torch\ntorch.x: int = 3",
    ],
)
def test_the_check_finds_patches(source: str) -> None:
    assert len(patches_in(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.weight = None",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "from training_xpu import envs\nenvs.x = 1",
    ],
)
def test_the_check_leaves_objects_and_settings_alone(source: str) -> None:
    assert patches_in(source) == []
