"""The blocks of code in the documentation, and the `fledge` commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/README.md", *DOCS.glob("*.md")])
FENCE = re.compile(r"(<!-- run -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of code: its page, first line, language and text; `runs` if it is marked `<!-- run -->`."""

    page: str
    line: int
    language: str
    text: str
    runs: bool


def _blocks_of(page: Path) -> list[Block]:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    return [Block(name, text.count("\n", 0, m.start()) + 1, m[2], m[3], m[1] is not None) for m in FENCE.finditer(text)]


def lines_of(block: Block) -> list[list[str]]:
    """The words of each line of a shell block that runs a `fledge` command, as `fledge` or as `.. -m fledge`, without
    those that need variables of a script."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a command in quotes over several lines
            continue
        if words[:1] == ["fledge"] or "fledge" in words[_module(words) :][:1]:
            found.append(words)
    return [words for words in found if not any("$" in word or word == ".." for word in words)]


def commands_of(block: Block) -> list[list[str]]:
    """The arguments of each `fledge` command of a shell block, whatever starts it."""
    return [words[1 if words[0] == "fledge" else _module(words) + 1 :] for words in lines_of(block)]


def _module(words: list[str]) -> int:
    """The place of the module that Python or torchrun runs; the end if there is none."""
    return words.index("-m") + 1 if "-m" in words else len(words)


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]
SHELL = [b for b in BLOCKS if b.language in ("bash", "sh", "shell", "") and commands_of(b)]
