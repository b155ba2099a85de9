"""The structure of a transformers model. Finds its decoder, decoder layers, final norm, the last layer's weights, and
the argument of its forward pass that takes a cache. Replaces what does not suit: longrope's choice of factors, and the
products of linear layers on a CPU, where a decoding round has few rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.config import RopeConfig
from fledge.ops.linear import linear
from fledge.targets.quantized import weight_of

# names of the argument, the newest first: transformers 5.24 gives a FutureWarning for past_key_values and cache_params,
# which end with 5.40; earlier versions, and code that comes with a model, do not have `cache`; `state` is RWKV's
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Substitute weights of layers inside `computing_with`. Not an attribute of the layers: outside, the caller's model
# should compute with the model's own weights, and be copied and pickled as before.
_INSTEAD: dict[nn.Linear, Tensor] = {}


def find_decoder(model: nn.Module, n: int) -> nn.Module:
    """The first module that has n layers and a final norm as children and reads tokens, starting with
    `model.get_decoder()`; the latter if there is none. (get_decoder() returns the whole model for Llama 4, and the head
    for ModernBERT.)"""
    parts = (model.get_decoder(), *model.modules())
    found = next((m for m in parts if all(_candidates(m, n)) and _reads_tokens(m)), None)
    return model.get_decoder() if found is None else found


def _reads_tokens(module: nn.Module) -> bool:
    """Whether a module can be called with tokens and positions; CPM-Ant's encoder reads their embeddings."""
    try:
        inspect.signature(module.forward).bind(input_ids=None, position_ids=None, use_cache=False)
    except TypeError:
        return False
    return True


def cache_argument(model: nn.Module, decoder: nn.Module) -> str:
    """The name of the argument with which the model's forward pass takes a cache. A forward with `**kwargs` alone, as
    of a wrapper, passes the cache on to the decoder's forward."""
    for module in (model, decoder):
        parameters = inspect.signature(module.forward).parameters  # of the function below decorators
        for name in CACHE_ARGUMENTS:
            if name in parameters:
                return name
    return "past_key_values"


def layers_and_norm(decoder: nn.Module, n: int) -> tuple[nn.ModuleList, nn.Module]:
    """A decoder's n layers and final norm. Raises ValueError if layers and norm cannot be identified."""
    layers, norms = _candidates(decoder, n)
    if len(layers) != 1 or not norms:
        raise ValueError(
            f"{type(decoder).__name__} does not have its {n} decoder layers and final norm where transformers' causal "
            "language models have them, so its hidden states cannot be captured; it can decode, but no draft can be "
            "trained for it"
        )
    return layers[0], norms[-1]


def _candidates(module: nn.Module, n: int) -> tuple[list[nn.ModuleList], list[nn.Module]]:
    """A module's child lists of n layers, and its children whose names are those of a final norm."""
    children = dict(module.named_children())
    layers = [m for m in children.values() if isinstance(m, nn.ModuleList) and len(m) == n]
    if isinstance(norm := children.get("norm"), nn.Module):  # Gemma 3n and 4 have a norm of per-layer inputs after it
        return layers, [norm]
    return layers, [m for name, m in children.items() if _names_final_norm(name)]


def _names_final_norm(child: str) -> bool:
    """Whether a child module's name is that of a final norm ("embedding_norm" in LFM2), not that of a norm after the
    embeddings (Bloom, Bart)."""
    return child == "embedding_norm" or (("norm" in child or child.startswith("ln_")) and "embed" not in child)


def fix_longrope(decoder: nn.Module, rope: RopeConfig) -> None:
    """Makes transformers' longrope use the configured list of factors at every length.

    transformers chooses the list by the length of each call, so the features of a prefix would depend on the length of
    the text after it.
    """
    if rope.rope_type != "longrope":
        return
    rotary = decoder.rotary_emb
    dim = rotary.inv_freq.numel() * 2
    factors = torch.tensor(rope.long_factor if rope.long else rope.short_factor, device=rotary.inv_freq.device)
    base = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=factors.device) / dim)
    rotary.inv_freq.copy_(1.0 / (factors * base))
    rotary.rope_type = "fixed"  # a name that transformers' dynamic_rope_update ignores


