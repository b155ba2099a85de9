"""A ring in pinned host memory, written by a kernel of the GPU. A CUDA graph may contain the kernel, and the host
launches no copy."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.ops.device import use_triton

ENTRIES = 4  # more than the rounds that are launched and not read, at most two (`Batch.round`)
# memory of deleted rings, with the device that may still write to the memory
_RETIRED: list[tuple[torch.device, Tensor]] = []


class PinnedRing:
    """ENTRIES entries in the host's memory, int64 of a shape. A device writes each value into the next entry; after the
    last one comes the first.

    The host asks for each value's entry with `next`. The entry holds the value once the stream has passed the write (an
    event tells when), and until ENTRIES further writes are launched. For a CPU, the memory is not pinned.
    """

    def __init__(self, shape: Sequence[int], device: torch.device):
        _free_retired()
        on_gpu = device.type == "cuda"
        self.entries = torch.zeros(ENTRIES, *shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.written = torch.zeros(1, dtype=torch.int64, device=device)  # the number of values
        if on_gpu:
            weakref.finalize(self, _RETIRED.append, (device, self.entries)).atexit = False
        self.restart()

    def restart(self) -> None:
        """The next value goes into the first entry. Values that were not read yet may be overwritten."""
        self.written.zero_()
        self._cycle = itertools.cycle(self.entries.unbind())

    def write(self, values: Tensor) -> None:
        """Writes values of the shape, on the device, into the next entry."""
        if use_triton(values):
            from fledge.ops.pinned_ring_triton import write_triton

            write_triton(values, self.entries, self.written)
        else:
            self.entries.index_copy_(0, self.written % ENTRIES, values[None])
            self.written += 1

    def next(self) -> Tensor:
        """The entry of the next value that was not asked for."""
        return next(self._cycle)


def _free_retired() -> None:
    """Frees the memory of deleted rings, after the devices have finished all work."""
    with contextlib.suppress(IndexError):  # the list is empty, maybe because another thread frees memory too
        while True:
            device, memory = _RETIRED.pop()
            try:
                torch.cuda.synchronize(device)
            except BaseException:
                _RETIRED.append((device, memory))
                raise
