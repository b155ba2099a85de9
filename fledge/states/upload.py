"""Fills memory of a device with bytes that several threads read, through a few pinned buffers that are used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from fledge.ops.implementations import current_device
from fledge.states.reader import PIECE_BYTES


class Slot:
    """Memory on the device for the bytes of a row, uint8 [size], zeros at first."""

    def __init__(self, size: int, device: torch.device):
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._used = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def end_use(self) -> None:
        """Marks the work that is queued on the current stream as the last that reads these bytes."""
        if self._used:
            self._used.record(torch.cuda.current_stream(self.bytes.device))

    def wait_for_use(self) -> None:
        """Waits until the work before the last `end_use` is done. The bytes may be overwritten afterwards."""
        if self._used:
            self._used.synchronize()


class Uploader:
    """Fills parts of device memory with bytes that a function reads, at most PIECE_BYTES at a time.

    On a CPU they are read in place. On a GPU they are read into one of `buffers` pinned buffers and copied from there
    on a stream of its own. Only one piece is copied at a time, whose thread waits for it: a GPU executes copies from
    host memory one after the other, whatever their streams, so that the small copies of a training step wait for a
    piece at most instead of a row.
    """

    def __init__(self, device: torch.device, buffers: int):
        self.device, self._copying = device, threading.Lock()
        self._pinned: SimpleQueue[Tensor] = SimpleQueue()
        if device.type == "cuda":
            with current_device(device):  # pinning would initialize the first GPU
                self._stream = torch.cuda.Stream(device)
                for _ in range(buffers):
                    self._pinned.put(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    def after_current_stream(self) -> None:
        """Lets copies wait for the work that is queued on the current stream, in whose pool memory was allocated."""
        if self.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def fill(self, part: Tensor, read: Callable[[memoryview], None]) -> None:
        """Fills a part of a slot, uint8 [n], by `read`, and waits until it has its bytes. For several threads."""
        if self.device.type != "cuda":
            read(memoryview(part.numpy()))
            return
        pinned = self._pinned.get()
        try:
            read(memoryview(pinned.numpy())[: part.numel()])
            # without `current_device`, leaving the stream would initialize the first GPU
            with self._copying, current_device(self.device), torch.cuda.stream(self._stream):
                part.copy_(pinned[: part.numel()], non_blocking=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record(self._stream)
                copied.synchronize()
        finally:
            self._pinned.put(pinned)
