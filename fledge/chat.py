"""`fledge chat`: a conversation with the target, whose answers are decoded with or without a draft, and its screens: a
terminal, or pipes. `Terminal` and `Pipes` have the same methods."""

from __future__ import annotations

import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prompt_toolkit import PromptSession
from rich.console import Console
from rich.style import Style
from rich.text import Text

from fledge.io.display import escaped, format_message
from fledge.io.results import TINTS, Pieces, write_tinted
from fledge.options import default_new_tokens
from fledge.types import Sampling

if TYPE_CHECKING:
    from fledge.decode.engine import Engine

NEW_TOKENS = 512  # default maximum of new tokens per answer
ROOM = 4  # 1/4 of the context, or the maximum new tokens if smaller, is reserved for an answer


@dataclass(frozen=True)
class Reply:
    """The figures of an answer. `seconds` is the engine's time, including the prompt, without the time to show the
    text. `drafted`: whether the answer was decoded with the draft (None: the session has no draft). `tau` is None
    without rounds of drafting. `ended`: the reason for the answer's end."""

    tokens: int
    seconds: float
    drafted: bool | None
    tau: float | None
    ended: str

    @property
    def summary(self) -> str:
        """The line below an answer. With small numbers, the line fits 60 columns."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        parts = [
            f"τ {self.tau:.2f}" if self.tau is not None else "",
            f"{speed:,.{0 if speed >= 10 else 1}f} tokens/s",
            "" if self.drafted is None else f"draft {'on' if self.drafted else 'off'}",
            f"{self.tokens:,} token{'s' * (self.tokens != 1)}",
            self.ended,
        ]
        return " · ".join(filter(None, parts))


class Session:
    """A conversation and the engine that answers in it.

    `messages`: the messages that the model sees, the system prompt first. With `raw`, no messages are kept, and each
    text is continued alone, without the chat template. `drafts`: whether the next answer is decoded with the draft.
    `new_tokens`: the most tokens of an answer. `longest`: the most tokens of a prompt and its answer together.

    Raises ValueError if the chat template refuses the system prompt.
    """

    def __init__(
        self, engine: Engine, sampling: Sampling, max_new_tokens: int | None = None, *, system: str | None = None,
        raw: bool = False,
    ):  # fmt: skip
        self.engine, self.sampling, self.raw = engine, sampling, raw
        self.has_draft = self.drafts = engine.draft is not None
        drafted = 0 if engine.target.rotary or not self.has_draft else engine.drafting.deepest
        self.longest = engine.target.context - drafted
        self.new_tokens = max_new_tokens or default_new_tokens(NEW_TOKENS, self.longest)
        self._system = [{"role": "system", "content": system}] if system else []
        if system:
            asked = [*self._system, {"role": "user", "content": "a"}]
            engine.reader.template.prompt_ids(asked, where="a chat with this system prompt")
        self.reset()

    def reset(self) -> None:
        """Begins a new conversation; the system prompt stays."""
        self.messages: list[dict[str, Any]] = [*self._system]
        self._answers = 0

    def switch_draft(self, on: bool) -> None:
        """Decodes the next answers with or without the draft. Raises ValueError in a session without a draft."""
        if not self.has_draft:
            raise ValueError("there is no draft; start fledge chat with --draft")
        self.drafts = on

    def answer(
        self, asked: str, show: Callable[[Pieces], None], stopped: Callable[[], bool], say: Callable[[str], None]
    ) -> Reply:
        """Answers a text, and adds the text and the answer to the conversation.

        `show` gets pieces of the answer during generation. The answer ends when `stopped` returns True. `say` gets a
        message if the conversation no longer fits the context. Raises ValueError, and leaves the conversation
        unchanged, if the text alone does not fit, or if the template refuses the conversation.
        """
        from fledge.data.answering import history_message
        from fledge.decode.request import AttributedText, Completion
        from fledge.measure.metrics import tau

        prompt, ids = self._fit(asked, say)
        limit = min(self.new_tokens, self.longest - len(ids))
        done, target = Completion(), self.engine.target
        text = AttributedText(target.tokenizer, target.stop_ids)
        stream = self.engine.stream(
            ids, max_new_tokens=limit, sampling=self.sampling, speculate=self.drafts, request=self._answers, into=done
        )
        seconds, ended, cut = 0.0, False, False
        while not ended and not cut:
            began = time.perf_counter()
            ended = next(stream, None) is None
            seconds += time.perf_counter() - began
            show(text.take(done))
            cut = not ended and stopped()
        stream.close()
        show(text.finish())
        if not self.raw:
            self.messages = [*prompt, history_message(self.engine.reader.template, prompt, ids, done.tokens)]
        self._answers += 1
        by_tokens = "token limit" if limit == self.new_tokens else "context full"
        return Reply(
            len(done.tokens),
            seconds,
            self.drafts if self.has_draft else None,
            tau([done.trace]) if done.trace.rounds else None,
            "stopped" if cut else "complete" if done.finish == "stop" else by_tokens,
        )

    def _fit(self, asked: str, say: Callable[[str], None]) -> tuple[Any, list[int]]:
        """The prompt for a text, and the prompt's token ids. Drops the oldest messages until the prompt fits."""
        try:
            asked.encode()
        except UnicodeEncodeError as e:  # Python decodes invalid bytes of standard input as lone surrogates
            raise ValueError("this text is not UTF-8; convert it to UTF-8") from e
        messages = [*self.messages, {"role": "user", "content": asked}]
        prompt: Any = asked if self.raw else messages
        room = self.longest - min(self.new_tokens, max(1, self.longest // ROOM))
        first, before = len(self._system), len(messages)
        while len(ids := self.engine.reader.template.prompt_ids(prompt, where="the conversation")) > room:
            if len(messages) == first + 1:
                raise ValueError(
                    f"this text has {len(ids):,} tokens as a prompt, but the target's context has room for {room:,} "
                    "before an answer; it was not sent. Shorten it"
                )
            del messages[first : first + 2]
        if dropped := before - len(messages):
            say(
                f"the conversation no longer fits the context of {self.longest:,} tokens: its first {dropped} messages "
                "were dropped (/reset begins anew)"
            )
        return prompt, ids


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
            self._console.print(_legend())
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


def _legend() -> Text:
    """A line that names the depth of each tint."""
    text = Text("Tokens that the draft proposed at depth")
    for depth, tint in enumerate(TINTS, 1):
        text.append(f" {depth}{'+' * (depth == len(TINTS))}", Style(color=tint))
    return text.append("; the others are the model's own.")
