"""Gathering rows of a matrix, with a backward pass that needs no atomic additions."""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(x_NE: Tensor, rows_P: Tensor, distinct: int) -> Tensor:
    """x[rows_P], shape [P, E].

    The first `distinct` entries of `rows_P` must be different from each other, and the gradients of the remaining
    entries are ignored. The backward pass therefore scatters rows without summing any.
    """
    return _TakeRows.apply(x_NE, rows_P, distinct)


class _TakeRows(torch.autograd.Function):
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
