"""Which transformers models the native forward pass computes."""

from __future__ import annotations

from typing import Any

from torch import nn

from fledge.targets.linear import forward as few_row_forward
from fledge.targets.quantized import quantization_of

# transformers' classes whose decoder layers are Llama's: RMSNorm, rotary grouped-query attention, gated SiLU MLP. They
# may have biases, norms of queries and keys (Qwen3), fused projections (Phi-3), sliding windows, and mixtures of such
# MLPs in all or some layers, with or without a shared one.
CLASSES = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip
PARTS = (nn.Linear, nn.Embedding, nn.Dropout, nn.ModuleList)  # exactly these: a subclass may compute something else
ACTIVATION = "transformers.activations"
# transformers adds hooks to a model's layers when hidden states are asked for; they change nothing
HARMLESS_HOOKS = "transformers.utils.output_capturing"


def native_problem(model: nn.Module, config: Any) -> str:
    """The reason why the native forward pass cannot compute a transformers model; empty if it can. `config` is the
    model's text config."""
    kind = type(model)
    if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers.models."):
        known = ", ".join(name.removesuffix("ForCausalLM") for name in CLASSES)
        return f"{kind.__name__} is not one of the supported architectures ({known})"
    if quantization := quantization_of(model.config):
        return f"its weights are quantized by {quantization}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and the native MLP computes silu"
    parameters = list(model.parameters())
    if len({p.device for p in parameters}) > 1:
        return "its weights are on several devices"
    for name, module in model.named_modules():
        if problem := _problem_of(module, kind.__module__):
            return f"{name or 'the model'} {problem}"
    if parameters[0].device.type == "meta":
        return "its weights are on the meta device, which holds no values"
    if len({p.dtype for p in parameters}) > 1 or not parameters[0].dtype.is_floating_point:
        return "its weights have several dtypes, or are quantized"
    if model.model.rotary_emb.inv_freq.dim() != 1:
        return "its rotary embedding differs between layers"
    return ""


def _problem_of(module: nn.Module, source: str) -> str:
    """Why a module may compute something else than its class in the Python module `source`; empty if it does not."""
    kind = type(module)
    if kind not in PARTS and kind.__module__ not in (source, ACTIVATION):
        return f"was replaced by a {kind.__name__} (quantization, an adapter or other code)"
    if "forward" in vars(module) and getattr(module.forward, "__func__", None) is not few_row_forward:
        return "has a forward method of its own (an adapter, offloading or other code)"
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if any(getattr(hook, "__module__", None) != HARMLESS_HOOKS for hook in hooks):
        return "has forward hooks (an adapter, offloading or other code)"
    return ""
