"""A decoder layer in decoding, of targets and drafts alike: fused operations for few rows, without gradients.

A layer is a projection to queries, keys and values (`norm_linear`, or `plain_linear` of an input that has its norms),
the attention (`CacheRows` of `drafts/kv_cache.py`), and `layer_output`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fledge.ops.experts import experts, route
from fledge.ops.products import linear_add, linear_add_norm, norm_linear, norm_swiglu, plain_linear

Rotation = tuple[Tensor, Tensor]  # cos and sin, each [n, rotated]; entry i is for M / n consecutive rows of M


@dataclass(frozen=True)
class LayerShape:
    """H query heads and G key-value heads of d dimensions, the factor of attention scores, and the epsilon of norms."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of X experts; each row goes through `chosen` experts (see `ops.experts`). `router` is [X, E],
    `gate_up` [X, 2 F, E], `down` [X, E, F]. `shared_gate` [1, E] is the gate of the shared expert; None without."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate: Tensor | None
    chosen: int
    normalized: bool


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer. `qkv` is [(H + 2 G) d, I], `gate_up` [2 F, E]. Biases are None where the model
    has no bias, and `input_norm` is None where the input has no norm. `q_norm` and `k_norm` [d] are Qwen3's. `window`
    is the layer's sliding window in tokens; None without. In a layer with `experts`, `gate_up` and `down` belong to the
    expert that all rows share (Qwen2-MoE); None without."""

    shape: LayerShape
    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor | None
    gate_up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    window: int | None
    experts: ExpertWeights | None = None

    def matrices(self) -> list[Tensor]:
        """The weights of the layer's products, without the weights of experts."""
        return [m for m in (self.qkv, self.out, self.gate_up, self.down) if m is not None]

    def with_matrices(self, matrices: Iterator[Tensor]) -> LayerWeights:
        """The same weights, with the next items of the iterator in place of `self.matrices()`."""
        names = ("qkv", "out", "gate_up", "down")
        return replace(self, **{name: next(matrices) for name in names if getattr(self, name) is not None})

    def without_queries(self) -> LayerWeights:
        """The same weights, with a projection to keys and values only."""
        queries = self.shape.heads * self.shape.head_dim
        bias = None if self.qkv_bias is None else self.qkv_bias[queries:]
        return replace(self, shape=replace(self.shape, heads=0), qkv=self.qkv[queries:], qkv_bias=bias)


def layer_weights(layer: nn.Module, shape: LayerShape, window: int | None = None) -> LayerWeights:
    """The weights of a decoder layer, of a draft or of transformers, whose modules have Llama's names.

    Projections that read the same input are joined into one matrix. The layer's parameters become views of the joined
    matrix, which avoids a second copy: the layer can still be run and trained, and the matrix follows the parameters.
    """
    attention, mlp = layer.self_attn, layer.mlp
    experts = _expert_weights(mlp) if hasattr(mlp, "experts") else None
    if experts is not None:
        mlp = mlp.shared_expert if hasattr(mlp, "shared_expert") else None
    gate_up, gate_up_bias = None, None
    with torch.inference_mode(False), torch.no_grad():  # parameters must not become inference tensors
        qkv, qkv_bias = _fused(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        if mlp is not None:
            gate_up, gate_up_bias = _fused(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    return LayerWeights(
        shape=shape,
        input_norm=layer.input_layernorm.weight if hasattr(layer, "input_layernorm") else None,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=None if mlp is None else mlp.down_proj.weight,
        down_bias=None if mlp is None else mlp.down_proj.bias,
        window=window,
        experts=experts,
    )


def _expert_weights(mlp: nn.Module) -> ExpertWeights:
    """The weights of transformers' Mixtral, Qwen2-MoE or Qwen3-MoE block, whose experts are joined already."""
    return ExpertWeights(
        router=mlp.gate.weight,
        gate_up=mlp.experts.gate_up_proj,
        down=mlp.experts.down_proj,
        shared_gate=mlp.shared_expert_gate.weight if hasattr(mlp, "shared_expert_gate") else None,
        chosen=mlp.gate.top_k,
        normalized=mlp.gate.norm_topk_prob if hasattr(mlp.gate, "norm_topk_prob") else True,  # Mixtral's always
    )


def _fused(module: nn.Module, fused: str, parts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a fused projection, joined from `parts` if the model has separate projections."""
    if hasattr(module, fused):
        return getattr(module, fused).weight, getattr(module, fused).bias
    projections = [getattr(module, name) for name in parts]
    return _joined(projections, "weight"), None if projections[0].bias is None else _joined(projections, "bias")


def _joined(modules: Sequence[nn.Module], name: str) -> Tensor:
    """The modules' parameters called `name`, fused along the first axis. The parameters become views of the fused
    tensor. If the parameters are already views of a fused tensor, returns that tensor."""
    parts: list[nn.Parameter] = [getattr(module, name) for module in modules]
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
    for module, p, view in zip(modules, parts, whole.split([p.shape[0] for p in parts]), strict=True):
        if p.is_inference():  # torch cannot make views of an inference parameter after its data were set
            setattr(module, name, nn.Parameter(view, requires_grad=p.requires_grad))
        else:
            p.data = view
    return whole


def layer_output(
    attended_MO: Tensor, residual_ME: Tensor, weights: LayerWeights, next_norm_E: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The layer's output [M, E]: the output projection of the heads [M, H d] and the MLP, each with a residual. Also
    returns the norm of the output with the gain `next_norm_E`, for the next layer's product, where computing the norm
    here is faster (`linear_add_norm`); else None."""
    w, eps = weights, weights.shape.eps
    if w.experts is not None:
        return _expert_output(linear_add(attended_MO, w.out, residual_ME, w.out_bias), w, w.experts), None
    x_ME, normed_ME = linear_add_norm(attended_MO, w.out, residual_ME, w.post_norm, eps, w.out_bias)
    activated = norm_swiglu(x_ME, w.post_norm, eps, w.gate_up, w.gate_up_bias, normed_ME=normed_ME)
    if next_norm_E is None:
        return linear_add(activated, w.down, x_ME, w.down_bias), None
    return linear_add_norm(activated, w.down, x_ME, next_norm_E, eps, w.down_bias)


def _expert_output(x_ME: Tensor, w: LayerWeights, e: ExpertWeights) -> Tensor:
    """The rows x plus the outputs of their experts, plus the shared expert's output times the sigmoid of its gate."""
    norm, residual_ME = (x_ME, w.post_norm, w.shape.eps), x_ME
    if e.shared_gate is not None:
        shared_ME = plain_linear(norm_swiglu(*norm, w.gate_up), w.down)
        residual_ME = torch.addcmul(x_ME, norm_linear(*norm, e.shared_gate).sigmoid(), shared_ME)
    routing = route(norm_linear(*norm, e.router), e.chosen, e.normalized)
    return experts(*norm, routing, e.gate_up, e.down, residual_ME)
