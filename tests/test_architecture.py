"""Imports follow the order in CONTRIBUTING, and only the parts that need transformers import it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FLEDGE = Path(__file__).parents[1] / "fledge"
# a part may import from its own group and from groups before it
GROUPS = (
    {"methods", "fields", "types", "config", "files", "formats", "hub"}
    | {"address", "http", "json_text", "progress", "signals"},
    {"kernels"},
    {"models"},
    {"data", "targets"},
    {"features"},
    {"train", "decode", "engines"},
    {"eval", "demo"},
    {"report"},
    {"jobs"},
    {"cli", "__init__", "__main__"},
)
APART = {("train", "decode"), ("decode", "train"), ("data", "targets"), ("targets", "data")}
WITH_TRANSFORMERS = {"targets", "decode", "data", "eval", "cli", "jobs"}


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, its part of fledge, imported module) of every import, including imports inside functions."""
    for file in sorted(FLEDGE.rglob("*.py")):
        part = file.relative_to(FLEDGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from ((str(file.relative_to(FLEDGE)), part, name) for name in names)


def rank(part: str) -> int:
    return next(i for i, group in enumerate(GROUPS) if part in group)


def test_every_part_is_in_a_group() -> None:
    parts = {part for _, part, _ in imports()} | {
        p.name.removesuffix(".py") for p in FLEDGE.iterdir() if p.name[0] != "." and p.name != "py.typed"
    }
    assert parts - {"__pycache__", "recipes"} <= set().union(*GROUPS)


def test_imports_follow_the_order_of_groups() -> None:
    for file, part, name in imports():
        if name.startswith("fledge.") and part != "__init__":
            imported = name.split(".")[1]
            assert rank(imported) <= rank(part), f"{file} imports {name}"
            assert (part, imported) not in APART, f"{file} imports {name}"


@pytest.mark.parametrize("library", ["transformers"])
def test_only_listed_parts_import_the_library(library: str) -> None:
    found = {part for _, part, name in imports() if name.split(".")[0] == library}
    assert found and found <= WITH_TRANSFORMERS
