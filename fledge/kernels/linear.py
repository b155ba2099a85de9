"""Products with a weight matrix: of few rows, as decoding on a CPU makes them, and of many, as training does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Up to here, W xᵀ is the quicker order. For x Wᵀ the library behind torch packs the weights first, which costs more
# than so small a product; in the other order it streams them. One row goes as two, since a product of a matrix with
# a single vector streams them worse than either (bench/small_rows.py).
FEW = 8

# Training rounds its products' heights up to a multiple of this: of ever new ones, the library behind torch would have
# to find out each time how to compute them, which takes the host longer than a small product takes the GPU.
HEIGHT = 128


def rounded(rows: int) -> int:
    """The height of a training product of so many rows."""
    return -(-rows // HEIGHT) * HEIGHT


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x Wᵀ + b as `F.linear`, [..., I] to [..., O], up to float32 rounding; sooner for 1 to 8 rows on a CPU."""
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= FEW or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight_OI, bias_O)
    few = x.reshape(rows, -1)
    if rows == 1:
        few = torch.cat((few, few))
    out = (weight_OI @ few.T)[:, :rows].T.contiguous().view(*x.shape[:-1], -1)
    return out if bias_O is None else out + bias_O


def zeros_wide(x: Tensor) -> Tensor:
    """Where sums of x's kind belong: its shape in float32, or in float64 for that."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class WideSum:
    """A sum of products in the shape of a weight, in float32, or in float64 for that. The first product makes it: a
    sum so large costs by how often it goes through memory."""

    def __init__(self, weight_OI: Tensor):
        self.weight_OI = weight_OI
        self.made: Tensor | None = None

    def add_product(self, a_OS: Tensor, b_SI: Tensor) -> None:
        """Adds a b; that of 16-bit factors on a GPU is summed on in the product itself."""
        wide = torch.promote_types(a_OS.dtype, torch.float32)
        fused = a_OS.dtype != wide and a_OS.device.type == "cuda"
        if not fused:
            a_OS, b_SI = a_OS.to(wide), b_SI.to(wide)
        if self.made is None:
            self.made = torch.mm(a_OS, b_SI, out_dtype=wide) if fused else a_OS @ b_SI
        elif fused:
            torch.ops.aten.addmm.dtype_out(self.made, a_OS, b_SI, wide, out=self.made)
        else:
            self.made.addmm_(a_OS, b_SI)

    def total(self) -> Tensor:
        return zeros_wide(self.weight_OI) if self.made is None else self.made


def accumulating_products(x_SI: Tensor, *weights_OI: Tensor, onto_SO: Tensor | None = None) -> tuple[Tensor, ...]:
    """x Wᵀ for each weight, or onto + x Wᵀ for one; of weights with more columns than x, the first. The backward pass
    adds the weights' gradients to their `grad`, and x's to each other, within the products that make them, so that a
    weight used many times costs no further passes over its gradient. The weights must be leaves."""
    return _Products.apply(onto_SO, x_SI, *weights_OI)


class SharedProducts:
    """[x ; y] Wᵀ where many y meet the same few rows of x: x's share is made once, and its gradient summed in float32
    over all that read it, to be sent back once by `backward`. The weights must be leaves; needs a GPU, or Triton's
    interpreter."""

    def __init__(self, x_NI: Tensor, *weights_OI: Tensor):
        self.width = x_NI.shape[1]
        self.weights = weights_OI
        self.made = accumulating_products(x_NI, *weights_OI)
        self.totals = [torch.zeros_like(m, dtype=torch.float32) for m in self.made]
        # what reads the products needs a gradient where they do, though it reaches them through the totals
        self.asks = x_NI.new_empty(0, requires_grad=any(m.requires_grad for m in self.made))

    def beside(self, rows_S: Tensor, y_SJ: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        """[x[rows] ; y] Wᵀ for some of the weights. The rows must be distinct, but for those
        whose gradient is zero; int32 or int64."""
        return _Beside.apply(self, self.asks, rows_S, y_SJ, *weights_OI)

    def place(self, weight: Tensor) -> int:
        return next(i for i, w in enumerate(self.weights) if w is weight)

    def backward(self) -> None:
        """Sends back what the products' readers collected."""
        reached = [(m, t) for m, t in zip(self.made, self.totals, strict=True) if m.requires_grad]
        torch.autograd.backward([m for m, _ in reached], [t.to(m.dtype) for m, t in reached])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, onto, x, *weights):
        ctx.weights = weights  # themselves: what torch saves for a checkpointed pass are copies without `grad`
        ctx.save_for_backward(x)
        if onto is not None:
            return (torch.addmm(onto, x, weights[0].T),)
        return tuple(x @ w[:, : x.shape[1]].T for w in weights)

    @staticmethod
    def backward(ctx, *dys):
        (x,) = ctx.saved_tensors
        dx = _collect(dys, x, ctx.weights, 0, ctx.needs_input_grad[1])
        return dys[0] if ctx.needs_input_grad[0] else None, dx, *(None for _ in ctx.weights)


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shared, _asks, rows, y, *weights):
        ctx.shared, ctx.weights = shared, weights
        ctx.save_for_backward(rows, y)
        made = (shared.made[shared.place(w)].index_select(0, rows) for w in weights)
        return tuple(m.addmm_(y, w[:, shared.width :].T) for m, w in zip(made, weights, strict=True))

    @staticmethod
    def backward(ctx, *dys):
        from fledge.kernels.elementwise import add_rows_

        rows, y = ctx.saved_tensors
        shared, weights = ctx.shared, ctx.weights
        for dy, weight in zip(dys, weights, strict=True):
            add_rows_(shared.totals[shared.place(weight)], rows, dy)
        dy = _collect(dys, y, weights, shared.width, ctx.needs_input_grad[3])
        return None, None, None, dy, *(None for _ in weights)


def _collect(dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], start: int, wanted: bool) -> Tensor | None:
    """Adds the gradients of the weights' columns from `start` on, and returns x's."""
    dx = None
    for dy, weight in zip(dys, weights, strict=True):
        add_gradient(weight, dy, x, start)
        if wanted:
            columns = weight[:, start : start + x.shape[1]]
            dx = dy @ columns if dx is None else dx.addmm_(dy, columns)
    return dx


def add_gradient(weight_OI: Tensor, dy_SO: Tensor, x_SJ: Tensor, start: int = 0) -> None:
    """weight.grad += dyᵀ x, in the columns that x multiplied, for a leaf that takes gradients."""
    if not weight_OI.requires_grad:
        return
    assert weight_OI.is_leaf, "only a leaf has a gradient to add to"
    if weight_OI.grad is None and x_SJ.shape[1] == weight_OI.shape[1]:
        weight_OI.grad = dy_SO.T @ x_SJ
        return
    if weight_OI.grad is None:
        weight_OI.grad = torch.zeros_like(weight_OI)
    weight_OI.grad[:, start : start + x_SJ.shape[1]].addmm_(dy_SO.T, x_SJ)
