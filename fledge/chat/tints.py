"""The text of an answer on a terminal, with each token tinted by the token's proposer."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style
from rich.text import Text

from fledge.io.display import escaped

# colours of drafted tokens by depth, with the last colour for all greater depths; every colour has a contrast of at
# least 3.5 with black and with white
TINTS = ("#00875f", "#0087af", "#5f5fff", "#af5fd7")
STYLES = (Style(), *(Style(color=tint) for tint in TINTS))

Pieces = list[tuple[str, int]]  # pieces of a text, each with a proposer (fledge.decode.request)


def write_tinted(console: Console, pieces: Pieces) -> None:
    """Writes pieces of an answer in the colours of the proposers. Control characters are escaped."""
    for text, proposer in pieces:
        style = STYLES[min(proposer, len(TINTS))]
        console.out(escaped(text, keep="\n\t"), style=style, highlight=False, end="")
    console.file.flush()


def legend() -> Text:
    """A line that names the depth of each tint."""
    text = Text("Tokens that the draft proposed at depth")
    for depth, tint in enumerate(TINTS, 1):
        text.append(f" {depth}{'+' * (depth == len(TINTS))}", Style(color=tint))
    return text.append("; the others are the model's own.")
