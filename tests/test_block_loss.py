"""The losses of block drafts: hard labels are the tokens that a decoder would have to draft, and hard labels,
temperatures and D-PACE's weights give the gradients of their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge import load
from fledge.drafts.dflash import DFlashDraft
from fledge.ops import loss as loss_module
from fledge.ops.loss import DPACE_SMOOTHING, Teacher, dpace_weights
from fledge.targets.transformers import TransformersTarget
from fledge.train import objective as objective_module
from fledge.train import trainer
from fledge.train.objective import ttt
from fledge.train.plan import DrawAnchors
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe import resolve
from fledge.types import Features, Packed
from support.chats import tiny_chats
from support.decoding import prompts, spoken
from support.files import metrics_of
from support.losses import assert_same_gradients, gradients
from support.mutations import replace_function
from support.rows import DOCUMENTS, row_of
from support.targets import DFLASH, exact_target, features_for, tiny_draft, tiny_target_directory
from test_block import K, logits_by_definition


def dflash(target: TransformersTarget) -> DFlashDraft:
    draft = tiny_draft(target, **DFLASH)
    assert isinstance(draft, DFlashDraft)
    return draft


# -- hard labels ------------------------------------------------------------------------------------------------------


def trained_labels(
    row: Packed, monkeypatch: pytest.MonkeyPatch, ways: Implementation = Implementation()
) -> dict[tuple[int, int], int]:
    """The label of each slot (of the row) and step in training with hard labels."""
    target, found = exact_target(), {}
    draft = dflash(target)

    def recorded(
        compute: Callable[..., Any], head_inputs: Any, head: Tensor, teacher: Teacher, *others: Any, **how: Any
    ):
        assert teacher.label_P is not None
        slots = next(parts)
        for k, (of_step, rows) in enumerate(zip(slots, teacher.rows, strict=True)):
            found.update(
                {(t, k): int(teacher.label_P[r]) for t, r in zip(of_step.tolist(), rows.tolist(), strict=True)}
            )
        return compute(head_inputs, head, teacher, *others, **how)

    with monkeypatch.context() as patched:
        replace_function(patched, objective_module, "loss_and_gradients", recorded)
        features, objective = features_for(draft, target, row), Objective(depth=K, loss="hard")
        parts = iter(objective_module.row_pass(draft, row, features, objective, ways).slot_chunks())
        ttt(draft, row, features, target.logits, objective, ways)
    return found


@pytest.mark.parametrize("ways", [Implementation(), Implementation(slots=4)])
def test_hard_labels_are_what_a_decoder_has_to_draft(ways: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """In texts of the target's own, the label of each slot and step is the token that greedy verification accepts: the
    target's first choice after the text up to the drafted token."""
    target = exact_target()
    spoken_row = row_of([spoken(load(target), prompt, 12)[0] for prompt in prompts(4, longest=9, seed=3)], filler=3)
    features = features_for(dflash(target), target, spoken_row)
    labels = trained_labels(spoken_row, monkeypatch, ways)
    assert set(labels) == {(t, k) for k, slots in enumerate(spoken_row.live(K)) for t in slots.tolist()}
    for (t, k), label in labels.items():
        root = t + 1  # the last token that is known; the k-th token after it was drafted before, if k > 0
        assert label == int(target.logits(features.last_TD[root + k]).argmax()) == int(spoken_row.token_T[root + k + 1])


def test_hard_labels_are_supervised_tokens_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of documents with several answers and with none: no label is of another document, of a prompt, or of another
    answer than the tokens before it in the block."""
    row = row_of(DOCUMENTS, filler=5)
    marked = replace(row, token_T=torch.arange(row.token_T.numel(), dtype=torch.int32))  # each token is its place
    for (t, k), place in trained_labels(marked, monkeypatch).items():
        assert place == t + 2 + k and row.doc_T[place] == row.doc_T[t]
        assert row.span_T[place] == row.span_T[t + 1] >= 0


# -- the gradients of the definitions ---------------------------------------------------------------------------------


def block_losses(
    draft: DFlashDraft, target: TransformersTarget, row: Packed, features: Features, objective: Objective
) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """For each anchor, the (loss, confidence) of its slots at steps 0, 1, .., with autograd graphs."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    T = objective.temperature
    for (t, k), z in logits_by_definition(draft, row, features).items():
        taught = target.logits(features.last_TD[t + 1 + k])
        p, q, logq = (taught / T).softmax(-1), z.softmax(-1), (z / T).log_softmax(-1)
        alpha = torch.minimum(taught.softmax(-1), q).sum()
        said = q[int(row.token_T[t + 2 + k])]
        losses = dict(ce=-(p * logq).sum() * T**2, kl=(p * (p.log() - logq)).sum() * T**2, accept=-alpha.log())
        losses["hard"] = -said.log()
        found.setdefault(t, []).append((losses[objective.loss], said if objective.loss == "hard" else alpha))
        assert len(found[t]) == k + 1
    return found


