"""Terminal output of the commands on standard error: messages and progress; and how texts are shown.

Text from files and models is escaped, so that no terminal interprets control characters.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

KEPT_START, KEPT_END = 1400, 600  # printed characters at the start and at the end of a longer message
LINE_INTERVAL = 20  # seconds between two progress lines, where standard error is not a terminal
SPEED_WINDOW = 600  # seconds over which the speed is averaged to estimate the remaining time
MIN_BAR_WIDTH = 80  # a narrower terminal (in columns) shows no bar, only the counts
MIN_SPEED_WIDTH = 50  # a narrower terminal (in columns) shows no speed

# control characters, line separators, lone surrogates, and characters that change the direction of text
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# a shell command at the end of a message: after a colon, an indentation or a prompt
_COMMAND = re.compile(r"(?:(?<=: )|(?<=^\$ )|(?<=^  ))(?:fledge|vllm|torchrun|\S*python[\d.]*) .*$")


def escaped(text: str, keep: str = "") -> str:
    """`text` with Python escape sequences (`\\x1b`) for all characters that a terminal could interpret, except those
    in `keep`."""
    return _UNSAFE.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


def format_message(text: object) -> str:
    """`text` as one escaped line. Only the start and the end of a long text are kept."""
    text = str(text)
    omitted = len(text) - KEPT_START - KEPT_END
    if omitted > 0:
        text = f"{text[:KEPT_START]} [... {omitted:,} characters ...] {text[-KEPT_END:]}"
    return escaped(text)


def fit(text: str, width: int) -> str:
    """`text` in lines of at most `width` terminal columns, broken at spaces. Words longer than a line, such as paths,
    and a command at the end of the message stay unbroken for copying; the terminal wraps long pieces."""
    command = _COMMAND.search(text)
    words = [*text[: command.start() - 1].split(" "), command[0]] if command else text.split(" ")
    lines = [words[0]]
    for word in words[1:]:
        if cell_len(lines[-1]) + 1 + cell_len(word) <= width or not lines[-1].strip():
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(line.rstrip() for line in lines)


def fit_stream(text: str, stream: TextIO) -> str:
    """`text`, broken by `fit` to the stream's width if the stream is a terminal."""
    console = Console(file=stream)
    return fit(text, console.width) if console.is_terminal else text


def print_error(error: object) -> None:
    """Prints an error message to standard error. Does nothing if standard error is closed."""
    stream = FaultTolerantStream(sys.stderr)
    print(fit_stream(f"fledge: {format_message(error)}", stream), file=stream, flush=True)


def print_line(console: Console, line: str) -> None:
    """Prints a line, escaped. On a terminal, the line is broken at spaces."""
    text = format_message(line)
    console.print(fit(text, console.width) if console.is_terminal else text, soft_wrap=True)


def redirect_to_devnull(stream: TextIO) -> None:
    """Discards everything written to a stream from now on, including what Python has buffered and flushes at exit."""
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), stream.fileno())


