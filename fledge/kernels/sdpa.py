"""The backends of torch's scaled_dot_product_attention that fledge uses."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_cudnn_sdpa(device: torch.device) -> contextlib.AbstractContextManager:
    """Context manager: excludes cuDNN from torch's attention on CUDA devices; no effect elsewhere, and where it is
    excluded already. Entering it takes the host longer than launching attention, so a pass enters it once.

    Torch prefers cuDNN on Hopper GPUs, but cuDNN builds a new plan for every new sequence length, and decoding and
    packed documents produce new lengths all the time (bench/results/sdpa.json).
    """
    excludes = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    return sdpa_kernel(BACKENDS) if excludes else contextlib.nullcontext()
