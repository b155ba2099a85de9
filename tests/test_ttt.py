"""Training on live slots, its loss, attention and optimizer, each against a plain definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.data.documents import Document
from fledge.drafts.draft import Draft
from fledge.ops import loss as loss_module
from fledge.ops.attention_ttt import OwnSteps, document_blocks, ttt_attention, ttt_attention_reference, visible
from fledge.ops.loss import SLOTS_PER_GROUP, LossOptions, Teacher, loss_and_gradients
from fledge.ops.training import Fp32Accumulator
from fledge.targets.transformers import TransformersTarget
from fledge.train import row_pass as passes_module
from fledge.train.objective import RowSums, accepted_per_round, simulate_decoding, ttt
from fledge.train.optim import MasterOptimizer, learning_rate, orthogonalized
from fledge.train.plan import DropTokens, chunk_slots
from fledge.train.row_pass import FirstPass, Implementation, Objective, row_pass
from fledge.types import Packed
from support.dense import Dense, dense
from support.losses import WAYS, assert_same_gradients, gradients, loss_case
from support.mutations import AlteredDraft, replace_function
from support.rows import DOCUMENTS, document, layouts, live_by_definition, queries_of, row_of
from support.targets import features_for, tiny_draft, tiny_target

STEPS = 4
VARIANTS = {
    "eagle 3": {},
    "eagle 3.1": dict(fc_norm=True, norm_output=True),
    "two layers": dict(num_hidden_layers=2),
    "three layers": dict(num_hidden_layers=3, norm_before_residual=True, norm_before_fc=True),
    "own embeddings": dict(hidden_size=24, head_dim=6, attention_bias=True, mlp_bias=True, qk_norm=True),
}


def tiny(dtype: torch.dtype, **draft) -> tuple[TransformersTarget, Draft]:
    target = tiny_target(tokenizer=False, dtype=dtype)
    return target, tiny_draft(target, **draft)


def both(
    target: TransformersTarget, draft: Draft, row: Packed, ways: Implementation = Implementation()
) -> tuple[RowSums, Dense]:
    features = features_for(draft, target, row)
    step = ttt(draft, row, features, target.logits, Objective(depth=STEPS), ways)
    return step, dense(draft, row, features, target.logits(features.last_TD), STEPS)


@pytest.mark.parametrize("slots", [None, 7])
@pytest.mark.parametrize("vocabulary", [400, 131])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_every_slot(variant: str, vocabulary: int, slots: int | None) -> None:
    """Loss and gradients of live-slot training equal the dense definition's in float64 and float32, with all slots at
    once or in chunks."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        target, draft = tiny(dtype, draft_vocab_size=vocabulary, **VARIANTS[variant])
        row = row_of(DOCUMENTS, filler=5)
        step, whole = both(target, draft, row, Implementation(slots=slots))
        torch.testing.assert_close(step.loss, whole.loss, rtol=tolerance, atol=0)
        expected = gradients(draft, whole.loss)
        assert all(bool(g.any()) for g in expected.values()), "a parameter has no gradient to compare"
        assert_same_gradients(gradients(draft, step.loss), expected, tolerance)


@pytest.mark.parametrize("slots", [None, 7])
def test_gradients_of_dropped_slots_are_those_of_the_kept(slots: int | None) -> None:
    """Loss and gradients equal the dense definition's at the slots that conditional drop-token sampling keeps."""
    target, draft = tiny(torch.float64)
    row, drop = row_of(DOCUMENTS, filler=5), DropTokens(0.6, 0.1)
    features = features_for(draft, target, row)
    asked = Objective(depth=STEPS, drop=drop)
    step = ttt(draft, row, features, target.logits, asked, Implementation(slots=slots), "3 1 4")
    kept = drop.keep(row, row.live(STEPS), "3 1 4")
    assert 0 < kept[-1].numel() < row.live(STEPS)[-1].numel() and step.live_K.tolist() == [k.numel() for k in kept]
    whole = dense(draft, row, features, target.logits(features.last_TD), STEPS, keep=lambda _live: kept)
    torch.testing.assert_close(step.loss, whole.loss, rtol=1e-10, atol=0)
    assert_same_gradients(gradients(draft, step.loss), gradients(draft, whole.loss), 1e-10)


