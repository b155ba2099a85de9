"""DFlash drafts, both ways in the block and causal: training and decoding compute what a draft's files say by the rules
of DFlash's authors, decoding changes no text, and other projects' files are read and written."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from fledge import load
from fledge.config import DraftConfig, Provenance
from fledge.decode import batch as batches
from fledge.decode.drafting import Drafting
from fledge.decode.propose import BlockProposer, Front, Proposer
from fledge.decode.sampling import BatchSampling
from fledge.drafts import kv_cache
from fledge.drafts.dflash import BlockConv, DFlashDraft
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import load_draft, open_draft, save_draft
from fledge.engines.export import Serving, engine_command, needs_export
from fledge.engines.support import layers_read, minimum_version, remarks, unsupported
from fledge.methods import DFLASH as ROW
from fledge.methods import EAGLE3, block_gamma, spread_taps
from fledge.ops.attention_block import block_attention
from fledge.ops.loss import dpace_weights
from fledge.ops.sampling import TOKEN, coupled
from fledge.targets.compatibility import connect_draft, layers_of
from fledge.targets.loading import target_of
from fledge.targets.transformers import TransformersTarget
from fledge.train import objective as objective_module
from fledge.train.objective import accepted_per_round, ttt
from fledge.train.plan import DrawAnchors
from fledge.train.row_pass import Chunk, Implementation, Objective, row_pass
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe import Recipe, resolve
from fledge.types import Sampling, TreeShape
from support.chats import tiny_chats
from support.commands import Ran
from support.decoding import SAMPLINGS, assert_same, both, differ_at_a_tie, prompts, spoken
from support.drafts_on_disk import V, make, refused, same, saved
from support.losses import gradients
from support.mutations import replace_function
from support.rows import DOCUMENTS, document, row_of
from support.sizes import RandomSizes
from support.targets import (
    DFLASH,
    exact_target,
    features_for,
    read_alone,
    tiny_draft,
    tiny_target,
    tiny_target_directory,
)
from support.trees import SHAPES, propose_one, proposer_of, state_of

K = 5
TRAINED = dict(provenance=Provenance(depth=K, target_layers=8))
KINDS: dict[str, dict[str, Any]] = {
    "both ways": {},
    "causal": dict(block_causal=True),
    "windows": dict(windows=(8, None)),
    "causal, windows": dict(block_causal=True, windows=(6, 6), attention_bias=True),
    "convolutions": dict(windows=(8, None), block_conv=True),
    "selector": dict(candidate_selector=True),
    "selector, convolutions, causal": dict(block_causal=True, block_conv=True, candidate_selector=True),
}


# -- the files and their authors' rules -------------------------------------------------------------------------------


def logits_by_the_files(directory: Path, target: TransformersTarget, tokens: list[int], anchor: int) -> Tensor:
    """The logits of the tokens after `tokens[anchor]`, [rows of the block - 1, V], by the rules of DFlash's authors,
    from the files of a draft and from transformers' hidden states of the tokens before the anchor. Of a draft with a
    selector, they are the scores if the text's tokens are chosen."""
    hf, w = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    block, B, d = hf["dflash_config"], hf["block_size"], hf["head_dim"]
    model, eps = target.model, hf["rms_norm_eps"]
    states = model(torch.tensor([tokens[:anchor]]), output_hidden_states=True).hidden_states
    tapped = torch.cat([states[i + 1][0] for i in block["target_layer_ids"]], dim=-1)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[f"{name}.weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def turned(x: Tensor, position: Tensor) -> Tensor:
        angle = position[:, None, None] / hf["rope_theta"] ** (torch.arange(0, d, 2) / d)
        cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], dim=-1) * sin

    def convolved(x: Tensor, sublayer: Callable[[Tensor], Tensor], name: str) -> Tensor:
        if f"{name}.base_kernel" not in w:
            return sublayer(x)
        deltas = project(x, f"{name}.kernel_projection")  # of the sublayer's input, for both convolutions
        taps, width = block["conv_kernel_size"], block["conv_group_size"]

        def convolve(x: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(x)
            for row in range(B):
                delta = deltas[row].view(2, taps, -1)[side]
                for tap in range(min(taps, row + 1)):
                    factor = w[f"{name}.base_kernel"][side, tap] + delta[tap].repeat_interleave(width)
                    out[row] += factor * x[row - tap]
            return out

        return convolve(sublayer(convolve(x, 0)), 1)

    context = norm(project(tapped, "fc"), "hidden_norm")
    x = embedding[[tokens[anchor], *[block["mask_token_id"]] * (B - 1)]]
    place = torch.arange(anchor + B)
    distance = place[anchor:, None] - place
    for i in range(hf["num_hidden_layers"]):
        at = f"layers.{i}"
        visible = torch.ones(B, anchor + B, dtype=torch.bool)
        if hf["is_causal"]:
            visible &= distance >= 0
        if hf["layer_types"][i] == "sliding_attention":
            visible &= distance < hf["sliding_window"]

        def attention(x: Tensor, at: str = at, visible: Tensor = visible) -> Tensor:
            both_kinds = torch.cat([context, x])
            q = norm(project(x, f"{at}.self_attn.q_proj").unflatten(-1, (-1, d)), f"{at}.self_attn.q_norm")
            k = norm(project(both_kinds, f"{at}.self_attn.k_proj").unflatten(-1, (-1, d)), f"{at}.self_attn.k_norm")
            v = project(both_kinds, f"{at}.self_attn.v_proj").unflatten(-1, (-1, d))
            q, k = turned(q, place[anchor:]), turned(k, place)
            k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
            attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)
            return project(attended.flatten(1), f"{at}.self_attn.o_proj")

        def mlp(x: Tensor, at: str = at) -> Tensor:
            return project(
                F.silu(project(x, f"{at}.mlp.gate_proj")) * project(x, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj"
            )

        x = x + convolved(norm(x, f"{at}.input_layernorm"), attention, f"{at}.attention_conv")
        x = x + convolved(norm(x, f"{at}.post_attention_layernorm"), mlp, f"{at}.mlp_conv")
    logits = F.linear(norm(x, "norm")[1:], head)
    if not w.get("candidate_selector.successor_codebook", torch.zeros(1)).any():
        return logits
    for k, h in enumerate(norm(x, "norm")[1:]):
        chosen, among = logits[k].clone(), logits[k].topk(block["selector_top_k"]).indices
        logits[k] = -math.inf
        for token in among.tolist():
            before = w["candidate_selector.predecessor_codebook"][tokens[anchor + k]]
            after = w["candidate_selector.successor_codebook"][token]
            gate = w["candidate_selector.hidden_projection.weight"] @ h
            logits[k, token] = chosen[token] + (before * gate * after).sum()
    return logits


@functools.cache
def float_target() -> TransformersTarget:
    return tiny_target()


def trained_scores(chunk: Chunk) -> list[Tensor]:
    """What training compares with the target at each step, [S_k, V]: the draft's logits, or its selector's scores."""
    draft = chunk.row_pass.draft
    logits = [draft.logits(h) for h in chunk.head_inputs]
    selection = objective_module._selection(chunk, [1.0] * len(logits))
    if selection is None:
        return logits
    found = []
    for z, h, before in zip(logits, chunk.head_inputs, selection.before_S.split(selection.counts), strict=True):
        ids, values = selection.selector.candidates(z)
        scores = values + selection.selector.pairs(h, before, ids)
        found.append(torch.full_like(z, -math.inf).scatter(1, ids, scores))
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_training_and_decoding_compute_what_the_files_say(kind: str, tmp_path: Path) -> None:
    """Names, layers, positions, labels, norms and masks, by another program that reads the draft's files. Each field
    matters: with another value, that program says something else."""
    target = float_target()
    save_draft(tiny_draft(target, **DFLASH, **KINDS[kind], **TRAINED), tmp_path / "d", torch.float32)
    draft = load_draft(tmp_path / "d")
    draft.share_target_weights(target.embedding, target.head_weight)
    d = document(20, (1, 20), seed=3)
    tokens = d.tokens.tolist()
    row = row_of([document(7, (2, 7), seed=8), d])  # d begins at 7
    passes = row_pass(draft, row, features_for(draft, target, row), Objective(depth=K))
    chunk = passes.chunk(passes.trained)
    said = trained_scores(chunk)
    _, features = read_alone(target, tokens, layers_of(draft.config, target))
    for anchor in (1, 4, 14):
        expected = logits_by_the_files(tmp_path / "d", target, tokens, anchor)
        proposer = proposer_of(draft)
        proposer.append(proposer.new_cache([64]))
        state = state_of(torch.tensor(tokens[1 : anchor + 1]), features.aux_TAD[:anchor])
        for k in range(K):
            front = Front(torch.tensor([[tokens[anchor + k]]]))  # as if the text's own tokens were chosen
            logits = proposer.expand(front) if k else proposer.begin(state)[1]
            torch.testing.assert_close(logits[0, 0], expected[k], atol=1e-4, rtol=1e-4)
            at = passes.trained[k].tolist().index(7 + anchor - 1)
            torch.testing.assert_close(said[k][at], expected[k], atol=1e-4, rtol=1e-4)
    hf = json.loads((tmp_path / "d" / "config.json").read_text())
    changes: list[dict[str, Any]] = [
        dict(dflash_config=hf["dflash_config"] | dict(target_layer_ids=[i - 1 for i in (2, 3, 6)])),
        dict(dflash_config=hf["dflash_config"] | dict(mask_token_id=7)),
        dict(is_causal=not hf["is_causal"]),
        dict(rope_theta=99.0),
        dict(block_size=K),
    ]
    for change in changes:
        (tmp_path / "d" / "config.json").write_text(json.dumps(hf | change))
        other = logits_by_the_files(tmp_path / "d", target, tokens, 14)
        same_rows = "block_size" in change and hf["is_causal"]  # a shorter causal block is the start of a longer one
        difference = (other - expected[: len(other)]).nan_to_num(posinf=9, neginf=9)  # nan: no candidate of both
        assert same_rows == (difference.abs().max() < 1e-3), change


def test_files_have_their_authors_layout(tmp_path: Path) -> None:
    draft = tiny_draft(float_target(), **DFLASH, windows=(None, 16), **TRAINED)
    save_draft(draft, tmp_path / "d", torch.bfloat16)
    hf, tensors = json.loads((tmp_path / "d" / "config.json").read_text()), load_file(tmp_path / "d/model.safetensors")
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
             "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
             "post_attention_layernorm"]  # fmt: skip
    names = {"fc", "hidden_norm", "norm", *(f"layers.{i}.{name}" for i in range(2) for name in layer)}
    assert tensors.keys() == {f"{name}.weight" for name in names}
    assert tensors["fc.weight"].shape == (32, 3 * 32) and tensors["layers.1.self_attn.k_norm.weight"].shape == (8,)
    block = dict(mask_token_id=399, target_layer_ids=[1, 3, 6], block_size=K + 1, causal=False, causal_head=False)
    expected = dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", block_size=K + 1, dflash_config=block, is_causal=False,
        num_target_layers=8, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"],
        sliding_window=16, use_sliding_window=True, hidden_act="silu", tie_word_embeddings=False, attention_bias=False,
        rope_theta=1e4, vocab_size=400, dtype="bfloat16",
    )  # fmt: skip
    assert {name: hf.get(name) for name in expected} == expected
    assert not {"draft_vocab_size", "mlp_bias", "bias", "mask_token_id", "eagle_config"} & hf.keys()


