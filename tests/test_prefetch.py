"""Each packed row comes with its own features, in order, with and without prefetching."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace

import pytest
import torch

from fledge.train import trainer
from fledge.train.setup import run
from fledge.types import Features, Packed
from support.chats import tiny_chats
from support.commands import Ran
from support.files import metrics_of
from support.mutations import replace_function
from support.rows import document, row_of
from support.targets import tiny_target_directory

ROWS = [row_of([document(8, seed=i)]) for i in range(9)]


def sums(
    device: str, begun: list[int], *, one_ahead: bool, making: int = 5_000_000, reading: int = 20_000_000
) -> list[int]:
    """A checksum of each row's features as the consumer reads them.

    `begun` receives, for each row, the number of feature passes that had started. On a GPU, computing features is
    delayed by `making` cycles and reading them by `reading` cycles.
    """
    made = 0

    def features(row: Packed) -> Features:
        nonlocal made
        made += 1
        if device == "cuda":
            torch.cuda._sleep(making)
        token_T = row.token_T.to(device, torch.int64, non_blocking=True)
        return Features(token_T.expand(100_000, -1).clone(), token_T.clone())

    found = []
    for row, given in trainer.with_features(iter(ROWS), features, torch.device(device), prefetch=one_ahead):
        begun.append(made)
        assert row is ROWS[len(found)]
        if device == "cuda":
            torch.cuda._sleep(reading)
        found.append(given.aux_TAD.sum() - 99_999 * given.last_TD.sum())
        del given
    return torch.stack(found).tolist()


EXPECTED = [int(row.token_T.sum()) for row in ROWS]


def test_features_without_prefetching() -> None:
    begun: list[int] = []
    assert sums("cpu", begun, one_ahead=False) == EXPECTED
    assert begun == list(range(1, 10)), "features are made before they are requested"


def test_stream_waits_of_prefetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that only record calls show that a pass waits for the work queued before it, that a row is yielded when
    its pass is complete and the next is queued, and that the generator keeps no reference to yielded features."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr(trainer, "_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(told.append(f"on {stream.name}")))

    def features(row: Packed) -> Features:
        told.append("pass")
        return Features(row.token_T.clone(), row.token_T)

    given = trainer.with_features(ROWS[:2], features, torch.device("cpu"), prefetch=True)
    row, first = next(given)
    assert row is ROWS[0]
    queued = ["side waits for main", "on side", "pass"]
    assert told == [*queued, "main waits for side", *queued]
    gone = weakref.ref(first)
    del first
    assert gone() is None
    told.clear()
    assert next(given)[0] is ROWS[1] and told == ["main waits for side"]
    assert next(given, None) is None


def test_the_trainer_frees_features(fledge, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer frees a row's features before it requests the next; it prefetches if the implementation says so."""
    asked: list[bool] = []

    def watched(rows, features, device, *, prefetch: bool):
        asked.append(prefetch)
        gone = None
        for row in rows:
            assert gone is None or gone() is None, "a row's features still exist while the next are made"
            given = [features(row)]
            gone = weakref.ref(given[0])
            yield row, given.pop()

    monkeypatch.setattr(trainer, "with_features", watched)
    chosen = run.choose_implementation
    prefetching = lambda *given: replace(chosen(*given), prefetch=True)  # noqa: E731
    monkeypatch.setattr(run, "choose_implementation", prefetching)
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 40)
    words = "--out", tmp_path / "run", "--steps", 2, "--rows-per-step", 2, "--max-length", 128, "--eval-tokens", 1
    ran: Ran = fledge("train", "--target", target, "--data", chats, *words)
    assert ran.code == 0, ran.err
    assert asked == [True]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("making", "reading", "omitted"),
    [(5_000_000, 20_000_000, None), (20_000_000, 1, None), (5_000_000, 20_000_000, "side"), (20_000_000, 1, "main")],
)
def test_prefetched_features(making: int, reading: int, omitted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are computed while the row before is in use, never in memory that is in use, and read when complete. If
    one stream's waits are omitted and the other stream is slower, the values are wrong."""
    side = trainer._stream(torch.device("cuda"))

    def wait(wait_stream, stream, other) -> None:
        if omitted is None or (stream == side) != (omitted == "side"):
            wait_stream(stream, other)

    replace_function(monkeypatch, torch.cuda.Stream, "wait_stream", wait)
    tries = 1 if omitted is None else 9  # another program on the GPU may delay the stream that should not wait
    found = []
    for _ in range(tries):
        begun: list[int] = []
        found.append(sums("cuda", begun, one_ahead=True, making=making, reading=reading))
        assert begun == [2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert all(f == EXPECTED for f in found) == (omitted is None)


@pytest.mark.gpu
def test_training_is_the_same(fledge, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradient norm and τ are equal with and without prefetching, also with evaluations between the steps."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 200)
    found = []
    for one_ahead in (False, True):
        monkeypatch.setattr(run, "CANDIDATES", ((1024, False, one_ahead),))
        ran: Ran = fledge(
            "train", "--target", target, "--data", chats, "--out", tmp_path / str(one_ahead), "--steps", 6,
            "--rows-per-step", 2, "--max-length", 128, "--eval-every", 2, "--eval-tokens", 8,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        assert ("the features of the next row meanwhile" in ran.out + ran.err) == one_ahead
        found.append(metrics_of(tmp_path / str(one_ahead)))
    for a, b in zip(*found, strict=True):
        for name in {"loss", "grad_norm", "eval_tau"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a["step"], name)
