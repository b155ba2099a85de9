"""Top-k and top-p: the scores of all tokens but the likeliest ones become -inf."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fledge.ops.implementations import IMPLS, current_device, use_triton

__all__ = ["IMPLS", "MOST_TOKENS", "filter_top"]

MOST_TOKENS = 2**22  # of a row, for the kernels, whose sums of that many weights fit into 64 bits


def filter_top(scores_BNV: Tensor, top_k_B: Tensor, top_p_B: Tensor, *, impl: str | None = None) -> Tensor:
    """Top-k, then top-p, as TopKLogitsWarper and TopPLogitsWarper of transformers.

    Keeps of each row the k highest scores and those equal to the k-th, and of these all but the least likely ones whose
    probabilities add up to at most 1 - p; the likeliest token always. Which of equal scores top-p keeps is open in
    transformers; here those with lower ids go first, so that the choice does not depend on the batch. `top_k_B` (int64;
    0 keeps all) and `top_p_B` (float64; 1 keeps all) are those of the rows of each request. Scores are float32 or
    float64, and must not be NaN.

    `impl` "definition" sorts. "triton" (a GPU or Triton's interpreter) searches for the lowest score that is kept; rows
    of more than MOST_TOKENS are sorted too. None: "triton" for float32 on a GPU, else "definition". Sums of
    probabilities are rounded in different ways, so that the two may differ in tokens at whose probabilities the sum is
    1 - p up to rounding. The kernels add integers: equal rows have equal results, in any batch. Nothing waits for the
    device. Raises ValueError for another `impl`, and for "triton" with float64.
    """
    fits = scores_BNV.dtype == torch.float32 and scores_BNV.shape[-1] <= MOST_TOKENS
    if use_triton(impl, scores_BNV) and fits:
        from fledge.ops.top_filter_triton import filter_top_triton

        with current_device(scores_BNV.device):
            return filter_top_triton(scores_BNV, top_k_B, top_p_B)
    return _by_sorting(scores_BNV, top_k_B, top_p_B)


def _by_sorting(scores_BNV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """With one sort. What each filter leaves out becomes -inf, which the sorted values have first. Sums run from the
    least likely token up, as in transformers."""
    V = scores_BNV.shape[-1]
    ascending = sorted_values(scores_BNV)
    # the k-th highest score; without a limit the lowest, below which nothing is
    top_k_B = top_k_B.where(top_k_B > 0, V).clamp_max(V)
    lowest = ascending.gather(-1, (V - top_k_B)[:, None, None].expand(-1, ascending.shape[1], 1))
    scores_BNV = scores_BNV.masked_fill(scores_BNV < lowest, -torch.inf)
    ascending = ascending.masked_fill(ascending < lowest, -torch.inf)
    # no sum is below -1, the threshold of requests without top-p
    threshold = (1 - top_p_B).where(top_p_B < 1, -1.0).to(scores_BNV.dtype)[:, None, None]
    removed = ascending.softmax(-1).cumsum(-1) <= threshold
    count = removed[..., :-1].sum(-1, keepdim=True)  # the likeliest token stays
    lowest = ascending.gather(-1, count)
    below, equal = scores_BNV < lowest, scores_BNV == lowest
    gone = below | (equal & (equal.cumsum(-1) <= count - below.sum(-1, keepdim=True)))
    return scores_BNV.masked_fill(gone, -torch.inf)


def sorted_values(x: Tensor) -> Tensor:
    """The numbers of each row of x [.., V], float32 or float64, in ascending order. NumPy sorts several times as fast
    as torch on a CPU."""
    if x.device.type != "cpu":
        return x.sort(dim=-1).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1))
