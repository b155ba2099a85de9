"""The parts of a transformers model: its decoder, decoder layers and final norm, and the weights of its last layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.config import RopeConfig

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def find_decoder(model: nn.Module, n: int) -> nn.Module:
    """What transformers calls the decoder, or where that does not show n layers and a final norm, the first module that
    does (Llama 4's decoder is the whole model, ModernBERT's its head)."""
    shown = next((m for m in (model.get_decoder(), *model.modules()) if all(_candidates(m, n))), None)
    return model.get_decoder() if shown is None else shown


def layers_and_norm(decoder: nn.Module, n: int) -> tuple[nn.ModuleList, nn.Module]:
    """A decoder's n layers and its final norm. Raises ValueError where the decoder does not show them."""
    layers, norms = _candidates(decoder, n)
    if len(layers) != 1 or not norms:
        raise ValueError(
            f"{type(decoder).__name__} does not show its {n} decoder layers and final norm as transformers' causal "
            "language models do, so its hidden states cannot be read; it decodes, but no draft can be trained for it"
        )
    return layers[0], norms[-1]


def _candidates(module: nn.Module, n: int) -> tuple[list[nn.ModuleList], list[nn.Module]]:
    """A module's lists of n layers, and its children named like a final norm; each may be empty."""
    children = dict(module.named_children())
    layers = [m for m in children.values() if isinstance(m, nn.ModuleList) and len(m) == n]
    return layers, [m for name, m in children.items() if _names_final_norm(name)]


def _names_final_norm(child: str) -> bool:
    """Whether a decoder's child of this name is its final norm (LFM2's is "embedding_norm") and not a norm of the
    embeddings (Bloom's, Bart's)."""
    return child == "embedding_norm" or (("norm" in child or child.startswith("ln_")) and "embed" not in child)


def fix_longrope(decoder: nn.Module, rope: RopeConfig) -> None:
    """Makes transformers' rotary embedding use the chosen list of factors at every length. It would otherwise choose by
    the length of each call, so that features of a prefix changed with what follows."""
    if rope.rope_type != "longrope":
        return
    rotary = decoder.rotary_emb
    dim = rotary.inv_freq.numel() * 2
    factors = torch.tensor(rope.long_factor if rope.long else rope.short_factor, device=rotary.inv_freq.device)
    base = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=factors.device) / dim)
    rotary.inv_freq.copy_(1.0 / (factors * base))
    rotary.rope_type = "fixed"  # any name that dynamic_rope_update does not act on


@torch.no_grad()
def last_layer_weights(last: nn.Module, norm: nn.Module, eps: float) -> dict[str, Tensor]:
    """What `Target.last_layer_weights` returns, of the last decoder layer and the final norm. `eps` is the norms'."""
    found: dict[str, Tensor | None] = {"norm": _gains(norm, eps)}
    attention, mlp = getattr(last, "self_attn", None), getattr(last, "mlp", None)
    if attention is not None and mlp is not None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[name] = _gains(getattr(last, name, None), eps)
        weights = (*_qkv(attention), _weight(attention, "o_proj"), *_gate_up(mlp), _weight(mlp, "down_proj"))
        found |= dict(zip(PROJECTIONS, weights, strict=True))
    return {f"{name}.weight": weight for name, weight in found.items() if weight is not None}


def _weight(module: nn.Module, name: str) -> Tensor | None:
    return getattr(getattr(module, name, None), "weight", None)


def _qkv(attention: nn.Module) -> list[Tensor | None]:
    """The weights of the q, k and v projections, which Phi-3 keeps in one matrix."""
    fused = _weight(attention, "qkv_proj")
    if fused is None:
        return [_weight(attention, n) for n in ("q_proj", "k_proj", "v_proj")]
    kv = attention.num_key_value_heads * attention.head_dim
    return list(fused.split([fused.shape[0] - 2 * kv, kv, kv]))


def _gate_up(mlp: nn.Module) -> list[Tensor | None]:
    """The weights of the gate and up projections, which Phi-3 keeps in one matrix."""
    fused = _weight(mlp, "gate_up_proj")
    return [_weight(mlp, n) for n in ("gate_proj", "up_proj")] if fused is None else list(fused.chunk(2))


def _gains(norm: nn.Module | None, eps: float) -> Tensor | None:
    """A norm's weight where the norm computes RMSNorm with it; None otherwise (Gemma's adds one to its weight)."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    x = torch.linspace(-1, 2, weight.numel(), device=weight.device, dtype=weight.dtype)[None]
    same = torch.allclose(norm(x), F.rms_norm(x, weight.shape, weight, eps), rtol=2e-2, atol=2e-2)
    return weight if same else None
