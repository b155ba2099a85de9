"""Copying small host tensors to a device without synchronizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies CPU tensors of one dtype to the device, in one non-blocking copy from pinned memory.

    On the CPU, returns the tensors themselves. Tensors that are not on the CPU, as those made under
    `torch.set_default_device` without a device of their own, are copied one by one.
    """
    if device.type == "cpu" or any(x.device.type != "cpu" for x in tensors):
        return [x.to(device) for x in tensors]
    flat = torch.cat([x.reshape(-1) for x in tensors])
    parts = flat.pin_memory().to(device, non_blocking=True).split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
