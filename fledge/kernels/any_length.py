"""Attention at lengths that are new every time."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def any_length(device: torch.device) -> contextlib.AbstractContextManager:
    """Within it torch's attention does without cuDNN's, which it prefers on Hopper: that plans anew for every length it
    has not seen, and decoding and packed documents bring ever new ones (bench/results/sdpa.json)."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else contextlib.nullcontext()
