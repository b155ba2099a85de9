"""How hidden states are rounded on disk.

`float32`, `bfloat16` and `float16` are those dtypes. `fp8` is for the captured layers only: with s = max_d |x_d| / 448
for each token and layer (float32; 1 if all x are 0), it keeps x / s as float8_e4m3fn, whose largest value is 448, and
s. The final hidden states, whose products with the head are the soft targets, are then bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.types import Features

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class Precision:
    """The dtypes on disk of the captured layers' states and of the final states."""

    layers: torch.dtype
    last: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether the layers' states have a scale for each token and layer."""
        return self.layers == FP8


PRECISIONS = {
    "float32": Precision(torch.float32, torch.float32),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16),
    "float16": Precision(torch.float16, torch.float16),
    "fp8": Precision(FP8, torch.bfloat16),
}


def encode_layers(states_TAD: Tensor, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """Finite states as they are stored: [T, A, D] in `precision.layers`, and scales, float32 [T, A], if there are any.

    States beyond the range of float16 become infinite; the other precisions have the range of float32.
    """
    if not precision.scaled:
        return states_TAD.to(precision.layers), None
    states_TAD = states_TAD.float()
    scale_TA = states_TAD.abs().amax(-1) * (1 / FP8_MAX)  # GPUs would round the quotient otherwise than CPUs
    # also where the largest state is so small that its scale is zero: the states then become zeros
    scale_TA = torch.where(scale_TA > 0, scale_TA, 1.0)
    return (states_TAD / scale_TA[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale_TA


def decode_layers(
    stored_TLD: Tensor, scale_TL: Tensor | None, out_TAD: Tensor, columns: Sequence[int] | None = None
) -> None:  # fmt: skip
    """Writes the stored states of L layers, or of A of them (`columns`), into `out_TAD`, whose dtype is the dtype of
    computation. Products with scales are float32; one layer at a time, so that they take little memory."""
    for i, column in enumerate(range(stored_TLD.shape[1]) if columns is None else columns):
        states_TD = stored_TLD[:, column]
        if scale_TL is None:
            out_TAD[:, i] = states_TD
        else:  # `out` rounds the products without another pass over them
            torch.mul(states_TD.float(), scale_TL[:, column, None], out=out_TAD[:, i])


def round_features(features: Features, precision: Precision) -> Features:
    """The features as they come back from the disk, in their dtype and on their device."""
    aux_TAD = torch.empty_like(features.aux_TAD)
    decode_layers(*encode_layers(features.aux_TAD, precision), aux_TAD)
    return Features(aux_TAD, features.last_TD.to(precision.last).to(features.last_TD.dtype))
