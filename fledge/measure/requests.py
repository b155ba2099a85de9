"""What a record keeps of each request, and a few answers with the proposer of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fledge.decode.engine import Completion, Engine
from fledge.decode.request import AttributedText
from fledge.measure.metrics import committed_per_round, drafted_and_accepted
from fledge.measure.prompts import spread

SAMPLES = 3  # answers that a record shows
PROMPT_CHARACTERS = 400  # of a sample's prompt, from its end


def request_record(
    with_draft: Completion, without: Completion, seconds: tuple[float, float] | None = None
) -> dict[str, Any]:
    """The sums of one request: its tokens and rounds, the tokens that its rounds committed and drafted, and the two
    sums of α by depth. `seconds` are those with the draft and without; None if requests were decoded together, and none
    has a time of its own. `baseline_tokens` is there if the answer without the draft has another length."""
    committed, rounds = committed_per_round([with_draft.trace])
    reached, passed = drafted_and_accepted([with_draft.trace])
    record: dict[str, Any] = {
        "tokens": len(with_draft.tokens),
        "rounds": rounds,
        "committed": committed,
        "drafted": sum(r.drafted for r in with_draft.trace.rounds),
        "reached": reached,
        "passed": passed,
    }
    if len(without.tokens) != len(with_draft.tokens):
        record["baseline_tokens"] = len(without.tokens)
    if seconds is not None:
        record["seconds"], record["baseline_seconds"] = seconds
    return record


def sample_records(engine: Engine, ids: Sequence[list[int]], completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """At most SAMPLES answers, evenly spaced over the requests: the end of the prompt's text, and the answer in pieces,
    each with its proposer (`fledge.decode.request`)."""
    tokenizer = engine.target.tokenizer
    samples = []
    for i in spread(list(range(len(ids))), SAMPLES):
        text = AttributedText(tokenizer, engine.target.stop_ids)
        pieces = [*text.take(completions[i]), *text.finish()]
        samples.append({"prompt": tokenizer.decode(ids[i])[-PROMPT_CHARACTERS:], "pieces": [list(p) for p in pieces]})
    return samples
