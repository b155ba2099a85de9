"""Processes of a test that communicate through gloo."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException, start_processes

from fledge.train.ranks import Ranks, connected

_OPEN: list[Any] = []  # keeps the file open into which faulthandler writes the stacks of a killed process

# imported once, by the server that forks all test processes
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo", "fledge.targets.loading", "fledge.train.trainer"]


def spawn(work: Callable[..., None], world: int, directory: Path, *given: Any) -> None:
    """Runs work(ranks, directory, *given) in `world` processes."""
    start(_work_connected, world, world, *free_ports(1), work, directory, *given)


def start(work: Callable[..., None], processes: int, *given: Any) -> None:
    """Runs work(number, *given) in processes that `connect` may connect. If a signal ends a process, the error has the
    stacks of the process's threads."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as crashes:
        try:
            start_processes(_work_watched, (Path(crashes), work, *given), nprocs=processes, start_method="forkserver")
        except ProcessExitedException as e:
            for file in sorted(Path(crashes).iterdir()):
                e.add_note(f"stacks of process {file.name}:\n{file.read_text()}")
            raise


def _work_watched(number: int, crashes: Path, work: Callable[..., None], *given: Any) -> None:
    file = (crashes / str(number)).open("w")  # open until the process has ended, which may crash then
    faulthandler.enable(file)
    _OPEN.append(file)
    work(number, *given)


@contextlib.contextmanager
def connect(
    rank: int, world: int, port: int, *, target_ranks: int = 0, limit: timedelta = timedelta(minutes=2)
) -> Iterator[Ranks]:
    """Context manager: connects the first `world` processes."""
    become(rank, world, port)
    with connected(torch.device("cpu"), limit, target_ranks) as ranks:
        yield ranks


def become(rank: int, world: int, port: int) -> None:
    """Makes this process a rank, as torchrun does for the processes that it starts."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below the range from which the system takes the ports of outgoing connections:
    such a connection could take a port before the test does."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 2_000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def ranks_of(torchrun: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that a torchrun has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    return sorted(pid for pid, parent in parents.items() if parent == torchrun.pid)


def _work_connected(rank: int, world: int, port: int, work: Callable[..., None], directory: Path, *given: Any) -> None:
    with connect(rank, world, port) as ranks:
        work(ranks, directory, *given)
