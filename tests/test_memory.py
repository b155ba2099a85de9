"""The estimate of a step's memory: its arithmetic anywhere, and what it foretells on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import Ran, document, row_of, tiny_chats, tiny_draft, tiny_target, tiny_target_directory
from torch import nn

from fledge.data.dataset import Rows
from fledge.train import memory
from fledge.train.memory import LADDER, MARGIN, Memory, choose, ladder, longest_row, measure, row_to_measure
from fledge.train.objective import Ways, ttt
from fledge.types import Packed

ROW = row_of([document(4096, (0, 4096))])


def test_a_line_through_the_peaks() -> None:
    memory = Memory(Ways(), held=1000, fixed=100.0, per_token=2.0, update=500)
    assert memory.at(1000) == 1000 + 2100
    assert memory.at(10) == 1000 + 500, "the update takes more than so short a row"
    assert memory.longest(1000 + 400) == 0, "not even the update fits"
    assert memory.longest(1000 + 100 + 2 * 1300) == 1280
    assert memory.longest(500) == 0


def test_the_row_that_is_measured() -> None:
    """The beginning of a row, as much of it supervised as asked, document by document."""
    row = row_of([document(5, (4, 5)), document(7)], filler=2)
    short = row_to_measure(row, 8, 0.75)
    assert torch.equal(short.token_T, row.token_T[:8]) and torch.equal(short.position_T, row.position_T[:8])
    assert short.span_T.tolist() == [0, 0, 0, 0, 0, 1, -1, -1]
    long = row_to_measure(row, 31, 1.0)
    assert torch.equal(long.token_T, row.token_T.repeat(3)[:31])
    assert long.documents() == [(0, 5), (5, 12), (12, 14), (14, 19), (19, 26), (26, 28), (28, 31)]
    assert [row.position_T[i].item() for i in (0, 4, 5)] == [long.position_T[i].item() for i in (14, 18, 19)]


def test_the_most_supervised_row() -> None:
    rows = Rows([document(8, (0, 8)), document(8, (6, 8)), document(8)], row_length=8, seed=0)
    assert rows.most_supervised() == 1.0
    assert Rows([document(8, (6, 8))], row_length=16, seed=0).most_supervised() == 2 / 16


def test_what_is_tried() -> None:
    """All rungs, those that keep or recompute, or the one that was asked for."""
    ways = Ways("triton", "triton", "triton")
    assert [(w.slots, w.recompute) for w in ladder(ways, slots=None, activations="auto")] == list(LADDER)
    assert all(not w.recompute for w in ladder(ways, slots=None, activations="keep"))
    assert [(w.slots, w.recompute) for w in ladder(ways, slots=77, activations="recompute")] == [(77, True)]
    assert not any(w.recompute for w in ladder(Ways(), slots=None, activations="auto"))
    assert [(w.slots, w.recompute) for w in ladder(ways, slots=77, activations="auto")] == [(77, False), (77, True)]


@pytest.fixture
def affine_device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device on which a step takes 3 bytes a token and slot in flight, and 1000 besides, over 50 held."""
    said = {"peak": 0}
    for name, answer in (
        ("memory_allocated", lambda *_: 50),
        ("reset_peak_memory_stats", lambda *_: None),
        ("max_memory_allocated", lambda *_: 50 + said["peak"]),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    return said


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        self.device = torch.device("cpu")


def test_a_row_to_measure_has_live_slots() -> None:
    """However little is supervised: a step over it does all that a step does."""
    for supervised in (0.0, 0.001, 0.5, 1.0):
        row = row_to_measure(ROW, 256, supervised)
        assert row.live(1)[0].numel() == max(int(supervised * 256), 3) - 2


def test_measuring_extrapolates(affine_device: dict[str, int]) -> None:
    def step(row: Packed, ways: Ways) -> None:
        affine_device["peak"] = 1000 + 3 * row.token_T.numel() * ways.slots

    memory = measure(Two(), ROW, 1.0, step, Ways(slots=4))
    assert memory.at(4096) == 50 + 12 * 10 + 1000 + 3 * 4096 * 4


def test_the_first_that_fits(affine_device: dict[str, int]) -> None:
    def step(row: Packed, ways: Ways) -> None:
        affine_device["peak"] = 3 * row.token_T.numel() * ways.slots // (2 if ways.recompute else 1)

    asked = ladder(Ways(layers="triton"), slots=None, activations="auto")
    big = choose(Two(), ROW, 1.0, step, asked, 10**12)
    assert (big.ways.slots, big.ways.recompute) == LADDER[0]
    middle = choose(Two(), ROW, 1.0, step, asked, 3 * 4096 * 2100)
    assert (middle.ways.slots, middle.ways.recompute) == (2048, True)

    def hungry(row: Packed, ways: Ways) -> None:
        if ways.slots > 1024:
            raise torch.OutOfMemoryError
        step(row, ways)

    assert choose(Two(), ROW, 1.0, hungry, asked, 10**12).ways.slots == 1024
    with pytest.raises(ValueError, match=r"at most 2,\d\d\d tokens fit \(--row-length\)"):
        choose(Two(), ROW, 1.0, step, asked, 3 * 4096 * 300)


def test_the_longest_row(affine_device: dict[str, int]) -> None:
    """Longer and longer rows are tried, or shorter ones; a device that runs out before its line says so is believed."""
    tokens = []

    def step(row: Packed, ways: Ways) -> None:
        tokens.append(row.token_T.numel())
        if row.token_T.numel() > fits:
            raise torch.OutOfMemoryError
        affine_device["peak"] = 3 * row.token_T.numel()

    def longest(available: int) -> int:
        return longest_row(Two(), ROW, 1.0, step, Ways(), available)

    fits = 10**9
    assert longest(int(3 * 50_000 / MARGIN)) in range(49_000, 50_001) and max(tokens) == 32_768
    fits = 3000
    assert longest(10**9) == 2048, "a row of 4096 is too much"
    assert longest(int(3 * 1500 / MARGIN)) in range(1300, 1501)
    fits = 300
    assert longest(10**9) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--impl", "triton", "--device", "cpu"), "--impl triton needs a CUDA GPU"),
        (("--longest-row", "--device", "cpu"), "--longest-row needs a CUDA GPU"),
        (("--impl", "fast"), "--impl fast is none of eager, flex, triton"),
        (("--loss", "mse"), "--loss mse is none of ce, kl, accept, mixed"),
        (("--activations", "some"), "--activations some is none of keep, recompute, auto"),
        (("--slots", "0"), "--slots is at least 1"),
        (("--activations", "recompute", "--device", "cpu"), "--activations recompute needs a CUDA GPU"),
    ],
)
def test_what_cannot_be_done_is_refused(words: tuple[str, ...], reason: str, fledge, tmp_path) -> None:
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 4)
    ran: Ran = fledge("train", "--target", target, "--data", chats, "--out", tmp_path / "run", "--steps", 1, *words)
    assert ran.code != 0 and reason in ran.err
    assert not (tmp_path / "run" / "draft").exists()


