"""The forward pass of a Llama-like decoder over the rows of one or several sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fledge.drafts.compiled_layers import CompiledLayers, layers_of
from fledge.drafts.decode_layer import CachedRows, LayerShape, LayerWeights, Rotation, layer_output, layer_weights
from fledge.ops.decode_layer import add_rms_norm
from fledge.ops.few_rows import norm_linear
from fledge.ops.implementations import current_device
from fledge.ops.rope import cos_sin
from fledge.types import Features


class RowAttention(Protocol):
    """The attention of the rows of a pass: `PackedRows`, or `CachedRows` of `drafts/decode_layer.py`."""

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        """The heads' outputs [M, H d] from the fused projections of M rows, [M, (H + 2 G) d], before RoPE and before
        the norms of queries and keys."""
        ...


class NativeDecoder:
    """The decoder of a transformers model that `native_problem` accepts, with the model's own weights."""

    def __init__(self, model: nn.Module, config):
        decoder = model.model
        attention = decoder.layers[0].self_attn
        shape = LayerShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            eps=float(config.rms_norm_eps),
        )
        windows = _windows(decoder.layers, config)
        self.shape = shape
        self.layers = [layer_weights(layer, shape, at) for layer, at in zip(decoder.layers, windows, strict=True)]
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.norm: Tensor = decoder.norm.weight
        self.compiled: CompiledLayers | None = None  # of the same weights, for few rows on a CPU
        self.frequencies: Tensor = decoder.rotary_emb.inv_freq.float()
        self.rope_scale: float = decoder.rotary_emb.attention_scaling

    def matrices(self) -> list[Tensor]:
        """The weights of the layers' products, but those of experts."""
        return [m for w in self.layers for m in w.matrices()]

    def with_matrices(self, matrices: Iterator[Tensor]) -> NativeDecoder:
        """The same with other weights instead of `matrices`, for decoding on a CPU."""
        other = copy.copy(self)
        other.layers = [w.with_matrices(matrices) for w in self.layers]
        other.compiled = layers_of(other.layers, self.shape, self.norm)
        return other

    def rotation(self, position_M: Tensor) -> Rotation:
        """cos and sin at the positions, each [M, rotated], computed in float32 as transformers does."""
        return cos_sin(position_M, self.frequencies, self.rope_scale, self.embedding.dtype)

    def __call__(
        self, token_M: Tensor, position_M: Tensor, attend: RowAttention, layers: Sequence[int] = (),
        last: CachedRows | None = None,
    ) -> Features:  # fmt: skip
        """The features of M rows: token ids and positions, int64 [M]. `layers` are as in `TrainingTarget.features`.

        With `last`, the attention of the last layer, the last layer's output and the final states are those of its Q
        queries only, [Q, D].
        """
        with current_device(self.embedding.device):
            return self._features(token_M, position_M, attend, layers, last)

    def _features(
        self, token_M: Tensor, position_M: Tensor, attend: RowAttention, layers: Sequence[int],
        last: CachedRows | None,
    ) -> Features:  # fmt: skip
        rotation, aux = self.rotation(position_M), []
        x_MD, normed_MD = nn.functional.embedding(token_M, self.embedding), None
        if self.compiled and isinstance(attend, CachedRows) and self.compiled.takes(attend.rows, token_M.numel()):
            asked_Q = None if last is None else last.asked_Q
            _, final_QD, aux_MAD = self.compiled(x_MD, rotation, attend.rows, asked_Q=asked_Q, aux_layers=layers)
            return Features(aux_MAD, final_QD)
        next_norms = [*(w.input_norm for w in self.layers[1:]), self.norm]  # of what reads each layer's output
        for i, (w, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            if i in layers:
                aux.append(x_MD)
            qkv_MO = norm_linear(x_MD, w.input_norm, w.shape.eps, w.qkv, w.qkv_bias, normed_ME=normed_MD)
            if last is not None and i == len(self.layers) - 1:
                attend, x_MD = last, last.asked(x_MD)
            x_MD, normed_MD = layer_output(attend(i, qkv_MO, w, rotation), x_MD, w, next_norm)
        if len(self.layers) in layers:
            aux.append(x_MD)
        if normed_MD is None:
            normed_MD, _ = add_rms_norm(x_MD, None, self.norm, self.shape.eps)
        none = x_MD.new_empty(token_M.numel(), 0, x_MD.shape[1])
        return Features(torch.stack(aux, dim=1) if aux else none, normed_MD)


def _windows(layers: Sequence[nn.Module], config: Any) -> list[int | None]:
    """The sliding window of each decoder layer. Qwen's attention modules have their own; Mistral, Mixtral and Phi-3 use
    the config's in all layers; Llama has none, whatever its config says."""
    everywhere = config.sliding_window if config.model_type in ("mistral", "mixtral", "phi3") else None
    return [getattr(layer.self_attn, "sliding_window", everywhere) for layer in layers]
