"""Loss of a draft head against a target's distribution, without ever holding slots x vocabulary logits.

For slot i of step k with hidden state h (after the draft's norm), head W, the target's distribution p over its
vocabulary V, and p' that distribution restricted to the draft's W ids and renormalised:

    z = W h,   q = softmax(z),   α = Σ_w min(p_w, q_w)

    ce        -Σ_w p'_w log q_w                     dz = q - p'
    kl        Σ_w p'_w log(p'_w / q_w)              dz = q - p'
    accept    -log α                                dz = -q ([q < p] - c) / α,   c = Σ_w q_w [q_w < p_w]
    mixed     λ kl + (1 - λ)(1 - α)                 dz = λ (q - p') - (1 - λ) q ([q < p] - c)

with λ = exp(-3 α) taken as a constant, and α no smaller than 1e-6. Gradients are made in the forward pass, tile by
tile (Liger's idea, with a soft target): a tile of the teacher is computed once and read by all K steps, dW
is accumulated in float32, dh is written, and nothing else outlives a few tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.linear import WideSum, rounded
from fledge.kernels.precision import at_least_float32
from fledge.kernels.transfer import to_device

KINDS = ("ce", "kl", "accept", "mixed")
IMPLS = ("eager", "triton")
LEAST_ALPHA = 1e-6
PRODUCT = 2048  # slots whose part of the head's gradient is made at once
# logits of a chunk where nobody says, the teacher's and its slots' ("eager" has copies of them); on a CPU so few of
# the teacher's that they stay in its caches, if those are many rows
LOGITS = {"triton": 3 << 27, "eager": 3 << 25}
CACHED = 1 << 19


@dataclass(frozen=True)
class Scores:
    """What the loss found: per step k a float32 loss sum and Σ α [K], int64 scored counts [K], and bool hits [S_k]."""

    loss_K: Tensor
    accept_K: Tensor
    scored_K: Tensor
    hits: list[Tensor]


@dataclass
class _Sums:
    """Where the tiles leave what they find; the slots of all steps stand one after the other."""

    loss_S: Tensor
    accept_S: Tensor
    scored_S: Tensor
    hit_S: Tensor


@torch.no_grad()
def loss_and_gradients(
    hidden: list[Tensor],
    head_WE: Tensor,
    rows: list[Tensor],
    teacher: Callable[[slice], Tensor],
    ids_W: Tensor,
    weights: list[float],
    *,
    kind: str = "ce",
    keep_unseen: bool = False,
    chunk: int | None = None,
    impl: str = "eager",
    dhead: WideSum | None = None,
    gradients: bool = True,
) -> tuple[Tensor, Scores, list[Tensor]]:
    """Σ_k weights[k] Σ_scored loss, what it found, and its gradients for `hidden` (without `gradients`, none); the
    head's is added to `dhead` where one is given.

    hidden: K tensors of S_k rows, [.., E]; rows beyond those are left out, and get zeros. rows: K ascending int64 CPU
    tensors [S_k], the teacher row of each slot; they index the P rows that `teacher(slice)` gives logits [n, V] of.
    ids_W: target id of every draft id. A slot is scored where the teacher's argmax is among them, or always with
    `keep_unseen`; elsewhere it counts as a miss. α has p over all of V. Memory: the teacher's logits of `chunk` rows
    at a time (None: as LOGITS and CACHED have it) and those of the slots they teach, of PRODUCT slots at least. `impl`
    "triton" needs a GPU, or Triton's interpreter. Raises ValueError for a kind or impl that there is not.
    """
    if kind not in KINDS:
        raise ValueError(f"loss {kind!r} is none of {', '.join(KINDS)}")
    if impl not in IMPLS:
        raise ValueError(f"loss implementation {impl!r} is none of {', '.join(IMPLS)}")
    if chunk is None:
        V = max(teacher(slice(0, 1)).shape[-1], 1)
        cached = CACHED // V if head_WE.device.type == "cpu" else 0
        chunk = cached if cached >= 64 else max(64, LOGITS[impl] // (V + len(rows) * ids_W.numel()) // 64 * 64)
    if impl == "triton":
        from fledge.kernels.loss_triton import tile_loss
    else:
        tile_loss = _tile_loss
    device, counts = head_WE.device, [r.numel() for r in rows]
    wide = torch.promote_types(head_WE.dtype, torch.float32)
    total = sum(counts)
    kinds = (wide, wide, torch.bool, torch.bool)  # each a tensor of its own: Triton compiles again for other alignments
    sums = _Sums(*(torch.zeros(total, dtype=kind, device=device) for kind in kinds))
    dhidden = [torch.empty_like(h) for h in hidden] if gradients else []
    for made, n in zip(dhidden, counts, strict=False):
        made[n:].zero_()
    weight_S = torch.empty(total, dtype=wide, device=device)
    for part, weight in zip(weight_S.split(counts), weights, strict=True):
        part.fill_(weight)
    draft_id: list[Tensor] = []  # by target id, -1 where the draft has none; made when V is known

    def taught(tile: _Tile, z: Tensor) -> None:
        logits = teacher(slice(tile.start, tile.start + chunk)).to(device)
        if not draft_id:
            draft_id.append(torch.full((logits.shape[1],), -1, dtype=torch.int64, device=device))
            draft_id[0][ids_W] = torch.arange(ids_W.numel(), device=device)
        tile_loss(z, logits, tile, weight_S, ids_W, draft_id[0], kind, keep_unseen, sums)

    def multiplied(group: list[_Tile]) -> None:  # what it holds is gone before the next group
        heights = [t.place.numel() for t in group]
        beyond = rounded(sum(heights)) - sum(heights) if impl == "triton" else 0
        spans = [(a, b) for (a, _), (_, b) in zip(group[0].spans, group[-1].spans, strict=True)]
        only = [k for k, (a, b) in enumerate(spans) if a < b]
        there = None if beyond or len(only) > 1 else (only[0], slice(*spans[only[0]]))  # slots of one step, as they are
        if there:
            h = hidden[there[0]][there[1]]
        else:
            h = [x[a:b] for tile in group for x, (a, b) in zip(hidden, tile.spans, strict=True)]
            h = torch.cat([*h, h[0].new_zeros(beyond, h[0].shape[1])])
        z = h @ head_WE.T
        for tile, part in zip(group, z[: sum(heights)].split(heights), strict=True):
            taught(tile, part)
        if dhead is not None:
            dhead.add_product(z.T, h)
        if gradients and there:
            torch.mm(z, head_WE, out=dhidden[there[0]][there[1]])
        elif gradients:
            found = (z @ head_WE)[: sum(heights)].split([b - a for tile in group for a, b in tile.spans])
            into = [x[a:b] for tile in group for x, (a, b) in zip(dhidden, tile.spans, strict=True)]
            for whole, made in zip(into, found, strict=True):
                whole.copy_(made)

    for group in _groups(_by_chunk(rows, chunk, device)):
        multiplied(group)
    loss_K, accept_K = (torch.stack([p.sum() for p in x.split(counts)]) for x in (sums.loss_S, sums.accept_S))
    scored_K = torch.stack([p.sum() for p in sums.scored_S.split(counts)])
    loss = sum(part * weight for part, weight in zip(loss_K.unbind(), weights, strict=True))
    return loss, Scores(loss_K, accept_K, scored_K, list(sums.hit_S.split(counts))), dhidden


@dataclass(frozen=True)
class _Tile:
    """The slots that some teacher rows teach: the first of those rows, every step's span of slots, those slots' places
    among all steps' slots, and their teacher rows within the tile (the last two int64 [M], on the device)."""

    start: int
    spans: tuple[tuple[int, int], ...]
    place: Tensor
    row: Tensor


