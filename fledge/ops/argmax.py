"""The argmax of a few long rows, such as logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fledge.ops.implementations import use_triton


def argmax_rows(x: Tensor, ids_V: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """The index of the first largest number of each row of x [.., V], int64 [..]; with `ids_V` (int64), the id at that
    index. Of rows with NaN, any index.

    Equals `x.argmax(-1)`. `impl` "triton" are kernels (a GPU or Triton's interpreter), "definition" is
    torch, or NumPy on a CPU; None: "triton" on a GPU. Raises ValueError for another name.
    """
    if not use_triton(impl, x):
        index = _argmax(x)
        return index if ids_V is None else ids_V[index]
    from fledge.ops.argmax_triton import argmax_triton

    return argmax_triton(x, ids_V)


def _argmax(x: Tensor) -> Tensor:
    if not x.is_cpu or x.dtype not in (torch.float32, torch.float64):
        return x.argmax(-1)
    # faster than torch's
    return torch.from_numpy(np.asarray(x.detach().numpy().argmax(-1)))
