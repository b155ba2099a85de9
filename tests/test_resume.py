"""A run that is killed at any moment and resumed ends bit for bit like a run without interruption."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fledge.data.pack import Rows
from fledge.drafts.weights import load_draft
from fledge.io import display as display_module
from fledge.io.files import sha256_of
from fledge.targets.compatibility import resolve_layers
from fledge.targets.source import LiveFeatures
from fledge.train import trainer
from fledge.train.checkpoint import RunDirectory
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile, Signals
from fledge.train.optim import MasterOptimizer
from fledge.train.row_pass import Objective
from fledge.train.trainer import Hook, Run, Schedule, StepResult
from support.chats import tiny_chats
from support.commands import run_to_its_end
from support.files import metrics_of, write_rows
from support.mutations import replace_function
from support.rows import document
from support.runs import recipe_of, state_file, write_recipe
from support.targets import tiny_draft, tiny_target, tiny_target_directory

DRIVER = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)  # before any parallel region, so that forking is safe
from fledge.io.display import ProgressDisplay
from fledge.commands.train import run
from fledge.train.setup.options import TrainOptions

target, data, out, kills = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
options = dict(target=target, data=[data], max_length=64, row_length=128, steps=100, depth=3, draft_vocab=200,
               device="cpu", rows_per_step=2, eval_every=25, eval_tokens=4, save_every=4, seed=3, out=out)
show = ProgressDisplay(quiet=True)

def child(**asked):
    pid = os.fork()
    if pid == 0:
        run(TrainOptions(**asked), show.say, show)
        os._exit(0)
    return pid

def lines():
    path = os.path.join(out, "metrics.jsonl")
    return open(path).read().count("\\n") if os.path.exists(path) else 0

if kills == 0:
    os.waitpid(child(**options), 0)
else:
    random.seed(kills)
    os.makedirs(out, exist_ok=True)
    died = 0
    pid = child(**options)
    while died < kills:
        before = lines()
        while lines() == before:  # kill it some time after its next step, during a step or during a save
            time.sleep(0.002)
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended before it was killed"
        time.sleep(random.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        died += 1
        pid = child(resume=out)
    assert os.waitpid(pid, 0)[1] == 0
"""


def drive(target: Path, data: Path, out: Path, kills: int) -> None:
    run_to_its_end(DRIVER, target, data, out, kills)


KILLS = int(os.environ.get("KILLS", "2"))  # `make kills` sets 20


def test_killed_at_random_moments_ends_bit_for_bit_the_same(tmp_path):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 200)
    drive(target, data, tmp_path / "unbroken", 0)
    drive(target, data, tmp_path / "killed", KILLS)
    assert_same_run(tmp_path / "unbroken", tmp_path / "killed")


KILLED_AT_EACH_POINT = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # before any parallel region, so that forking is safe
from fledge.data.pack import Rows
from fledge.targets.compatibility import resolve_layers
from fledge.targets.source import LiveFeatures
from fledge.train.checkpoint import RunDirectory
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile
from fledge.train.row_pass import Objective
from fledge.train.trainer import Run, Schedule, train
from support.rows import document
from support.targets import tiny_draft, tiny_target

here, steps = Path(sys.argv[1]), int(sys.argv[2])
target = tiny_target()
source = LiveFeatures(target, resolve_layers(None, target))
rows = Rows([document(24, (4, 20), seed=i) for i in range(8)], 48, seed=0)
schedule = Schedule(steps, 1e-3, Objective(depth=2), save_every=1, eval_every=1)

def train_in(out):
    directory = RunDirectory(out)
    def better(draft):  # τ rises at each step, so that each draft is published
        return {"tau": 1 + directory.metrics.read_text().count("\\n")}
    with directory.locked():
        resumed = directory.recipe.exists()
        if not resumed:
            directory.start("a: 1")
        draft = tiny_draft(target, draft_vocab_size=100)
        run = Run(draft, rows, source, schedule, directory, resumed=resumed)
        train(run, [Drafts(better), MetricsFile(), Checkpoints()])

