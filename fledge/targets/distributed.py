"""A target on the ranks of a training run: the bytes of weights on a rank, the layers of a target that is larger than a
GPU, sharded over the ranks by torch's FSDP2 (`fully_shard`), and the target's parts where the target does not run, from
another rank or from files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup, broadcast
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from fledge.io.fields import read_json
from fledge.targets.interface import UNLIMITED
from fledge.targets.loading import empty_model, explaining_errors, load_target, read_config, read_model, read_tokenizer
from fledge.targets.parts import TargetParts
from fledge.targets.quantized import quantization_of
from fledge.targets.structure import find_decoder, layers_and_norm
from fledge.targets.transformers import TransformersTarget

EMBEDDING, HEAD, BIAS, LAST = "embedding", "head", "head bias", "last layer "

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights that are not quantized

Fill = Callable[[Iterable[nn.Module]], None]
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


def target_bytes(target: TransformersTarget) -> TargetBytes:
    """The sizes of a target, which may be on the meta device. Raises ValueError if the layers cannot be identified."""
    sizes = [model_bytes(layer) for layer in target.layers]
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


class ShardedTarget(TransformersTarget):
    """A target whose layers are sharded over several ranks (`shard_layers`).

    The ranks have to run the same number of forward passes: a packed row is a single pass, whatever documents it has.
    """

    sharded = True
    pass_tokens = UNLIMITED

    def last_layer_weights(self) -> dict[str, Tensor]:
        """All ranks have to call this."""
        with gathered(self.layers[-1]):
            return {name: weight.clone() for name, weight in super().last_layer_weights().items()}

    def note_places(self) -> None:
        """Does nothing, since sharded weights are not moved."""

    def prepare_decoding(self) -> None:
        """Does nothing, since sharded weights are not moved, and have no copies."""


def load_sharded_target(
    path: str | Path,
    mesh: DeviceMesh,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
) -> ShardedTarget:
    """Loads a target on all ranks of a mesh at the same time, with the layers sharded over the ranks. Only the first
    rank reads the weights, into host memory. Arguments and errors are as in `load_target`; quantized weights are an
    error too."""
    device = torch.device(device)
    with explaining_errors(path):
        if quantization := quantization_of(read_config(path, trust_remote_code)[2]):
            raise ValueError(
                f"its weights are quantized by {quantization}, so its layers cannot be sharded; let each GPU that has "
                "the target have all of it"
            )
    first, group = mesh.get_local_rank() == 0, mesh.get_group()
    model, tokenizer, _ = read_model(path, device, dtype, trust_remote_code, weights=first)
    shard_layers(model, mesh, fill_with(device, lambda x: broadcast(x, group=group, group_src=0)))
    return ShardedTarget(model, tokenizer, name=str(path), max_length=max_length, trust_remote_code=trust_remote_code)


def shard_layers(model: nn.Module, mesh: DeviceMesh, fill: Fill) -> None:
    """Shards the decoder layers of a causal language model over the ranks of a mesh of one dimension.

    `fill(modules)` loads the weights and buffers of modules, submodules excluded, to this rank's device. `fill` is
    called layer by layer, so that a rank never holds more than one whole layer, and then for the rest of the model.
    Embeddings, final norm and head stay whole on every rank, since the draft and the teacher read these weights all the
    time. In a forward pass, a layer is gathered before computing and freed afterwards, while the next layer is
    gathered.

    After sharding, all ranks have to run the same number of forward passes. Raises ValueError if the decoder's layers
    cannot be identified.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = find_decoder(model, count)
    layers, _ = layers_and_norm(decoder, count)
    inside = {id(m) for layer in layers for m in layer.modules()}
    for layer in layers:
        fill(layer.modules())
        fully_shard(layer, mesh=mesh)
    fill(m for m in model.modules() if id(m) not in inside)
    whole = {p for p in decoder.parameters() if not isinstance(p, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # a common root: the layers share streams
    model.requires_grad_(False)
    for layer in layers:  # once outside of inference mode, in which the buffers of gathered weights must not be made
        with gathered(layer):
            pass


def fill_with(device: torch.device, overwrite: Callable[[Tensor], object]) -> Fill:
    """A `fill` for `shard_layers`: moves weights and buffers to a device, and then calls `overwrite` with each tensor.
    A tensor that was on the meta device has no values before `overwrite`."""

    @torch.no_grad()
    def fill(modules: Iterable[nn.Module]) -> None:
        # by the old tensor, since tied weights belong to several modules; a longer-lived dict would keep layers whole
        moved: dict[Tensor, Tensor] = {}
        for group in (group for m in modules for group in (m._parameters, m._buffers)):
            for name, x in group.items():
                if x is None or isinstance(x, DTensor):
                    continue
                if x not in moved:
                    value = torch.empty_like(x, device=device) if x.is_meta else x.detach().to(device)
                    overwrite(value)
                    moved[x] = nn.Parameter(value, requires_grad=False) if isinstance(x, nn.Parameter) else value
                group[name] = moved[x]

    return fill


@contextmanager
def gathered(layer: Any) -> Iterator[None]:
    """Context manager: within the block, every rank has a layer's whole weights. All ranks have to enter the block."""
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def parts_of(target: TransformersTarget) -> dict[str, Tensor]:
    """The parts of a target by name; of tied weights, the embedding alone. All ranks of a sharded target must call
    `parts_of`."""
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
    empty = load_target(path, weights=False, **options)
    model: Any = empty.model
    embedding = nn.Parameter(parts[EMBEDDING], requires_grad=False)
    model.get_input_embeddings().weight = embedding
    empty.head.weight = nn.Parameter(parts[HEAD], requires_grad=False) if HEAD in parts else embedding
    if BIAS in parts:
        empty.head.bias = nn.Parameter(parts[BIAS], requires_grad=False)
    last_layer = {name.removeprefix(LAST): x for name, x in parts.items() if name.startswith(LAST)}
    return TargetParts(model, empty.tokenizer, last_layer=last_layer, name=str(path), **options)


def load_head(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
) -> TargetParts | None:
    """The parts of a target: only the embedding, the head, the last decoder layer (without its experts) and the final
    norm are loaded.

    The parts have the properties and `logits` of the whole target, enough for training from stored features; all other
    layers are on the meta device. Weights of the last layer that are quantized, or that transformers makes of several
    tensors in the files, also stay on the meta device; `last_layer_weights` leaves them out. Arguments and errors are
    as in `load_target`. Returns None if embedding, head or norm are quantized, or cannot be read one by one, as from a
    checkpoint without safetensors.
    """
    device = torch.device(device)
    with explaining_errors(path):
        name, options, config = read_config(path, trust_remote_code)
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else config.dtype or torch.float32
        model = empty_model(name, config, dtype, options)
        n = config.get_text_config(decoder=True).num_hidden_layers
        layers, norm = layers_and_norm(find_decoder(model, n), n)
        ends = [model.get_input_embeddings(), model.get_output_embeddings(), norm]
        # experts have other names in the files, and a draft is not initialized from them
        mixture = {id(p) for m in layers[-1].modules() if hasattr(m, "experts") for p in m.parameters()}
        needed, wanted = (
            {id(p) for part in parts for p in part.parameters()} - mixture for parts in (ends, [*ends, layers[-1]])
        )
        keys = {id(p): key for key, p in model.named_parameters()}
        found = _read_weights(name, model, {keys[i] for i in wanted}, options)
        if not found.keys() >= {keys[i] for i in needed}:
            return None
        weights = {key: x.to(device, dtype) for key, x in found.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        tokenizer = read_tokenizer(name, options)
    parts = TargetParts(model, tokenizer, name=str(path), max_length=max_length, trust_remote_code=trust_remote_code)
    parts.last_layer_complete = len(found) == len(wanted)
    return parts


def _read_weights(
    name: str, model: PreTrainedModel, wanted: Collection[str], options: dict[str, Any]
) -> dict[str, Tensor]:
    """The parameters in a model's safetensors files with the names `wanted` and the model's shapes, in floating-point
    numbers of 16 bits or more. The files may have names that transformers changes. Others are left out."""

    def file_of(file: str) -> str | None:
        return cached_file(name, file, revision=options["revision"], _raise_exceptions_for_missing_entries=False)

    if index := file_of(SAFE_WEIGHTS_INDEX_NAME):
        file_by_key = read_json(Path(index))["weight_map"]
    else:
        if (whole := file_of(SAFE_WEIGHTS_NAME)) is None:
            return {}
        with safe_open(whole, "pt") as f:
            file_by_key = dict.fromkeys(f.keys(), SAFE_WEIGHTS_NAME)
    names = _names_in_files(file_by_key, model)
    keys = {key: names[key] for key in wanted if key in names}
    found: dict[str, torch.Tensor] = {}
    for file in {file_by_key[stored] for stored in keys.values()}:
        with safe_open(file_of(file), "pt") as f:
            found |= {key: f.get_tensor(stored) for key, stored in keys.items() if file_by_key[stored] == file}
    shapes = {key: p.shape for key, p in model.named_parameters()}
    return {key: x for key, x in found.items() if x.dtype in PLAIN_DTYPES and x.shape == shapes[key]}


def _names_in_files(keys: Iterable[str], model: PreTrainedModel) -> dict[str, str]:
    """Maps the model's names of tensors to the names in files. The names differ in Qwen3.5, for example, whose files
    have the text model as a part of a larger model, and in Nemotron-H, whose files have another prefix."""
    renamings = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]
    state = model.state_dict()
    return {rename_source_key(key, renamings, [], model.base_model_prefix, state)[0]: key for key in keys}
