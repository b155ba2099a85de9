"""Where gradients of weights are summed when one training row is computed in many pieces."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def zeros_fp32(x: Tensor) -> Tensor:
    """Zeros in the shape of `x`, in float32, or in float64 where `x` is float64."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class Fp32Accumulator:
    """The sum of matrix products in the shape of a weight, in float32, or in float64 where the weight is float64.

    The first product allocates the sum: one pass less over a large tensor than adding to zeros.
    """

    def __init__(self, weight_OI: Tensor):
        self.weight_OI = weight_OI
        self.sum_OI: Tensor | None = None

    def add_product(self, a_OS: Tensor, b_SI: Tensor) -> None:
        """Adds a b. For 16-bit factors on a GPU the matrix product itself accumulates into the float32 sum."""
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
        return zeros_fp32(self.weight_OI) if self.sum_OI is None else self.sum_OI


class GradientSums:
    """The one place where gradients of parameters are accumulated outside autograd, for one row's chunks of slots.

    Kernels that are given a `GradientSums` add a weight's gradient to `weight.grad` within the matrix product that
    computes it (`add_product`) and return none to autograd, so a weight used in K steps costs no K passes over its
    gradient. All other gradients reach `.grad` through autograd.

    A 16-bit sum loses addends that are small beside it, so `end_chunk` moves the 16-bit sums into float32 after every
    few chunks, and `finish` rounds the totals once.
    """

    CHUNKS = 4  # chunks that are summed in 16 bits before they are moved

    def __init__(self, parameters: Iterable[nn.Parameter], head: nn.Parameter | None = None):
        """`head` is summed in float32 from the start (`head_sum`), by the loss; the others are `parameters`."""
        learning = [p for p in parameters if p.requires_grad]
        self.head = head if head is not None and head.requires_grad else None
        self.head_sum = None if self.head is None else Fp32Accumulator(self.head)
        self.halves = [p for p in learning if p is not self.head and p.dtype.itemsize == 2]
        self.wide: list[Tensor] = []
        self.waiting = 0

    @staticmethod
    def add_product(weight_OI: Tensor, dy_SO: Tensor, x_SJ: Tensor, start: int = 0) -> None:
        """weight.grad += dyᵀ x in columns [start, start + J), for a leaf; nothing for one that takes no gradient."""
        if not weight_OI.requires_grad:
            return
        assert weight_OI.is_leaf, "only a leaf has a gradient to add to"
        if weight_OI.grad is None and x_SJ.shape[1] == weight_OI.shape[1]:
            weight_OI.grad = dy_SO.T @ x_SJ
            return
        if weight_OI.grad is None:
            weight_OI.grad = torch.zeros_like(weight_OI)
        weight_OI.grad[:, start : start + x_SJ.shape[1]].addmm_(dy_SO.T, x_SJ)

    def end_chunk(self) -> None:
        """Counts a chunk whose backward pass is done."""
        self.waiting += 1
        if self.waiting > self.CHUNKS:
            self._move()

    def _move(self) -> None:
        self.wide = self.wide or [zeros_fp32(p) for p in self.halves]
        for p, total in zip(self.halves, self.wide, strict=True):
            if p.grad is not None:
                total += p.grad
                p.grad = None
        self.waiting = 0

    def finish(self) -> None:
        """Leaves every total in its parameter's `.grad`, added to what was there before the row."""
        if self.wide:
            self._move()
            for p, total in zip(self.halves, self.wide, strict=True):
                p.grad = total.to(p.dtype)
            self.wide = []
        if self.head is not None:
            total = self.head_sum.total()
            self.head.grad = total.to(self.head.dtype) if self.head.grad is None else self.head.grad.add_(total)