def weights_by_definition(confidences: list[float], smoothing: float = 0.5) -> list[float]:
    reach, products = 1.0, []
    for q in confidences:
        reach *= (1 - smoothing) * q + smoothing
        products.append(reach)
    return [sum(products[j:]) for j in range(len(products))]


OBJECTIVES = {
    "hard": Objective(depth=K, gamma=0.7, loss="hard"),
    "kl at 2": Objective(depth=K, gamma=1.0, loss="kl", temperature=2.0),
    "ce at 0.5": Objective(depth=K, gamma=0.7, loss="ce", temperature=0.5),
    "hard, D-PACE": Objective(depth=K, loss="hard", dpace=True),
    "ce, D-PACE": Objective(depth=K, loss="ce", dpace=True),
    "kl at 2, D-PACE": Objective(depth=K, loss="kl", temperature=2.0, dpace=True),
    "accept, D-PACE": Objective(depth=K, loss="accept", dpace=True),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    """In chunks and at once, the loss and its gradients are those of autograd, one block at a time."""
    target, objective = exact_target(), OBJECTIVES[name]
    draft = dflash(target)
    row = row_of(DOCUMENTS, filler=2)
    features = features_for(draft, target, row)
    reported, trained = torch.zeros(()), torch.zeros(())
    for slots in block_losses(draft, target, row, features, objective).values():
        dynamic = weights_by_definition([float(q.detach()) for _, q in slots])
        for k, (loss, _) in enumerate(slots):
            fixed = 1.0 if objective.dpace else objective.gamma**k
            reported = reported + fixed * loss.detach()
            trained = trained + (dynamic[k] if objective.dpace else fixed) * loss
    expected = gradients(draft, trained)
    for ways in (Implementation(), Implementation(slots=4, chunk=3)):
        draft.zero_grad(set_to_none=True)
        step = ttt(draft, row, features, target.logits, objective, ways)
        assert float(step.loss) == pytest.approx(float(reported), rel=1e-10)
        assert_same_gradients(gradients(draft, step.loss), expected, 1e-8)


def leave_slots_equal(weigh: Any, *given: Any, **how: Any) -> None:
    pass


def weigh_other_blocks(weights: Any, *given: Any) -> list[Tensor]:
    return [w.flip(0) for w in weights(*given)]


def weigh_by_reach_alone(weights: Any, confidences: list[Tensor], blocks: list[Tensor]) -> list[Tensor]:
    """The product up to the slot, without the products up to later slots."""
    found = weights(confidences, blocks)
    for k in range(len(found) - 1):
        found[k][torch.searchsorted(blocks[k], blocks[k + 1])] -= found[k + 1]
    return found


def take_the_label_before(labels: Any, row: Packed, needed_P: Tensor) -> Tensor:
    return labels(row, needed_P - 1)


def leave_the_square_out(tile_loss: Any, z: Tensor, *given: Any) -> None:
    *_, options, _sums = given
    tile_loss(z, *given)
    z /= options.temperature**2


MUTATIONS: dict[str, tuple[Any, str, Any, str]] = {  # (owner, its function, the replacement, the objective)
    "weights left out": (objective_module, "weigh_by_confidence", leave_slots_equal, "hard, D-PACE"),
    "weights of other blocks": (objective_module, "dpace_weights", weigh_other_blocks, "ce, D-PACE"),
    "weights without later slots": (objective_module, "dpace_weights", weigh_by_reach_alone, "hard, D-PACE"),
    "labels off by one": (objective_module, "labels", take_the_label_before, "hard"),
    "temperature without its square": (loss_module, "tile_loss", leave_the_square_out, "kl at 2"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_breaking_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake changes the loss or its gradients."""
    *mutation, objective = MUTATIONS[name]
    replace_function(monkeypatch, *mutation)
    with pytest.raises(AssertionError):
        test_gradients_are_those_of_the_definition(objective)


# -- D-PACE's weights -------------------------------------------------------------------------------------------------


def test_weights_of_confidences() -> None:
    """Blocks of different lengths; the weights fall along a block, and all are of the block alone."""
    blocks = [torch.tensor([0, 1, 2]), torch.tensor([0, 2]), torch.tensor([0])]
    q = [torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.9, 0.0], [0.2, 1.0], [0.7])]
    of_block = {0: [0.5, 0.2, 0.7], 1: [0.9], 2: [0.0, 1.0]}
    found = dpace_weights(q, blocks)
    for n, confidences in of_block.items():
        weights = [float(w[(b == n).nonzero()]) for w, b in zip(found, blocks, strict=True) if (b == n).any()]
        assert weights == pytest.approx(weights_by_definition(confidences, DPACE_SMOOTHING), rel=1e-12)
        assert weights == sorted(weights, reverse=True)
    assert [w.numel() for w in dpace_weights([torch.zeros(0)] * 2, [torch.zeros(0).long()] * 2)] == [0, 0]


def test_without_smoothing_they_are_the_gradient_of_the_accepted_length() -> None:
    """The weight of slot j is the derivative of Σ_m Π_{i <= m} q_i with respect to log q_j."""
    logq = -torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logq.requires_grad_()
    (expected,) = torch.autograd.grad(logq.cumsum(0).exp().sum(), logq)
    with torch.no_grad():
        found = dpace_weights([q[None] for q in logq.exp()], [torch.zeros(1).long()] * 6, smoothing=0.0)
    torch.testing.assert_close(torch.cat(found), expected)


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--loss", "hard", "--gamma", 0.7), ("--loss", "hard", "--dpace"), ("--dpace",)])
def test_a_run_divides_by_weights_or_blocks(
    words: tuple[Any, ...], fledge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is divided by the sum of the scored slots' weights, or with D-PACE by the number of blocks. The
    metric is the mean loss: with the steps' weights, and with D-PACE without weights."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 8)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def measured(queue: Any, draft: Any, *given: Any) -> Any:
        result = queue(draft, *given)
        squares = sum(p.grad.double().square().sum() for p in draft.parameters() if p.grad is not None)
        seen.append((squares.sqrt(), result.scored_K(), sum(scores.loss_K for _, scores in result.parts)))
        return result

    replace_function(monkeypatch, trainer, "ttt_queued", measured)
    ran = fledge(
        "train", "--target", target, "--data", chats, "--out", tmp_path / "run", "--method", "dflash", "--steps", 2,
        "--max-length", 64, "--depth", 4, "--layers", 1, "--eval-tokens", 4, "--anchors", 6, *words,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for metrics, (norm, scored, losses) in zip(metrics_of(tmp_path / "run"), seen, strict=True):
        weights = torch.tensor([1.0 if "--dpace" in words else 0.7**k for k in range(4)], dtype=torch.float64)
        summed = (weights * scored).sum()
        assert metrics["scored"] == metrics["live"] == scored.tolist() and scored[0] > scored[-1] > 0
        divisor = scored[0] if "--dpace" in words else summed
        assert metrics["grad_norm"] == pytest.approx(float(norm / divisor), rel=1e-4)
        assert metrics["loss"] == pytest.approx(float((weights * losses).sum() / summed), rel=1e-5)
    assert ("D-PACE" in (tmp_path / "run/draft/README.md").read_text()) == ("--dpace" in words)


def test_what_options_resolve_to(tmp_path: Path) -> None:
    def objective_of(**options: Any) -> Objective:
        (tmp_path / "chats.jsonl").write_text("{}\n")
        return resolve(
            TrainOptions(target="t", data=[str(tmp_path / "chats.jsonl")], device="cpu", **options)
        ).objective

    found = objective_of(method="dflash", loss="hard", dpace=True)
    assert (found.loss, found.dpace, found.drop) == ("hard", True, DrawAnchors(512))
    assert objective_of(method="dflash", loss="kl", loss_temperature=2.0, gamma=1.0).temperature == 2.0
    assert objective_of(loss="hard").loss == "hard"
    for options, why in (
        (dict(method="dflash", dpace=True, gamma=0.9), "--gamma has no effect with --dpace, which weights"),
        (dict(method="eagle3", dpace=True), "--dpace has no effect with EAGLE-3; use --method dflash, or"),
        (dict(method="peagle", loss_temperature=2.0), "--loss-temperature has no effect with P-EAGLE"),
        (
            dict(method="dflash", loss="accept", loss_temperature=2.0),
            "--loss-temperature has no effect with --loss accept",
        ),
        (
            dict(method="dflash", loss="mixed", loss_temperature=2.0),
            "--loss-temperature has no effect with --loss mixed",
        ),
        (dict(method="dflash", loss="hard", loss_temperature=2.0), "--loss-temperature has no effect with --loss hard"),
        (dict(loss="hard", keep_out_of_vocab=True), "--keep-out-of-vocab has no effect with --loss hard"),
        (dict(method="dflash", loss="kl", loss_temperature=0.0), "--loss-temperature 0.0: it must be at least 0.01"),
    ):
        with pytest.raises(ValueError, match=why):
            objective_of(**options)
