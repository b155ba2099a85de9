"""Values that a device writes into the host's memory by a kernel, which a CUDA graph may contain, so that the host
launches no copy."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.implementations import best_impl

SLOTS = 4  # more than the rounds that are launched and not read, at most two (`Batch.round`)
# memory of `HostSlots` that are gone, which their devices may still write to
_RETIRED: list[tuple[torch.device, Tensor]] = []


class HostSlots:
    """SLOTS places in the host's memory for int64 values of a shape. A device writes each value into the next one.

    The host asks for each value's place with `next`. The value is there when the stream has passed its writing, which
    an event tells, and until the writing of SLOTS further ones is launched.
    """

    def __init__(self, shape: Sequence[int], device: torch.device):
        _free_retired()
        on_gpu = device.type == "cuda"
        self.slots = torch.zeros(SLOTS, *shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.written = torch.zeros(1, dtype=torch.int64, device=device)  # the number of values
        if on_gpu:
            weakref.finalize(self, _RETIRED.append, (device, self.slots)).atexit = False
        self.restart()

    def restart(self) -> None:
        """The next value goes into the first place. Those that were not read yet may be overwritten."""
        self.written.zero_()
        self._places = itertools.cycle(self.slots.unbind())

    def write(self, values: Tensor, *, impl: str | None = None) -> None:
        """Writes values of the shape, on the device, into the next place. `impl` is "definition" (plain torch,
        for a CPU), "triton" (one kernel; a GPU or Triton's interpreter), or None: "triton" on a GPU."""
        if (best_impl(values.device, torch.float32) if impl is None else impl) == "triton":
            from fledge.kernels.host_slots_triton import write_triton

            write_triton(values, self.slots, self.written)
        else:
            self.slots.index_copy_(0, self.written % SLOTS, values[None])
            self.written += 1

    def next(self) -> Tensor:
        """The place of the next value that was not asked for."""
        return next(self._places)


def _free_retired() -> None:
    """Frees the memory of `HostSlots` that are gone, after what their devices were doing."""
    with contextlib.suppress(IndexError):  # none is left, also if another thread frees them too
        while True:
            device, memory = _RETIRED.pop()
            try:
                torch.cuda.synchronize(device)
            except BaseException:
                _RETIRED.append((device, memory))
                raise
