"""Imports follow the order in CONTRIBUTING, and only the parts that need transformers import it."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fledge.methods import METHODS
from fledge.options import option_fields
from fledge.train.setup.options import TrainOptions
from support.chats import tiny_chats
from support.targets import tiny_target_directory

FLEDGE = Path(__file__).parents[1] / "fledge"
REACH: dict[str, Any] = runpy.run_path(str(FLEDGE.parent / "tools" / "reach.py"))
# No single change shows how much the whole grows: each budget may only get smaller, except for a new capability, whose
# commit gives the reason. Blank lines are not counted. The lines behind an entry are those of all modules that the
# entry imports, also inside functions.
BUDGETS = {
    "files": 182,
    "lines": 30_956,
    "statements": 23_447,
    "lines behind fledge train": 23_719,
    "lines behind fledge generate": 13_561,
    "lines behind the training loop": 6_192,
    "lines behind the engine": 9_891,
    "options of fledge train": 52,  # those of single methods not counted
    "circles of imports": 0,
    "class names that occur twice": 0,
}
ENTRIES = {
    "lines behind fledge train": "fledge.commands.train",
    "lines behind fledge generate": "fledge.commands.generate",
    "lines behind the training loop": "fledge.train.trainer",
    "lines behind the engine": "fledge.decode.engine",
}
# a part may import from its own group and from groups before it
GROUPS = (
    {"types", "config", "io", "methods", "options", "familiar"},
    {"ops"},
    {"drafts"},
    {"data", "targets"},
    {"states"},
    {"train", "decode", "engines"},
    {"measure"},
    {"check"},
    {"chat", "demo", "publish", "regenerate", "report"},
    {"commands"},
    {"cli", "__init__", "__main__"},
)
APART = {("train", "decode"), ("decode", "train"), ("data", "targets"), ("targets", "data")}
WITH_TRANSFORMERS = {"io", "targets", "decode", "data", "measure", "check", "cli", "commands"}


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


def graph() -> tuple[dict[str, Path], dict[str, set[str]]]:
    """The files of all modules, and the modules that each imports."""
    files = REACH["modules"](FLEDGE)
    return files, {name: REACH["imports"](name, path, files) for name, path in files.items()}


def test_the_whole_stays_within_its_budgets() -> None:
    files, imported = graph()
    lines = {name: sum(bool(x.strip()) for x in path.read_text().split("\n")) for name, path in files.items()}
    nodes = [node for path in files.values() for node in ast.walk(ast.parse(path.read_text()))]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    of_methods = {name for method in METHODS.values() for name in method.options}
    found = {
        "files": len(files),
        "lines": sum(lines.values()),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "options of fledge train": len({f.name for f in option_fields(TrainOptions)} - of_methods),
        "circles of imports": len(REACH["circles"](imported)),
        "class names that occur twice": sum(n > 1 for n in classes.values()),
    }
    for name, entry in ENTRIES.items():
        found[name] = sum(lines[module] for module in REACH["reach"](entry, imported))
    assert found.keys() == BUDGETS.keys()
    exceeded = {name: (n, BUDGETS[name]) for name, n in found.items() if n > BUDGETS[name]}
    assert not exceeded, (
        "found and allowed; a budget that a good change exceeds is raised in that change, with the reason"
    )


@pytest.mark.parametrize("entry", ["train", "generate"])
def test_a_run_imports_no_more_than_its_import_statements_say(entry: str, tmp_path: Path) -> None:
    """No import hides in a string: the modules of a real run are those that the budgets count."""
    target = tiny_target_directory(tmp_path)
    words = {
        "train": ["--data", tiny_chats(tmp_path / "c.jsonl", 9), "--out", tmp_path / "run", "--steps", 1],
        "generate": ["--prompt", "a heron", "--max-new-tokens", 3],
    }[entry]
    code = (
        "import sys, json, atexit\n"
        "atexit.register(lambda: print(json.dumps([n for n in sys.modules if n.split('.')[0] == 'fledge'])))\n"
        "from fledge.cli import main\n"
        "main()"
    )
    command = [sys.executable, "-c", code, entry, "--target", target, "--device", "cpu", *words]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    loaded = json.loads(ran.stdout.splitlines()[-1])
    imported = graph()[1]
    # the command line itself imports the options of all commands
    allowed = REACH["reach"](f"fledge.commands.{entry}", imported) | REACH["reach"]("fledge.cli", imported)
    packages = {name.rpartition(".")[0] for name in allowed}
    others = set(loaded) - allowed - packages
    assert len(loaded) > 50 and not others, sorted(others)
