"""Matrix products of few rows, fused with what stands before and after them in a decoder layer; no gradients.

With a few rows, a product takes as long as its weights are read. The kernels read each weight once, and neither the
norm before a product nor the activation or sum after it has a launch of its own. With more than FEW_ROWS rows, where
each program would spend time on the norm of all rows, the product before it computes the norm (`linear_add_norm`). For
more than `tiles.most_rows` rows and on a CPU, the definitions apply: the fused small operations and the products of the
platform's library.

`impl` is "definition", "triton" (a GPU or Triton's interpreter; any number of rows, but fast for few only) or None:
"triton" on a GPU for up to `tiles.most_rows` rows of up to 32 bits, else "definition". Other names raise ValueError,
and so do tensors whose shapes or dtypes do not belong together. In the kernels, a row of the result does not depend on
the other rows, bit by bit, nor on their number among 1 to 8, among 9 to FEW_ROWS, among 17 to 32, and among those
above. Calls with equal arguments have equal results. The kernels accumulate in float32 and round each
output once; the definitions round in between, and on a CPU their results may be strided. On GPUs from compute
capability 9 on, the kernels read weights before the kernel in front of them has ended, so that a weight must not be
what that kernel writes.

Axes beyond the legend in `fledge.types`: I inputs and O outputs of a product, E width of the norm, F width of the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.decode_layer import add_rms_norm, silu_mul_fused
from fledge.ops.decode_layer.definition import rms_norm
from fledge.ops.few_rows.tiles import FEW_ROWS, MOST_ROWS, most_rows
from fledge.ops.implementations import IMPLS, use_triton
from fledge.ops.linear import linear, strided_linear

__all__ = [
    "FEW_ROWS", "IMPLS", "MOST_ROWS", "linear_add", "linear_add_norm", "norm_linear", "norm_swiglu", "plain_linear",
]  # fmt: skip


def norm_linear(
    x_ME: Tensor,
    gain_E: Tensor,
    eps: float,
    weight_OE: Tensor,
    bias_O: Tensor | None = None,
    *,
    normed_ME: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """(x / rms(x) * gain) Wᵀ + b, [M, O] in the dtype of x, where rms(x)² is the mean of x² plus eps.

    The kernel multiplies the weights by x * gain, rounded to the dtype, and divides the products by rms(x). In float16,
    x * gain must therefore be less than 65,504. `normed_ME` is x / rms(x) * gain where it is known, as by
    `linear_add_norm`: its product is computed, and x is not read.
    """
    _check(x_ME, weight_OE, bias_O, gain_E=gain_E, normed_ME=normed_ME)
    if _few(impl, x_ME, weight_OE):
        return _norm_product(x_ME, gain_E, eps, weight_OE, bias_O, normed_ME)
    return _norm_linear(x_ME, gain_E, eps, weight_OE, bias_O, normed_ME)


def linear_add(
    x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, bias_O: Tensor | None = None, *, impl: str | None = None
) -> Tensor:
    """residual + x Wᵀ + b, [M, O] in the dtype of x."""
    _check(x_MI, weight_OI, bias_O, residual_MO=residual_MO)
    if _few(impl, x_MI, weight_OI):
        from fledge.ops.few_rows.triton import product

        return product(x_MI, weight_OI, bias_O, residual_MO=residual_MO)
    return _linear_add(x_MI, weight_OI, residual_MO, bias_O)


def linear_add_norm(
    x_MI: Tensor,
    weight_OI: Tensor,
    residual_MO: Tensor,
    gain_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`linear_add`, and the norm of its result, y / rms(y) * gain, [M, O], for the product that reads both: with many
    rows, that product would take longer if it computed the norm. None where it would not, which is with up to FEW_ROWS
    rows in the kernels."""
    _check(x_MI, weight_OI, bias_O, residual_MO=residual_MO, gain_O=gain_O)
    if _few(impl, x_MI, weight_OI):
        from fledge.ops.few_rows.triton import product_norm

        return product_norm(x_MI, weight_OI, bias_O, residual_MO, gain_O, eps)
    return _linear_add_norm(x_MI, weight_OI, residual_MO, gain_O, eps, bias_O)