@torch.no_grad()
def last_layer_weights(last: nn.Module, norm: nn.Module, eps: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """`Target.last_layer_weights` of the last decoder layer and the final norm. `eps` is the norms' eps, and `dtype`
    the dtype for quantized weights."""
    found: dict[str, Tensor | None] = {"norm": _gains(norm, eps)}
    attention, mlp = getattr(last, "self_attn", None), getattr(last, "mlp", None)
    if attention is not None and mlp is not None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[name] = _gains(getattr(last, name, None), eps)
        weights = (
            *_qkv(attention, dtype), _weight(attention, "o_proj", dtype), *_gate_up(mlp, dtype),
            _weight(mlp, "down_proj", dtype),
        )  # fmt: skip
        found |= dict(zip(PROJECTIONS, weights, strict=True))
    return {f"{name}.weight": weight for name, weight in found.items() if weight is not None}


def _weight(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor | None:
    """The weight of a module's child; None without a child or weight, or if the weight was not loaded."""
    part = getattr(module, name, None)
    weight = None if part is None else weight_of(part, dtype)
    return None if weight is None or weight.is_meta else weight


def _qkv(attention: nn.Module, dtype: torch.dtype) -> list[Tensor | None]:
    """The weights of the q, k and v projections. Phi-3 joins q, k and v in one matrix. MiniMax's linear attention does
    so too, but has no key-value heads: the weights of linear attention are left out."""
    fused, heads = _weight(attention, "qkv_proj", dtype), getattr(attention, "num_key_value_heads", None)
    if fused is None or heads is None:
        return [_weight(attention, n, dtype) for n in ("q_proj", "k_proj", "v_proj")]
    kv = heads * attention.head_dim
    return list(fused.split([fused.shape[0] - 2 * kv, kv, kv]))


def _gate_up(mlp: nn.Module, dtype: torch.dtype) -> list[Tensor | None]:
    """The weights of the gate and up projections. Phi-3 joins gate and up in one matrix."""
    fused = _weight(mlp, "gate_up_proj", dtype)
    return [_weight(mlp, n, dtype) for n in ("gate_proj", "up_proj")] if fused is None else list(fused.chunk(2))


def _gains(norm: nn.Module | None, eps: float) -> Tensor | None:
    """A norm's weight, if the norm computes x / rms(x) * weight; else None (Gemma's RMSNorm adds 1 to the weight)."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.is_meta:
        return None
    x = torch.linspace(-1, 2, weight.numel(), device=weight.device, dtype=weight.dtype)[None]
    same = torch.allclose(norm(x), F.rms_norm(x, weight.shape, weight, eps), rtol=2e-2, atol=2e-2)
    return weight if same else None


def use_few_row_products(model: nn.Module) -> list[nn.Linear]:
    """Replaces the forward of every `nn.Linear` of a model by `fledge.ops.linear.linear`. Leaves subclasses and
    modules with another forward as they are. Returns the layers that compute by `fledge.ops.linear.linear`, replaced
    now or before."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            # a bound method, because torch.compile traces it once for all layers
            module.forward = MethodType(forward, module)
    replaced = (m for m in model.modules() if isinstance(m, nn.Linear) and "forward" in vars(m))
    return [m for m in replaced if getattr(vars(m)["forward"], "__func__", None) is forward]


def forward(self: nn.Linear, x: Tensor) -> Tensor:  # the name `forward` lets pickle find the function in a layer
    weight = _INSTEAD.get(self)
    return linear(x, self.weight if weight is None else weight, self.bias)


@contextmanager
def computing_with(weights: Mapping[nn.Linear, Tensor]) -> Iterator[None]:
    """Context manager: within the block, the given layers of `use_few_row_products` compute with the given weights."""
    _INSTEAD.update(weights)
    try:
        yield
    finally:
        for layer in weights:
            _INSTEAD.pop(layer, None)
