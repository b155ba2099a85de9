"""The source of the trainer's features and teacher logits."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from fledge.types import Features, Packed

if TYPE_CHECKING:
    from fledge.targets.interface import TrainingTarget

RowIterator = Generator[Packed, None, None]


class FeatureSource(Protocol):
    """Provides the features and teacher logits of training rows: a target in memory, or features on disk."""

    def features(self, row: Packed) -> Features:
        """The features of a packed row, with the layers that the draft reads."""

    def logits(self, last_ND: Tensor) -> Tensor:
        """The target's logits [N, V] from final hidden states [N, D]."""

    def ahead(self, rows: RowIterator) -> RowIterator:
        """The same rows. A source that reads a disk starts reading a row before it is asked for its features, and ends
        when the generator is closed, which the caller has to do."""


@dataclass(frozen=True)
class LiveFeatures:
    """Features of the given layers, computed by a target on demand. Raises ValueError if the target's logits cannot be
    computed from its final hidden states (`TrainingTarget.check_logits`)."""

    target: TrainingTarget
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        self.target.check_logits()

    def features(self, row: Packed) -> Features:
        return self.target.features(row, self.layers)

    def logits(self, last_ND: Tensor) -> Tensor:
        return self.target.logits(last_ND)

    def ahead(self, rows: RowIterator) -> RowIterator:
        return rows
