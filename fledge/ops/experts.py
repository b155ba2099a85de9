"""Mixtures of experts: each row goes through a few of many gated MLPs, which a router chooses for it; no gradients.

    p = softmax(logits),   C the experts of the largest p,   w_c = p_c, divided by the sum of the w_c if `normalized`

    out = residual + sum over c in C of w_c down_c (silu(gate_c y) * up_c y),   y = x / rms(x) * gain

as in Mixtral (arXiv:2401.04088) and Qwen's mixtures. With few rows, the cost is reading the weights of the chosen
experts. The kernels read each chosen expert once, however many rows have chosen the expert, in grids that depend on
shapes alone, and wait for nothing: a CUDA graph of a call may be replayed with rows that choose other experts. For many
rows, the definition applies, with torch's grouped products where grouped products wait for nothing either.

The kernels compute numbers of up to 32 bits on a GPU, unless grouped products are faster there. Calls with equal
arguments have equal results. In the kernels, a row of the result does not depend on the other rows, bit by bit, nor on
the number of rows among 1 to 8, and among 9 to MOST_ROWS.

Axes beyond the legend in `fledge.types`: X experts, C chosen experts of a row, P = M C pairs of a row and one of its
experts (pair m C + c), F width of an expert, S slots.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.device import at_least_float32, chosen, use_triton
from fledge.ops.layer import add_rms_norm, silu_mul_fused
from fledge.ops.linear import linear
from fledge.ops.products import MOST_ROWS

MOST_ROUTED = 8192  # logits, padded to powers of 2, that the one program of `route` holds


@dataclass(frozen=True)
class Routing:
    """The experts of M rows. Pair m C + c is row m with the c-th of its C experts.

    `weight_MC` are the experts' weights (float32, or float64 as the logits), `order_P` the pairs sorted by expert and
    then ascending, and `end_X` the end of each expert's pairs in `order_P`. `slot_S` are distinct experts, including
    all experts with pairs; -1 is an empty slot. All tensors except the weights are int32.
    """

    weight_MC: Tensor
    order_P: Tensor
    end_X: Tensor
    slot_S: Tensor


def route(logits_MX: Tensor, count: int, normalized: bool) -> Routing:
    """The experts of each row, `count` of them (1 <= C <= X), their weights, and the rows of each expert.

    Probabilities are computed in at least float32. Of equal logits, the kernel chooses the first expert, which torch
    leaves open. More than MOST_ROUTED logits take the definition in any case.
    """
    M, X = logits_MX.shape
    if use_triton(logits_MX) and _power_of_2(M) * _power_of_2(X) <= MOST_ROUTED:
        from fledge.ops.experts_triton import route_triton

        return Routing(*route_triton(logits_MX, count, normalized))
    weight_MC, expert_MC = at_least_float32(logits_MX).softmax(-1).topk(count)
    if normalized:
        weight_MC = weight_MC / weight_MC.sum(-1, keepdim=True)
    expert_P, order_P = expert_MC.flatten().sort(stable=True)
    expert_X = torch.arange(X, device=logits_MX.device)
    end_X = torch.searchsorted(expert_P, expert_X, right=True, out_int32=True)
    return Routing(weight_MC, order_P.int(), end_X, expert_X.int())


def experts(
    x_ME: Tensor, gain_E: Tensor, eps: float, routing: Routing, gate_up_XOE: Tensor, down_XEF: Tensor,
    residual_ME: Tensor,
) -> Tensor:  # fmt: skip
    """The sum of the rows' experts plus a residual, [M, E] in the dtype of x. `gate_up_XOE` has the gates' F rows
    first, O = 2 F; rows of the weights are contiguous. The kernels round the products of gate and up, and the sum."""
    (M, E), O, width = x_ME.shape, gate_up_XOE.shape[1], down_XEF.shape[2]
    if use_triton(x_ME) and (chosen() or M <= MOST_ROWS or not _grouped(x_ME, E, O, width)):
        from fledge.ops.experts_triton import experts_triton

        return experts_triton(x_ME, gain_E, eps, routing, gate_up_XOE, down_XEF, residual_ME)
    C, order_P = routing.weight_MC.shape[1], routing.order_P.long()
    rows_PE = add_rms_norm(x_ME, None, gain_E, eps)[0][order_P // C]
    activated_PF = silu_mul_fused(_products(rows_PE, gate_up_XOE, routing.end_X))
    found_PE = _products(activated_PF, down_XEF, routing.end_X)
    by_row_PE = torch.empty_like(found_PE).index_copy_(0, order_P, found_PE)
    weight_M1C = routing.weight_MC[:, None].to(x_ME.dtype)
    return torch.baddbmm(residual_ME[:, None], weight_M1C, by_row_PE.view(M, C, E))[:, 0]


def _power_of_2(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _products(x_PI: Tensor, weight_XOI: Tensor, end_X: Tensor) -> Tensor:
    """The products [P, O] of rows, sorted by expert, with their experts' weights."""
    if _grouped(x_PI, *weight_XOI.shape[1:]):
        return F.grouped_mm(x_PI, weight_XOI.transpose(1, 2), offs=end_X)
    out_PO, begin = x_PI.new_empty(x_PI.shape[0], weight_XOI.shape[1]), 0
    for weight_OI, end in zip(weight_XOI, end_X.tolist(), strict=True):
        if end > begin:
            out_PO[begin:end] = linear(x_PI[begin:end], weight_OI)
        begin = end
    return out_PO


def _grouped(x: Tensor, *widths: int) -> bool:
    """Whether torch has a grouped product for `x` that waits for nothing: bfloat16 on GPUs of compute capability 9 and
    10, with widths of multiples of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(n % 8 for n in widths) and _has_grouped(x.device)


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
