"""Attention of the native forward pass within packed documents, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.attention import causal_attention
from fledge.models.decode_layer import LayerWeights, Rotation, queries


class PackedRows:
    """The attention of a packed row. `documents` are the [start, end) token ranges that cover it."""

    def __init__(self, documents: Sequence[tuple[int, int]]):
        self.lengths = [end - start for start, end in documents]

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        """See `RowAttention`."""
        shape, M = weights.shape, qkv_MO.shape[0]
        keys, values = qkv_MO.new_empty(2, shape.kv_heads, M, shape.head_dim)
        q_MHd = queries(qkv_MO, weights, rotation, keys, values, torch.arange(M, device=qkv_MO.device))
        parts = (q_MHd.split(self.lengths), keys.split(self.lengths, dim=1), values.split(self.lengths, dim=1))
        out = [causal_attention(q, k, v, shape.scale, weights.window) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(out).flatten(1)
