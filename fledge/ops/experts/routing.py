"""Which experts compute which rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of M rows. Pair m C + c is row m with the c-th of its C experts.

    `weight_MC` are the experts' weights (float32, or float64 as the logits), `order_P` the pairs by expert, those of
    one expert in ascending order, and `end_X` the end of each expert's pairs in `order_P`. `slot_S` are different
    experts, all that have pairs among them; -1: none. All but the weights are int32.
    """

    weight_MC: Tensor
    order_P: Tensor
    end_X: Tensor
    slot_S: Tensor
