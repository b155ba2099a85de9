"""Losses between draft and target, without materializing the logits of all slots.

Notation, for one slot of one TTT step: h is the head's input (the draft's normed output), W the weight of the draft's
head, p the target's distribution over its vocabulary V, p' that distribution restricted to the draft's vocabulary
and renormalised, and y the slot's label, the token that the text has at the place of the drafted token.

    z = W h,   q = softmax(z),   α = Σ_w min(p_w, q_w)

    ce        -Σ_w p'_w log q_w                     dz = q - p'
    kl        Σ_w p'_w log(p'_w / q_w)              dz = q - p'
    accept    -log α                                dz = -q ([q < p] - c) / α,   c = Σ_w q_w [q_w < p_w]
    mixed     λ kl + (1 - λ)(1 - α)                 dz = λ (q - p') - (1 - λ) q ([q < p] - c)
    hard      -log q_y                              dz_w = q_w - [w = y]

where λ = exp(-3 α) is treated as a constant, [..] is 1 if its condition holds and else 0, and α is clamped to at least
1e-6. Sums over w run over the draft's vocabulary. At a temperature T, ce and kl are T² times the loss between
softmax(z / T) and p' at this temperature (Hinton et al. 2015, arXiv:1503.02531), so that dz = T (q_T - p'_T); α and
hits are those of temperature 1 with every loss.

As in Liger's fused cross entropy for hard labels, gradients are computed in the forward pass, tile by tile: a tile of
teacher logits is computed once and used by all K steps, dW is accumulated in float32, and only dW and dh outlive a few
tiles.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.device import at_least_float32, to_device
from fledge.ops.training import Fp32Accumulator, padded_rows

KINDS = ("ce", "kl", "accept", "mixed", "hard")
WITH_TEMPERATURE = ("ce", "kl")  # kinds of loss that may have a temperature other than 1
# The default number of logits in a chunk: teacher logits and the slots' draft logits ("eager" holds copies of both). On
# a CPU, a chunk has at most CPU_CACHED_LOGITS teacher logits, to fit the caches, if at least 64 rows remain.
CHUNK_LOGITS = {"triton": 3 << 27, "eager": 3 << 25}
CPU_CACHED_LOGITS = 1 << 19
SLOTS_PER_GROUP = 2048  # minimum number of slots per GEMM of the head's gradient
MIN_ALPHA = 1e-6  # lower bound of α in -log α
DPACE_SMOOTHING = 0.5  # of D-PACE's confidences


@dataclass(frozen=True)
class Teacher:
    """The targets of the loss.

    `logits(slice)` computes the target's logits [n, V] for a slice of P teacher rows. `rows` are the teacher rows of
    each step's slots: K ascending int64 CPU tensors [S_k]. `ids_W` is the target id of each draft id, and `vocab_size`
    is V. `label_P` are the target ids of the tokens that follow in the text, int64 on the CPU; only hard labels need
    them.
    """

    logits: Callable[[slice], Tensor]
    rows: Sequence[Tensor]
    ids_W: Tensor
    vocab_size: int
    label_P: Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """Options of the loss.

    `kind` is one of KINDS, and `temperature` that of the kinds WITH_TEMPERATURE. A slot is scored (contributes to the
    loss) if the teacher's argmax is in the draft's vocabulary, or always with `keep_out_of_vocab`; a slot that is not
    scored counts as a miss. With hard labels, a slot is scored if its label is in the draft's vocabulary. `chunk` is
    the number of teacher rows computed at a time; None chooses it by CHUNK_LOGITS and CPU_CACHED_LOGITS. `impl` is
    "eager" or "triton", which needs a GPU or Triton's interpreter.
    """

    kind: str = "ce"
    keep_out_of_vocab: bool = False
    temperature: float = 1.0
    chunk: int | None = None
    impl: str = "eager"

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
    the teacher's. `losses` and `accepts` are the unweighted loss (0 if not scored) and α of each slot, [S_k].
    """

    loss_K: Tensor
    accept_K: Tensor
    scored_K: Tensor
    hits: list[Tensor]
    losses: list[Tensor]
    accepts: list[Tensor]


