"""Gradients of training: sums of weight gradients over the chunks and TTT steps of a row, and gathering of rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def zeros_fp32(x: Tensor) -> Tensor:
    """Zeros of the shape of `x`, in float32, or in float64 if `x` is float64."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class Fp32Accumulator:
    """A sum of matrix products of the shape of a weight, in float32, or in float64 if the weight is float64.

    The first product allocates the sum, which saves filling a large tensor with zeros and adding to it.
    """

    def __init__(self, weight_OI: Tensor):
        self.weight_OI = weight_OI
        self.sum_OI: Tensor | None = None

    def add_product(self, a_OS: Tensor, b_SI: Tensor) -> None:
        """Adds the product a b. For 16-bit factors on a GPU, the GEMM itself accumulates into the float32 sum."""
        wide = torch.promote_types(a_OS.dtype, torch.float32)
        fused = a_OS.dtype != wide and a_OS.device.type == "cuda"
        if not fused:
            a_OS, b_SI = a_OS.to(wide), b_SI.to(wide)
        if self.sum_OI is None:
            self.sum_OI = torch.mm(a_OS, b_SI, out_dtype=wide) if fused else a_OS @ b_SI
        elif fused:
            torch.ops.aten.addmm.dtype_out(self.sum_OI, a_OS, b_SI, wide, out=self.sum_OI)
        else:
            self.sum_OI.addmm_(a_OS, b_SI)

    def total(self) -> Tensor:
        """The sum; zeros if nothing was added."""
        return zeros_fp32(self.weight_OI) if self.sum_OI is None else self.sum_OI


class GradientSums:
    """Accumulates parameter gradients outside autograd over the chunks of slots of one training row.

    Kernels that receive a `GradientSums` add a weight's gradient to `weight.grad` inside the GEMM that computes it
    (`add_product`), and return None to autograd. A weight that is used in K steps then needs no K additions over its
    gradient. All other gradients reach `.grad` through autograd.

    A 16-bit sum loses small addends, so `end_chunk` adds the 16-bit `.grad`s to float32 sums every few chunks, and
    `finish` rounds the totals once.
    """

    CHUNKS = 4  # chunks that are summed in 16 bits before they are added to the float32 sums

    def __init__(self, parameters: Iterable[nn.Parameter], head: nn.Parameter | None = None):
        """The loss accumulates the gradient of `head` in float32 from the start, in `head_sum`.

        `parameters` may include `head`. Parameters that do not require a gradient are ignored.
        """
        trainable = [p for p in parameters if p.requires_grad]
        self.head = head if head is not None and head.requires_grad else None
        self.head_sum = None if self.head is None else Fp32Accumulator(self.head)
        self.parameters_16bit = [p for p in trainable if p is not self.head and p.dtype.itemsize == 2]
        self.sums_float32: list[Tensor] = []
        self.pending_chunks = 0

    @staticmethod
    def add_product(weight_OI: Tensor, dy_SO: Tensor, x_SJ: Tensor, start: int = 0) -> None:
        """Adds dyᵀ x to columns [start, start + J) of weight.grad. Does nothing if the weight requires no gradient.

        The weight must be a leaf tensor.
        """
        if not weight_OI.requires_grad:
            return
        assert weight_OI.is_leaf, "only a leaf tensor has a .grad to add to"
        if weight_OI.grad is None and x_SJ.shape[1] == weight_OI.shape[1]:
            weight_OI.grad = dy_SO.T @ x_SJ
            return
        if weight_OI.grad is None:
            weight_OI.grad = torch.zeros_like(weight_OI)
        weight_OI.grad[:, start : start + x_SJ.shape[1]].addmm_(dy_SO.T, x_SJ)

    def end_chunk(self) -> None:
        """Must be called after the backward pass of each chunk."""
        self.pending_chunks += 1
        if self.pending_chunks > self.CHUNKS:
            self._add_to_float32()

    def _add_to_float32(self) -> None:
        """Adds the 16-bit `.grad`s to the float32 sums and clears them."""
        self.sums_float32 = self.sums_float32 or [zeros_fp32(p) for p in self.parameters_16bit]
        for p, total in zip(self.parameters_16bit, self.sums_float32, strict=True):
            if p.grad is not None:
                total += p.grad
                p.grad = None
        self.pending_chunks = 0

    def finish(self) -> None:
        """Stores the totals in the parameters' `.grad`. Gradients that were there before the row are included."""
        if self.sums_float32:
            self._add_to_float32()
            for p, total in zip(self.parameters_16bit, self.sums_float32, strict=True):
                p.grad = total.to(p.dtype)
            self.sums_float32 = []
        if self.head is not None:
            total = self.head_sum.total()
            self.head.grad = total.to(self.head.dtype) if self.head.grad is None else self.head.grad.add_(total)


def take_rows(x_NE: Tensor, rows_P: Tensor, distinct: int) -> Tensor:
    """x[rows_P], shape [P, E], with a backward pass that needs no atomic additions.

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
