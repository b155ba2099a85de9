"""Settings of the C library's heap, from which training on a CPU allocates its tensors."""

from __future__ import annotations

import ctypes
import sys

# options of glibc's mallopt(3), by their names there, and the values given to them, in bytes
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
NEVER_TRIM, TOP_PAD, MMAP_THRESHOLD = -1, 1 << 26, 1 << 30


def retain_freed_memory() -> bool:
    """Configures malloc to keep freed memory in this process. Returns whether all options were accepted.

    By default glibc returns large freed blocks to the operating system, and every training step then pays a page fault
    for each page of its tensors: on two cores of an AMD CPU, steps of the demo took
    about a tenth longer. Does nothing and returns False without glibc on Linux.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return False
    options = {M_MMAP_THRESHOLD: MMAP_THRESHOLD, M_TRIM_THRESHOLD: NEVER_TRIM, M_TOP_PAD: TOP_PAD}
    return all([libc.mallopt(option, value) for option, value in options.items()])
