"""Evaluation: figures from traces, prompts from files, and near ties (differences caused by rounding)."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch

from fledge.data.record import Record
from fledge.decode.engine import Completion
from fledge.decode.load import load
from fledge.decode.propose import Proposer
from fledge.decode.rounds import RoundState
from fledge.drafts.draft import Draft
from fledge.measure.metrics import alpha, alpha_text, tau
from fledge.measure.prompts import prompt_of, read_prompts, spread
from fledge.measure.run import _gaps, _round_times, evaluate, near_ties, repeated_ngrams
from fledge.measure.table import chain_gains
from fledge.targets.loading import load_target
from fledge.targets.transformers import TransformersTarget
from fledge.types import Round, Sampling, Trace, Tree
from support.acceptance import rounds_by_definition, tau_of_alpha
from support.decoding import fit_head, spoken
from support.files import write_rows
from support.mutations import replace_function
from support.targets import (
    CHANNEL,
    CHANNEL_TOKENS,
    IN_CHANNEL,
    P_EAGLE,
    exact_target,
    scripted_target_directory,
    tiny_draft,
    tiny_target,
)


def test_tau_and_alpha_are_sums_divided_once():
    traces = [Trace([Round(3, 0), Round(3, 3)]), Trace([Round(3, 1)]), Trace()]
    assert tau(traces) == (1 + 4 + 2) / 3
    assert alpha(traces) == [2 / 3, 1 / 2, 1.0]
    assert alpha([Trace([Round(3, 1), Round(3, 0)])]) == [1 / 2, 0.0, None], "no round reached the third"
    assert alpha_text([1 / 2, 0.0, None]) == "0.50 0.00 -"
    assert tau([]) == 0.0 and alpha([]) == []


TEXTS = ["wings", "it can fly", "tries again until it can fly"]
WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth=3),
    "tree": dict(mode="tree", depth=3, nodes=12, width=3),
    "parallel": dict(depth=3),
}


@functools.cache
def practised(way: str) -> tuple[TransformersTarget, Draft]:
    """A target, and a draft fitted to the target's answers to TEXTS, so that part of its tokens are accepted."""
    target = exact_target()
    draft = tiny_draft(target, hidden_size=256, intermediate_size=256, **(P_EAGLE if way == "parallel" else {}))
    plain = load(target)
    fit_head(target, draft, [spoken(plain, plain.reader.template.prompt_ids(text), 40)[0] for text in TEXTS], 3)
    return target, draft


@pytest.mark.parametrize("way", WAYS)
def test_tau_and_alpha_are_those_of_the_definition(way: str) -> None:
    """A record's τ and α are those of the definition, in which every round drafts without caches."""
    engine = load(*practised(way), **WAYS[way])
    record = evaluate(
        {way: engine}, [Record("a prompt", text=text) for text in TEXTS], sampling=Sampling(), max_new_tokens=25
    )
    record = record[way]
    rounds = [r for text in TEXTS for r in rounds_by_definition(engine, engine.reader.template.prompt_ids(text), 25)]
    assert record["tau"] == sum(r + 1 for r in rounds) / len(rounds) and 1.2 < record["tau"] < 4
    reached = [sum(r >= k for r in rounds) for k in range(5)]
    assert record["alpha"] == [b / a if a else None for a, b in pairwise(reached)][: len(record["alpha"])]
    assert way == "tree" or record["tau"] == pytest.approx(tau_of_alpha(record["alpha"]))


