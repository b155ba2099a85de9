"""The command line: `python -m fledge`, and the command `fledge`."""

from __future__ import annotations

import os
import sys

# How often a waiting thread of an OpenMP operation looks before it sleeps: for some 0.1 ms. OpenMP's own default is ten
# times as many, with which threads that wait take the cores from those that compute where other programs run too.
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
