"""The memory of a device."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch


def free_bytes(device: str | torch.device) -> int | None:
    """The bytes that are free on a GPU, or in the machine's memory; None where that is not known."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, ValueError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        return 1024 * int(found[1]) if found else None
    return None