@pytest.mark.parametrize("right", range(4))
def test_tau_of_a_draft_whose_acceptance_is_known(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If exactly the first `right` of three drafted tokens are the target's, τ is `right` + 1."""
    target = exact_target()
    engine = load(target, tiny_draft(target), depth=3)
    truth = engine.reader.template.prompt_ids(TEXTS[0])
    truth = [*truth, *engine.generate(truth, max_new_tokens=60, speculate=False).tokens]

    def knowing(propose: Any, proposer: Proposer, state: RoundState) -> Tree:
        tokens = propose(proposer, state).token_BN.tolist()[0]
        following = truth[int(state.length_B) + 1 :]
        tokens[1:] = [t if k < right else (t + 1) % 400 for k, t in enumerate(following[:3])]
        return Tree(torch.tensor([tokens]), None, 3)

    replace_function(monkeypatch, Proposer, "propose", knowing)
    prompts = [Record("a prompt", text=TEXTS[0])]
    record = evaluate({"known": engine}, prompts, sampling=Sampling(), max_new_tokens=40)["known"]
    assert record["tau"] == right + 1 and record["alpha"] == [
        float(k < right) if k <= right else None for k in range(3)
    ]
    assert record["identical"] == 1


def test_repeated_ngrams_counts_ngrams_that_occurred_before():
    assert repeated_ngrams([1, 2, 1, 2, 1], n=2) == (2, 4)
    assert repeated_ngrams([1, 2, 3], n=8) == (0, 0)


def test_prompts_of_every_kind(tmp_path):
    rows = {
        "turns": [{"turns": ["a", "b"], "category": "x"}],
        "prompt": [{"prompt": "def f"}],
        "text": [{"text": "0123456789"}],
        "messages": [{"messages": [{"role": r, "content": c} for r, c in zip("uaua", "1234", strict=True)]}],
    }
    for row in rows["messages"][0]["messages"]:
        row["role"] = {"u": "user", "a": "assistant"}[row["role"]]
    read = {}
    for kind, lines in rows.items():
        file = tmp_path / f"{kind}.jsonl"
        write_rows(file, lines)
        (read[kind],) = read_prompts(file)
    assert read["turns"].turns == ("a", "b") and read["prompt"].text == "def f" and read["text"].text == "01234"
    assert [m["content"] for m in read["messages"].messages] == ["1", "2", "3"]


def test_bad_prompts_are_named(tmp_path):
    for text, cause in (("", "is empty"), ("{", "line 1 is not JSON"), ('{"turns": "a"}\n', "line 1 has none of")):
        (tmp_path / "p.jsonl").write_text(text)
        with pytest.raises(ValueError, match=cause):
            read_prompts(tmp_path / "p.jsonl")


def test_a_limit_is_spread_over_the_file():
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert spread([1, 2], None) == [1, 2] == spread([1, 2], 5)


TARGET = tiny_target()
ENGINE = load(TARGET, tiny_draft(TARGET), depth=3)


@pytest.fixture
def engine():
    return ENGINE


def test_gaps_are_differences_of_the_two_largest_logits(engine):
    """The gap at each token is the difference of the two largest logits, for any number of tokens per call and any
    batch size."""
    prefix = engine.reader.template.prompt_ids("the young bird")
    done = engine.generate("the young bird", max_new_tokens=9, speculate=False)
    logits = engine.target.model(torch.tensor([prefix + done.tokens])).logits[0, len(prefix) - 1 : -1]
    top = logits.topk(2, dim=-1).values
    for width, batch in ((1, 1), (4, 1), (1, 3), (4, 3)):
        gaps = _gaps(engine, prefix, done.tokens, width, batch, Sampling())
        torch.testing.assert_close(gaps, (top[:, 0] - top[:, 1]).double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_difference_is_no_near_tie(engine, temperature):
    sampling = Sampling(temperature=temperature)
    right = engine.generate("the young bird", max_new_tokens=8, speculate=False, sampling=sampling)
    wrong = Completion(tokens=[*right.tokens[:-1], (right.tokens[-1] + 7) % 400])
    prefix = engine.reader.template.prompt_ids("the young bird")
    ties, noise = near_ties(engine, [0], [prefix], [wrong], [right], sampling, (1, engine.drafting.verified), 1)
    assert ties == 0 and noise is not None


def test_a_tie_within_the_noise_is_counted_as_one(engine, monkeypatch):
    """A difference is a near tie if the gap of the two best tokens is smaller than the noise of another batch shape."""
    from fledge.measure import run

    gaps = iter([torch.tensor([2.0, 1e-6]), torch.tensor([2.0, 2e-6])])
    monkeypatch.setattr(run, "_gaps", lambda *a: next(gaps))
    ties, noise = near_ties(engine, [0], [[1]], [Completion([5, 6])], [Completion([5, 7])], Sampling(), (1, 3), 1)
    assert ties == 1 and noise == pytest.approx(1e-6)


def test_noise_is_measured_with_the_batch_shapes_of_the_runs(engine, monkeypatch):
    """Noise is measured with one token per call and with a round's tokens, alone and in a batch; for the baseline, with
    one token per call only."""
    from fledge.measure import run

    seen = set()
    monkeypatch.setattr(run, "_gaps", lambda *a: seen.add(a[3:5]) or torch.ones(2))
    for widths, shapes in (((1, 4), {(1, 1), (1, 2), (4, 1), (4, 2)}), ((1,), {(1, 1), (1, 2)})):
        seen.clear()
        near_ties(engine, [0], [[1]], [Completion([5, 6])], [Completion([5, 7])], Sampling(), widths, 2)
        assert seen == shapes


def test_the_parts_of_a_round_and_a_token_without_a_draft():
    trace = Trace([Round(3, 1, t_draft=1.0, t_verify=2.0)] * 2, t_prefill=2.0, t_total=10.0)
    made = [Completion([1, 2, 3], trace=trace)], [Completion([1, 2, 3], trace=Trace(t_prefill=2.0, t_total=5.0))]
    assert _round_times(*made) == pytest.approx({
        "draft_ms": 1000, "verify_ms": 2000, "overhead_ms": 1000, "vanilla_token_ms": 1500, "drafted": 3,
        "prefill_share": 0.2,
    })  # fmt: skip


def test_the_gain_of_another_depth():
    """Of three tokens, the first is always accepted, the second in half of the rounds, and the third never."""
    gains = chain_gains([1.0, 0.5, 0.0], 3, draft=3.0, others=2.0)
    assert gains == pytest.approx({1: 2 / 3 * 2, 2: 2.5 / 4 * 2, 3: 1.0, 4: 2.5 / 6 * 2, 5: 2.5 / 7 * 2})
    assert chain_gains([1.0], 1, 1.0, 9.0)[3] == pytest.approx(4 / 12 * 5), "α stays beyond the measured depth"
    assert chain_gains([0.5, None], 2, 2.0, 2.0)[1] == pytest.approx(4 / 3), "no round came to the second position"
    assert chain_gains([0.5], 3, 3.0, 1.0) == {}, "fewer positions than the depth: all prompts left less room"


def test_later_turns_follow_answers_with_their_special_tokens(tmp_path):
    target = load_target(scripted_target_directory(tmp_path, CHANNEL, IN_CHANNEL, CHANNEL_TOKENS))
    prompt = Record("a prompt", turns=("Which bird?", "And that?"))
    [record] = evaluate(
        {"a": load(target, tiny_draft(target))}, [prompt], sampling=Sampling(), max_new_tokens=16
    ).values()  # fmt: skip
    assert IN_CHANNEL + "\n<|im_start|>user" in record["samples"][1]["prompt"]


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, grey heron.", "<|im_start|>user\nHi<|im_end|>"),
        ("one two three four", "one two"), ("onetwo", "one"), ("a", "a"), ("  \n  ", "  "),
    ],
)  # fmt: skip
def test_a_text_is_cut_between_words(text: str, prompt: str) -> None:
    assert prompt_of(Record("a row", text=text)).text == prompt
