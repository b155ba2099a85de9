"""Where a new draft's weights start from: the target's last layer, final norm and head, and a look at its own token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.models.draft import Draft
from fledge.models.layers import Attention

# a slot's score for its own token, at first, where it looks for it (with q and k norms, the root of the head's width);
# for others it is about zero
OWN_TOKEN = 4.0


@torch.no_grad()
def start_from_target(draft: Draft, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor) -> None:
    """Starts a draft as close to its target as their shapes allow, so that it has less to learn.

    `last_layer` are weights of the target's last decoder layer and final norm by Llama's names ("q_proj.weight",
    "input_layernorm.weight", "norm.weight" ..); those that are missing, or of another shape than the draft's, leave
    the draft's at normal(0, 0.02), norms at one. The draft's head takes the target's rows and its final norm the
    target's gains. `fc` passes the last captured layer through, so that the draft's residual stream is the target's
    own; the draft's attention (on the hidden half of its input) and MLP are those of the target's last layer. If the
    draft has several key heads, one of them looks for the slot's own token instead.

    EAGLE-1's draft starts by passing on the state it reads, which is normed, unlike the inputs of the target's layers;
    its other weights are random.
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
        _take_last_layer(draft, last_layer)
    if layer.self_attn.kv_heads > 1:
        _look_for_own_token(layer.self_attn, E)


def _take_last_layer(draft: Draft, last_layer: Mapping[str, Tensor]) -> None:
    E, layer = draft.config.hidden_size, draft.midlayer
    draft.fc.weight[:, -E:] += torch.eye(E)
    ours, mlp = layer.self_attn, layer.mlp
    taken = {
        "norm": draft.norm.weight,
        "input_layernorm": layer.hidden_norm.weight,
        "post_attention_layernorm": layer.post_attention_layernorm.weight,
        "q_proj": ours.q_proj.weight[:, E:],
        "k_proj": ours.k_proj.weight[:, E:],
        "v_proj": ours.v_proj.weight[:, E:],
        "o_proj": ours.o_proj.weight,
        "gate_proj": mlp.gate_proj.weight,
        "up_proj": mlp.up_proj.weight,
        "down_proj": mlp.down_proj.weight,
    }
    for name, weight in taken.items():
        theirs = last_layer.get(f"{name}.weight")
        if theirs is not None and theirs.shape == weight.shape:
            weight.copy_(theirs)


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
