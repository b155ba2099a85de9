"""Devices, processor and free memory of the machine, the description of the machine in records, and the signals that
stop a command: SIGINT (Ctrl-C), SIGTERM, and SIGHUP when the terminal is closed."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
# a container's memory limit and memory use, in cgroups of version 2 and of version 1
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def resolve_device(device: str) -> str:
    """The device, with "auto" replaced by "cuda" on a machine with a GPU, else by "cpu". Raises ValueError for a device
    that does not exist on this machine, and for a device that is neither a CPU nor a CUDA GPU."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        named = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"{device!r} is not a device; use auto, cpu, cuda, cuda:1, ..") from e
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"fledge runs on CPUs and CUDA GPUs, not on {device}; use auto, cpu, cuda, cuda:1, ..")
    count = torch.cuda.device_count()
    if named.type == "cuda" and (named.index or 0) >= count:
        available = f"{count} CUDA devices, from cuda:0 on" if count else "no CUDA device; use cpu"
        raise ValueError(f"device {device}: this machine has {available}")
    return device


def processor_name() -> str:
    """The model name of the CPU, such as "AMD EPYC"; the CPU's architecture if the model is unknown."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def is_intel() -> bool:
    """Whether the CPU is an x86 processor by Intel."""
    if not INFO.exists():  # Windows
        return "GenuineIntel" in platform.processor()
    with INFO.open() as f:
        return "GenuineIntel" in f.read(4096)  # only the first core, since Linux queries each core when it is read


def free_bytes(device: str | torch.device) -> int | None:
    """The free bytes of a GPU's memory, or of the memory of the machine or its container; None if unknown."""
    import torch

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


def environment(device: str, dtype: str) -> dict[str, Any]:
    """Device, dtype, CPU cores and threads, versions and commit, as JSON-ready data for a record."""
    import torch
    import transformers

    chip = torch.cuda.get_device_name() if device.startswith("cuda") else processor_name()
    return {
        "device": chip,
        "dtype": dtype.removeprefix("torch."),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


def command() -> list[str]:
    """The words of the command line that started this process, with `fledge` as the program."""
    return ["fledge", *sys.argv[1:]]


def commit() -> str | None:
    """The commit of this checkout, with `+` appended if files of the package differ from the commit; None outside a
    checkout. The environment variable FLEDGE_COMMIT names the commit of sources copied without a repository."""
    if named := os.environ.get("FLEDGE_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "fledge"], cwd=root, capture_output=True)
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def stopping_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP, except ignored signals, such as SIGHUP under nohup. Empty outside the main thread,
    since only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]


def is_assembler_error(error: BaseException | None) -> bool:
    """Whether the error is Triton's PTXASError: the assembler ptxas failed. A terminal's Ctrl-C also ends the ptxas
    process, which makes Triton raise PTXASError. The class is compared by name, as Triton need not be installed."""
    return type(error).__name__ == "PTXASError"


def ignore_signals() -> None:
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def restoring_signals() -> Iterator[Callable[[], None]]:
    """Context manager: yields `ignore_signals`, for code that must not be interrupted again, such as the rest of the
    block after a KeyboardInterrupt. When the block ends, the signals are handled as before."""
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    try:
        yield ignore_signals
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                # None: the handler was not installed from Python, and cannot be put back
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
