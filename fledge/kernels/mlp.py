"""down(silu(gate x) * up x), the SwiGLU of Llama, and a way of it that holds less.

    g = x Wg', u = x Wu', a = silu(g) u, y = a Wd'

    da = dy Wd,   dg = da u σ(g) (1 + g (1 - σ(g))),   du = da silu(g),   dx = dg Wg + du Wu

"triton" saves x, g and u (with `recompute` x alone) and makes a again; g, u and da make place for dg, du and a. It
adds the weights' gradients to theirs, which must be leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.linear import add_gradient


def swiglu_mlp(
    x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, onto: Tensor, *, impl: str, recompute: bool = False
) -> Tensor:
    """onto + the MLP without biases of x, all [S, E]. "triton" needs a GPU, or Triton's interpreter."""
    if impl == "triton":
        return _SwiGLU.apply(x, gate_IE, up_IE, down_EI, onto, recompute)
    return onto + F.linear(F.silu(F.linear(x, gate_IE)) * F.linear(x, up_IE), down_EI)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, onto, recompute):
        from fledge.kernels.elementwise import silu_times

        g, u = x @ gate.T, x @ up.T
        ctx.weights = gate, up, down  # themselves: what torch saves for a checkpointed pass are copies without `grad`
        ctx.save_for_backward(x, *(() if recompute else (g, u)))
        return torch.addmm(onto, silu_times(g, u), down.T)

    @staticmethod
    def backward(ctx, dy):
        from fledge.kernels.elementwise import silu_times_backward_

        x, *made = ctx.saved_tensors
        gate, up, down = ctx.weights
        g, u = made or (x @ gate.T, x @ up.T)
        dg, du, a = silu_times_backward_(g, u, dy @ down)
        for weight, of_output, of_input in ((down, dy, a), (gate, dg, x), (up, du, x)):
            add_gradient(weight, of_output, of_input)
        return (dg @ gate).addmm_(du, up), None, None, None, dy, None