@torch.no_grad()
def test_a_selector_that_is_trained_on_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of training that reads the token after the one before, as another method's steps do."""
    target = exact_target()
    draft = tiny_draft(target, **DFLASH, candidate_selector=True)
    row = row_of(DOCUMENTS)
    passes = row_pass(draft, row, features_for(draft, target, row), Objective(depth=K))
    right = trained_scores(passes.chunk(passes.trained))
    replace_function(monkeypatch, objective_module, "step_inputs", lambda of, row, slots, k: of(row, slots, k + 1))
    wrong = trained_scores(passes.chunk(passes.trained))
    assert all((a - b).nan_to_num().abs().max() > 1e-3 for a, b in zip(right, wrong, strict=True))


@pytest.mark.parametrize("how", [dict(gamma=0.7), dict(gamma=0.7, loss="hard"), dict(dpace=True)], ids=str)
def test_the_selector_is_trained_by_its_definition(how: dict[str, Any]) -> None:
    """Loss, hits, α and all gradients, in chunks of slots and of teacher rows, are those of autograd on all logits."""
    target, objective = exact_target(), Objective(depth=K, **how)
    draft = tiny_draft(target, **DFLASH, candidate_selector=True, block_conv=True)
    row = row_of(DOCUMENTS, filler=2)
    features, live, position = features_for(draft, target, row), row.live(K), row.position_T.long()
    context = draft.context(draft.select_states(features), position)
    anchors = live[0]
    start = torch.tensor([max(a for a, _ in row.documents() if a <= t) for t in anchors.tolist()])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, *context[layer], start, anchors + 1, causal=False)

    h_NKE = draft.block(row.token_T[anchors + 1].long(), position[anchors] + 1, K, attend)
    losses, hits, alphas, counted = [], [0] * K, [], 0
    selector = draft.candidate_selector
    for k, slots in enumerate(live):
        losses.append([])
        alphas.append([])
        for t in slots.tolist():
            h = h_NKE[anchors.tolist().index(t), k]
            z, p = draft.logits(h), target.logits(features.last_TD[t + 1 + k]).softmax(-1)
            ids = z.topk(16).indices
            gate = selector.predecessor_codebook[row.token_T[t + 1 + k]] * selector.hidden_projection(h)
            score = z[ids] + selector.successor_codebook[ids] @ gate
            hits[k] += int(ids[score.argmax()]) == int(p.argmax())
            alphas[-1].append(torch.minimum(p[ids], score.softmax(-1)).sum().detach())
            if objective.loss == "hard":
                p = F.one_hot(row.token_T[t + 2 + k].long(), len(p)).double()
            losses[-1].append(-(p * z.log_softmax(-1)).sum())
            if int(p.argmax()) in ids:
                losses[-1][-1] = losses[-1][-1] - (p[ids] / p[ids].sum() * score.log_softmax(-1)).sum()
                counted += 1
    assert 0 < counted < sum(slots.numel() for slots in live) and sum(hits) > 0
    sums = [torch.stack(of_step) for of_step in losses]
    loss = sum(of_step.sum() * w for of_step, w in zip(sums, objective.discounts(), strict=True))
    weighted = loss
    if objective.dpace:
        blocks = [torch.searchsorted(anchors, slots) for slots in live]
        by_slot = dpace_weights([torch.stack(of_step) for of_step in alphas], blocks)
        weighted = sum((of_step * w).sum() for of_step, w in zip(sums, by_slot, strict=True))
    draft.zero_grad(set_to_none=True)
    expected = gradients(draft, weighted)
    for chunks in (None, 4):
        draft.zero_grad(set_to_none=True)
        found = ttt(draft, row, features, target.logits, objective, Implementation(slots=chunks, chunk=3))
        assert float(found.loss) == pytest.approx(float(loss.detach()), rel=1e-10)
        assert found.hit_K.tolist() == hits
        assert found.accept_K.tolist() == pytest.approx([float(sum(of_step)) for of_step in alphas])
        for name, p in draft.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-11, msg=name)
    with torch.no_grad():
        found = ttt(draft, row, features, target.logits, objective)
    assert float(found.loss) == pytest.approx(float(loss.detach()), rel=1e-10)


