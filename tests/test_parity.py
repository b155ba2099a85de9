"""For slot t at step k, training computes the same values as the decoder.

Training runs on a packed row, with the target's features of the whole row. Decoding runs the target on one document
with its KV cache, in pieces, and rolls back wrong tokens in between; the draft proposes chains, but the tokens that it
chooses are replaced by the document's own. The tests compare hidden states, draft logits and teacher logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.decode.propose import BlockProposer, Proposer
from fledge.drafts import dflash as dflash_module
from fledge.drafts.draft import Draft
from fledge.drafts.draft_decoder import DraftDecoder
from fledge.ops import attention_ttt
from fledge.ops.attention_ttt import OwnSteps, Queries
from fledge.targets import parts as parts_module
from fledge.targets.compatibility import layers_of
from fledge.targets.transformers import TransformersTarget
from fledge.train import plan as plan_module
from fledge.train import row_pass as passes_module
from fledge.train.plan import StepPlan
from fledge.train.row_pass import Implementation, Objective, row_pass
from fledge.types import Packed, Tree
from support.mutations import AlteredDraft, replace_function
from support.rows import document, layouts, live_by_definition, row_of
from support.targets import BOTH_IMPLEMENTATIONS, DFLASH, P_EAGLE, features_for, tiny_draft, tiny_target
from support.trees import propose_one, proposer_of, state_of

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


def training_values(
    draft: Draft, target: TransformersTarget, row: Packed, steps: int = STEPS, ways: Implementation = Implementation()
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """Maps (slot, step) to the hidden state, draft logits and teacher logits of training's forward pass."""
    found: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    features = features_for(draft, target, row)
    passes = row_pass(draft, row, features, Objective(depth=steps), ways)
    for slots in passes.slot_chunks():
        chunk = passes.chunk(slots)
        taught = target.logits(features.last_TD[chunk.needed_P])
        for k, of_step in enumerate(slots):
            for i, slot in enumerate(of_step.tolist()):
                said = draft.logits(chunk.head_inputs[k][i])
                found[slot, k] = chunk.steps.outputs[k][i], said, taught[chunk.rows[k][i]]
    return found


