"""Incremental detokenization: hands out complete characters only, and no text that may still become a stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


class TextStream:
    """Incremental detokenization with stop strings; a stop string ends the text before itself."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(s for s in stop if s)
        self.tokens: list[int] = []
        self.text = ""  # decoded so far
        self.given = 0  # number of characters handed out
        self.stopped = False
        self._start = self._end = 0  # tokens[start:end] are decoded already, and again as context of later ones

    def copy(self) -> TextStream:
        """An independent copy."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        return other

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now certain. Sets `stopped` at a stop string."""
        for token in tokens:
            self.tokens.append(token)
            before = self._decode(self._start, self._end)
            after = self._decode(self._start, len(self.tokens))
            if len(after) > len(before) and not after.endswith("\ufffd"):
                self.text += after[len(before) :]
                self._start, self._end = self._end, len(self.tokens)
                if self._find_stop():
                    break
        return self._hand_out(len(self.text) - self._held_back())

    def finish(self) -> str:
        """The remaining text, after the last token."""
        if not self.stopped:
            before = self._decode(self._start, self._end)
            self.text += self._decode(self._start, len(self.tokens))[len(before) :]
            self._find_stop()  # the stop string may precede an incomplete character
        return self._hand_out(len(self.text))

    def _decode(self, a: int, b: int) -> str:
        return self.tokenizer.decode(self.tokens[a:b], skip_special_tokens=True) if b > a else ""

    def _find_stop(self) -> bool:
        found = [i for i in (self.text.find(s) for s in self.stop) if i >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def _held_back(self) -> int:
        """Length of the longest tail that may still become a stop string."""
        if self.stopped:
            return 0
        longest = max((len(s) for s in self.stop), default=1) - 1
        tails = range(min(longest, len(self.text)), 0, -1)
        return next((n for n in tails if any(s.startswith(self.text[-n:]) for s in self.stop)), 0)

    def _hand_out(self, end: int) -> str:
        piece, self.given = self.text[self.given : end], max(self.given, end)
        return piece
