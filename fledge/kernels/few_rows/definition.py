"""Products of few rows in plain torch, with the fused small operations of `fledge.kernels.decode_layer`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.decode_layer import add_rms_norm, silu_mul_fused
from fledge.kernels.decode_layer.definition import rms_norm
from fledge.kernels.linear import linear, strided_linear


def norm_linear(
    x_ME: Tensor, gain_E: Tensor, eps: float, weight_OE: Tensor, bias_O: Tensor | None, normed_ME: Tensor | None
) -> Tensor:
    return strided_linear(_norm(x_ME, gain_E, eps) if normed_ME is None else normed_ME, weight_OE, bias_O)


def linear_add(x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, bias_O: Tensor | None) -> Tensor:
    return strided_linear(x_MI, weight_OI, bias_O, residual_MO)


def linear_add_norm(
    x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, gain_O: Tensor, eps: float, bias_O: Tensor | None
) -> tuple[Tensor, Tensor]:
    if x_MI.is_cuda:
        normed_MO, sum_MO = add_rms_norm(strided_linear(x_MI, weight_OI, bias_O), residual_MO, gain_O, eps)
        return sum_MO, normed_MO
    sum_MO = linear_add(x_MI, weight_OI, residual_MO, bias_O)
    return sum_MO, rms_norm(sum_MO, gain_O, eps)


def norm_swiglu(
    x_ME: Tensor, gain_E: Tensor, eps: float, gate_up_2FxE: Tensor, bias_2F: Tensor | None, normed_ME: Tensor | None
) -> Tensor:
    gate_up = norm_linear(x_ME, gain_E, eps, gate_up_2FxE, bias_2F, normed_ME)
    if x_ME.is_cuda:
        return silu_mul_fused(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def plain_linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return linear(x_MI, weight_OI, bias_O)


def _norm(x_ME: Tensor, gain_E: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows. On a GPU it is one kernel, where plain torch launches several. A CPU has plain torch only, which
    is called directly: for a few rows, each further call costs time."""
    return add_rms_norm(x_ME, None, gain_E, eps)[0] if x_ME.is_cuda else rms_norm(x_ME, gain_E, eps)
