"""The weights of a transformers model for the native forward pass: q, k, v and gate, up as one matrix each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer. `qkv` is [(H + 2 G) d, D], `gate_up` [2 F, D]. Biases are None where the model
    has none. `q_norm` and `k_norm` [d] are Qwen3's. `window` is the layer's sliding window in tokens; None without."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


@torch.no_grad()
def layer_weights(layer: nn.Module, window: int | None) -> LayerWeights:
    """The weights of a transformers decoder layer.

    Projections are joined into one matrix, and the model's parameters become views of it, so that there is one copy
    and the model still computes.
    """
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fused(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    gate_up, gate_up_bias = _fused(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        window=window,
    )


def layer_windows(layers: Sequence[nn.Module], config: Any) -> list[int | None]:
    """The sliding window of each decoder layer. Qwen's attention modules have their own; Mistral and Phi-3 use the
    config's in all layers; Llama has none, whatever its config says."""
    everywhere = config.sliding_window if config.model_type in ("mistral", "phi3") else None
    return [getattr(layer.self_attn, "sliding_window", everywhere) for layer in layers]


def _fused(module: nn.Module, fused: str, parts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a fused projection, made of its parts if the model has them apart."""
    if hasattr(module, fused):
        return getattr(module, fused).weight, getattr(module, fused).bias
    projections = [getattr(module, name) for name in parts]
    joined = [_joined([p.weight for p in projections]), None]
    if projections[0].bias is not None:
        joined[1] = _joined([p.bias for p in projections])
    return tuple(joined)


def _joined(parts: Sequence[nn.Parameter]) -> Tensor:
    """The concatenation of parameters along the first axis, of which they become views; the one that they are views of
    if there is one already."""
    first, end = parts[0], parts[0].storage_offset()
    for p in parts:
        same = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and p.is_contiguous()
        if not same or p.storage_offset() != end:
            break
        end += p.numel()
    else:
        rows = sum(p.shape[0] for p in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([p.detach() for p in parts])
    for p, view in zip(parts, whole.split([p.shape[0] for p in parts]), strict=True):
        p.data = view
    return whole
