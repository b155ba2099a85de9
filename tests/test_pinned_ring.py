"""The ring in host memory that a device writes to: the kernel against its definition, and by a CUDA graph."""

from __future__ import annotations

import gc

import pytest
import torch

from fledge.ops import pinned_ring
from fledge.ops.device import computed_by
from fledge.ops.pinned_ring import ENTRIES, PinnedRing
from support.devices import needs_triton

needs_triton()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("impl", ["triton", "definition"])
@pytest.mark.parametrize("shape", [(1, 3), (16, 10), (70, 61)])
def test_each_value_has_its_entry(shape: tuple[int, int], impl: str) -> None:
    """Also after more values than entries, with one that is read late, and after a restart in between."""
    if impl == "definition" and DEVICE.type == "cuda":
        pytest.skip("plain torch does not write from a GPU to the host's memory")
    ring = PinnedRing(shape, DEVICE)
    for restarted in (False, True):
        if restarted:
            ring.restart()
        values, entries = [], []
        for _ in range(2 * ENTRIES + 1):
            values.append(torch.randint(-(2**62), 2**62, shape, device=DEVICE))
            with computed_by(impl):
                ring.write(values[-1])
            entries.append(ring.next())
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            for value, entry in zip(values[1 - ENTRIES :], entries[1 - ENTRIES :], strict=True):
                assert entry.tolist() == value.tolist()


@pytest.mark.gpu
def test_a_graph_writes_to_the_host() -> None:
    ring, value = PinnedRing((3, 4), torch.device("cuda")), torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    ring.write(value)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring.write(value)
        value += 1
    ring.restart()
    for n in range(10):
        graph.replay()
        entry = ring.next()
        torch.cuda.synchronize()
        assert entry.tolist() == [[n] * 4] * 3 and entry.is_pinned()


@pytest.mark.gpu
def test_memory_is_kept_while_it_may_be_written() -> None:
    """The memory of a ring that is gone is freed when the device has ended what it was doing."""
    ring, value = PinnedRing((3, 4), torch.device("cuda")), torch.ones(3, 4, dtype=torch.int64, device="cuda")
    ring.write(value)  # compiles the kernel
    gc.collect()  # takes long among many objects, which the device should not wait for
    torch.cuda._sleep(1_000_000_000)  # cycles
    ring.write(value)
    done, address = torch.cuda.Event(), ring.entries.data_ptr()
    done.record()
    del ring
    assert any(memory.data_ptr() == address for _, memory in pinned_ring._RETIRED) and not done.query()
    other = PinnedRing((1, 1), torch.device("cuda"))
    assert not pinned_ring._RETIRED and done.query() and other.entries.is_pinned()
