"""P-EAGLE: loss and gradients against a dense definition with the cross-depth mask, dropping of slots, and drafting in
one pass."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.data.documents import Document
from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.drafts.weights import load_draft, read_draft_config, save_draft
from fledge.ops import training
from fledge.ops.loss import KINDS
from fledge.targets.native import NativeTarget
from fledge.targets.transformers import TransformersTarget
from fledge.train.objective import ttt
from fledge.train.plan import DropTokens
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup.draft import choose_mask_token
from fledge.types import Packed, Sampling
from support.decoding import SAMPLINGS, assert_same, both, fit_head, prompts, spoken
from support.devices import needs_triton, on_device
from support.losses import assert_same_gradients, gradients
from support.mutations import AlteredDraft, replace_function
from support.rows import document, layouts, row_of
from support.targets import (
    BOTH_IMPLEMENTATIONS,
    P_EAGLE,
    exact_target,
    features_for,
    tiny_draft,
    tiny_target,
    tiny_tokenizer,
)
from support.trees import SHAPES, paths_of, propose_one, proposer_of, slots_of, tree_lists

DOCUMENTS = [
    document(1, seed=2),
    document(23, (5, 11), (12, 23), seed=3),
    document(2, (0, 2), seed=5),
    document(17, (1, 17), seed=6),
    document(7, seed=7),
    document(12, (0, 4), (4, 12), seed=8),
]
VARIANTS = {
    "one layer": {},
    "three layers": dict(num_hidden_layers=3),
    "3.1": dict(num_hidden_layers=2, fc_norm=True, norm_output=True, draft_vocab_size=131),
    "own embeddings": dict(hidden_size=24, head_dim=6, attention_bias=True, mlp_bias=True, qk_norm=True),
}
STEPS = 5


def by_definition(draft: Draft, target: TransformersTarget, row: Packed, kept: list[Tensor]) -> Tensor:
    """The loss computed on one long sequence of (anchor, depth) pairs: all tokens at depth 0 and the kept slots at
    greater depths, with the cross-depth mask in every layer."""
    features = features_for(draft, target, row)
    n = row.token_T.numel()
    anchor = torch.cat([torch.arange(n), *kept[1:]])
    depth = torch.cat([torch.full((k.numel(),), d) for d, k in enumerate([torch.arange(n), *kept[1:]])])
    following = torch.cat([row.token_T[1:], row.token_T[:1] * 0])
    token = torch.where(depth == 0, following[anchor], draft.config.mask_token_id)
    fused = draft.fuse(features.aux_TAD)
    mask_state = draft.fuse(draft.mask_hidden.view(1, draft.config.num_aux_hidden_states, -1))
    hidden = torch.where((depth == 0)[:, None], fused[anchor], mask_state)
    a, d, doc = anchor, depth, row.doc_T[anchor]
    seen = (doc[:, None] == doc) & (
        ((d == 0)[None] & (a[None] <= a[:, None])) | ((a[:, None] == a) & (d[None] <= d[:, None]))
    )

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("shd,nhd->hsn", q, k) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hsn,nhd->shd", weights, v)

    hidden = draft.step(token, hidden, row.position_T[anchor] + depth, attend)
    ids, logits = draft.target_ids(), target.logits(features.last_TD)
    loss = hidden.new_zeros(())
    for depth_of, slots in enumerate(kept):
        at = [int(((anchor == s) & (depth == depth_of)).nonzero()) for s in slots.tolist()]
        teacher = logits[slots + 1 + depth_of]
        scored = torch.isin(teacher.argmax(-1), ids)
        said = draft.logits(draft.norm(hidden[at])).log_softmax(-1)
        loss = loss - (teacher[:, ids].softmax(-1) * said).sum(-1)[scored].sum()
    return loss


WAYS = [Implementation(), Implementation(slots=6, chunk=4), Implementation(slots=9, recompute=True)]


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("rate", [1.0, 0.7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_definitions(variant: str, rate: float, ways: Implementation) -> None:
    """Loss and gradients equal the definition's, with all slots or only the kept ones, at once or in chunks, with
    activations stored or recomputed."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        target = tiny_target(tokenizer=False, dtype=dtype)
        draft = tiny_draft(target, **P_EAGLE, **VARIANTS[variant])
        row, drop = row_of(DOCUMENTS, filler=5), DropTokens(rate, 0.1)
        kept = drop.keep(row, row.live(STEPS), "3 1 4")
        objective = Objective(depth=STEPS, gamma=1.0, drop=drop)
        step = ttt(draft, row, features_for(draft, target, row), target.logits, objective, ways, "3 1 4")
        whole = by_definition(draft, target, row, kept)
        torch.testing.assert_close(step.loss, whole.detach(), rtol=tolerance, atol=0)
        expected = gradients(draft, whole)
        assert all(bool(g.any()) for g in expected.values()), "a parameter has no gradient to compare"
        assert_same_gradients(gradients(draft, step.loss), expected, tolerance)
        assert step.live_K.tolist() == [k.numel() for k in kept]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slots", [None, 7])
