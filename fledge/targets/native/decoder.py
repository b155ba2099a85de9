"""The forward pass of a dense Llama-like decoder over the rows of one or several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fledge.kernels.decode_layer import add_rms_norm, rope_to_cache
from fledge.kernels.few_rows import linear_add, norm_linear, norm_swiglu
from fledge.kernels.implementations import current_device
from fledge.targets.native.weights import LayerWeights, layer_weights, layer_windows
from fledge.types import Features


class RowAttention(Protocol):
    """The attention of the rows of a pass, see `attention.py`."""

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The heads' outputs [M, H d] from the fused projections of M rows, [M, (H + 2 G) d], before RoPE and before
        the norms of queries and keys. `rotation` is (cos, sin), each [M, rotated]."""
        ...


class NativeDecoder:
    """The decoder of a transformers model that `native_problem` accepts, with the model's own weights."""

    def __init__(self, model: nn.Module, config):
        decoder = model.model
        windows = layer_windows(decoder.layers, config)
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.layers = [layer_weights(layer, window) for layer, window in zip(decoder.layers, windows, strict=True)]
        self.norm: Tensor = decoder.norm.weight
        self.eps = float(config.rms_norm_eps)
        attention = decoder.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.scale: float = attention.scaling
        self.frequencies: Tensor = decoder.rotary_emb.inv_freq.float()
        self.rope_scale: float = decoder.rotary_emb.attention_scaling

    def rotation(self, position_M: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at the positions, each [M, rotated], computed in float32 as transformers does."""
        angle = position_M[:, None].float() * self.frequencies
        angle = torch.cat((angle, angle), dim=-1)
        dtype = self.embedding.dtype
        return (angle.cos() * self.rope_scale).to(dtype), (angle.sin() * self.rope_scale).to(dtype)

    def queries(
        self, qkv_MO: Tensor, weights: LayerWeights, rotation: tuple[Tensor, Tensor], keys_GPd: Tensor,
        values_GPd: Tensor, slot_M: Tensor,
    ) -> Tensor:  # fmt: skip
        """The queries [M, H, d] of fused projections, after RoPE. Writes keys and values to the slots `slot_M`."""
        return rope_to_cache(
            qkv_MO, *rotation, self.heads, self.kv_heads, self.head_dim, keys_GPd, values_GPd, slot_M, weights.q_norm,
            weights.k_norm, self.eps,
        )  # fmt: skip

    def __call__(
        self, token_M: Tensor, position_M: Tensor, attend: RowAttention, layers: Sequence[int] = (),
        last_rows: Tensor | None = None,
    ) -> Features:  # fmt: skip
        """The features of M rows: token ids and positions, int64 [M]. `layers` are as in `TrainingTarget.features`.

        With `last_rows` (int64 [S]), the final states are those of these rows only, [S, D].
        """
        with current_device(self.embedding.device):
            return self._features(token_M, position_M, attend, layers, last_rows)

    def _features(
        self, token_M: Tensor, position_M: Tensor, attend: RowAttention, layers: Sequence[int],
        last_rows: Tensor | None,
    ) -> Features:  # fmt: skip
        rotation, aux = self.rotation(position_M), []
        x_MD = nn.functional.embedding(token_M, self.embedding)
        for i, w in enumerate(self.layers):
            if i in layers:
                aux.append(x_MD)
            attended = attend(i, norm_linear(x_MD, w.input_norm, self.eps, w.qkv, w.qkv_bias), w, rotation)
            x_MD = linear_add(attended, w.out, x_MD, w.out_bias)
            activated = norm_swiglu(x_MD, w.post_norm, self.eps, w.gate_up, w.gate_up_bias)
            x_MD = linear_add(activated, w.down, x_MD, w.down_bias)
        if len(self.layers) in layers:
            aux.append(x_MD)
        last, _ = add_rms_norm(x_MD if last_rows is None else x_MD[last_rows], None, self.norm, self.eps)
        none = x_MD.new_empty(token_M.numel(), 0, x_MD.shape[1])
        return Features(torch.stack(aux, dim=1) if aux else none, last)
