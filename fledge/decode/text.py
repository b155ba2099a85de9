"""Incremental detokenization: hands out complete characters only, and no text that may still become a stop string.

The text is a function of the tokens alone, however they come in groups and whenever it is read. Tokens are decoded when
the text is asked for, or at once if there are stop strings. By definition (Hugging Face's text-generation-inference,
`decode_token`) one token after the other is decoded in the context of those before it. Where that must give the same
text, all tokens that wait are decoded in one call.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # what bytes that are no character, or not yet, are decoded to
CHARACTER = 4  # the most bytes of a character, of which an incomplete one is up to three REPLACEMENTs
# decoders of the tokenizers library that give each token the same text in every context, but for incomplete characters
# and for the first token
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
        self._start = self._end = 0  # tokens[start:end] are decoded already, and again as context of later ones
        self._read = 0  # tokens before this one were decoded; those from `_end` on have given no text yet

    def copy(self) -> TextStream:
        """An independent copy."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        return other

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens. Sets `stopped` at a stop string, and leaves out what follows the token that completes it."""
        self.tokens += tokens
        if self.stop:
            self._read_to(len(self.tokens))

    def take(self) -> str:
        """The text that is certain by now and was not handed out."""
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
        """Decodes the tokens before `end` in one call, and returns `end`. If there are several, and their text might
        depend on how they are grouped, or has a stop string, changes nothing and returns an end to try before."""
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
        """Where stop strings begin that are complete with further text."""
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
    """A tokenizer's decoding without special tokens, except those within a stop string, whether texts of tokens without
    REPLACEMENT can be joined, and the tokens for which they cannot: single bytes. ByteFallback decodes a run of bytes
    as a whole: if one byte is part of no character, all bytes of the run become REPLACEMENT, also those that were a
    character before the byte came."""
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
    """Whether transformers removes spaces before punctuation. Newer versions don't with BPE, whatever is asked for."""
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return tokenizer.clean_up_tokenization_spaces and (forced or not bpe)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder of the tokenizers library; none of its default, which joins tokens with spaces."""
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _joins(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether a decoder with these steps joins its tokens' texts; it may change the first token's start."""
    kinds = [step["type"] for step in steps]
    if "Fuse" in kinds:  # what follows sees the whole text
        after = steps[kinds.index("Fuse") + 1 :]
        if any(step["type"] != "Strip" or step["stop"] for step in after):
            return False
        kinds = kinds[: kinds.index("Fuse")]
    return JOINING.issuperset(kinds)