def _by_chunk(rows: list[Tensor], chunk: int, device: torch.device) -> Iterator[_Tile]:
    """A tile for each run of `chunk` teacher rows."""
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
    yield from map(_Tile, edges.tolist(), spans, place.split(sizes), row.split(sizes))


def _groups(tiles: Iterator[_Tile]) -> Iterator[list[_Tile]]:
    """Tiles that hold PRODUCT slots together, so that the head's gradient is added to a few times only."""
    group: list[_Tile] = []
    for tile in tiles:
        if tile.place.numel():
            group.append(tile)
        if sum(t.place.numel() for t in group) >= PRODUCT:
            yield group
            group = []
    if group:
        yield group


def _tile_loss(
    z_MW: Tensor, teacher_NV: Tensor, tile: _Tile, weight_S: Tensor, ids_W: Tensor, draft_id: Tensor, kind: str,
    keep_unseen: bool, sums: _Sums,
) -> None:  # fmt: skip
    """A tile in plain torch: the logits of M slots of any steps against N teacher rows. The weighted gradient for the
    logits takes their place."""
    teacher = _TeacherTile(teacher_NV, ids_W, draft_id)
    z = at_least_float32(z_MW)
    p, mass, top = teacher.p_NW[tile.row], teacher.mass_N[tile.row, None], teacher.top_N[tile.row]
    scored = (top >= 0) | keep_unseen
    loss, dz, alpha = _row_loss(z.log_softmax(-1), p, mass, kind)
    sums.hit_S[tile.place] = z.argmax(-1) == top
    sums.scored_S[tile.place] = scored
    sums.loss_S[tile.place] = torch.where(scored, loss, 0)
    sums.accept_S[tile.place] = alpha
    z_MW.copy_(dz * (scored * weight_S[tile.place])[:, None])


