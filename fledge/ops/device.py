"""The choice of implementation by device, the launch of kernels, and helpers of all operations."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

COUNT = torch.arange(1024, device="cpu")  # see `indices`
_chosen: str | None = None  # the implementation of `computed_by`


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton kernels compute numbers of a dtype on a device: on a GPU, all but float64."""
    return device.type == "cuda" and dtype != torch.float64


def use_triton(x: Tensor) -> bool:
    """Whether a Triton kernel computes an operation of x: where `has_kernels`, unless `computed_by` has chosen."""
    # asked several times in each layer, so in as few steps as possible
    return x.is_cuda and x.dtype is not torch.float64 if _chosen is None else _chosen == "triton"


def chosen() -> str | None:
    """The implementation that `computed_by` has chosen; None if the device and the shapes choose it."""
    return _chosen


@contextmanager
def computed_by(implementation: str) -> Iterator[None]:
    """Within the context, the operations of decoding have one implementation, whatever the device: "definition" (plain
    torch) or "triton" (a GPU, or Triton's interpreter). For tests and benchmarks."""
    global _chosen
    before, _chosen = _chosen, implementation
    try:
        yield
    finally:
        _chosen = before


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current device. Triton launches kernels on the current device, whatever the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def can_wait(device: torch.device) -> bool:
    """Whether a kernel can be launched before the previous kernel ends, and wait for the previous kernel on the device
    (programmatic dependent launch): on GPUs from compute capability 9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """The launch options of a Triton kernel. Where `can_wait`, the launch overlaps with the previous kernel, and the
    kernel waits for the previous kernel on the device."""
    return dict(DEPENDENT=True, launch_pdl=True) if can_wait(device) else dict(DEPENDENT=False)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a block of a kernel may have; 0 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0


def indices(n: int, device: torch.device) -> Tensor:
    """0 to n - 1, int64 [n], for reading only. On a CPU, a view of numbers that are there already."""
    return COUNT[:n] if device.type == "cpu" and n <= len(COUNT) else torch.arange(n, device=device)


def block_width(d: int) -> int:
    """The width of a kernel's block for heads of d: a power of two, and at least 16, the minimum of tl.dot."""
    return max(1 << (d - 1).bit_length(), 16)


def with_unit_stride(x: Tensor) -> Tensor:
    """`x` itself if its last axis has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def at_least_float32(x: Tensor) -> Tensor:
    """x converted to float32 if it has a 16-bit dtype; unchanged if it is float32 or float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies CPU tensors of one dtype to the device, in one non-blocking copy from pinned memory.

    If `device` is the CPU, returns the tensors unchanged. If a tensor is not on the CPU, for example because it was
    made under `torch.set_default_device`, all tensors are copied one by one.
    """
    if device.type == "cpu" or any(x.device.type != "cpu" for x in tensors):
        return [x.to(device) for x in tensors]
    flat = torch.cat([x.reshape(-1) for x in tensors])
    parts = flat.pin_memory().to(device, non_blocking=True).split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
