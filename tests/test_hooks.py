"""Hooks of one's own: they see each step, add to its metrics, and stop the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fledge import train_draft
from fledge.data.pack import Rows
from fledge.targets.compatibility import resolve_layers
from fledge.targets.source import LiveFeatures
from fledge.train.checkpoint import RunDirectory
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile, Signals
from fledge.train.row_pass import Objective
from fledge.train.trainer import Hook, Run, Schedule, StepResult, train
from support.chats import tiny_chats
from support.files import metrics_of
from support.rows import document
from support.targets import tiny_draft, tiny_target, tiny_target_directory


class Diary(Hook):
    """Notes what is called, adds a metric, and stops the run after the step `until`."""

    def __init__(self, until: int):
        self.until, self.notes, self.losses = until, [], []

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        self.notes.append(f"begins at {run.progress.step}")
        yield
        self.notes.append(f"ends at {run.progress.step}")

    def after(self, run: Run, result: StepResult) -> None:
        assert result.step == run.progress.step and result.metrics is run.metrics
        self.notes.append(result.step)
        self.losses.append(result.metrics["loss"])
        result.metrics["doubled"] = 2 * result.metrics["loss"]
        if result.step == self.until:
            run.stop()

    def finished(self, run: Run) -> None:
        self.notes.append("finished")


def run_in(directory: Path, resumed: bool = False) -> Run:
    """A run of five steps with a tiny target."""
    target = tiny_target(tokenizer=False)
    rows = Rows([document(24, (4, 20), seed=i) for i in range(8)], 48, seed=0)
    schedule = Schedule(5, 1e-3, Objective(depth=2), save_every=100)
    source = LiveFeatures(target, resolve_layers(None, target))
    draft = tiny_draft(target, draft_vocab_size=100)
    return Run(draft, rows, source, schedule, RunDirectory(directory), resumed=resumed)


def test_a_hook_sees_each_step_and_may_stop_the_run(tmp_path: Path) -> None:
    """A stopped run is saved after the step, and continues to its last step with what the hook adds to the metrics."""
    first, second = Diary(until=3), Diary(until=5)
    assert train(run_in(tmp_path), [Drafts(), first, MetricsFile(), Checkpoints()]).step == 3
    assert first.notes == ["begins at 0", 1, 2, 3, "ends at 3"]
    assert not (tmp_path / "draft").exists()
    train(run_in(tmp_path, resumed=True), [Drafts(), second, MetricsFile(), Checkpoints()])
    assert second.notes == ["begins at 3", 4, 5, "ends at 5", "finished"]
    found = metrics_of(tmp_path)
    assert [m["step"] for m in found] == [1, 2, 3, 4, 5] and (tmp_path / "draft").exists()
    assert [m["loss"] for m in found] == first.losses + second.losses
    assert [m["doubled"] for m in found] == [2 * m["loss"] for m in found]


def test_a_run_without_hooks_writes_nothing(tmp_path: Path) -> None:
    assert train(run_in(tmp_path / "run")).step == 5
    assert not (tmp_path / "run").exists()


def test_the_order_of_hooks_is_the_order_of_calls(tmp_path: Path) -> None:
    """A hook after `MetricsFile` adds nothing to the file; `around` of the first hook ends last."""
    calls: list[str] = []

    class Named(Diary):
        def __init__(self, name: str):
            super().__init__(until=1)
            self.name = name

        @contextmanager
        def around(self, run: Run) -> Iterator[None]:
            calls.append(f"{self.name} begins")
            yield
            calls.append(f"{self.name} ends")

        def after(self, run: Run, result: StepResult) -> None:
            calls.append(self.name)
            result.metrics[self.name] = 1
            super().after(run, result)

    tmp_path.joinpath("run").mkdir()
    train(run_in(tmp_path / "run"), [Named("one"), MetricsFile(), Named("two"), Checkpoints()])
    assert calls == ["one begins", "two begins", "one", "two", "two ends", "one ends"]
    (written,) = metrics_of(tmp_path / "run")
    assert "one" in written and "two" not in written


class Adds(Hook):
    """Adds a metric to the second step."""

    def __init__(self, value: object):
        self.value = value

    def after(self, run: Run, result: StepResult) -> None:
        if result.step == 2:
            result.metrics["added"] = self.value


def test_a_metric_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a hook added a metric that JSON cannot hold: .*Tensor.*; add numbers, texts"):
        train(run_in(tmp_path), [Adds(torch.ones(1)), MetricsFile(), Checkpoints()])
    assert [m["step"] for m in metrics_of(tmp_path)] == [1]


def test_a_run_is_trained_once(tmp_path: Path) -> None:
    train(run := run_in(tmp_path), [MetricsFile(), Checkpoints()])
    with pytest.raises(ValueError, match="this Run was trained before; make another, with resumed=True"):
        train(run, [MetricsFile(), Checkpoints()])


def test_signals_interrupt_no_hook_at_the_end(tmp_path: Path) -> None:
    """A second SIGTERM has no effect while hooks end, and Ctrl-C none while a checkpoint is saved."""
    said: list[str] = []

    class Ends(Hook):
        @contextmanager
        def around(self, run: Run) -> Iterator[None]:
            yield
            os.kill(os.getpid(), signal.SIGTERM)
            assert (tmp_path / "checkpoint").exists()
            said.append("ended")

        def after(self, run: Run, result: StepResult) -> None:
            if result.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    signals = Signals(lambda line: None)
    assert train(run_in(tmp_path), [signals, Ends(), MetricsFile(), Checkpoints(signals.saving)]).step == 2
    assert said == ["ended"]


def test_train_draft_takes_hooks(tmp_path: Path) -> None:
    """The run that a hook stops ends as after Ctrl-C."""
    target, chats, out = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30), tmp_path / "run"
    diary = Diary(until=2)
    words = dict(target=target, data=chats, max_length=64, row_length=128, depth=2, device="cpu", eval_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        train_draft(out=out, steps=3, hooks=[diary], **words)
    trained = train_draft(resume=out, hooks=[rest := Diary(until=9)])
    assert diary.notes[1:3] == [1, 2] and rest.notes == ["begins at 2", 3, "ends at 3", "finished"]
    assert [m["doubled"] for m in metrics_of(out)] == [2 * loss for loss in diary.losses + rest.losses]
    assert trained.metrics["doubled"] == 2 * rest.losses[-1]
