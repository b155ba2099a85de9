"""Values that a device writes to the host: the kernel against its definition, and by a CUDA graph."""

from __future__ import annotations

import gc

import pytest
import torch

from fledge.kernels import host_slots
from fledge.kernels.host_slots import SLOTS, HostSlots
from support.devices import needs_triton

needs_triton()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("impl", ["triton", "definition"])
@pytest.mark.parametrize("shape", [(1, 3), (16, 10), (70, 61)])
def test_each_value_has_its_place(shape: tuple[int, int], impl: str) -> None:
    """Also after more values than places, with one that is read late, and after a restart in between."""
    if impl == "definition" and DEVICE.type == "cuda":
        pytest.skip("plain torch does not write from a GPU to the host's memory")
    slots = HostSlots(shape, DEVICE)
    for restarted in (False, True):
        if restarted:
            slots.restart()
        values, places = [], []
        for _ in range(2 * SLOTS + 1):
            values.append(torch.randint(-(2**62), 2**62, shape, device=DEVICE))
            slots.write(values[-1], impl=impl)
            places.append(slots.next())
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            for value, place in zip(values[1 - SLOTS :], places[1 - SLOTS :], strict=True):
                assert place.tolist() == value.tolist()


@pytest.mark.gpu
def test_a_graph_writes_to_the_host() -> None:
    slots, value = HostSlots((3, 4), torch.device("cuda")), torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    slots.write(value)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.write(value)
        value += 1
    slots.restart()
    for n in range(10):
        graph.replay()
        place = slots.next()
        torch.cuda.synchronize()
        assert place.tolist() == [[n] * 4] * 3 and place.is_pinned()


@pytest.mark.gpu
def test_memory_is_kept_while_it_may_be_written() -> None:
    """Memory of slots that are gone is freed when the device has ended what it was doing."""
    slots, value = HostSlots((3, 4), torch.device("cuda")), torch.ones(3, 4, dtype=torch.int64, device="cuda")
    slots.write(value)  # compiles the kernel
    torch.cuda._sleep(1_000_000_000)  # cycles
    slots.write(value)
    done, address = torch.cuda.Event(), slots.slots.data_ptr()
    done.record()
    del slots
    gc.collect()
    assert any(memory.data_ptr() == address for _, memory in host_slots._RETIRED) and not done.query()
    other = HostSlots((1, 1), torch.device("cuda"))
    assert not host_slots._RETIRED and done.query() and other is not None
