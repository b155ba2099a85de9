"""The precision of reductions: float32 for 16-bit tensors, otherwise the tensor's own dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """x converted to float32 if it has a 16-bit dtype; unchanged if it is float32 or float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))
