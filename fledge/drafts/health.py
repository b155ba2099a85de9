"""Detects damaged draft weights: values that training does not produce."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from fledge.io.fields import shortened

MAX_VALUE = 1e5  # trained weights are far smaller; float16 ends at 65,504
ZERO = 1e-12  # a tensor counts as zero if all its values are smaller in magnitude
MAX_NAMES = 3  # tensor names in a message


def find_damage(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Checks (name, tensor) pairs, and returns one message for each kind of damage found, with the tensors' names.

    Damage is a NaN or infinite value, a value above MAX_VALUE, or a tensor of zeros. Biases and P-EAGLE's `mask_hidden`
    may be zero. Integer tensors are not checked; floating-point tensors need a dtype of 16 bits or more.
    """
    nonfinite, zero, huge = [], [], []
    for name, tensor in tensors:
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        low, high = (float(x) for x in tensor.aminmax())  # NaN if any value is NaN
        largest = max(-low, high)
        if not math.isfinite(low) or not math.isfinite(high):
            nonfinite.append(name)
        elif largest > MAX_VALUE:
            huge.append(name)
        elif largest < ZERO and not name.endswith(".bias") and name != "mask_hidden":
            zero.append(name)
    kinds = (nonfinite, "NaN or infinite values"), (zero, "only zeros"), (huge, f"values above {MAX_VALUE:,.0f}")
    return [f"{_join(names)} {'has' if len(names) == 1 else 'have'} {what}" for names, what in kinds if names]


def _join(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(shortened, names[:MAX_NAMES])) + more
