"""Weights that change between requests: moved, converted, replaced, or shared with a draft that other engines use."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fledge.decode.load import load
from fledge.targets.loading import target_of
from support.decoding import fit_head, prompts, spoken
from support.targets import P_EAGLE, tiny_draft, tiny_target
from support.trees import good_pair

PROMPT = [5, 200, 77, 31]


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "gate_proj" in name:
                weight.mul_(1.7)


def there_and_back(model: nn.Module) -> None:
    model.double().float()
    change(model)


def other_data(model: nn.Module) -> None:
    for weight, other in zip(model.parameters(), tiny_target(seed=5).model.parameters(), strict=True):
        weight.data = other.data


def assigned(model: nn.Module) -> None:
    model.load_state_dict(tiny_target(seed=5).model.state_dict(), assign=True)


@pytest.mark.parametrize("native", [True, False], ids=["native", "transformers"])
@pytest.mark.parametrize(
    "move", [change, there_and_back, other_data, assigned, nn.Module.double], ids=lambda f: f.__name__
)
def test_a_target_decodes_with_its_present_weights(move: Callable[[Any], Any], native: bool) -> None:
    """The joined projections of a native target, and all copies, follow the model's parameters to other storage."""
    target = tiny_target(native=native)
    draft = tiny_draft(target)
    engine, fixed = load(target, draft, depth=3), load(target)
    before = engine.generate(PROMPT, max_new_tokens=12).tokens
    move(target.model)
    draft.to(target.model.lm_head.weight.dtype)
    expected = target.reference_generate(PROMPT, 12)
    assert engine.generate(PROMPT, max_new_tokens=12).tokens == expected
    assert fixed.generate(PROMPT, max_new_tokens=12).tokens == expected
    assert (expected == before) == (move is nn.Module.double)
    assert target.moves == (move is not change)


def test_graphs_of_moved_weights_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that was kept with its graphs, which read weights by address, is not used after they have moved."""
    target = tiny_target(native=True)
    draft = tiny_draft(target)
    engine = load(target, draft, depth=3)
    monkeypatch.setattr("fledge.decode.batch.can_capture", lambda target, drafter: True)
    monkeypatch.setattr("fledge.decode.batch.Batch._replays", lambda batch: False)  # kept as on a GPU, but run directly
    kept = []
    for move in (lambda: None, lambda: target.model.double().float(), lambda: draft.double().float()):
        move()
        for _ in range(2):
            assert engine.generate(PROMPT, max_new_tokens=12).tokens == target.reference_generate(PROMPT, 12)
            kept.append(engine._idle_batches[True][0])
    assert [a is b for a, b in itertools.pairwise(kept)] == [True, False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", [{}, dict(method="eagle1"), P_EAGLE], ids=["eagle3", "eagle1", "peagle"])
def test_a_draft_may_be_converted(method: dict[str, Any], dtype: torch.dtype) -> None:
    target = tiny_target(native=True)
    draft = tiny_draft(target, **method)
    engine = load(target, draft, depth=3)
    expected = engine.generate(PROMPT, max_new_tokens=12).tokens
    draft.to(dtype)
    assert engine.generate(PROMPT, max_new_tokens=12).tokens == expected


def test_a_draft_of_several_engines_reads_the_embedding_of_each_ones_target() -> None:
    """As for a model and its fine-tuned version: the acceptance in one engine does not depend on the other."""
    target, asked = tiny_target(native=True), prompts(1)
    draft = tiny_draft(target)
    engine = load(target, draft, depth=1)
    fit_head(target, draft, [spoken(engine, prompt, 24)[0] for prompt in asked], 1)

    def accepted() -> list[int]:
        return [r.accepted for r in engine.generate(asked[0], max_new_tokens=24).trace.rounds]

    expected = accepted()
    other = load(tiny_target(native=True, seed=7), draft, depth=1)
    assert sum(expected) and accepted() == expected
    stream = engine.stream(asked[0], max_new_tokens=24, into=(done := type(engine.generate(asked[0]))()))
    next(stream)
    other.generate(asked[0], max_new_tokens=4)  # in the middle of the other engine's answer
    list(stream)
    assert [r.accepted for r in done.trace.rounds] == expected


def test_a_draft_used_with_one_target_after_the_other() -> None:
    """The next target's weights may be at the address of the last one's, which are gone."""
    draft = None
    for seed in range(6):
        target = tiny_target(native=True, seed=seed)
        draft = tiny_draft(target).to(torch.bfloat16) if draft is None else draft
        load(target, draft, depth=2).generate(PROMPT, max_new_tokens=2)
        assert torch.equal(draft.embedding, target.embedding.bfloat16())
        del target
        gc.collect()
    assert pickle.loads(pickle.dumps(draft)).config == draft.config


def test_weights_that_move_while_requests_are_decoded() -> None:
    """The model keeps its device and dtype. All requests have its tokens, those that begin afterwards too."""
    target = tiny_target(native=True)
    engine = load(target, tiny_draft(target), depth=2)
    expected = engine.generate(PROMPT, max_new_tokens=20).tokens
    stream = engine.stream(PROMPT, max_new_tokens=20, into=(done := type(engine.generate(PROMPT))()))
    next(stream)
    target.model.double().float()
    assert engine.generate(PROMPT, max_new_tokens=20).tokens == expected
    list(stream)
    assert done.tokens == expected


def test_a_copy_of_the_targets_embedding_follows_it() -> None:
    """As in a draft of another dtype, or on another device."""
    target = tiny_target(native=True)
    draft = tiny_draft(target).to(torch.bfloat16)
    engine = load(target, draft, depth=3)
    with torch.no_grad():
        target.embedding.mul_(1.5)
    assert engine.generate(PROMPT, max_new_tokens=4).tokens == target.reference_generate(PROMPT, 4)
    assert torch.equal(draft.embedding, target.embedding.bfloat16())


@pytest.mark.gpu
def test_weights_that_went_to_the_host_and_back() -> None:
    """As between phases of work that need the GPU's memory. The graphs of before, which would read what is now at the
    weights' old addresses, are not replayed."""
    made, fitted, asked = good_pair()
    model, draft = (copy.deepcopy(x).to("cuda", torch.float32) for x in (made.model, fitted))
    engine = load(target_of(model, made.tokenizer, implementation="native"), draft, depth=4)

    def answers() -> list[list[int]]:
        return [c.tokens for c in engine.generate_all(asked, batch=2, max_new_tokens=20)]

    expected = answers()
    for moved in (model, draft):
        moved.to("cpu")
        torch.cuda.empty_cache()
        others = [torch.full((n,), torch.nan, device="cuda") for n in (1 << 8, 1 << 12, 1 << 16, 1 << 22)]
        moved.to("cuda")
        assert answers() == expected and answers() == expected
        del others