class CutKeys(OwnSteps):
    """Keys and values of a slot's own steps, where no gradient flows through the keys."""

    def append(self, pair: tuple[Tensor, Tensor]) -> None:
        super().append((pair[0].detach(), pair[1]))


def cut_fed_back(read: Any, out: Tensor, *compute: Any) -> tuple[Tensor, Tensor]:
    fed_back, head_input = read(out, *compute)
    return fed_back.detach(), head_input


def cut_first_values(cut: Any, first: FirstPass, start: int, end: int) -> FirstPass:
    part = cut(first, start, end)
    return replace(part, keys=[(k, v.detach()) for k, v in part.keys])


@pytest.mark.parametrize("where", ["fed back", "own keys", "first values"])
def test_a_cut_gradient_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of gradients fails if a gradient is cut, although the loss is still right."""
    target, draft = tiny(torch.float64)
    row = row_of(DOCUMENTS)
    features = features_for(draft, target, row)
    trained = draft
    if where == "fed back":
        trained = AlteredDraft(draft, split_output=cut_fed_back)
    elif where == "own keys":
        monkeypatch.setattr(passes_module, "OwnSteps", CutKeys)
    else:
        replace_function(monkeypatch, FirstPass, "cut", cut_first_values)
    step = ttt(trained, row, features, target.logits, Objective(depth=STEPS))
    whole = dense(draft, row, features, target.logits(features.last_TD), STEPS)
    torch.testing.assert_close(step.loss, whole.loss)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(draft, step.loss), gradients(draft, whole.loss), 1e-4)


def test_a_run_of_slots_ends_with_a_document() -> None:
    """A chunk of slots ends with a document if the chunk is then at least three quarters full; otherwise a document is
    cut."""
    row = row_of([document(n, (0, n)) for n in (10, 10, 3, 30)], filler=4)  # n tokens have n - 2 live slots
    begins = torch.tensor([a for a, _ in row.documents()])

    def sizes(slots: int | None) -> list[int]:
        chunks = chunk_slots(row.live(2), slots, begins)
        for k, live in enumerate(row.live(2)):
            assert torch.equal(torch.cat([c[k] for c in chunks]), live)
        return [c[0].numel() for c in chunks]

    assert sizes(None) == [45] and sizes(100) == [45]
    assert sizes(10) == [8, 9, 10, 10, 8]
    assert sizes(20) == [17, 20, 8]
    assert sizes(9) == [8, 9, 9, 9, 9, 1]
    assert sizes(30) == [30, 15], "a first chunk of 17 slots would be less than three quarters full"
    assert [c.tolist() for c in chunk_slots(row_of([document(3)]).live(1), 5, torch.tensor([0]))[0]] == [[]]


def test_many_chunks_lose_nothing() -> None:
    """Gradients of bfloat16 parameters are as accurate over 128 chunks as over one."""
    target, draft = tiny(torch.float32)
    row = row_of([document(130, (0, 130), seed=1)])
    features = features_for(draft, target, row)
    exact = gradients(draft, ttt(draft, row, features, target.logits, Objective(depth=3)).loss)
    draft.to(torch.bfloat16)
    draft.share_target_weights(target.embedding)

    def errors(slots: int | None) -> dict[str, float]:
        step = ttt(draft, row, features, target.logits, Objective(depth=3), Implementation(slots=slots))
        found = gradients(draft, step.loss)
        return {n: float((found[n].float() - g).norm() / g.norm()) for n, g in exact.items()}

    one, many = errors(None), errors(1)
    assert all(many[name] <= 1.25 * error + 2e-3 for name, error in one.items())


@pytest.mark.parametrize("slots", [None, 1, 7])
def test_counts_are_those_of_every_slot(slots: int | None) -> None:
    """The live, scored, hit, survive and α counts and the simulated decoding equal those of the dense definition."""
    target, draft = tiny(torch.float64, draft_vocab_size=300)
    fit_head_to_target(target, draft)
    row = row_of(DOCUMENTS, filler=5)
    step, whole = both(target, draft, row, Implementation(slots=slots))
    assert step.live_K.tolist() == [slots.numel() for slots in whole.live]
    assert step.scored_K.tolist() == whole.scored()
    assert step.hit_K.tolist() == [int(hits.sum()) for hits in whole.hits()]
    assert step.survive_K.tolist() == whole.survived()
    torch.testing.assert_close(step.accept_K, torch.stack(whole.accepted()))
    assert step.simulated == simulate_decoding(whole.live, whole.hits())
    assert 0 < step.hit_K[0] < step.live_K[0], "both hits and misses must occur"
    assert step.scored_K[0] < step.live_K[0]


def fit_head_to_target(target: TransformersTarget, draft: Draft) -> None:
    """Fits the draft's head to the target's logits on half of the slots by least squares, so that some are hits."""
    row = row_of(DOCUMENTS)
    features = features_for(draft, target, row)
    live = row.live(1)
    with torch.no_grad():
        passes = row_pass(draft, row, features, Objective(depth=1))
        hidden = passes.chunk(passes.trained).head_inputs[0]
        wanted = target.logits(features.last_TD[live[0] + 1])[:, draft.target_ids()]
        half = hidden.shape[0] // 2
        draft.lm_head.weight.copy_(torch.linalg.lstsq(hidden[:half], wanted[:half]).solution.T)


def test_packed_is_the_sum_of_its_documents() -> None:
    """Loss, counts and gradients of a packed row are sums over rows that hold one document each."""
    target, draft = tiny(torch.float64, draft_vocab_size=300)
    fit_head_to_target(target, draft)

    def run(documents: list[Document], filler: int = 0) -> tuple[RowSums, dict[str, Tensor]]:
        row = row_of(documents, filler)
        step = ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=STEPS))
        return step, gradients(draft, step.loss)

    packed, packed_gradients = run(DOCUMENTS, filler=4)
    parts = [run([d]) for d in DOCUMENTS]
    total, summed = parts[0]
    for step, more in parts[1:]:
        total, summed = total + step, {n: g + more[n] for n, g in summed.items()}
    torch.testing.assert_close(packed.loss, total.loss)
    for name in ("live_K", "scored_K", "hit_K", "survive_K", "accept_K"):
        torch.testing.assert_close(getattr(packed, name), getattr(total, name))
    assert packed.simulated == total.simulated
    assert_same_gradients(packed_gradients, summed, 1e-10)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "documents",
    [[document(1)], [document(1, (0, 1))], [document(2, (0, 2))], [document(6)], [document(1), document(3, (1, 2))]],
    ids=["one token", "a span of one", "two tokens", "no span", "several"],
)
def test_a_row_without_live_slots_costs_nothing(documents: list[Document], layers: int) -> None:
    """A row without live slots has zero loss, zero counts, and gradients that are zero or missing, never NaN."""
    target, draft = tiny(torch.float32, num_hidden_layers=layers)
    row = row_of(documents, filler=2)
    step = ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=STEPS))
    assert step.loss.item() == 0
    assert step.simulated == (0, 0)
    assert all(not getattr(step, f).any() for f in ("live_K", "scored_K", "hit_K", "survive_K", "accept_K"))
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())


@pytest.mark.parametrize("length", [3, 4, 5, 31, 33])
def test_odd_lengths(length: int) -> None:
    """Training equals the dense definition on rows shorter than the depth and on rows of odd lengths."""
    target, draft = tiny(torch.float64)
    step, whole = both(target, draft, row_of([document(length, (0, length), seed=length)]))
    assert step.live_K.tolist() == [max(length - 2 - k, 0) for k in range(STEPS)]
    torch.testing.assert_close(step.loss, whole.loss)
    assert_same_gradients(gradients(draft, step.loss), gradients(draft, whole.loss), 1e-10)


def test_gamma_weighs_steps() -> None:
    """The loss of step k has weight γ^k."""
    target, draft = tiny(torch.float64)
    row = row_of(DOCUMENTS)
    features = features_for(draft, target, row)
    objectives = {g: Objective(depth=STEPS, gamma=g) for g in (0.0, 0.5, 1.0)}
    loss = {g: ttt(draft, row, features, target.logits, objectives[g]).loss for g in objectives}
    short = ttt(draft, row, features, target.logits, Objective(depth=1)).loss
    torch.testing.assert_close(loss[0.0], short)
    whole = dense(draft, row, features, target.logits(features.last_TD), STEPS, gamma=0.5)
    torch.testing.assert_close(loss[0.5], whole.loss)
    assert loss[1.0] > loss[0.5] > loss[0.0]


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), steps=st.integers(1, 7))
def test_live_is_its_definition(layout: tuple[list[Document], int], steps: int) -> None:
    """Packed.live equals the definition applied document by document, also for adjacent spans."""
    documents, filler = layout
    row = row_of(documents, filler)
    expected, start = set(), 0
    for d in documents:
        expected |= {(start + t, k) for t, k in live_by_definition(d, steps)}
        start += len(d.tokens)
    live = row.live(steps)
    assert len(live) == steps
    assert {(t, k) for k, slots in enumerate(live) for t in slots.tolist()} == expected
    assert all(bool((s[1:] > s[:-1]).all()) for s in live)


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_accepted_per_round_matches_a_slot_by_slot_walk(
    layout: tuple[list[Document], int], steps: int, seed: int
) -> None:
    """accepted_per_round equals a loop that goes through every span slot by slot, as the decoder does."""
    documents, filler = layout
    row = row_of(documents, filler)
    live = row.live(steps)
    generator = torch.Generator().manual_seed(seed)
    hits = [torch.rand(s.numel(), generator=generator) < 0.7 for s in live]
    said = {(t, k): bool(h) for k in range(steps) for t, h in zip(live[k].tolist(), hits[k], strict=True)}
    rounds, start = [], 0
    for d in documents:
        spans = d.spans.tolist()
        for span in sorted(set(spans) - {-1}, key=spans.index):
            a = spans.index(span)  # the decoder's prompt ends before x_a, and prefill chooses x_a
            t = start + max(a - 1, 0)
            while (t, 0) in said and spans[t + 1 - start] == span:
                accepted = 0
                while said.get((t, accepted), False):
                    accepted += 1
                rounds.append(accepted)
                t += accepted + 1
        start += len(d.tokens)
    assert accepted_per_round(live, hits) == rounds
    assert simulate_decoding(live, hits) == (sum(rounds) + len(rounds), len(rounds))


def test_accepted_per_round_by_hand() -> None:
    """An example with misses at slots 3 and 4, where the depth ends one run of hits and the span's end another."""
    row = row_of([document(10, (1, 10))])
    live = row.live(2)
    assert [s.tolist() for s in live] == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6]]
    first = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1]).bool()
    second = torch.tensor([1, 1, 1, 1, 1, 0, 1]).bool()
    assert accepted_per_round(live, [first, second]) == [2, 0, 0, 1, 1]