def train_until(kill, out):
    # kill: (number of checkpoints saved so far, number of the file operation after them to be killed before)
    saved = point = 0
    def reached(*_):
        nonlocal point
        point += 1
        if (saved, point) == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    def watch(event, given):
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if (writes or changes) and (str(out) in str(given[0]) or not os.path.isabs(str(given[0]))):
            reached()
    save, flush = RunDirectory.save_checkpoint, os.fsync
    def counting(run, *given):
        nonlocal saved, point
        save(run, *given)
        run.finish_saving()
        (here / "points").open("a").write(f"{point}\\n")
        saved, point = saved + 1, 0
    sys.addaudithook(watch)
    RunDirectory.save_checkpoint = counting
    os.fsync = lambda handle: (reached(), flush(handle))
    train_in(out)

def ended(kill, name):
    pid = os.fork()
    if pid == 0:
        train_until(kill, here / name)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def last_saved():
    progress = RunDirectory(here / "killed").load_progress()
    return progress["step"] if progress else 0

assert ended(None, "unbroken") == 0
first, second = map(int, (here / "points").read_text().split()[:2])
before = 0
for kill in [(0, i + 1) for i in range(first)] + [(1, i + 1) for i in range(second)]:
    assert ended(kill, "killed") == signal.SIGKILL, kill
    assert last_saved() >= before, f"{kill} lost a checkpoint of step {before}"
    before = last_saved()
assert before > second
assert ended(None, "killed") == 0
"""


def test_killed_at_each_point_of_a_save_ends_bit_for_bit_the_same(tmp_path):
    """The run is killed before the first file operation in its directory, resumed and killed before the second, and so
    on: before every open for writing, mkdir, flush, rename and removal up to the first checkpoint, and again, each time
    after one more step, while the draft and the checkpoint are replaced. No kill loses a checkpoint."""
    run_to_its_end(KILLED_AT_EACH_POINT, tmp_path, 70)
    assert_same_run(tmp_path / "unbroken", tmp_path / "killed")


def assert_same_run(unbroken: Path, killed: Path) -> None:
    """Both runs have the same files; weights are equal bit for bit, and metrics are equal apart from times."""
    for part in ("draft/model.safetensors", "checkpoint/model.safetensors"):
        assert (unbroken / part).read_bytes() == (killed / part).read_bytes(), part
    assert sorted(os.listdir(unbroken)) == sorted(os.listdir(killed))
    ours, theirs = metrics_of(unbroken), metrics_of(killed)
    for metrics in (*ours, *theirs):
        del metrics["seconds"], metrics["tokens_per_s"], metrics["parts"]
    assert ours == theirs


class StopIf(Hook):
    """Stops a run after a step if `stop` returns True."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def after(self, run: Run, result: StepResult) -> None:
        if self.stop():
            run.stop()


