"""A transformers attention implementation for few queries with a mask: "sdpa" with `grouped_attention`."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fledge.ops.attention_prompt import grouped_attention, mask_repeats, prepare_mask

NAME = "fledge"  # the name under which transformers knows this implementation
# above this number of queries, a mask repeated for each head of a key-value group is no longer small beside the keys
MAX_QUERIES = 128


def install_attention(decoder: nn.Module) -> bool:
    """Replaces "sdpa" by `attend` in a decoder. Returns whether it was replaced.

    It is not if the decoder uses another implementation, does not support a choice, or if its code compares the
    implementation's name with "sdpa".
    """
    can_choose = getattr(decoder, "_can_set_attn_implementation", lambda: False)
    if getattr(getattr(decoder, "config", None), "_attn_implementation", None) != "sdpa" or not can_choose():
        return False
    if '"sdpa"' in inspect.getsource(sys.modules[type(decoder).__module__]):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    decoder.set_attn_implementation(NAME)
    return True


def heads_per_key(config: Any) -> int:
    """The number of query heads per key-value head in a transformers config; 1 if it differs between layers."""
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads // key_heads if isinstance(heads, int) and isinstance(key_heads, int) else 1


def to_attention_mask(visible_B1SL: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask (True: visible) to an additive mask for `attend`, once for all layers.

    The mask is prepared for `grouped_attention` if heads share keys and there are at most MAX_QUERIES queries; else it
    is an additive mask [B, 1, S, L] for "sdpa".
    """
    if heads_per_key > 1 and visible_B1SL.shape[2] <= MAX_QUERIES:
        return prepare_mask(visible_B1SL, heads_per_key, dtype)
    return torch.zeros_like(visible_B1SL, dtype=dtype).masked_fill_(~visible_B1SL, float("-inf"))


def make_mask(*args: Any, config: Any, dtype: torch.dtype, **options: Any) -> Tensor | None:
    """transformers' mask function for "sdpa", which it calls once per pass and kind of layer. The mask is prepared for
    `grouped_attention` if `attend` will use that."""
    mask = sdpa_mask(*args, config=config, dtype=dtype, **options)
    group = heads_per_key(config)
    if mask is None or group == 1 or mask.shape[1] != 1 or mask.shape[2] > MAX_QUERIES:
        return mask
    return prepare_mask(mask, group, dtype)


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
    """transformers' attention interface: q [B, H, S, d], k and v [B, G, L, d] to ([B, S, H, d], None).

    The mask is [B, 1, S, L], or prepared for `grouped_attention`, [B, 1, n S, L] with its S rows repeated n times. Uses
    "sdpa" for options that `grouped_attention` does not support, and for more than MAX_QUERIES queries.
    """
    (_, H, S, _), (_, G, L, _) = query.shape, key.shape
    mask = attention_mask
    if mask is not None and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == L and mask.shape[2] % S == 0:
        plain = not dropout and all(more.get(name) is None for name in ("softcap", "position_bias", "cache"))
        if G < H and S <= MAX_QUERIES and plain:
            if mask.dtype != query.dtype or mask.shape[2] != S * mask_repeats(mask.device, H // G):
                mask = prepare_mask(mask[:, :, :S], H // G, query.dtype)  # it was made for layers with another H / G
            return grouped_attention(query, key, value, mask, scaling).contiguous(), None
        mask = mask[:, :, :S]
    return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **more)
