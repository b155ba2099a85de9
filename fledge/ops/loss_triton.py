"""The loss of a tile in two Triton kernels, each with one program per row.

`_teacher_rows` reads a row of V teacher logits. It computes the argmax as a draft id, the log-sum-exp over V and over
the draft's W ids, and gathers the W logits. `_student_rows` reads a slot's W draft logits z and its teacher's logits:
the first pass computes the log-sum-exp, the argmax and Σ p'z online; the second computes α and overwrites z by the
gradient (for the losses of α, in a third pass). At a temperature other than 1, both kernels compute a second
log-sum-exp. The largest tensors are [N, V] and [M, W] in the model's dtype; sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from fledge.ops.loss import LossOptions, SlotSums, Tile

LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def _lse_update(m, total, x):
    """One step of the online log-sum-exp in each lane. One exponential is enough: one of the two factors is exp(0)."""
    smaller = tl.exp(-tl.abs(x - m))
    return tl.maximum(m, x), tl.where(x > m, total * smaller + 1.0, total + smaller)


@triton.jit
def _lse_result(m, total):
    """Combines the lanes into the log-sum-exp of the row."""
    most = tl.max(m, 0)
    return most + tl.log(tl.sum(total * tl.exp(m - most), 0))


@triton.jit
def _teacher_rows(
    logits_ptr, ids_ptr, draft_id_ptr, gathered_ptr, lse_ptr, soft_lse_ptr, mass_ptr, top_ptr, V, W,
    GATHER: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + n * V + start + lane, mask=start + lane < V, other=LOWEST).to(tl.float32)
        where = tl.where(x > m, start + lane, where)
        m, total = _lse_update(m, total, x)
    lse_V = _lse_result(m, total)
    top = tl.min(tl.where(m == tl.max(m, 0), where, V), 0)  # the lowest index among equal maxima
    tl.store(top_ptr + n, tl.load(draft_id_ptr + top))
    if GATHER:
        m = tl.full([BLOCK], LOWEST, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, W, BLOCK):
            inside = start + lane < W
            at = tl.load(ids_ptr + start + lane, mask=inside, other=0)
            x = tl.load(logits_ptr + n * V + at, mask=inside, other=LOWEST)
            tl.store(gathered_ptr + n * W + start + lane, x, mask=inside)
            m, total = _lse_update(m, total, tl.where(inside, x.to(tl.float32), LOWEST))
        lse = _lse_result(m, total)
    else:
        lse = lse_V
    tl.store(lse_ptr + n, lse)
    tl.store(mass_ptr + n, tl.exp(lse - lse_V))
    if TEMPERATURE != 1.0:  # the log-sum-exp over W at the loss's temperature
        m = tl.full([BLOCK], LOWEST, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, W, BLOCK):
            inside = start + lane < W
            at = start + lane
            if GATHER:
                at = tl.load(ids_ptr + start + lane, mask=inside, other=0)
            x = tl.load(logits_ptr + n * V + at, mask=inside, other=LOWEST).to(tl.float32)
            m, total = _lse_update(m, total, tl.where(inside, x / TEMPERATURE, LOWEST))
        tl.store(soft_lse_ptr + n, _lse_result(m, total))


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "place_ptr"])
def _student_rows(
    z_ptr, gathered_ptr, row_ptr, place_ptr, weight_ptr, label_ptr, lse_ptr, soft_lse_ptr, mass_ptr, top_ptr,
    loss_ptr, accept_ptr, scored_ptr, hit_ptr, W,
    KIND: tl.constexpr, KEEP: tl.constexpr, TEMPERATURE: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    n = tl.load(row_ptr + i)
    teacher_lse, mass, top = tl.load(lse_ptr + n), tl.load(mass_ptr + n), tl.load(top_ptr + n)
    z_row, t_row = z_ptr + i * W, gathered_ptr + n * W
    m = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    agree = tl.zeros([BLOCK], tl.float32)  # Σ p' z
    entropy = tl.zeros([BLOCK], tl.float32)  # Σ p' log p'
    place = tl.load(place_ptr + i)
    scored = (top >= 0) | KEEP
    label = top
    label_z = 0.0
    if KIND == "hard":
        label = tl.load(label_ptr + place)
        scored = label >= 0
        label_z = tl.load(z_row + tl.maximum(label, 0)).to(tl.float32)
    teacher_soft_lse = teacher_lse
    soft_m = m
    soft_total = total
    if TEMPERATURE != 1.0:
        teacher_soft_lse = tl.load(soft_lse_ptr + n)
    for start in range(0, W, BLOCK):
        inside = start + lane < W
        z = tl.load(z_row + start + lane, mask=inside, other=LOWEST).to(tl.float32)
        t = tl.load(t_row + start + lane, mask=inside, other=LOWEST).to(tl.float32)
        where = tl.where(z > m, start + lane, where)
        m, total = _lse_update(m, total, z)
        if TEMPERATURE != 1.0:
            soft_m, soft_total = _lse_update(soft_m, soft_total, tl.where(inside, z / TEMPERATURE, LOWEST))
        if KIND != "hard":
            p = tl.where(inside, tl.exp(t / TEMPERATURE - teacher_soft_lse), 0.0)
            agree += tl.where(inside, p * (z / TEMPERATURE), 0.0)
            if KIND != "ce":
                entropy += tl.where(p > 0, p * (t / TEMPERATURE - teacher_soft_lse), 0.0)
    lse = _lse_result(m, total)
    soft_lse = lse
    if TEMPERATURE != 1.0:
        soft_lse = _lse_result(soft_m, soft_total)
    argmax = tl.min(tl.where(m == tl.max(m, 0), where, W), 0)
    scale = tl.where(scored, tl.load(weight_ptr + place), 0.0)
    alpha = tl.zeros([BLOCK], tl.float32)
    below = tl.zeros([BLOCK], tl.float32)  # Σ q [q < p]
    for start in range(0, W, BLOCK):
        inside = start + lane < W
        z = tl.load(z_row + start + lane, mask=inside, other=LOWEST).to(tl.float32)
        t = tl.load(t_row + start + lane, mask=inside, other=LOWEST).to(tl.float32)
        q, p = tl.exp(z - lse), tl.exp(t - teacher_lse)
        alpha += tl.where(inside, tl.minimum(q, p * mass), 0.0)
        if KIND == "accept" or KIND == "mixed":
            below += tl.where(inside & (q < p * mass), q, 0.0)
        else:
            if KIND == "hard":
                p = tl.where(start + lane == label, 1.0, 0.0)
            elif TEMPERATURE != 1.0:
                q = TEMPERATURE * tl.exp(z / TEMPERATURE - soft_lse)
                p = TEMPERATURE * tl.exp(t / TEMPERATURE - teacher_soft_lse)
            tl.store(z_row + start + lane, ((q - p) * scale).to(z_ptr.dtype.element_ty), mask=inside)
    accepted = tl.sum(alpha, 0)
    ce = soft_lse - tl.sum(agree, 0)
    kl = ce + tl.sum(entropy, 0)
    if KIND == "ce":
        loss = ce * (TEMPERATURE * TEMPERATURE)
    elif KIND == "kl":
        loss = kl * (TEMPERATURE * TEMPERATURE)
    elif KIND == "hard":
        loss = lse - label_z
    else:
        c = tl.sum(below, 0)
        if KIND == "accept":
            loss = -tl.log(tl.maximum(accepted, LEAST))
            by_kl = 0.0
            by_alpha = tl.where(accepted >= LEAST, 1.0 / tl.maximum(accepted, LEAST), 0.0)
        else:
            by_kl = tl.exp(-3.0 * accepted)
            by_alpha = 1.0 - by_kl
            loss = by_kl * kl + by_alpha * (1.0 - accepted)
        for start in range(0, W, BLOCK):
            inside = start + lane < W
            z = tl.load(z_row + start + lane, mask=inside, other=LOWEST).to(tl.float32)
            t = tl.load(t_row + start + lane, mask=inside, other=LOWEST).to(tl.float32)
            q, p = tl.exp(z - lse), tl.exp(t - teacher_lse)
            dz = by_kl * (q - p) - by_alpha * q * (tl.where(q < p * mass, 1.0, 0.0) - c)
            tl.store(z_row + start + lane, (dz * scale).to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(loss_ptr + place, tl.where(scored, loss, 0.0))
    tl.store(accept_ptr + place, accepted)
    tl.store(scored_ptr + place, scored)
    tl.store(hit_ptr + place, argmax == top)


def tile_loss_triton(
    z_MW: Tensor, teacher_NV: Tensor, tile: Tile, weight_S: Tensor, label_S: Tensor, ids_W: Tensor, draft_id_V: Tensor,
    options: LossOptions, sums: SlotSums, least: float,
) -> None:  # fmt: skip
    """`tile_loss` as Triton kernels, where α is clamped to at least `least`. Raises ValueError for float64, since the
    kernels compute in float32."""
    if z_MW.dtype == torch.float64:
        raise ValueError("the loss implementation 'triton' computes in float32; use 'eager' for float64")
    (N, V), (M, W), device = teacher_NV.shape, z_MW.shape, z_MW.device
    gather = W != V
    teacher_NV = teacher_NV.contiguous()
    gathered = teacher_NV.new_empty(N, W) if gather else teacher_NV
    lse, soft_lse, mass = (torch.empty(N, dtype=torch.float32, device=device) for _ in range(3))
    top = torch.empty(N, dtype=torch.int64, device=device)
    _teacher_rows[(N,)](
        teacher_NV, ids_W, draft_id_V, gathered, lse, soft_lse, mass, top, V, W,
        GATHER=gather, TEMPERATURE=options.temperature, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    _student_rows[(M,)](
        z_MW, gathered, tile.row_M, tile.place_M, weight_S, label_S, lse, soft_lse, mass, top,
        sums.loss_S, sums.accept_S, sums.scored_S, sums.hit_S, W,
        KIND=options.kind, KEEP=options.keep_out_of_vocab, TEMPERATURE=options.temperature, LEAST=least, BLOCK=4096,
        num_warps=8,
    )  # fmt: skip
