"""A prompt on its way: what is committed of its answer, and what of that has been said."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fledge.decode.text import TextStream
from fledge.decode.verify import TargetSampler
from fledge.types import Trace


@dataclass
class Completion:
    """What was generated: `tokens` through the stop, its `text` without it, why it `finish`ed (stop or length)."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    trace: Trace = field(default_factory=Trace)


@dataclass(eq=False)
class Request:
    """`prefix` is all that is committed, the prompt first. `fresh` of it, at its end, the draft has not taken in, nor
    the target's states before each of them, `aux_RAD`; they were committed along the `path` of the last tree's nodes.
    """

    number: int
    prefix: list[int]
    sampler: TargetSampler
    text: TextStream
    limit: int
    stop_ids: frozenset[int]
    done: Completion
    fresh: list[int] = field(default_factory=list)
    aux_RAD: Tensor | None = None
    path: Sequence[int] = ()
    began: float = field(default_factory=time.perf_counter)

    def commit(self, tokens: list[int]) -> None:
        """Adds what was accepted in a round."""
        self.prefix.extend(tokens)
        self.fresh = tokens

    def say(self) -> str:
        """The text that what was committed last adds; cuts it at a stop or at the limit."""
        done = self.done
        tokens = self.fresh[: self.limit - len(done.tokens)]
        end = next((i for i, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        seen = len(self.text.tokens)
        piece = self.text.add(tokens[:end])
        done.tokens += self.text.tokens[seen:]
        if end < len(tokens) and not self.text.stopped:
            done.tokens.append(tokens[end])  # the stop token is said, but is no text
            done.finish = "stop"
        done.trace.t_total = time.perf_counter() - self.began
        return piece

    def is_last(self) -> Callable[[int], bool]:
        """Returns a predicate for the tokens that may be committed next, called with them in order: True at the
        answer's last token."""
        text, left = self.text.copy(), itertools.count(self.limit - len(self.done.tokens) - 1, -1)

        def ends(token: int) -> bool:
            text.add([] if token in self.stop_ids else [token])
            return next(left) <= 0 or token in self.stop_ids or text.stopped

        return ends

    @property
    def longest(self) -> int:
        """Tokens that the prompt and the answer may come to."""
        return len(self.prefix) + self.limit - len(self.done.tokens)

    @property
    def over(self) -> bool:
        """Whether nothing more is to be said."""
        return self.text.stopped or self.done.finish == "stop" or len(self.done.tokens) >= self.limit

    def close(self) -> str:
        """The rest of the text."""
        rest = self.text.finish()
        self.done.text = self.text.text
        if self.text.stopped:
            self.done.finish = "stop"
        return rest