def train_in(directory: Path, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains for six steps, or until `stop`, or the rest after a stop; the first step's draft has the best τ."""
    target, there = tiny_target(tokenizer=False), RunDirectory(directory)
    source = LiveFeatures(target, resolve_layers(None, target))
    rows = Rows([document(24, (4, 20), seed=i) for i in range(8)], 48, seed=0)
    schedule = Schedule(6, 1e-3, Objective(depth=2), eval_every=1, optimizer="muon")  # of matrices; AdamW of the rest
    best_first = Drafts(lambda draft: {"tau": 9 - there.metrics.read_text().count("\n")})
    with there.locked():
        resumed = there.recipe.exists()
        if not resumed:
            there.start("a: 1")
        draft = tiny_draft(target, draft_vocab_size=100)
        run = Run(draft, rows, source, schedule, there, resumed=resumed)
        trainer.train(run, [best_first, MetricsFile(), StopIf(stop), Checkpoints()])


def train_in_two_parts(directory: Path) -> None:
    """Stops after the third step, adds a metrics line as if killed after the fourth step, and resumes."""
    train_in(directory, lambda: len(metrics_of(directory)) == 3)
    rows = metrics_of(directory)
    write_rows(RunDirectory(directory).metrics, [*rows, rows[-1] | {"step": 4}])
    train_in(directory)


def forget_the_moments(restored: Any, optimizer: MasterOptimizer) -> None:
    restored(optimizer)
    for moments in optimizer.adamw.state.values():
        moments["exp_avg"].zero_()


def forget_the_momentum(restored: Any, optimizer: MasterOptimizer) -> None:
    restored(optimizer)
    for momentum in optimizer.momentum.values():
        momentum.zero_()


def forget_the_steps(restored: Any, optimizer: MasterOptimizer) -> None:
    restored(optimizer)
    for moments in optimizer.adamw.state.values():
        moments["step"].zero_()


def round_the_weights(restored: Any, optimizer: MasterOptimizer) -> None:
    for master in optimizer.masters:
        master.copy_(master.bfloat16().float())
    restored(optimizer)


def keep_the_first_weights(restored: Any, optimizer: MasterOptimizer) -> None:
    pass


def begin_the_data_again(progress_of: Any, *given: Any) -> trainer.Progress:
    return replace(progress_of(*given), address=(0, 0))


def begin_the_schedule_again(progress_of: Any, *given: Any) -> trainer.Progress:
    return replace(progress_of(*given), step=0)


def forget_the_best(progress_of: Any, *given: Any) -> trainer.Progress:
    return replace(progress_of(*given), best_tau=-1.0)


def keep_every_line(truncate: Any, run: RunDirectory, step: int) -> None:
    pass


MUTATIONS = [  # (owner, function, replacement)
    (MasterOptimizer, "restored", forget_the_moments),
    (MasterOptimizer, "restored", forget_the_momentum),
    (MasterOptimizer, "restored", forget_the_steps),
    (MasterOptimizer, "restored", round_the_weights),
    (MasterOptimizer, "restored", keep_the_first_weights),
    (trainer, "_progress_of", begin_the_data_again),
    (trainer, "_progress_of", begin_the_schedule_again),
    (trainer, "_progress_of", forget_the_best),
    (RunDirectory, "truncate_metrics", keep_every_line),
]


def test_a_run_in_two_parts_is_the_same(tmp_path):
    train_in(tmp_path / "unbroken")
    train_in_two_parts(tmp_path / "parts")
    assert_same_run(tmp_path / "unbroken", tmp_path / "parts")


@pytest.mark.parametrize(("owner", "name", "wrong"), MUTATIONS, ids=[m[2].__name__ for m in MUTATIONS])
def test_a_resume_that_forgets_is_noticed(owner, name, wrong, tmp_path, monkeypatch):
    train_in(tmp_path / "unbroken")
    replace_function(monkeypatch, owner, name, wrong)
    train_in_two_parts(tmp_path / "parts")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "unbroken", tmp_path / "parts")


