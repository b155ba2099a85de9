"""Which implementation of the decoding kernels suits a device and dtype, and on which device they are launched."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

IMPLS = ("definition", "triton")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def best_impl(device: torch.device | str, dtype: torch.dtype) -> str:
    """ "triton" for CUDA tensors of up to 32 bits, else "definition" (plain torch)."""
    return "triton" if dtype in KERNEL_DTYPES and torch.device(device).type == "cuda" else "definition"


def use_triton(impl: str | None, x: torch.Tensor) -> bool:
    """Whether `impl` is "triton"; None stands for `best_impl` of x.

    Raises ValueError for a name that is not in IMPLS, and for "triton" with a dtype that the kernels do not have.
    """
    if impl is None:  # asked several times in each layer, so in as few steps as possible
        return x.is_cuda and x.dtype in KERNEL_DTYPES
    if impl not in IMPLS:
        raise ValueError(f"the implementation {impl!r} must be one of {', '.join(IMPLS)}")
    if impl == "triton" and x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"the implementation 'triton' has no {str(x.dtype).removeprefix('torch.')}; use 'definition'")
    return impl == "triton"


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, where Triton launches its kernels whatever the device of their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def can_wait(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one in front of it ends, and wait for that itself (programmatic
    dependent launch): on GPUs from compute capability 9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """The options of a Triton kernel that waits itself for the kernel before it where `can_wait`, so that its launch
    overlaps with that kernel."""
    return dict(DEPENDENT=True, launch_pdl=True) if can_wait(device) else dict(DEPENDENT=False)
