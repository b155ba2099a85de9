"""The backends of torch's scaled_dot_product_attention that fledge uses."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_cudnn_sdpa(device: torch.device) -> contextlib.AbstractContextManager:
    """Context manager: excludes cuDNN from torch's attention on CUDA devices; no effect elsewhere.

    Torch prefers cuDNN on Hopper GPUs, but cuDNN builds a new plan for every new sequence length, and decoding and
    packed documents produce new lengths all the time (bench/results/sdpa.json).
    """
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else contextlib.nullcontext()