def test_sigterm_saves_a_checkpoint_and_names_the_resume_command(tmp_path):
    """SIGTERM ends the run after the current step with a checkpoint, exit code 130 and the command that continues."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 200)
    fledge = [sys.executable, "-m", "fledge.cli", "train"]
    flags = "--max-length 64 --row-length 128 --steps 2000 --depth 2 --save-every 100000 --device cpu".split()
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*fledge, "--target", target, "--data", data, "--out", run, *flags], stderr=subprocess.PIPE, text=True
    )
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopping after this step" in said and "--resume" in said
    step = metrics_of(run)[-1]["step"]
    assert 0 < step < 2000 and (run / "checkpoint" / "progress.json").exists()


def test_the_draft_given_with_init_from_may_change_or_disappear(tmp_path, fledge):
    """A resumed run reads its checkpoint only, even if the draft given with --init-from was replaced."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    flags = "--max-length 64 --row-length 128 --device cpu --eval-tokens 4".split()
    begin = ["train", "--target", target, "--data", data, *flags]
    drafts = {name: tmp_path / name / "draft" for name in ("first", "other")}
    for seed, name in enumerate(drafts):
        words = "--steps", 1, "--draft-vocab", 100 + seed, "--depth", 2, "--out", tmp_path / name
        assert fledge(*begin, *words).code == 0
    run, whole = tmp_path / "run", tmp_path / "whole"
    for out in (run, whole):
        assert fledge(*begin, "--steps", 2, "--init-from", drafts["first"], "--out", out).code == 0
    saved = recipe_of(run)
    assert saved["data"] == [str(data)] and Path(saved["init_from"]).is_absolute()
    saved["steps"] = saved["settled"]["steps"] = 3  # as if the run had been stopped early
    write_recipe(run, saved)
    shutil.rmtree(drafts["first"])
    drafts["other"].rename(drafts["first"])
    ran = fledge("train", "--resume", run)
    assert ran.code == 0, ran.err
    ours, before = (load_draft(out / "checkpoint") for out in (run, whole))
    assert ours.target_ids().tolist() == before.target_ids().tolist() and ours.target_ids().numel() == 100
    again = fledge("train", "--resume", run)
    assert again.code == 0 and "this run was already finished" in again.err


@pytest.mark.parametrize("name", ["draft", "checkpoint", "metrics.jsonl", "summary.json"])
def test_files_of_the_user_are_not_replaced(name, tmp_path, fledge):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    mine = tmp_path / "mine" / name
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine")
    refused = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "mine", "--steps", 1)
    assert refused.code == 2 and f"{mine} exists" in refused.err
    assert (mine / "thesis.txt").read_text() == "mine"
    refused = fledge("train", "--target", target, "--data", data, "--out", "", "--steps", 1)
    assert refused.code == 2 and "--out is empty" in refused.err


FLAGS = "--max-length 64 --row-length 128 --steps 6 --depth 2 --save-every 100 --device cpu".split()


def during_step(monkeypatch, step: int, act: Callable[[], None]) -> None:
    """Calls `act` in the middle of the given training step."""
    computed = trainer.optimizer_step

    def acting(*given):
        if given[0].progress.step == step - 1:
            act()
        return computed(*given)

    monkeypatch.setattr(trainer, "optimizer_step", acting)


@pytest.fixture(autouse=True)
def hangups_are_received() -> Iterator[None]:
    """SIGHUP has its default action at first, even if the tests themselves run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(*signals: int) -> None:
    for number in signals:
        os.kill(os.getpid(), number)
        time.sleep(0.01)  # gives the handler time to print


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP],
        [signal.SIGINT, signal.SIGTERM],
    ],
    ids=lambda signals: "-".join(s.name for s in signals),
)
def test_each_termination_signal_stops_training_after_the_step(signals, tmp_path, fledge, monkeypatch):
    """A terminal that closes sends SIGHUP and its shell sends another; a scheduler sends SIGTERM."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    during_step(monkeypatch, 3, lambda: send(*signals))
    ran = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS)
    assert ran.code == 130 and ran.err.count("stopping after this step; a second Ctrl-C") == 1, ran.err
    assert f"stopped after step 3; continue with: fledge train --resume {tmp_path / 'run'}" in ran.err.replace("\n", "")
    assert RunDirectory(tmp_path / "run").load_progress()["step"] == 3
    monkeypatch.undo()
    assert fledge("train", "--resume", tmp_path / "run").code == 0
    assert len(metrics_of(tmp_path / "run")) == 6
    assert not (tmp_path / "run" / ".fledge-lock").exists()