class FaultTolerantStream:
    """An output stream whose reader may close the stream (a closed pipe, a terminal that hung up).

    After the first failed write, `closed_by_reader` is True and further output is discarded.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.closed_by_reader = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._discard()

    def _discard(self) -> None:
        self.closed_by_reader = True
        redirect_to_devnull(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ProgressDisplay:
    """Messages and progress bars on standard error while a job runs. With `quiet`, nothing is printed."""

    def __init__(self, quiet: bool = False):
        self._stream = FaultTolerantStream(sys.stderr)
        self.console = Console(file=self._stream, stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)

    @property
    def stderr_closed(self) -> bool:
        """Whether the reader of standard error has closed the stream."""
        return self._stream.closed_by_reader

    def say(self, line: str) -> None:
        """Prints a message. On a terminal, lines break at spaces, but not within a command or path, for copying."""
        print_line(self.console, line)

    @contextmanager
    def count(
        self, label: str, total: int | None, done: int = 0, unit: str | None = None, passing: bool = False
    ) -> Iterator[Callable[..., None]]:
        """Context manager: shows a progress bar of `total` items (None: unknown), of which `done` are finished already.
        Yields a function that adds n finished items (default: 1). With `unit`, the name of the items, the bar also
        shows the finished items per second or minute. With `passing`, the bar disappears from a terminal at the end,
        and elsewhere lines are printed only if the block takes LINE_INTERVAL or longer."""
        bar = ProgressBar(self, label, total, done, passing)

        def advance(n: int = 1) -> None:
            finished = int(bar.task.completed) + n
            rate = _rate((finished - done) / (bar.task.elapsed or 1), unit) if unit else ""
            bar.update(finished, rate=rate)

        try:
            yield advance
        finally:
            bar.close()


def _rate(per_second: float, unit: str) -> str:
    """A speed as text, per minute below one item per second."""
    if per_second < 1:
        return f"{60 * per_second:.1f} {unit}/min"
    return f"{per_second:,.{1 if per_second < 10 else 0}f} {unit}/s"


class ProgressBar:
    """Counts, elapsed time and estimated remaining time: a bar on a terminal, otherwise a line at most every
    LINE_INTERVAL seconds and one at the end."""

    def __init__(self, display: ProgressDisplay, label: str, total: int | None, done: int = 0, passing: bool = False):
        self.say, self.label, self.note = display.say, format_message(label), ""
        self.printed = self.first = done
        self.passing = passing
        self.prints_lines = not display.console.is_interactive
        wide = display.console.width >= MIN_BAR_WIDTH

        def fixed(kind: type[ProgressColumn]) -> ProgressColumn:
            return kind(table_column=Column(no_wrap=True))

        self.elapsed, self.left = fixed(TimeElapsedColumn), fixed(TimeRemainingColumn)
        rate = TextColumn("{task.fields[rate]}", table_column=Column(no_wrap=True))
        columns = [
            fixed(MofNCompleteColumn), *[self.elapsed] * wide, *[self.left, TextColumn("left")] * (total is not None),
            _LabelColumn(), *[rate] * (display.console.width >= MIN_SPEED_WIDTH),
        ]  # fmt: skip
        self.bar = Progress(
            *[BarColumn(bar_width=10)] * wide, *columns, console=display.console, disable=self.prints_lines,
            speed_estimate_period=SPEED_WINDOW, transient=passing,
        )  # fmt: skip
        self.id = self.bar.add_task(self.label, total=total, completed=done, rate="")
        self.printed_at = time.monotonic()
        self.bar.start()

    @property
    def task(self) -> Task:
        return self.bar.tasks[0]

    def update(self, done: int, note: str = "", rate: str = "") -> None:
        """Sets the number of finished items. A bar shows `note` in place of the label, followed by `rate`, and crops
        only the note on a narrow terminal. A printed line ends with `note` and `rate`."""
        self.note = "".join(f"  {text}" for text in (note, rate) if text)
        self.bar.update(self.id, completed=done, description=note or self.label, rate=rate)
        if self.prints_lines and time.monotonic() - self.printed_at >= LINE_INTERVAL:
            self._print_line()

    def close(self) -> None:
        brief = self.passing and self.printed == self.first
        if self.prints_lines and self.printed != self.task.completed and not brief:
            self._print_line()
        self.bar.stop()

    def _print_line(self) -> None:
        self.printed_at, self.printed = time.monotonic(), self.task.completed
        elapsed, left = (column.render(self.task).plain for column in (self.elapsed, self.left))
        of, left = ("", "") if self.task.total is None else (f"/{self.task.total:,}", f", {left} left")
        self.say(f"{self.label} {self.printed:,}{of}, {elapsed} elapsed{left}{self.note}")


class _LabelColumn(ProgressColumn):
    """The label or note of a progress bar, cropped if the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def format_bytes(count: float) -> str:
    """A number of bytes as text, in the largest decimal unit not above the number."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}
    unit = next((u for u in units if count >= units[u]), None)
    return f"{count / units[unit]:,.2f} {unit}" if unit else f"{count:,.0f} bytes"
