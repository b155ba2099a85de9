"""The largest numbers of a few long rows, such as logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fledge.ops.device import use_triton

MOST = 32  # the largest k of the kernels, which extract a number per pass


def argmax_rows(x: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """The index of the first largest number of each row of x [.., V], int64 [..]; with `ids_V` (int64), the id at that
    index. Of rows with NaN, any index. Equals `x.argmax(-1)`."""
    if use_triton(x):
        from fledge.ops.topk_triton import argmax_triton

        return argmax_triton(x, ids_V)
    if x.is_cpu and x.dtype in (torch.float32, torch.float64):  # NumPy's is faster than torch's
        index = torch.from_numpy(np.asarray(x.detach().numpy().argmax(-1)))
    else:
        index = x.argmax(-1)
    return index if ids_V is None else ids_V.take(index)


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row of x [.., W] in descending order, in the dtype of x, and their distinct places
    in the row, int64, each [.., k]; 1 <= k <= W.

    The kernels, which take a k of up to MOST, put the first of equal numbers first; torch leaves their order open. NaN
    counts as larger than every number.
    """
    if not use_triton(x) or k > MOST:
        return x.topk(k)
    from fledge.ops.topk_triton import largest_triton

    values, places = largest_triton(x, k, log_softmax=False)
    return values.to(x.dtype), places


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the k likeliest tokens of each row of logits [.., W] in descending order, float32, and
    the tokens' distinct ids, int64, each [.., k].

    Numbers are computed in float32; with kernels, without a copy of all logits. A row with NaN or +inf, or of -inf
    only, has log-probabilities of NaN. k and the order of equal logits are as in `largest`.
    """
    if not use_triton(logits):
        return logits.float().log_softmax(-1).topk(k)
    from fledge.ops.topk_triton import largest_triton

    if k <= MOST:
        return largest_triton(logits, k, log_softmax=True)
    values, token = logits.topk(k)
    first_logp, _ = largest_triton(logits, 1, log_softmax=True)
    return (values.float() - values[..., :1].float()) + first_logp, token
