"""The list of mutations in README.md is complete, and names what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
LISTS = {"MUTATIONS", "REPLACED", "ALTERED", "DRAFTING", "BROKEN"}


def listed() -> dict[str, set[str]]:
    """The mutations that the README says each file has."""
    text = (TESTS / "README.md").read_text()
    sections = re.split(r"^### .*`(test_\w+\.py)`$", text.partition("\n### What is checked")[0], flags=re.M)[1:]
    return {f: set(re.findall(r"^\| `(\w+)` \|", rows, re.M)) for f, rows in zip(*[iter(sections)] * 2, strict=True)}


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_every_mutation_is_listed() -> None:
    """And every name that is listed is a function, a class or a test of that file."""
    found = listed()
    for file in sorted(TESTS.glob("test_*.py")):
        body = ast.parse(file.read_text()).body
        lists = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign) and LISTS & names(node)]
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        mutations = set().union(*map(names, lists)) & {n.name for n in body if isinstance(n, ast.FunctionDef)}
        assert mutations <= found.get(file.name, set()), file.name
        known = defined | {re.sub(r"^test_|_is_noticed$", "", name) for name in defined}
        assert found.get(file.name, set()) <= known, file.name
    assert len(found) == 8 and all(found.values())


def test_every_test_that_is_named_is_there() -> None:
    for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", (TESTS / "README.md").read_text()):
        assert f"def {test}(" in (TESTS / file).read_text()
