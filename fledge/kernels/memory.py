"""The free memory of a device."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
# a container's limit and what it uses of it, of cgroups of version 2 and 1
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def free_bytes(device: str | torch.device) -> int | None:
    """The bytes that are free on a GPU, or in the memory of the machine or of the container that this runs in; None
    where that is not known."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = []
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.M)
        free += [1024 * int(found[1])] if found else []
    for limit, used in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            free.append(max(int(limit.read_text()) - int(used.read_text()), 0))
    return min(free, default=None)
