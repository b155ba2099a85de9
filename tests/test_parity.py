"""The law: what training computes for slot t at step k is what the decoder computes there.

The training side is `ttt` on a packed row with features of the whole row. The decoder's side is the target run on
that document alone with its cache, in pieces, forgetting wrong tokens in between, and `ChainProposer` with its choices
forced to the document's own tokens. Hidden states, draft logits and the teacher's logits are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import (
    break_on_purpose,
    document,
    layouts,
    live_by_definition,
    propose_one,
    row_of,
    tiny_draft,
    tiny_target,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.data.pack import make_row
from fledge.decode.parallel import ParallelDrafter
from fledge.decode.propose import ChainProposer
from fledge.kernels import ttt_attention
from fledge.models import target as target_module
from fledge.models.draft import Draft
from fledge.models.kv_cache import TargetCache
from fledge.models.target import Target
from fledge.train import objective
from fledge.train.objective import Ways
from fledge.types import Document, Packed, Sampling

STEPS = 5
TOLERANCE = 1e-4


ONE = [document(26, (4, 13), (16, 26), seed=1)]
SEVERAL = [
    document(1, seed=2),
    document(23, (5, 11), (14, 23), seed=3),
    document(1, (0, 1), seed=4),
    document(2, (0, 2), seed=5),
    document(17, (1, 17), seed=6),
    document(9, seed=7),
    document(8, (0, 3), (3, 8), seed=8),
    document(1, seed=9),
]


def trained(
    draft: Draft, target: Target, row: Packed, steps: int = STEPS, ways: Ways = Ways()
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """(slot, step) -> hidden state, draft logits, teacher logits, as `ttt` hands them to its loss."""
    found: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    chunk: dict[str, Any] = {}
    loss, later = objective.loss_and_gradients, objective._later_steps

    def spy_later(draft, row, first, live, ways, words):
        chunk.update(live=live, outs=later(draft, row, first, live, ways, words))
        return chunk["outs"]

    def spy_loss(normed, head, rows, teacher, *args, **kwargs):
        needed = max((int(r.max()) + 1 for r in rows if r.numel()), default=0)
        taught = teacher(slice(0, needed))
        for k, slots in enumerate(chunk["live"]):
            for i, slot in enumerate(slots.tolist()):
                found[slot, k] = (chunk["outs"][k][0][i], draft.logits(normed[k][i]), taught[rows[k][i]])
        return loss(normed, head, rows, teacher, *args, **kwargs)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(objective, "loss_and_gradients", spy_loss)
        m.setattr(objective, "_later_steps", spy_later)
        objective.ttt(draft, row, target.features(row), target.logits, steps=steps, ways=ways)
    return found


class Forced:
    """A draft whose choices are those of a script, and which keeps what it computes."""

    def __init__(self, draft: Draft):
        self.draft, self.script, self.outs, self.said = draft, [], [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def play(self, script: Sequence[int]) -> None:
        self.script, self.outs, self.said = list(script), [], []

    def step(self, *args, **kwargs) -> Tensor:
        self.outs.append(self.draft.step(*args, **kwargs))
        return self.outs[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        self.said.append(self.draft.logits(hidden))
        return self.said[-1]

    def to_target(self, chosen: Tensor) -> Tensor:
        return torch.full_like(chosen, self.script.pop(0))


def run_target(draft: Draft, target: Target, tokens: Tensor, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What a draft reads, and logits, of one document, in pieces, each followed by tokens that are taken back."""
    cache, at, aux, logits = TargetCache(), 0, [], []
    for size in [*pieces, tokens.numel()]:
        if at >= tokens.numel():
            break
        piece = tokens[at : at + size]
        out, features = target.forward(piece[None], cache)
        logits.append(out[0])
        aux.append(draft.reads(features))
        at += piece.numel()
        target.forward(torch.tensor([[7, 5, 3]]), cache, features=False)
        cache.rollback(at)
    return torch.cat(aux), torch.cat(logits)