def test_drafts_are_drawn_from_the_distributions_that_are_verified() -> None:
    """Independent drafts of a selector: a token is drawn from the softmax of the scores after the token before it."""
    target, draft, asked = taught("selector")
    _, features = read_alone(target, asked[0], layers_of(draft.config, target))
    state = state_of(torch.tensor(asked[0][1:]), features.aux_TAD[:-1])
    drafted = set()
    for seed in range(8):
        proposer = proposer_of(draft)
        proposer.append(proposer.new_cache([64]))
        proposer.set_sampling(BatchSampling.of([Sampling(temperature=1.5, draft="sample", seed=seed)], [0], "cpu"))
        tree = proposer.propose(state)
        (chain,) = tree.token_BN.tolist()
        drafted.add(tuple(chain))
        again = proposer_of(draft)
        again.append(again.new_cache([64]))
        for k in range(K):
            logits = again.expand(Front(tree.token_BN[:, k : k + 1])) if k else again.begin(state)[1]
            assert int(logits.isfinite().sum()) == 16 and logits[0, 0, chain[k + 1]].isfinite()
            torch.testing.assert_close(tree.q_BKW[:, k], (logits[:, 0] / 1.5).softmax(-1))
    assert len(drafted) > 1


def test_coupled_drafts_have_the_noise_of_each_place() -> None:
    target, draft, asked = taught("selector")
    _, features = read_alone(target, asked[0], layers_of(draft.config, target))
    state = state_of(torch.tensor(asked[0][1:]), features.aux_TAD[:-1])
    sampling = BatchSampling.of([Sampling(temperature=0.8, seed=4)], [7], "cpu")

    def proposer(sampling: BatchSampling | None) -> Proposer:
        made = proposer_of(draft)
        made.append(made.new_cache([64]))
        if sampling is not None:
            made.set_sampling(sampling)
        return made

    (chain,) = proposer(sampling).propose(state).token_BN.tolist()
    both_kinds = proposer(None), proposer(sampling)
    for k in range(K):
        front = Front(torch.tensor([[chain[k]]]))
        plain, noisy = (each.expand(front) if k else each.begin(state)[1] for each in both_kinds)
        place_11 = both_kinds[0].cache.length_B[:, None] + 1 + k
        expected = coupled(plain, sampling.keys(place_11, TOKEN), sampling.temperature_B)
        torch.testing.assert_close(noisy, expected)
        assert int(noisy.argmax()) == chain[k + 1]


def test_trees_of_a_selector_are_refused() -> None:
    target, draft, _ = taught("selector")
    for way in ("tree", "shape"):
        with pytest.raises(ValueError, match=r"its candidate selector.*leave the tree out to draft a chain"):
            load(target, draft, **WAYS[way])

    class Selecting(DFlashDraft):  # of elsewhere, whose config does not say it
        def selector(self) -> Any:
            return object()

    plain = taught("both ways")[1]
    changed = copy.copy(plain)
    changed.__class__ = Selecting
    with pytest.raises(ValueError, match="its candidate selector"):
        Drafting(mode="tree", nodes=8).for_draft(plain.config).proposer(changed)


def test_files_of_drafts_with_convolutions_are_dflash_2s(tmp_path: Path) -> None:
    """vLLM and SGLang load convolutions only together with a selector. One of zeros changes no token."""
    draft = tiny_draft(float_target(), **DFLASH, block_conv=True, **TRAINED)
    save_draft(draft, tmp_path / "d", torch.float32)
    hf, tensors = json.loads((tmp_path / "d" / "config.json").read_text()), load_file(tmp_path / "d/model.safetensors")
    added = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=16, selector_top_k=16)
    assert hf["architectures"] == ["DFlash2DraftModel"] and added.items() <= hf["dflash_config"].items()
    shapes = {f"{x}_conv.base_kernel": (2, 2, 32) for x in ("attention", "mlp")}
    shapes |= {f"{x}_conv.kernel_projection.weight": (2 * 2 * 2, 32) for x in ("attention", "mlp")}
    for i in range(2):
        assert {name: tuple(tensors[f"layers.{i}.{name}"].shape) for name in shapes} == shapes
    selector = {name: x for name, x in tensors.items() if name.startswith("candidate_selector.")}
    assert {name.partition(".")[2]: tuple(x.shape) for name, x in selector.items()} == {
        "predecessor_codebook": (400, 16), "successor_codebook": (400, 16), "hidden_projection.weight": (16, 32),
    }  # fmt: skip
    assert not any(x.any() for x in selector.values())
    again = load_draft(tmp_path / "d")
    assert same(again, draft) and again.config.block_conv
    for engine, version in (("vllm", "0.33"), ("sglang", "0.5.23")):
        assert minimum_version(again.config, engine) == version
    tensors["candidate_selector.successor_codebook"][3] = 1.0
    save_file(tensors, tmp_path / "d" / "model.safetensors", {"format": "pt"})
    refused(tmp_path / "d", "candidate_selector.successor_codebook is not part of such a draft")


