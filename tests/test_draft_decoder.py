"""A draft's forward pass in decoding equals `Draft.forward`, with the draft's own parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.drafts.draft_decoder import BlockDecoder, DFlashDecoder, DraftDecoder, block_decoder
from fledge.drafts.kv_cache import KVCache, PromptRows, SlotPool, TreeRows
from fledge.drafts.layers import Layer
from fledge.drafts.weights import load_draft, save_draft
from fledge.ops.attention_tree import Visible, VisibleChain
from fledge.ops.linear import can_pack
from fledge.targets.compatibility import connect_draft
from support.targets import DFLASH, P_EAGLE, exact_target, tiny_draft, tiny_target

DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": dict(attention_bias=True, mlp_bias=True),
    "qk_norm": dict(qk_norm=True),
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_before_fc": dict(norm_before_fc=True),
    "fc_norm": dict(fc_norm=True),
    "norm_output": dict(norm_output=True),
    "own embeddings": dict(own_embeddings=True),
    "narrower": dict(hidden_size=24, head_dim=6),
    "small vocabulary": dict(draft_vocab_size=150),
    "three layers": dict(num_hidden_layers=3),
    "eagle 1": dict(method="eagle1"),
    "eagle 1, biases, two layers": dict(method="eagle1", fc_bias=True, attention_bias=True, num_hidden_layers=2),
    "p-eagle": P_EAGLE,
    "all at once": dict(
        attention_bias=True, mlp_bias=True, qk_norm=True, norm_before_residual=True, norm_output=True, fc_norm=True,
        num_hidden_layers=2, draft_vocab_size=99, hidden_size=24, head_dim=6,
    ),
}  # fmt: skip


def draft_of(dtype: torch.dtype, **options: Any) -> Draft:
    draft = tiny_draft(exact_target(), **options)
    for name, p in draft.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    connect_draft(draft.to(dtype), exact_target())
    return draft


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last rows of a document to all rows up to their own."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("shd,nhd->hsn", q, keys) * q.shape[2] ** -0.5
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hsn,nhd->shd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def document(draft: Draft, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and input states of a document."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(tokens, draft.config.hidden_size, generator=generator, dtype=torch.float64)
    return torch.randint(draft.config.vocab_size, (tokens,), generator=generator), state.to(draft.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
@torch.inference_mode()
def test_it_computes_what_the_draft_does(name: str, dtype: torch.dtype) -> None:
    """Two documents: read but for their last three rows, which are then computed together; of each, one row is asked
    for. Then all of one more row."""
    draft, near = (
        draft_of(dtype, **DRAFTS[name]),
        dict(atol=1e-12, rtol=1e-12) if dtype == torch.float64 else dict(atol=1e-4, rtol=1e-4),
    )
    expected, lengths, last = [], (7, 12), (1, 2)
    documents = [document(draft, n + 4, seed) for seed, n in enumerate(lengths)]
    for (token, state), n, row in zip(documents, lengths, last, strict=True):
        kept = torch.arange(n + 4) != n + 2 if row == 1 else torch.arange(n + 4) >= 0  # a row that is not kept
        for end, rows in ((n + row + 1, slice(0, n + row + 1)), (None, kept)):
            out = draft.step(token[:end][rows], state[:end][rows], torch.arange(end or int(kept.sum())), causal)
            expected.append((out[-1:], *draft.split_output(out[-1:]), draft.logits(draft.split_output(out[-1:])[1])))
    decoder, config = DraftDecoder(draft), draft.config
    pool = SlotPool(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, draft.device, dtype)
    cache = KVCache(pool, [20, 20])

    def joined(first: list[int], count: int) -> tuple[Tensor, Tensor]:
        parts = [(t[n : n + count], s[n : n + count]) for (t, s), n in zip(documents, first, strict=True)]
        return torch.cat([t for t, _ in parts]), torch.cat([s for _, s in parts])

    token, state = (torch.cat([part[i][:n] for part, n in zip(documents, lengths, strict=True)]) for i in (0, 1))
    rotation = decoder.rotation(torch.cat([torch.arange(n) for n in lengths]))
    decoder.read(token, state, rotation, PromptRows(cache, lengths))
    cache.keep(None, torch.tensor(lengths))
    causal_33 = torch.ones(3, 3, dtype=torch.bool).tril()
    asked_B1 = torch.tensor(last)[:, None]
    attend = TreeRows(cache, 3, Visible(causal_33.expand(2, 3, 3)))
    asked_Q = asked_B1[:, 0] + torch.tensor([0, 3])
    asked = TreeRows(cache, 3, Visible(causal_33[asked_B1]), asked_Q=asked_Q)
    position = (cache.length_B[:, None] + torch.arange(3)).flatten()
    out = decoder.step(*joined(list(lengths), 3), decoder.rotation(position), attend, asked)
    cache.keep(None, asked_B1[:, 0] + 1)
    more = TreeRows(cache, 1, Visible(torch.ones(2, 1, 1, dtype=torch.bool)))
    further = decoder.step(*joined([n + 3 for n in lengths], 1), decoder.rotation(cache.length_B), more)
    for step, (outs, normed) in enumerate((out, further)):
        fed_back, logits = decoder.predict(outs, normed)
        for b in range(2):
            hidden, again, _, said = expected[2 * b + step]
            for ours, theirs in ((outs, hidden), (fed_back, again), (logits, said)):
                torch.testing.assert_close(ours[b : b + 1], theirs, **near)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("options", "B", "Q"),
    [
        ({}, 1, 16),
        (dict(block_causal=True), 3, 5),
        (dict(windows=(9, None), attention_bias=True), 2, 9),
        (dict(windows=(8, 8), block_causal=True), 3, 8),
        (dict(block_causal=True, num_hidden_layers=1), 5, 16),
    ],
)
@torch.inference_mode()
def test_blocks_are_those_of_the_draft(
    options: dict[str, Any], B: int, Q: int, dtype: torch.dtype, device: str
) -> None:
    """After contexts of different lengths; with few rows and with many. On a CPU, float32 is compiled code, and
    float64 plain torch."""
    target = tiny_target(dtype=dtype, hidden_size=64, head_dim=16, intermediate_size=64, tokenizer=False)
    draft = tiny_draft(target, **DFLASH | options)
    for name, p in draft.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    draft.to(device).share_target_weights(*(x.to(device) for x in (target.embedding, target.head_weight)))
    ours, found = block_decoder(draft), []
    assert isinstance(ours, DFlashDecoder)
    assert bool(ours.compiled) == (device == "cpu" and dtype == torch.float32 and can_pack([draft.fc.weight]))
    lengths, config, K = torch.arange(3, 3 + 7 * B, 7), draft.config, Q - 1
    states = torch.randn(int(lengths.sum()), 3, 64, dtype=torch.float64).to(device, dtype)
    token_B, position_BQ = torch.arange(5, 5 + B), lengths[:, None] + torch.arange(Q)
    position_M = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device)
    last_BQ = torch.arange(Q).expand(B, Q) if draft.causal else torch.full((B, Q), Q - 1)
    for decoder in (ours, BlockDecoder(draft)):
        pool = SlotPool(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, draft.device, dtype)
        cache = KVCache(pool, [60] * B)
        slot_M = torch.cat(
            [first + torch.arange(n) for (first, _), n in zip(cache.segments, lengths.tolist(), strict=True)]
        )
        decoder.write_context(states, position_M, slot_M.to(device), pool)
        cache.keep(None, lengths.to(device))
        rows = TreeRows(
            cache, Q, VisibleChain(last_BQ.to(device), Q, sees_all=not draft.causal), position_BQ.to(device)
        )
        head_input = decoder.block(token_B.to(device), position_BQ.to(device), K, rows)
        assert head_input.shape == (B, K, 64)
        found.append((pool.buffer, head_input, decoder.logits(head_input.flatten(0, 1))))
    near = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.06}[dtype]
    for mine, theirs in zip(*found, strict=True):
        error = (mine - theirs).double().norm() / theirs.double().norm()
        assert error < near


def test_a_network_with_a_block_of_its_own_is_computed_by_its_own_functions() -> None:
    """Other values than DFlash's must not be replaced by DFlash's fused operations."""

    class Doubled(type(tiny_draft(exact_target(), **DFLASH))):
        def block(self, *given: Any) -> Tensor:
            return 2 * super().block(*given)

    draft = tiny_draft(exact_target(), **DFLASH)
    assert type(block_decoder(draft)) is DFlashDecoder
    draft.__class__ = Doubled
    assert type(block_decoder(draft)) is BlockDecoder

    class Halved(Layer):
        def forward(self, *given: Any) -> Any:
            state, *rest = super().forward(*given)
            return state / 2, *rest

    draft = tiny_draft(exact_target(), **DFLASH)
    draft.layers[0].__class__ = Halved
    assert type(block_decoder(draft)) is BlockDecoder


def test_the_weights_are_the_drafts_own(tmp_path: Path) -> None:
    """The parameters stay the same objects with the same values, share one copy with the joined matrices, can be
    trained and saved, and the joined matrices follow each change of them."""
    draft = draft_of(torch.float32, attention_bias=True, num_hidden_layers=2)
    parameters, before = list(draft.parameters()), copy.deepcopy(draft.state_dict())
    with torch.inference_mode():  # as a caller may do
        decoder = DraftDecoder(draft)
    assert all(a is b for a, b in zip(parameters, draft.parameters(), strict=True))
    assert all(torch.equal(before[name], x) for name, x in draft.state_dict().items())
    memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    assert sum(memory.values()) == sum(p.numel() * p.element_size() for p in parameters)
    assert {w.qkv.untyped_storage().data_ptr() for w in decoder.layers} <= memory.keys()
    assert DraftDecoder(draft).layers[0].qkv.data_ptr() == decoder.layers[0].qkv.data_ptr()

    (token, state), optimizer = document(draft, 5, 0), torch.optim.SGD(parameters, lr=0.1)
    draft.step(token, state, torch.arange(5), causal).square().sum().backward()
    optimizer.step()
    attention = draft.midlayer.self_attn
    weights = [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert not torch.equal(weights[0], before["midlayer.self_attn.q_proj.weight"])
    assert torch.equal(decoder.layers[0].qkv, torch.cat(weights))
    save_draft(draft, tmp_path / "draft", torch.float32)
    read = load_draft(tmp_path / "draft")
    assert all(torch.equal(x, read.state_dict()[name]) for name, x in draft.state_dict().items())
    draft.load_state_dict(before)
    assert torch.equal(decoder.layers[1].gate_up[:3], before["layers.1.mlp.gate_proj.weight"][:3])
    moved = DraftDecoder(draft.double())
    assert moved.layers[0].qkv.dtype == torch.float64 and moved.layers[0].qkv.data_ptr() == weights[0].data_ptr()


def test_training_goes_on_after_decoding() -> None:
    """A draft that decoded in inference mode is trained as one that did not."""
    target, gradients = exact_target(), []
    for decodes in (False, True):
        draft = draft_of(torch.float64)
        if decodes:
            with torch.inference_mode():
                load(target, draft, depth=3).generate([5, 6, 7], max_new_tokens=8)
        token, state = document(draft, 5, 0)
        draft.step(token, state, torch.arange(5), causal).square().sum().backward()
        gradients.append([p.grad for p in draft.parameters()])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))
