"""The C library's heap, which training on a CPU takes its tensors from."""

from __future__ import annotations

import ctypes
import sys

# glibc's mallopt(3): its names for the options, and their values here, in bytes
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
NEVER, AT_ONCE, LARGEST = -1, 1 << 26, 1 << 30


def keep_freed() -> bool:
    """Has this process keep what it frees for the next tensor, and says whether it does.

    glibc gives large blocks back to the system as they are freed, so that every step of training would get its pages
    anew, one fault after the other (bench/results/heap.json). Elsewhere than on Linux with glibc nothing is done.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return False
    options = {M_MMAP_THRESHOLD: LARGEST, M_TRIM_THRESHOLD: NEVER, M_TOP_PAD: AT_ONCE}
    return all([libc.mallopt(option, value) for option, value in options.items()])
