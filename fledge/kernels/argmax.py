"""The argmax of a few long rows, such as logits."""

from __future__ import annotations

from torch import Tensor

from fledge.kernels.implementations import use_triton


def argmax_rows(x: Tensor, ids_V: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """The index of the first largest number of each row of x [.., V], int64 [..]; with `ids_V` (int64), the id at that
    index. Rows must not contain NaN.

    Equals `x.argmax(-1)`. `impl` "triton" is one program per row (a GPU or Triton's interpreter), "definition" is
    torch; None: "triton" on a GPU. Raises ValueError for another name.
    """
    if not use_triton(impl, x):
        return x.argmax(-1) if ids_V is None else ids_V[x.argmax(-1)]
    from fledge.kernels.argmax_triton import argmax_triton

    return argmax_triton(x, ids_V)
