"""Copies of weights in the layout of oneDNN's products, for verifying drafts and reading prompts in float32 on an x86
CPU.

A product of a few rows with a weight in PyTorch's layout takes much longer than reading the weight; with a packed copy
it takes about as long (bench/small_rows.py). Verification multiplies a few rows, decoding without a draft only one. On
AMD's CPUs, the many rows of a prompt are faster with the copy too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from fledge.kernels.processor import is_intel, is_x86

MOST_BYTES = 2 << 30  # of the copies of a model's weights
# Compromises, chosen by the times of whole rounds too. Few rows of smaller weights are not much faster with the copy,
# and where passes of one row and of a few alternate, both copies would compete for the CPU's caches. One and two rows
# are about as fast without the copy, on Intel's CPUs three rows too.
LEAST_ELEMENTS = 1 << 18
LEAST_ROWS = 4 if is_intel() else 3
MANY_ROWS = None if is_intel() else 9  # from which on smaller weights are faster with the copy too; None: never
ROWS = 8  # for which the layout is chosen
SAMPLES = 64  # numbers of a weight that tell whether it has changed


@functools.cache
def has_packed_products() -> bool:
    """Whether this build of PyTorch has oneDNN's products with packed weights, and the CPU is one that they suit."""
    return (
        is_x86()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether all of these weights can be packed, and their copies take little memory."""
    weights = list(weights)
    if not has_packed_products() or any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
        return False
    return sum(w.numel() * w.element_size() for w in weights) <= MOST_BYTES


def least_rows(weight_OI: Tensor) -> int | None:
    """The number of rows from which on the product with a weight is faster with a packed copy; None: it never is."""
    return LEAST_ROWS if weight_OI.numel() >= LEAST_ELEMENTS else MANY_ROWS


def pack(weight_OI: Tensor) -> Tensor:
    """An alias of a weight that has the packed copy; the weight itself if the copy would not be used. The copy does not
    follow later changes of the weight."""
    if least_rows(weight_OI) is None:
        return weight_OI
    alias = weight_OI.detach()
    alias.packed_copy = torch.ops.mkldnn._reorder_linear_weight(alias.contiguous(), ROWS)
    return alias


def fingerprint(weights: Iterable[Tensor], parameters: Iterable[Tensor]) -> tuple[list[int], list[int], bytes]:
    """Of those of the weights that `pack` copies: what differs after they have changed. `parameters` are those that the
    weights consist of, which count their changes in place themselves. Writes through `.data` are seen if they change
    one of SAMPLES numbers of a weight that are spread over it."""
    copied = [w.detach() for w in weights if least_rows(w) is not None]
    samples = [w.flatten()[:: w.numel() // SAMPLES or 1][:SAMPLES] for w in copied]
    numbers = torch.cat(samples).numpy().tobytes() if samples else b""
    return [w.data_ptr() for w in copied], [_version(w) for w in (*copied, *parameters)], numbers


def _version(weight: Tensor) -> int:
    """The number of operations that have changed a tensor in place; 0 for one that counts none, as one that was made
    in inference mode."""
    try:
        return weight._version
    except RuntimeError:
        return 0


def packed_copy(weight_OI: Tensor, rows: int) -> Tensor | None:
    """The packed copy of a weight for `packed_linear` of so many rows; None if it has none, for rows that are faster
    without, and if gradients are asked for."""
    least = least_rows(weight_OI)
    if least is None or rows < least or torch.is_grad_enabled():
        return None
    return getattr(weight_OI, "packed_copy", None)


def packed_linear(x: Tensor, copy: Tensor, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + b, from [..., I] to [..., O], contiguous."""
    bias = None if bias_O is None else bias_O.contiguous()  # the operation ignores strides
    return torch.ops.mkldnn._linear_pointwise.default(x, copy, bias, "none", [], "")
