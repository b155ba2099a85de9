"""README.md lists every mutation of the tests, and names no test or mutation that does not exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
LISTS = {"MUTATIONS", "REPLACED", "ALTERED", "DRAFTING", "BROKEN"}


def listed() -> dict[str, dict[str, str]]:
    """For each file, the mutations in the README's table and the function that each replaces."""
    text = (TESTS / "README.md").read_text()
    sections = re.split(r"^### .*`(test_\w+\.py)`$", text.partition("\n### What is checked")[0], flags=re.M)[1:]
    pairs = zip(sections[::2], sections[1::2], strict=True)
    return {file: dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", rows, re.M)) for file, rows in pairs}


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_every_mutation_is_listed() -> None:
    """The README lists each mutation with the function that it replaces, and lists only functions, classes and tests of
    that file."""
    found = listed()
    assert len(found) == 9 and all(found.values())
    for file in sorted(TESTS.glob("test_*.py")):
        text, rows = file.read_text(), found.get(file.name, {})
        body = ast.parse(text).body
        functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        lists = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign) and LISTS & names(node)]
        mutations = set().union(*map(names, lists)) & functions
        assert mutations <= rows.keys(), file.name
        for mutation in mutations:
            for replaced in re.findall(r"(\w+)`", rows[mutation]):
                assert f'"{replaced}", {mutation}' in text, (file.name, mutation, replaced)
        classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
        tests = {re.sub(r"^test_|_is_noticed$", "", name) for name in functions}
        assert rows.keys() <= functions | classes | tests, file.name


def test_every_test_that_the_readme_names_exists() -> None:
    for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", (TESTS / "README.md").read_text()):
        assert f"def {test}(" in (TESTS / file).read_text()
