"""Matrix products by the platform's library, or by what is faster on a CPU: packed weights, and W xᵀ for a few rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.io.machine import is_intel
from fledge.ops.packed_weight import packed_copy, packed_linear

# Up to this number of rows, W xᵀ is faster than x Wᵀ on a CPU: for x Wᵀ, torch's BLAS library first packs the weights,
# which takes longer than the product itself. A single row is computed as two, because the matrix-vector product reads
# the weights more slowly than either. For Intel's CPUs, torch's BLAS library (MKL) has other code: x Wᵀ of one to three
# rows took as long as reading the weights on a Xeon, and W xᵀ twice as long.
FEW_ROWS_ON_CPU = 0 if is_intel() else 8


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, from [..., I] to [..., O], contiguous. Equals `F.linear` up to rounding; faster for 1 to 8 float32 rows
    on some CPUs, and for packed weights (`ops/packed_weight.py`)."""
    rows = x.numel() // x.shape[-1]
    if (copy := packed_copy(weight_OI, rows)) is not None:
        return packed_linear(x, copy, bias_O)
    if not _few_on_cpu(x, rows):
        return F.linear(x, weight_OI, bias_O)
    return _product_on_cpu(x.reshape(rows, -1), weight_OI, bias_O).contiguous().view(*x.shape[:-1], -1)


def strided_linear(
    x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, residual_MO: Tensor | None = None
) -> Tensor:
    """`linear` of rows, plus a residual if given. The result may be strided: an operation that reads the result once
    needs no contiguous copy."""
    rows = x_MI.shape[0]
    if (copy := packed_copy(weight_OI, rows)) is not None:
        out_MO = packed_linear(x_MI, copy, bias_O)
    elif _few_on_cpu(x_MI, rows):
        out_MO = _product_on_cpu(x_MI, weight_OI, bias_O)
    elif residual_MO is not None and bias_O is None:
        return torch.addmm(residual_MO, x_MI, weight_OI.T)
    else:
        out_MO = F.linear(x_MI, weight_OI, bias_O)
    return out_MO if residual_MO is None else residual_MO + out_MO


def _few_on_cpu(x: Tensor, rows: int) -> bool:
    return 0 < rows <= FEW_ROWS_ON_CPU and x.dtype == torch.float32 and x.is_cpu


def _product_on_cpu(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if x_MI.shape[0] == 1:
        out_MO = torch.mm(weight_OI, torch.cat((x_MI, x_MI)).T).T[:1]
    else:  # contiguous: with strided rows, the product takes several times as long
        out_MO = torch.mm(weight_OI, x_MI.contiguous().T).T
    return out_MO if bias_O is None else out_MO + bias_O