def decoded(
    draft: Draft, target: Target, tokens: Tensor, stride: int, first: int, pieces: Sequence[int], steps: int = STEPS
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """(slot, step) -> the same three from the decoder, for slots first, first + stride, ..; the draft's cache is
    extended by `stride` slots a round. Steps whose token or teacher would lie beyond the document are left out."""
    n = tokens.numel()
    aux, target_logits = run_target(draft, target, tokens, pieces)
    forced = Forced(draft)
    proposer = ParallelDrafter(forced, steps) if draft.peagle else ChainProposer(forced, steps, Sampling())
    out, begin = {}, 0
    for slot in range(first, n - 1, stride):
        forced.play([*tokens[slot + 2 :].tolist(), *[0] * steps][:steps])
        if draft.peagle and begin == 0:
            proposer.admit([(0, [], aux)])
        if draft.peagle:  # one pass says all
            proposer.pass_over([tokens[begin + 1 : slot + 2].tolist()], [aux[begin : slot + 1]])
            forced.outs, forced.said = ([row[None] for row in of[0]] for of in (forced.outs, forced.said))
        else:
            propose_one(proposer, tokens[begin + 1 : slot + 2], aux[begin : slot + 1])
        begin = slot + 1
        for k in range(min(steps, n - 1 - slot)):
            out[slot, k] = (forced.outs[k][0], forced.said[k][0], target_logits[slot + 1 + k])
    return out


@torch.no_grad()
def difference(
    draft: Draft,
    target: Target,
    documents: list[Document],
    row: Packed,
    chunkings: Sequence[tuple[int, Sequence[int]]] = ((3, (7, 1, 4)),),
    steps: int = STEPS,
    ways: Ways = Ways(),
) -> float:
    """Largest absolute difference between the two sides, infinite where they disagree on which slots are live.

    `chunkings` are (stride, pieces): with stride s the decoder goes s times through the document, so that each slot
    is once the last of its chunk.
    """
    training = trained(draft, target, row, steps, ways)
    expected, worst, start = set(), 0.0, 0
    for d in documents:
        tokens = d.tokens.long()
        live = live_by_definition(d, steps)
        expected |= {(start + t, k) for t, k in live}
        for stride, pieces in chunkings if live else ():
            rounds = [decoded(draft, target, tokens, stride, first, pieces, steps) for first in range(stride)]
            ours = {key: value for part in rounds for key, value in part.items()}
            for t, k in live & {(t - start, k) for t, k in training}:
                pairs = zip(ours[t, k], training[start + t, k], strict=True)
                worst = max([worst, *(float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in pairs)])
        start += tokens.numel()
    assert expected, "nothing was compared"
    return worst if expected == set(training) else float("inf")


FACTORS = dict(short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.0, 2.0, 4.0, 8.0])
LONGROPE = dict(rope_type="longrope", factor=8.0, original_max_position_embeddings=16, **FACTORS)
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def rope(**parameters) -> dict[str, Any]:
    return dict(rope_parameters={"rope_theta": 100.0, **parameters})


