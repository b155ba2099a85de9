"""The training step of a packed row: the loss of a draft's K steps from every live slot, and its gradients.

The slots are processed in chunks. A chunk runs all steps, the loss and the backward pass before the next chunk starts,
so activation memory depends on the chunk's size, not on the row's length (`train/row_pass.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drafts.block import BlockDraft
from fledge.drafts.draft import Draft
from fledge.ops.device import at_least_float32, to_device
from fledge.ops.loss import LossOptions, Scores, Teacher, dpace_weights, loss_and_gradients
from fledge.train.plan import step_inputs
from fledge.train.row_pass import Chunk, Implementation, Objective, row_pass
from fledge.train.selection import SelectorLoss
from fledge.types import Features, Packed


@dataclass
class RowSums:
    """The loss and metrics of one row as sums, so that rows and ranks can be added before any division.

    `loss` is Σ_k γ^k Σ_scored loss, a float32 scalar, or with D-PACE Σ_k Σ_scored loss. The [K] tensors hold one value
    per TTT step: the numbers of trained slots, of scored slots, of hits (draft argmax = teacher argmax) and of slots
    hit at this and all earlier steps, and the sum of the acceptance rates α (float32). supervised is the number of
    slots that are live at step 0, trained or not. simulated is (tokens committed, rounds) of a decoding simulated on
    the row, as if its text were the target's output.
    """

    loss: Tensor
    live_K: Tensor
    scored_K: Tensor
    hit_K: Tensor
    survive_K: Tensor
    accept_K: Tensor
    supervised: int
    simulated: tuple[int, int]

    def __add__(self, other: RowSums) -> RowSums:
        return RowSums(
            self.loss.detach() + other.loss.detach(),
            self.live_K + other.live_K,
            self.scored_K + other.scored_K,
            self.hit_K + other.hit_K,
            self.survive_K + other.survive_K,
            self.accept_K + other.accept_K,
            self.supervised + other.supervised,
            simulated=(self.simulated[0] + other.simulated[0], self.simulated[1] + other.simulated[1]),
        )

    @classmethod
    def zero(cls, steps: int) -> RowSums:
        """The sums of no row, for `steps` TTT steps."""
        live, scored, hit, survive = (torch.zeros(steps, dtype=torch.int64) for _ in range(4))
        return cls(torch.zeros(()), live, scored, hit, survive, torch.zeros(steps), 0, (0, 0))

    def packed(self) -> Tensor:
        """All sums as one float64 vector in host memory, in which numbers up to 2^53 are exact."""
        counts = (self.live_K, self.scored_K, self.hit_K, self.survive_K, self.accept_K)
        parts = [self.loss.detach().cpu().double()[None], *(c.double() for c in counts)]
        return torch.cat([*parts, torch.tensor([self.supervised, *self.simulated], dtype=torch.float64)])

    @classmethod
    def unpacked(cls, vector: Tensor) -> RowSums:
        """The sums in a vector made by `packed`."""
        *counts, accept = vector[1:-3].view(5, -1)
        live, scored, hit, survive = (c.long() for c in counts)
        supervised, committed, rounds = (int(n) for n in vector[-3:])
        return cls(vector[0], live, scored, hit, survive, accept, supervised, (committed, rounds))


def ttt(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor],
    objective: Objective = Objective(), implementation: Implementation = Implementation(), key: str = "",
) -> RowSums:  # fmt: skip
    """`ttt_queued`, with the result on the host. Synchronizes the device."""
    return ttt_queued(draft, row, features, teacher, objective, implementation, key).to_host()


def ttt_queued(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor],
    objective: Objective = Objective(), implementation: Implementation = Implementation(), key: str = "",
) -> RowResult:  # fmt: skip
    """Forward and backward pass of a packed row, without synchronizing the device.

    The gradients of the loss, a sum over slots (with D-PACE, a weighted sum), are added to the parameters' `.grad` if
    gradients are enabled. The row is on the CPU; features and draft may be on any devices. `teacher` maps final hidden
    states [n, D] to the target's logits [n, V]; the teacher of slot t at step k is the target's distribution after
    x_{t+1+k}. `key` is the seed of the feature noise and of the dropped slots. A row without live slots gives zeros.
    """
    steps = row_pass(draft, row, features, objective, implementation, key)
    # no variable holds a chunk: a chunk is freed before the next chunk is computed
    parts = [
        _train_chunk(steps.chunk(slots), features, teacher, objective, implementation) for slots in steps.slot_chunks()
    ]
    steps.backward()
    return RowResult(parts, steps.trained, supervised=steps.supervised, all_live=objective.drop is None)


def _train_chunk(
    chunk: Chunk, features: Features, teacher: Callable[[Tensor], Tensor], objective: Objective,
    implementation: Implementation,
) -> tuple[Tensor, Scores]:  # fmt: skip
    """The loss and backward pass of a chunk. Returns the loss and the scores."""
    draft, gradients = chunk.row_pass.draft, chunk.row_pass.gradients
    states_PD = features.last_TD.index_select(0, *to_device([chunk.needed_P], features.last_TD.device))
    targets = Teacher(
        lambda rows: teacher(states_PD[rows]), chunk.rows, draft.target_ids(), draft.config.vocab_size,
        labels(chunk.row_pass.row, chunk.needed_P),
    )  # fmt: skip
    options = LossOptions(
        objective.loss, objective.keep_out_of_vocab, objective.temperature, implementation.chunk, implementation.loss
    )
    weights = objective.weights(draft.family)
    selection = _selection(chunk, weights, hard=objective.loss == "hard")
    loss, scores, dhead_inputs = loss_and_gradients(
        chunk.head_inputs, draft.head, targets, weights, options,
        head_sum=gradients.head_sum if gradients else None, gradients=gradients is not None, choose=selection,
    )  # fmt: skip
    by_slot = None
    if objective.dpace and dhead_inputs:
        if draft.head.requires_grad:
            raise ValueError("--dpace needs a draft with the target's head, and this one trains its own; use --gamma")
        by_slot = weigh_by_confidence(dhead_inputs, chunk.slots, scores, hard=objective.loss == "hard")
    if selection is not None:
        loss = loss + selection.loss
        if gradients:
            selection.backward(dhead_inputs, by_slot)
    if draft.family.regression:
        loss = loss + _regression(chunk.head_inputs[0], states_PD, chunk.rows[0], dhead_inputs)
    if gradients:
        chunk.backward(dhead_inputs)
    return loss, scores


def labels(row: Packed, needed_P: Tensor) -> Tensor:
    """The hard label of each teacher row, int64 [P]: the next token of the row. The teacher of slot t at step k is the
    target's distribution after x_{t+1+k}, so the label is x_{t+2+k}, which is a token of the answer, since the slot is
    live (`Packed.live`)."""
    return row.token_T[needed_P + 1].long()


def weigh_by_confidence(
    dhead_inputs: list[Tensor], slots: Sequence[Tensor], scores: Scores, *, hard: bool
) -> list[Tensor]:
    """Multiplies the gradient of each slot's head input by D-PACE's weight of the slot (`dpace_weights`). Returns the
    weights of each step's slots.

    The loss was computed with equal weights, and its gradient is linear in the weights. Each slot of `slots[0]` begins
    a block. The probability that a slot's token is accepted is exp(-loss) with `hard` labels, as in D-PACE's paper, and
    otherwise α: with soft labels, exp(-loss) would be small where the target itself is unsure. All slots are scored,
    since a method with D-PACE drafts over the target's whole vocabulary.
    """
    confidences = [loss.neg().exp() for loss in scores.losses] if hard else scores.accepts
    blocks = to_device([torch.searchsorted(slots[0], t) for t in slots], confidences[0].device)
    weights = dpace_weights(confidences, blocks)
    for dh, weight in zip(dhead_inputs, weights, strict=True):
        of_slots = dh[: weight.numel()]  # rows beyond are padding
        of_slots.copy_(of_slots * weight[:, None])
    return weights


def _selection(chunk: Chunk, weights: Sequence[float], *, hard: bool = False) -> SelectorLoss | None:
    """The loss of the draft's selector on a chunk, with `hard` labels or the target's distributions; None without a
    selector."""
    draft, row = chunk.row_pass.draft, chunk.row_pass.row
    selector = draft.selector() if isinstance(draft, BlockDraft) else None
    if selector is None:
        return None
    tokens = ([step_inputs(row, slots, k + i)[0] for k, slots in enumerate(chunk.slots)] for i in (0, 1))
    before_S, label_S = to_device([torch.cat(parts).long() for parts in tokens], draft.device)
    counts = [slots.numel() for slots in chunk.slots]
    return SelectorLoss(selector, chunk.head_inputs, before_S, counts, weights, label_S if hard else None)


def _regression(out_PE: Tensor, states_PD: Tensor, rows_S: Tensor, dhead_inputs: list[Tensor]) -> Tensor:
    """EAGLE-1's regression loss Σ_slots SmoothL1(f̂, f) / E (EAGLE, section 3.2).

    f̂ are the first S rows of the draft's output and f the target's final states at `rows_S`, both E wide. The gradient
    is added to the first of `dhead_inputs`, if there are any.
    """
    target_SE = states_PD.index_select(0, *to_device([rows_S], states_PD.device))
    S, E = target_SE.shape
    error = at_least_float32(out_PE[:S].detach()) - at_least_float32(target_SE.to(out_PE.device))
    if dhead_inputs:
        dhead_inputs[0][:S] += (error.clamp(-1, 1) / E).to(dhead_inputs[0].dtype)
    return torch.where(error.abs() < 1, error.square() / 2, error.abs() - 0.5).sum() / E


@dataclass(frozen=True)
class RowResult:
    """The result of a row, on the device: `parts` are the loss and scores of each chunk, and `slots` the slots trained
    at each step. `supervised` is as in `RowSums`. `all_live`: no live slot was dropped."""

    parts: Sequence[tuple[Tensor, Scores]]
    slots: Sequence[Tensor]
    supervised: int
    all_live: bool

    def scored_K(self) -> Tensor:
        """The number of scored slots of each step, int64 [K]."""
        return sum(scores.scored_K for _, scores in self.parts)

    def to_host(self) -> RowSums:
        """The row's sums, with the counts on the host. Synchronizes the device."""
        steps = range(len(self.slots))
        hits = torch.cat([scores.hits[k] for k in steps for _, scores in self.parts])
        hits = hits.cpu().split([t.numel() for t in self.slots])
        tokens = int(self.slots[0][-1]) + 1 if self.slots[0].numel() else 0
        hit_KT = torch.zeros(len(self.slots), tokens, dtype=torch.uint8)
        for k, (slots, hit) in enumerate(zip(self.slots, hits, strict=True)):
            hit_KT[k, slots] = hit.to(torch.uint8)
        return RowSums(
            loss=sum(loss for loss, _ in self.parts),
            live_K=torch.tensor([t.numel() for t in self.slots]),
            scored_K=self.scored_K().cpu(),
            hit_K=torch.tensor([int(h.sum()) for h in hits]),
            survive_K=hit_KT.cumprod(0).sum(1),
            accept_K=sum(scores.accept_K for _, scores in self.parts).cpu(),
            supervised=self.supervised,
            simulated=simulate_decoding(self.slots, hits) if self.all_live else (0, 0),
        )