def _row_loss(logq: Tensor, p: Tensor, mass: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [M], its gradient for the logits [M, W], and α [M]; `p` renormalised, `mass` [M, 1] what it holds of V."""
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
        inside = alpha.clamp_min(LEAST_ALPHA)
        return -inside.log(), -dalpha * ((alpha >= LEAST_ALPHA) / inside)[:, None], alpha
    share = torch.exp(-3 * alpha)
    return share * kl + (1 - share) * (1 - alpha), share[:, None] * (q - p) - (1 - share)[:, None] * dalpha, alpha


class _TeacherTile:
    """A chunk of the teacher: p over the draft's ids renormalised [n, W], the mass those ids hold [n], and the
    argmax over the whole vocabulary as a draft id [n], -1 where the draft cannot say it."""

    def __init__(self, logits_NV: Tensor, ids_W: Tensor, draft_id: Tensor):
        top = logits_NV.argmax(-1)
        self.top_N = draft_id[top]
        whole = at_least_float32(logits_NV)
        kept = whole if ids_W.numel() == whole.shape[-1] else whole[:, ids_W]
        lse = kept.logsumexp(-1)
        self.mass_N = (lse - whole.logsumexp(-1)).exp()
        self.p_NW = (kept - lse[:, None]).exp()


def soft_target_loss_reference(
    hidden: list[Tensor], head_WE: Tensor, rows: list[Tensor], teacher_PV: Tensor, ids_W: Tensor,
    weights: list[float], kind: str = "ce",
) -> Tensor:  # fmt: skip
    """The definition, all logits at once, its gradient left to autograd; slots whose teacher argmax the draft cannot
    say are left out."""
    total = head_WE.new_zeros(())
    unseen = ~torch.isin(teacher_PV.argmax(-1), ids_W)
    for h, r, weight in zip(hidden, rows, weights, strict=True):
        logq = (h @ head_WE.T).log_softmax(-1)
        p = teacher_PV[r][:, ids_W].softmax(-1)
        alpha = torch.minimum(teacher_PV[r].softmax(-1)[:, ids_W], logq.exp()).sum(-1)
        kl = (p * (p.log() - logq)).sum(-1)
        share = torch.exp(-3 * alpha.detach())
        loss = {
            "ce": -(p * logq).sum(-1),
            "kl": kl,
            "accept": -alpha.clamp_min(LEAST_ALPHA).log(),
            "mixed": share * kl + (1 - share) * (1 - alpha),
        }[kind]
        total = total + weight * loss[~unseen[r]].sum()
    return total
