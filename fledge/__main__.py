"""The command line: `python -m fledge`, and the command `fledge`."""

from __future__ import annotations

import os
import sys

# Spins of a waiting OpenMP thread before the thread sleeps: some 0.1 ms. OpenMP's default is ten times as many: where
# other programs run too, waiting threads then take cores from computing threads.
SPINS = "30000"


def main() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback, also while its modules are imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported
    try:
        from fledge.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
