"""A request: a prompt, the tokens committed after it, and their text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fledge.decode.text import TextStream
from fledge.decode.verify import Processing
from fledge.types import Sampling, Trace


@dataclass
class Completion:
    """The result of a request: `tokens`, a stop token included, the `text` without it, and `finish`, the reason why it
    ended: "stop", "length", or "" of a stream that was closed before its end."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    trace: Trace = field(default_factory=Trace)

    def __repr__(self) -> str:
        ended = self.finish or "not ended"
        return f"<Completion {self.text!r}, {len(self.tokens)} tokens, {ended}, {self.trace!r}>"


@dataclass(eq=False)
class Request:
    """A prompt that is being answered.

    `prefix` is the prompt and every committed token. `fresh` are the tokens that were committed last. `limit` is the
    most tokens to generate. `drafts`: whether the request asks for the draft. Results go to `done`. `over`: whether the
    answer is complete, or the request was aborted.
    """

    number: int
    prefix: list[int]
    sampling: Sampling
    text: TextStream
    limit: int
    stop_ids: frozenset[int]
    done: Completion
    drafts: bool = False
    fresh: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    over: bool = False

    def commit(self, tokens: list[int]) -> None:
        """Adds the tokens that verification chose: all to the prefix, and to the answer those up to a stop token, a
        stop string or the limit."""
        self.prefix.extend(tokens)
        self.fresh, done, text = tokens, self.done, self.text
        if len(tokens) > (left := self.limit - len(done.tokens)):
            tokens = tokens[:left]
        end, seen = len(tokens), len(text.tokens)
        if not self.stop_ids.isdisjoint(tokens):
            end = next(i for i, token in enumerate(tokens) if token in self.stop_ids)
        text.append(tokens[:end])
        done.tokens += text.tokens[seen:]
        if end < len(tokens) and not text.stopped:
            done.tokens.append(tokens[end])  # the stop token counts as generated, but adds no text
            done.finish = "stop"
        if not done.finish and len(done.tokens) >= self.limit:
            done.finish = "length"
        self.over = self.over or text.stopped or done.finish != ""  # an aborted request stays over
        done.trace.t_total = time.perf_counter() - self.began

    def is_last(self) -> Callable[[int], bool]:
        """Returns a predicate for the tokens that may be committed next. Called with them in order, it returns True at
        the answer's last token."""
        text, left = self.text.copy(), itertools.count(self.limit - len(self.done.tokens) - 1, -1)

        def ends(token: int) -> bool:
            text.append([] if token in self.stop_ids else [token])
            return next(left) <= 0 or token in self.stop_ids or text.stopped

        return ends

    @property
    def processing(self) -> Processing | None:
        """How the next tokens' logits are processed, if the request has logits processors."""
        processors = self.sampling.processors
        return Processing(processors, self.prefix, self.is_last()) if processors else None

    @property
    def longest(self) -> int:
        """The most tokens that prompt and answer can have together."""
        return len(self.prefix) + self.limit - len(self.done.tokens)

    def take(self) -> str:
        """The text that is certain by now and was not handed out; all of it, if the request is over."""
        return self.text.take() + (self.close() if self.over else "")

    def close(self) -> str:
        """Finishes the text and returns what of it was not handed out."""
        rest = self.text.finish()
        self.done.text = self.text.text
        if self.text.stopped:
            self.done.finish = "stop"
        return rest
