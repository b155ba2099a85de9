"""Who proposed each token of an answer: the draft, at which depth, or the target itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from fledge.decode.request import Completion
from fledge.decode.text import TextStream
from fledge.types import Trace


def proposers(trace: Trace, tokens: int) -> list[int]:
    """For each of the first `tokens` tokens of an answer: the depth (1, 2, ...) at which the draft proposed it, or 0
    for the target's own tokens, which are the first one, and one at the end of each round. Without a draft, the trace
    has no rounds, and all tokens are the target's own."""
    if not trace.rounds:
        return [0] * tokens
    rounds = ([*range(1, r.accepted + 1), 0] for r in trace.rounds)
    return [0, *chain.from_iterable(rounds)][:tokens]


class AttributedText:
    """The text of an answer in pieces, each with the proposer (see `proposers`) of the token that completed it.

    It follows an answer while it is generated: `take` returns the pieces of the tokens that came since the last call,
    and `finish` what remains after the last one. `stop_ids` are the tokens that end an answer and have no text.
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