def test_files_of_drafts_with_a_selector_are_dflash_2s(tmp_path: Path) -> None:
    """Without convolutions, the file has such that change nothing. Changed ones are not read as if they were these."""
    whole = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
    for block_conv in (False, True):
        draft = tiny_draft(float_target(), **DFLASH, candidate_selector=True, block_conv=block_conv, **TRAINED)
        save_draft(draft, tmp_path / "d", torch.float32)
        hf, tensors = (
            json.loads((tmp_path / "d" / "config.json").read_text()),
            load_file(tmp_path / "d/model.safetensors"),
        )
        assert hf["architectures"] == ["DFlash2DraftModel"] and whole.items() <= hf["dflash_config"].items()
        assert hf["fledge"].get("block_conv", True) == block_conv and "candidate_selector" not in hf["fledge"]
        for name in ("predecessor_codebook", "successor_codebook"):
            assert tensors[f"candidate_selector.{name}"].shape == (400, 256)
        base = tensors["layers.1.mlp_conv.base_kernel"]
        assert block_conv == (not (base[:, 0] == 1).all()) and block_conv == bool(base[:, 1].any())
        assert same(load_draft(tmp_path / "d"), draft)
    hf["fledge"]["block_conv"] = False
    (tmp_path / "d" / "config.json").write_text(json.dumps(hf))
    refused(tmp_path / "d", "base_kernel is not part of such a draft")


@torch.no_grad()
@pytest.mark.parametrize("parts", [dict(block_conv=True), dict(block_conv=True, candidate_selector=True)])
def test_new_convolutions_and_selectors_change_nothing(parts: dict[str, bool]) -> None:
    """A new draft with them has the weights and the logits of a new draft without, to the bit, and drafts the same."""
    target, row, found, drafted = exact_target(), row_of(DOCUMENTS), [], []
    for on in ({}, parts):
        config = DraftConfig.for_target(target.shape, max_length=64, **on, **DFLASH)
        torch.manual_seed(3)
        draft = new_draft(config)
        draft.initialize(target.last_layer_weights(), target.head_weight, target.embedding)
        draft = draft.to(target.dtype)
        connect_draft(draft, target)
        passes = row_pass(draft, row, features_for(draft, target, row), Objective(depth=K))
        found.append(passes.chunk(passes.trained).head_inputs)
        _, features = read_alone(target, list(range(20)), layers_of(draft.config, target))
        drafted.append(propose_one(proposer_of(draft), torch.arange(1, 20), features.aux_TAD[:19]).token_BN)
    assert all(torch.equal(plain, other) for plain, other in zip(*found, strict=True))
    assert torch.equal(*drafted)


def test_convolutions_learn_from_their_first_step() -> None:
    target = exact_target()
    draft = tiny_draft(target, **DFLASH, block_conv=True)
    convolutions = [m for m in draft.modules() if isinstance(m, BlockConv)]
    assert len(convolutions) == 4
    for m in convolutions:
        m.reset()
    row = row_of(DOCUMENTS)
    ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=K))
    assert all(p.grad.any() for m in convolutions for p in m.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_saved_drafts_are_loaded_as_they_were(kind: str, tmp_path: Path) -> None:
    draft = saved(tmp_path / "d", V, **(DFLASH | dict(mask_token_id=3)), **KINDS[kind], **TRAINED)
    again = load_draft(tmp_path / "d")
    assert isinstance(again, DFlashDraft) and same(again, draft)
    for name in (
        "method",
        "block_causal",
        "block_conv",
        "windows",
        "aux_layers",
        "mask_token_id",
        "num_hidden_layers",
        "qk_norm",
    ):
        assert getattr(again.config, name) == getattr(draft.config, name), name
    assert again.config.provenance.depth == K and again.causal == draft.config.block_causal
    for engine in ("vllm", "sglang"):
        assert unsupported(again.config, engine) is None and not needs_export(open_draft(tmp_path / "d"), engine)
    for engine in ("safeailab", "speculators"):
        assert unsupported(again.config, engine) is not None


# -- the files of others ----------------------------------------------------------------------------------------------


def foreign(
    directory: Path, *, fields: dict[str, Any], block: dict[str, Any] | None = None, drop: str = "", **parts: bool
) -> Path:
    """Writes a draft as SpecForge writes it, with some fields changed (None: without the field). `parts` are fields of
    its `DraftConfig`."""
    draft = make(V, **(DFLASH | dict(mask_token_id=3) | parts))
    hf = dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", attention_bias=False, attention_dropout=0.0,
        auto_map={"AutoModel": "dflash.DFlashDraftModel"}, block_size=16, bos_token_id=2, eos_token_id=1, head_dim=8,
        hidden_act="silu", hidden_size=32, initializer_range=0.02, intermediate_size=48,
        layer_types=["full_attention"] * 2, max_position_embeddings=256, max_window_layers=2, num_attention_heads=4,
        num_hidden_layers=2, num_key_value_heads=2, num_target_layers=8, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=1e6, sliding_window=None, tie_word_embeddings=False, use_cache=True, use_sliding_window=False,
        vocab_size=V, dtype="bfloat16", dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 3, 6]},
    ) | fields  # fmt: skip
    hf["dflash_config"] = hf["dflash_config"] | (block or {})
    hf = {name: value for name, value in hf.items() if name != drop}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(draft.state_dict(), directory / "model.safetensors", {"format": "pt"})
    return directory


MIXED = ["full_attention", "sliding_attention"]
SLIDING = dict(layer_types=["sliding_attention"] * 2, sliding_window=64, use_sliding_window=True)