def test_a_run_under_nohup_continues_when_its_terminal_closes(tmp_path, fledge, monkeypatch):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    during_step(monkeypatch, 3, lambda: send(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ran = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ran.code == 0 and (tmp_path / "run" / "draft").exists(), ran.err


def test_a_second_ctrl_c_waits_for_a_save_to_end(tmp_path, fledge, monkeypatch):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    save = RunDirectory.save_checkpoint

    def interrupted(*given):
        send(signal.SIGINT, signal.SIGINT)
        save(*given)

    during_step(monkeypatch, 2, lambda: send(signal.SIGINT))
    monkeypatch.setattr(RunDirectory, "save_checkpoint", interrupted)
    ran = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS)
    assert ran.code == 130 and "stopped after step 2; continue with" in ran.err, ran.err
    assert ran.err.count("a checkpoint is being saved; stopping when it is complete") == 2
    assert RunDirectory(tmp_path / "run").load_progress()["step"] == 2


def test_a_second_ctrl_c_in_a_step_stops_at_once(tmp_path, fledge, monkeypatch):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    during_step(monkeypatch, 2, lambda: send(signal.SIGINT, signal.SIGINT))
    ran = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS)
    assert ran.code == 130 and "stopped at once, before the first checkpoint; start again with" in ran.err, ran.err


def test_handlers_that_python_did_not_install_become_the_default(monkeypatch: pytest.MonkeyPatch):
    handlers: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    with Signals(print).around(None):
        before = len(handlers)
    assert handlers[before:] == [signal.SIG_DFL] * before


def test_an_interruption_is_reported_from_another_thread():
    """The signal may arrive while the main thread writes a line, and a stream does not allow a write within a write."""
    told, stopped = [], []
    run = SimpleNamespace(stop=lambda: stopped.append(True))
    with Signals(lambda line: told.append((line, threading.current_thread()))).around(run):
        send(signal.SIGINT)
        assert stopped == [True]
    ((line, thread),) = told
    assert "stopping after this step" in line and thread is not threading.main_thread()


@pytest.mark.parametrize("signals", [0, 1])
def test_a_signal_that_ends_the_compiler_ends_training(signals: int, tmp_path, fledge, monkeypatch):
    """A terminal's Ctrl-C also ends the assembler that Triton runs, which is no error of the run."""
    ptxas_error = pytest.importorskip("triton.runtime.errors").PTXASError
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)

    def fail_to_compile() -> None:
        send(*[signal.SIGINT] * signals)
        raise ptxas_error("`ptxas` failed with error code -2")

    during_step(monkeypatch, 2, fail_to_compile)
    words = ["train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS]
    if signals:
        ran = fledge(*words)
        assert ran.code == 130 and "stopped at once, before the first checkpoint; start again with" in ran.err, ran.err
    else:
        with pytest.raises(ptxas_error):
            fledge(*words)


@pytest.mark.parametrize("how", ["closed pipe", "full disk"])
def test_training_saves_and_ends_when_standard_error_cannot_be_written(how, tmp_path, fledge, monkeypatch):
    """With standard error closed (`2>&1 | head`, or a closed terminal) or full, training notices at its next line and
    ends after the step, with a checkpoint and without a traceback."""
    monkeypatch.setattr(display_module, "LINE_INTERVAL", 0)
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    if how == "closed pipe":
        reader, writer = os.pipe()
        stderr = os.fdopen(writer, "w")
    else:
        stderr = open("/dev/full", "w")  # noqa: SIM115
    with stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        if how == "closed pipe":
            during_step(monkeypatch, 1, lambda: os.close(reader))
        ran = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS)
        monkeypatch.undo()
    assert ran.code == 130
    assert RunDirectory(tmp_path / "run").load_progress()["step"] == 1
    assert fledge("train", "--resume", tmp_path / "run").code == 0
    assert [m["step"] for m in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_signal_before_training_leaves_no_directory(tmp_path, fledge, monkeypatch):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    monkeypatch.setattr("fledge.train.setup.data.training_data", lambda *given: send(signal.SIGHUP))
    ran = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS)
    assert ran.code == 130 and not (tmp_path / "run").exists()


