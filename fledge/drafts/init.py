"""Initializes a new draft from its target's last decoder layer, final norm and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.drafts.draft import Draft
from fledge.drafts.layers import Attention

# the initial attention score of a slot for itself in the head of `_attend_to_own_token`; about 0 for other slots. With
# q and k norms, it is √d instead.
OWN_TOKEN_SCORE = 4.0


@torch.no_grad()
def initialize_from_target(
    draft: Draft, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor
) -> None:
    """Initializes a draft from its target's weights as far as their shapes agree.

    `last_layer` has the weights of the target's last decoder layer and final norm by Llama's names ("q_proj.weight",
    "input_layernorm.weight", "norm.weight", ..., see `Target.last_layer_weights`). Draft weights without a counterpart
    of the same shape are normal(0, 0.02), and norms 1.

    The head gets the rows of the target's head for the draft's vocabulary. `fc` is the identity on the last captured
    layer, so that the draft's residual stream starts as the target's. Attention (on the state half of its input), MLP
    and norms are those of the target's last layer. If the draft has several key-value heads, the first one attends to
    the slot's own token instead (`_attend_to_own_token`).

    For EAGLE-1, `fc` is the identity on the input state and all other weights are random: the state is the output of
    the target's final norm, unlike the input of a decoder layer.
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
        draft.lm_head.weight.copy_(head_VD[draft.target_ids().to(head_VD.device)])
        if draft.embed_tokens is not None:
            draft.embed_tokens.weight.copy_(embedding_VD)
        _copy_last_layer(draft, last_layer)
    if layer.self_attn.kv_heads > 1:
        _attend_to_own_token(layer.self_attn, E)


def _copy_last_layer(draft: Draft, last_layer: Mapping[str, Tensor]) -> None:
    """Copies the weights of the same shape, and adds the identity to `fc`."""
    E, layer = draft.config.hidden_size, draft.midlayer
    draft.fc.weight[:, -E:] += torch.eye(E)
    attention, mlp = layer.self_attn, layer.mlp
    draft_weights = {
        "norm": draft.norm.weight,
        "input_layernorm": layer.hidden_norm.weight,
        "post_attention_layernorm": layer.post_attention_layernorm.weight,
        "q_proj": attention.q_proj.weight[:, E:],
        "k_proj": attention.k_proj.weight[:, E:],
        "v_proj": attention.v_proj.weight[:, E:],
        "o_proj": attention.o_proj.weight,
        "gate_proj": mlp.gate_proj.weight,
        "up_proj": mlp.up_proj.weight,
        "down_proj": mlp.down_proj.weight,
    }
    for name, weight in draft_weights.items():
        target_weight = last_layer.get(f"{name}.weight")
        if target_weight is not None and target_weight.shape == weight.shape:
            weight.copy_(target_weight)


def _attend_to_own_token(attention: Attention, width: int) -> None:
    """Makes the first key-value head and its query heads attend to slots with the same token, and return its embedding.

    The residual stream starts as the target's state before that token. With weights near zero, the token would hardly
    reach it, and the draft would first have to learn which token it continues.
    """
    d = attention.head_dim
    heads = attention.heads // attention.kv_heads
    match, copy = (nn.init.orthogonal_(torch.empty(d, width)) for _ in range(2))
    match *= (OWN_TOKEN_SCORE / d**0.5) ** 0.5  # d entries of about 1 in q and in k, and the score divides by √d
    rows_of = (attention.q_proj, match.repeat(heads, 1)), (attention.k_proj, match), (attention.v_proj, copy)
    for projection, rows in rows_of:
        projection.weight[: len(rows)] = F.pad(rows, (0, projection.in_features - width))
    attention.o_proj.weight[:, : heads * d].normal_(0, 0.02)
