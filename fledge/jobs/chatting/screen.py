"""Where a conversation is typed and shown: a terminal, or pipes."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from fledge.jobs.chatting.session import Session, exact
from fledge.jobs.chatting.tints import Pieces, TintedText, legend
from fledge.jobs.display import escaped, format_message


class Screen(Protocol):
    """What a conversation is typed into and shown on."""

    def ask(self) -> str | None:
        """The next line of the user, which is not empty, or None if there are no more."""

    def answering(self, thinking: bool) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Context manager around an answer, whose text begins within a thinking block if `thinking`. Yields a function
        that tells whether the user wants to stop it."""

    def show(self, pieces: Pieces) -> None:
        """Shows more of an answer."""

    def summarize(self, line: str) -> None:
        """Shows the line below an answer."""

    def say(self, text: str) -> None:
        """Shows a message."""

    def fail(self, error: Exception) -> None:
        """Shows an error of the user, or raises it if nobody is there to correct it."""


class Pipes:
    """Lines of standard input are asked, and answers go to standard output as they are, without colours. Messages go to
    standard error by `say`. On a terminal, control characters of answers are escaped."""

    def __init__(self, say: Callable[[str], None]):
        self._say = self.summarize = say
        self._terminal = sys.stdout.isatty()

    def ask(self) -> str | None:
        for line in iter(sys.stdin.readline, ""):
            if line.strip():
                return line.rstrip("\n")
        return None

    @contextmanager
    def answering(self, thinking: bool) -> Iterator[Callable[[], bool]]:
        yield lambda: False
        self._write("\n")

    def show(self, pieces: Pieces) -> None:
        for text, _ in pieces:
            self._write(escaped(text, keep="\n\t") if self._terminal else text)

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self._say(line)

    def fail(self, error: Exception) -> None:
        raise error

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Terminal:
    """A terminal with an input line that has a history and keys, and answers tinted by who proposed their tokens."""

    def __init__(self, session: Session):
        self._session = session
        self.console = Console(highlight=False, markup=False, emoji=False)
        self._line: PromptSession[str] = PromptSession(
            "> ", multiline=True, key_bindings=self._keys(), history=InMemoryHistory(), prompt_continuation="  ",
            bottom_toolbar=self._bar,
        )  # fmt: skip

    def open(self, words: str) -> None:
        """Says what this is, and shows the tints."""
        self.say(words)
        if self._session.has_draft and self.console.color_system:
            self.console.print(legend())
        self.say("/help lists the commands; Ctrl-D leaves.\n")

    def ask(self) -> str | None:
        while True:
            try:
                text = self._line.prompt()
            except EOFError:
                return None
            if text.strip():
                return text

    @contextmanager
    def answering(self, thinking: bool) -> Iterator[Callable[[], bool]]:
        self._answer = TintedText(self.console, thinking)
        with _keys_for_later(), _interrupts() as stopped:
            yield stopped
        self.console.out("")

    def show(self, pieces: Pieces) -> None:
        self._answer.write(pieces)

    def summarize(self, line: str) -> None:
        self.console.print(Text(f"{line}\n", style="dim"))

    def say(self, text: str) -> None:
        self.console.print(escaped(text, keep="\n"))

    def fail(self, error: Exception) -> None:
        self.say(format_message(error))

    def _bar(self) -> str:
        """The bottom bar. A terminal that is too narrow for all of it shows less, each part whole: without the
        depth, then without the draft."""
        session, columns = self._session, self._line.output.get_size().columns
        settings = session.settings
        always = [
            f"temperature {exact(settings.sampling.temperature)}",
            f"{session.tokens:,}/{session.longest:,} tokens",
        ]
        drafts = [[]]
        if session.has_draft:
            on, key = ("on", "F2: off") if session.drafts else ("off", "F2: on")
            depth = f" (depth {session.depth})" if session.drafts else ""
            drafts = [[f"draft {on}{depth}, {key}"], [f"draft {on}, {key}"], []]
        bars = [" · ".join(draft + always) for draft in drafts]
        return next((bar for bar in bars if len(bar) <= columns), bars[-1][:columns])

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("c-c")  # in place of KeyboardInterrupt, which is how other signals end the command
        def clear(event: KeyPressEvent) -> None:
            event.current_buffer.reset()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("f2", filter=Condition(lambda: self._session.has_draft))
        @keys.add("c-t", filter=Condition(lambda: self._session.has_draft))
        def toggle(event: KeyPressEvent) -> None:
            self._session.toggle_draft()

        return keys


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Context manager: Ctrl-C is noted instead of raised. Yields a function that tells whether it was pressed."""
    pressed: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *signal_and_frame: pressed.append(signal_and_frame))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _keys_for_later() -> Iterator[None]:
    """Context manager: keys that are pressed meanwhile are not shown within the answer. The next input line gets them
    as they are, the enter key as the one that sends."""
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