def test_a_run_that_another_process_trains_is_refused(tmp_path, fledge):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    words = ["train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS]
    assert fledge(*words).code == 0
    for run, second in ((tmp_path / "run", ["train", "--resume", tmp_path / "run"]), (tmp_path / "new", words)):
        with RunDirectory(run).locked():
            ran = fledge(*(run if word == tmp_path / "run" else word for word in second))
            assert ran.code == 2 and f"{run} is in use: process {os.getpid()} on" in ran.err, ran.err
    assert not (tmp_path / "new").exists()
    assert fledge("train", "--resume", tmp_path / "run").code == 0


@pytest.mark.parametrize("name", ["checkpoint", "draft", "metrics.jsonl", "recipe.yaml", "summary.json"])
def test_a_run_with_a_link_in_it_is_refused(name, tmp_path, fledge):
    """It is refused before training, not at the second save."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    assert fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS).code == 0
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    ran = fledge("train", "--resume", tmp_path / "run")
    assert ran.code == 2 and f"{name} is a symbolic link" in ran.err and "move the link's target" in ran.err, ran.err
    (tmp_path / "run" / name).unlink()  # what the message says to do
    (tmp_path / "elsewhere").rename(tmp_path / "run" / name)
    assert fledge("train", "--resume", tmp_path / "run").code == 0


def other_progress(progress: dict[str, Any]) -> dict[str, object]:
    """Variants of a progress that training does not write, by description."""
    return {
        "empty": {},
        "a step that is text": {**progress, "step": "three"},
        "a step after the last": {**progress, "step": 99},
        "no such row": {**progress, "address": (0, 10**9)},
        "an address of one number": {**progress, "address": (0,)},
        "a list": [1, 2],
        "an unknown field": {**progress, "loss": 1.0},
    }


def test_a_progress_that_training_did_not_write_is_refused(tmp_path, fledge):
    """In a checkpoint of another run, with its hashes."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    assert fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS).code == 0
    file, sums = (tmp_path / "run" / "checkpoint" / name for name in ("progress.json", "SHA256SUMS"))
    progress = json.loads(file.read_text())

    def write(other: object) -> None:
        file.write_text(json.dumps(other))
        sums.write_text(re.sub(r"\w+(?=  progress.json)", sha256_of(file), sums.read_text()))

    for what, other in other_progress(progress).items():
        write(other)
        ran = fledge("train", "--resume", tmp_path / "run")
        assert ran.code == 2 and "cannot be read (it " in ran.err and "start a new run" in ran.err, (what, ran)
    write(progress)
    assert fledge("train", "--resume", tmp_path / "run").code == 0


def test_a_flipped_bit_of_the_state_is_refused(tmp_path, fledge):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    assert fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *FLAGS).code == 0
    file = state_file(tmp_path / "run")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    ran = fledge("train", "--resume", tmp_path / "run")
    assert ran.code == 2 and "its SHA-256 differs from the recorded one" in ran.err, ran.err
    words = "--init-from", tmp_path / "run" / "checkpoint", "--out", tmp_path / "anew", *FLAGS
    assert fledge("train", "--target", target, "--data", data, *words).code == 0, "the command that the message names"
    assert len(metrics_of(tmp_path / "anew")) == 6


def recipe_with(change: Callable[[dict], object]) -> dict:
    settled = {"depth": 5, "data_sha256": "0"}
    recipe = {"target": "target", "data": ["chats.jsonl"], "settled": settled}
    return change(recipe)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: [r], "contains a list of 1; a recipe consists of lines"),
        (lambda r: {**r, "settled": None}, "has no settled values (key settled)"),
        (lambda r: {**r, "settled": {"depth": 5}}, "has no settled values (key settled)"),
        (lambda r: {**r, "settled": {**r["settled"], "slots": "many"}}, "--slots 'many' is not of type int"),
        (lambda r: {**r, "settled": {**r["settled"], "depth": 0}}, "--depth 0: it must be at least 1"),
        (lambda r: {**r, "lr": "fast"}, "lr: 'fast' is not of type float | None"),
        (lambda r: {**r, "data": [3]}, "data: [3] is not of type list[str]"),
        (lambda r: {**r, "stepz": 3}, "'stepz' is not an option of fledge train; did you mean steps?"),
    ],
)
def test_a_recipe_that_training_did_not_write_is_refused(change, reason, tmp_path, fledge):
    write_recipe(tmp_path, recipe_with(change))
    ran = fledge("train", "--resume", tmp_path)
    assert ran.code == 2 and reason in ran.err and "damaged; start a new run" in ran.err, ran.err


