"""The product of few rows with a weight matrix, as decoding on a CPU makes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Up to here, W xᵀ is the quicker order. For x Wᵀ the library behind torch packs the weights first, which costs more
# than so small a product; in the other order it streams them. One row goes as two, since a product of a matrix with
# a single vector streams them worse than either (bench/small_rows.py).
FEW = 8


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x Wᵀ + b as `F.linear`, [..., I] to [..., O], up to float32 rounding; sooner for 1 to 8 rows on a CPU."""
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= FEW or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight_OI, bias_O)
    few = x.reshape(rows, -1)
    if rows == 1:
        few = torch.cat((few, few))
    out = (weight_OI @ few.T)[:, :rows].T.contiguous().view(*x.shape[:-1], -1)
    return out if bias_O is None else out + bias_O
