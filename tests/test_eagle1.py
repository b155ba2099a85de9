"""EAGLE-1: loss and gradients against the paper's equations, files of drafts, and decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from fledge.data.documents import Document
from fledge.decode.engine import Completion
from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.drafts.weights import load_draft, read_draft_config, save_draft
from fledge.io.formats import config_from_hf
from fledge.ops import training
from fledge.ops.rope import apply_rope
from fledge.targets.compatibility import connect_draft
from fledge.targets.transformers import TransformersTarget
from fledge.train.objective import ttt
from fledge.train.row_pass import Implementation, Objective
from support.decoding import assert_same, both, prompts
from support.devices import needs_triton, on_device
from support.losses import gradients
from support.rows import document, live_by_definition, row_of
from support.targets import BOTH_IMPLEMENTATIONS, features_for, tiny_draft, tiny_target

DOCUMENTS = [
    document(1, seed=2),
    document(21, (5, 11), (13, 21), seed=3),
    document(2, (0, 2), seed=5),
    document(13, (1, 13), seed=6),
    document(7, seed=7),
]


def pair(
    dtype: torch.dtype = torch.float64, native: bool = False, **variant: Any
) -> tuple[TransformersTarget, Draft]:  # fmt: skip
    target = tiny_target(dtype=dtype, native=native)
    return target, tiny_draft(target, **{"method": "eagle1", **variant})


def by_the_paper(draft: Draft, target: TransformersTarget, d: Document) -> Tensor:
    """The paper's loss: 1.0 SmoothL1 + 0.1 soft cross-entropy, summed over a document's live slots, for
    f̂_{t+1} = layer(fc([e_{t+1} ; f_t])) with causal attention over all slots. SmoothL1 is a mean over the width of the
    state."""
    n, c, w = len(d.tokens), draft.config, dict(draft.named_parameters())
    live = sorted(t for t, k in live_by_definition(d, 1))
    if not live:
        return w["fc.weight"].sum() * 0
    tokens = torch.from_numpy(d.tokens).long()
    f = features_for(draft, target, row_of([d])).last_TD.to(draft.dtype)
    h = torch.cat([target.embedding[tokens[1:]].to(draft.dtype), f[:-1]], dim=1) @ w["fc.weight"].T
    h = h + w["fc.bias"] if "fc.bias" in w else h
    at, m = torch.arange(n - 1), n - 1
    rotary = draft.rotary(at, draft.dtype)
    for i, _ in enumerate(draft.blocks):
        name = f"layers.{i}." if i else "midlayer."
        x = F.rms_norm(h, h.shape[1:], w[name + "input_layernorm.weight"], c.rms_norm_eps) if i else h
        q, k, v = (x @ w[f"{name}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k = (apply_rope(y.view(m, -1, c.head_dim), *rotary) for y in (q, k))
        groups = c.num_attention_heads // c.num_key_value_heads
        k, v = (y.view(m, -1, c.head_dim).repeat_interleave(groups, 1) for y in (k, v))
        scores = torch.einsum("shd,nhd->hsn", q, k) * c.head_dim**-0.5
        scores = scores.masked_fill(at[None, :] > at[:, None], float("-inf")).softmax(-1)
        h = h + torch.einsum("hsn,nhd->shd", scores, v).flatten(1) @ w[name + "self_attn.o_proj.weight"].T
        x = F.rms_norm(h, h.shape[1:], w[name + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up, down = (w[f"{name}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        h = h + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    head = target.head.weight.to(draft.dtype)
    said, wanted = h[live], f[[t + 1 for t in live]]
    regression = F.smooth_l1_loss(said, wanted, reduction="none").mean(-1).sum()
    return regression - 0.1 * ((wanted @ head.T).softmax(-1) * (said @ head.T).log_softmax(-1)).sum()


VARIANTS = {"plain": {}, "bias": dict(fc_bias=True), "two layers": dict(num_hidden_layers=2)}
WAYS = {"eager": Implementation(), "chunks": Implementation(slots=5, chunk=4)}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_the_papers(name: str, dtype: torch.dtype, ways: str) -> None:
    """Loss and gradients of a packed row are the sums over its documents by the paper's equations. The head and the
    embedding of the target get no gradient."""
    target, draft = pair(dtype, **VARIANTS[name])
    row = row_of(DOCUMENTS, filler=4)
    step = ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=1), WAYS[ways])
    found = {n: p.grad.clone() for n, p in draft.named_parameters()}
    draft.zero_grad()
    loss = sum(by_the_paper(draft, target, d) for d in DOCUMENTS)
    loss.backward()
    close = dict(rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-9)
    torch.testing.assert_close(step.loss, loss.detach(), **close)
    for n, p in draft.named_parameters():
        torch.testing.assert_close(found[n], p.grad, **close, msg=n)
    assert int(step.live_K) == int(step.scored_K) == sum(len(live_by_definition(d, 1)) for d in DOCUMENTS)
    assert target.head.weight.grad is None and target.embedding.grad is None


def test_triton_layers_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_triton()
    monkeypatch.setattr(training, "ROW_MULTIPLE", 4)  # the interpreter is slow
    target, draft = pair(torch.float32)
    on_device(target, draft)
    row = row_of(DOCUMENTS, filler=4)
    features, found = features_for(draft, target, row), {}
    for layers in ("eager", "triton"):
        step = ttt(draft, row, features, target.logits, Objective(depth=1), Implementation("eager", layers, layers, 7))
        found[layers] = gradients(draft, step.loss)
    for n, g in found["triton"].items():
        torch.testing.assert_close(g, found["eager"][n], rtol=1e-3, atol=1e-4, msg=n)


def test_noise() -> None:
    """Feature noise moves the input states of a document by at most scale * 512 / length; the same key gives the same
    noise, and noise changes the loss."""
    from fledge.train.row_pass import add_feature_noise

    target, draft = pair()
    row = row_of(DOCUMENTS, filler=4)
    states = draft.select_states(features_for(draft, target, row))
    moved = add_feature_noise(states, row, 0.1, "0 7 0") - states
    for a, b in row.documents():
        far = 0.1 * 512 / (b - a)
        assert moved[a:b].abs().max() <= far * (1 + 1e-6) and moved[a:b].abs().mean() > 0.4 * far
    assert torch.equal(add_feature_noise(states, row, 0.1, "0 7 0") - states, moved)
    assert not torch.equal(add_feature_noise(states, row, 0.1, "0 8 0") - states, moved)
    assert add_feature_noise(states, row, 0.0, "0 7 0") is states
    features, objectives = (
        features_for(draft, target, row),
        [Objective(depth=1, feature_noise=scale) for scale in (0.0, 0.1)],
    )
    quiet, loud = (ttt(draft, row, features, target.logits, objective, key="1").loss for objective in objectives)
    assert quiet != loud


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_is_vanilla(name: str, mode: str, native: bool) -> None:
    target, draft = pair(native=native, **VARIANTS[name])
    engine = load(target, draft, depth=3, mode=mode, **(dict(nodes=20, width=4) if mode == "tree" else {}))
    for prompt in prompts(4, seed=3):
        assert_same(*both(engine, prompt, max_new_tokens=25))


def test_a_trained_draft_is_accepted() -> None:
    """After 300 training steps on the target's answers, more than one draft token per round is accepted."""
    target, draft = pair(torch.float32)
    engine = load(target, draft, depth=3)
    documents = []
    asked = prompts(3, longest=8, seed=5)
    for prompt in asked:
        tokens = np.array(prompt + engine.generate(prompt, max_new_tokens=30, speculate=False).tokens, dtype=np.int32)
        documents.append(Document(tokens, np.zeros_like(tokens)))
    row = row_of(documents)
    features = features_for(draft, target, row)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        ttt(draft, row, features, target.logits, Objective(depth=1))
        optimizer.step()
    fast, plain = both(engine, asked[0], max_new_tokens=20)
    assert fast.tokens == plain.tokens
    assert sum(r.accepted for r in fast.trace.rounds) > len(fast.trace.rounds)


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_file_is_what_engines_load(tmp_path: Path) -> None:
    """A saved draft has exactly the tensors that vLLM and SGLang load, and an architecture that each of them knows. It
    holds a bias of zeros, because SGLang needs one; loading drops it."""
    target, draft = pair(torch.float32)
    save_draft(draft, tmp_path / "d", torch.float32)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    layer = [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer += ["post_attention_layernorm.weight"]
    assert not tensors.pop("fc.bias").any()
    assert set(tensors) == {"fc.weight", *(f"layers.0.{n}" for n in layer)}
    assert list(tensors["fc.weight"].shape) == [32, 64]
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]
    assert config["model_type"] == "llama" and config["bias"] is False
    assert not {"draft_vocab_size", "fc_norm", "num_aux_hidden_states"} & set(config)
    loaded = load_draft(tmp_path / "d", dtype=torch.float32)
    assert connect_draft(loaded, target) == ()
    assert loaded.config.method == "eagle1" and not loaded.config.fc_bias
    for (n, a), (_, b) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), n


