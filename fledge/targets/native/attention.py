"""Attention of the native forward pass within packed documents, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.packed_attention import PackedAttention
from fledge.models.decode_layer import LayerWeights, Rotation, queries


class PackedRows:
    """The attention of a packed row. `documents` are the [start, end) token ranges that cover it."""

    def __init__(self, documents: Sequence[tuple[int, int]], device: torch.device):
        counts, starts = [end - start for start, end in documents], [start for start, _ in documents]
        self.attention = PackedAttention(counts, [0] * len(counts), starts, device)

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        """See `RowAttention`."""
        shape, slot_M = weights.shape, self.attention.slot_M
        keys, values = qkv_MO.new_empty(2, shape.kv_heads, qkv_MO.shape[0], shape.head_dim)
        q_MHd = queries(qkv_MO, weights, rotation, keys, values, slot_M)
        return self.attention(q_MHd, keys, values, shape.scale, weights.window).flatten(1)
