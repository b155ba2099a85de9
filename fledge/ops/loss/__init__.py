"""Soft-target losses between draft and target, without materializing the logits of all slots.

Notation, for one slot of one TTT step: h is the head's input (the draft's normed output), W the weight of the draft's
head, p the target's distribution over its vocabulary V, and p' that distribution restricted to the draft's vocabulary
and renormalised.

    z = W h,   q = softmax(z),   α = Σ_w min(p_w, q_w)

    ce        -Σ_w p'_w log q_w                     dz = q - p'
    kl        Σ_w p'_w log(p'_w / q_w)              dz = q - p'
    accept    -log α                                dz = -q ([q < p] - c) / α,   c = Σ_w q_w [q_w < p_w]
    mixed     λ kl + (1 - λ)(1 - α)                 dz = λ (q - p') - (1 - λ) q ([q < p] - c)

where λ = exp(-3 α) is treated as a constant, [..] is 1 if its condition holds and else 0, and α is clamped to at least
1e-6. Sums over w run over the draft's vocabulary. As in Liger's fused cross entropy for hard labels, gradients are
computed in the forward pass, tile by tile: a tile of teacher logits is computed once and used by all K steps, dW is
accumulated in float32, and only dW and dh outlive a few tiles. `definition` has the losses in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.gradients import Fp32Accumulator
from fledge.ops.loss import definition
from fledge.ops.loss.definition import soft_target_loss_reference
from fledge.ops.loss.tiles import SLOTS_PER_GROUP, SlotSums, Tile, group_tiles, make_tiles
from fledge.ops.products import padded_rows

__all__ = [
    "IMPLS", "KINDS", "SLOTS_PER_GROUP", "LossOptions", "LossResult", "Scores", "Teacher", "loss_and_gradients",
    "soft_target_loss_reference",
]  # fmt: skip

KINDS = ("ce", "kl", "accept", "mixed")
IMPLS = ("eager", "triton")
# The default number of logits in a chunk: the teacher's and those of its slots ("eager" holds copies of them). On a
# CPU, a chunk has at most CPU_CACHED_LOGITS teacher logits, so that they fit its caches, if that is at least 64 rows.
CHUNK_LOGITS = {"triton": 3 << 27, "eager": 3 << 25}
CPU_CACHED_LOGITS = 1 << 19


@dataclass(frozen=True)
class Teacher:
    """The soft targets of the loss.

    `logits(slice)` computes the target's logits [n, V] for a slice of P teacher rows. `rows` are the teacher rows of
    each step's slots: K ascending int64 CPU tensors [S_k]. `ids_W` is the target id of each draft id, and `vocab_size`
    is V.
    """

    logits: Callable[[slice], Tensor]
    rows: Sequence[Tensor]
    ids_W: Tensor
    vocab_size: int


@dataclass(frozen=True)
class LossOptions:
    """Options of the loss.

    `kind` is one of KINDS. A slot is scored (contributes to the loss) if the teacher's argmax is in the draft's
    vocabulary, or always with `keep_out_of_vocab`; a slot that is not scored counts as a miss. `chunk` is the number of
    teacher rows computed at a time; None chooses it by CHUNK_LOGITS and CPU_CACHED_LOGITS. `impl` is one of IMPLS;
    "triton" needs a GPU, or Triton's interpreter. Raises ValueError for an unknown kind or impl.
    """

    kind: str = "ce"
    keep_out_of_vocab: bool = False
    chunk: int | None = None
    impl: str = "eager"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"loss {self.kind!r} must be one of {', '.join(KINDS)}")
        if self.impl not in IMPLS:
            raise ValueError(f"loss implementation {self.impl!r} must be one of {', '.join(IMPLS)}")

    def teacher_rows_per_chunk(self, V: int, W: int, steps: int, device: torch.device) -> int:
        """The number of teacher rows in a chunk, for K = `steps`."""
        if self.chunk is not None:
            return self.chunk
        cached = CPU_CACHED_LOGITS // V if device.type == "cpu" else 0
        return cached if cached >= 64 else max(64, CHUNK_LOGITS[self.impl] // (V + steps * W) // 64 * 64)


@dataclass(frozen=True)
class Scores:
    """Metrics of the loss, per step k.

    `loss_K` is the sum of the unweighted losses of the scored slots, and `accept_K` the sum of α, both [K] and at least
    float32. `scored_K` is the number of scored slots, int64 [K]. `hits` are bool [S_k]: whether the draft's argmax is
    the teacher's.
    """

    loss_K: Tensor
    accept_K: Tensor
    scored_K: Tensor
    hits: list[Tensor]


class LossResult(NamedTuple):
    """`loss` is Σ_k weights[k] Σ_scored loss, a scalar. `dhead_inputs` are its gradients for the head's inputs."""

    loss: Tensor
    scores: Scores
    dhead_inputs: list[Tensor]