@pytest.mark.parametrize(
    ("fields", "block", "causal", "windows", "misread"),
    [
        ({}, {}, False, (), ""),
        (dict(is_causal=True), {}, True, (), "vllm"),  # 0.26 reads dflash_config.causal
        ({}, dict(causal_head=True), True, (), "vllm sglang"),  # JetSpec
        (dict(is_causal=False), dict(causal=True), True, (), "vllm sglang"),  # JetSpec's kind, by AutoModel
        (SLIDING, {}, True, (64, 64), ""),  # z-lab's default for layers with a window
        (SLIDING | dict(is_causal=False), {}, False, (64, 64), "vllm"),
        (dict(layer_types=MIXED, sliding_window=64, is_causal=True), {}, True, (None, 64), "vllm"),
    ],
)
def test_drafts_of_other_trainers_are_read(
    fields: dict[str, Any], block: dict[str, Any], causal: bool, windows: tuple[int | None, ...], misread: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """`misread` are the engines of which a version takes the block for the other kind; an export cures that."""
    directory = foreign(tmp_path / "d", fields=fields, block=block)
    files = open_draft(directory)
    config = files.config
    assert (config.method, config.block_causal, config.windows) == ("dflash", causal, windows)
    assert config.aux_layers == (2, 4, 7) and config.num_aux_hidden_states == 3 and config.mask_token_id == 3
    assert (config.provenance.depth, config.provenance.target_layers, config.rope.rope_theta) == (15, 8, 1e6)
    assert config.num_hidden_layers == 2
    assert [engine for engine in ("vllm", "sglang") if needs_export(files, engine)] == misread.split()
    save_draft(load_draft(directory), tmp_path / "again", torch.float32)
    again = open_draft(tmp_path / "again")
    assert again.config.with_provenance(vocabulary_sha256=None) == config
    assert not needs_export(again, "vllm") and not needs_export(again, "sglang")


def test_drafts_of_dflash_2s_trainers_are_read(tmp_path: Path) -> None:
    """AutoModel's and SpecForge's fields, which vLLM reads in dflash_config only."""
    fields = dict(architectures=["DFlash2DraftModel"], block_size=8, is_causal=False) | SLIDING
    parts = dict(block_conv=True, candidate_selector=True)
    shapes = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
    files = open_draft(foreign(tmp_path / "a", fields=fields, block=shapes | dict(causal=False), **parts))
    assert files.config.block_conv and files.config.candidate_selector and files.config.provenance.depth == 7
    assert not needs_export(files, "vllm") and not needs_export(files, "sglang")
    top = foreign(tmp_path / "b", fields=fields | shapes, block=dict(causal=False), **parts)
    assert open_draft(top).config == files.config and needs_export(open_draft(top), "vllm")
    plain = foreign(tmp_path / "c", fields={}, block=shapes, **parts)  # of a class that is read without both parts
    assert open_draft(plain).config.block_conv and needs_export(open_draft(plain), "vllm")


def test_default_layers_and_other_places_are_read(tmp_path: Path) -> None:
    """The number of layers without their ids, and ids and block at the top level."""
    bare = foreign(tmp_path / "a", fields=dict(dflash_config={"mask_token_id": 3}, num_target_layers=36))
    with pytest.raises(ValueError, match=r"fc\.weight has shape"):  # two layers by default, and fc has three
        open_draft(bare)
    top = foreign(tmp_path / "b", fields=dict(dflash_config={}, mask_token_id=3, target_layer_ids=[1, 3, 6]))
    assert open_draft(top).config.aux_layers == (2, 4, 7)
    inside = foreign(tmp_path / "c", fields={}, block=dict(block_size=8), drop="block_size")
    assert open_draft(inside).config.provenance.depth == 7
    unsaid = foreign(tmp_path / "d", fields={}, drop="block_size")  # the authors' code takes 16 rows
    assert open_draft(unsaid).config.provenance.depth == ROW.depth == 15
    hf = json.loads((top / "config.json").read_text())
    for engine in ("vllm", "sglang"):  # the list is read in both places
        assert layers_read(hf, engine, 8, "dflash") == (2, 4, 7) and layers_read({}, engine, 8, "dflash") is None


@pytest.mark.parametrize(
    ("fields", "block", "drop", "reason"),
    [
        ({}, dict(mask_token_id=None), "", "without mask_token_id"),
        ({}, dict(target_layer_ids=None), "num_target_layers", "without dflash_config.target_layer_ids"),
        ({}, dict(target_layer_ids=[3, 1, 6]), "", r"target_layer_ids \[3, 1, 6\] do not ascend"),
        ({}, dict(causal=True, causal_head=False), "", "contradict each other"),
        (dict(layer_types=MIXED, sliding_window=64), {}, "", "is_causal is missing"),
        (dict(layer_types=["sliding_attention"] * 2), {}, "", "sliding_window is missing"),
        (SLIDING, {}, "layer_types", "layer_types, which say which layers have the window, are missing"),
        ({}, dict(use_swa=True, swa_window_size=64), "layer_types", "layer_types, which say which layers"),
        (dict(is_causal=True), dict(causal=False), "", "dflash_config says that a block is not causal"),
        (SLIDING | dict(sliding_window=8), {}, "", "a sliding window of 8 is narrower than a block, which has 16 rows"),
        (dict(mlp_bias=True), {}, "", "the MLPs of DFlash have no biases"),
        (
            dict(architectures=["DFlash2DraftModel"]),
            dict(conv_kernel_size=3),
            "",
            "conv_kernel_size is 3; fledge has drafts with 2",
        ),
        ({}, dict(conv_kernel_size=2, conv_group_size=8), "", "conv_group_size is 8; fledge has drafts with 16"),
        ({}, dict(conv_kernel_size=2), "", "layers.0.attention_conv.base_kernel is missing"),
        ({}, dict(selector_rank=32), "", "selector_rank is 32; fledge has drafts with 256 only"),
        ({}, dict(selector_rank=256), "", "candidate_selector.predecessor_codebook is missing"),
        ({}, dict(markov_rank=256), "", "markov_rank is 256: fledge has no drafts of this kind"),
        ({}, dict(final_logit_softcapping=30.0), "", "final_logit_softcapping is 30.0"),
        (dict(mask_token_id=5), {}, "", "the mask token is 5 in mask_token_id and 3 in dflash_config.mask_token_id"),
        (dict(draft_vocab_size=60), {}, "", "uses its target's head"),
    ],
)
def test_what_fledge_would_compute_otherwise_is_refused(
    fields: dict[str, Any], block: dict[str, Any], drop: str, reason: str, tmp_path: Path
) -> None:
    refused(foreign(tmp_path / "d", fields=fields, block=block, drop=drop), reason)


def of_speculators(directory: Path, *, top: dict[str, Any], layer: dict[str, Any]) -> Path:
    """Writes a draft as speculators writes it, with some fields changed (None: without the field)."""
    draft = make(V, **(DFLASH | dict(mask_token_id=3)))
    layers = dict(
        model_type="qwen3", attention_bias=False, head_dim=8, hidden_act="silu", hidden_size=32, intermediate_size=48,
        layer_types=["full_attention"] * 2, max_position_embeddings=256, num_attention_heads=4, num_hidden_layers=2,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=None, vocab_size=V,
    ) | layer  # fmt: skip
    hf = dict(
        architectures=["DFlashDraftModel"], speculators_model_type="dflash", draft_vocab_size=V, block_size=8,
        aux_hidden_state_layer_ids=[2, 4, 7], mask_token_id=3, sliding_window_non_causal=False,
        sample_from_anchor=False, shift_label=False, projector_type="dflash", transformer_layer_config=layers,
        speculators_config={
            "algorithm": "dflash", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "owner/target"},
        },
    ) | top  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({name: x for name, x in hf.items() if x is not None}))
    save_file(draft.state_dict(), directory / "model.safetensors", {"format": "pt"})
    return directory


WINDOWS = dict(layer_types=["sliding_attention"] * 2, sliding_window=64)


