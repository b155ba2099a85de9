"""Products with a weight matrix: of a few rows, as decoding on a CPU makes them, and of many, as training does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.gradients import GradientSums

# Up to this many rows W xᵀ is faster than x Wᵀ on a CPU: for x Wᵀ the library behind torch packs the weights first,
# which costs more than so small a product. One row is computed as two, since a product of a matrix with a single
# vector streams the weights worse than either (bench/small_rows.py).
FEW = 8

# Training rounds the number of rows of its products up to a multiple of this: for each new number, the library behind
# torch would choose an algorithm anew, which takes the host longer than a small product takes the GPU.
HEIGHT = 128


def rounded(rows: int) -> int:
    """The number of rows that a training product of `rows` rows is computed with."""
    return -(-rows // HEIGHT) * HEIGHT


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x Wᵀ + b as `F.linear`, [..., I] to [..., O], up to float32 rounding; faster for 1 to 8 rows on a CPU."""
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= FEW or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight_OI, bias_O)
    few = x.reshape(rows, -1)
    if rows == 1:
        few = torch.cat((few, few))
    out = (weight_OI @ few.T)[:, :rows].T.contiguous().view(*x.shape[:-1], -1)
    return out if bias_O is None else out + bias_O


def linear_products(
    x_SI: Tensor, *weights_OI: Tensor, residual_SO: Tensor | None = None, gradients: GradientSums | None = None
) -> tuple[Tensor, ...]:
    """x Wᵀ for each weight, or residual + x Wᵀ for a single one.

    A weight with more columns than x is used by its first columns. With `gradients` the backward pass adds the
    weights' gradients there (the weights must be leaves); without, autograd receives them. The input's gradients from
    several weights are summed within the products that compute them.
    """
    return _Products.apply(gradients, residual_SO, x_SI, *weights_OI)


class SharedProducts:
    """[x ; y] Wᵀ where many rows y meet the same few rows x.

    x's share of the product is computed once. Its gradient is summed in float32 over all that read it (`totals`), and
    sent back once by `backward`. Needs a GPU, or Triton's interpreter.
    """

    def __init__(self, x_NI: Tensor, *weights_OI: Tensor, gradients: GradientSums | None = None):
        self.width = x_NI.shape[1]
        self.weights, self.gradients = weights_OI, gradients
        self.products = linear_products(x_NI, *weights_OI, gradients=gradients)
        self.totals = [torch.zeros_like(p, dtype=torch.float32) for p in self.products]
        # makes autograd visit the readers of the products, whose gradients reach x through `totals`
        self.anchor = x_NI.new_empty(0, requires_grad=any(p.requires_grad for p in self.products))

    def with_rows(self, rows_S: Tensor, y_SJ: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        """[x[rows] ; y] Wᵀ for some of the weights. Rows (int32 or int64) that occur twice must have zero gradients."""
        return _WithRows.apply(self, self.anchor, rows_S, y_SJ, *weights_OI)

    def index(self, weight: Tensor) -> int:
        return next(i for i, w in enumerate(self.weights) if w is weight)

    def backward(self) -> None:
        """Sends the summed gradients of the products back to x and the weights."""
        reached = [(p, t) for p, t in zip(self.products, self.totals, strict=True) if p.requires_grad]
        torch.autograd.backward([p for p, _ in reached], [t.to(p.dtype) for p, t in reached])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, residual, x, *weights):
        # the weights themselves: what torch saves for a checkpointed pass are copies without `.grad`
        ctx.weights, ctx.gradients = weights, gradients
        ctx.save_for_backward(x)
        if residual is not None:
            return (torch.addmm(residual, x, weights[0].T),)
        return tuple(x @ w[:, : x.shape[1]].T for w in weights)

    @staticmethod
    def backward(ctx, *dys):
        (x,) = ctx.saved_tensors
        dx, dweights = _backward(dys, x, ctx.weights, 0, ctx.needs_input_grad[2], ctx.gradients)
        return None, dys[0] if ctx.needs_input_grad[1] else None, dx, *dweights


class _WithRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shared, _anchor, rows, y, *weights):
        ctx.shared, ctx.weights = shared, weights
        ctx.save_for_backward(rows, y)
        parts = (shared.products[shared.index(w)].index_select(0, rows) for w in weights)
        return tuple(p.addmm_(y, w[:, shared.width :].T) for p, w in zip(parts, weights, strict=True))

    @staticmethod
    def backward(ctx, *dys):
        from fledge.kernels.elementwise import add_rows_

        rows, y = ctx.saved_tensors
        shared, weights = ctx.shared, ctx.weights
        for dy, weight in zip(dys, weights, strict=True):
            add_rows_(shared.totals[shared.index(weight)], rows, dy)
        dy, dweights = _backward(dys, y, weights, shared.width, ctx.needs_input_grad[3], shared.gradients)
        return None, None, None, dy, *dweights


def _backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], start: int, wanted: bool,
    gradients: GradientSums | None,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradient of x, which multiplied the weights' columns from `start` on, and those of the weights, or None
    where `gradients` took them."""
    dx, dweights = None, []
    for dy, weight in zip(dys, weights, strict=True):
        columns = slice(start, start + x.shape[1])
        dweights.append(None)
        if gradients is not None:
            gradients.add_product(weight, dy, x, start)
        elif weight.requires_grad:
            dweights[-1] = torch.zeros_like(weight)
            torch.mm(dy.T, x, out=dweights[-1][:, columns])
        if wanted:
            dx = dy @ weight[:, columns] if dx is None else dx.addmm_(dy, weight[:, columns])
    return dx, dweights
