"""The estimate of a training step's memory: its arithmetic on any machine, and its accuracy on a GPU."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.drafts.weights import load_draft
from fledge.ops.loss import KINDS
from fledge.train import trainer
from fledge.train.objective import simulate_decoding
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup import run
from fledge.train.setup.options import ComputeOptions
from fledge.train.setup.run import (
    CANDIDATES,
    USABLE_FRACTION,
    Trial,
    candidates,
    choose,
    implementations,
    warm_up_row,
)
from fledge.types import Features, Packed
from support.chats import tiny_chats
from support.commands import Ran
from support.dense import Dense, dense
from support.files import metrics_of
from support.mutations import replace_function
from support.rows import document, row_of
from support.targets import tiny_target_directory

ROW = row_of([document(4096, (0, 4096))])


def test_the_first_row_that_is_run_has_live_slots() -> None:
    """However few tokens are supervised, a step over the short row does all its work."""
    row = row_of([document(4, (3, 4)), document(4092, (4000, 4001))])
    short = warm_up_row(row)
    assert torch.equal(short.token_T, row.token_T[:128]) and torch.equal(short.position_T, row.position_T[:128])
    assert short.live(1)[0].numel() == 128 - 2 * 2


def test_the_heaviest_rows() -> None:
    """The heaviest rows are the one with the most supervised tokens and the one with the longest document."""
    few, most, longest = document(8, (6, 8)), document(7, (0, 7)), document(8, (7, 8))
    (row,) = Rows([few, document(8, (0, 8)), longest], row_length=8, seed=0).heaviest()
    assert int((row.span_T >= 0).sum()) == 8
    rows = Rows([document(4, (0, 4)), document(4, (0, 4)), longest], row_length=8, seed=0).heaviest()
    assert [int((row.span_T >= 0).sum()) for row in rows] == [8, 1]
    assert [row.documents() for row in rows] == [[(0, 4), (4, 8)], [(0, 8)]]
    assert len(Rows([most, few], row_length=8, seed=0).heaviest()) == 2


def test_candidates() -> None:
    """The candidates are all of CANDIDATES, or those that match the requested activations and slots. Slots of several
    rows, as the blocks of DFlash, are fewer."""
    ways = Implementation("triton", "triton", "triton")

    def tried(ways: Implementation, slots: int | None, activations: str) -> list[tuple[int, bool, bool]]:
        return [(w.slots, w.recompute, w.prefetch) for w in candidates(ways, slots=slots, activations=activations)]

    assert tried(ways, None, "auto") == list(CANDIDATES)
    assert tried(ways, None, "keep") == [rung for rung in CANDIDATES if not rung[1]]
    assert [n for n, again, _ in tried(ways, None, "recompute") if again] == [8192, 4096, 2048, 2048, 1024]
    plain = tried(Implementation(), None, "auto")
    assert [n for n, again, _ in plain if not again] == [8192, 4096, 2048, 2048, 1024], (
        "the eager implementation cannot recompute"
    )
    blocks = candidates(ways, slots=None, activations="auto", rows_per_slot=16)
    assert [w.slots for w in blocks] == [512, 256, 128, 128, 128, 64]
    assert candidates(ways, slots=9, activations="keep", rows_per_slot=16)[0].slots == 9
    on_cpu = ComputeOptions(device="cpu", impl="eager")
    assert [w.slots for rows in (1, 16, 300) for w in implementations(on_cpu, rows)] == [256, 16, 1]
    assert tried(ways, 77, "recompute") == [(77, True, True), (77, True, False)]
    assert tried(ways, 77, "auto") == [(77, False, True), (77, False, False), (77, True, False)]


class Device:
    """A simulated device with `held` bytes allocated. A step takes 3 bytes for each token and slot in flight, or half
    with recomputation, and runs out of memory for rows of more than `fits` tokens. The device reserves `apart` bytes
    more than are allocated."""

    held, peak, fits, apart = 50, 0, 10**9, 0

    def __init__(self) -> None:
        self.draft = TenParameters()

    def step(self, row: Packed, ways: Implementation) -> None:
        tokens = row.token_T.numel()
        self.draft.weight.grad = torch.ones(10)
        if tokens > self.fits:
            raise torch.OutOfMemoryError
        self.peak = self.held + 3 * tokens * ways.slots // (2 if ways.recompute else 1)

    def trial(self, rows_per_step: int = 1) -> Trial:
        return Trial(self.draft, [ROW], self.step, rows_per_step)


class TenParameters(nn.Module):
    """A model of ten parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        self.device = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    for name, answer in (
        ("memory_allocated", lambda *_: device.held),
        ("reset_peak_memory_stats", lambda *_: None),
        ("max_memory_allocated", lambda *_: device.peak),
        ("max_memory_reserved", lambda *_: device.peak + device.apart),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    return device


def test_measured_memory(device: Device) -> None:
    """The measured memory is the larger peak of step and update for the row that takes most, plus the optimizer's
    state; the step's peak includes a gradient sum if a step has several rows. Measuring leaves no gradients behind."""
    trial = device.trial()
    assert trial.measure(Implementation(slots=4)) == (50 + 3 * 4096 * 4 + 12 * 10,) * 2
    assert device.trial(2).measure(Implementation(slots=4)) == (50 + 3 * 4096 * 4 + 12 * 10 + 4 * 10,) * 2
    for rows_per_step in (1, 2):  # the update already includes the gradient sum
        assert device.trial(rows_per_step).measure(Implementation(slots=0)) == (50 + 6 * 10 + 12 * 10,) * 2
    several = Trial(device.draft, [warm_up_row(ROW), ROW, warm_up_row(ROW)], device.step)
    assert several.measure(Implementation(slots=1)) == (50 + 3 * 4096 + 12 * 10,) * 2
    device.apart = 7
    assert trial.measure(Implementation(slots=1)) == (50 + 3 * 4096 + 12 * 10,) * 2
    assert trial.measure(Implementation(slots=1, prefetch=True)) == (50 + 3 * 4096 + 12 * 10, 57 + 3 * 4096 + 12 * 10)
    assert device.draft.weight.grad is None
    device.fits = 10
    with pytest.raises(torch.OutOfMemoryError):
        trial.measure(Implementation(slots=4))
    assert device.draft.weight.grad is None


def test_choose_takes_the_first_candidate_that_fits(device: Device) -> None:
    asked = candidates(Implementation(layers="triton"), slots=None, activations="auto")

    def chosen(available: int) -> tuple[int, bool, bool]:
        ways, taken = choose(device.trial(), asked, available)
        assert taken == device.peak + 120 <= USABLE_FRACTION * available
        return ways.slots, ways.recompute, ways.prefetch

    assert chosen(10**12) == CANDIDATES[0]
    assert chosen(3 * 4096 * 2300) == (2048, False, True)
    assert chosen(3 * 4096 * 2100) == (2048, True, False)
    device.apart = 10**12
    assert chosen(10**12) == (2048, False, False), "with two streams, reserved memory counts, not only allocated memory"
    with pytest.raises(ValueError, match=r"a row of 4,096 tokens needs more than the 0\.0 GiB that the device has"):
        choose(device.trial(), asked, 3 * 4096 * 300)

    def hungry(row: Packed, ways: Implementation) -> None:
        if ways.slots > most:
            raise torch.OutOfMemoryError
        device.step(row, ways)

    most = 1024
    assert choose(Trial(device.draft, [ROW], hungry), asked, 10**12)[0].slots == 1024
    most = 0
    with pytest.raises(ValueError, match="use fewer --slots"):
        choose(Trial(device.draft, [ROW], hungry), asked, 10**12)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--impl", "triton", "--device", "cpu"), "--impl triton needs a CUDA GPU"),
        (("--impl", "fast"), "--impl fast is not one of eager, flex, triton"),
        (("--loss", "mse"), "--loss mse is not one of ce, kl, accept, mixed"),
        (("--activations", "some"), "--activations some is not one of keep, recompute, auto"),
        (("--slots", "0"), "--slots 0: it must be at least 1"),
        (("--activations", "recompute", "--device", "cpu"), "--activations recompute needs a CUDA GPU"),
    ],
)
def test_invalid_training_options_are_refused(words: tuple[str, ...], reason: str, fledge, tmp_path) -> None:
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 4)
    ran: Ran = fledge("train", "--target", target, "--data", chats, "--out", tmp_path / "run", "--steps", 1, *words)
    assert ran.code != 0 and reason in ran.err
    assert not (tmp_path / "run" / "draft").exists()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("kept", [False, True])
