"""Rows of a matrix, taken by their places."""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(x_NE: Tensor, rows_P: Tensor, distinct: int) -> Tensor:
    """x[rows], [P, E], where the first rows are `distinct` and those beyond them get no gradient: so the backward pass
    only puts rows in their places, and needs no sums."""
    return _Take.apply(x_NE, rows_P, distinct)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, distinct):
        ctx.save_for_backward(rows)
        ctx.shape, ctx.distinct = x.shape, distinct
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape)
        dx[rows[: ctx.distinct]] = dy[: ctx.distinct]
        return dx, None, None
