"""Mixtures of experts in plain torch: rows sorted by expert, and a product for each expert."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.decode_layer import add_rms_norm, silu_mul_fused
from fledge.kernels.experts.routing import Routing
from fledge.kernels.linear import linear
from fledge.kernels.precision import at_least_float32


def route(logits_MX: Tensor, chosen: int, normalized: bool) -> Routing:
    weight_MC, expert_MC = at_least_float32(logits_MX).softmax(-1).topk(chosen)
    if normalized:
        weight_MC = weight_MC / weight_MC.sum(-1, keepdim=True)
    expert_P, order_P = expert_MC.flatten().sort(stable=True)
    expert_X = torch.arange(logits_MX.shape[1], device=logits_MX.device)
    end_X = torch.searchsorted(expert_P, expert_X, right=True, out_int32=True)
    return Routing(weight_MC, order_P.int(), end_X, expert_X.int())


def experts(
    x_ME: Tensor, gain_E: Tensor, eps: float, routing: Routing, gate_up_XOE: Tensor, down_XEF: Tensor,
    residual_ME: Tensor,
) -> Tensor:  # fmt: skip
    (M, E), C, order_P = x_ME.shape, routing.weight_MC.shape[1], routing.order_P.long()
    rows_PE = add_rms_norm(x_ME, None, gain_E, eps)[0][order_P // C]
    activated_PF = silu_mul_fused(_products(rows_PE, gate_up_XOE, routing.end_X))
    found_PE = _products(activated_PF, down_XEF, routing.end_X)
    by_row_PE = torch.empty_like(found_PE).index_copy_(0, order_P, found_PE)
    weight_M1C = routing.weight_MC[:, None].to(x_ME.dtype)
    return torch.baddbmm(residual_ME[:, None], weight_M1C, by_row_PE.view(M, C, E))[:, 0]


def _products(x_PI: Tensor, weight_XOI: Tensor, end_X: Tensor) -> Tensor:
    """The products [P, O] of rows, sorted by expert, with their experts' weights."""
    if grouped(x_PI, *weight_XOI.shape[1:]):
        return F.grouped_mm(x_PI, weight_XOI.transpose(1, 2), offs=end_X)
    out_PO, begin = x_PI.new_empty(x_PI.shape[0], weight_XOI.shape[1]), 0
    for weight_OI, end in zip(weight_XOI, end_X.tolist(), strict=True):
        if end > begin:
            out_PO[begin:end] = linear(x_PI[begin:end], weight_OI)
        begin = end
    return out_PO


def grouped(x: Tensor, *widths: int) -> bool:
    """Whether torch has a grouped product of such rows that waits for nothing: bfloat16 on GPUs of compute capability 9
    and 10, with widths of multiples of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(n % 8 for n in widths) and _has_grouped(x.device)


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
