"""The command line: `python -m fledge`, and the command `fledge`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback, also while its modules are imported."""
    try:
        from fledge.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
