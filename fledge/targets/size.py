"""The bytes of a target's weights on one rank, and errors for want of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fledge.targets.transformers import TransformersTarget


@dataclass(frozen=True)
class TargetBytes:
    """The bytes of a target's weights: of its layers together, of the largest layer, and of the rest (embedding, final
    norm and head), which every rank has whole."""

    layers: int
    largest: int
    rest: int

    @property
    def whole(self) -> int:
        return self.layers + self.rest

    def on_rank(self, shards: int) -> int:
        """The bytes on each of the ranks that share the layers: while one computes, the next one is gathered."""
        return self.whole if shards == 1 else -(-self.layers // shards) + 2 * self.largest + self.rest


def target_bytes(target: TransformersTarget) -> TargetBytes:
    """The sizes of a target, which may be on the meta device. Raises ValueError if its layers cannot be identified."""
    sizes = [model_bytes(layer) for layer in target.layers]
    return TargetBytes(sum(sizes), max(sizes), model_bytes(target.model) - sum(sizes))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is that a GPU or the machine has not enough memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # without a class of its own: the CPU's allocator, and a GPU without room for the process itself
    words = ("out of memory", "can't allocate memory")
    if isinstance(error, RuntimeError) and any(w in str(error) for w in words):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)


def model_bytes(module: nn.Module) -> int:
    """The bytes of all parameters, also of those on the meta device."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
