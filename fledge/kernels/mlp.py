"""down(silu(gate x) * up x), the SwiGLU MLP of Llama, computed so that less is held for the backward pass.

    g = x Wg', u = x Wu', a = silu(g) u, y = a Wd'

    da = dy Wd,   dg = da u σ(g) (1 + g (1 - σ(g))),   du = da silu(g),   dx = dg Wg + du Wu

The fused version saves x, g and u (with `recompute` x alone) and computes a again; dg, du and a take the memory of g,
u and da.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.gradients import GradientSums


def swiglu_reference(x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, residual: Tensor) -> Tensor:
    """The definition: residual + the MLP of x, all [S, E]."""
    return residual + F.linear(F.silu(F.linear(x, gate_IE)) * F.linear(x, up_IE), down_EI)


def swiglu(
    x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, residual: Tensor, *, recompute: bool = False,
    gradients: GradientSums | None = None,
) -> Tensor:  # fmt: skip
    """`swiglu_reference` by Triton kernels, on a GPU or in Triton's interpreter. With `gradients` the weights'
    gradients are added there (the weights must be leaves); without, autograd receives them."""
    return _SwiGLU.apply(x, gate_IE, up_IE, down_EI, residual, recompute, gradients)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, residual, recompute, gradients):
        from fledge.kernels.elementwise import silu_times

        g, u = x @ gate.T, x @ up.T
        # the weights themselves: what torch saves for a checkpointed pass are copies without `.grad`
        ctx.weights, ctx.gradients = (gate, up, down), gradients
        ctx.save_for_backward(x, *(() if recompute else (g, u)))
        return torch.addmm(residual, silu_times(g, u), down.T)

    @staticmethod
    def backward(ctx, dy):
        from fledge.kernels.elementwise import silu_times_backward_

        x, *saved = ctx.saved_tensors
        gate, up, down = ctx.weights
        g, u = saved or (x @ gate.T, x @ up.T)
        dg, du, a = silu_times_backward_(g, u, dy @ down)
        dweights = []
        for weight, of_output, of_input in ((gate, dg, x), (up, du, x), (down, dy, a)):
            if ctx.gradients is not None:
                ctx.gradients.add_product(weight, of_output, of_input)
            dweights.append(of_output.T @ of_input if ctx.gradients is None and weight.requires_grad else None)
        return (dg @ gate).addmm_(du, up), *dweights, dy, None, None
