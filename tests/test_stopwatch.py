"""The parts of a training step are measured where they happen, and no part is counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fledge.data.pack import Rows
from fledge.targets.compatibility import resolve_layers
from fledge.targets.source import LiveFeatures
from fledge.train import hooks, trainer
from fledge.train.checkpoint import RunDirectory
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile
from fledge.train.optim import MasterOptimizer
from fledge.train.row_pass import Objective
from fledge.train.trainer import (
    DATA,
    DRAFT,
    OPTIMIZER,
    PARTS,
    TARGET,
    Run,
    Schedule,
    Stopwatch,
    with_features,
)  # fmt: skip
from fledge.types import Features, Packed
from support.files import metrics_of
from support.rows import document, row_of
from support.targets import tiny_draft, tiny_target

CPU = torch.device("cpu")
PAUSE = 0.05  # seconds, which a part takes more than it would


def test_a_part_lasts_until_the_next_and_may_occur_again() -> None:
    watch = Stopwatch(CPU)
    for part, seconds in ((TARGET, 0.02), (DRAFT, 0.01), (TARGET, 0.02)):
        watch.begin(part)
        time.sleep(seconds)
    watch.end()
    time.sleep(0.3)  # between two steps
    watch.begin(OPTIMIZER)
    watch.end()
    parts = watch.read()
    assert list(parts) == list(PARTS) and parts[DATA] == 0
    assert parts[TARGET] >= 0.04 and parts[DRAFT] >= 0.01 and sum(parts.values()) < 0.3
    assert not any(watch.read().values()), "what was read is read again"


def test_waiting_for_a_row_is_not_the_targets_time() -> None:
    def rows() -> Iterator[int]:
        for i in range(3):
            time.sleep(0.01)
            yield i

    watch = Stopwatch(CPU)
    assert [*watch.rows(rows())] == [0, 1, 2]
    watch.end()
    parts = watch.read()
    assert parts[DATA] >= 0.03 > parts[TARGET]


def delayed(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, pause: float = PAUSE) -> None:
    original = getattr(place, name)

    def slow(*given: Any, **more: Any) -> Any:
        time.sleep(pause)
        return original(*given, **more)

    monkeypatch.setattr(place, name, slow)


def run_of(directory: Path, save_every: int = 100) -> list[dict[str, Any]]:
    """Three steps of two rows, with τ measured after the second and third one."""
    target, there = tiny_target(tokenizer=False), RunDirectory(directory)
    rows = Rows([document(24, (4, 20), seed=i) for i in range(8)], 64, seed=0)
    source = LiveFeatures(target, resolve_layers(None, target))
    schedule = Schedule(3, 1e-3, Objective(depth=2), rows_per_step=2, eval_every=2, save_every=save_every)

    def evaluate(draft: Any) -> dict[str, float]:
        time.sleep(PAUSE)
        return {"tau": 1.5}

    with there.locked():
        run = Run(tiny_draft(target, draft_vocab_size=100), rows, source, schedule, there)
        trainer.train(run, [Drafts(evaluate), MetricsFile(), Checkpoints()])
    return metrics_of(directory)


@pytest.mark.parametrize(
    ("part", "place", "name", "times"),
    [
        (DATA, Rows, "__getitem__", 2),
        (TARGET, LiveFeatures, "features", 2),
        (DRAFT, trainer, "ttt_queued", 2),
        (DRAFT, MasterOptimizer, "accumulate", 2),
        (OPTIMIZER, MasterOptimizer, "step", 1),
    ],
)
def test_a_delay_counts_in_its_part(part, place, name, times, tmp_path, monkeypatch) -> None:
    """With two rows a step, what happens for each row counts twice."""
    delayed(monkeypatch, place, name)
    for m in run_of(tmp_path):
        assert {*PARTS} <= m["parts"].keys() and m["parts"][part] >= times * PAUSE
        assert sum(m["parts"][p] for p in PARTS) <= m["seconds"]


def test_saving_and_measuring_are_outside_of_the_step(tmp_path, monkeypatch) -> None:
    """A checkpoint is saved after the line of its step was written, and counts in the next one."""
    delayed(monkeypatch, RunDirectory, "save_checkpoint")
    delayed(monkeypatch, hooks, "save_draft")
    first, second, third = run_of(tmp_path, save_every=1)
    assert first["parts"].keys() == {*PARTS}
    assert second["parts"]["eval"] >= PAUSE and second["parts"]["save"] >= 2 * PAUSE  # the draft, and a checkpoint
    assert third["parts"]["eval"] >= PAUSE and 2 * PAUSE > third["parts"]["save"] >= PAUSE
    assert all(sum(m["parts"][p] for p in PARTS) <= m["seconds"] for m in (first, second, third))


def test_how_full_the_rows_of_a_step_are(tmp_path) -> None:
    """Two documents of 24 tokens fit in a row of 64; 16 tokens of each are supervised, and 14 can be drafted first."""
    for m in run_of(tmp_path):
        assert (m["tokens"], m["room"]) == (4 * 24, 2 * 64)
        assert m["supervised"] == m["live"][0] > 0


class FakeEvent:
    """An event of a device whose clock counts the events that are recorded."""

    recorded: ClassVar[list[tuple[FakeEvent, str]]] = []
    read = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        self.recorded.append((self, stream))
        self.at = len(self.recorded)

    def elapsed_time(self, end: FakeEvent) -> float:
        FakeEvent.read += 1
        return 1e3 * (end.at - self.at)


def test_on_a_gpu_events_of_the_training_stream_are_read_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter(["training", "prefetching"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    watch = Stopwatch(torch.device("cuda"))
    for part in (TARGET, DATA, TARGET, DRAFT, OPTIMIZER):
        watch.begin(part)
    watch.end()
    assert {stream for _, stream in FakeEvent.recorded} == {"training"} and FakeEvent.read == 0
    assert watch.read() == {DATA: 1.0, TARGET: 2.0, DRAFT: 1.0, OPTIMIZER: 1.0}


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
def test_the_parts_of_a_step_on_a_gpu(prefetch: bool) -> None:
    """Kernels count in the part that launched them, though the host waits for none of them. Of a target that runs ahead
    on another stream, only the waiting counts: the draft of a row takes three times as long as the target."""
    device, cycles = torch.device("cuda"), 50_000_000

    def features(row: Packed) -> Features:
        torch.cuda._sleep(cycles)
        return Features(torch.zeros(1, device=device), torch.zeros(1, device=device))

    def milliseconds(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(count)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    milliseconds(cycles)  # loads the kernel
    once = milliseconds(cycles) / 1e3
    watch, row = Stopwatch(device), row_of([document(8)])
    began = time.perf_counter()
    upcoming = with_features(watch.rows(iter([row] * 4)), features, device, prefetch=prefetch)
    for _ in range(4):
        watch.begin(TARGET)
        next(upcoming)
        watch.begin(DRAFT)
        torch.cuda._sleep(3 * cycles)
    watch.end()
    launched = time.perf_counter() - began
    torch.cuda.synchronize()
    parts = watch.read()
    assert launched < 4 * once, "the host waited for the device"
    assert parts[DRAFT] == pytest.approx(12 * once, rel=0.2)
    assert parts[TARGET] == pytest.approx((1 if prefetch else 4) * once, rel=0.3)
