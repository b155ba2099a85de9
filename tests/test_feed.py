"""Ranks that hold only the target, and feed those that train the draft: the run is that of one process."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fledge import train_draft
from fledge.data.pack import Rows
from fledge.io.display import ProgressDisplay
from fledge.io.results import ResultPrinter
from fledge.targets.compatibility import resolve_layers
from fledge.targets.distributed import load_sharded_target
from fledge.targets.loading import load_target
from fledge.targets.source import LiveFeatures
from fledge.train import trainer
from fledge.train.checkpoint import RunDirectory
from fledge.train.feed import ReceivedFeatures
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile
from fledge.train.ranks import ALONE, Ranks
from fledge.train.row_pass import Objective
from fledge.train.setup.dry_run import dry_run
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.run import feed_draft
from fledge.train.trainer import Run, Schedule
from support.chats import tiny_chats
from support.files import metrics_of
from support.ranks import become, connect, free_ports, start
from support.rows import document
from support.runs import recipe_of
from support.targets import tiny_draft, tiny_target_directory

DOCUMENTS = [document(24, (i, 24), seed=i) for i in (1, 20, 3, 0, 12, 6)]
STEPS = 4
# ranks that train, and others
WORLDS = {"1 + 1": (1, 1), "2 + 1": (2, 1), "1 + 2": (1, 2), "2 + 2, sharded": (2, 2)}
# (variant, rows of a step): gradients accumulated unevenly, one row each, fewer rows than ranks
CASES = [("eagle3", 5), ("eagle3", 2), ("eagle1", 1)]


class Computed(LiveFeatures):
    """Features of which those of a row fail, are NaN, come too late, or end the process."""

    how, rows = "", 0

    def features(self, row: Any) -> Any:
        type(self).rows += 1
        damaged = self.how if self.rows == AT.get(self.how, 6) else ""
        if damaged == "raise":
            raise ValueError("a row is damaged")
        if damaged == "hang":
            time.sleep(5)
        if damaged == "lost":
            os._exit(0)
        found = super().features(row)
        return replace(found, last_TD=found.last_TD * (float("nan") if damaged == "nan" else 1.0))


def train(
    directory: Path, target: Path, variant: str, rows_per_step: int, ranks: Ranks = ALONE, sharded: bool = False,

) -> dict[str, Tensor]:  # fmt: skip
    """Trains in float64 and returns the draft's parameters. In a rank that holds only the target, feeds the others."""
    mesh = ranks.mesh if sharded and not ranks.trains else None
    if mesh is None:
        model = load_target(target, dtype=torch.float64, implementation="transformers")
    else:
        model = load_sharded_target(target, mesh, dtype=torch.float64)
    eagle1 = variant == "eagle1"
    layers = () if eagle1 else resolve_layers(None, model)
    draft = tiny_draft(model, method="eagle1") if eagle1 else tiny_draft(model)
    rows = Rows(DOCUMENTS, 24, seed=0)
    schedule = Schedule(STEPS, 1e-2, Objective(depth=1 if eagle1 else 3), rows_per_step=rows_per_step)
    if not ranks.trains:
        assert sharded == any(isinstance(p, DTensor) for p in model.model.parameters())
        feed_draft(Run(draft, rows, Computed(model, layers), schedule, ranks=ranks))
        return {}
    source = ReceivedFeatures(model, len(layers), ranks) if ranks.target_ranks else LiveFeatures(model, layers)
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(draft, rows, source, schedule, RunDirectory(directory), ranks, torch.float64)
    trainer.train(run, [Drafts(), MetricsFile(), Checkpoints()])
    return {name: p.detach() for name, p in draft.named_parameters()}


def everything(rank: int, ports: dict[str, int], directory: Path) -> None:
    """What is tested in several processes, one world after the other, as processes take seconds to start."""
    for name, (training, others) in WORLDS.items():
        if rank >= training + others:
            continue
        with connect(rank, training + others, ports[name], target_ranks=others) as ranks:
            for variant, rows_per_step in CASES:
                out = directory / name / f"{variant} {rows_per_step}"
                found = train(out, directory / "target", variant, rows_per_step, ranks, "sharded" in name)
                if ranks.trains:
                    torch.save(found, out / f"rank {ranks.rank}")
    for name, given in COMMANDS.items():
        if rank < 3:
            become(rank, 3, ports[name])
            run_command(rank, directory, name, **given)
    for how, (seconds, _) in ERRORS.items():
        if rank < 3:
            fail(rank, ports[how], directory, how, timedelta(seconds=seconds))


# a run that is stopped after a step, and continued by other ranks
COMMANDS: dict[str, dict[str, Any]] = {
    "planned": dict(out="run", target_gpus=1, dry_run=True),
    "stopped": dict(out="run", target_gpus=1),
    "resumed": dict(resume="run", target_gpus=2, shard_target=True),
}


