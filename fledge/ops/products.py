"""Matrix products of few rows, fused with what stands before and after them in a decoder layer; no gradients.

With a few rows, a product takes as long as its weights are read. The kernels read each weight once, and neither the
norm before a product nor the activation or sum after it has a launch of its own. With more than FEW_ROWS rows, where
each program would spend time on the norm of all rows, the product before it computes the norm (`linear_add_norm`). For
more than `most_rows` rows and on a CPU, the definitions apply: the fused small operations of `ops.layer`, and the
products of the platform's library or, on a CPU, `strided_linear`.

In the kernels, a row of the result does not depend on the other rows, bit by bit, nor on their number among 1 to 8,
among 9 to FEW_ROWS, among 17 to 32, and among those above. Calls with equal arguments have equal results. The kernels
accumulate in float32 and round each output once; the definitions round in between, and on a CPU their results may be
strided. On GPUs from compute capability 9 on, a kernel reads weights before the previous kernel has ended: the previous
kernel must not write a weight.

Axes beyond the legend in `fledge.types`: I inputs and O outputs of a product, E width of the norm, F width of the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.device import chosen, use_triton
from fledge.ops.layer import add_rms_norm, rms_norm, silu_mul_fused
from fledge.ops.linear import linear, strided_linear

FEW_ROWS = 16  # up to this number, a product computes the norm of its rows itself
MOST_ROWS = 64  # for more, the products of a library cost little more than reading the weights


def most_rows(O: int, dtype: torch.dtype) -> int:
    """The number of rows up to which the kernels are chosen for a weight of O outputs; at most MOST_ROWS."""
    if dtype == torch.float32:
        return FEW_ROWS
    return FEW_ROWS if 4096 < O < 12288 else MOST_ROWS  # with more, cuBLAS is faster there


def _few(x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether the kernels compute a product of x."""
    return use_triton(x_MI) and (chosen() or x_MI.shape[0] <= most_rows(weight_OI.shape[0], x_MI.dtype))


def plain_linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, [M, O] in the dtype of x."""
    if _few(x_MI, weight_OI):
        from fledge.ops.products_triton import product

        return product(x_MI, weight_OI, bias_O)
    return linear(x_MI, weight_OI, bias_O)


def linear_add(x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """residual + x Wᵀ + b, [M, O] in the dtype of x."""
    if _few(x_MI, weight_OI):
        from fledge.ops.products_triton import product

        return product(x_MI, weight_OI, bias_O, residual_MO=residual_MO)
    return strided_linear(x_MI, weight_OI, bias_O, residual_MO)


def linear_add_norm(
    x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, gain_O: Tensor, eps: float, bias_O: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`linear_add`, and the norm of its result, y / rms(y) * gain, [M, O], for the product that reads both: with many
    rows, that product would take longer if it computed the norm. None where it would not, which is with up to FEW_ROWS
    rows in the kernels."""
    if _few(x_MI, weight_OI):
        from fledge.ops.products_triton import product, product_norm

        if x_MI.shape[0] <= FEW_ROWS:
            return product(x_MI, weight_OI, bias_O, residual_MO=residual_MO), None
        return product_norm(x_MI, weight_OI, bias_O, residual_MO, gain_O, eps)
    if x_MI.is_cuda:
        normed_MO, sum_MO = add_rms_norm(strided_linear(x_MI, weight_OI, bias_O), residual_MO, gain_O, eps)
        return sum_MO, normed_MO
    sum_MO = strided_linear(x_MI, weight_OI, bias_O, residual_MO)
    return sum_MO, rms_norm(sum_MO, gain_O, eps)


def norm_linear(
    x_ME: Tensor, gain_E: Tensor, eps: float, weight_OE: Tensor, bias_O: Tensor | None = None, *,
    normed_ME: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(x / rms(x) * gain) Wᵀ + b, [M, O] in the dtype of x, where rms(x)² is the mean of x² plus eps.

    The kernel multiplies the weights by x * gain, rounded to the dtype, and divides the products by rms(x). In float16,
    x * gain must therefore be less than 65,504. `normed_ME` is x / rms(x) * gain where it is known, as by
    `linear_add_norm`: its product is computed, and x is not read.
    """
    if _few(x_ME, weight_OE):
        return _norm_product(x_ME, gain_E, eps, weight_OE, bias_O, normed_ME)
    normed_ME = add_rms_norm(x_ME, None, gain_E, eps)[0] if normed_ME is None else normed_ME
    return strided_linear(normed_ME, weight_OE, bias_O)


def norm_swiglu(
    x_ME: Tensor, gain_E: Tensor, eps: float, gate_up_2FxE: Tensor, bias_2F: Tensor | None = None, *,
    normed_ME: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """silu(gate) * up, [M, F], where [gate ; up] is `norm_linear` of the fused weight, which has the gate's rows
    first."""
    if _few(x_ME, gate_up_2FxE):
        return _norm_product(x_ME, gain_E, eps, gate_up_2FxE, bias_2F, normed_ME, gated=True)
    normed_ME = add_rms_norm(x_ME, None, gain_E, eps)[0] if normed_ME is None else normed_ME
    gate_up = strided_linear(normed_ME, gate_up_2FxE, bias_2F)
    if x_ME.is_cuda:
        return silu_mul_fused(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _norm_product(
    x_ME: Tensor, gain_E: Tensor, eps: float, weight_RE: Tensor, bias_R: Tensor | None, normed_ME: Tensor | None,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    from fledge.ops.products_triton import product

    if normed_ME is not None:
        return product(normed_ME, weight_RE, bias_R, gated=gated)
    return product(x_ME, weight_RE, bias_R, gain_I=gain_E, eps=eps, gated=gated)
