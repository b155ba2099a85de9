"""torchrun, of `fledge train --gpus`, without the traceback of the signal that stopped it."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

INTERRUPTED = 130  # the exit status of an interrupted run, in one process and in several


def run() -> None:
    """Runs torchrun with the arguments of this process. A signal ends it with INTERRUPTED, after its processes."""
    try:
        main()
    except SignalException:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
