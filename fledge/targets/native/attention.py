"""Attention of the native forward pass: to a cache, and within packed documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.attention import causal_attention
from fledge.models.kv_cache import CacheRows
from fledge.targets.native.decoder import NativeDecoder
from fledge.targets.native.weights import LayerWeights


class CachedRows:
    """The attention of rows that are added to a cache."""

    def __init__(self, decoder: NativeDecoder, rows: CacheRows):
        self.decoder, self.rows = decoder, rows

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = self.rows.cache.pool.layers[layer]
        q_MHd = self.decoder.queries(qkv_MO, weights, rotation, keys, values, self.rows.slot_M)
        return self.rows.read(layer, q_MHd, scale=self.decoder.scale, window=weights.window).flatten(1)


class PackedRows:
    """The attention of a packed row without a cache. `documents` are the [start, end) token ranges that cover it."""

    def __init__(self, decoder: NativeDecoder, documents: Sequence[tuple[int, int]]):
        self.decoder, self.lengths = decoder, [end - start for start, end in documents]

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: tuple[Tensor, Tensor]) -> Tensor:
        d, M = self.decoder, qkv_MO.shape[0]
        keys, values = qkv_MO.new_empty(2, d.kv_heads, M, d.head_dim)
        q_MHd = d.queries(qkv_MO, weights, rotation, keys, values, torch.arange(M, device=qkv_MO.device))
        parts = (q_MHd.split(self.lengths), keys.split(self.lengths, dim=1), values.split(self.lengths, dim=1))
        out = [causal_attention(q, k, v, d.scale, weights.window) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(out).flatten(1)
