"""A command on a pseudo-terminal, and what a user would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import pyte

from support.commands import TESTS


class TerminalOf:
    """A command on a terminal of a width and height in characters: words after `fledge`, or after other arguments of
    Python (`program`).

    `screen` is what is visible, and `history` all lines that were scrolled out of it. `written` is the output itself.
    """

    def __init__(
        self, *words: Any, width: int = 60, height: int = 30, program: Sequence[str] = ("-m", "fledge"),
        **environment: str,
    ):  # fmt: skip
        self.screen = pyte.HistoryScreen(width, height, history=10_000, ratio=0.5)
        self._stream, self.written = pyte.ByteStream(self.screen), b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.write_process_input = lambda text: os.write(self._master, text.encode())  # e.g. where the cursor is
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
        kept |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(TESTS.parent)}
        self.process = subprocess.Popen(
            [sys.executable, *program, *map(str, words)], stdin=slave, stdout=slave, stderr=slave,
            env=kept | {"OMP_NUM_THREADS": "1"} | environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> TerminalOf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Types a text; "\\r" is the enter key, "\\x03" Ctrl-C."""
        os.write(self._master, text.encode())

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        """Reads what the command writes until a condition holds. Fails after some seconds, or if the command ends
        before."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not seen in {seconds} s:\n{self.text}"
            assert self._read(0.05) or condition(), f"the command ended:\n{self.text}"

    def wait_for(self, *texts: str, seconds: float = 60.0) -> None:
        """Waits until all of these texts are visible, or were."""
        self.wait(lambda: all(text in self.text for text in texts), seconds)

    def wait_for_end(self, seconds: float = 60.0) -> int:
        """Reads until the command ends, and returns its exit code."""
        end = time.monotonic() + seconds
        while self._read(0.05):
            assert time.monotonic() < end, f"the command did not end:\n{self.text}"
        return self.process.wait(timeout=10)

    @property
    def lines(self) -> list[str]:
        """All lines so far, from the first one, without spaces at their ends."""
        columns = range(self.screen.columns)
        rows = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.screen.lines))]
        return ["".join(row[x].data for x in columns).rstrip() for row in rows]

    @property
    def text(self) -> str:
        """All lines so far."""
        return "\n".join(self.lines).rstrip()

    def colours(self, text: str) -> set[str]:
        """The foreground colours of the last line that contains a text."""
        rows = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.screen.lines))]
        row = next(r for r, line in zip(reversed(rows), reversed(self.lines), strict=True) if text in line)
        return {row[x].fg for x in range(self.screen.columns) if row[x].data.strip()}

    def _read(self, seconds: float) -> bool:
        """Reads what there is within some seconds. Returns whether the command may still write."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)
