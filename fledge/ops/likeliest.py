"""The k largest numbers of a few rows, and the k likeliest tokens of a few rows of logits."""

from __future__ import annotations

from torch import Tensor

from fledge.ops.implementations import use_triton

MOST = 32  # the largest k of the kernels, which take one number after the other


def largest(x: Tensor, k: int, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row of x [.., W] in descending order, in the dtype of x, and their distinct places
    in the row, int64, each [.., k].

    `impl` "triton" needs a GPU or Triton's interpreter, "definition" is torch; None: "triton" on a GPU. A k above MOST
    takes the definition in any case. "triton" puts the first of equal numbers first, which "definition" leaves open;
    NaN counts as larger than every number. Raises ValueError for another `impl`, and unless 1 <= k <= W.
    """
    if not _by_kernel(x, k, impl):
        return x.topk(k)
    from fledge.ops.likeliest_triton import largest_triton

    values, places = largest_triton(x, k, log_softmax=False)
    return values.to(x.dtype), places


def likeliest(logits: Tensor, k: int, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the k likeliest tokens of each row of logits [.., W] in descending order, float32, and
    the tokens' distinct ids, int64, each [.., k].

    Numbers are computed in float32. A row with NaN or +inf, or of -inf only, has log-probabilities of NaN. `impl`, the
    order of equal logits and what is raised are those of `largest`.
    """
    if not _by_kernel(logits, k, impl):
        return logits.float().log_softmax(-1).topk(k)
    from fledge.ops.likeliest_triton import largest_triton

    return largest_triton(logits, k, log_softmax=True)


def _by_kernel(x: Tensor, k: int, impl: str | None) -> bool:
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"k = {k} must be between 1 and the {x.shape[-1]} numbers of a row")
    return use_triton(impl, x) and k <= MOST
