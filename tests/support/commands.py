"""Results of commands, and scripts that run in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]


# `fledge`, killed before a small file, named by the first word, has any content
KILLED_WRITER = """
import os, signal, sys
from fledge.io import files
from fledge.cli import main
name, write = sys.argv.pop(1), files.replace_parts

def killed(file, parts, temporary):
    if file.name == name:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    write(file, parts, temporary)

files.replace_parts = killed
main()
"""


@dataclass
class Ran:
    """The result of a command: exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def python(script: str, *words: object) -> subprocess.Popen[str]:
    """Starts a script, which can import fledge and support, with piped standard output."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)], env=environment, stdout=subprocess.PIPE, text=True
    )


def kill_as_it_writes(name: str, *words: object) -> None:
    """Runs a command that is killed as it writes a small file called `name`."""
    with python(KILLED_WRITER, name, *words) as process:
        assert process.wait(timeout=300) == -signal.SIGKILL


def run_to_its_end(script: str, *words: object, seconds: float = 300) -> None:
    """Runs a script that must exit with code 0; kills it after `seconds`."""
    with python(script, *words) as process:
        try:
            process.communicate(timeout=seconds)
        finally:
            process.kill()
    assert process.returncode == 0
