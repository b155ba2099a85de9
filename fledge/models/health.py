"""Whether a draft's weights can say anything: what no training leaves behind, found in one pass over them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from fledge.fields import shortened

LARGEST = 1e5  # trained weights are far below; in float16 nothing is larger than 65,504
SMALLEST = 1e-12  # of a tensor's largest value
NAMED = 3  # tensors that a finding names


def findings(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """What is wrong with weights of floating point, in words, each with the names of the tensors; usually nothing.

    Looked for are NaN and infinite values, tensors of zeros (but for biases and P-EAGLE's `mask_hidden`, which may be),
    and values so large that they can only be damage.
    """
    broken, empty, huge = [], [], []
    for name, tensor in tensors:
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        low, high = (float(x) for x in tensor.aminmax())  # NaN if one value is
        largest = max(-low, high)
        if not math.isfinite(low) or not math.isfinite(high):
            broken.append(name)
        elif largest > LARGEST:
            huge.append(name)
        elif largest < SMALLEST and not name.endswith(".bias") and name != "mask_hidden":
            empty.append(name)
    kinds = (broken, "NaN or infinite values"), (empty, "nothing but zeros"), (huge, f"values beyond {LARGEST:,.0f}")
    return [f"{_named(names)} {'holds' if len(names) == 1 else 'hold'} {what}" for names, what in kinds if names]


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(shortened, names[:NAMED])) + more
