"""Matrix products of training: with accumulated weight gradients, and with rows shared by several products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.ops.few_rows import linear_add, plain_linear
from fledge.ops.gradients import GradientSums

# Training pads the number of rows of its products to a multiple of this. For each new number of rows, cuBLAS selects an
# algorithm, which takes the CPU longer than a small product takes the GPU.
ROW_MULTIPLE = 128


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of ROW_MULTIPLE."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def linear_products(
    x_SI: Tensor, *weights_OI: Tensor, residual_SO: Tensor | None = None, gradients: GradientSums | None = None
) -> tuple[Tensor, ...]:
    """x Wᵀ for each weight, each [S, O]; or residual + x Wᵀ for a single weight.

    If a weight has more columns than x, only its first I columns are used. With `gradients`, the backward pass adds the
    weights' gradients there and the weights must be leaves; without, they are returned to autograd. The gradients of x
    from several weights are accumulated inside the GEMMs that compute them.
    """
    if not torch.is_grad_enabled() and all(w.shape[1] == x_SI.shape[1] for w in weights_OI):
        if residual_SO is not None:
            return (linear_add(x_SI, weights_OI[0], residual_SO),)
        return tuple(plain_linear(x_SI, w) for w in weights_OI)
    return _Products.apply(gradients, residual_SO, x_SI, *weights_OI)


class SharedProducts:
    """[x ; y] Wᵀ for many rows y that are concatenated with the same few rows x.

    The part x Wᵀ of the product is computed once. `with_rows` adds the part of y. The gradient of the shared part is
    summed in float32 over all calls of `with_rows` (in `totals`), and `backward` propagates it to x and the weights.
    Needs a GPU, or Triton's interpreter.
    """

    def __init__(self, x_NI: Tensor, *weights_OI: Tensor, gradients: GradientSums | None = None):
        self.width = x_NI.shape[1]
        self.weights, self.gradients = weights_OI, gradients
        self.products = linear_products(x_NI, *weights_OI, gradients=gradients)
        self.totals = [torch.zeros_like(p, dtype=torch.float32) for p in self.products]
        # an input that requires gradients: without it, autograd would skip the backward pass of `with_rows`
        self.anchor = x_NI.new_empty(0, requires_grad=any(p.requires_grad for p in self.products))

    def with_rows(self, rows_S: Tensor, y_SJ: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        """[x[rows] ; y] Wᵀ for some of the constructor's weights, each [S, O].

        `rows_S` is int32 or int64. Rows whose index occurs more than once must have zero output gradients.
        """
        return _WithRows.apply(self, self.anchor, rows_S, y_SJ, *weights_OI)

    def index(self, weight: Tensor) -> int:
        """The position of a weight among the constructor's weights."""
        return next(i for i, w in enumerate(self.weights) if w is weight)

    def backward(self) -> None:
        """Backpropagates the summed gradients of the shared products to x and the weights."""
        pairs = [(p, t) for p, t in zip(self.products, self.totals, strict=True) if p.requires_grad]
        torch.autograd.backward([p for p, _ in pairs], [t.to(p.dtype) for p, t in pairs])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, residual, x, *weights):
        # not save_for_backward: under activation checkpointing it returns copies of the weights without `.grad`
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
        from fledge.ops.elementwise import add_rows_

        rows, y = ctx.saved_tensors
        shared, weights = ctx.shared, ctx.weights
        for dy, weight in zip(dys, weights, strict=True):
            add_rows_(shared.totals[shared.index(weight)], rows, dy)
        dy, dweights = _backward(dys, y, weights, shared.width, ctx.needs_input_grad[3], shared.gradients)
        return None, None, None, dy, *dweights


def _backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], start: int, needs_dx: bool,
    gradients: GradientSums | None,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradient of x (None unless `needs_dx`) and of each weight (None if `gradients` accumulates it).

    x was multiplied by the weights' columns [start, start + x.shape[1]).
    """
    dx, dweights = None, []
    for dy, weight in zip(dys, weights, strict=True):
        columns = slice(start, start + x.shape[1])
        dweights.append(None)
        if gradients is not None:
            gradients.add_product(weight, dy, x, start)
        elif weight.requires_grad:
            dweights[-1] = torch.zeros_like(weight)
            torch.mm(dy.T, x, out=dweights[-1][:, columns])
        if needs_dx:
            dx = dy @ weight[:, columns] if dx is None else dx.addmm_(dy, weight[:, columns])
    return dx, dweights
