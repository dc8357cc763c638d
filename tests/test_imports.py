"""Who may import whom: the direction of docs/ARCHITECTURE.md, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv

PACKAGE = Path(tierkv.__file__).parent

#: Lowest first. A module imports from its own part, as ``SAME_LEVEL`` allows, and from lower levels.
LEVELS = (
    ("errors", "types"),
    ("config", "params", "keys", "registry", "events", "metrics", "weights"),
    ("layout",),
    ("host",),
    ("transfer", "tiers"),
    ("tiering",),
    ("connector", "sim", "export", "testing"),
    ("bench",),
    ("cli",),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
#: Modules of the first two levels are single files that may use their neighbours.
SAME_LEVEL = 1

#: Third parties that stay where they are needed. The demo (bench) drives an engine through vLLM's public ``LLM``.
CONFINED = {
    "vllm": ("connector", "bench"),
    "numba": ("layout", "host", "sim"),
    "torch": ("transfer", "connector", "bench"),
}
#: Imported inside functions only, so that the command line starts without them.
LAZY = {"vllm", "torch", "transformers", "matplotlib", "tqdm"}
LAZY_PARTS = ("bench", "cli")

#: What of tierkv.tiers all tiers share.
SHARED_BY_TIERS = ("base", "record", "headers", "paths", "known", "io", "lookups", "breaker", "throttle", "admin")

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, depth: int = 0) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of every import that runs; ``TYPE_CHECKING`` blocks do not."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from imports(other, depth)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, depth > 0
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:
                # ``from tierkv.tiers import record`` imports a module.
                full = f"{node.module}.{alias.name}"
                yield full if is_module(full) else node.module, depth > 0
        else:
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, depth + inner)


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return name.startswith("tierkv.") and (path.is_dir() or path.with_suffix(".py").is_file())


def part_of(module: str) -> str | None:
    """``tierkv.host.cache`` → ``host``; None for the package itself, which imports nothing."""
    return module.split(".")[1] if "." in module else None


def violations(module: str, source: str) -> list[str]:
    part = part_of(module)
    found = []
    for imported, lazy in imports(ast.parse(source)):
        top = imported.split(".")[0]
        if top in CONFINED and part not in CONFINED[top]:
            found.append(f"{module} imports {top}, which belongs in {', '.join(CONFINED[top])}")
        if top in LAZY and part in LAZY_PARTS and not lazy:
            found.append(f"{module} imports {top} at its top; import it inside a function")
        if top != "tierkv" or imported == "tierkv":
            continue
        other = part_of(imported)
        if part is None:
            found.append(f"{module} imports {imported}; the package itself imports nothing")
        elif other not in LEVEL:
            found.append(f"{module} imports {imported}, which has no place in LEVELS")
        elif LEVEL[other] > LEVEL[part]:
            found.append(f"{module} imports {imported}, which stands above it")
        elif LEVEL[other] == LEVEL[part] > SAME_LEVEL and other != part:
            found.append(f"{module} imports {imported}, its neighbour")
        elif part == other == "tiers" and crosses_tiers(module, imported):
            found.append(f"{module} imports {imported}, of another tier")
    return found


def crosses_tiers(module: str, imported: str) -> bool:
    mine, theirs = (name.split(".")[2:3] for name in (module, imported))
    return bool(theirs) and mine != theirs and theirs[0] not in SHARED_BY_TIERS


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(p) for p in SOURCES])
def test_imports_point_down(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(p) for p in SOURCES])
def test_every_module_has_a_place(path: Path) -> None:
    part = part_of(module_name(path))
    assert part is None or part in LEVEL


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tierkv.tiering.manager", "import vllm"),
        ("tierkv.tiering.manager", "def f():\n    from vllm import LLM"),
        ("tierkv.tiers.fs", "import numba"),
        ("tierkv.host.cache", "import torch"),
        ("tierkv.host.cache", "from tierkv.tiers import base"),
        ("tierkv.tiers.fs.tier", "from tierkv.tiers.memory import MemoryTier"),
        ("tierkv.layout.spec", "from tierkv.host.cache import HostCache"),
        ("tierkv.errors", "from tierkv.config import parse"),
        ("tierkv.testing.faults", "from tierkv.connector.plans import plan"),
        ("tierkv.bench.demo.engine", "from vllm import LLM"),
        ("tierkv", "from tierkv.config import parse"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tierkv.tiering.manager", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm"),
        ("tierkv.tiers.fs.tier", "from tierkv.tiers import record\nfrom tierkv.tiers.fs.paths import path"),
        ("tierkv.tiers.fs.tier", "from tierkv.tiers.io import IoPool"),
        ("tierkv.bench.demo.engine", "def f():\n    from vllm import LLM"),
        ("tierkv.keys", "from tierkv.registry import load"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(module, source) == []