def test_the_authors_file(tmp_path: Path) -> None:
    """A draft loads from the files that the authors of EAGLE publish: Llama as architecture, one layer, a copy of the
    target's embedding, a bias unless the config says otherwise, and the weights in a pickle."""
    target, draft = pair(torch.float32, fc_bias=True)
    (tmp_path / "a").mkdir()
    tensors = {n.replace("midlayer.", "layers.0."): p.detach().clone() for n, p in draft.named_parameters()}
    tensors["embed_tokens.weight"] = target.embedding.clone()
    torch.save(tensors, tmp_path / "a" / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 400,
        "rms_norm_eps": draft.config.rms_norm_eps, "hidden_act": "silu", "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    loaded = load_draft(tmp_path / "a", dtype=torch.float32)
    connect_draft(loaded, target)
    assert loaded.config.fc_bias and loaded.config.own_embeddings
    row = row_of(DOCUMENTS)
    losses = [
        ttt(d, row, features_for(draft, target, row), target.logits, Objective(depth=1)).loss for d in (draft, loaded)
    ]
    torch.testing.assert_close(*losses)
    save_file({k: v.clone() for k, v in tensors.items() if k != "fc.bias"}, tmp_path / "a" / "model.safetensors")
    assert not load_draft(tmp_path / "a").config.fc_bias, "the safetensors file takes precedence, and has no bias"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(draft_vocab_size=100), "and its whole vocabulary"),
        (dict(hidden_size=16, own_embeddings=True), "must have the target.s hidden size"),
        (dict(fc_norm=True, norm_output=True), "fc_norm and norm_output: EAGLE-1 has no such norm"),
        (dict(method="eagle7"), "'eagle7' is none of eagle1, eagle3"),
    ],
)
def test_invalid_eagle_1_configs_are_refused(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pair(**changes)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (dict(architectures=["LlamaForCausalLMEagle"], draft_vocab_size=None), "eagle1"),
        (dict(architectures=["EagleLlamaForCausalLM"]), "eagle1"),
        (dict(architectures=["LlamaForCausalLM"]), "eagle1"),
        (dict(architectures=["LlamaForCausalLM"], num_aux_hidden_states=3), "eagle3"),
        (dict(architectures=["LlamaForCausalLM"], draft_vocab_size=100), "eagle3"),
        (dict(architectures=["LlamaForCausalLMEagle3"]), "eagle3"),
        (dict(architectures=["LlamaForCausalLM"], qkv_bias=True), "an EAGLE-1 draft with qkv_bias"),
    ],
)
def test_the_method_of_a_config(config: dict, method: str) -> None:
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=400, num_hidden_layers=1)
    if method.startswith("an"):
        with pytest.raises(ValueError, match=method):
            config_from_hf(shape | config)
    else:
        assert config_from_hf(shape | config).method == method