def test_settled_values_of_a_run_cannot_be_changed(tmp_path, fledge):
    """A run whose recipe or data changed is refused, not continued with other settings."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    run = tmp_path / "run"
    assert fledge("train", "--target", target, "--data", data, "--out", run, *FLAGS).code == 0
    whole = recipe_of(run)
    for name, value, reason in (
        ("steps", 9, "settled.steps is 6, but the options and data give 9; undo the change"),
        ("draft_vocab", 100, "settled.draft_vocab is 400, but the options and data give 100"),
        ("data", [str(data), str(data)], "the data differs from that of the run in"),
    ):
        write_recipe(run, {**whole, name: value})
        ran = fledge("train", "--resume", run)
        assert ran.code == 2 and reason in ran.err, ran.err
    write_recipe(run, whole)
    assert fledge("train", "--resume", run).code == 0


@pytest.mark.parametrize(
    ("error", "code", "saved", "unsaved"),
    [
        (torch.OutOfMemoryError, 2, "--init-from", "start again in another --out, with fewer than 256 --slots"),
        (KeyboardInterrupt, 130, "stopped at once; continue with", "before the first checkpoint; start again with"),
    ],
)
def test_an_error_that_ends_a_run_says_what_to_do(error, code, saved, unsaved, tmp_path, fledge, monkeypatch):
    """After an out-of-memory error or a second Ctrl-C, the message says what to do, with and without a checkpoint."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    step = trainer.optimizer_step

    def ending(*given):
        if given[0].progress.step == 2:
            raise error
        return step(*given)

    monkeypatch.setattr(trainer, "optimizer_step", ending)
    flags = "--max-length 64 --row-length 128 --steps 4 --depth 2 --device cpu".split()
    for every, said in ((1, saved), (10, unsaved)):
        run = tmp_path / f"every-{every}"
        ran = fledge("train", "--target", target, "--data", data, "--out", run, "--save-every", every, *flags)
        assert ran.code == code and said in ran.err, ran.err
        assert (run / "checkpoint").exists() == (every == 1)
        assert ("the GPU ran out of memory" in ran.err) == (code == 2)


def test_resume_refuses_changed_data(tmp_path, fledge, monkeypatch):
    """The file is named before the target is loaded and anything is tokenized; files elsewhere may be the same."""
    target, data, run = tiny_target_directory(tmp_path), tmp_path / "data", tmp_path / "run"
    data.mkdir()
    chats = [tiny_chats(data / f"{name}.jsonl", 30) for name in "ab"]
    flags = "--max-length 64 --row-length 128 --steps 2 --depth 2 --device cpu".split()
    assert fledge("train", "--target", target, "--data", data, "--out", run, *flags).code == 0
    data = data.rename(tmp_path / "moved")
    write_recipe(run, {**recipe_of(run), "data": [str(data)]})
    assert fledge("train", "--resume", run).code == 0
    monkeypatch.setattr("fledge.train.setup.target.prepare_shared_target", lambda *given: pytest.fail("loaded"))
    for name, change, how in (
        ("c", lambda file: tiny_chats(file, 31), "was added"),
        ("a", lambda file: tiny_chats(file, 32), "was added"),  # under this path, which the run did not have
    ):
        change(data / f"{name}.jsonl")
        refused = fledge("train", "--resume", run)
        said = " ".join(refused.err.split())
        assert refused.code == 2 and f"that of the run in {run}: {data / name}.jsonl {how}; restore the file" in said
        (data / "c.jsonl").unlink(missing_ok=True)
    data = data.rename(tmp_path / "data")
    write_recipe(run, {**recipe_of(run), "data": [str(data)]})
    assert f"{chats[0]} was changed" in " ".join(fledge("train", "--resume", run).err.split())
    chats[0].unlink()
    tiny_chats(chats[1], 33)
    assert f"{chats[1]} was changed" in " ".join(fledge("train", "--resume", run, "--dry-run").err.split())