P_EAGLE = dict(method="peagle", mask_token_id=399)
SHAPES: dict[str, tuple[dict, dict]] = {  # name -> target, draft
    "llama": ({}, {}),
    "qwen3": (dict(family="qwen3"), {}),
    "phi3": (dict(family="phi3"), {}),
    "one key-value head": (dict(num_key_value_heads=1), {}),
    "no sharing of heads": ({}, dict(num_key_value_heads=4)),
    "biases": (dict(attention_bias=True, mlp_bias=True), dict(attention_bias=True, mlp_bias=True)),
    "qk_norm": (dict(family="qwen3"), dict(qk_norm=True)),
    "fc_norm": ({}, dict(fc_norm=True)),
    "norm_output": ({}, dict(norm_output=True)),
    "eagle 3.1": ({}, dict(fc_norm=True, norm_output=True)),
    "norm_before_residual": ({}, dict(norm_before_residual=True)),
    "norm_before_fc": ({}, dict(norm_before_fc=True)),
    "two layers": ({}, dict(num_hidden_layers=2)),
    "three layers 3.1": ({}, dict(num_hidden_layers=3, norm_output=True, norm_before_residual=True)),
    "decoupled head_dim": (dict(head_dim=12), dict(head_dim=10, num_attention_heads=6, num_key_value_heads=3)),
    "partial rotary": (dict(family="phi3", head_dim=16, **rope(rope_type="default", partial_rotary_factor=0.5)), {}),
    "linear": (rope(rope_type="linear", factor=2.0), {}),
    "llama3": (rope(**LLAMA3), {}),
    "yarn": (rope(**YARN), {}),
    "yarn mscale": (rope(**YARN, mscale=1.0, mscale_all_dim=0.5, truncate=False), {}),
    "longrope short": (dict(max_length=16, **rope(**LONGROPE)), {}),
    "longrope long": (dict(max_length=64, **rope(**LONGROPE)), {}),
    "phi3 longrope short": (dict(family="phi3", max_length=16, original_max_position_embeddings=16,
                                 **rope(**LONGROPE)), {}),
    "phi3 longrope long": (dict(family="phi3", max_length=64, original_max_position_embeddings=16,
                                **rope(**LONGROPE)), {}),
    "phi3 longrope partial": (dict(family="phi3", hidden_size=64, head_dim=16, max_length=64,
                                   original_max_position_embeddings=16,
                                   **rope(**LONGROPE, partial_rotary_factor=0.5)), {}),
    "wider than its target": ({}, dict(hidden_size=48)),
    "narrower than its target": ({}, dict(hidden_size=16, fc_norm=True)),
    "small vocabulary": ({}, dict(draft_vocab_size=150)),
    "other layers": ({}, dict(aux_layers=(0, 3, 5, 8), num_aux_hidden_states=4)),
    "eagle 1": ({}, dict(method="eagle1")),
    "eagle 1, biases, two layers": (
        dict(attention_bias=True), dict(method="eagle1", fc_bias=True, attention_bias=True, num_hidden_layers=2),
    ),
    "p-eagle": ({}, P_EAGLE),
    "p-eagle, three layers": (
        dict(family="qwen3", **rope(**YARN)), dict(num_hidden_layers=3, norm_before_residual=True, **P_EAGLE),
    ),
    "p-eagle 3.1": (
        dict(attention_bias=True),
        dict(num_hidden_layers=2, fc_norm=True, norm_output=True, attention_bias=True, qk_norm=True,
             draft_vocab_size=99, hidden_size=24, head_dim=6, **P_EAGLE),
    ),
    "p-eagle, norm before fc": (
        dict(family="phi3", head_dim=16, **rope(rope_type="default", partial_rotary_factor=0.5)),
        dict(norm_before_fc=True, **P_EAGLE),
    ),
    "all at once": (
        dict(family="qwen3", attention_bias=True, head_dim=12, **rope(**YARN)),
        dict(hidden_size=24, head_dim=6, num_attention_heads=6, num_key_value_heads=2, attention_bias=True,
             mlp_bias=True, qk_norm=True, norm_before_residual=True, norm_output=True, fc_norm=True,
             num_hidden_layers=2, draft_vocab_size=99),
    ),
}  # fmt: skip


def models(name: str) -> tuple[Target, Draft]:
    of_target, of_draft = SHAPES[name]
    target = tiny_target(tokenizer=False, **of_target)
    return target, tiny_draft(target, **of_draft)


@pytest.mark.parametrize("name", SHAPES)
def test_training_is_decoding(name: str) -> None:
    """Every live slot and step, of one document alone in its row and of several packed before a filler."""
    target, draft = models(name)
    steps = 1 if draft.eagle1 else STEPS
    assert difference(draft, target, ONE, row_of(ONE), [(1, (3,))], steps) <= TOLERANCE
    assert difference(draft, target, SEVERAL, row_of(SEVERAL, filler=7), steps=steps) <= TOLERANCE
    assert target.packs, "the packed path was to be tested"


def test_where_the_target_does_not_pack() -> None:
    """Documents run one at a time where the model mixes packed ones; the draft's row is packed all the same."""
    target, draft = models("llama")
    target.packs = False
    assert difference(draft, target, SEVERAL, row_of(SEVERAL, filler=7)) <= TOLERANCE


@functools.cache
def two_layers() -> tuple[Target, Draft]:
    return models("two layers")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layout=layouts(), stride=st.integers(1, 6), pieces=st.lists(st.integers(1, 9), max_size=5), steps=st.integers(1, 7)
)
def test_any_layout(layout, stride: int, pieces: list[int], steps: int) -> None:
    """Random documents, spans, filler, chunks and depths."""
    documents, filler = layout
    assume(any(live_by_definition(d, steps) for d in documents))
    target, draft = two_layers()
    row = row_of(documents, filler)
    assert difference(draft, target, documents, row, [(stride, pieces)], steps) <= TOLERANCE