def test_a_whole_model_is_no_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_target(tokenizer=False).config.to_dict() | {
        "architectures": ["LlamaForCausalLM"]}))  # fmt: skip
    with pytest.raises(ValueError, match=r"\['LlamaForCausalLM'\] is not a draft that fledge knows"):
        read_draft_config(tmp_path)


def test_a_target_that_scales_its_logits_is_refused() -> None:
    target, draft = pair()
    target.config.logit_scale = 0.5
    with pytest.raises(ValueError, match="the target also applies a bias, scaling or cap"):
        connect_draft(draft, target)


def test_targets_too_shallow_for_eagle_3() -> None:
    """EAGLE-1 reads no intermediate layers, so it works with targets that have too few layers for EAGLE-3."""
    target = tiny_target(num_hidden_layers=2)
    draft = tiny_draft(target, method="eagle1")
    engine = load(target, draft, depth=2)
    assert_same(*both(engine, [5, 6, 7], max_new_tokens=10))


@BOTH_IMPLEMENTATIONS
def test_two_drafts_of_one_target(native: bool) -> None:
    """Engines that share a target each read the layers of their own draft, even when they decode in turns."""
    target = tiny_target(dtype=torch.float64, native=native)
    drafts = tiny_draft(target), tiny_draft(target, method="eagle1"), tiny_draft(target, aux_layers=(1, 3, 6))
    engines = [load(target, draft, depth=3) for draft in drafts]
    alone = [load(target, draft, depth=3) for draft in drafts]
    expected = []
    for engine in alone:
        connect_draft(engine.draft, target)
        expected.append([r.accepted for r in engine.generate([5, 6, 7], max_new_tokens=20).trace.rounds])
    done = [Completion() for _ in engines]
    streams = [e.stream([5, 6, 7], max_new_tokens=20, into=c) for e, c in zip(engines, done, strict=True)]
    while streams:
        streams = [s for s in streams if next(s, None) is not None]
    assert [[r.accepted for r in c.trace.rounds] for c in done] == expected
    assert done[0].tokens == done[1].tokens == done[2].tokens
