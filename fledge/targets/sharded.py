"""Targets that are larger than a GPU: their layers are sharded over the ranks by torch's FSDP2 (`fully_shard`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fledge.targets.structure import find_decoder, layers_and_norm

Fill = Callable[[Iterable[nn.Module]], None]


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
def gathered(layer: nn.Module) -> Iterator[None]:
    """Context manager: within the block, every rank has a layer's whole weights. All ranks have to enter the block."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()
