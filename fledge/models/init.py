"""Where a new draft's weights start from: the target's last layer, final norm and head, and a look at its own token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.models.draft import Draft
from fledge.models.layers import Attention, RMSNorm
from fledge.models.target import Target

# a slot's score for its own token, at first, where it looks for it (with q and k norms, the root of the head's width);
# for others it is about zero
OWN_TOKEN = 4.0


@torch.no_grad()
def start_from_target(draft: Draft, target: Target) -> None:
    """Starts a draft as close to its target as their shapes allow, so that it has less to learn. (EAGLE-1's begins by
    passing on the state it reads: that is normed, which the target's layers' inputs are not.)

    The head takes the target's rows and the final norm its gains. `fc` passes the last captured layer through, so
    that the draft's residual stream is the target's own; on it work the target's last layer's attention (on the
    hidden half of the input) and MLP. Whatever has another shape, or is not a projection as Llama's are, stays
    normal(0, 0.02). Of several key heads one looks for the slot's own token instead.
    """
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)
    if draft.family.one_pass:
        draft.mask_hidden.normal_()
    E, layer = draft.config.hidden_size, draft.midlayer
    if draft.family.fuses_embedding:
        draft.fc.weight[:, E:] += torch.eye(E)
        if draft.fc.bias is not None:
            draft.fc.bias.zero_()
        return
    if draft.config.target_hidden_size == E:
        _take_from(target, draft)
    if layer.self_attn.kv_heads > 1:
        _look_for_own_token(layer.self_attn, E)


def _take_from(target: Target, draft: Draft) -> None:
    E, layer = draft.config.hidden_size, draft.midlayer
    draft.lm_head.weight.copy_(target.head.weight[draft.target_ids().to(target.device)])
    draft.fc.weight[:, -E:] += torch.eye(E)
    _copy_norm(draft.norm, target.norm)
    if draft.embed_tokens is not None:
        draft.embed_tokens.weight.copy_(target.embedding)
    last = target.layers[-1]
    attention, mlp = getattr(last, "self_attn", None), getattr(last, "mlp", None)
    if attention is None or mlp is None:
        return
    _copy_norm(layer.hidden_norm, getattr(last, "input_layernorm", None))
    _copy_norm(layer.post_attention_layernorm, getattr(last, "post_attention_layernorm", None))
    ours = layer.self_attn
    for projection, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), _qkv(attention), strict=True):
        _copy(projection.weight[:, E:], weight)
    _copy(ours.o_proj.weight, _weight(attention, "o_proj"))
    for projection, weight in zip((layer.mlp.gate_proj, layer.mlp.up_proj), _gate_up(mlp), strict=True):
        _copy(projection.weight, weight)
    _copy(layer.mlp.down_proj.weight, _weight(mlp, "down_proj"))


def _look_for_own_token(attention: Attention, width: int) -> None:
    """Makes the first key head, and the query heads that it serves, seek the token that the slot reads and pass its
    embedding on. What follows upon that token is the first thing to learn, and through weights near zero the token
    would hardly reach the residual stream, which begins as the target's state before it."""
    d = attention.head_dim
    heads = attention.heads // attention.kv_heads
    seek, found = (nn.init.orthogonal_(torch.empty(d, width)) for _ in range(2))
    seek *= (OWN_TOKEN / d**0.5) ** 0.5  # of a normed embedding d numbers of about 1, twice, over the root of d
    rows_of = (attention.q_proj, seek.repeat(heads, 1)), (attention.k_proj, seek), (attention.v_proj, found)
    for projection, rows in rows_of:
        projection.weight[: len(rows)] = F.pad(rows, (0, projection.in_features - width))
    attention.o_proj.weight[:, : heads * d].normal_(0, 0.02)


def _weight(module: nn.Module, name: str) -> Tensor | None:
    return getattr(getattr(module, name, None), "weight", None)


def _qkv(attention: nn.Module) -> list[Tensor | None]:
    """q, k and v projections, which Phi-3 keeps in one matrix."""
    fused = _weight(attention, "qkv_proj")
    if fused is None:
        return [_weight(attention, n) for n in ("q_proj", "k_proj", "v_proj")]
    kv = attention.num_key_value_heads * attention.head_dim
    return list(fused.split([fused.shape[0] - 2 * kv, kv, kv]))


def _gate_up(mlp: nn.Module) -> list[Tensor | None]:
    fused = _weight(mlp, "gate_up_proj")
    return [_weight(mlp, n) for n in ("gate_proj", "up_proj")] if fused is None else list(fused.chunk(2))


def _copy(ours: Tensor, theirs: Tensor | None) -> None:
    if theirs is not None and theirs.shape == ours.shape:
        ours.copy_(theirs)


def _copy_norm(ours: RMSNorm, theirs: nn.Module | None) -> None:
    """Takes a norm's gains where it computes what ours does with them (Gemma's adds one to them, say)."""
    weight = getattr(theirs, "weight", None)
    if weight is None or weight.shape != ours.weight.shape:
        return
    x = torch.linspace(-1, 2, weight.numel(), device=weight.device, dtype=weight.dtype)[None]
    if torch.allclose(theirs(x), F.rms_norm(x, weight.shape, weight, ours.eps), rtol=2e-2, atol=2e-2):
        ours.weight.copy_(weight)
