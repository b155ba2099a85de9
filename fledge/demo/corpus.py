"""The demo's text: Python source on this machine, from the standard library and from installed packages.

It is available offline on every machine. Some files are held out to measure on, and no model is trained on them. The
split depends only on a file's path, so every machine and Python version makes the same split without a list of files.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT_ONE_IN = 12
MIN_BYTES, MAX_BYTES = 1_000, 200_000

# encodings has generated tables and dozens of near-identical files; the others are tests or trees of other packages.
SKIPPED_FOLDERS = {
    "test", "tests", "testing", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
SKIPPED_NAMES = re.compile(r"_sysconfigdata.*|test_.*|.*_test\.py|conftest\.py")
GENERATED = re.compile(r"auto-?generated|automatically generated|@generated|do not edit", re.IGNORECASE)
GENERATED_WITHIN = 2_000  # characters at the start of a file that are searched for a notice that it is generated
LONG_LINE = 160  # characters
DATA_LINE = re.compile(r"[\s\[\](){},:+*-]*(?:b?[\"'].*[\"']|0x[0-9a-fA-F]+|[0-9.]+)[\s\[\](){},:]*(?:#.*)?")
MIN_DISTINCTIVE_LENGTH = 30  # characters of a line; shorter lines occur in unrelated files too


def held_out(path: str) -> bool:
    """Whether the file at this POSIX path, relative to its root ("json/decoder.py"), is held out for measurements."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()) % HELD_OUT_ONE_IN == 0


def stdlib_files() -> list[tuple[str, str]]:
    """The running interpreter's standard library as (path relative to its root, text), sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(source_files(root, root))


def package_files(names: Iterable[str]) -> list[tuple[str, str]]:
    """The source of those of these packages that are installed, as (path relative to site-packages, text), sorted.

    Excludes held-out paths, exact duplicates, and vendored copies of held-out files of the standard library.
    """
    roots = {Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")}
    found = sorted({file for root in roots for name in names for file in source_files(root, root / name)})
    held_out_lines = {line for path, text in stdlib_files() if held_out(path) for line in distinctive_lines(text)}
    by_text = {text: path for path, text in found if not held_out(path) and not is_copy(text, held_out_lines)}
    return sorted((path, text) for text, path in by_text.items())


def source_files(root: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The suitable .py files in the folder as (path relative to the root, text)."""
    for file in folder.rglob("*.py"):
        path = file.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(path.parts) and not SKIPPED_NAMES.fullmatch(path.name):
            text = read_source(file)
            if text is not None:
                yield path.as_posix(), text


def read_source(file: Path) -> str | None:
    """The text of the file, or None if it is too short, too long, not UTF-8, generated or mostly data."""
    if not file.is_file() or not MIN_BYTES <= file.stat().st_size <= MAX_BYTES:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if GENERATED.search(text[:GENERATED_WITHIN]) or mostly_data(text) else text


def mostly_data(text: str) -> bool:
    """Whether a large part of the text is long lines, or lines that contain only literals."""
    lines = text.splitlines()
    long = sum(len(line) for line in lines if len(line) > LONG_LINE)
    literal = sum(len(line) for line in lines if DATA_LINE.fullmatch(line))
    return long > len(text) / 10 or literal > 0.6 * len(text)


def distinctive_lines(text: str) -> list[str]:
    """The longer lines of the text, stripped."""
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= MIN_DISTINCTIVE_LENGTH]


def is_copy(text: str, held_out_lines: set[str]) -> bool:
    """Whether more than half of the longer lines of the text occur in held-out files."""
    lines = distinctive_lines(text)
    return 2 * sum(line in held_out_lines for line in lines) > len(lines)
