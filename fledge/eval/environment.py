"""The hardware and software of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(device: str, dtype: str) -> dict[str, Any]:
    """Device, dtype, CPU cores and threads, versions and commit, as JSON-ready data for a record."""
    import torch
    import transformers

    from fledge.kernels.processor import processor_name

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
    """The command line of this process, as it would be typed."""
    return ["fledge", *sys.argv[1:]]


def commit() -> str | None:
    """The commit of this checkout, with `+` appended if files of the package differ from it; None outside a
    checkout. The environment variable FLEDGE_COMMIT names it for sources that were copied without their repository."""
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