def attention_inputs(row: Packed, slots: Tensor, steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    T, S = row.token_T.numel(), slots.numel()
    shapes = [(S, 6, 4), (T, 3, 4), (T, 3, 4), *[(S, 3, 4)] * (2 * steps)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 3, 8, 20, 512])
def test_attention_in_blocks_matches_the_reference(width: int, steps: int) -> None:
    """Outputs and gradients of eager ttt_attention equal the reference's for several block widths, on live slots and on
    all slots."""
    row = row_of(DOCUMENTS, filler=3)
    for slots in (row.live(steps + 1)[steps], torch.arange(row.token_T.numel())):
        leaves = attention_inputs(row, slots, steps)
        q, k0, v0, *rest = leaves
        own = list(zip(rest[::2], rest[1::2], strict=True))
        queries = queries_of(row, slots, steps, document_blocks(slots, row.documents(), width))
        out = ttt_attention(q, k0, v0, own, queries)
        expected = ttt_attention_reference(q, k0, v0, own, queries)
        torch.testing.assert_close(out, expected)
        weights = torch.randn_like(out)
        for a, b in zip(
            torch.autograd.grad((out * weights).sum(), leaves),
            torch.autograd.grad((expected * weights).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_reference_attention_by_hand() -> None:
    """The reference equals a plain softmax over the keys that the slot attends to, one query and head at a time."""
    row = row_of([document(4), document(3)])
    slots = torch.tensor([0, 2, 5])
    q, k0, v0, k1, v1 = attention_inputs(row, slots, 1)
    out = ttt_attention_reference(q, k0, v0, [(k1, v1)], queries_of(row, slots, 1))
    for i, (slot, past) in enumerate(((0, [0]), (2, [0, 1, 2]), (5, [4, 5]))):
        assert slots[i] == slot
        for head in range(6):
            keys = torch.cat((k0[past, head // 2], k1[i : i + 1, head // 2]))
            values = torch.cat((v0[past, head // 2], v1[i : i + 1, head // 2]))
            weights = (keys @ q[i, head] / math.sqrt(4)).softmax(-1)
            torch.testing.assert_close(out[i, head], weights @ values)


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), width=st.integers(1, 40), seed=st.integers(0, 1000))
def test_blocks_cover_every_query(layout: tuple[list[Document], int], width: int, seed: int) -> None:
    """For any set of slots, the blocks hold every query once, in order, and all keys that it attends to."""
    row = row_of(*layout)
    n = row.token_T.numel()
    slots = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5).nonzero().squeeze(-1)
    blocks = document_blocks(slots, row.documents(), width)
    assert [i for q0, q1, _, _ in blocks for i in range(q0, q1)] == list(range(slots.numel()))
    for q0, q1, n0, n1 in blocks:
        assert q1 > q0
        outside = torch.ones(n, dtype=torch.bool)
        outside[n0:n1] = False
        asked = slots[q0:q1]
        assert not visible(queries_of(row, asked, 0), slice(None), range(n))[:, outside].any()


@pytest.mark.parametrize("chunk", [None, 1, 7, 49, 50, 1000])
@pytest.mark.parametrize("W", [37, 12, 1])
@pytest.mark.parametrize(("kind", "temperature"), WAYS)
def test_loss_is_its_definition(kind: str, temperature: float, W: int, chunk: int | None) -> None:
    """Loss and gradients equal the reference's, for every kind of loss and every chunk size."""
    case = loss_case(W)
    loss, _ = case(chunk=chunk, kind=kind, temperature=temperature)
    expected = case.reference(kind, temperature)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(case.gradients(2 * loss), case.gradients(2 * expected), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("W", [37, 12])
@pytest.mark.parametrize("keep", [False, True])
def test_loss_counts(W: int, keep: bool) -> None:
    """Per-step loss sums, hits and scored counts equal a direct computation, with and without slots whose teacher's
    first choice is outside the draft's vocabulary."""
    case = loss_case(W)
    loss, scores = case(keep_out_of_vocab=keep, chunk=8)
    total = torch.zeros((), dtype=torch.float64)
    unseen = 0
    for k, (h, r) in enumerate(zip(case.hidden, case.rows, strict=True)):
        logits, p = h @ case.head.T, case.teacher[r].softmax(-1)
        top = p.argmax(-1)
        scored = torch.isin(top, case.ids) | keep
        unseen += int((~torch.isin(top, case.ids)).sum())
        ce = nn.functional.cross_entropy(logits, case.teacher[r][:, case.ids].softmax(-1), reduction="none")
        total = total + case.weights[k] * ce[scored].sum()
        assert scores.scored_K[k] == scored.sum()
        assert torch.equal(scores.hits[k], case.ids[logits.argmax(-1)] == top)
        torch.testing.assert_close(scores.loss_K[k], ce[scored].sum().detach())
        torch.testing.assert_close(scores.accept_K[k], torch.minimum(logits.softmax(-1), p[:, case.ids]).sum().detach())
    assert (unseen > 0) == (W < 37)
    torch.testing.assert_close(loss, total)
    for a, b in zip(case.gradients(loss), case.gradients(total), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("W", [37, 12])
def test_hard_labels_are_cross_entropy(W: int) -> None:
    """Slots whose label is in the draft's vocabulary are scored, whatever the teacher says and whether other losses
    would keep the slots out of the vocabulary; hits and α are the teacher's."""
    case = loss_case(W)
    _, soft = case()
    for keep in (False, True):
        loss, scores = case(kind="hard", chunk=8, keep_out_of_vocab=keep)
        total, seen = torch.zeros((), dtype=torch.float64), 0
        for k, (h, r) in enumerate(zip(case.hidden, case.rows, strict=True)):
            places = {int(word): i for i, word in enumerate(case.ids)}
            losses = [
                -(h[i] @ case.head.T).log_softmax(-1)[places[label]] if label in places else 0.0 * h[i].sum()
                for i, label in enumerate(case.labels[r].tolist())
            ]
            seen += (scored := sum(label in places for label in case.labels[r].tolist()))
            assert scores.scored_K[k] == scored
            total = total + case.weights[k] * sum(losses)
            expected = torch.stack(losses).detach() if losses else torch.zeros(0, dtype=torch.float64)
            torch.testing.assert_close(scores.losses[k], expected)
        assert seen > 0 and (seen < sum(r.numel() for r in case.rows)) == (W < 37)
        torch.testing.assert_close(loss, total)
        torch.testing.assert_close(scores.accept_K, soft.accept_K)
        assert all(torch.equal(a, b) for a, b in zip(scores.hits, soft.hits, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_leaves_the_metrics(temperature: float) -> None:
    """At a temperature, the loss is another, and hits, α and scored slots are the same."""
    case = loss_case(12)
    (loss, scores), (other, plain) = case(kind="kl", temperature=temperature), case(kind="kl")
    assert abs(loss - other).item() > 0.1
    torch.testing.assert_close(scores.accept_K, plain.accept_K)
    torch.testing.assert_close(torch.cat(scores.accepts), torch.cat(plain.accepts))
    assert torch.equal(scores.scored_K, plain.scored_K)
    assert all(torch.equal(a, b) for a, b in zip(scores.hits, plain.hits, strict=True))


def test_loss_in_16_bits() -> None:
    """With bfloat16 inputs, the loss is float32, and the gradients are bfloat16 and close to the exact ones."""
    case, exact = loss_case(12, torch.bfloat16), loss_case(12)
    loss, _ = case(chunk=9)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact.reference(), rtol=2e-2, atol=0)
    for a, b in zip(case.gradients(loss), exact.gradients(exact.reference()), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.05 * float(b.abs().max()) if b.numel() else 0)


@pytest.mark.parametrize("chunk", [None, 100, 5000])
def test_loss_holds_few_logits(chunk: int | None) -> None:
    """The loss computes each row of the teacher's logits once for all steps, and holds the logits of at most
    SLOTS_PER_GROUP slots, plus those that one chunk of teacher rows teaches."""
    P, W, K = 8192, 16, 2
    largest, asked = 0, torch.zeros(P, dtype=torch.int64)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **kwargs or {})
            if isinstance(made, Tensor) and made.dim() == 2 and made.shape[1] == W:
                largest = max(largest, made.shape[0])
            return made

    teacher_PV = torch.randn(P, W)

    def teacher(part: slice) -> Tensor:
        asked[part] += 1
        return teacher_PV[part]

    hidden, head, rows = [torch.randn(P, 4) for _ in range(K)], torch.randn(W, 4), [torch.arange(P)] * K
    taught = Teacher(teacher, rows, torch.arange(W), W)
    with Watch():
        loss_and_gradients(hidden, head, taught, [1.0] * K, LossOptions(chunk=chunk), head_sum=Fp32Accumulator(head))
    assert asked.tolist() == [1] * P
    assert largest <= SLOTS_PER_GROUP + K * (chunk or P)
    assert chunk != 100 or largest < 2500


def test_loss_needs_no_gradient() -> None:
    """Under no_grad the loss and the counts are the same as with gradients."""
    case = loss_case(12)
    with torch.no_grad():
        loss, scores = case()
    again, same = case()
    assert not loss.requires_grad
    assert torch.equal(loss, again.detach())
    assert torch.equal(scores.accept_K, same.accept_K)


def score_everything(tile_loss: Any, *given: Any) -> None:
    *others, options, sums = given
    tile_loss(*others, replace(options, keep_out_of_vocab=True), sums)


def leave_weights_out(tile_loss: Any, z: Tensor, teacher: Tensor, tile: Any, weight_S: Tensor, *others: Any) -> None:
    tile_loss(z, teacher, tile, torch.ones_like(weight_S), *others)


def leave_p_unnormalised(init: Any, teacher: Any, *given: Any) -> None:
    init(teacher, *given)
    teacher.p_NW = teacher.p_NW * teacher.mass_N[:, None]


def take_the_row_before(make_tiles: Any, *given: Any) -> Any:
    return (replace(tile, row_M=tile.row_M - 1) for tile in make_tiles(*given))


MUTATIONS: dict[str, tuple] = {  # name -> (owner of the function, its name, its replacement)
    "slots out of the vocabulary scored": (loss_module, "tile_loss", score_everything),
    "gradient unweighted": (loss_module, "tile_loss", leave_weights_out),
    "teacher not renormalised": (loss_module._TeacherTile, "__init__", leave_p_unnormalised),
    "chunk off by one": (loss_module, "make_tiles", take_the_row_before),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_breaking_the_loss_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake changes the loss or its gradients."""
    replace_function(monkeypatch, *MUTATIONS[name])
    case = loss_case(12)
    expected = case.reference()
    loss, _ = case(chunk=7)
    pairs = zip(case.gradients(loss), case.gradients(expected), strict=True)
    off = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
    assert max(abs((loss - expected).item()), *off) > 1e-3


def test_accumulated_micro_batches_are_one_batch() -> None:
    """Accumulating four backward passes, scaled once by the global count, gives the same update as one pass over all
    data."""
    x, y = torch.randn(20, 6), torch.randn(20, 3)

    def trained(parts: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = MasterOptimizer(model.named_parameters(), 0.01)
        for _ in range(3):
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                ((model(a) - b) ** 2).sum().backward()
                optimizer.accumulate()
            norm = optimizer.step(1e-2, 1 / 20, 0.5)
        return [*model.parameters(), norm]

    for a, b in zip(trained(4), trained(1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.1, 1e9])
def test_the_optimizer_is_adamw(clip: float) -> None:
    """In float32, MasterOptimizer equals torch's AdamW after clip_grad_norm_, with weight decay for matrices only."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))

    ours, theirs = model(), model()
    optimizer = MasterOptimizer(ours.named_parameters(), 0.1)
    groups = [
        dict(params=[p for p in theirs.parameters() if p.dim() > 1], weight_decay=0.1),
        dict(params=[p for p in theirs.parameters() if p.dim() == 1], weight_decay=0.0),
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        x, lr = torch.randn(7, 6), learning_rate(step, 5, 3e-2, 2)
        ours(x).square().sum().backward()
        optimizer.accumulate()
        norm = optimizer.step(lr, 1 / 7, clip)
        adamw.zero_grad()
        (theirs(x).square().sum() / 7).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        torch.testing.assert_close(norm, expected)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_matrices_of_layers_are_updated_by_muon() -> None:
    """Matrices of layers become those of torch's Muon, which computes in bfloat16, at AdamW's scale; the head and norms
    become those of AdamW."""
    torch.manual_seed(0)
    shapes = {"fc.weight": (8, 24), "midlayer.q": (16, 8), "norm": (8,), "lm_head.weight": (32, 8)}
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    optimizer = MasterOptimizer(ours.items(), 0.1, kind="muon")
    others = [
        torch.optim.Muon([theirs["fc.weight"], theirs["midlayer.q"]], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs["lm_head.weight"]], betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW([theirs["norm"]], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(6):
        lr = learning_rate(step, 6, 3e-2, 2)
        for name, p in ours.items():
            p.grad, theirs[name].grad = (gradient := torch.randn(p.shape)), gradient.clone()
        optimizer.accumulate()
        optimizer.step(lr, 1.0, 1e9)
        for other in others:
            other.param_groups[0]["lr"] = lr
            other.step()
        for name, p in ours.items():
            torch.testing.assert_close(p, theirs[name], rtol=2e-2 if p.dim() > 1 else 1e-5, atol=1e-3)
    assert {*optimizer.momentum} == {"fc.weight", "midlayer.q"}
    assert {name.rpartition(".")[2] for name in optimizer.state() if name.startswith("fc")} == {"master", "momentum"}


@pytest.mark.parametrize("shape", [(40, 40), (16, 64), (64, 16)])
def test_an_orthogonalized_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    """Of any scale, with the singular vectors of the matrix; a matrix of zeros stays one."""
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = u @ torch.linspace(0.1, 1, min(shape), dtype=torch.float64).diag() @ v
    for scale in (1e-3, 1.0, 1e3):
        found = orthogonalized(scale * x)
        inner = u.T @ found @ v.T
        values = inner.diagonal()
        assert values.min() > 0.3 and values.max() < 1.25 and values.median() > 0.7
        torch.testing.assert_close(inner, values.diag(), rtol=0, atol=1e-9)
    assert not orthogonalized(torch.zeros(shape)).any()


def test_masters_keep_what_16_bits_drop() -> None:
    """Updates too small for bfloat16 add up in the float32 master weights and reach the parameter."""
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([("p", p)], 0.0)
    moved = []
    for _ in range(40):
        p.grad = torch.ones_like(p)
        optimizer.accumulate()
        optimizer.step(2e-4, 1.0, 1e9)
        moved.append(float(p.detach()[0, 0]))
    assert moved[0] == 1.0
    assert moved[-1] == pytest.approx(1 - 40 * 2e-4, abs=4e-3) and moved[-1] < 1


def test_learning_rate() -> None:
    """The learning rate rises linearly to the peak, then falls by a cosine to a hundredth of it at the last step."""
    rates = [learning_rate(i, 100, 2.0, 10) for i in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == max(rates) == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)
    middle = 10 + 89 / 2
    assert learning_rate(int(middle), 100, 2.0, 10) == pytest.approx(1.01, rel=0.02)
    assert learning_rate(100, 100, 2.0, 10) == pytest.approx(0.02)  # it stays there after the last step
    assert learning_rate(0, 1, 2.0, 1) == 2.0