@torch.no_grad()
def loss_and_gradients(
    head_inputs: Sequence[Tensor], head_WE: Tensor, teacher: Teacher, weights: Sequence[float],
    options: LossOptions = LossOptions(), *, head_sum: Fp32Accumulator | None = None, gradients: bool = True,
) -> LossResult:  # fmt: skip
    """The loss of K steps and its gradients.

    `head_inputs` are those of each step, [S_k or more, E]; rows beyond S_k are padding and get zero gradients.
    `weights` are the K weights of the steps. The gradient of the head's weight is added to `head_sum`, if given.
    Without `gradients`, `dhead_inputs` is empty. Memory: the logits of a chunk of teacher rows and of the slots that
    use them, or of SLOTS_PER_GROUP slots if that is more.
    """
    device, counts = head_WE.device, [r.numel() for r in teacher.rows]
    chunk = options.teacher_rows_per_chunk(teacher.vocab_size, teacher.ids_W.numel(), len(counts), device)
    wide = torch.promote_types(head_WE.dtype, torch.float32)
    # separate tensors, not slices of one: Triton recompiles a kernel if a pointer's alignment changes
    kinds = (wide, wide, torch.bool, torch.bool)
    sums = SlotSums(*(torch.zeros(sum(counts), dtype=kind, device=device) for kind in kinds))
    dhead_inputs = [torch.empty_like(h) for h in head_inputs] if gradients else []
    for dh, n in zip(dhead_inputs, counts, strict=False):
        dh[n:].zero_()
    loss_of_tile = _TileLoss(teacher, weights, options, sums, chunk)
    for group in group_tiles(make_tiles(list(teacher.rows), chunk, device)):
        _group_loss(group, head_inputs, head_WE, loss_of_tile, dhead_inputs, head_sum)
    loss_K, accept_K = (torch.stack([p.sum() for p in x.split(counts)]) for x in (sums.loss_S, sums.accept_S))
    scored_K = torch.stack([p.sum() for p in sums.scored_S.split(counts)])
    loss = sum(part * weight for part, weight in zip(loss_K.unbind(), weights, strict=True))
    return LossResult(loss, Scores(loss_K, accept_K, scored_K, list(sums.hit_S.split(counts))), dhead_inputs)


class _TileLoss:
    """Computes the loss of a tile: overwrites its logits by their weighted gradient, writes results to `sums`."""

    def __init__(
        self, teacher: Teacher, weights: Sequence[float], options: LossOptions, sums: SlotSums, chunk: int
    ):  # fmt: skip
        self.teacher, self.options, self.sums, self.chunk = teacher, options, sums, chunk
        self.weight_S = torch.empty_like(sums.loss_S)
        for part, weight in zip(self.weight_S.split([r.numel() for r in teacher.rows]), weights, strict=True):
            part.fill_(weight)
        ids_W = teacher.ids_W
        self.draft_id_V = ids_W.new_full((teacher.vocab_size,), -1)  # -1: not in the draft's vocabulary
        self.draft_id_V[ids_W] = torch.arange(ids_W.numel(), device=ids_W.device)
        self.pads_rows = options.impl == "triton"  # whether the number of rows of a product is padded (`padded_rows`)
        if options.impl == "triton":
            from fledge.ops.loss.triton import tile_loss
        else:
            tile_loss = definition.tile_loss
        self.compute = tile_loss

    def __call__(self, tile: Tile, z_MW: Tensor) -> None:
        logits_NV = self.teacher.logits(slice(tile.start, tile.start + self.chunk)).to(z_MW.device)
        kind, keep = self.options.kind, self.options.keep_out_of_vocab
        self.compute(
            z_MW, logits_NV, tile, self.weight_S, self.teacher.ids_W, self.draft_id_V, kind, keep, self.sums
        )  # fmt: skip


def _group_loss(
    group: list[Tile], head_inputs: Sequence[Tensor], head_WE: Tensor, tile_loss: _TileLoss, dhead_inputs: list[Tensor],
    head_sum: Fp32Accumulator | None,
) -> None:  # fmt: skip
    """Computes the logits, losses and gradients of a group of tiles.

    A function of its own, so that its tensors are freed before the next group.
    """
    heights = [t.place_M.numel() for t in group]
    padding = padded_rows(sum(heights)) - sum(heights) if tile_loss.pads_rows else 0
    spans = [(a, b) for (a, _), (_, b) in zip(group[0].spans, group[-1].spans, strict=True)]
    steps = [k for k, (a, b) in enumerate(spans) if a < b]
    # the slots of a single step are contiguous, so that they are read and written without a copy
    in_place = None if padding or len(steps) > 1 else (steps[0], slice(*spans[steps[0]]))
    if in_place:
        h = head_inputs[in_place[0]][in_place[1]]
    else:
        h = [x[a:b] for tile in group for x, (a, b) in zip(head_inputs, tile.spans, strict=True)]
        h = torch.cat([*h, h[0].new_zeros(padding, h[0].shape[1])])
    z = h @ head_WE.T
    for tile, part in zip(group, z[: sum(heights)].split(heights), strict=True):
        tile_loss(tile, part)
    if head_sum is not None:
        head_sum.add_product(z.T, h)
    if dhead_inputs and in_place:
        torch.mm(z, head_WE, out=dhead_inputs[in_place[0]][in_place[1]])
    elif dhead_inputs:
        gradients = (z @ head_WE)[: sum(heights)].split([b - a for tile in group for a, b in tile.spans])
        destinations = [x[a:b] for tile in group for x, (a, b) in zip(dhead_inputs, tile.spans, strict=True)]
        for destination, part in zip(destinations, gradients, strict=True):
            destination.copy_(part)
