"""`PinnedRing.write` in Triton: one program, as there are a few thousand values at most."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import dependent_launch
from fledge.ops.topk_triton import wait_for_previous

BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def _write(
    values_ptr, entries_ptr, written_ptr, n,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    written = tl.load(written_ptr)
    entry_ptr = entries_ptr + (written % ENTRIES) * n
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(entry_ptr + at, tl.load(values_ptr + at, mask=at < n), mask=at < n)
    tl.debug_barrier()  # all threads have read the number
    tl.store(written_ptr, written + 1)


def write_triton(values: Tensor, entries: Tensor, written: Tensor) -> None:
    """Writes `values` into the next entry of `entries` after the `written` previous writes, and adds 1 to `written`."""
    _write[(1,)](
        values.contiguous(), entries, written, values.numel(),
        ENTRIES=len(entries), BLOCK=BLOCK, num_warps=4, **dependent_launch(values.device),
    )  # fmt: skip
