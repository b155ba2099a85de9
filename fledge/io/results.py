"""Results of the commands on standard output: lines, tables, and answers whose tokens are tinted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table

from fledge.io.display import escaped, format_message, print_line

MIN_LABEL_WIDTH = 16  # terminal columns that a table's row labels get at least

# colours of drafted tokens by depth, with the last colour for all greater depths; every colour has a contrast of at
# least 3.5 with black and with white
TINTS = ("#00875f", "#0087af", "#5f5fff", "#af5fd7")
STYLES = (Style(), *(Style(color=tint) for tint in TINTS))

Pieces = list[tuple[str, int]]  # pieces of a text, each with a proposer (fledge.decode.request)


class _ResultConsole(Console):
    """A console on standard output that raises BrokenPipeError, like `print`, when the pipe is closed."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        raise  # re-raises the BrokenPipeError that rich is handling


class ResultPrinter:
    """Prints a job's results, lines and tables, to standard output. On a terminal, lines are broken at spaces."""

    def __init__(self) -> None:
        self.console = _ResultConsole()

    def print(self, line: str) -> None:
        print_line(self.console, line)

    def amounts(self, heading: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints labelled amounts: as a table of two columns on a terminal, else a line for each amount."""
        if self.console.is_terminal:
            labels, amounts = zip(*rows, strict=True)
            self.table({heading: labels, "": amounts}, optional=())
            return
        for label, amount in rows:
            self.print(f"{heading}: {label}: {amount}")

    def table(self, columns: Mapping[str, Sequence[str]], optional: Sequence[str]) -> list[str]:
        """Prints a table of columns by heading. The first column holds the row labels and wraps if needed.

        If the table is still too wide, columns in `optional` are omitted, in the order of `optional`, until the table
        fits. Returns the headings of the omitted columns.
        """
        shown = {heading: [format_message(cell) for cell in cells] for heading, cells in columns.items()}
        omitted: list[str] = []
        while len(omitted) < len(optional) and _min_width(shown) > self.console.width:
            omitted.append(optional[len(omitted)])
            del shown[omitted[-1]]
        first, *others = shown
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        grid.add_column(first, overflow="fold")
        for heading in others:
            grid.add_column(heading, justify="right", no_wrap=True)
        for row in zip(*shown.values(), strict=True):
            grid.add_row(*row)
        self.console.print(grid)
        return omitted


def _min_width(columns: Mapping[str, Sequence[str]]) -> int:
    """The width of a table in terminal columns. The padding is 2 for each column of the table, plus 1."""
    labels, *others = (max(map(cell_len, (heading, *cells))) for heading, cells in columns.items())
    return min(labels, MIN_LABEL_WIDTH) + sum(others) + 2 * len(columns) + 1


def write_tinted(console: Console, pieces: Pieces) -> None:
    """Writes pieces of an answer in the colours of the proposers. Control characters are escaped."""
    for text, proposer in pieces:
        style = STYLES[min(proposer, len(TINTS))]
        console.out(escaped(text, keep="\n\t"), style=style, highlight=False, end="")
    console.file.flush()


@contextmanager
def held_warnings() -> Iterator[None]:
    """Context manager: shows the block's warnings after the block, so that no warning interrupts a line of text."""
    held: list[tuple[Any, Any]] = []
    show = warnings.showwarning
    warnings.showwarning = lambda *given, **more: held.append((given, more))
    try:
        yield
    finally:
        warnings.showwarning = show
        for given, more in held:
            show(*given, **more)
