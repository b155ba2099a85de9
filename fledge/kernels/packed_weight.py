"""Weights beside which lies a copy in the layout of oneDNN's products, for verification in float32 on an x86 CPU.

With a weight as PyTorch holds it, a product of some rows takes several times as long as reading the weight: the library
packs the weight anew in each call, or uses a kernel that is made for one row (bench/small_rows.py). So verifying six
tokens took twice as long as one, where it can take almost the same.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable

import torch
from torch import Tensor

MOST_BYTES = 2 << 30  # of the copies of a model's weights
LEAST_ELEMENTS = 1 << 18  # of a weight: for smaller ones, calling the product takes longer than what it saves
LEAST_ROWS = 3  # fewer are multiplied sooner by the weight as it is
ROWS = 8  # for which the layout is chosen


@functools.cache
def has_packed_products() -> bool:
    """Whether this build of PyTorch has oneDNN's products with packed weights, and the CPU is one that they suit."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether all of these weights can be packed, and their copies take little memory."""
    weights = list(weights)
    if not has_packed_products() or any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
        return False
    return sum(w.numel() * w.element_size() for w in weights) <= MOST_BYTES


def pack(weight_OI: Tensor) -> Tensor:
    """An alias of a weight that has the packed copy; the weight itself if it is small. The copy does not follow later
    changes of the weight."""
    if weight_OI.numel() < LEAST_ELEMENTS:
        return weight_OI
    alias = weight_OI.detach()
    alias.packed_copy = torch.ops.mkldnn._reorder_linear_weight(alias.contiguous(), ROWS)
    return alias


def packed_copy(weight_OI: Tensor, rows: int) -> Tensor | None:
    """The packed copy of a weight for `packed_linear` of so many rows; None if it has none, for rows that are faster
    without, and if gradients are asked for."""
    if rows < LEAST_ROWS or (copy := getattr(weight_OI, "packed_copy", None)) is None or torch.is_grad_enabled():
        return None
    return copy


def packed_linear(x: Tensor, copy: Tensor, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + b, from [..., I] to [..., O], contiguous."""
    return torch.ops.mkldnn._linear_pointwise.default(x, copy, bias_O, "none", [], "")
