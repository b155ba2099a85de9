"""Mixtures of experts: each row goes through a few of many gated MLPs, which a router chooses for it; no gradients.

    p = softmax(logits),   C the experts of the largest p,   w_c = p_c, divided by the sum of the w_c if `normalized`

    out = residual + sum over c in C of w_c down_c (silu(gate_c y) * up_c y),   y = x / rms(x) * gain

as in Mixtral (arXiv:2401.04088) and Qwen's mixtures. With few rows, the time is that of reading the weights of the
experts that some row has chosen. The kernels read each of these once, however many rows have chosen it, in grids that
depend on shapes alone, and wait for nothing: a CUDA graph of a call may be replayed with rows that choose others. For
many rows, the definition applies; its products are torch's grouped ones where these wait for nothing either.

`impl` is "definition", "triton" (a GPU or Triton's interpreter; any number of rows) or None: "triton" on a GPU for
numbers of up to 32 bits, unless grouped products are faster. Other names raise ValueError, and so do tensors whose
shapes or dtypes do not belong together. Calls with equal arguments have equal results. In the kernels, a row of the
result does not depend on the other rows, bit by bit, nor on their number among 1 to 8, and among those up to MOST_ROWS.

Axes beyond the legend in `fledge.types`: X experts, C chosen experts of a row, P = M C pairs of a row and one of its
experts (pair m C + c), F width of an expert, S slots.
"""

from __future__ import annotations

from torch import Tensor

from fledge.kernels.experts import definition
from fledge.kernels.experts.routing import Routing
from fledge.kernels.few_rows import MOST_ROWS
from fledge.kernels.implementations import IMPLS, use_triton

__all__ = ["IMPLS", "MOST_ROUTED", "MOST_ROWS", "Routing", "experts", "route"]

MOST_ROUTED = 8192  # logits, padded to powers of 2, that the one program of `route` holds


def route(logits_MX: Tensor, chosen: int, normalized: bool, *, impl: str | None = None) -> Routing:
    """The experts of each row, their weights, and the rows of each expert.

    Probabilities are computed in at least float32. Of equal logits, "triton" chooses the first expert, which
    "definition" leaves open. More than MOST_ROUTED logits take the definition in any case. Raises ValueError unless
    1 <= chosen <= X.
    """
    M, X = logits_MX.shape
    if not 1 <= chosen <= X:
        raise ValueError(f"a row cannot choose {chosen} of {X} experts")
    if use_triton(impl, logits_MX) and _power_of_2(M) * _power_of_2(X) <= MOST_ROUTED:
        from fledge.kernels.experts.triton import route_triton

        return route_triton(logits_MX, chosen, normalized)
    return definition.route(logits_MX, chosen, normalized)


def experts(
    x_ME: Tensor,
    gain_E: Tensor,
    eps: float,
    routing: Routing,
    gate_up_XOE: Tensor,
    down_XEF: Tensor,
    residual_ME: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """The sum of the rows' experts plus a residual, [M, E] in the dtype of x. `gate_up_XOE` has the gates' F rows
    first, O = 2 F; rows of the weights are contiguous. The kernels round the products of gate and up, and the sum."""
    (M, E), (X, O, _), F = x_ME.shape, gate_up_XOE.shape, down_XEF.shape[2]
    shapes = gate_up_XOE.shape == (X, 2 * F, E) and down_XEF.shape == (X, E, F) and residual_ME.shape == (M, E)
    if not shapes or gain_E.shape != (E,) or routing.weight_MC.shape[0] != M or routing.end_X.shape != (X,):
        raise ValueError(
            f"rows {tuple(x_ME.shape)}, gain {tuple(gain_E.shape)}, residual {tuple(residual_ME.shape)} and "
            f"{routing.end_X.numel()} experts for {routing.weight_MC.shape[0]} rows do not belong with weights "
            f"{tuple(gate_up_XOE.shape)} and {tuple(down_XEF.shape)}"
        )
    dtypes = {x.dtype for x in (x_ME, gain_E, gate_up_XOE, down_XEF, residual_ME)}
    if len(dtypes) > 1:
        raise ValueError(f"the tensors of experts must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    arguments = x_ME, gain_E, eps, routing, gate_up_XOE, down_XEF, residual_ME
    if use_triton(impl, x_ME) and (impl is not None or M <= MOST_ROWS or not definition.grouped(x_ME, E, O, F)):
        from fledge.kernels.experts.triton import experts_triton

        return experts_triton(*arguments)
    return definition.experts(*arguments)


def _power_of_2(n: int) -> int:
    """The least power of 2 that is not less."""
    return 1 << max(n - 1, 0).bit_length()
