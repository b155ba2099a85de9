"""The backends of torch's scaled_dot_product_attention that fledge uses."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_cudnn_sdpa(device: torch.device) -> contextlib.AbstractContextManager:
    """Context manager: lets torch's attention use BACKENDS, so not cuDNN, on CUDA devices; no effect elsewhere.

    Setting them takes the host longer than launching attention. Where exactly these are set already, nothing is done,
    so that a pass that enters it around all layers sets them once.

    Torch prefers cuDNN on Hopper GPUs, but cuDNN builds a new plan for every new sequence length, and decoding and
    packed documents produce new lengths all the time. On an H200, a plan took as long as a thousand calls.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    flags = torch.backends.cuda
    others = flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled() and flags.math_sdp_enabled()
    return contextlib.nullcontext() if others and not flags.cudnn_sdp_enabled() else sdpa_kernel(BACKENDS)