@dataclass(frozen=True)
class Chosen:
    """How the M slots of a tile choose among C candidates each, in place of the likeliest token of all.

    `ids_MC` are the candidates as draft ids (int64), and `dz_MC` gradients of their logits, which are added to those of
    the loss. `hit_M` (bool) and `accept_M` are as `Scores.hits` and α for the slot's choice.
    """

    ids_MC: Tensor
    dz_MC: Tensor
    hit_M: Tensor
    accept_M: Tensor


Choose = Callable[["Tile", Tensor, Tensor], Chosen]  # of a tile, its draft logits [M, W] and teacher logits [N, V]


class LossResult(NamedTuple):
    """`loss` is Σ_k weights[k] Σ_scored loss, a scalar. `dhead_inputs` are its gradients for the head's inputs."""

    loss: Tensor
    scores: Scores
    dhead_inputs: list[Tensor]


@torch.no_grad()
def loss_and_gradients(
    head_inputs: Sequence[Tensor], head_WE: Tensor, teacher: Teacher, weights: Sequence[float],
    options: LossOptions = LossOptions(), *, head_sum: Fp32Accumulator | None = None, gradients: bool = True,
    choose: Choose | None = None,
) -> LossResult:  # fmt: skip
    """The loss of K steps and its gradients.

    `head_inputs` has a tensor per step, [S_k or more, E]; rows beyond S_k are padding and get zero gradients. `weights`
    are the K weights of the steps. The gradient of the head's weight is added to `head_sum`, if given. Without
    `gradients`, `dhead_inputs` is empty. `choose` says how tokens are chosen (None: the likeliest). Memory: the
    logits of a chunk of teacher rows and of the chunk's slots, at least SLOTS_PER_GROUP slots.
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
    weight_S = torch.empty_like(sums.loss_S)
    for part, weight in zip(weight_S.split(counts), weights, strict=True):
        part.fill_(weight)
    draft_id_V = teacher.ids_W.new_full((teacher.vocab_size,), -1)  # -1: not in the draft's vocabulary
    draft_id_V[teacher.ids_W] = torch.arange(teacher.ids_W.numel(), device=teacher.ids_W.device)
    label_S = draft_id_V.new_empty(0)
    if options.kind == "hard":
        assert teacher.label_P is not None, "hard labels were not given"
        label_S = draft_id_V[to_device([teacher.label_P[torch.cat(list(teacher.rows))]], draft_id_V.device)[0]]
    given = weight_S, label_S, teacher.ids_W, draft_id_V, options, sums
    compute = tile_loss
    if options.impl == "triton":
        from fledge.ops.loss_triton import tile_loss_triton

        compute = functools.partial(tile_loss_triton, least=MIN_ALPHA)

    def loss_of_tile(tile: Tile, z_MW: Tensor) -> None:
        logits_NV = teacher.logits(slice(tile.start, tile.start + chunk)).to(z_MW.device)
        chosen = choose(tile, z_MW, logits_NV) if choose is not None else None  # before z is overwritten
        compute(z_MW, logits_NV, tile, *given)
        if chosen is not None:
            z_MW.scatter_add_(1, chosen.ids_MC, chosen.dz_MC.to(z_MW.dtype))
            sums.hit_S[tile.place_M], sums.accept_S[tile.place_M] = chosen.hit_M, chosen.accept_M

    for group in group_tiles(make_tiles(list(teacher.rows), chunk, device)):
        rows = sum(tile.place_M.numel() for tile in group)
        padding = padded_rows(rows) - rows if options.impl == "triton" else 0
        _group_loss(group, head_inputs, head_WE, loss_of_tile, dhead_inputs, head_sum, padding)
    losses, accepts, scored, hits = (
        list(x.split(counts)) for x in (sums.loss_S, sums.accept_S, sums.scored_S, sums.hit_S)
    )
    loss_K, accept_K, scored_K = (torch.stack([p.sum() for p in parts]) for parts in (losses, accepts, scored))
    loss = sum(part * weight for part, weight in zip(loss_K.unbind(), weights, strict=True))
    return LossResult(loss, Scores(loss_K, accept_K, scored_K, hits, losses, accepts), dhead_inputs)


def _group_loss(
    group: list[Tile], head_inputs: Sequence[Tensor], head_WE: Tensor, loss_of_tile: Callable[[Tile, Tensor], None],
    dhead_inputs: list[Tensor], head_sum: Fp32Accumulator | None, padding: int,
) -> None:  # fmt: skip
    """Computes the logits, losses and gradients of a group of tiles, in products with `padding` more rows.

    A separate function, so that the tensors of a group are freed before the next group.
    """
    heights = [t.place_M.numel() for t in group]
    h = [x[a:b] for tile in group for x, (a, b) in zip(head_inputs, tile.spans, strict=True)]
    h = torch.cat([*h, h[0].new_zeros(padding, h[0].shape[1])])
    z = h @ head_WE.T
    for tile, part in zip(group, z[: sum(heights)].split(heights), strict=True):
        loss_of_tile(tile, part)
    if head_sum is not None:
        head_sum.add_product(z.T, h)
    if dhead_inputs:
        gradients = (z @ head_WE)[: sum(heights)].split([b - a for tile in group for a, b in tile.spans])
        destinations = [x[a:b] for tile in group for x, (a, b) in zip(dhead_inputs, tile.spans, strict=True)]
        for destination, part in zip(destinations, gradients, strict=True):
            destination.copy_(part)


@dataclass(frozen=True)
class Tile:
    """The slots, of all steps, whose soft targets are in one chunk of teacher rows.

    `start` is the first teacher row of the chunk. `spans` are the [start, end) slots of each step. `place_M` is the
    index of each slot in the concatenation of all steps' slots, and `row_M` its teacher row relative to `start`; both
    are int64 on the device.
    """

    start: int
    spans: tuple[tuple[int, int], ...]
    place_M: Tensor
    row_M: Tensor


@dataclass
class SlotSums:
    """The results per slot, which tiles write: loss, α, whether scored, whether a hit. The steps are concatenated."""

    loss_S: Tensor
    accept_S: Tensor
    scored_S: Tensor
    hit_S: Tensor


def make_tiles(rows: list[Tensor], chunk: int, device: torch.device) -> Iterator[Tile]:
    """Yields a tile for each chunk of `chunk` teacher rows; `rows` are the ascending teacher rows of each step's slots.

    Tiles may have no slots.
    """
    last = max((int(r[-1]) for r in rows if r.numel()), default=-1)
    edges = torch.arange(0, last + 1 + chunk, chunk)
    cuts = [torch.searchsorted(r, edges).tolist() for r in rows]  # K lists of chunks + 1
    base = [0, *itertools.accumulate(r.numel() for r in rows)]
    spans = list(zip(*(itertools.pairwise(c) for c in cuts), strict=True))
    places = [torch.arange(base[k] + a, base[k] + b) for s in spans for k, (a, b) in enumerate(s)]
    within = [rows[k][a:b] - i * chunk for i, s in enumerate(spans) for k, (a, b) in enumerate(s)]
    if not spans:
        return
    place, row = to_device([torch.cat(places), torch.cat(within)], device)
    sizes = [sum(b - a for a, b in s) for s in spans]
    yield from map(Tile, edges.tolist(), spans, place.split(sizes), row.split(sizes))


def group_tiles(tiles: Iterator[Tile]) -> Iterator[list[Tile]]:
    """Groups consecutive tiles, leaving out empty ones, until a group has at least SLOTS_PER_GROUP slots.

    One GEMM for each group adds to the gradient of the head.
    """
    group: list[Tile] = []
    for tile in tiles:
        if tile.place_M.numel():
            group.append(tile)
        if sum(t.place_M.numel() for t in group) >= SLOTS_PER_GROUP:
            yield group
            group = []
    if group:
        yield group


def tile_loss(
    z_MW: Tensor, teacher_NV: Tensor, tile: Tile, weight_S: Tensor, label_S: Tensor, ids_W: Tensor, draft_id_V: Tensor,
    options: LossOptions, sums: SlotSums,
) -> None:  # fmt: skip
    """The loss of M slots with draft logits `z_MW` against N rows of teacher logits.

    Overwrites `z_MW` by its gradient, multiplied by the slots' weights, and writes the results to `sums` at the slots'
    places. `weight_S` are the weights of all slots, and `label_S` the draft ids of all labels, which only hard labels
    need. `draft_id_V` maps each target id to its draft id, and to -1 outside the draft's vocabulary.
    """
    teacher, T = _TeacherTile(teacher_NV, ids_W, draft_id_V, options.temperature), options.temperature
    z = at_least_float32(z_MW)
    p, mass, top = teacher.p_NW[tile.row_M], teacher.mass_N[tile.row_M, None], teacher.top_N[tile.row_M]
    scored = (top >= 0) | options.keep_out_of_vocab
    if options.kind == "hard":
        label = label_S[tile.place_M]
        scored = label >= 0
        loss, dz, alpha = _hard_loss(z.log_softmax(-1), p, mass, label)
    elif T == 1:
        loss, dz, alpha = _row_loss(z.log_softmax(-1), p, mass, options.kind)
    else:
        alpha = torch.minimum(z.softmax(-1), p * mass).sum(-1)
        loss, dz, _ = _row_loss((z / T).log_softmax(-1), teacher.soft_NW[tile.row_M], mass, options.kind)
        loss, dz = loss * T**2, dz * T
    sums.hit_S[tile.place_M] = z.argmax(-1) == top
    sums.scored_S[tile.place_M] = scored
    sums.loss_S[tile.place_M] = torch.where(scored, loss, 0)
    sums.accept_S[tile.place_M] = alpha
    z_MW.copy_(dz * (scored * weight_S[tile.place_M])[:, None])


def _row_loss(logq: Tensor, p: Tensor, mass: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The loss [M], its gradient with respect to the logits [M, W], and α [M].

    `p` [M, W] is p', the teacher's renormalised distribution. `mass` [M, 1] is the probability of the draft's
    vocabulary under p, so that p = p' mass.
    """
    q = logq.exp()
    alpha = torch.minimum(q, p * mass).sum(-1)
    if kind == "ce":
        return -(p * logq).sum(-1), q - p, alpha
    kl = (torch.special.xlogy(p, p) - p * logq).sum(-1)
    if kind == "kl":
        return kl, q - p, alpha
    below = q * (q < p * mass)
    dalpha = below - q * below.sum(-1, keepdim=True)
    if kind == "accept":
        clamped = alpha.clamp_min(MIN_ALPHA)
        return -clamped.log(), -dalpha * ((alpha >= MIN_ALPHA) / clamped)[:, None], alpha
    lam = torch.exp(-3 * alpha)
    return lam * kl + (1 - lam) * (1 - alpha), lam[:, None] * (q - p) - (1 - lam)[:, None] * dalpha, alpha


