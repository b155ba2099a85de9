"""Loss of a draft head against a target's distribution, without ever holding slots x vocabulary logits.

For slot i of step k with hidden state h (after the draft's norm), head W, the target's distribution p over its
vocabulary V, and p' that distribution restricted to the draft's W ids and renormalised:

    z = W h,   q = softmax(z),   α = Σ_w min(p_w, q_w)

    ce        -Σ_w p'_w log q_w                     dz = q - p'
    kl        Σ_w p'_w log(p'_w / q_w)              dz = q - p'
    accept    -log α                                dz = -q ([q < p] - c) / α,   c = Σ_w q_w [q_w < p_w]
    mixed     λ kl + (1 - λ)(1 - α)                 dz = λ (q - p') - (1 - λ) q ([q < p] - c)

with λ = exp(-3 α) taken as a constant, and α no smaller than 1e-6. Gradients are computed in the forward pass, tile by
tile (as Liger does for hard labels): a tile of the teacher is computed once and read by all K steps, dW is accumulated
in float32, dh is written, and nothing else outlives a few tiles. `definition` has the losses in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.gradients import Fp32Accumulator
from fledge.kernels.linear import rounded
from fledge.kernels.loss import definition
from fledge.kernels.loss.definition import soft_target_loss_reference
from fledge.kernels.loss.tiles import PRODUCT, SlotSums, Tile, groups_of, tiles_of

__all__ = [
    "IMPLS", "KINDS", "PRODUCT", "LossOptions", "LossResult", "Scores", "Teacher", "loss_and_gradients",
    "soft_target_loss_reference",
]  # fmt: skip

KINDS = ("ce", "kl", "accept", "mixed")
IMPLS = ("eager", "triton")
# Logits of a chunk by default, the teacher's and its slots' ("eager" holds copies of them). On a CPU so few of the
# teacher's that they stay in its caches, if those are 64 rows or more.
LOGITS = {"triton": 3 << 27, "eager": 3 << 25}
CACHED = 1 << 19


@dataclass(frozen=True)
class Teacher:
    """What the draft is taught: `logits(slice)` gives the target's logits [n, V] of some of P rows, `rows` are the
    teacher rows of each step's slots, K ascending int64 CPU tensors [S_k], `ids_W` the target id of every draft id, and
    `vocab_size` is V.
    """

    logits: Callable[[slice], Tensor]
    rows: Sequence[Tensor]
    ids_W: Tensor
    vocab_size: int


@dataclass(frozen=True)
class LossOptions:
    """`kind` is one of KINDS. A slot is scored where the teacher's argmax is in the draft's vocabulary, or always with
    `keep_out_of_vocab`; elsewhere it counts as a miss. `chunk` is how many teacher rows are computed at a time (None:
    as LOGITS and CACHED allow). `impl` "triton" needs a GPU, or Triton's interpreter. Raises ValueError for an unknown
    kind or impl.
    """

    kind: str = "ce"
    keep_out_of_vocab: bool = False
    chunk: int | None = None
    impl: str = "eager"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"loss {self.kind!r} is none of {', '.join(KINDS)}")
        if self.impl not in IMPLS:
            raise ValueError(f"loss implementation {self.impl!r} is none of {', '.join(IMPLS)}")

    def rows_at_a_time(self, V: int, W: int, steps: int, device: torch.device) -> int:
        """Teacher rows of a chunk."""
        if self.chunk is not None:
            return self.chunk
        cached = CACHED // V if device.type == "cpu" else 0
        return cached if cached >= 64 else max(64, LOGITS[self.impl] // (V + steps * W) // 64 * 64)


@dataclass(frozen=True)
class Scores:
    """What the loss found: per step k a float32 loss sum and Σ α [K], int64 scored counts [K], and bool hits [S_k]."""

    loss_K: Tensor
    accept_K: Tensor
    scored_K: Tensor
    hits: list[Tensor]


class LossResult(NamedTuple):
    """`loss`: Σ_k weights[k] Σ_scored loss, a scalar; `dhidden`: its gradients for the hidden states, like them."""

    loss: Tensor
    scores: Scores
    dhidden: list[Tensor]


@torch.no_grad()
def loss_and_gradients(
    hidden: Sequence[Tensor], head_WE: Tensor, teacher: Teacher, weights: Sequence[float],
    options: LossOptions = LossOptions(), *, head_sum: Fp32Accumulator | None = None, gradients: bool = True,
) -> LossResult:  # fmt: skip
    """Loss of K steps' hidden states (each [S_k or more, E]; rows beyond the slots get zero gradients), and the
    gradients for them; the head's gradient is added to `head_sum` where one is given.

    α has p over all of V. Memory: the logits of a chunk of teacher rows and of the slots they teach, of PRODUCT slots
    at least. Without `gradients`, `dhidden` is empty.
    """
    device, counts = head_WE.device, [r.numel() for r in teacher.rows]
    chunk = options.rows_at_a_time(teacher.vocab_size, teacher.ids_W.numel(), len(counts), device)
    wide = torch.promote_types(head_WE.dtype, torch.float32)
    kinds = (wide, wide, torch.bool, torch.bool)  # a tensor each: Triton compiles anew for other alignments
    sums = SlotSums(*(torch.zeros(sum(counts), dtype=kind, device=device) for kind in kinds))
    dhidden = [torch.empty_like(h) for h in hidden] if gradients else []
    for dh, n in zip(dhidden, counts, strict=False):
        dh[n:].zero_()
    loss_of_tile = _TileLoss(teacher, weights, options, sums, chunk)
    for group in groups_of(tiles_of(list(teacher.rows), chunk, device)):
        _group_loss(group, hidden, head_WE, loss_of_tile, dhidden, head_sum)
    loss_K, accept_K = (torch.stack([p.sum() for p in x.split(counts)]) for x in (sums.loss_S, sums.accept_S))
    scored_K = torch.stack([p.sum() for p in sums.scored_S.split(counts)])
    loss = sum(part * weight for part, weight in zip(loss_K.unbind(), weights, strict=True))
    return LossResult(loss, Scores(loss_K, accept_K, scored_K, list(sums.hit_S.split(counts))), dhidden)


class _TileLoss:
    """Replaces a tile's logits by the weighted gradient for them, and leaves what it finds in the sums."""

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
        self.rounds = options.impl == "triton"  # whether products are computed with a rounded number of rows
        if options.impl == "triton":
            from fledge.kernels.loss.triton import tile_loss
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
    group: list[Tile], hidden: Sequence[Tensor], head_WE: Tensor, tile_loss: _TileLoss, dhidden: list[Tensor],
    head_sum: Fp32Accumulator | None,
) -> None:  # fmt: skip
    """The products of a group of tiles around their losses; what it holds is freed before the next group."""
    heights = [t.place_M.numel() for t in group]
    beyond = rounded(sum(heights)) - sum(heights) if tile_loss.rounds else 0
    spans = [(a, b) for (a, _), (_, b) in zip(group[0].spans, group[-1].spans, strict=True)]
    steps = [k for k, (a, b) in enumerate(spans) if a < b]
    # slots of one step stand side by side and are read and written where they are
    in_place = None if beyond or len(steps) > 1 else (steps[0], slice(*spans[steps[0]]))
    if in_place:
        h = hidden[in_place[0]][in_place[1]]
    else:
        h = [x[a:b] for tile in group for x, (a, b) in zip(hidden, tile.spans, strict=True)]
        h = torch.cat([*h, h[0].new_zeros(beyond, h[0].shape[1])])
    z = h @ head_WE.T
    for tile, part in zip(group, z[: sum(heights)].split(heights), strict=True):
        tile_loss(tile, part)
    if head_sum is not None:
        head_sum.add_product(z.T, h)
    if dhidden and in_place:
        torch.mm(z, head_WE, out=dhidden[in_place[0]][in_place[1]])
    elif dhidden:
        found = (z @ head_WE)[: sum(heights)].split([b - a for tile in group for a, b in tile.spans])
        into = [x[a:b] for tile in group for x, (a, b) in zip(dhidden, tile.spans, strict=True)]
        for whole, part in zip(into, found, strict=True):
            whole.copy_(part)
