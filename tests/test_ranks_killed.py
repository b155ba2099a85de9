"""Runs of several ranks, started by torchrun, that are killed and resumed end as if they had never been killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fledge.drafts.weights import WEIGHTS
from support.chats import tiny_chats
from support.files import metrics_of
from support.ranks import ranks_of
from support.targets import tiny_target_directory

KILLS = int(os.environ.get("KILLS", "2"))  # `make kills` sets 20
STEPS = 20 * (KILLS + 1)
FLAGS = f"""--max-length 64 --row-length 128 --steps {STEPS} --depth 3 --draft-vocab 200 --rows-per-step 4
            --eval-every 20 --eval-tokens 4 --save-every 2 --seed 3 --device cpu --dtype float64""".split()


def start(ranks: int, *words: object, restarts: int = 0) -> subprocess.Popen[str]:
    """`fledge train` in several ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [*torchrun, "--max-restarts", restarts, "-m", "fledge", "train", *words]
    return subprocess.Popen(
        [str(word) for word in command], text=True, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told


def wait_for_steps(run: Path, process: subprocess.Popen[str], more: int) -> None:
    """Waits until a run has made some more steps."""

    def steps() -> int:
        return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0

    seen = steps()
    while more > 0:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
        seen, before = steps(), seen  # fewer than before if a resumed run repeats steps
        more -= max(seen - before, 0)


def send_until_it_ends(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a rank every millisecond. torchrun sends it once, at any of these moments."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, number)
            time.sleep(0.001)


def assert_same_run(ours: Path, theirs: Path) -> None:
    """The same weights bit for bit, and the same metrics but for times."""
    for part in ("draft", "checkpoint"):
        assert (ours / part / WEIGHTS).read_bytes() == (theirs / part / WEIGHTS).read_bytes(), part
    states = [{f.name: load_file(f) for f in (run / "checkpoint" / "state").iterdir()} for run in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for name, tensors in states[0].items():
        assert all(torch.equal(x, states[1][name][key]) for key, x in tensors.items())
    rows = [metrics_of(run) for run in (ours, theirs)]
    for m in (*rows[0], *rows[1]):
        del m["seconds"], m["tokens_per_s"], m["parts"]
    assert rows[0] == rows[1]


def assert_says_that_a_rank_ended(told: str, run: Path) -> None:
    """One sentence, with the command that continues; no traceback of fledge's own."""
    lost = "(?:rank 1 of 2|another of 2 ranks) ended or did not answer .*; see the log of torchrun"
    sentence = rf"^fledge: {lost}; .*fledge train --resume {re.escape(str(run))}$"
    assert len(re.findall(sentence, told, re.MULTILINE)) == 1, told
    assert "KeyboardInterrupt" not in told and "sys.excepthook" not in told and "fledge/train/" not in told, told


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The options of a new run, without --out."""
    directory = tmp_path_factory.mktemp("ranks")
    target, data = tiny_target_directory(directory), tiny_chats(directory / "chats.jsonl", 200)
    return ["--target", target, "--data", data, *FLAGS]


@pytest.fixture(scope="module")
def unbroken(words: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("unbroken") / "run"
    finish(start(2, *words, "--out", run))
    assert len(metrics_of(run)) == STEPS
    return run


def test_killed_at_random_moments_ends_bit_for_bit_the_same(
    words: list[object], unbroken: Path, tmp_path: Path
) -> None:
    """In turn, torchrun and all its ranks are killed with SIGKILL, or one rank, in a step, a collective or a
    checkpoint. In the middle, a copy goes on in a single process, with the same losses."""
    random.seed(KILLS)
    run, one = tmp_path / "run", tmp_path / "one"
    process = start(2, *words, "--out", run)
    for kill in range(KILLS):
        wait_for_steps(run, process, random.randint(1, 12))
        time.sleep(random.random() * 0.1)
        if kill % 2:
            killed = random.randrange(2)
            ranks = ranks_of(process)
            os.kill(ranks[killed], signal.SIGKILL)
            send_until_it_ends(ranks[1 - killed], signal.SIGTERM)
            _, told = process.communicate(timeout=120)
            assert process.returncode != 0
            assert_says_that_a_rank_ended(told, run)
        else:
            for pid in (process.pid, *ranks_of(process)):
                os.kill(pid, signal.SIGKILL)
            process.communicate()
        if kill == KILLS // 2:
            shutil.copytree(run, one)
        process = start(2, "--resume", run)
    finish(process)
    assert_same_run(unbroken, run)
    finish(start(1, "--resume", one))
    losses = [[m["loss"] for m in metrics_of(path)] for path in (one, unbroken)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_torchrun_restarts_a_killed_rank_and_the_run_goes_on(
    words: list[object], unbroken: Path, tmp_path: Path
) -> None:
    process = start(2, *words, "--out", tmp_path / "run", restarts=1)
    wait_for_steps(tmp_path / "run", process, 5)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    finish(process)
    assert_same_run(unbroken, tmp_path / "run")


def test_sigterm_saves_in_all_ranks_and_names_the_command(words: list[object], tmp_path: Path) -> None:
    """A preempted machine: torchrun passes the signal on, all ranks stop after the same step, and it is saved."""
    run = tmp_path / "run"
    process = start(2, *words, "--save-every", 1000, "--out", run)
    wait_for_steps(run, process, 3)
    process.terminate()
    _, told = process.communicate(timeout=120)
    assert process.returncode != 0 and f"continue with: fledge train --resume {run}" in told.replace("\n", "")
    assert (run / "checkpoint" / "progress.json").exists() and len(metrics_of(run)) < STEPS
