"""Python source that is already on the machine: the standard library, and installed packages.

The demo needs text it may use offline on any machine, and files no model has seen to measure on. The split is by path,
so that every machine and every Python version agrees on it without a list to ship.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT_ONE_IN = 12
MIN_BYTES, MAX_BYTES = 1_000, 200_000

# encodings holds generated tables and dozens of copies of one boilerplate page; the rest is tests, or other trees.
SKIPPED_FOLDERS = {
    "test", "tests", "testing", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
SKIPPED_NAMES = re.compile(r"_sysconfigdata.*|test_.*|.*_test\.py|conftest\.py")
GENERATED = re.compile(r"auto-?generated|automatically generated|@generated|do not edit", re.IGNORECASE)
GENERATED_WITHIN = 2_000  # characters: the notice comes after the licence, before the code
LONG_LINE = 160  # characters
DATA_LINE = re.compile(r"[\s\[\](){},:+*-]*(?:b?[\"'].*[\"']|0x[0-9a-fA-F]+|[0-9.]+)[\s\[\](){},:]*(?:#.*)?")
TELLING_LINE = 30  # characters: a shorter line says little about where it was copied from


def held_out(path: str) -> bool:
    """Whether the file at this POSIX path, relative to its root ("json/decoder.py"), is kept for measuring."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()) % HELD_OUT_ONE_IN == 0


def stdlib_files() -> list[tuple[str, str]]:
    """The running interpreter's standard library as (path relative to its root, text), sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(source_files(root, root))


def package_files(names: Iterable[str]) -> list[tuple[str, str]]:
    """The installed ones of these import packages as (path relative to site-packages, text), sorted by path.

    Leaves out held-out paths, exact duplicates, and vendored copies of the standard library's held-out files.
    """
    roots = {Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")}
    found = sorted({file for root in roots for name in names for file in source_files(root, root / name)})
    unseen = {line for path, text in stdlib_files() if held_out(path) for line in telling_lines(text)}
    by_text = {text: path for path, text in found if not held_out(path) and not copied(text, unseen)}
    return sorted((path, text) for text, path in by_text.items())


def source_files(root: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The usable .py files under the folder, with paths relative to the root."""
    for file in folder.rglob("*.py"):
        path = file.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(path.parts) and not SKIPPED_NAMES.fullmatch(path.name):
            text = read_source(file)
            if text is not None:
                yield path.as_posix(), text


def read_source(file: Path) -> str | None:
    """The file's text, or None if it is too short, too long, not UTF-8, generated or mostly data."""
    if not file.is_file() or not MIN_BYTES <= file.stat().st_size <= MAX_BYTES:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if GENERATED.search(text[:GENERATED_WITHIN]) or mostly_data(text) else text


def mostly_data(text: str) -> bool:
    """Whether long lines, or lines that hold nothing but literals, make up a large part of the text."""
    lines = text.splitlines()
    long = sum(len(line) for line in lines if len(line) > LONG_LINE)
    literal = sum(len(line) for line in lines if DATA_LINE.fullmatch(line))
    return long > len(text) / 10 or literal > 0.6 * len(text)


def telling_lines(text: str) -> list[str]:
    """The text's longer lines, without the space around them."""
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= TELLING_LINE]


def copied(text: str, unseen: set[str]) -> bool:
    """Whether more than half of the text's longer lines are among the lines that no model may see."""
    lines = telling_lines(text)
    return 2 * sum(line in unseen for line in lines) > len(lines)
