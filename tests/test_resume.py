"""A run that is killed, at any moment, and resumed ends with the same bits as one that never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_chats, tiny_target_directory

from fledge.models.weights import load_draft
from fledge.train import trainer

DRIVER = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)  # before any parallel region, so that forking is safe
from fledge.jobs.show import Show
from fledge.jobs.train import TrainOptions, run

target, data, out, kills = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
options = dict(target=target, data=[data], max_length=64, row_length=128, steps=100, depth=3, draft_vocab=200,
               device="cpu", rows_per_step=2, eval_every=25, eval_tokens=4, save_every=4, seed=3, out=out)
show = Show(quiet=True)

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
        while lines() == before:  # somewhere after its first step, be it in a step or while saving
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
    subprocess.run([sys.executable, "-c", DRIVER, target, data, out, str(kills)], check=True, timeout=300)


def test_killed_ten_times_ends_bit_for_bit_the_same(tmp_path):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 200)
    drive(target, data, tmp_path / "unbroken", 0)
    drive(target, data, tmp_path / "killed", 10)
    for part in ("draft/model.safetensors", "checkpoint/model.safetensors"):
        assert (tmp_path / "unbroken" / part).read_bytes() == (tmp_path / "killed" / part).read_bytes(), part
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("unbroken", "killed")
    )
    for metrics in (*ours, *theirs):
        del metrics["seconds"], metrics["tokens_per_s"]
    assert ours == theirs


def test_a_termination_request_saves_and_resumes(tmp_path):
    """One SIGTERM ends the run after its step with a checkpoint, and says how to go on; it is not a run that ended."""
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
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert 0 < step < 2000 and (run / "checkpoint" / "state.pt").exists()


def test_the_draft_begun_with_may_change_or_go(tmp_path, fledge):
    """A run goes on from its checkpoint, whatever lies by now where its first draft was, and from anywhere."""
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
    saved = json.loads((run / "train.json").read_text())
    assert saved["options"]["data"] == [str(data)] and Path(saved["options"]["init_from"]).is_absolute()
    saved["options"]["steps"] = 3  # as if it had been stopped
    (run / "train.json").write_text(json.dumps(saved))
    shutil.rmtree(drafts["first"])
    drafts["other"].rename(drafts["first"])
    ran = fledge("train", "--resume", run)
    assert ran.code == 0, ran.err
    ours, before = (load_draft(out / "checkpoint") for out in (run, whole))
    assert ours.target_ids().tolist() == before.target_ids().tolist() and ours.target_ids().numel() == 100
    again = fledge("train", "--resume", run)
    assert again.code == 0 and "this run was finished" in again.err


@pytest.mark.parametrize("name", ["draft", "checkpoint", "metrics.jsonl"])
def test_nothing_of_the_users_is_replaced(name, tmp_path, fledge):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    mine = tmp_path / "mine" / name
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine")
    refused = fledge("train", "--target", target, "--data", data, "--out", tmp_path / "mine", "--steps", 1)
    assert refused.code == 2 and f"{mine} is there" in refused.err
    assert (mine / "thesis.txt").read_text() == "mine"
    refused = fledge("train", "--target", target, "--data", data, "--out", "", "--steps", 1)
    assert refused.code == 2 and "--out is empty" in refused.err


@pytest.mark.parametrize(
    ("error", "code", "saved", "unsaved"),
    [
        (torch.OutOfMemoryError, 2, "--init-from", "train anew in another --out with fewer than 256 --slots"),
        (KeyboardInterrupt, 130, "stopped at once; go on with", "before the first checkpoint; begin again with"),
    ],
)
def test_what_ends_a_run_is_said(error, code, saved, unsaved, tmp_path, fledge, monkeypatch):
    """A full GPU or a second interruption: with what to do about it, where a checkpoint is and where none is."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    step = trainer._step

    def ending(*given):
        if given[-1].step == 2:
            raise error
        return step(*given)

    monkeypatch.setattr(trainer, "_step", ending)
    flags = "--max-length 64 --row-length 128 --steps 4 --depth 2 --device cpu".split()
    for every, said in ((1, saved), (10, unsaved)):
        run = tmp_path / f"every-{every}"
        ran = fledge("train", "--target", target, "--data", data, "--out", run, "--save-every", every, *flags)
        assert ran.code == code and said in ran.err, ran.err
        assert (run / "checkpoint").exists() == (every == 1)
        assert ("the GPU ran out of memory" in ran.err) == (code == 2)


def test_resume_refuses_changed_data(tmp_path, fledge):
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    flags = "--max-length 64 --row-length 128 --steps 2 --depth 2 --device cpu".split()
    assert fledge("train", "--target", target, "--data", data, "--out", tmp_path / "run", *flags).code == 0
    tiny_chats(data, 31)
    refused = fledge("train", "--resume", tmp_path / "run")
    assert refused.code == 2 and "the data is not what" in refused.err
