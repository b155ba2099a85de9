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


def commands_of(block: Block) -> list[list[str]]:
    """The arguments of each `fledge` command of a shell block, whether it starts as `fledge` or as `.. -m fledge`."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a command in quotes over several lines
            continue
        if words[:1] == ["fledge"]:
            found.append(words[1:])
        elif "-m" in words and words[words.index("-m") + 1 :][:1] == ["fledge"]:
            found.append(words[words.index("-m") + 2 :])
    return [c for c in found if not any("$" in word or word == ".." for word in c)]


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]
SHELL = [b for b in BLOCKS if b.language in ("bash", "sh", "shell", "") and commands_of(b)]