def test_a_stopped_run_names_its_draft_so_far(tmp_path, fledge, monkeypatch):
    """Commands name the checkpoint of an unfinished run, and take the checkpoint for a draft."""
    target, data, run = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30), tmp_path / "run"
    train = ["train", "--target", target, "--data", data, *FLAGS]
    during_step(monkeypatch, 3, lambda: send(signal.SIGINT, signal.SIGINT))
    assert fledge(*train, "--out", tmp_path / "young").code == 130
    monkeypatch.undo()
    young = " ".join(fledge("inspect", tmp_path / "young").err.split())
    assert f"the run in {tmp_path / 'young'} is not finished: it has saved no draft yet, and fledge train" in young
    during_step(monkeypatch, 3, lambda: send(signal.SIGINT))
    assert fledge(*train, "--out", run).code == 130
    monkeypatch.undo()
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    pair, short = ["--target", target, "--draft"], ["--device", "cpu", "--max-new-tokens", 4]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"turns": ["the young bird"]}])
    for words, more in (
        (["generate", *pair], ["--prompt", "the bird", *short]), (["chat", *pair], ["--device", "cpu"]),
        (["eval", *pair], ["--prompts", prompts, *short]), (["inspect"], []),
        (["export", "--to", "vllm", "--draft"], ["--out", tmp_path / "exported"]),
        ([*train, "--out", tmp_path / "other", "--init-from"], []),
    ):  # fmt: skip
        for place in (run, run / "draft"):
            ran = fledge(*words, place, *more)
            said = " ".join(ran.err.split())
            assert ran.code == 2 and f"{place} holds no config.json; the run in {run} is not finished: " in said, said
            assert f"draft so far is {run / 'checkpoint'}, and fledge train --resume {run} continues" in said, said
        ran = fledge(*words, run / "checkpoint", *more)
        assert ran.code == 0, ran.err
    checked = fledge("check", *pair, run / "checkpoint", "--device", "cpu")
    assert "the draft has no probe (fledge train writes one)" in " ".join(checked.out.split()), checked
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text(), newline="\r\n")  # as after a copy by a program for Windows
    assert fledge("train", "--resume", run).code == 0
    assert [m["step"] for m in metrics_of(run)] == [1, 2, 3, 4, 5, 6]
    assert f"the run's draft is {run / 'draft'}" in " ".join(fledge("inspect", run / "drafts").err.split())


def test_a_disk_that_is_too_small_is_named_before_the_first_step(tmp_path, fledge, monkeypatch):
    target, data, run = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30), tmp_path / "run"
    words, usage = ["train", "--target", target, "--data", data, "--out", run, *FLAGS], shutil.disk_usage
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=100_000))
        ran = fledge(*words)
        said = " ".join(ran.err.split())
        assert ran.code == 2 and f"the disk has too little space to save the run in {run}: its draft and" in said, said
        assert "need 720." in said and "and 100.00 KB are free" in said and not run.exists(), said
    assert fledge(*words).code == 0
    written = sum(f.stat().st_size for name in ("draft", "checkpoint") for f in (run / name).rglob("*") if f.is_file())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=written))
    assert fledge("train", "--resume", run).code == 0, "what is there needs no more space"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=written // 2))
    assert "too little space to save" in fledge("train", "--resume", run).err.replace("\n", " ")