def norm_swiglu(
    x_ME: Tensor,
    gain_E: Tensor,
    eps: float,
    gate_up_2FxE: Tensor,
    bias_2F: Tensor | None = None,
    *,
    normed_ME: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """silu(gate) * up, [M, F], where [gate ; up] is `norm_linear` of the fused weight, which has the gate's rows first.

    Raises ValueError if the weight has an odd number of rows.
    """
    _check(x_ME, gate_up_2FxE, bias_2F, gain_E=gain_E, normed_ME=normed_ME)
    if gate_up_2FxE.shape[0] % 2:
        raise ValueError(f"gate and up have one width, so theirs cannot be {gate_up_2FxE.shape[0]} in total")
    if _few(impl, x_ME, gate_up_2FxE):
        return _norm_product(x_ME, gain_E, eps, gate_up_2FxE, bias_2F, normed_ME, gated=True)
    return _norm_swiglu(x_ME, gain_E, eps, gate_up_2FxE, bias_2F, normed_ME)


def plain_linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """x Wᵀ + b, [M, O] in the dtype of x."""
    _check(x_MI, weight_OI, bias_O)
    if _few(impl, x_MI, weight_OI):
        from fledge.ops.few_rows.triton import product

        return product(x_MI, weight_OI, bias_O)
    return linear(x_MI, weight_OI, bias_O)


def _few(impl: str | None, x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether the kernels compute a product of x."""
    return use_triton(impl, x_MI) and (impl is not None or x_MI.shape[0] <= most_rows(*weight_OI.shape, x_MI.dtype))


def _norm_product(
    x_ME: Tensor, gain_E: Tensor, eps: float, weight_RE: Tensor, bias_R: Tensor | None, normed_ME: Tensor | None,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    from fledge.ops.few_rows.triton import product

    if normed_ME is not None:
        return product(normed_ME, weight_RE, bias_R, gated=gated)
    return product(x_ME, weight_RE, bias_R, gain_I=gain_E, eps=eps, gated=gated)


def _check(
    x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gain_E: Tensor | None = None,
    residual_MO: Tensor | None = None, gain_O: Tensor | None = None, normed_ME: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises ValueError unless the tensors have the shapes of their names and one dtype."""
    (M, I), (O, columns) = x_MI.shape, weight_OI.shape
    fits = columns == I and x_MI.dtype == weight_OI.dtype
    of_input, of_output = ((gain_E, (I,)), (normed_ME, (M, I))), ((gain_O, (O,)), (residual_MO, (M, O)))
    for x, shape in ((bias_O, (O,)), *of_input, *of_output):
        fits = fits and (x is None or (x.shape == shape and x.dtype == x_MI.dtype))
    if fits:  # what follows would take as long as a small product
        return
    names = "bias", "gain", "normed rows", "gain of the result", "residual"
    others = dict(zip(names, ((bias_O, (O,)), *of_input, *of_output), strict=True))
    others = {name: (x, shape) for name, (x, shape) in others.items() if x is not None}
    if weight_OI.shape != (O, I) or any(x.shape != torch.Size(shape) for x, shape in others.values()):
        shapes = "".join(f", {name} {tuple(x.shape)}" for name, (x, _) in others.items())
        raise ValueError(f"rows {tuple(x_MI.shape)} do not belong with a weight {tuple(weight_OI.shape)}{shapes}")
    dtypes = {x.dtype for x in (x_MI, weight_OI, *(x for x, _ in others.values()))}
    if len(dtypes) > 1:
        raise ValueError(f"the tensors of a product must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")


def _norm_linear(
    x_ME: Tensor, gain_E: Tensor, eps: float, weight_OE: Tensor, bias_O: Tensor | None, normed_ME: Tensor | None
) -> Tensor:
    """`norm_linear` in plain torch."""
    return strided_linear(_norm(x_ME, gain_E, eps) if normed_ME is None else normed_ME, weight_OE, bias_O)


def _linear_add(x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, bias_O: Tensor | None) -> Tensor:
    """`linear_add` in plain torch."""
    return strided_linear(x_MI, weight_OI, bias_O, residual_MO)


def _linear_add_norm(
    x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor, gain_O: Tensor, eps: float, bias_O: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`linear_add_norm` in plain torch."""
    if x_MI.is_cuda:
        normed_MO, sum_MO = add_rms_norm(strided_linear(x_MI, weight_OI, bias_O), residual_MO, gain_O, eps)
        return sum_MO, normed_MO
    sum_MO = _linear_add(x_MI, weight_OI, residual_MO, bias_O)
    return sum_MO, rms_norm(sum_MO, gain_O, eps)


def _norm_swiglu(
    x_ME: Tensor, gain_E: Tensor, eps: float, gate_up_2FxE: Tensor, bias_2F: Tensor | None, normed_ME: Tensor | None
) -> Tensor:
    """`norm_swiglu` in plain torch."""
    gate_up = _norm_linear(x_ME, gain_E, eps, gate_up_2FxE, bias_2F, normed_ME)
    if x_ME.is_cuda:
        return silu_mul_fused(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _norm(x_ME: Tensor, gain_E: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows. On a GPU it is one kernel, where plain torch launches several. A CPU has plain torch only, which
    is called directly: for a few rows, each further call costs time."""
    return add_rms_norm(x_ME, None, gain_E, eps)[0] if x_ME.is_cuda else rms_norm(x_ME, gain_E, eps)
