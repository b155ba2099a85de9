"""A transformers target's attention where there is a mask and few queries: transformers' "sdpa" with
`grouped_attention` in its place."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fledge.kernels.attention import grouped_attention, prepare_mask, repeats

NAME = "fledge"  # among transformers' attention implementations
QUERIES = 128  # with more, a mask repeated for each head that shares a key is no longer small beside the keys


def install_attention(decoder: nn.Module) -> bool:
    """Has a decoder that attends by "sdpa" attend by `attend`; returns whether it does. Left alone are models whose
    code compares the implementation's name with "sdpa", and those that do not let it be chosen."""
    can_choose = getattr(decoder, "_can_set_attn_implementation", lambda: False)
    if getattr(decoder.config, "_attn_implementation", None) != "sdpa" or not can_choose():
        return False
    if '"sdpa"' in inspect.getsource(sys.modules[type(decoder).__module__]):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    decoder.set_attn_implementation(NAME)
    return True


def heads_per_key(config: Any) -> int:
    """Query heads that share a key head, by a transformers config; 1 where it has no one number for all layers."""
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads // key_heads if isinstance(heads, int) and isinstance(key_heads, int) else 1


def ready_mask(seen_B1SL: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    """A bool mask as `attend` takes it without any work in each layer: prepared for `grouped_attention` where heads
    share keys and queries are few, else one to be added by "sdpa"."""
    if heads_per_key > 1 and seen_B1SL.shape[2] <= QUERIES:
        return prepare_mask(seen_B1SL, heads_per_key, dtype)
    return torch.zeros_like(seen_B1SL, dtype=dtype).masked_fill_(~seen_B1SL, float("-inf"))


def make_mask(*args: Any, config: Any, dtype: torch.dtype, **options: Any) -> Tensor | None:
    """transformers' mask for "sdpa", made once a pass for all layers of a kind; prepared for `grouped_attention` where
    `attend` will use that."""
    made = sdpa_mask(*args, config=config, dtype=dtype, **options)
    shared = heads_per_key(config)
    if made is None or shared == 1 or made.shape[1] != 1 or made.shape[2] > QUERIES:
        return made
    return prepare_mask(made, shared, dtype)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more,
) -> tuple[Tensor, None]:
    """As transformers calls its attentions: q [B, H, S, d], k and v [B, G, L, d] to [B, S, H, d].

    The mask is an ordinary one, [B, 1, S, L], or one prepared for `grouped_attention`, whose rows are the same S over
    and over. What `grouped_attention` does not compute, or not faster, is left to "sdpa".
    """
    (_, H, S, _), (_, G, L, _) = query.shape, key.shape
    mask = attention_mask
    if mask is not None and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == L and mask.shape[2] % S == 0:
        plain = not dropout and all(more.get(name) is None for name in ("softcap", "position_bias", "cache"))
        if G < H and S <= QUERIES and plain:
            if mask.dtype != query.dtype or mask.shape[2] != S * repeats(mask.device, H // G):
                mask = prepare_mask(mask[:, :, :S], H // G, query.dtype)  # made for other layers, or by another hand
            return grouped_attention(query, key, value, mask, scaling).contiguous(), None
        mask = mask[:, :, :S]
    return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **more)
