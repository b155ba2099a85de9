"""The parts of a target that training reads beside its hidden states, for ranks on which the target does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, broadcast

from fledge.targets.loading import load_target
from fledge.targets.transformers import TransformersTarget

EMBEDDING, HEAD, BIAS, LAST = "embedding", "head", "head bias", "last layer "

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each part


class TargetParts(TransformersTarget):
    """A target of which only the embedding, the head and the weights of the last layer are there. It has the properties
    and `logits` of the whole target, and cannot run."""

    def __init__(self, model: nn.Module, tokenizer: Any, last_layer: dict[str, Tensor], **options: Any):
        super().__init__(model, tokenizer, **options)
        self._last_layer = last_layer

    def last_layer_weights(self) -> dict[str, Tensor]:
        return self._last_layer


def parts_of(target: TransformersTarget) -> dict[str, Tensor]:
    """The parts of a target by name; of tied weights, the embedding alone. All ranks that share the target call it."""
    parts = {EMBEDDING: target.embedding}
    if target.head_weight is not target.embedding:
        parts[HEAD] = target.head_weight
    if (bias := getattr(target.head, "bias", None)) is not None:
        parts[BIAS] = bias
    parts |= {LAST + name: weight for name, weight in target.last_layer_weights().items()}
    return {name: x.detach().to(target.device).contiguous() for name, x in parts.items()}


def layout_of(parts: dict[str, Tensor]) -> Layout:
    return {name: (tuple(x.shape), x.dtype) for name, x in parts.items()}


def send_parts(parts: dict[str, Tensor], source: int, group: ProcessGroup) -> None:
    """Sends the parts from rank `source` to a group, of which the others `receive_parts`."""
    for x in parts.values():
        broadcast(x, src=source, group=group)


def receive_parts(layout: Layout, source: int, group: ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """The parts that rank `source` sends."""
    parts = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}
    send_parts(parts, source, group)
    return parts


def target_of_parts(
    path: str | Path, parts: dict[str, Tensor], *, max_length: int | None = None, trust_remote_code: bool = False
) -> TargetParts:
    """A target whose config and tokenizer are read, and whose parts are given. Raises ValueError as `load_target`."""
    empty = load_target(path, max_length=max_length, trust_remote_code=trust_remote_code, weights=False)
    embedding = nn.Parameter(parts[EMBEDDING], requires_grad=False)
    empty.model.get_input_embeddings().weight = embedding
    empty.head.weight = nn.Parameter(parts[HEAD], requires_grad=False) if HEAD in parts else embedding
    if BIAS in parts:
        empty.head.bias = nn.Parameter(parts[BIAS], requires_grad=False)
    last_layer = {name.removeprefix(LAST): x for name, x in parts.items() if name.startswith(LAST)}
    return TargetParts(
        empty.model, empty.tokenizer, last_layer, name=str(path), max_length=max_length,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
