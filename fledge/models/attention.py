"""A target's attention beside a mask: transformers' "sdpa", but that of a few queries by `grouped_attention`."""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fledge.kernels.attention import grouped_attention

NAME = "fledge"  # among transformers' attentions
QUERIES = 128  # up to here the mask, said again for each head that shares a key, is small beside the keys


def group_heads(decoder: torch.nn.Module) -> None:
    """Has a decoder that attends by "sdpa" attend by `attend`. One whose code asks what its attention is called is let
    be, and so is one that does not let it be chosen."""
    chosen = getattr(decoder, "_can_set_attn_implementation", lambda: False)
    if getattr(decoder.config, "_attn_implementation", None) != "sdpa" or not chosen():
        return
    if '"sdpa"' not in inspect.getsource(sys.modules[type(decoder).__module__]):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        decoder.set_attn_implementation(NAME)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more,
) -> tuple[Tensor, None]:
    """As transformers calls its attentions: q [B, H, S, d], k and v [B, G, L, d] to [B, S, H, d]. What
    `grouped_attention` does not do, or does no sooner, is left to "sdpa"."""
    (_, H, S, _), (_, G, L, _) = query.shape, key.shape
    plain = not dropout and all(more.get(name) is None for name in ("softcap", "position_bias", "cache"))
    if G < H and S <= QUERIES and plain and attention_mask is not None and attention_mask.shape[1:] == (1, S, L):
        return grouped_attention(query, key, value, attention_mask, scaling).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
