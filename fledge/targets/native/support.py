"""Which transformers models the native forward pass computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# transformers' classes whose decoder layers are Llama's: RMSNorm, rotary grouped-query attention, gated SiLU MLP. They
# may have biases, norms of queries and keys (Qwen3), fused projections (Phi-3) and sliding windows.
CLASSES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip
ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}
LAYER = {
    "self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "resid_attn_dropout", "resid_mlp_dropout",
}  # fmt: skip


def native_problem(model: nn.Module, config: Any) -> str:
    """The reason why the native forward pass cannot compute a transformers model; empty if it can. `config` is the
    model's text config."""
    kind = type(model)
    if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers.models."):
        known = ", ".join(name.removesuffix("ForCausalLM") for name in CLASSES)
        return f"{kind.__name__} is not one of the supported architectures ({known})"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and the native MLP computes silu"
    parameters = list(model.parameters())
    if len({p.device for p in parameters}) > 1:
        return "its weights are on several devices"
    if len({p.dtype for p in parameters}) > 1 or not parameters[0].dtype.is_floating_point:
        return "its weights have several dtypes, or are quantized"
    for layer in model.model.layers:
        for module, names in ((layer, LAYER), (layer.self_attn, ATTENTION), (layer.mlp, MLP)):
            if unknown := {name for name, _ in module.named_children()} - names:
                return f"its layers have a module that is not known, {unknown.pop()}"
        linear = [m for m in layer.modules() if hasattr(m, "weight") and m.weight.dim() > 1]
        if any(type(m) is not nn.Linear or m._forward_pre_hooks or m._forward_hooks for m in linear):
            return "its linear layers were replaced or have hooks (quantization or an adapter)"
    if getattr(model.model.rotary_emb, "inv_freq", torch.empty(0)).dim() != 1:
        return "its rotary embedding differs between layers"
    return ""
