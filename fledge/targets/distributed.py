"""A target on the ranks of a training run: the bytes of weights on a rank, and the target's parts on ranks that do not
run the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, broadcast

from fledge.targets.loading import load_target
from fledge.targets.parts import ModelTarget, TargetParts

EMBEDDING, HEAD, BIAS, LAST = "embedding", "head", "head bias", "last layer "

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each part


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
        """The bytes on each of the ranks that share the layers: while a layer computes, the next layer is gathered."""
        return self.whole if shards == 1 else -(-self.layers // shards) + 2 * self.largest + self.rest


def target_bytes(target: ModelTarget) -> TargetBytes:
    """The sizes of a target, which may be on the meta device. Raises ValueError if the layers cannot be identified."""
    sizes = [model_bytes(layer) for layer in target.parts.layers]
    return TargetBytes(sum(sizes), max(sizes), model_bytes(target.model) - sum(sizes))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or the cause of an error, is a lack of memory of a GPU or of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # errors without a class: from the CPU's allocator, and from a GPU without room for the process itself
    words = ("out of memory", "can't allocate memory")
    if isinstance(error, RuntimeError) and any(w in str(error) for w in words):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)


def model_bytes(module: nn.Module) -> int:
    """The bytes of all parameters, including parameters on the meta device."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def parts_of(target: ModelTarget) -> dict[str, Tensor]:
    """The parts of a target by name; of tied weights, the embedding alone. All ranks of a sharded target must call
    `parts_of`."""
    parts = {EMBEDDING: target.embedding}
    if target.head_weight is not target.embedding:
        parts[HEAD] = target.head_weight
    if (bias := getattr(target.parts.head, "bias", None)) is not None:
        parts[BIAS] = bias
    parts |= {LAST + name: weight for name, weight in target.last_layer_weights().items()}
    return {name: x.detach().to(target.device).contiguous() for name, x in parts.items()}


def layout_of(parts: dict[str, Tensor]) -> Layout:
    return {name: (tuple(x.shape), x.dtype) for name, x in parts.items()}


def send_parts(parts: dict[str, Tensor], source: int, group: ProcessGroup) -> None:
    """Sends the parts from rank `source` to a group. The group's other ranks call `receive_parts`."""
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
    """The parts of a target, with config and tokenizer read from `path`, and weights from `parts` (see `parts_of`).
    Raises ValueError like `load_target`."""
    options: dict[str, Any] = dict(max_length=max_length, trust_remote_code=trust_remote_code)
    empty = load_target(path, weights=False, **options).parts
    model: Any = empty.model
    embedding = nn.Parameter(parts[EMBEDDING], requires_grad=False)
    model.get_input_embeddings().weight = embedding
    empty.head.weight = nn.Parameter(parts[HEAD], requires_grad=False) if HEAD in parts else embedding
    if BIAS in parts:
        empty.head.bias = nn.Parameter(parts[BIAS], requires_grad=False)
    last_layer = {name.removeprefix(LAST): x for name, x in parts.items() if name.startswith(LAST)}
    return TargetParts(model, empty.tokenizer, last_layer=last_layer, name=str(path), **options)
