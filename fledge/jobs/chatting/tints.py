"""Text of an answer on a terminal, tinted by who proposed each token."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style
from rich.text import Text

from fledge.jobs.display import escaped

# colours of drafted tokens by depth, the last one for all that are deeper; each has a contrast of at least 3.5 with
# black and with white
TINTS = ("#00875f", "#0087af", "#5f5fff", "#af5fd7")
THINK, END_THINK = "<think>", "</think>"

Pieces = list[tuple[str, int]]  # of a text, each with its proposer (fledge.decode.proposers)


class TintedText:
    """Writes an answer to a terminal. What the model writes between <think> and </think> is dimmed; with `thinking`,
    the answer begins within such a block."""

    def __init__(self, console: Console, thinking: bool = False):
        self._console, self._thinking = console, thinking
        self._styles = [Style(), *(Style(color=tint) for tint in TINTS)]

    def write(self, pieces: Pieces) -> None:
        for text, proposer in pieces:
            self._thinking = self._thinking or THINK in text
            style = self._styles[min(proposer, len(TINTS))]
            self._console.out(
                escaped(text, keep="\n\t"), style=style + Style(dim=True) if self._thinking else style, highlight=False,
                end="",
            )  # fmt: skip
            self._thinking = self._thinking and END_THINK not in text
        self._console.file.flush()


def legend() -> Text:
    """A line that names the depth of each tint."""
    text = Text("Tokens that the draft proposed at depth")
    for depth, tint in enumerate(TINTS, 1):
        text.append(f" {depth}{'+' * (depth == len(TINTS))}", Style(color=tint))
    return text.append("; the others are the model's own.")