@pytest.mark.parametrize(
    ("top", "layer", "causal", "windows"),
    [
        ({}, {}, False, ()),
        (dict(sliding_window_non_causal=None), WINDOWS, True, (64, 64)),
        (dict(sliding_window_non_causal=True), WINDOWS, False, (64, 64)),
        (dict(sliding_window_non_causal=True), dict(layer_types=MIXED, sliding_window=64), False, (None, 64)),
    ],
)
def test_drafts_of_speculators_are_read(
    top: dict[str, Any], layer: dict[str, Any], causal: bool, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    """And vLLM and SGLang load what an export makes of them."""
    files = open_draft(of_speculators(tmp_path / "d", top=top, layer=layer))
    config = files.config
    assert (config.method, config.block_causal, config.windows) == ("dflash", causal, windows)
    assert (config.aux_layers, config.mask_token_id, config.num_hidden_layers) == ((2, 4, 7), 3, 2)
    assert (config.provenance.depth, config.provenance.target) == (7, "owner/target")
    assert files.layout == "speculators' format" and needs_export(files, "vllm") and needs_export(files, "sglang")
    save_draft(load_draft(tmp_path / "d"), tmp_path / "again", torch.float32)
    again = open_draft(tmp_path / "again")
    assert again.config.with_provenance(vocabulary_sha256=None) == config and not needs_export(again, "vllm")


def test_fewer_proposed_tokens_in_speculators_format_leave_the_block_as_it_is(tmp_path: Path) -> None:
    """A row of a block that sees both ways would differ in a shorter block."""
    few = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    directory = of_speculators(tmp_path / "d", top=dict(speculators_config=few), layer={})
    assert open_draft(directory).config.provenance.depth == 7


@pytest.mark.parametrize(
    ("top", "layer", "reason"),
    [
        (dict(sample_from_anchor=True), {}, "sample_from_anchor is true: a token for the anchor's row too"),
        (dict(shift_label=True), {}, "shift_label is true"),
        (dict(projector_type="domino"), {}, "projector_type is 'domino'"),
        ({}, dict(layer_types=MIXED, sliding_window=64), "blocks whose layers are all of one kind"),
        (dict(aux_hidden_state_layer_ids=None), {}, "without aux_hidden_state_layer_ids"),
        (dict(aux_hidden_state_layer_ids=[2, 4, "x"]), {}, "aux_hidden_state_layer_ids"),
        (dict(draft_vocab_size=60), {}, "uses its target's head"),
        (dict(mask_token_id=None), {}, "without mask_token_id"),
    ],
)
def test_blocks_of_speculators_that_fledge_lacks_are_refused(
    top: dict[str, Any], layer: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    refused(of_speculators(tmp_path / "d", top=top, layer=layer), reason)


def test_other_methods_have_no_blocks() -> None:
    shape = dict(
        hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, vocab_size=9,
        draft_vocab_size=9, target_hidden_size=8,
    )  # fmt: skip
    parts = [(name, True) for name in ("block_causal", "block_conv", "candidate_selector")]
    for name, value in (*parts, ("windows", (4,))):
        with pytest.raises(ValueError, match=f"{EAGLE3.title} drafts no block of rows; leave it out"):
            DraftConfig(**shape, **{name: value})
    with pytest.raises(ValueError, match="must list the target's layers"):
        DraftConfig(**shape, method="dflash", mask_token_id=3)
    with pytest.raises(ValueError, match="block_conv needs a hidden size that is a multiple of 16, and it is 40"):
        make(V, **(DFLASH | dict(mask_token_id=3, block_conv=True, hidden_size=40, target_hidden_size=40)))
    with pytest.raises(ValueError, match="several sizes"):
        make(V, **(DFLASH | dict(mask_token_id=3, windows=(8, 6))))


def test_no_shape_is_deeper_than_a_block() -> None:
    target, draft, _ = taught("causal")
    deep = TreeShape.from_paths([[0] * n for n in range(1, K + 2)])
    with pytest.raises(ValueError, match=f"a depth of {K + 1} is above {K}, the tokens of a block"):
        load(target, draft, mode="tree", shape=deep)


# -- defaults, and what is trained ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target_layers", "layers", "taps"),
    [
        (36, 5, (2, 10, 18, 26, 34)),
        (36, 1, (19,)),
        (48, 8, (2, 8, 15, 21, 27, 33, 40, 46)),
        (8, 5, (2, 3, 4, 5, 6)),
        (6, 5, (1, 2, 3, 4, 5)),
        (4, 5, (1, 2, 3)),
        (2, 5, (1,)),
        (1, 5, (1,)),
        (1, 1, (1,)),
    ],
)
def test_the_layers_that_are_read_by_default(target_layers: int, layers: int, taps: tuple[int, ...]) -> None:
    assert spread_taps(target_layers, layers) == taps


def recipe_of(tmp_path: Path, **options: Any) -> Recipe:
    data = tmp_path / "chats.jsonl"
    data.write_text("{}\n")
    return resolve(TrainOptions(target="t", data=[str(data)], device="cpu", **options))


def test_the_method_has_defaults_of_its_own(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, method="dflash")
    assert (recipe.depth, recipe.layers, recipe.objective.drop) == (15, 5, DrawAnchors(512))
    assert recipe.objective.gamma == pytest.approx(math.exp(-1 / 7)) == block_gamma(15)
    assert recipe_of(tmp_path, method="dflash", depth=7).objective.gamma == pytest.approx(math.exp(-1 / 4))
    given = recipe_of(tmp_path, method="dflash", depth=9, gamma=1.0, anchors=30, layers=2, block_causal=True)
    assert (given.objective.gamma, given.objective.drop, given.layers) == (1.0, DrawAnchors(30), 2)
    assert given.switches == ("block_causal",)
    eagle = recipe_of(tmp_path, method="eagle3")
    assert (eagle.depth, eagle.layers, eagle.objective.gamma, eagle.objective.drop) == (5, 1, 0.8, None)
    for name, method, why in (
        ("sliding_window", "dflash", "--sliding-window 15 is narrower than a block, .* give 16 or more"),
        ("block_causal", "eagle3", "--block-causal has no effect with EAGLE-3; use --method dflash, or"),
        ("cod_rate", "dflash", "--cod-rate has no effect with DFlash"),
        ("draft_vocab", "dflash", "DFlash drafts over the target's whole vocabulary"),
    ):
        with pytest.raises(ValueError, match=why):
            values = {"block_causal": True, "cod_rate": 0.5, "sliding_window": 15}
            recipe_of(tmp_path, method=method, **{name: values.get(name, 100)})


def test_blocks_are_drawn_anew_from_all_live_slots() -> None:
    row = row_of(DOCUMENTS)
    live = row.live(K)
    counted = torch.zeros(row.token_T.numel())
    for i in range(300):
        kept = DrawAnchors(6).keep(row, live, f"{i}")
        assert kept[0].numel() == 6 and all(bool((a[1:] > a[:-1]).all()) for a in kept)
        for k, slots in enumerate(kept):
            drawn = set(kept[0].tolist())
            assert set(slots.tolist()) == drawn & set(live[k].tolist())
        counted[kept[0]] += 1
    again = DrawAnchors(6).keep(row, live, "7")
    assert all(torch.equal(a, b) for a, b in zip(again, DrawAnchors(6).keep(row, live, "7"), strict=True))
    expected = 300 * 6 / live[0].numel()
    assert (counted[live[0]] - expected).abs().max() < 5 * math.sqrt(expected)
    everything = DrawAnchors(1000).keep(row, live, "")
    assert all(torch.equal(a, b) for a, b in zip(everything, live, strict=True))


def test_drawn_blocks_are_trained_as_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of some blocks is the part of these blocks in the loss of all. A row counts its live slots."""
    target = exact_target()
    draft = tiny_draft(target, **DFLASH)
    row = row_of(DOCUMENTS, filler=3)
    features = features_for(draft, target, row)
    some = ttt(draft, row, features, target.logits, Objective(depth=3, gamma=0.7, drop=DrawAnchors(5)), key="a")
    live = row.live(3)
    kept = DrawAnchors(5).keep(row, live, "a")
    rest = [slots[~torch.isin(slots, kept[0])] for slots in live]
    assert some.live_K.tolist() == [slots.numel() for slots in kept] and some.supervised == live[0].numel()
    monkeypatch.setattr(DrawAnchors, "keep", lambda *_: rest)
    others = ttt(draft, row, features, target.logits, Objective(depth=3, gamma=0.7, drop=DrawAnchors(5)), key="a")
    whole = ttt(draft, row, features, target.logits, Objective(depth=3, gamma=0.7))
    assert float((some + others).loss) == pytest.approx(float(whole.loss.detach()), rel=1e-10)


# -- decoding ---------------------------------------------------------------------------------------------------------


@functools.cache
def taught(kind: str) -> tuple[TransformersTarget, DFlashDraft, list[list[int]]]:
    """A target, a draft that has learned the target's answers to some prompts, and these prompts."""
    target = exact_target()
    draft = tiny_draft(target, **DFLASH, **KINDS[kind], **TRAINED)
    asked = [p for p in prompts(6, longest=12, seed=13) if len(p) > 1]
    row = row_of([spoken(load(target), p, 20)[0] for p in asked])
    features = features_for(draft, target, row)
    optimizer = torch.optim.Adam(draft.parameters(), lr=4e-3)
    for _ in range(120):
        optimizer.zero_grad()
        sums = ttt(draft, row, features, target.logits, Objective(depth=K, gamma=1.0))
        for p in draft.parameters():
            p.grad /= float(sums.scored_K.sum())
        optimizer.step()
    assert isinstance(draft, DFlashDraft)
    return target, draft, asked


WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "short chain": dict(depth=2),
    "confident": dict(confidence=0.3),
    "tree": dict(mode="tree", nodes=16),
    "shape": dict(mode="tree", shape=SHAPES["mixed"]),
    "auto": dict(depth="auto"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_that_of_the_target(kind: str, way: str) -> None:
    """Greedy and sampled, one request and several. Rounds commit 1.5 tokens and more, and not all that is drafted."""
    target, draft, asked = taught(kind)
    if draft.config.candidate_selector and way in ("tree", "shape"):
        pytest.skip("a selector drafts chains only")
    engine = load(target, draft, **WAYS[way])
    rounds = 0
    for prompt in asked:
        fast, plain = both(engine, prompt, max_new_tokens=20)
        assert_same(fast, plain)
        rounds += len(fast.trace.rounds)
    assert rounds < 20 * len(asked) / 1.5
    for sampling in (Sampling(), Sampling(**SAMPLINGS["everything"])):
        together = engine.generate_all(asked, max_new_tokens=16, sampling=sampling, batch=3)
        alone = load(target).generate_all(asked, max_new_tokens=16, sampling=sampling)
        assert [c.tokens for c in together] == [c.tokens for c in alone]
        assert any(r.accepted < r.drafted for c in together for r in c.trace.rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_in_training_are_what_decoding_accepts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a text of the target's own, the rounds that training walks are those of the decoder, token by token."""
    target, draft, asked = taught(kind)
    engine, seen, every = load(target, draft), {}, set()

    def remember(walk: Any, live: Any, hits: Any) -> Any:
        seen["rounds"] = accepted_per_round(live, hits)
        return walk(live, hits)

    replace_function(monkeypatch, objective_module, "simulate_decoding", remember)
    for prompt in asked:
        d, done = spoken(engine, prompt, 26)  # a few tokens more than the draft has learned
        row = row_of([d])
        with torch.no_grad():
            ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=K))
        left, decoded = len(done.tokens) - 1, []
        for r in done.trace.rounds:
            decoded.append(min(r.accepted, left))
            left -= r.accepted + 1
        assert seen["rounds"] == decoded
        every |= set(decoded)
    assert {0, K} <= every, "both rejections and full acceptance must occur"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [*WAYS, "tree of 60", "tree of 256"])
