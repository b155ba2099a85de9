"""Progress bars and lines on a terminal, on standard error; plain lines where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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


class Plain(Console):
    """Standard output for tables; a closed pipe raises BrokenPipeError, as `print` does."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise  # what rich has caught where it calls this


class Show:
    """What a job tells its user while it runs. `quiet` says nothing."""

    def __init__(self, quiet: bool = False):
        self._stream = WhileRead(sys.stderr)
        self.console = Console(file=self._stream, stderr=True, quiet=quiet, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._line_at = 0.0

    @property
    def unheard(self) -> bool:
        """Whether nobody reads standard error any more."""
        return self._stream.unheard

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def counting(self, what: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """A bar that the yielded callable moves by one, or by as many as it is told."""
        with self._new_bar() as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda n=1: bar.advance(task, n)

    def begin(self, what: str, steps: int) -> None:
        """Shows a bar, before the first step is done."""
        self._bar = self._new_bar()
        self._bar.start()
        self._task = self._bar.add_task(what, total=steps)

    def step(self, steps: int, metrics: dict[str, Any]) -> None:
        """Shows a training step: loss, walked τ, first-step hits, speed, and τ by the decoder where it was measured."""
        tau = f"τ {metrics['tau']:.2f}" if "tau" in metrics else f"τ over all slots {metrics['tau_slots']:.2f}"
        text = f"loss {metrics['loss']:.3f}  {tau}  {metrics['tokens_per_s']:,.0f} tokens/s"
        self._bar.update(self._task, completed=metrics["step"], description=text)
        if "eval_tau" in metrics:
            self._bar.console.print(
                f"step {metrics['step']:,}: decoded τ {metrics['eval_tau']:.3f} on held-out prompts"
            )
        elif not self.console.is_terminal and time.monotonic() - self._line_at > 20:
            self._line_at = time.monotonic()
            self.say(f"step {metrics['step']:,}/{steps:,}  {text}")
        if metrics["step"] == steps:
            self.close()

    def close(self) -> None:
        """Ends the training bar, so that what follows stands below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _new_bar(self) -> Progress:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        return Progress(*columns, *times, console=self.console, disable=not self.console.is_terminal)
