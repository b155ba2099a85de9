"""What a job tells its user: lines and bars on standard error, escaped so that no terminal obeys what files hold."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
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
from rich.table import Column, Table
from rich.text import Text

BEGINNING, END = 1400, 600  # characters that are kept of a longer message
SECONDS = 20  # between two lines about one count, where there is no terminal
WINDOW = 600  # seconds whose speed tells the time that is left
LABEL = 16  # columns of a table's row labels, at least
NARROW = 60  # columns of a terminal that has no room for a bar

# control characters, line separators, lone surrogates, and what reverses the direction of text
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """`text` with every character that a terminal could obey, but those in `keep`, written as Python writes it."""
    return _UNSAFE.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


def message(text: object) -> str:
    """`text` as one line for a terminal: escaped, and of a long text the beginning and the end."""
    text = str(text)
    left_out = len(text) - BEGINNING - END
    if left_out > 0:
        text = f"{text[:BEGINNING]} [... {left_out:,} characters ...] {text[-END:]}"
    return escaped(text)


def complain(error: object) -> None:
    """Says on standard error what ends a command, if anybody reads it."""
    print(f"fledge: {message(error)}", file=WhileRead(sys.stderr), flush=True)


class _Output(Console):
    """Standard output; a closed pipe raises BrokenPipeError, as `print` does."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        raise  # what rich has caught where it calls this


class Paper:
    """Where a job's findings go: lines and tables on standard output. On a terminal, lines break between words."""

    def __init__(self) -> None:
        self.console = _Output()

    def print(self, line: str) -> None:
        self.console.print(message(line), soft_wrap=not self.console.is_terminal)

    def table(self, columns: Mapping[str, Sequence[str]], spare: Sequence[str]) -> list[str]:
        """Prints columns by their headings; the first names the rows and is folded where it must be. Where even so they
        are too wide, those named in `spare` go, the first of it first. Returns those that went."""
        shown = {heading: [message(cell) for cell in cells] for heading, cells in columns.items()}
        gone: list[str] = []
        while len(gone) < len(spare) and _least_width(shown) > self.console.width:
            gone.append(spare[len(gone)])
            del shown[gone[-1]]
        first, *others = shown
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        grid.add_column(first, overflow="fold")
        for heading in others:
            grid.add_column(heading, justify="right", no_wrap=True)
        for row in zip(*shown.values(), strict=True):
            grid.add_row(*row)
        self.console.print(grid)
        return gone


def _least_width(columns: Mapping[str, Sequence[str]]) -> int:
    """Columns of a terminal that a table needs: two for each and one more are between them and at the edges."""
    labels, *others = (max(map(cell_len, (heading, *cells))) for heading, cells in columns.items())
    return min(labels, LABEL) + sum(others) + 2 * len(columns) + 1


def drop(stream: TextIO) -> None:
    """Sends what is written to a stream nowhere from now on, also what Python still has of it and writes at exit."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class WhileRead:
    """A stream whose reader may go away (a closed pipe, a terminal that hung up): what is written after that is
    dropped, and `unheard` is True."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.unheard = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        self.unheard = True
        drop(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Show:
    """What a job tells its user while it runs. `quiet` says nothing."""

    def __init__(self, quiet: bool = False):
        self._stream = WhileRead(sys.stderr)
        self.console = Console(file=self._stream, stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._training: _Count | None = None

    @property
    def unheard(self) -> bool:
        """Whether nobody reads standard error any more."""
        return self._stream.unheard

    def say(self, line: str) -> None:
        self.console.print(message(line), soft_wrap=True)

    @contextmanager
    def counting(self, what: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """Shows how many of `total` are done: the yielded callable adds one, or as many as it is told."""
        count = _Count(self, what, total, done)
        try:
            yield lambda n=1: count.reach(int(count.task.completed) + n)
        finally:
            count.close()

    def begin(self, what: str, steps: int) -> None:
        """Shows how many steps are done, before the first one is."""
        self._training = _Count(self, what, steps)

    def step(self, steps: int, metrics: dict[str, Any]) -> None:
        """Shows a training step: loss, walked τ, first-step hits, speed, and τ by the decoder where it was measured."""
        tau = f"τ {metrics['tau']:.2f}" if "tau" in metrics else f"τ over all slots {metrics['tau_slots']:.2f}"
        self._training.reach(metrics["step"], f"loss {_loss(metrics)}  {tau}  {metrics['tokens_per_s']:,.0f} tokens/s")
        if "eval_tau" in metrics:
            self.say(f"step {metrics['step']:,}: decoded τ {metrics['eval_tau']:.3f} on held-out prompts")
        if metrics["step"] == steps:
            self.close()

    def close(self) -> None:
        """Ends the training bar, so that what follows stands below it."""
        if self._training is not None:
            self._training.close()
            self._training = None


def _loss(metrics: dict[str, Any]) -> str:
    """A step's loss; what rounds to nothing is not shown as 0.000, and where nothing was scored there is none."""
    if not any(metrics["scored"]):
        return "- (no word that the draft can say)"
    return f"{metrics['loss']:.3f}" if metrics["loss"] >= 0.001 else "under 0.001"


class _Count:
    """How far something is, and the time that it took and will take: a bar on a terminal; elsewhere a line at most
    every SECONDS, and a last one."""

    def __init__(self, show: Show, what: str, total: int, done: int = 0):
        self.say, self.what, self.note, self.said = show.say, message(what), "", done
        self.lines = not show.console.is_interactive
        wide = show.console.width >= NARROW

        def fixed(kind: type[ProgressColumn]) -> ProgressColumn:
            return kind(table_column=Column(no_wrap=True))

        self.elapsed, self.left = fixed(TimeElapsedColumn), fixed(TimeRemainingColumn)
        columns = [fixed(MofNCompleteColumn), *[self.elapsed] * wide, self.left, TextColumn("left"), _Cropped()]
        self.bar = Progress(
            *[BarColumn(bar_width=10)] * wide, *columns, console=show.console, disable=self.lines,
            speed_estimate_period=WINDOW,
        )  # fmt: skip
        self.id = self.bar.add_task(self.what, total=total, completed=done)
        self.said_at = time.monotonic()
        self.bar.start()

    @property
    def task(self) -> Task:
        return self.bar.tasks[0]

    def reach(self, done: int, note: str = "") -> None:
        """`done` is how many are done by now, `note` what else there is to say."""
        self.note = note
        self.bar.update(self.id, completed=done, description=note or self.what)
        if self.lines and time.monotonic() - self.said_at >= SECONDS:
            self._say()

    def close(self) -> None:
        if self.lines and self.said != self.task.completed:
            self._say()
        self.bar.stop()

    def _say(self) -> None:
        self.said_at, self.said = time.monotonic(), self.task.completed
        elapsed, left = (column.render(self.task).plain for column in (self.elapsed, self.left))
        note = f"  {self.note}" if self.note else ""
        self.say(f"{self.what} {self.said:,}/{self.task.total:,}, {elapsed} elapsed, {left} left{note}")


class _Cropped(ProgressColumn):
    """What a count is of, or its note, cut where the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")
