"""The machine's processor, by which products on a CPU are chosen."""

from __future__ import annotations

import platform
from pathlib import Path

INFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """The model name of the CPU, such as "AMD EPYC"; its architecture where the system does not say."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def is_intel() -> bool:
    """Whether the CPU is an x86 of Intel."""
    if not INFO.exists():  # Windows
        return "GenuineIntel" in platform.processor()
    with INFO.open() as f:
        return "GenuineIntel" in f.read(4096)  # of the first core, since Linux asks each core that is read
