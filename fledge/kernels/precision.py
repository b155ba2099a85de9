"""The precision of reductions: float32 for the 16-bit types, the tensor's own above that."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """x as float32, or unchanged where it is float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
