"""The screens of a conversation: a terminal, or pipes. `Terminal` and `Pipes` have the same methods."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prompt_toolkit import PromptSession
from rich.console import Console

from fledge.chat.tints import Pieces, legend, write_tinted
from fledge.io.display import escaped, format_message


class Pipes:
    """Reads lines of standard input, and writes answers unchanged to standard output, without colours. Messages go to
    standard error by `say`. On a terminal, control characters of answers are escaped."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._terminal = sys.stdout.isatty()

    def ask(self) -> str | None:
        """The next non-empty line, or None at the end of the input."""
        return next((line.rstrip("\n") for line in iter(sys.stdin.readline, "") if line.strip()), None)

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Context manager around an answer: yields a function that returns False, since nothing stops an answer."""
        yield lambda: False
        self._write("\n")

    def show(self, pieces: Pieces) -> None:
        """Shows more of an answer."""
        for text, _ in pieces:
            self._write(escaped(text, keep="\n\t") if self._terminal else text)

    def say(self, text: str) -> None:
        """Shows a message of one or more lines."""
        for line in text.splitlines():
            self._say(line)

    def fail(self, error: Exception) -> None:
        """Raises the error, since no user can correct the input."""
        raise error

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Cleared(Exception):
    """Ctrl-C at the input line. KeyboardInterrupt is reserved for signals that end the command."""


class Terminal:
    """A terminal with an editable input line, and with answers tinted by the proposers of the tokens."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        # unlike `input`, prompt_toolkit edits alike with every build of Python, and takes pasted lines as a single text
        self._line: PromptSession[str] = PromptSession("> ", interrupt_exception=Cleared)

    def open(self, words: str, drafts: bool) -> None:
        """Shows `words`, a description of the models, and with a draft and colours a legend of the tints."""
        self.say(words)
        if drafts and self._console.color_system:
            self._console.print(legend())
        self.say("/help lists the commands; Ctrl-D leaves.\n")

    def ask(self) -> str | None:
        """The next non-empty text, or None after Ctrl-D. Ctrl-C clears the line."""
        while True:
            try:
                text = self._line.prompt()
            except Cleared:
                continue
            except EOFError:
                return None
            if text.strip():
                return text

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Context manager around an answer: yields a function that tells whether Ctrl-C was pressed. Keys pressed
        during the answer are not shown; the next input line gets the keys."""
        pressed: list[Any] = []
        keyboard = sys.stdin.fileno()
        before, handler = termios.tcgetattr(keyboard), signal.getsignal(signal.SIGINT)
        silent = [*before]
        silent[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(keyboard, termios.TCSANOW, silent)
        signal.signal(signal.SIGINT, lambda *signal_and_frame: pressed.append(signal_and_frame))
        try:
            yield lambda: bool(pressed)
        finally:
            signal.signal(signal.SIGINT, handler)
            termios.tcsetattr(keyboard, termios.TCSANOW, before)
        self._console.out("")

    def show(self, pieces: Pieces) -> None:
        """Shows more of an answer."""
        write_tinted(self._console, pieces)

    def say(self, text: str) -> None:
        """Shows a message, dimmed in contrast to answers."""
        self._console.print(escaped(text, keep="\n"), style="dim")

    def fail(self, error: Exception) -> None:
        """Shows an error of the user."""
        self._console.print(format_message(error))
