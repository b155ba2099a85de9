"""down(silu(gate x) * up x), Llama's SwiGLU MLP, with fewer tensors saved for the backward pass.

    g = x Wg', u = x Wu', a = silu(g) u, y = a Wd'

    da = dy Wd,   dg = da u σ(g) (1 + g (1 - σ(g))),   du = da silu(g),   dx = dg Wg + du Wu

`swiglu` saves x, g and u (with `recompute` only x) and recomputes a. dg, du and a are written into the memory of g, u
and da.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.gradients import GradientSums
from fledge.ops.products import linear_products


def swiglu_reference(x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, residual: Tensor) -> Tensor:
    """The definition in plain torch: residual + MLP(x), all of shape [S, E]."""
    return residual + F.linear(F.silu(F.linear(x, gate_IE)) * F.linear(x, up_IE), down_EI)


def swiglu(
    x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, residual: Tensor, *, recompute: bool = False,
    gradients: GradientSums | None = None,
) -> Tensor:  # fmt: skip
    """`swiglu_reference` with Triton kernels, on a GPU or in Triton's interpreter.

    With `gradients`, the weights' gradients are added there and the weights must be leaves; without, they are returned
    to autograd. `recompute` saves memory by computing g and u again in the backward pass.
    """
    if not torch.is_grad_enabled():
        from fledge.ops.elementwise import silu_mul

        g, u = linear_products(x, gate_IE, up_IE)
        return linear_products(silu_mul(g, u), down_EI, residual_SO=residual)[0]
    return _SwiGLU.apply(x, gate_IE, up_IE, down_EI, residual, recompute, gradients)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, residual, recompute, gradients):
        from fledge.ops.elementwise import silu_mul

        g, u = x @ gate.T, x @ up.T
        # not save_for_backward: under activation checkpointing it returns copies of the weights without `.grad`
        ctx.weights, ctx.gradients = (gate, up, down), gradients
        ctx.save_for_backward(x, *(() if recompute else (g, u)))
        return torch.addmm(residual, silu_mul(g, u), down.T)

    @staticmethod
    def backward(ctx, dy):
        from fledge.ops.elementwise import silu_mul_backward_

        x, *saved = ctx.saved_tensors
        gate, up, down = ctx.weights
        g, u = saved or (x @ gate.T, x @ up.T)
        dg, du, a = silu_mul_backward_(g, u, dy @ down)
        dweights = []
        for weight, dout, inp in ((gate, dg, x), (up, du, x), (down, dy, a)):
            if ctx.gradients is not None:
                ctx.gradients.add_product(weight, dout, inp)
            dweights.append(dout.T @ inp if ctx.gradients is None and weight.requires_grad else None)
        return (dg @ gate).addmm_(du, up), *dweights, dy, None, None
