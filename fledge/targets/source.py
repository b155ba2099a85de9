"""Where the trainer gets features and the teacher's logits from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fledge.targets.interface import TrainingTarget
from fledge.types import Features, Packed


class FeatureSource(Protocol):
    """Where the trainer gets a row's features and the teacher's logits: a live target, or features kept on disk."""

    def features(self, row: Packed) -> Features:
        """Features of a packed row, of the layers that the draft reads."""

    def logits(self, last_ND: Tensor) -> Tensor:
        """The target's logits [N, V] from final hidden states."""


@dataclass(frozen=True)
class LiveFeatures:
    """The features of the layers named, computed by the target when they are asked for. Raises ValueError where the
    target's logits cannot be computed from them (`TrainingTarget.check_logits`)."""

    target: TrainingTarget
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        self.target.check_logits()

    def features(self, row: Packed) -> Features:
        return self.target.features(row, self.layers)

    def logits(self, last_ND: Tensor) -> Tensor:
        return self.target.logits(last_ND)