def run_command(rank: int, directory: Path, name: str, **given: Any) -> None:
    """Runs `fledge train` in a rank, and writes how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        if name == "stopped":
            patch.setattr(ProgressDisplay, "stderr_closed", True)
        try:
            if given.get("dry_run"):
                words = options(directory) | given | dict(data=["chats.jsonl"])
                ended = str(dry_run(TrainOptions(**words), [], ResultPrinter(), ProgressDisplay(quiet=True)))
            else:
                train_draft(**given if "resume" in given else options(directory) | given)
                ended = "finished"
        except BaseException as e:
            ended = f"{type(e).__name__}: {e}"
    (directory / f"{name} {rank}").write_text(ended)


def options(directory: Path) -> dict[str, Any]:
    """Those of `fledge train` for a short run in float64."""
    return dict(
        target="target", data="chats.jsonl", data_cache=str(directory / "cache"), max_length=64, row_length=128,
        steps=5, depth=3, draft_vocab=200, rows_per_step=3, eval_every=2, eval_tokens=6, seed=3, device="cpu",
        dtype="float64",
    )  # fmt: skip


def fail(rank: int, port: int, directory: Path, how: str, limit: timedelta) -> None:
    """Two ranks train, fed by a third. Writes what each of them raised."""
    told = "nothing"
    with pytest.MonkeyPatch.context() as patch, connect(rank, 3, port, target_ranks=1, limit=limit) as ranks:
        patch.setattr(Computed, "rows", 0)
        patch.setattr(Computed, "how", how)
        if how == "draft" and rank == 1:
            patch.setattr(trainer, "ttt_queued", fail_once(trainer.ttt_queued))
        began = time.monotonic()
        try:
            train(directory / how, directory / "target", "eagle3", 5, ranks)
        except Exception as e:
            told = f"{type(e).__name__}: {e}"
        (directory / f"{how} {rank}").write_text(told)
        assert time.monotonic() - began < 60
        time.sleep(5 if how == "hang" else 0)  # the connections stay until the other ranks have told


def fail_once(work: Any) -> Any:
    """A function that fails when it is called for the fourth time: in the second step, with a row left."""
    calls = itertools.count(1)

    def failing(*given: Any) -> Any:
        if next(calls) == 4:
            raise ValueError("a bad row")
        return work(*given)

    return failing


NAN = "FloatingPointError: the gradient of step 2 is nan: the target's hidden states overflow"
LOST = "LostRankError: rank 2 of 3 ended or did not answer while its hidden states were awaited; see the log"
FAILED = "RankError: rank 2 of 3 failed in step 1: ValueError: a row is damaged"
# the time limit in seconds, and what ranks 0, 1 and 2 say; the last ones leave broken connections
ERRORS = {
    "raise": (60, [FAILED, FAILED, "ValueError: a row is damaged"]),
    "nan": (60, [NAN, NAN, f"RankError: rank 0 of 3 failed in step 3: {NAN}"]),
    "draft": (60, ["RankError: rank 1 of 3 failed in step 2: ValueError: a bad row", "ValueError: a bad row"]),
    "hang": (2, [LOST]),
    "lost": (60, [LOST]),
}
AT = {"hang": 2, "lost": 2}  # the number of the row; the others are in the second step's rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("feed")
    tiny_target_directory(directory)
    tiny_chats(directory / "chats.jsonl", 170)
    runs = [*WORLDS, *COMMANDS, *ERRORS]
    ports = dict(zip(runs, free_ports(len(runs)), strict=True))
    start(everything, max(map(sum, WORLDS.values())), ports, directory)
    return directory


@pytest.fixture(scope="module")
def alone(made: Path) -> Path:
    """Runs of a single process, by case."""
    for variant, rows_per_step in CASES:
        out = made / "alone" / f"{variant} {rows_per_step}"
        torch.save(train(out, made / "target", variant, rows_per_step), out / "parameters")
    return made / "alone"


@pytest.mark.parametrize("world", WORLDS)
def test_a_fed_run_is_that_of_one_process(world: str, made: Path, alone: Path) -> None:
    """The parameters on every rank that trains and the metrics of every step, in float64: for gradients accumulated
    unevenly, one row for each rank, and fewer rows than ranks."""
    for variant, rows_per_step in CASES:
        case = f"{variant} {rows_per_step}"
        expected = torch.load(alone / case / "parameters")
        for rank in range(WORLDS[world][0]):
            found = torch.load(made / world / case / f"rank {rank}")
            for name, p in expected.items():
                torch.testing.assert_close(found[name], p, rtol=1e-10, atol=1e-10, msg=f"{case} {name}")
        ours, theirs = metrics_of(made / world / case), metrics_of(alone / case)
        for name in ("loss", "grad_norm", "tau"):
            assert [m[name] for m in ours] == pytest.approx([m[name] for m in theirs], rel=1e-9), (case, name)


def test_the_command_stops_and_resumes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fledge train --target-gpus` stops after the same step on all ranks, goes on with a target that is sharded over
    more of them, and ends as a single process does. τ is measured by the ranks that hold the target. A dry run times
    all of them."""
    for rank in range(3):
        assert (made / f"planned {rank}").read_text() == "0"
        assert (made / f"stopped {rank}").read_text().startswith("KeyboardInterrupt")
        assert (made / f"resumed {rank}").read_text() == "finished"
    monkeypatch.chdir(made)
    train_draft(out="alone run", **options(made))
    ours, theirs = metrics_of(made / "run"), metrics_of(made / "alone run")
    assert len(ours) == len(theirs) == 5 and sum("eval_tau" in m for m in ours) == 3
    for name in ("loss", "grad_norm", "eval_tau"):
        assert [m.get(name, 0) for m in ours] == pytest.approx([m.get(name, 0) for m in theirs], rel=1e-6), name
    assert "target_gpus" not in recipe_of(made / "run")


@pytest.mark.parametrize("how", ERRORS)
def test_an_error_in_one_rank_ends_all(how: str, made: Path) -> None:
    """In a rank that holds the target, or in one that trains, in the middle of a step's rows: each says which rank
    failed, and why. No rank waits for rows that do not come, or that nobody takes."""
    for rank, expected in enumerate(ERRORS[how][1]):
        assert (made / f"{how} {rank}").read_text().startswith(expected)
