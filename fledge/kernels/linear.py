"""Products with a weight matrix: of few rows, as decoding on a CPU makes them, and of many, as training does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Up to here, W xᵀ is the quicker order. For x Wᵀ the library behind torch packs the weights first, which costs more
# than so small a product; in the other order it streams them. One row goes as two, since a product of a matrix with
# a single vector streams them worse than either (bench/small_rows.py).
FEW = 8


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


def accumulating_products(x_SI: Tensor, *weights_OI: Tensor, onto_SO: Tensor | None = None) -> tuple[Tensor, ...]:
    """x Wᵀ for each weight, or onto + x Wᵀ for one. The backward pass adds the weights' gradients to their `grad`, and
    x's to each other, within the products that make them, so that a weight used many times costs no further passes
    over its gradient. The weights must be leaves."""
    return _Products.apply(onto_SO, x_SI, *weights_OI)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, onto, x, *weights):
        ctx.save_for_backward(x, *weights)
        if onto is not None:
            return (torch.addmm(onto, x, weights[0].T),)
        return tuple(x @ w.T for w in weights)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        dx = None
        for dy, weight in zip(dys, weights, strict=True):
            add_gradient(weight, dy, x)
            if ctx.needs_input_grad[1]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
        return dys[0] if ctx.needs_input_grad[0] else None, dx, *(None for _ in weights)


def add_gradient(weight_OI: Tensor, dy_SO: Tensor, x_SI: Tensor) -> None:
    """weight.grad += dyᵀ x, for a leaf that takes gradients."""
    if not weight_OI.requires_grad:
        return
    assert weight_OI.is_leaf, "only a leaf has a gradient to add to"
    if weight_OI.grad is None:
        weight_OI.grad = dy_SO.T @ x_SI
    else:
        weight_OI.grad.addmm_(dy_SO.T, x_SI)
