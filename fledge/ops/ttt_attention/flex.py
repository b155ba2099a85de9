"""TTT attention by FlexAttention over the row's keys, merged with the own keys by its log-sum-exp."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fledge.ops.precision import at_least_float32

BLOCK = 128
MIN_HEAD_DIM = 16  # FlexAttention's minimum head size; smaller heads are padded
# not the decoding kernel that torch selects for few queries: it has no tiles for about 100 queries of several heads
OPTIONS = {"BACKEND": "TRITON"}


@functools.cache
def _compiled():
    """flex_attention, compiled once for all lengths."""
    return torch.compile(flex_attention, dynamic=True)


def ttt_attention_flex(
    q_SHd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    own_row_JS: Tensor,
    slot_S: Tensor,
    first_S: Tensor,
) -> Tensor:
    """`ttt_attention_reference` on a GPU. Returns [S, H, d].

    Raises ValueError on a CPU, where FlexAttention has no backward pass.
    """
    if q_SHd.device.type == "cpu":
        raise ValueError("attention 'flex' has no backward pass on a CPU; use 'eager'")
    S, H, d = q_SHd.shape
    T, G, _ = k0_TGd.shape
    if not S:
        return q_SHd
    mask = create_block_mask(
        lambda b, h, q, k: (k >= first_S[q]) & (k <= slot_S[q]), None, None, S, T, device=q_SHd.device, BLOCK_SIZE=BLOCK
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHd, k0_TGd, v0_TGd))
    if d < MIN_HEAD_DIM:
        q, k, v = (F.pad(x, (0, MIN_HEAD_DIM - d)) for x in (q, k, v))
    how = dict(block_mask=mask, enable_gqa=H != G, scale=d**-0.5, return_lse=True, kernel_options=OPTIONS)
    past, lse = _compiled()(q, k, v, **how)
    past = past[0, ..., :d].transpose(0, 1)
    if not own:
        return past
    rows = [
        (keys.index_select(0, at), values.index_select(0, at))
        for (keys, values), at in zip(own, own_row_JS, strict=True)
    ]
    q = q_SHd.view(S, G, H // G, d)
    own_scores = [at_least_float32(torch.einsum("sgrd,sgd->sgr", q, keys)) * d**-0.5 for keys, _ in rows]
    lse = lse[0].T.view(S, G, H // G)
    weights = torch.stack([lse, *own_scores], dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :1] * past.reshape(S, G, H // G, d)
    for j, (_, values) in enumerate(rows):
        out = out + weights[..., j + 1 : j + 2] * values[:, :, None]
    return out.view(S, H, d)