def test_triton_layers_give_the_same_gradients(
    slots: int | None, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_triton()
    monkeypatch.setattr(training, "ROW_MULTIPLE", 4)  # the interpreter is slow
    target = tiny_target(tokenizer=False)
    draft = tiny_draft(target, num_hidden_layers=2, **P_EAGLE)
    on_device(target, draft)
    row, drop = row_of(DOCUMENTS, filler=5), DropTokens(0.8, 0.2)
    features, found = features_for(draft, target, row), {}
    for layers in ("eager", "triton"):
        ways = Implementation("eager", layers, layers, slots, recompute)
        step = ttt(draft, row, features, target.logits, Objective(depth=3, gamma=1.0, drop=drop), ways)
        found[layers] = gradients(draft, step.loss)
    assert_same_gradients(found["triton"], found["eager"], 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["eagle1", "eagle3", "peagle"])
def test_every_method_trains_for_every_loss(method: str, kind: str) -> None:
    """Every method trains with every loss: chunks give the gradients of the whole, and a small gradient step lowers the
    loss."""
    target = tiny_target(tokenizer=False, dtype=torch.float64)
    steps = 1 if method == "eagle1" else 3
    draft = tiny_draft(target, method=method, mask_token_id=399 if method == "peagle" else None)
    row = row_of(DOCUMENTS, filler=5)
    features, objective = features_for(draft, target, row), Objective(depth=steps, loss=kind, keep_out_of_vocab=True)
    step = ttt(draft, row, features, target.logits, objective)
    whole = gradients(draft, step.loss)
    few = ttt(draft, row, features, target.logits, objective, Implementation(slots=5, chunk=4))
    parts = gradients(draft, few.loss)
    assert_same_gradients(parts, whole, 1e-10)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            p -= 1e-4 * whole[name] / max(float(whole[name].norm()), 1e-9)
        after = ttt(draft, row, features, target.logits, objective)
    assert after.loss < step.loss


def read_a_word(masked: Any, *compute: Any) -> tuple[Tensor, Tensor]:
    token, state = masked(*compute)
    return torch.zeros_like(token), state


def read_another_state(masked: Any, *compute: Any) -> tuple[Tensor, Tensor]:
    token, state = masked(*compute)
    return token, state.roll(1, dims=1)


def stay_at_one_position(plan_steps: Any, *given: Any, **options: Any) -> Any:
    for k, plan in enumerate(plan_steps(*given, **options)):
        yield replace(plan, position_P=plan.position_P - k)


@pytest.mark.parametrize("mistake", [read_a_word, read_another_state, stay_at_one_position])
def test_breaking_it_is_noticed(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss differs from the definition's if masks read an ordinary token or another state, or all stand at one
    position."""
    from fledge.train import row_pass as passes_module

    target = tiny_target(tokenizer=False, dtype=torch.float64)
    draft = tiny_draft(target, **P_EAGLE)
    row, trained = row_of(DOCUMENTS), draft
    if mistake is stay_at_one_position:
        replace_function(monkeypatch, passes_module, "plan_steps", mistake)
    else:
        trained = AlteredDraft(draft, mask_inputs=mistake)
    step = ttt(trained, row, features_for(draft, target, row), target.logits, Objective(depth=STEPS, gamma=1.0))
    assert abs(step.loss - by_definition(draft, target, row, row.live(STEPS))).item() > 1e-3


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 6), st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.text(max_size=4))
def test_which_slots_are_dropped(layout, steps: int, rate: float, least: float, key: str) -> None:
    documents, filler = layout
    row = row_of(documents, filler)
    live = row.live(steps)
    kept = DropTokens(rate, least).keep(row, live, key)
    assert torch.equal(kept[0], live[0])
    for d in range(1, steps):
        pool = set(live[d].tolist()) & (set(kept[d - 1].tolist()) if d > 1 else set(live[d].tolist()))
        assert set(kept[d].tolist()) <= pool and kept[d].tolist() == sorted(kept[d].tolist())
        for doc in set(row.doc_T.tolist()):
            mine = [t for t in pool if row.doc_T[t] == doc]
            n = sum(row.doc_T[live[d]] == doc)
            wanted = min(len(mine), int(int(n) * max(rate**d, least)))
            assert sum(row.doc_T[kept[d]] == doc) == wanted
    again = DropTokens(rate, least).keep(row, live, key)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


# -- decoding ---------------------------------------------------------------------------------------------------------


@functools.cache
def fitted_draft() -> tuple[Draft, list[list[int]]]:
    target = exact_target()
    draft = tiny_draft(target, num_hidden_layers=2, hidden_size=256, intermediate_size=256, **P_EAGLE)
    asked = [p for p in prompts(8, longest=12, seed=13) if len(p) > 1]
    plain = load(target)
    fit_head(target, draft, [spoken(plain, p, 40)[0] for p in asked], 4)
    return draft, asked


def pair(native: bool = False) -> tuple[TransformersTarget, Draft, list[list[int]]]:
    """A target, a draft whose head is fitted to the target's answers so that some drafts are accepted, and prompts."""
    return exact_target(native), *fitted_draft()


WAYS: dict[str, dict[str, Any]] = {
    "parallel": dict(depth=4),
    "confidence": dict(depth=6, confidence=0.05),
    "tree": dict(mode="tree", depth=4, nodes=20),
    "shape": dict(mode="tree", shape=SHAPES["mixed"]),
}


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("way", WAYS)
def test_greedy_is_vanilla(way: str, native: bool) -> None:
    target, draft, asked = pair(native)
    engine = load(target, draft, **WAYS[way])
    accepted = 0
    together = engine.generate_all(asked, batch=3, max_new_tokens=30)
    for prompt, beside in zip(asked, together, strict=True):
        fast, plain = both(engine, prompt, max_new_tokens=30)
        assert_same(fast, plain)
        assert beside.tokens == fast.tokens
        assert [r.accepted for r in beside.trace.rounds] == [r.accepted for r in fast.trace.rounds]
        accepted += sum(r.accepted for r in fast.trace.rounds)
    assert accepted > 5


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("way", ["parallel", "tree"])
def test_sampled_is_vanilla_at_the_same_seed(way: str, name: str, native: bool) -> None:
    target, draft, asked = pair(native)
    engine = load(target, draft, **WAYS[way])
    for i, prompt in enumerate(asked[:4]):
        assert_same(*both(engine, prompt, max_new_tokens=20, sampling=Sampling(**SAMPLINGS[name]), request=i))


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("confidence", [0.0, 0.05])
def test_sampled_drafts_together_and_alone(confidence: float, native: bool) -> None:
    target, draft, asked = pair(native)
    engine = load(target, draft, depth=4, confidence=confidence)
    options = dict(max_new_tokens=20, sampling=Sampling(temperature=0.9, draft="sample", seed=4))
    together = engine.generate_all(asked, batch=4, **options)
    assert [c.tokens for c in together] == [
        engine.generate(p, request=i, **options).tokens for i, p in enumerate(asked)
    ]


@pytest.mark.parametrize("nodes", [2, 12, 100])
def test_the_tree_is_the_likeliest(nodes: int) -> None:
    """The tree holds the paths with the highest probabilities, in descending order, found by brute force from the
    logits of each level: among all paths of the first 40 tokens of each level, which no path of the tree can leave."""
    target, draft, asked = pair()
    depth, first = 3, 40
    token_R, aux = slots_of(target, [*asked[0], 5, 6])
    tree = propose_one(proposer_of(draft, mode="tree", depth=depth, nodes=nodes), token_R, aux)
    said = proposer_of(draft, depth=depth)
    propose_one(said, token_R, aux)
    logp, words = said.logits_BKW[0].float().log_softmax(-1).double().topk(first)
    pool, level_scores = [], torch.zeros(1, dtype=torch.float64)
    for level in range(depth):
        level_scores = (level_scores[:, None] + logp[level]).flatten()
        paths = itertools.product(*words[: level + 1].tolist())
        pool += zip(level_scores.tolist(), paths, strict=True)
    best = sorted(pool, key=lambda x: -x[0])[: nodes - 1]
    assert best[-1][0] > float(logp[:, -1].max()), "a token outside of the first 40 is in no better path"
    assert paths_of(tree) == [tuple(draft.target_ids()[torch.tensor(path)].tolist()) for _, path in best]


def test_a_chain_is_a_tree_of_one_path() -> None:
    target, draft, asked = pair()
    token_R, aux = slots_of(target, [*asked[1], 5, 6])
    chain = propose_one(proposer_of(draft, depth=4), token_R, aux)
    fixed = propose_one(proposer_of(draft, mode="tree", shape=SHAPES["chain"]), token_R, aux)
    assert [x[:4] for x in tree_lists(chain)[0]] == [x for x in tree_lists(fixed)[0]]


def test_modes_of_drafting() -> None:
    target, draft, _ = pair()
    assert load(target, draft, mode="chain").drafting.mode == "parallel", "a P-EAGLE draft makes its chain in one pass"
    with pytest.raises(ValueError, match="is always stable"):
        load(target, draft, stable=False)
    with pytest.raises(ValueError, match="parallel needs a draft of P-EAGLE"):
        load(target, tiny_draft(target), mode="parallel")
    with pytest.raises(ValueError, match=r"a tree of P-EAGLE has no width: .*; leave the width out"):
        load(target, draft, mode="tree", width=10)
    assert "width" not in load(target, draft, mode="tree").drafting.record()
    assert load(target, tiny_draft(target), mode="tree").drafting.record()["width"] == 10
    assert load(target, draft).drafting.mode == "parallel"
    assert load(target, tiny_draft(target)).drafting.mode == "chain"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """On a GPU, decoding in float64 gives the target's tokens, and the kernels' gradients are close to eager ones."""
    made, draft, asked = pair()
    for way, kind in itertools.product(WAYS.values(), (TransformersTarget, NativeTarget)):
        target = kind(copy.deepcopy(made.model).to("cuda"), made.tokenizer)
        engine = load(target, copy.deepcopy(draft).to("cuda"), **way)
        for done, prompt in zip(engine.generate_all(asked, batch=3, max_new_tokens=20), asked, strict=True):
            assert_same(done, engine.generate(prompt, max_new_tokens=20, speculate=False))
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    draft = tiny_draft(target, num_hidden_layers=2, **P_EAGLE)
    on_device(target, draft)
    row, drop = row_of(DOCUMENTS * 20, filler=5), DropTokens(0.8, 0.2)
    features, found = features_for(draft, target, row), {}
    for impl in ("eager", "flex", "triton"):
        layers = "eager" if impl == "eager" else "triton"
        for again in (False, True):
            ways = Implementation(impl, layers, layers, 300, again and impl != "eager")
            step = ttt(draft, row, features, target.logits, Objective(depth=4, gamma=1.0, drop=drop), ways)
            found[impl, again] = gradients(draft, step.loss)
    for how in found:
        assert_same_gradients(found[how], found["eager", False], 2e-2)


# -- files and the command line ---------------------------------------------------------------------------------------


def test_a_saved_draft_is_one_that_vllm_loads(tmp_path) -> None:
    target = tiny_target()
    draft = tiny_draft(target, num_hidden_layers=2, **P_EAGLE)
    save_draft(draft, tmp_path / "d", torch.float32)
    hf = json.loads((tmp_path / "d" / "config.json").read_text())
    assert hf["ptd_token_id"] == hf["pard_token"] == hf["mask_token_id"] == 399
    assert hf["architectures"] == ["LlamaForCausalLMEagle3"]
    back = load_draft(tmp_path / "d")
    assert back.config.method == "peagle" and torch.equal(back.mask_hidden, draft.mask_hidden)
    assert back.mask_hidden.shape == (1, 1, draft.config.num_aux_hidden_states * target.embedding.shape[1])
    del hf["fledge"]  # another trainer's config has no such key
    (tmp_path / "d" / "config.json").write_text(json.dumps(hf))
    assert read_draft_config(tmp_path / "d").method == "peagle"


def test_the_mask_token_does_not_occur_in_the_data() -> None:
    tokenizer = tiny_target().tokenizer
    vocab = 400
    documents = [Document(np.arange(50, 400, dtype=np.int32), np.zeros(350, dtype=np.int32))]
    chosen = choose_mask_token(documents, vocab, tokenizer, [0, 1])
    assert chosen in range(2, 50)
    assert chosen == max(i for i in tokenizer.added_tokens_decoder if 1 < i < 50)
    plain = tiny_tokenizer(None)
    assert choose_mask_token(documents, vocab, plain, [0, 1, *plain.added_tokens_decoder]) == 49
    with pytest.raises(ValueError, match="the data contains the whole vocabulary"):
        choose_mask_token([Document(np.arange(400, dtype=np.int32), np.zeros(400, dtype=np.int32))], vocab, tokenizer)
