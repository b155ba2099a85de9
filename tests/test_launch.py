"""`fledge train` over several processes: what is started, what is refused, and what a restarted process continues."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.train.checkpoint import RunDirectory
from fledge.train.setup import launch
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe_file import restarted_options
from fledge.train.setup.run import run_ranks
from support.chats import tiny_chats
from support.files import metrics_of
from support.runs import recipe_of
from support.targets import tiny_target_directory

FLAGS = "--max-length 64 --row-length 128 --steps 2 --depth 2".split()


def options(**given: Any) -> TrainOptions:
    return TrainOptions(target="target", data=["chats.jsonl"], **given)


def test_gpus_are_counted_before_processes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.needs_processes(options(gpus=2)) and not launch.needs_processes(options(gpus=1))
    assert not launch.needs_processes(options())
    with pytest.raises(ValueError, match="--gpus 3, but this machine has 2 GPUs"):
        launch.needs_processes(options(gpus=3))
    with pytest.raises(ValueError, match="--gpus 2 with --device cuda:1; leave one of them out"):
        launch.needs_processes(options(gpus=2, device="cuda:1"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launch.needs_processes(options(gpus=2)), "torchrun has started this process"


def test_the_command_line_starts_torchrun_with_its_own_words(fledge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "start_processes", lambda gpus, words: started.append((gpus, words)) or 7)
    assert fledge("train", "--gpus", 2, "--target", "t", "--data", "d").code == 7
    assert started == [(2, ["train", "--gpus", "2", "--target", "t", "--data", "d"])]


def test_start_processes_returns_the_status_of_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes with the same error: one of them prints it, and the status is torchrun's."""
    assert launch.start_processes(2, ["train", "--device", "cpu", "--target", str(tmp_path)]) != 0
    assert capfd.readouterr().err.count("fledge: ") == 1


WAITING = """
import signal, sys, time
from fledge.train.setup.launch import start_processes
print(start_processes(2, sys.argv[1:]), flush=True)
"""


def test_a_signal_reaches_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to the first process alone stops the ranks after a step, with a checkpoint; the status is 130."""
    target, data, run = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30), tmp_path / "run"
    words = ["train", "--target", target, "--data", data, "--out", run, "--device", "cpu", *FLAGS, "--steps", 5000]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while not (run / "metrics.jsonl").exists() or not metrics_of(run):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    told, printed = process.communicate(timeout=120)
    assert "Traceback" not in printed and f"--resume {run}" in printed.replace("\n", ""), printed
    assert told.strip() == "130" and (run / "checkpoint" / "progress.json").exists()


def test_what_several_processes_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--gpus 2 starts processes .*: start it with torchrun"):
        run_ranks(options(gpus=2, device="cpu")).__enter__()
    with (
        pytest.raises(ValueError, match="--shard-target splits the target over several GPUs; give --gpus"),
        run_ranks(options(shard_target=True, device="cpu")),
    ):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ValueError, match="--device cuda:0 with several processes"),
        run_ranks(options(device="cuda:0")),
    ):
        pass


def test_a_restarted_process_resumes_the_run_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(out=str(tmp_path / "run"), shard_target=True, rank_timeout=5.0)
    assert restarted_options(given) is given
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarted_options(given) is given, "nothing was begun"
    RunDirectory(tmp_path / "run").start("a: 1")
    found = restarted_options(given)
    assert found.resume == given.out and found.shard_target and found.rank_timeout == 5.0 and not found.data
    assert restarted_options(found) is found


def test_rows_of_a_step_are_settled(fledge: Any, tmp_path: Path) -> None:
    """The number of rows depends on the number of GPUs at the start only. What a run is computed on is not in its
    recipe."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    run = tmp_path / "run"
    words = ["--target", target, "--data", data, "--out", run, "--device", "cpu", "--rank-timeout", 3, *FLAGS]
    assert fledge("train", *words).code == 0
    recipe = recipe_of(run)
    assert recipe["settled"]["rows_per_step"] == 1 and "rank_timeout" not in recipe and "rows_per_step" not in recipe
    again = fledge("train", "--resume", run, "--rank-timeout", 2)
    assert again.code == 0 and len(metrics_of(run)) == 2, again.err