def test_freed_memory_is_kept(kept: bool) -> None:
    """With `retain_freed_memory`, a freed block is reused with its pages; without it, each page faults again."""
    script = """
import resource
from fledge.train.setup.target import retain_freed_memory
assert KEPT is False or retain_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = lambda: len(b"x" * (1 << 26))
block()
before = faults()
block()
print(faults() - before)
"""
    found = subprocess.run(
        [sys.executable, "-c", script.replace("KEPT", str(kept))], capture_output=True, text=True, check=True
    )
    assert (int(found.stdout) < 10) == kept


@pytest.mark.parametrize("loss", KINDS)
def test_training_with_every_loss(loss: str, fledge, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of each step equal the dense definition's with this kind of loss and with no other, and every trained
    weight has changed."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 8)
    seen: list[dict[str, Dense]] = []
    begun: dict[str, torch.Tensor] = {}

    def defined(queue: Any, draft: Draft, row: Packed, features: Features, logits: Any, asked: Objective, *how: Any):
        if not begun:
            begun.update({n: p.detach().clone() for n, p in draft.named_parameters() if p.requires_grad})
        with torch.no_grad():
            taught = logits(features.last_TD)
            seen.append({kind: dense(draft, row, features, taught, 3, gamma=0.7, kind=kind) for kind in KINDS})
        return queue(draft, row, features, logits, asked, *how)

    replace_function(monkeypatch, trainer, "ttt_queued", defined)
    ran: Ran = fledge(
        "train", "--target", target, "--data", chats, "--out", tmp_path / "run", "--steps", 2, "--max-length", 64,
        "--loss", loss, "--slots", 16, "--eval-tokens", 4, "--depth", 3, "--gamma", 0.7,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    recorded = metrics_of(tmp_path / "run")
    assert len(recorded) == len(seen) == 2
    for metrics, step in zip(recorded, seen, strict=True):
        whole, live = step[loss], metrics["live"]
        scored = sum(0.7**k * n for k, n in enumerate(whole.scored()))
        means = {kind: float(step[kind].loss) / scored for kind in KINDS}
        assert metrics["loss"] == pytest.approx(means.pop(loss), rel=1e-4)
        assert all(abs(metrics["loss"] - other) > 0.01 for other in means.values())
        assert live == [slots.numel() for slots in whole.live] and metrics["scored"] == whole.scored()
        assert metrics["hit"] == pytest.approx([int(h.sum()) / n for h, n in zip(whole.hits(), live, strict=True)])
        assert metrics["survive"] == pytest.approx([s / n for s, n in zip(whole.survived(), live, strict=True)])
        assert metrics["accept"] == pytest.approx([float(a) / n for a, n in zip(whole.accepted(), live, strict=True)])
        committed, rounds = simulate_decoding(whole.live, whole.hits())
        assert metrics["tau"] == pytest.approx(committed / rounds)
    learnt = dict(load_draft(tmp_path / "run" / "checkpoint", dtype=torch.bfloat16).named_parameters())
    assert begun and not [n for n, p in begun.items() if torch.equal(learnt[n], p.bfloat16())]


@pytest.mark.gpu
def test_the_estimate_is_what_training_uses(fledge, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is within a tenth of the peak memory, with several numbers of slots, and with recomputation too."""
    shape = dict(hidden_size=512, intermediate_size=1536, head_dim=64, num_attention_heads=8)
    target, chats = tiny_target_directory(tmp_path, **shape), tiny_chats(tmp_path / "chats.jsonl", 200)
    said: list[int] = []

    def chosen(*asked):
        ways, taken = choose(*asked)
        said.append(taken)
        return ways, taken

    monkeypatch.setattr(run, "choose", chosen)
    cases = (1024, "keep", 1), (1024, "recompute", 2), (3000, "keep", 1), (8192, "keep", 2)
    for slots, activations, rows in cases:
        out = tmp_path / f"run-{slots}-{activations}"
        ran: Ran = fledge(
            "train", "--target", target, "--data", chats, "--out", out, "--steps", 4, "--max-length", 512,
            "--row-length", 8192, "--slots", slots, "--activations", activations, "--eval-tokens", 4,
            "--dtype", "bfloat16", "--rows-per-step", rows,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        lines = metrics_of(out)
        used = lines[-1]["peak_gib"] * 2**30
        assert abs(said[-1] - used) <= 0.1 * used, (slots, activations)
