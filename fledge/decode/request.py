"""A request: a prompt, the tokens committed after it, and their text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fledge.decode.text import TextStream
from fledge.decode.verify import Processing
from fledge.types import Prompt, Sampling, Trace


@dataclass
class Completion:
    """The result of a request: `tokens`, a stop token included, the `text`, without the stop token, and `finish`, the
    reason for the end: "stop", "length", or "" if the stream was closed early."""

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

    `prefix` are the token ids of the prompt and of every committed token. `fresh` are the tokens that were committed
    last. `limit` is the most tokens to generate. `drafts`: whether the request asks for the draft. Results go to
    `done`. `over`: whether the answer is complete, or the request was aborted.
    """

    number: int
    prompt: Prompt
    sampling: Sampling
    text: TextStream
    limit: int
    stop_ids: frozenset[int]
    done: Completion
    drafts: bool = False
    fresh: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    over: bool = False
    prefix: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = list(self.prompt.ids)

    def commit(self, tokens: list[int]) -> None:
        """Adds the tokens that verification chose to the prefix, and to the answer up to a stop token, a stop string or
        the limit."""
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
        """Returns a predicate on the tokens that may be committed next. Called with the tokens in order, the predicate
        returns True at the answer's last token."""
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
        """The final text that was not handed out before; all remaining text, if the request is over."""
        return self.text.take() + (self.close() if self.over else "")

    def close(self) -> str:
        """Finishes the text and returns the part that was not handed out before."""
        rest = self.text.finish()
        self.done.text = self.text.text
        if self.text.stopped:
            self.done.finish = "stop"
        return rest


# what users give as a prompt: text to continue, token ids, the messages of a chat, or a prompt that was read before
PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Prompt

KINDS = "a prompt is a string, a list of token ids or a list of messages"


def is_several(asked: Any) -> bool:
    """Whether the argument is a list of prompts: of strings, of chats, or of lists of token ids."""
    asked = _plain(asked)
    return isinstance(asked, list) and asked != [] and isinstance(asked[0], str | list | Prompt)


def check_prompts(asked: Any) -> list[Any]:
    """The prompts of a list, not yet checked one by one. Raises TypeError for anything but a list of prompts."""
    asked = _plain(asked)
    if isinstance(asked, list) and (not asked or is_several(asked)):
        return asked
    what = "one prompt" if isinstance(asked, str | list) else _kind(asked)
    raise TypeError(f"a list of prompts is needed, but this is {what}; {KINDS}")


def check_prompt(asked: Any) -> str | list[Mapping[str, Any]] | Prompt:
    """A text, the messages of a chat, or, of token ids in a list, tensor or array, the `Prompt`. Raises TypeError for
    anything else, and ValueError for a prompt that is empty or not valid Unicode."""
    asked = _plain(asked)
    if is_several(asked):
        raise TypeError("this is a list of several prompts, but one prompt is needed; use generate")
    if isinstance(asked, str):
        return _encodable(asked)
    if not isinstance(asked, list | Prompt):
        raise TypeError(f"{KINDS}, but this is {_kind(asked)}")
    if not asked:
        raise ValueError("the prompt is empty")
    if isinstance(asked, Prompt):
        asked = _plain(asked.ids)
        if not isinstance(asked, list) or not _are_ids(asked):
            raise TypeError("the ids of a fledge.Prompt must be a list of integers")
    if _are_ids(asked):
        return Prompt(asked)
    wanted, items = (Mapping, "messages") if isinstance(asked[0], Mapping) else (int, "token ids")
    odd = [x for x in asked if not isinstance(x, wanted) or isinstance(x, bool)]
    if odd:
        raise TypeError(f"{KINDS}, but this list of {items} holds {_kind(odd[0])}")
    return asked


def _plain(asked: Any) -> Any:
    """The argument with every tensor, array and sequence as a list."""
    asked = asked.tolist() if hasattr(asked, "tolist") else asked
    if isinstance(asked, Sequence) and not isinstance(asked, str | bytes):
        return list(asked) if _are_ids(asked) else [x if type(x) is int else _plain(x) for x in asked]
    return asked


def _are_ids(asked: Sequence[Any]) -> bool:
    """Whether all items are of type int. The check is fast, as a prompt may have many items."""
    return set(map(type, asked)) == {int}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:  # a lone surrogate, which no tokenizer accepts
        raise ValueError(f"the prompt is not valid Unicode ({e.reason} at character {e.start})") from e
    return text


def _kind(x: Any) -> str:
    return f"a value of type {type(x).__name__}"


def proposers(trace: Trace, tokens: int) -> list[int]:
    """The depth (1, 2, ...) at which the draft proposed each of the first `tokens` tokens of an answer, or 0 for the
    target's own tokens: the first token of the answer and the last token of each round. Without a draft, the trace has
    no rounds, and all tokens are the target's own."""
    if not trace.rounds:
        return [0] * tokens
    rounds = ([*range(1, r.accepted + 1), 0] for r in trace.rounds)
    return [0, *chain.from_iterable(rounds)][:tokens]


class AttributedText:
    """The text of an answer in pieces, each with the proposer (see `proposers`) of the token that completed it.

    Follows an answer during generation: `take` returns the pieces of the tokens generated since the last call, and
    `finish` the text that remains after the last token. `stop_ids` are the tokens that end an answer and have no text.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int] = (), stop: Sequence[str] = ()):
        self._stop_ids = stop_ids
        self._text = TextStream(tokenizer, stop)
        self._seen = 0  # tokens
        self._last = 0  # the last token's proposer

    def take(self, completion: Completion) -> list[tuple[str, int]]:
        """The pieces of the tokens that `completion` has got since the last call, without empty ones."""
        whose = proposers(completion.trace, len(completion.tokens))
        pieces = []
        for token, by in list(zip(completion.tokens, whose, strict=True))[self._seen :]:
            self._text.append([] if token in self._stop_ids else [token])
            pieces.append((self._text.take(), by))
            self._last = by
        self._seen = len(completion.tokens)
        return [(text, by) for text, by in pieces if text]

    def finish(self) -> list[tuple[str, int]]:
        """The rest of the text after the last token: incomplete characters, or the start of a stop string."""
        rest = self._text.finish()
        return [(rest, self._last)] if rest else []
