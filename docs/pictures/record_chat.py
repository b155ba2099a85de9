"""Records `fledge chat` with the bundled pair on a pseudo-terminal, as an animated picture: docs/pictures/chat.svg.

    python docs/pictures/record_chat.py

It types a question, lets the assistant answer it with the draft, switches the draft off, and asks again. The frames
of the picture are what the terminal showed, with the figures of this machine.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.terminal import TerminalOf  # noqa: E402

WIDTH, HEIGHT = 72, 26
FRAMES = 8  # at most, while an answer is written
HOLD, STEP = 3.0, 0.35  # seconds that a finished answer and another frame are shown
ASKED = "Please multiply 27 by 6."


def frame_of(terminal: TerminalOf) -> Text:
    """What is visible now, with its colours."""
    text, shown = Text(), terminal.screen
    for y in range(shown.lines):
        cells = [shown.buffer[y][x] for x in range(shown.columns)]
        while cells and cells[-1].data == " ":
            cells.pop()
        for fg, run in itertools.groupby(cells, lambda cell: cell.fg):
            colour = f"#{fg}" if re.fullmatch("[0-9a-f]{6}", fg) else None
            text.append("".join(cell.data for cell in run), Style(color=colour))
        text.append("\n")
    return text


def record() -> list[tuple[Text, float]]:
    """The frames, each with the seconds that it is shown."""
    frames: list[tuple[Text, float]] = []
    words = ["chat", "--target", "fledge/demo/target", "--draft", "fledge/demo/draft"]
    with TerminalOf(*words, width=WIDTH, height=HEIGHT) as terminal:

        def line() -> str:
            """The line of the cursor."""
            return terminal.screen.display[terminal.screen.cursor.y].strip()

        def send(text: str, seconds: float) -> None:
            """Types a text, and shows for some seconds what it leads to."""
            terminal.type(text)
            terminal.wait(lambda: line() == f"> {text}")
            frames.append((frame_of(terminal), 2 * STEP))
            terminal.type("\r")
            moments: list[Text] = []

            def done() -> bool:
                moments.append(frame_of(terminal))
                return line() == ">"

            terminal.wait(done)
            frames.extend((moment, STEP) for moment in moments[:-1][:: -(-len(moments) // FRAMES)])
            frames.append((frame_of(terminal), seconds))

        terminal.wait(lambda: line() == ">")
        frames.append((frame_of(terminal), 2 * STEP))
        send(ASKED, HOLD)
        send("/draft off", STEP)
        send("/reset", STEP)
        send(ASKED, HOLD)
        terminal.type("\x04")
        terminal.wait_for_end()
    return frames


def svg_of(frame: Text) -> str:
    """A frame as a picture, by rich."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(frame, end="", soft_wrap=True)
    return console.export_svg(title="fledge chat", theme=DIMMED_MONOKAI, unique_id="chat")


def animate(frames: list[tuple[Text, float]]) -> str:
    """One picture that shows the frames in turn, again and again. The first frame gives the window and the styles."""
    pictures = [svg_of(frame) for frame, _ in frames]
    matrix = re.compile(r'<g class="chat-matrix">(.*?)</g>', re.S)
    total, began, layers = sum(seconds for _, seconds in frames), 0.0, []
    for i, (picture, (_, seconds)) in enumerate(zip(pictures, frames, strict=True)):
        styles = dict(re.findall(r"\.(chat-r\d+) \{([^}]*)\}", picture))
        body = matrix.search(picture)[1]
        # each picture numbers its styles anew, so that they are written into its elements
        body = re.sub(r'class="(chat-r\d+)"', lambda m, styles=styles: f'style="{styles[m[1]].strip()}"', body)
        body = re.sub(r"<text [^>]*>\n</text>", "", body)
        body = re.sub(r' (clip-path|textLength)="[^"]*"', "", body)
        name = f"frame{i}"
        start, end = 100 * began / total, 100 * (began + seconds) / total
        before = f"0%, {start:.3f}% {{opacity: 0}} " if i else ""
        layers.append(
            f"<style>@keyframes {name} {{{before}{start + 0.001:.3f}%, {end:.3f}% {{opacity: 1}} "
            f"{min(end + 0.001, 100):.3f}%, 100% {{opacity: {int(i == len(frames) - 1)}}}}} "
            f'.{name} {{animation: {name} {total:.2f}s step-end infinite}}</style><g class="{name}">{body}</g>'
        )
        began += seconds
    window = matrix.sub(lambda m: f'<g class="chat-matrix">{"".join(layers)}</g>', pictures[0], count=1)
    return re.sub(r"@font-face \{.*?\}\n", "", window, flags=re.S)  # fonts of the reader, not of the network


if __name__ == "__main__":
    picture = animate(record())
    (HERE / "chat.svg").write_text(picture, encoding="utf-8")
    print(f"wrote {HERE / 'chat.svg'}, {len(picture.encode()) / 1024:.0f} KB")