class ScriptedDecoder(DraftDecoder):
    """A decoder whose proposer chooses the tokens of a script, and which records its outputs and logits."""

    script: Sequence[int] = ()
    proposer: Proposer

    def play(self, script: Sequence[int]) -> None:
        self.script, self.outs, self.said = list(script), [], []

    def step(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        out, normed = super().step(*args, **kwargs)
        self.outs.append(out)
        return out, normed

    def rest_of_chain(self, *args) -> None:
        """The script has the tokens of a chain."""

    def predict(self, out: Tensor, normed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        fed_back, logits = super().predict(out, normed)
        self.said.append(logits)
        proposer = self.proposer
        proposer.target_id_W = torch.full_like(proposer.target_id_W, self.script.pop(0))  # whichever id is chosen
        return fed_back, logits


def run_target(
    draft: Draft, target: TransformersTarget, tokens: Tensor, pieces: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Runs the target on one document in pieces; with each piece, three tokens follow that the cache does not keep.
    Returns the hidden states that the draft reads, and the logits."""
    cache, at, aux, logits = target.new_cache([tokens.numel() + 3]), 0, [], []
    junk = torch.tensor([7, 5, 3])
    for size in [*pieces, tokens.numel()]:
        if at >= tokens.numel():
            break
        piece = tokens[at : at + size]
        tree = Tree.chain(torch.cat([piece, junk])[None])
        out, features = target.verify(tree, cache, layers_of(draft.config, target))
        logits.append(out[0, : piece.numel()])
        aux.append(draft.select_states(features)[: piece.numel()])
        at += piece.numel()
        cache.keep(None, torch.tensor([piece.numel()]))
    cache.select([])
    return torch.cat(aux), torch.cat(logits)


def decoding_values(
    draft: Draft,
    target: TransformersTarget,
    tokens: Tensor,
    stride: int,
    first: int,
    pieces: Sequence[int],
    steps: int = STEPS,
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """Maps (slot, step) to the same three values of the decoder, for slots first, first + stride, ..; each round adds
    `stride` slots to the draft's cache. Leaves out steps whose token or teacher lies beyond the document."""
    n = tokens.numel()
    aux, target_logits = run_target(draft, target, tokens, pieces)
    proposer = proposer_of(draft, depth=steps)
    if isinstance(proposer, BlockProposer):
        return _block_values(proposer, tokens, aux, target_logits, stride, first)
    proposer.decoder = scripted = ScriptedDecoder(draft)
    scripted.proposer = proposer
    out, begin = {}, 0
    for slot in range(first, n - 1, stride):
        scripted.play([*tokens[slot + 2 :].tolist(), *[0] * steps][:steps])
        propose_one(proposer, tokens[begin + 1 : slot + 2], aux[begin : slot + 1])
        if draft.family.one_pass:  # of all depths
            scripted.outs, scripted.said = ([row[None] for row in of[0]] for of in (scripted.outs, scripted.said))
        begin = slot + 1
        for k in range(min(steps, n - 1 - slot)):
            out[slot, k] = (scripted.outs[k][0], scripted.said[k][0], target_logits[slot + 1 + k])
    return out


def _block_values(
    proposer: BlockProposer, tokens: Tensor, aux: Tensor, target_logits: Tensor, stride: int, first: int
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """`decoding_values` of a draft of blocks, which chooses no token before it has all logits."""
    n, said, out, begin = tokens.numel(), [], {}, 0

    def remembered(head_input_SE: Tensor, logits: Any = proposer.decoder.logits) -> Tensor:
        said.append(head_input_SE)
        return logits(head_input_SE)

    proposer.decoder.logits = remembered
    proposer.append(proposer.new_cache([256]))
    for slot in range(first, n - 1, stride):
        _, logits = proposer.begin(state_of(tokens[begin + 1 : slot + 2], aux[begin : slot + 1]))
        begin = slot + 1
        for k in range(min(proposer.levels, n - 1 - slot)):
            out[slot, k] = (said[-1][k], logits[0, k], target_logits[slot + 1 + k])
    return out


@torch.no_grad()
def difference(
    draft: Draft,
    target: TransformersTarget,
    documents: list[Document],
    row: Packed,
    chunkings: Sequence[tuple[int, Sequence[int]]] = ((3, (7, 1, 4)),),
    steps: int = STEPS,
    ways: Implementation = Implementation(),
    training_draft: Draft | None = None,
) -> float:
    """Largest absolute difference between training and decoding; infinite if they disagree on which slots are live.

    `training_draft` replaces the draft in training only. `chunkings` are pairs (stride, pieces): with stride s the
    document is decoded s times, so that each slot is once the last of the slots that a round adds.
    """
    training = training_values(training_draft or draft, target, row, steps, ways)
    expected, worst, start = set(), 0.0, 0
    for d in documents:
        tokens = torch.from_numpy(d.tokens).long()
        live = live_by_definition(d, steps)
        expected |= {(start + t, k) for t, k in live}
        for stride, pieces in chunkings if live else ():
            rounds = [decoding_values(draft, target, tokens, stride, first, pieces, steps) for first in range(stride)]
            ours = {key: value for part in rounds for key, value in part.items()}
            for t, k in live & {(t - start, k) for t, k in training}:
                pairs = zip(ours[t, k], training[start + t, k], strict=True)
                worst = max([worst, *(float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in pairs)])
        start += tokens.numel()
    assert expected, "no slot was compared"
    return worst if expected == set(training) else float("inf")


FACTORS = dict(short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.0, 2.0, 4.0, 8.0])
LONGROPE = dict(rope_type="longrope", factor=8.0, original_max_position_embeddings=16, **FACTORS)
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def rope(**parameters) -> dict[str, Any]:
    return dict(rope_parameters={"rope_theta": 100.0, **parameters})


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
    "dflash": ({}, DFLASH),
    "dflash, causal": (dict(family="qwen3", attention_bias=True), DFLASH | dict(block_causal=True)),
    "dflash, windows": (dict(family="phi3"), DFLASH | dict(windows=(7, None), attention_bias=True)),
    "dflash, convolutions": (dict(attention_bias=True), DFLASH | dict(block_conv=True, attention_bias=True)),
    "dflash, causal, windows, convolutions": (
        dict(family="qwen3"), DFLASH | dict(block_causal=True, windows=(7, None), block_conv=True),
    ),
    "dflash, causal, one layer, windows, yarn": (
        dict(head_dim=12, **rope(**YARN)),
        dict(method="dflash", mask_token_id=3, block_causal=True, windows=(6,), aux_layers=(8,),
             num_aux_hidden_states=1, head_dim=10, num_attention_heads=6, num_key_value_heads=3),
    ),
    "all at once": (
        dict(family="qwen3", attention_bias=True, head_dim=12, **rope(**YARN)),
        dict(hidden_size=24, head_dim=6, num_attention_heads=6, num_key_value_heads=2, attention_bias=True,
             mlp_bias=True, qk_norm=True, norm_before_residual=True, norm_output=True, fc_norm=True,
             num_hidden_layers=2, draft_vocab_size=99),
    ),
}  # fmt: skip


def models(name: str, native: bool = False) -> tuple[TransformersTarget, Draft]:
    of_target, of_draft = SHAPES[name]
    target = tiny_target(tokenizer=False, native=native, **of_target)
    return target, tiny_draft(target, **of_draft)


# each shape of a target, and each method, is also tested with the native implementation
CASES = [(name, False) for name in SHAPES] + [
    (n, True) for n in SHAPES if SHAPES[n][0] or n in ("llama", "eagle 1", "p-eagle", "dflash")
]


@pytest.mark.parametrize(("name", "native"), CASES, ids=[f"{name}{', native' * native}" for name, native in CASES])
def test_training_is_decoding(name: str, native: bool) -> None:
    """Training and decoding agree on every live slot and step, for a row of one document and for a row of several
    documents followed by filler."""
    target, draft = models(name, native)
    steps = draft.family.trained_depth or STEPS
    assert difference(draft, target, ONE, row_of(ONE), [(1, (3,))], steps) <= TOLERANCE
    assert difference(draft, target, SEVERAL, row_of(SEVERAL, filler=7), steps=steps) <= TOLERANCE
    assert target.packs, "this test needs a target that runs packed rows"


def test_where_the_target_does_not_pack() -> None:
    """If the target must run documents one at a time, the draft still trains on the packed row, with equal results."""
    target, draft = models("llama")
    target.packs = False
    assert difference(draft, target, SEVERAL, row_of(SEVERAL, filler=7)) <= TOLERANCE


@functools.cache
def two_layers() -> tuple[TransformersTarget, Draft]:
    return models("two layers")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layout=layouts(), stride=st.integers(1, 6), pieces=st.lists(st.integers(1, 9), max_size=5), steps=st.integers(1, 7)
)
def test_any_layout(layout, stride: int, pieces: list[int], steps: int) -> None:
    """Training and decoding agree for random documents, spans, filler, chunks and depths."""
    documents, filler = layout
    assume(any(live_by_definition(d, steps) for d in documents))
    target, draft = two_layers()
    row = row_of(documents, filler)
    assert difference(draft, target, documents, row, [(stride, pieces)], steps) <= TOLERANCE


def position_without_k(step_inputs: Any, row: Packed, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    token, position = step_inputs(row, slots, k)
    return token, position - k


def position_twice_k(step_inputs: Any, row: Packed, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    token, position = step_inputs(row, slots, k)
    return token, position + k


def position_early(step_inputs: Any, row: Packed, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    token, position = step_inputs(row, slots, k)
    return token, position - 1


def tokens_not_shifted(step_inputs: Any, row: Packed, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return row.token_T[(slots + k).clamp_max(row.token_T.numel() - 1)], step_inputs(row, slots, k)[1]


def tokens_shifted_twice(step_inputs: Any, row: Packed, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return step_inputs(row, slots, k + 1)[0], step_inputs(row, slots, k)[1]


def teacher_a_token_early(teacher_rows: Any, live: Sequence[Tensor], *given: Any, **options: Any) -> Any:
    return teacher_rows([slots - 1 for slots in live], *given, **options)


def live_a_token_longer(live: Any, row: Packed, steps: int) -> list[Tensor]:
    """Step k takes the slots that are live at step k - 1."""
    starts = (row.span_T[1:] >= 0) & (row.doc_T[1:] == row.doc_T[:-1])
    longer = [starts.nonzero().squeeze(-1), *live(row, steps)[:-1]]
    return [slots[slots + 2 + k < row.token_T.numel()] for k, slots in enumerate(longer)]


def live_a_token_shorter(live: Any, row: Packed, steps: int) -> list[Tensor]:
    return live(row, steps + 1)[1:]


def sees_one_more(visible: Any, queries: Queries, rows: slice, keys: range) -> Tensor:
    return visible(replace(queries, slot_S=queries.slot_S + 1), rows, keys)


def does_not_see_itself(visible: Any, queries: Queries, rows: slice, keys: range) -> Tensor:
    return visible(replace(queries, slot_S=queries.slot_S - 1), rows, keys)


def sees_other_documents(visible: Any, queries: Queries, rows: slice, keys: range) -> Tensor:
    return visible(replace(queries, first_S=torch.zeros_like(queries.first_S)), rows, keys)


def past_shrinks_with_k(plan_steps: Any, *given: Any, **options: Any) -> Iterator[StepPlan]:
    for k, plan in enumerate(plan_steps(*given, **options)):
        yield replace(plan, queries=replace(plan.queries, slot_S=plan.queries.slot_S - k))


def masks_at_one_position(plan_steps: Any, *given: Any, **options: Any) -> Iterator[StepPlan]:
    for k, plan in enumerate(plan_steps(*given, **options)):
        yield replace(plan, position_P=plan.position_P - k)


def feeds_back_the_normed(read: Any, out: Tensor, *compute: Any) -> tuple[Tensor, Tensor]:
    return (read(out, *compute)[1],) * 2


def feeds_back_the_unnormed(read: Any, out: Tensor, *compute: Any) -> tuple[Tensor, Tensor]:
    return out, read(out, *compute)[1]


def feeds_back_nothing(read: Any, out: Tensor, *compute: Any) -> tuple[Tensor, Tensor]:
    return 0 * out, read(out, *compute)[1]


def masks_read_a_word(masked: Any, *compute: Any) -> tuple[Tensor, Tensor]:
    token, state = masked(*compute)
    return torch.zeros_like(token), state


def block_sees_other_rows(attend: Any, *given: Any, causal: bool, **more: Any) -> Tensor:
    return attend(*given, causal=not causal, **more)


def block_sees_its_anchor(attend: Any, *given: Any, **more: Any) -> Tensor:
    *others, start, end = given
    return attend(*others, start, (end + 1).clamp_max(given[3].shape[0]), **more)


def block_sees_other_documents(attend: Any, *given: Any, **more: Any) -> Tensor:
    *others, start, end = given
    return attend(*others, torch.zeros_like(start), end, **more)


def block_sees_a_token_more(attend: Any, *given: Any, window: int | None, **more: Any) -> Tensor:
    return attend(*given, window=window and window + 1, **more)


def taps_of_the_block_before(convolve: Any, x: Tensor, base: Tensor, delta: Tensor, rows: int) -> Tensor:
    return convolve(x, base, delta, x.shape[0])


def taps_of_the_row_after(convolve: Any, x: Tensor, base: Tensor, delta: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:  # in decoding, which has one block here
        return convolve(x, base, delta, rows)
    x, delta = (part.unflatten(0, (-1, rows)).flip(1).flatten(0, 1) for part in (x, delta))
    return convolve(x, base, delta, rows).unflatten(0, (-1, rows)).flip(1).flatten(0, 1)


def taps_without_deltas(convolve: Any, x: Tensor, base: Tensor, delta: Tensor, rows: int) -> Tensor:
    return convolve(x, base, delta if x.shape[0] == rows else 0 * delta, rows)


class ForgetsOwnValues(OwnSteps):
    def append(self, pair: tuple[Tensor, Tensor]) -> None:
        super().append((pair[0], 0 * pair[1]))


# Mistakes in training: (owner of the function, its name, its replacement, shape of the models)
REPLACED = [
    (plan_module, "step_inputs", position_without_k, "llama"),
    (plan_module, "step_inputs", position_twice_k, "llama"),
    (plan_module, "step_inputs", tokens_not_shifted, "llama"),
    (plan_module, "step_inputs", tokens_shifted_twice, "llama"),
    (passes_module, "teacher_rows", teacher_a_token_early, "llama"),
    (Packed, "live", live_a_token_longer, "llama"),
    (Packed, "live", live_a_token_shorter, "llama"),
    (attention_ttt, "visible", sees_one_more, "llama"),
    (attention_ttt, "visible", does_not_see_itself, "two layers"),
    (attention_ttt, "visible", sees_other_documents, "llama"),
    (passes_module, "plan_steps", past_shrinks_with_k, "llama"),
    (passes_module, "plan_steps", masks_at_one_position, "p-eagle"),
    (passes_module, "step_inputs", tokens_shifted_twice, "dflash"),
    (passes_module, "step_inputs", tokens_not_shifted, "dflash"),
    (passes_module, "step_inputs", position_early, "dflash"),
    (passes_module, "teacher_rows", teacher_a_token_early, "dflash"),
    (passes_module, "block_attention", block_sees_other_rows, "dflash"),
    (passes_module, "block_attention", block_sees_other_rows, "dflash, causal"),
    (passes_module, "block_attention", block_sees_its_anchor, "dflash"),
    (passes_module, "block_attention", block_sees_other_documents, "dflash"),
    (passes_module, "block_attention", block_sees_a_token_more, "dflash, windows"),
    (dflash_module, "convolve_blocks", taps_of_the_block_before, "dflash, convolutions"),
    (dflash_module, "convolve_blocks", taps_of_the_row_after, "dflash, convolutions"),
    (dflash_module, "convolve_blocks", taps_without_deltas, "dflash, convolutions"),
]
# Mistakes in a method of the draft that training alone calls: (method, its replacement, shape of the models)
ALTERED = [
    ("split_output", feeds_back_the_normed, "llama"),
    ("split_output", feeds_back_the_unnormed, "norm_output"),
    ("split_output", feeds_back_nothing, "llama"),
    ("mask_inputs", masks_read_a_word, "p-eagle"),
]


NAMES = [f"{case[2].__name__}-{case[3]}" for case in REPLACED]


@pytest.mark.parametrize(("owner", "name", "wrong", "shape"), REPLACED, ids=NAMES)
def test_a_mistake_in_training_is_noticed(
    owner: Any, name: str, wrong: Any, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake makes a difference far above the tolerance."""
    target, draft = models(shape)
    row = row_of(SEVERAL, filler=7)
    replace_function(monkeypatch, owner, name, wrong)
    assert difference(draft, target, SEVERAL, row) > 1e-3


@pytest.mark.parametrize(("method", "wrong", "shape"), ALTERED, ids=[case[1].__name__ for case in ALTERED])
def test_a_mistake_in_a_method_of_the_draft_is_noticed(method: str, wrong: Any, shape: str) -> None:
    target, draft = models(shape)
    altered = AlteredDraft(draft, **{method: wrong})
    assert difference(draft, target, SEVERAL, row_of(SEVERAL, filler=7), training_draft=altered) > 1e-3


def test_forgotten_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models("llama")
    monkeypatch.setattr(passes_module, "OwnSteps", ForgetsOwnValues)
    assert difference(draft, target, SEVERAL, row_of(SEVERAL, filler=7)) > 1e-3


def test_a_rotary_that_switches_by_length_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' longrope chooses its factors by the length of each call, so a packed row and its documents differ,
    and so do prefill and decoding. With `fix_longrope`, which chooses the factors once, they agree."""
    assert sum(len(d.tokens) > 16 for d in SEVERAL) == 2 < sum(len(d.tokens) > 0 for d in SEVERAL)
    row = row_of(SEVERAL)
    target, draft = models("phi3 longrope long")
    assert difference(draft, target, SEVERAL, row) <= TOLERANCE
    monkeypatch.setattr(parts_module, "fix_longrope", lambda *_: None)
    target, draft = models("phi3 longrope long")
    assert difference(draft, target, SEVERAL, row) > 1e-3


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("max_length", [16, 64])
def test_longrope_is_one_function_of_the_document(max_length: int, native: bool) -> None:
    """The features of a document are the same in a packed row, alone, and with the KV cache one token at a time,
    whether it is shorter or longer than longrope's original length. The short and long factors give other features."""
    target = tiny_target(max_length=max_length, tokenizer=False, native=native, **rope(**LONGROPE))
    draft = tiny_draft(target)
    documents = [document(n, seed=n) for n in (8, 40, 12, 17, 16)]
    packed = features_for(draft, target, make_row(documents, 100))
    other = tiny_target(max_length=80 - max_length, tokenizer=False, native=native, **rope(**LONGROPE))
    start = 0
    for d in documents:
        n = len(d.tokens)
        alone = features_for(draft, target, make_row([d], n))
        stepped, _ = run_target(draft, target, torch.from_numpy(d.tokens).long(), [5, *[1] * n])
        here = packed.aux_TAD[start : start + n]
        torch.testing.assert_close(alone.aux_TAD, here, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(stepped, here, atol=TOLERANCE, rtol=0)
        assert (features_for(draft, other, make_row([d], n)).aux_TAD - here).abs().max() > 1e-3
        start += n
