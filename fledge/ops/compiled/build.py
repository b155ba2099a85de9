"""Compiles layers.c with the machine's C compiler, once, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from ctypes import c_int64, c_void_p
from pathlib import Path

from fledge.io.files import cache_directory, replace_file

SOURCE = Path(__file__).with_name("layers.c")
COMPILERS = ("cc", "gcc")
# without -fopenmp at the link: the calls go to the threads that PyTorch has loaded, as a second pool of threads would
# compete with them for the cores
COMPILE = ("-O3", "-march=native", "-fno-strict-aliasing", "-fno-math-errno", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared",)
SECONDS = 120  # for the compiler


class SlowWarning(UserWarning):
    """Layers are computed by PyTorch, though this system could compile them."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None without a C compiler that supports OpenMP, and on systems other than Linux.

    Issues a `SlowWarning` on Linux, once, unless CC is `false`.
    """
    if sys.platform != "linux":
        return None
    chosen = os.environ.get("CC") or ""
    found = next(filter(None, map(shutil.which, [chosen, *COMPILERS])), None)
    reason = "there is no C compiler"
    if found is not None:
        try:
            return _load(found)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or b""
            said = next(iter(output.decode(errors="replace").strip().splitlines()), "") or str(error)
            reason = f"{found} did not compile fledge's layers ({said})"
    if chosen != "false":
        warnings.warn(
            f"decoding on this CPU takes several times as long as it could, since {reason}; install gcc, or name a "
            "compiler in the environment variable CC (CC=false: none, without this warning)",
            SlowWarning,
            stacklevel=2,
        )
    return None


def _load(compiler: str) -> ctypes.CDLL:
    """Raises OSError or SubprocessError if it does not compile or load."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=SECONDS, check=True).stdout
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    made_of = [SOURCE.read_bytes(), version, *(s.encode() for s in (compiler, platform.machine(), *cpu[:1], *COMPILE))]
    name = f"layers-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}.so"
    cached = cache_directory() / "compiled" / name
    with suppress(OSError):  # not there, or damaged
        if _is_private(cached.parent):
            return _opened(cached)
    with tempfile.TemporaryDirectory() as work:
        compiled, linked = Path(work, "layers.o"), Path(work, name)
        for command in ([*COMPILE, str(SOURCE), "-o", str(compiled)], [*LINK, str(compiled), "-o", str(linked)]):
            subprocess.run([compiler, *command], capture_output=True, timeout=SECONDS, check=True)
        made = _opened(linked)
        with suppress(OSError):  # compiled again next time
            cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(cached.parent):
                replace_file(cached, [linked.read_bytes()])
        return made


def _is_private(directory: Path) -> bool:
    """Whether nobody else can put code into a directory, which this process would run."""
    found = directory.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _opened(path: Path) -> ctypes.CDLL:
    made = ctypes.CDLL(str(path))
    made.fledge_product.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64]
    made.fledge_product.restype = None
    made.fledge_layers.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    made.fledge_states.argtypes = [c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p]
    made.fledge_draws.argtypes = [c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64]
    made.fledge_coupled.argtypes = [c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]
    made.fledge_states.restype = made.fledge_draws.restype = made.fledge_coupled.restype = None
    made.fledge_chain.argtypes = [
        *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64),
        c_void_p,
    ]
    return made
