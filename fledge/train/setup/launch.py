"""Starts the processes of `fledge train --gpus`, and joins the ranks that torchrun has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from fledge.train.setup.options import MACHINE, TrainOptions

if TYPE_CHECKING:
    from fledge.train.ranks import Ranks

RUN_TORCHRUN = "from fledge.train.setup.launch import run_torchrun; run_torchrun()"
INTERRUPTED = 130  # the exit status of an interrupted run, in one process and in several
NOTHING_TO_SHARD = "--shard-target splits the target over several GPUs; give --gpus, or start with torchrun"
NO_OTHERS = "--target-gpus sets some of several GPUs apart for the target; give --gpus, or start with torchrun"


def needs_processes(options: TrainOptions) -> bool:
    """Whether this process has to start the training processes. Raises ValueError if the machine has fewer GPUs than
    --gpus, or if --device names another device."""
    if options.gpus is None or options.gpus == 1 or "WORLD_SIZE" in os.environ:
        return False
    import torch

    if options.device not in ("auto", "cuda"):
        raise ValueError(f"--gpus {options.gpus} with --device {options.device}; leave one of them out")
    if options.gpus > (count := torch.cuda.device_count()):
        raise ValueError(f"--gpus {options.gpus}, but this machine has {count} GPU{'s' if count != 1 else ''}")
    return True


def start_processes(gpus: int, arguments: Sequence[str]) -> int:
    """Runs `fledge` with these arguments in one process for each GPU, through torchrun. Returns torchrun's exit status,
    or INTERRUPTED after a signal that stopped the training."""
    torchrun = [sys.executable, "-c", RUN_TORCHRUN, "--standalone", "--nproc-per-node", str(gpus)]
    interrupted = False
    with subprocess.Popen([*torchrun, "-m", "fledge", *arguments]) as process:

        def pass_on(number: int, _frame: object) -> None:
            nonlocal interrupted
            interrupted = True
            if number != signal.SIGINT:  # a terminal's Ctrl-C reaches torchrun itself
                process.terminate()

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {s: signal.signal(s, pass_on) for s in caught if signal.getsignal(s) is not signal.SIG_IGN}
        try:
            status = process.wait()  # while torchrun waits for the ranks to save
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
    return INTERRUPTED if interrupted and status else status


def run_torchrun() -> None:
    """Runs torchrun with the arguments of this process. After a signal, torchrun first ends the ranks, and this process
    then exits with INTERRUPTED and without a traceback."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main

    try:
        main()
    except SignalException:
        sys.exit(INTERRUPTED)


@contextmanager
def run_ranks(options: TrainOptions) -> Iterator[Ranks]:
    """Context manager: the ranks of this run. Raises ValueError for a device that all ranks would share."""
    import torch

    from fledge.io.machine import resolve_device
    from fledge.train.ranks import connected, local_rank, started_by_torchrun

    device = torch.device(resolve_device(options.device))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.gpus not in (None, here):
        cure = f"torchrun has started {here} processes here" if started_by_torchrun() else "start it with torchrun"
        raise ValueError(f"--gpus {options.gpus} starts processes from the command line only: {cure}; leave it out")
    check_ranks(options, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    if started_by_torchrun():
        if device.index is not None:
            raise ValueError(
                f"--device {options.device} with several processes, of which each has a GPU of its own; leave it out"
            )
        if device.type == "cuda":
            device = torch.device("cuda", local_rank())
            resolve_device(str(device))  # there may be fewer GPUs than processes
    limit = timedelta(minutes=options.rank_timeout)
    with connected(device, limit, options.target_gpus or 0) as ranks:
        yield ranks


def check_ranks(options: TrainOptions, ranks: int) -> None:
    """Raises ValueError if --target-gpus or --shard-target do not make sense for a number of ranks."""
    apart = options.target_gpus
    if apart and ranks == 1:
        raise ValueError(NO_OTHERS)
    if apart and apart >= ranks:
        raise ValueError(
            f"--target-gpus {apart} of {ranks} GPUs leaves none to train the draft; give {ranks - 1} or fewer"
        )
    if options.shard_target and ranks == 1:
        raise ValueError(NOTHING_TO_SHARD)
    if options.shard_target and apart == 1:
        raise ValueError(
            "--shard-target splits the target, and --target-gpus 1 leaves it whole on one GPU; give --target-gpus 2 or "
            "more, or leave one of them out"
        )


def restarted_options(options: TrainOptions) -> TrainOptions:
    """The options of a process that torchrun started again (--max-restarts): options to resume the run in --out, if
    --out holds a run; else `options` unchanged."""
    from fledge.train.checkpoint import RunDirectory
    from fledge.train.ranks import restart_count

    if options.resume or not restart_count() or not RunDirectory(options.out).recipe.is_file():
        return options
    kept = {name: getattr(options, name) for name in ("trust_remote_code", *MACHINE)}
    return TrainOptions(resume=options.out, **kept, given=frozenset({"resume", *kept}))
