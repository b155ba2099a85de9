"""Products of few rows on a CPU, by C code (`layers.c`) that is compiled with the machine's C compiler, once.

The rows are float32; weights whose numbers 16 bits hold exactly are copied in 16 bits, which halves what is read. A
row's result does not depend on the number of rows and threads, bit by bit. `fledge.drafts.compiled_layers` computes
whole decoder layers so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import Structure, byref, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.io.files import cache_directory, replace_file

MOST_ROWS = 384  # of more, PyTorch takes less time for attention, and each thread computes the norms of all rows
PANEL = 16  # outputs of a weight that layers.c keeps next to each other
LANES = 8  # a head has a multiple of so many dimensions
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SOURCE = Path(__file__).with_name("layers.c")
COMPILERS = ("cc", "gcc")
# without -fopenmp at the link: the calls go to the threads that PyTorch has loaded, as a second pool of threads would
# compete with them for the cores
COMPILE = ("-O3", "-march=native", "-fno-strict-aliasing", "-fno-math-errno", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared",)
SECONDS = 120  # for the compiler
LOOK = 0.2  # seconds of computing after which the preemptions in them are looked at
PREEMPTED = 70  # preemptions of a thread a second; on idle cores there are about 20, on busy ones about 100
HOLD, LONGEST = 4.0, 60.0  # seconds with one thread before several are tried again: at first, and after failed trials


def preemptions() -> int:
    """How often the system has taken a core from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Threads:
    """Chooses the number of threads for compiled layers: all threads, or one while other programs use the cores.

    The threads wait for each other several times in each layer. If another program runs on the core of one thread, the
    other threads wait until the system gives the core back. Then one thread is faster than several. `clock` is in
    seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, preemptions: Callable[[], int] = preemptions
    ) -> None:
        self.clock, self.preemptions = clock, preemptions
        self.seconds, self.seen = 0.0, 0  # of computing since the last look, and the preemptions in them
        self.alone_until, self.hold = 0.0, HOLD

    @contextmanager
    def computing(self) -> Iterator[int]:
        """The number of threads for what is computed in this context."""
        most = torch.get_num_threads()
        if most == 1:
            yield 1
            return
        began, before = self.clock(), self.preemptions()
        alone = began < self.alone_until
        yield 1 if alone else most
        now = self.clock()
        self.seconds, self.seen = self.seconds + now - began, self.seen + self.preemptions() - before
        if self.seconds >= LOOK:
            if self.seen > PREEMPTED * self.seconds * (1 if alone else most):
                if not alone:  # soon after the last time, several threads were tried in vain
                    self.hold = min(2 * self.hold, LONGEST) if now - self.alone_until < LONGEST else HOLD
                self.alone_until = now + self.hold
            self.seconds, self.seen = 0.0, 0


THREADS = Threads()


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


class WeightStruct(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), *((n, c_int64) for n in ("outputs", "inputs", "kind"))]


class CompiledWeight:
    """A copy of a float32 weight [O, I] for `product`: in 16 bits if that changes no number, and in panels of outputs,
    as layers.c reads it. It does not follow later changes of the weight."""

    def __init__(self, weight_OI: Tensor):
        weight_OI = weight_OI.detach().to(short_dtype(weight_OI.detach()) or torch.float32)
        self.shape = (O, I) = tuple(weight_OI.shape)
        self.kept = F.pad(weight_OI, (0, 0, 0, -O % PANEL)).view(-1, PANEL, I).mT.contiguous()
        self.struct = self.with_bias(None)

    def with_bias(self, bias_O: Tensor | None) -> WeightStruct:
        """What layers.c reads. The caller keeps the bias."""
        return WeightStruct(self.kept.data_ptr(), pointer(bias_O), *self.shape, KINDS[self.kept.dtype])

    def product(self, x: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x Wᵀ + b of float32 rows, from [..., I] to [..., O], contiguous."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        if rows := x.numel() // self.shape[1]:
            with THREADS.computing() as threads:
                library().fledge_product(byref(self.struct), rows, x.data_ptr(), out.data_ptr(), threads)
        return out if bias_O is None else out.add_(bias_O)


def short_dtype(weight_OI: Tensor) -> torch.dtype | None:
    """The dtype of 16 bits that has all numbers of a weight; None if neither has."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight_OI.to(dtype).to(weight_OI.dtype), weight_OI):
            return dtype
    return None


def pointer(x: Tensor | None) -> int | None:
    """The address of a tensor's memory."""
    return None if x is None else x.data_ptr()


def check_memory(failed: int) -> None:
    """Raises MemoryError if a function of layers.c had no memory."""
    if failed:
        raise MemoryError("no memory for the rows of a pass")
