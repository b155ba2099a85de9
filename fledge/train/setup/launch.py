"""Starts the processes of `fledge train --gpus`, through torchrun, and lets one of them print an error."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

from fledge.train.setup.options import TrainOptions

RUN_TORCHRUN = "from fledge.train.setup.launch import run_torchrun; run_torchrun()"
STORE_TIMEOUT = timedelta(seconds=5)  # for torchrun's store to answer, after an error
INTERRUPTED = 130  # the exit status of an interrupted run, in one process and in several


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


def first_to_say(message: str) -> bool:
    """Whether this process is the first rank to say `message`, so that an error of all ranks is printed once.

    Counts in torchrun's store, which works before the ranks are connected and after an error. True without the store.
    """
    import torch.distributed as dist

    from fledge.train.ranks import restart_count, started_by_torchrun

    if not started_by_torchrun():
        return True
    key = f"said {restart_count()} {hashlib.sha256(message.encode(errors='replace')).hexdigest()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
        return store.add(key, 1) == 1
    except (KeyError, ValueError, RuntimeError):  # a process that torchrun did not start, or torchrun has ended
        return True