def _hard_loss(logq: Tensor, p: Tensor, mass: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `_row_loss` for hard labels, draft ids [M]. The results have no meaning where the label is -1, of
    slots that are not scored."""
    q, at = logq.exp(), label.clamp_min(0)[:, None]
    alpha = torch.minimum(q, p * mass).sum(-1)
    return -logq.gather(-1, at).squeeze(-1), q.scatter_add_(-1, at, torch.full_like(q[:, :1], -1)), alpha


class _TeacherTile:
    """The teacher's distributions for N rows of logits.

    `p_NW` is p', renormalised over the draft's vocabulary, and `soft_NW` is p' at the temperature T. `mass_N` is the
    probability of the draft's vocabulary. `top_N` is the argmax over the target's vocabulary as a draft id, or -1 if it
    is not in the draft's vocabulary.
    """

    def __init__(self, logits_NV: Tensor, ids_W: Tensor, draft_id_V: Tensor, T: float = 1.0):
        top = logits_NV.argmax(-1)
        self.top_N = draft_id_V[top]
        logits_NV = at_least_float32(logits_NV)
        logits_NW = logits_NV if ids_W.numel() == logits_NV.shape[-1] else logits_NV[:, ids_W]
        lse = logits_NW.logsumexp(-1)
        self.mass_N = (lse - logits_NV.logsumexp(-1)).exp()
        self.p_NW = (logits_NW - lse[:, None]).exp()
        self.soft_NW = self.p_NW if T == 1 else (logits_NW / T).softmax(-1)


def dpace_weights(
    confidences: Sequence[Tensor], blocks: Sequence[Tensor], smoothing: float = DPACE_SMOOTHING
) -> list[Tensor]:
    """D-PACE's weight of each slot of each step, [S_k] (Wu et al. 2026, arXiv:2605.18810).

    `confidences` are q, the probabilities that the slots' tokens are accepted, [S_k]. `blocks` are the numbers of the
    slots' blocks, int64 [S_k], ascending. Each of N = S_0 blocks has a slot at every step up to its last.

        w_j = Σ_{m >= j} Π_{i <= m} q̃_i,   q̃ = (1 - a) q + a,   a = `smoothing`

    where i and m are steps at which the block has a slot. Π_{i <= m} q_i is the probability that the first m tokens
    are accepted; so without smoothing, w_j is the gradient of the expected number of accepted tokens with respect to
    log q_j.
    """
    smoothed_NK = confidences[0].new_zeros(confidences[0].numel(), len(confidences))  # 0 where a block has ended
    for k, (q, block) in enumerate(zip(confidences, blocks, strict=True)):
        smoothed_NK[block, k] = (1 - smoothing) * q + smoothing
    weight_NK = smoothed_NK.cumprod(1).flip(1).cumsum(1).flip(1)
    return [weight_NK[block, k] for k, block in enumerate(blocks)]


def loss_reference(
    hidden: list[Tensor], head_WE: Tensor, rows: list[Tensor], teacher_PV: Tensor, ids_W: Tensor,
    weights: list[float], kind: str = "ce", label_P: Tensor | None = None, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """The definition of the loss: materializes all logits and leaves the gradient to autograd.

    `teacher_PV` are the teacher's logits; the other arguments are as in `loss_and_gradients`, `Teacher` and
    `LossOptions`. Slots whose teacher argmax, or whose hard label, is not in the draft's vocabulary are not scored.
    """
    total, T = head_WE.new_zeros(()), temperature
    target_P = teacher_PV.argmax(-1) if label_P is None or kind != "hard" else label_P.to(teacher_PV.device)
    scored_P = torch.isin(target_P, ids_W)
    for h, r, weight in zip(hidden, rows, weights, strict=True):
        z = h @ head_WE.T
        if kind == "hard":
            known = scored_P[r]
            label = (target_P[r][known, None] == ids_W).long().argmax(-1)
            total = total + weight * torch.nn.functional.cross_entropy(z[known], label, reduction="sum")
            continue
        logq, taught = (z / T).log_softmax(-1), teacher_PV[r][:, ids_W] / T
        p, alpha = taught.softmax(-1), torch.minimum(teacher_PV[r].softmax(-1)[:, ids_W], z.softmax(-1)).sum(-1)
        kl = (p * (p.log() - logq)).sum(-1)
        lam = torch.exp(-3 * alpha.detach())
        loss = {
            "ce": -(p * logq).sum(-1) * T**2,
            "kl": kl * T**2,
            "accept": -alpha.clamp_min(MIN_ALPHA).log(),
            "mixed": lam * kl + (1 - lam) * (1 - alpha),
        }[kind]
        total = total + weight * loss[scored_P[r]].sum()
    return total
