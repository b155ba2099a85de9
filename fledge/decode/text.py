"""Incremental detokenization: hands out complete characters only, and no text that may still become a stop string.

The text is a function of the tokens alone: how tokens are grouped and when the text is read has no effect. Tokens are
decoded when the text is asked for, or at once if there are stop strings. The definition (Hugging Face's
text-generation-inference, `decode_token`) decodes token by token, each in the context of earlier tokens. Where a
single call must give the same text, the call decodes all waiting tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # the text of bytes that are not a character, or not a complete one yet
CHARACTER = 4  # the most bytes of a character; an incomplete character is up to three REPLACEMENTs
# decoders of the tokenizers library that give each token the same text in every context, except for incomplete
# characters and for the first token
JOINING = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse"}
BYTES = [form.format(byte) for byte in range(256) for form in ("<0x{:02X}>", "<0x{:02x}>")]  # ByteFallback's tokens


class TextStream:
    """Incremental detokenization with stop strings; a stop string ends the text before itself."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.stop = tuple(stop)
        self.tokens: list[int] = []
        self.text = ""  # decoded so far
        self.given = 0  # number of characters handed out
        self.stopped = False
        self._decode_ids, self._joins, self._bytes = _decoding(tokenizer, self.stop)
        self._start = self._end = 0  # tokens[start:end] have given text, and are decoded again as context
        self._read = 0  # tokens[:read] were decoded; tokens[end:read] have given no text yet

    def copy(self) -> TextStream:
        """An independent copy."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        return other

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens. At a stop string, sets `stopped` and drops the tokens that follow the end of the string."""
        self.tokens += tokens
        if self.stop:
            self._read_to(len(self.tokens))

    def take(self) -> str:
        """The final text that was not handed out before; later tokens cannot change the text."""
        self._read_to(len(self.tokens))
        return self._hand_out(len(self.text) - self._held_back())

    def finish(self) -> str:
        """The remaining text, after the last token."""
        self._read_to(len(self.tokens))
        if not self.stopped:
            before = self._decode(self._end)
            self._add(self._decode(len(self.tokens))[len(before) :])  # may have a stop string, then half a character
        return self._hand_out(len(self.text))

    def _read_to(self, end: int) -> None:
        """Decodes the tokens before `end`."""
        ends = [end]
        while ends and not self.stopped:
            if self._read >= ends[-1]:
                ends.pop()
            elif (part := self._decode_to(ends[-1])) < ends[-1]:
                ends.append(part)

    def _decode_to(self, end: int) -> int:
        """Decodes the tokens before `end` in one call, and returns `end`. Changes nothing, and returns an earlier end
        to try first, if several tokens have text that might depend on the grouping, or that has a stop string."""
        several, half = end - self._read > 1, (self._read + end) // 2
        if several and not (self._joins and self._bytes.isdisjoint(self.tokens[self._end : end])):
            return half
        before, after = self._decode(self._end), self._decode(end)
        new = after[len(before) :]
        if several and (REPLACEMENT in after or self._stops(new)):
            complete = after.rstrip(REPLACEMENT)
            cut = REPLACEMENT not in complete and 0 < len(after) - len(complete) < CHARACTER
            return end - 1 if cut else half  # the last character may be complete before
        self._read = end
        if new and not after.endswith(REPLACEMENT):
            self._start, self._end = self._end, end
            self._add(new)
        return end

    def _decode(self, end: int) -> str:
        return self._decode_ids(self.tokens[self._start : end]) if end > self._start else ""

    def _add(self, new: str) -> None:
        found = self._stops(new)
        self.text += new
        if found:
            self.text, self.stopped = self.text[: min(found)], True
            del self.tokens[self._read :]

    def _stops(self, new: str) -> list[int]:
        """The places in the text where stop strings begin that the further text `new` completes."""
        first = max(0, len(self.text) + 1 - max((len(s) for s in self.stop), default=1))
        found = ((self.text[first:] + new).find(s) for s in self.stop)
        return [first + at for at in found if at >= 0]

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


def _decoding(tokenizer: Any, stop: Sequence[str] = ()) -> tuple[Callable[[list[int]], str], bool, frozenset[int]]:
    """Returns (1) a tokenizer's decoding function, which skips special tokens except within a stop string, (2) whether
    token texts without REPLACEMENT can be joined, and (3) the tokens whose texts cannot be joined: single bytes.
    ByteFallback decodes a run of bytes as a whole: if one byte is part of no character, all bytes of the run become
    REPLACEMENT, also bytes that were a character before."""
    known = getattr(tokenizer, "added_tokens_decoder", {}) if stop else {}
    special = {i: token.content for i, token in known.items() if token.special}
    if any(text in string for text in special.values() for string in stop):
        hidden = {i for i, text in special.items() if not any(text in string for string in stop)}

        def decode(ids: list[int]) -> str:
            return tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

        return decode, False, frozenset()
    kind = type(tokenizer)
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    if plain and not _cleans_up(tokenizer):  # nothing but the tokenizers library's decoding
        backend = tokenizer.backend_tokenizer
        steps, single = _steps(backend.decoder), frozenset[int]()
        if any(step["type"] == "ByteFallback" for step in steps):
            single = frozenset(token for name in BYTES if (token := backend.token_to_id(name)) is not None)
        return lambda ids: backend.decode(ids, skip_special_tokens=True), _joins(steps), single
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True), False, frozenset()


def _cleans_up(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether transformers removes spaces before punctuation. Newer versions never do with BPE."""
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return tokenizer.clean_up_tokenization_spaces and (forced or not bpe)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder of the tokenizers library; [] for None, the default, which joins tokens with spaces."""
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _joins(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether a decoder with `steps` joins the texts of tokens. The decoder may change the first token's start."""
    kinds = [step["type"] for step in steps]
    if "Fuse" in kinds:  # later steps see the whole text
        after = steps[kinds.index("Fuse") + 1 :]
        if any(step["type"] != "Strip" or step["stop"] for step in after):
            return False
        kinds = kinds[: kinds.index("Fuse")]
    return JOINING.issuperset(kinds)
