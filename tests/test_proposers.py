"""Who proposed each token of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

import fledge
from fledge.decode.engine import Engine
from fledge.decode.request import AttributedText, Completion, proposers
from fledge.types import Round, Trace

PAIR = Path(__file__).parents[1] / "fledge" / "demo"
PROMPT = [{"role": "user", "content": "Tell me a story that begins: Once upon a time, there was a cat."}]


def test_a_round_ends_with_a_token_of_the_target():
    trace = Trace([Round(3, 2), Round(0, 0), Round(3, 3)])
    assert proposers(trace, 9) == [0, 1, 2, 0, 0, 1, 2, 3, 0]
    assert proposers(trace, 6) == [0, 1, 2, 0, 0, 1], "an answer may end within a round"


def test_without_a_draft_all_tokens_are_the_targets_own():
    assert proposers(Trace(), 4) == [0, 0, 0, 0]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return fledge.load(str(PAIR / "target"), draft=str(PAIR / "draft"), depth=4)


def test_pieces_of_a_stream_are_its_text(engine: Engine):
    completion, pieces = Completion(), []
    text = AttributedText(engine.target.tokenizer, engine.target.stop_ids)
    for _ in engine.stream(PROMPT, into=completion, max_new_tokens=40):
        pieces += text.take(completion)
    pieces += text.take(completion) + text.finish()
    assert "".join(piece for piece, _ in pieces) == completion.text
    by = {proposer for _, proposer in pieces}
    assert 0 in by and len(by) > 1 and by <= set(range(5)), "both draft and target proposed tokens"


def test_pieces_do_not_depend_on_when_they_are_taken(engine: Engine):
    completion = engine.generate(PROMPT, max_new_tokens=40)
    at_once = AttributedText(engine.target.tokenizer, engine.target.stop_ids)
    pieces, token_by_token, piecewise = at_once.take(completion), AttributedText(engine.target.tokenizer), []
    for n in range(len(completion.tokens) + 1):
        piecewise += token_by_token.take(Completion(completion.tokens[:n], trace=completion.trace))
    assert piecewise == pieces
    assert token_by_token.finish() == at_once.finish()


def test_stop_tokens_have_no_text(engine: Engine):
    completion = engine.generate(PROMPT, max_new_tokens=10)
    text = AttributedText(engine.target.tokenizer, stop_ids=completion.tokens[-1:])
    shown = "".join(piece for piece, _ in [*text.take(completion), *text.finish()])
    assert completion.text.startswith(shown) and len(shown) < len(completion.text)