ONE_POSITION = "*masked, plan.position_P - k"
MUTATIONS = {  # name -> (owner, function, old, new, shape)
    "position without k": (objective, "step_inputs", "position_T[slots_S] + k", "position_T[slots_S]", "llama"),
    "position twice k": (objective, "step_inputs", "position_T[slots_S] + k", "position_T[slots_S] + 2 * k", "llama"),
    "tokens not shifted": (objective, "step_inputs", "slots_S + 1 + k", "slots_S + k", "llama"),
    "tokens shifted twice": (objective, "step_inputs", "slots_S + 1 + k", "slots_S + 2 + k", "llama"),
    "teacher a token early": (objective, "_followed", "slots + 1 + k", "slots + k", "llama"),
    "live a token longer": (Packed, "live", "self.span_T[2 + k :]", "self.span_T[1 + k : -1]", "llama"),
    "live a token shorter": (Packed, "live", "self.span_T[2 + k :]", "self.span_T.roll(-1)[2 + k :]", "llama"),
    "sees one more": (ttt_attention, "visible", "key <= queries", "key - 1 <= queries", "llama"),
    "does not see itself": (ttt_attention, "visible", "key <= queries", "key < queries", "two layers"),
    "sees other documents": (ttt_attention, "visible", "(key >= queries.first_S[rows, None]) &", "", "llama"),
    "past shrinks with k": (objective, "_plan", "Queries(j[0],", "Queries(j[0] - k,", "llama"),
    "feeds back the normed": (objective, "_later_steps", "draft.read(out)", "(draft.read(out)[1],) * 2", "llama"),
    "feeds back the unnormed": (objective, "_later_steps", "draft.read(out)", "out, draft.read(out)[1]", "norm_output"),
    "feeds back nothing": (objective, "_later_steps", "draft.read(out)", "0 * out, draft.read(out)[1]", "llama"),
    "masks read their words": (objective, "_later_steps", "*masked,", "token[:1], masked[1],", "p-eagle"),
    "masks at one position": (objective, "_later_steps", "*masked, plan.position_P", ONE_POSITION, "p-eagle"),
    "forgets its own values": (objective, "_later_steps", "(keys, values))", "(keys, 0 * values))", "llama"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_breaking_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these mistakes, made on the training side alone, shows as a difference far above the tolerance."""
    *mutation, shape = MUTATIONS[name]
    target, draft = models(shape)
    row = row_of(SEVERAL, filler=7)
    break_on_purpose(monkeypatch, *mutation)
    assert difference(draft, target, SEVERAL, row) > 1e-3


def test_a_rotary_that_switches_by_length_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own longrope, left to choose by the length of each call, differs between a packed row and its
    documents and between prefill and decoding; chosen once, it does not."""
    assert sum(d.tokens.numel() > 16 for d in SEVERAL) == 2 < sum(d.tokens.numel() > 0 for d in SEVERAL)
    row = row_of(SEVERAL)
    target, draft = models("phi3 longrope long")
    assert difference(draft, target, SEVERAL, row) <= TOLERANCE
    monkeypatch.setattr(target_module, "_fix_longrope", lambda *_: None)
    target, draft = models("phi3 longrope long")
    assert difference(draft, target, SEVERAL, row) > 1e-3


@pytest.mark.parametrize("max_length", [16, 64])
def test_longrope_is_one_function_of_the_document(max_length: int) -> None:
    """Features of documents shorter and longer than the original length: packed, alone, and by the cache, one token
    at a time across that length, are the same; and the short and the long list are not."""
    target = tiny_target(max_length=max_length, tokenizer=False, **rope(**LONGROPE))
    target.read_layers(None)
    draft = tiny_draft(target)
    documents = [document(n, seed=n) for n in (8, 40, 12, 17, 16)]
    packed = target.features(make_row(documents, 100))
    other = tiny_target(max_length=80 - max_length, tokenizer=False, **rope(**LONGROPE))
    start = 0
    for d in documents:
        n = d.tokens.numel()
        alone = target.features(make_row([d], n))
        stepped, _ = run_target(draft, target, d.tokens.long(), [5, *[1] * n])
        here = packed.aux_TAD[start : start + n]
        torch.testing.assert_close(alone.aux_TAD, here, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(stepped, here, atol=TOLERANCE, rtol=0)
        assert (other.features(make_row([d], n)).aux_TAD - here).abs().max() > 1e-3
        start += n