@pytest.mark.parametrize("loss", ["kl", "accept", "mixed"])
def test_training_with_every_loss(loss: str, fledge, tmp_path) -> None:
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 8)
    ran: Ran = fledge(
        "train", "--target", target, "--data", chats, "--out", tmp_path / "run", "--steps", 2, "--max-length", 64,
        "--loss", loss, "--slots", 16, "--eval-tokens", 4,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert (tmp_path / "run" / "draft" / "config.json").is_file()


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_row_twice_as_long(recompute: bool) -> None:
    """What the line says of it is within a tenth of what it takes."""
    shape = dict(hidden_size=512, intermediate_size=1536, head_dim=64, num_attention_heads=8, vocab_size=4000)
    target = tiny_target(tokenizer=False, max_position_embeddings=8192, **shape)
    target.model.to("cuda", torch.bfloat16)
    draft = tiny_draft(target).to("cuda", torch.bfloat16)
    draft.share(target.embedding)
    target.check_isolation()
    row = row_of([document(2048, (i, 2048), seed=i, vocab=4000) for i in range(8)])

    def step(row: Packed, ways: Ways) -> None:
        ttt(draft, row, target.features(row), target.logits, steps=5, ways=ways)

    ways, tokens = Ways("triton", "triton", "triton", slots=1024, recompute=recompute), row.token_T.numel()
    foretold = replace(measure(draft, row, 1.0, step, ways, tokens=tokens // 2), held=0, update=0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(row, ways)
    used = torch.cuda.max_memory_allocated() - before
    assert abs(foretold.at(tokens) - used) <= 0.1 * used


@pytest.mark.gpu
def test_the_estimate_is_what_training_uses(fledge, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth, whatever the slots in flight."""
    shape = dict(hidden_size=512, intermediate_size=1536, head_dim=64, num_attention_heads=8)
    target, chats = tiny_target_directory(tmp_path, **shape), tiny_chats(tmp_path / "chats.jsonl", 200)
    said: list[Memory] = []
    monkeypatch.setattr(memory, "choose", lambda *asked: said.append(choose(*asked)) or said[-1])
    for slots in (1024, 3000, 8192):
        out = tmp_path / f"run-{slots}"
        ran: Ran = fledge(
            "train", "--target", target, "--data", chats, "--out", out, "--steps", 4, "--max-length", 512,
            "--row-length", 8192, "--slots", slots, "--eval-tokens", 4, "--dtype", "bfloat16",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        used = lines[-1]["peak_gib"] * 2**30
        assert abs(said[-1].at(8192) - used) <= 0.1 * used, slots
