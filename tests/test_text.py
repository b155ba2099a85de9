"""Text that is read later and in larger groups is the text of one token after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fledge.decode.load import load
from fledge.decode.text import TextStream
from support.decoding import prompts
from support.targets import exact_target, tiny_tokenizer

WORDS = ["▁", "▁a", "b", "▁bc", "c", "EN", "D", "▁.", "你", "\ufffd", *(f"<0x{x:02X}>" for x in b"aE\xe2\x82\xac\xf0")]


def of_words(model: Any, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with the words, and a special token with the last id."""
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@functools.cache
def tokenizers() -> dict[str, Any]:
    ids = {word: i for i, word in enumerate(WORDS)}
    pieces = models.BPE(ids, [], unk_token="b", byte_fallback=True), models.Unigram([(w, -1.0) for w in WORDS], 2)
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    across = [decoders.Fuse(), decoders.Replace("bc", "X")]
    words = models.WordLevel(ids, unk_token="b")
    return {
        "bytes": tiny_tokenizer(),
        "byte fallback": of_words(pieces[0], decoders.Sequence(fallback)),
        "metaspace": of_words(pieces[1], decoders.Metaspace()),
        "cleaned": of_words(words, decoders.Sequence(fallback[:3]), clean_up_tokenization_spaces=True),
        "not cleaned": of_words(pieces[0], decoders.Sequence(fallback), clean_up_tokenization_spaces=True),
        "replaced": of_words(words, decoders.Sequence(across)),
        "spaced": of_words(words, None),
    }


KINDS = [*tokenizers()]


def one_by_one(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[int], str, bool]:
    """The definition: the tokens up to a stop string, the text, and whether there is one. Each token is decoded with
    those of the last two texts before it."""
    text, start, end = "", 0, 0

    def decode(a: int, b: int) -> str:
        return tokenizer.decode(tokens[a:b], skip_special_tokens=True) if b > a else ""

    def cut() -> str | None:
        found = [at for at in map(text.find, stop) if at >= 0]
        return text[: min(found)] if found else None

    for n in range(1, len(tokens) + 1):
        before, after = decode(start, end), decode(start, n)
        if len(after) > len(before) and not after.endswith("\ufffd"):
            text += after[len(before) :]
            start, end = end, n
            if cut() is not None:
                return list(tokens[:n]), cut(), True
    text += decode(start, len(tokens))[len(decode(start, end)) :]
    return list(tokens), text if cut() is None else cut(), cut() is not None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(WORDS)), max_size=20),
    spread=st.sampled_from([1, 17]),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=4),
    stop=st.lists(st.text("abcEND .X你", min_size=1, max_size=3), max_size=2),
)
@example(tokens=[0, 0, 7, 0, 3], spread=1, sizes=[(9, False)], stop=["b"])
@example(tokens=[1, 2, 4, 1], spread=1, sizes=[(9, False)], stop=[])
@example(tokens=[2, 7, 1, 7], spread=1, sizes=[(9, True)], stop=[])
@example(tokens=[0, 0, 0, 0, 0, 0, 0, 12, 13, 13, 10, 12, 0], spread=1, sizes=[(1, False)], stop=[])
def test_any_groups(
    kind: str, tokens: list[int], spread: int, sizes: list[tuple[int, bool]], stop: list[str]
) -> None:  # fmt: skip
    """Tokens come in groups, after some of which the text is read. `spread` takes ids from a larger vocabulary."""
    tokenizer = tokenizers()[kind]
    tokens = [(t * spread) % len(tokenizer) for t in tokens]
    stream, pieces, at, turn = TextStream(tokenizer, stop), [], 0, 0
    while at < len(tokens) and not stream.stopped:
        size, reads = sizes[turn % len(sizes)]
        stream.append(tokens[at : at + size])
        if reads:
            pieces.append(stream.take())
        at, turn = at + size, turn + 1
    pieces.append(stream.finish())
    assert (stream.tokens, stream.text, stream.stopped) == one_by_one(tokenizer, tokens, stop)
    assert "".join(pieces) == stream.text


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_at_once(kind: str) -> None:
    """A long text that nobody reads costs a few calls where tokens can be joined, also with a character cut in half."""
    tokenizer = tokenizers()[kind]
    calls, stream = [0], TextStream(tokenizer)
    decode = stream._decode_ids

    def counted(ids: list[int]) -> str:
        calls[0] += 1
        return decode(ids)

    stream._decode_ids = counted
    text = [1, 2] * 64
    if kind == "bytes":  # the last character lacks its last byte
        text = tiny_tokenizer()("The young bird tries its wings 🦆" * 8)["input_ids"][:-1]
    for at in range(0, len(text), 3):
        stream.append(text[at : at + 3])
    assert calls[0] == 0
    stream.finish()
    assert stream.text == tokenizer.decode(text, skip_special_tokens=True)
    assert calls[0] < 20 or kind in ("cleaned", "replaced")


def test_the_text_of_a_copy() -> None:
    """What is appended to a copy is not in the original."""
    stream = TextStream(tiny_tokenizer(), ("END",))
    stream.append(tiny_tokenizer()("a bird EN")["input_ids"])
    other = stream.copy()
    other.append(tiny_tokenizer()("D")["input_ids"])
    assert other.stopped and not stream.stopped
    assert (stream.take(), stream.finish()) == ("a bird ", "EN")


def test_text_is_read_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of many prompts are decoded when they are complete, and are those of the stream."""
    engine, asked = load(exact_target()), prompts(3)
    streamed = ["".join(engine.stream(p, max_new_tokens=12)) for p in asked]
    taken: list[str] = []
    monkeypatch.setattr(TextStream, "take", lambda stream: taken.append(stream.text))
    texts: list[int] = []
    decode = TextStream._decode_to
    monkeypatch.setattr(TextStream, "_decode_to", lambda stream, end: texts.append(id(stream)) or decode(stream, end))
    found: list[int] = []
    done = engine.generate_all(
        asked, max_new_tokens=12, batch=2, answered=lambda index: found.append(len(set(texts)))
    )  # fmt: skip
    assert [c.text for c in done] == streamed
    assert found == [1, 2, 3] and not taken


def test_thousands_of_tokens_without_text_after_half_a_character() -> None:
    tokenizer = tiny_tokenizer()
    half, nothing = tokenizer("é", add_special_tokens=False)["input_ids"][0], tokenizer.all_special_ids[0]
    stream = TextStream(tokenizer)
    stream.append([half, *[nothing] * 3000])
    assert stream.finish() == one_by_one(tokenizer, [half, *[nothing] * 3000], [])[1]


def test_a_stop_string_with_a_special_token_is_found():
    """The special token is the whole stop string or a part; tokens come one by one or together. Special tokens that no
    stop string has are not in the text."""
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("a<|pad|>bird<|im_start|>user\nit", add_special_tokens=False)["input_ids"]
    for stop, text in (
        ("<|im_start|>", "abird"),
        ("d<|im_start|>us", "abir"),
        ("<|im_start|>it", "abird<|im_start|>user\nit"),
    ):
        for size in (1, len(tokens)):
            stream = TextStream(tokenizer, (stop,))
            for at in range(0, len(tokens), size):
                stream.append(tokens[at : at + size])
            stream.finish()
            assert (stream.text, stream.stopped) == (text, text != "abird<|im_start|>user\nit"), (stop, size)
