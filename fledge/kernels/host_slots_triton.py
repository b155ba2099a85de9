"""`HostSlots.write` in Triton: one program, as there are some hundred values at most."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.implementations import dependent_launch

BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def _write(
    values_ptr, slots_ptr, written_ptr, n,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    written = tl.load(written_ptr)
    slot_ptr = slots_ptr + (written % SLOTS) * n
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(slot_ptr + at, tl.load(values_ptr + at, mask=at < n), mask=at < n)
    tl.debug_barrier()  # all threads have read the number
    tl.store(written_ptr, written + 1)


def write_triton(values: Tensor, slots: Tensor, written: Tensor) -> None:
    """Writes contiguous values into the slot after the last of the `written` ones, and counts it."""
    _write[(1,)](
        values.contiguous(), slots, written, values.numel(),
        SLOTS=len(slots), BLOCK=BLOCK, num_warps=4, **dependent_launch(values.device),
    )  # fmt: skip