def simulate_decoding(live: Sequence[Tensor], hits: Sequence[Tensor]) -> tuple[int, int]:
    """(tokens committed, rounds) of decoding all spans of the row; arguments as in `accepted_per_round`."""
    rounds = accepted_per_round(live, hits)
    return sum(rounds) + len(rounds), len(rounds)


def accepted_per_round(live: Sequence[Tensor], hits: Sequence[Tensor]) -> list[int]:
    """The number of accepted draft tokens in each round.

    `live` are the live slots of the K steps, ascending int64 tensors; `hits` are bool tensors of the same lengths:
    whether the draft's argmax is the teacher's. A round at slot t accepts draft tokens up to the first miss, and the
    next round starts at slot t + accepted + 1. A round does not continue beyond the end of its span.
    """
    if not live or not live[0].numel():
        return []
    n = int(live[0][-1]) + 1
    run = torch.zeros(n, dtype=torch.int64)
    for slots, hit in zip(reversed(live), reversed(hits), strict=True):
        run[slots] = torch.where(hit, run[slots] + 1, 0)  # consecutive hits from step k on
    is_live = torch.zeros(n, dtype=torch.bool)
    is_live[live[0]] = True
    run, is_live = run.tolist(), is_live.tolist()
    rounds, t = [], int(live[0][0])
    while t < n:
        if is_live[t]:
            rounds.append(run[t])
            t += run[t] + 1
        else:
            t += 1
    return rounds