def test_captured_rounds_are_the_same_on_a_gpu(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests join and leave, and the caches grow: graphs and single launches give the target's own tokens, greedy and
    sampled, up to near ties. Rounds commit 1.5 tokens and more."""
    if "selector" in kind and way.partition(" ")[0] in ("tree", "shape"):
        pytest.skip("a selector drafts chains")
    made, draft, asked = taught(kind)
    target = target_of(copy.deepcopy(made.model).to("cuda", torch.float32), made.tokenizer, implementation="native")
    draft = copy.deepcopy(draft).to("cuda", torch.float32)
    drafting = dict(mode="tree", nodes=int(way.split()[-1])) if way.startswith("tree of") else WAYS[way]
    asked, ties, done = [*asked, *(p * 3 for p in asked)], 0, {}
    for captures in (True, False):
        monkeypatch.setattr(kv_cache, "MIN_SLOTS", 1)
        if not captures:
            monkeypatch.setattr(batches, "can_capture", lambda *given: False)
        engine = load(target, draft, **drafting)
        if engine.chooser is not None:
            RandomSizes(engine, seed=1)
        for sampling in (Sampling(), Sampling(**SAMPLINGS["everything"])):
            for speculate in (True, False):
                options = dict(max_new_tokens=24, batch=3, sampling=sampling, speculate=speculate)
                done[captures, sampling.temperature, speculate] = engine.generate_all(asked, **options)
        assert any(batch.graphs for batch in engine._idle_batches[True]) == captures
    for temperature in {key[1] for key in done}:
        sampling = Sampling() if not temperature else Sampling(**SAMPLINGS["everything"])
        plain = done[True, temperature, False]
        for captures in (True, False):
            for i, (a, b) in enumerate(zip(done[captures, temperature, True], plain, strict=True)):
                if a.tokens != b.tokens:
                    ties += 1
                    assert differ_at_a_tie(made, asked[i], sampling, i, a, b), (captures, i)
    assert ties <= 2
    greedy = done[True, 0.0, True][: len(asked) // 2]
    assert sum(len(c.trace.rounds) for c in greedy) < 24 * len(greedy) / 1.5 or way == "auto"


def test_a_window_that_decoding_forgets_is_noticed() -> None:
    target, draft, _ = taught("windows")
    proposer = proposer_of(draft)
    assert isinstance(proposer, BlockProposer) and proposer.decoder.windows == [8, None]
    _, features = read_alone(target, list(range(20)), layers_of(draft.config, target))
    found = []
    for windows in ([8, None], [None, None]):
        proposer = proposer_of(draft)
        proposer.decoder.layers = [
            replace(w, window=at) for w, at in zip(proposer.decoder.layers, windows, strict=True)
        ]
        proposer.append(proposer.new_cache([64]))
        found.append(proposer.begin(state_of(torch.arange(1, 16), features.aux_TAD[:15]))[1])
    assert (found[0] - found[1]).abs().max() > 1e-3


# -- engines, and the commands ----------------------------------------------------------------------------------------


def test_engines_are_started_with_their_names_of_the_method(tmp_path: Path) -> None:
    draft = saved(tmp_path / "d", V, **(DFLASH | dict(mask_token_id=3)), **TRAINED)
    serving = Serving("owner/target", "draft", draft.config, K)
    command = engine_command("vllm", serving)
    said = json.loads(command[command.index("--speculative-config") + 1])
    assert said == {"method": "dflash", "model": "draft", "num_speculative_tokens": K}
    words = engine_command("sglang", serving)
    assert words[words.index("--speculative-algorithm") + 1] == "DFLASH"
    assert "--speculative-eagle-topk" not in words and "--speculative-dflash-block-size" not in words
    shorter = engine_command("sglang", replace(serving, depth=3))
    assert shorter[shorter.index("--speculative-dflash-block-size") + 1] == "4"
    for engine in ("vllm", "sglang"):
        with pytest.raises(ValueError, match="leave --tree-nodes and --tree-width out"):
            engine_command(engine, replace(serving, nodes=8))
    windows = saved(tmp_path / "w", V, **(DFLASH | dict(mask_token_id=3)), windows=(8, 8), **TRAINED).config
    assert minimum_version(windows, "sglang") == "0.5.23" and minimum_version(windows, "vllm") == "0.26"
    assert not remarks(windows, "vllm") and "V2" in remarks(replace(windows, windows=(8, None)), "vllm")[0]
    assert minimum_version(replace(windows, block_causal=True), "sglang") == "0.5.17"
    assert ROW.engines == {"vllm": "dflash", "sglang": "DFLASH"}


@pytest.mark.parametrize("causal", [False, True])
def test_from_training_to_serving(causal: bool, tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 60)
    words = ["--target", target, "--device", "cpu"]
    went = fledge(
        "train", *words, "--data", chats, "--method", "dflash", "--layers", 2, "--depth", 6, "--steps", 8,
        "--max-length", 64, "--anchors", 12, "--eval-tokens", 8, "--out", tmp_path / "run", "--seed", 3,
        *["--block-causal", "--sliding-window", 16, "--block-conv", "--candidate-selector"] * causal,
    )  # fmt: skip
    assert went.code == 0, went.err
    draft = tmp_path / "run" / "draft"
    config = load_draft(draft).config
    assert (config.block_causal, config.windows) == (causal, (16, 16) if causal else ())
    assert config.block_conv == config.candidate_selector == causal
    assert config.aux_layers == spread_taps(8, 2) == (2, 6)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(m["live"][0] <= 12 < m["supervised"] for m in metrics if "live" in m)
    went = fledge("check", "--draft", draft, *words)
    assert went.code == 0 and "The draft is sound." in went.out + went.err, went.out + went.err
    went = fledge("inspect", draft)
    seen = "the tokens of the block before it, and of the text the last 16 tokens" if causal else "the whole block"
    version = "0.33" if causal else "0.26"
    for text in (f"A drafted token sees {seen}.", "A DFlash draft: 2 layers", "Embedding and LM head are the target's",
                 f"vLLM can serve these files (from {version} on).", "Nothing is wrong with it."):  # fmt: skip
        assert text in went.out, went.out
    question = tmp_path / "prompts.jsonl"
    question.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a heron", "the bird")))
    record = tmp_path / "record.json"
    went = fledge("eval", "--draft", draft, *words, "--prompts", question, "--max-new-tokens", 8, "--out", record)
    assert went.code == 0 and "τ" in went.out + went.err, went.err
    assert fledge("export", "--draft", draft, "--to", "vllm").code == 0
    assert fledge("export", "--draft", draft, "--to", "safeailab", "--out", tmp_path / "e").code == 2
    went = fledge("serve", "--draft", draft, "--target", target, "--dry-run", "--skip-check")
    assert went.code == 0 and '"method": "dflash"' in went.out, went.err
    went = fledge("serve", "--draft", draft, "--target", target, "--dry-run", "--skip-check", "--depth", 7)
    assert went.code == 2 and "--depth 7 is above 6, the tokens of a block" in went.err.replace("\n", " "), went.err
    went = fledge(
        "train", *words, "--data", chats, "--init-from", draft, "--steps", 2, "--max-length", 64, "--eval-tokens", 8,
        "--out", tmp_path / "more",
    )  # fmt: skip
    assert went.code == 0 and load_draft(tmp_path / "more" / "draft").config.block_causal == causal, went.err
    assert fledge("train", "--dry-run", *words, "--data", chats, "--method", "dflash", "--steps", 2).code == 0


def change(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    hf = json.loads(file.read_text())
    for place, value in fields.items():
        inner, _, name = place.partition("__")
        (hf[inner] if name else hf)[name or inner] = value
    file.write_text(json.dumps(hf))


def test_a_changed_config_is_found_by_check(tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    """Each of the three places of causality, the layers that engines read, and the size of a block."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    words = ["--target", target, "--device", "cpu"]
    options = ["--method", "dflash", "--layers", 2, "--depth", 4, "--steps", 2, "--max-length", 64, "--eval-tokens", 4]
    assert fledge("train", *words, "--data", chats, *options, "--out", tmp_path / "run").code == 0
    draft = tmp_path / "run" / "draft"
    before = (draft / "config.json").read_text()
    for changed, text in (
        (dict(is_causal=True), "is_causal is true in config.json, and was false in training"),
        (dict(dflash_config__causal=True, dflash_config__causal_head=True), "block_causal is True"),
        (dict(dflash_config__target_layer_ids=[2, 6]), "dflash_config.target_layer_ids"),
        (dict(dflash_config__block_size=9), "dflash_config.block_size is 9"),
        (dict(dflash_config__mask_token_id=7), "mask_token_id is 7"),
    ):
        change(draft, **changed)
        went = fledge("check", "--draft", draft, "--target", target, "--files-only")
        assert went.code == 1 and text in (went.out + went.err).replace("\n", " "), (changed, went.out + went.err)
        (draft / "config.json").write_text(before)
    assert fledge("check", "--draft", draft, "--target", target, "--files-only").code == 0
