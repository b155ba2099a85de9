"""The benchmark programs run on a CPU with small sizes and write records of numbers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from support.acceptance import define_measurements
from support.chats import tiny_chats
from support.targets import tiny_target_directory

BENCH = Path(__file__).parents[1] / "bench"


def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> dict:
    """The record that a benchmark writes when it runs with these arguments."""
    out = tmp_path / f"{name}.json"
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out), "--device", "cpu", *map(str, words)])
    runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    return json.loads(out.read_text(), parse_constant=pytest.fail)


def test_train_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--shape", "tiny", "--depth", 3, "--tokens", 512, "--supervised", 0.5, 1, "--slots", 128, "--teachers", "V"
    found = record(tmp_path, monkeypatch, "train_step", *words, "--online", "--target-layers", 8, "--repeats", 1)
    half, whole = found["rows"]
    assert half["slots"] == [255, 254, 253] and whole["scored"] == whole["slots"] == [510, 509, 508]
    assert half["ms"] > 0 and half["teacher"] == "V"
    online = found["online"]
    assert 0 < online["target_ms"] < online["ms"] and online["tokens_per_s"] == pytest.approx(512e3 / online["ms"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tokens", 512, "--supervised", 0.25), "complete spans of 256 tokens cover 0%"),
        (("--tokens", 512, "--impls", "triton"), "need a GPU"),
        ((), "choose others with --tokens"),
    ],
)
def test_train_step_refuses(words: tuple, reason: str, tmp_path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        record(tmp_path, monkeypatch, "train_step", *words)
    assert reason in capsys.readouterr().err


def test_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All implementations compute the same loss."""
    rows = record(tmp_path, monkeypatch, "loss", "--width", 64, "--sizes", 100, 300)["rows"]
    assert [row["impl"] for row in rows] == ["apart32", "apart", "eager"]
    assert all(row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-2) for row in rows)


def test_decode_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.get_default_dtype()
    try:
        found = record(tmp_path, monkeypatch, "decode_kernels", "--shape", "tiny", "--lengths", 9, "--repeats", 1)
    finally:
        torch.set_default_dtype(dtype), torch.set_default_device(None)
    kernels = {"attention": 3, "tree": 2, "mask": 2, "norm": 3, "rope": 3, "activation": 3, "likeliest": 3}
    assert [row["kernel"] for row in found["rows"]] == [name for name, times in kernels.items() for _ in range(times)]
    assert all(row["us"] > 0 and row["move_us"] > 0 for row in found["rows"])


@pytest.mark.filterwarnings("ignore::fledge.decode.chance.ChanceWarning")  # the draft is random
def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of round is timed, and none reads its weights faster than the machine."""
    words = "--shape", "tiny", "--context", 9, "--new", 12, "--batch", 1, 2
    rows = record(tmp_path, monkeypatch, "decode", *words)["rows"]
    assert [(r["what"], r["batch"]) for r in rows] == [
        (what, batch) for what in ("token", "chain of 7", "tree of 60", "one pass of 7") for batch in (1, 2)
    ]
    for r in rows:
        assert r["floor_ms"] < r["ms"] and r["wall_ms"] > 0 and r["tokens_per_s"] > 0
        assert r["ms"] == pytest.approx(r["draft_ms"] + r["verify_ms"])
        assert (r["draft_ms"] > 0) == (r["what"] != "token")
        assert (r["devices"], r["bytes_per_round"]) == (1, 0)


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start finds what the first has made."""
    out = tmp_path / "data.json"
    words = (
        "--out",
        out,
        "--records",
        200,
        "--workers",
        2,
        "--work",
        tmp_path,
        "--target",
        BENCH.parent / "demo" / "target",
    )
    monkeypatch.setattr(sys, "argv", ["data", *map(str, words)])
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent))  # for the processes that it starts
    runpy.run_path(str(BENCH / "data.py"), run_name="__main__")
    found = json.loads(out.read_text())
    first, second = found["first"], found["second"]
    assert first["workers_gib"] > 0 == second["workers_gib"] and first["documents"] == 200 - 16 == second["documents"]
    assert first["sha256"] == second["sha256"] and second["cache_s"] < first["cache_s"]
    assert found["cache_mb"] * 1e6 > 8 * first["tokens"] and [p.name for p in tmp_path.iterdir()] == ["data.json"]


def test_prompt_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo, prompts = BENCH.parent / "demo", tmp_path / "code.jsonl"
    prompts.write_text('{"text": "def add(a, b):"}\n{"text": "import os"}\n')
    words = "--target", demo / "target", "--draft", demo / "draft", "--prompts", prompts, "--new", 12, "--repeats", 1
    rows = record(tmp_path, monkeypatch, "prompt_sets", *words, "--batch", 1, 2, "--temperature", 0)["rows"]
    assert [(r["way"], r["batch"]) for r in rows] == [(way, b) for way in ("as trained", "auto") for b in (1, 2)]
    assert all(r["tokens_per_s"] > 0 and r["prompts"] == 2 and 1 <= r["tau"] < 6 for r in rows)
    assert all(0 <= r["paused"] <= 1 and r["set"] == "code" for r in rows)


def test_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    dtype = torch.get_default_dtype()
    try:
        words = "--shape", "tiny", "--only", "gate_up", "draft k", "--rows", 1, 8, "--repeats", 1
        found = record(tmp_path, monkeypatch, "few_rows", *words)
        with pytest.raises(SystemExit):
            record(tmp_path, monkeypatch, "few_rows", "--sweep")
    finally:
        torch.set_default_dtype(dtype), torch.set_default_device(None)
    assert "a sweep needs a GPU" in capsys.readouterr().err
    assert [(row["matrix"], row["M"]) for row in found["rows"]] == [
        ("gate_up", 1), ("gate_up", 8), ("draft k", 1), ("draft k", 8)
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["definition_us"] > 0 and row["linear_us"] > 0 for row in found["rows"])


def test_peagle_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--shape", "tiny", "--depth", 3, "--layers", 1, "--tokens", 128, "--repeats", 1
    rows = record(tmp_path, monkeypatch, "peagle_step", *words)["rows"]
    assert all(row["ms"] > 0 and row["slots"][0] == 126 > row["slots"][1] > row["slots"][2] > 0 for row in rows)


def test_impls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program trains with two seeds; a second call trains nothing and gives the same record."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 20)
    words = "--target", target, "--data", chats, "--prompts", chats, "--work", tmp_path / "work", "--steps", 2
    words = *words, "--impls", "eager", "--seeds", 0, 1, "--draft-vocab", 64
    defined = define_measurements(monkeypatch)
    found = record(tmp_path, monkeypatch, "impls", *words)
    assert [row["seed"] for row in found["rows"]] == [0, 1] and [row["tau"] for row in found["rows"]] == defined
    assert found["means"]["eager"]["tau"] == pytest.approx(sum(defined) / 2)
    assert found["means"]["eager"]["error"] == pytest.approx(abs(defined[0] - defined[1]) / 2)
    assert found["trained"]["target"] == target.name and found["trained"]["steps"] == 2
    assert record(tmp_path, monkeypatch, "impls", *words) == found
