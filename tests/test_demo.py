"""`fledge demo`: the commands that it prints are those that it runs, and it can run again in the same directory."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.cli import app
from fledge.demo import ship
from fledge.jobs import demo
from fledge.jobs.evaluate import EvalOptions
from fledge.jobs.train import TrainOptions
from fledge.models.weights import load_draft
from fledge.targets.loading import load_target
from support.commands import Ran

RECORD = {
    "tau": 2.0, "speedup": 1.5, "tokens_per_s": 30.0, "baseline_tokens_per_s": 20.0, "repeated_8grams": 0.0,
    "not_looping": 2, "tau_not_looping": 2.0, "identical": 2, "near_ties": 0, "different": 0, "prompts": 2,
}  # fmt: skip


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[TrainOptions | EvalOptions]:
    """Replaces training and evaluation by functions that keep their options in this list."""
    ran: list[TrainOptions | EvalOptions] = []

    def train(options: TrainOptions, say: Any, progress: Any) -> dict[str, Any]:
        ran.append(options)
        (Path(options.resume or options.out) / "draft").mkdir(parents=True)
        return {}

    def evaluate(options: EvalOptions, progress: Any, show: Any) -> dict[str, Any]:
        ran.append(options)
        return RECORD if len(options.draft) == 1 else dict.fromkeys(options.draft, RECORD)

    monkeypatch.setattr("fledge.jobs.train.run", train)
    monkeypatch.setattr("fledge.jobs.evaluate.run", evaluate)
    monkeypatch.setattr("fledge.jobs.evaluate.print_table", lambda *_: None)
    monkeypatch.setattr("fledge.jobs.report.run", lambda options, say: ran.append(options))
    return ran


def test_the_printed_commands_are_those_that_run(fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "a demo"  # the space has to be quoted
    ran = fledge("demo", "--out", out, "--prompts", 4)
    printed = [shlex.split(line[2:]) for line in ran.out.splitlines() if line.startswith("$ fledge ")]
    direct, jobs[:] = list(jobs), []
    assert [words[1] for words in printed] == ["eval", "train", "eval", "eval", "report"]
    shutil.rmtree(out / "run")
    for words in printed:
        fledge(*words[1:])
    assert jobs == direct and [options.given for options in jobs] == [options.given for options in direct]


def test_the_results_have_every_draft_and_temperature(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path
) -> None:
    assert fledge("demo", "--out", tmp_path, "--prompts", 4).code == 0
    drafts = ("trained just now", "shipped")
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["results"]) == [f"{draft}, temperature {t}" for t in (0, 1) for draft in drafts]
    assert fledge("demo", "--out", tmp_path, "--prompts", 4, "--quick").code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["results"]) == ["shipped, temperature 0"]


def test_another_run_trains_again_and_continues_what_was_interrupted(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path
) -> None:
    for _ in range(2):
        assert fledge("demo", "--out", tmp_path, "--prompts", 4).code == 0
    trained = [options for options in jobs if isinstance(options, TrainOptions)]
    assert [Path(options.out).name for options in trained] == ["run", "run-1"]
    interrupted = tmp_path / "run-1"
    shutil.rmtree(interrupted / "draft")
    (interrupted / "recipe.yaml").write_text("method: eagle3\nsteps: 680\nlr: 0.1\n")
    fledge("demo", "--out", tmp_path, "--prompts", 4, "--steps", 7)  # of another length: a new run
    ran = fledge("demo", "--out", tmp_path, "--prompts", 4)
    assert f"fledge train --resume {interrupted}" in ran.out and (interrupted / "draft").is_dir()
    assert (tmp_path / "run-2" / "draft").is_dir() and not (tmp_path / "run-3").exists()


@pytest.mark.parametrize("name", ["target", "draft", "train.jsonl"])
def test_files_of_others_are_not_replaced(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path, name: str
) -> None:
    own = tmp_path / name
    if name.endswith("jsonl"):
        own.write_text("mine")
    else:
        own.mkdir()
        own = own / "model.safetensors"
        own.write_text("mine")
    ran = fledge("demo", "--out", tmp_path)
    assert ran.code == 2 and "give another directory as --out" in ran.err and own.read_text() == "mine" and not jobs


def test_a_changed_output_ends_the_demo(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORD, "different", 1)
    ran = fledge("demo", "--out", tmp_path, "--quick")
    assert ran.code == 2 and "changed the output" in ran.err


def test_the_commands_to_try_next_exist(tmp_path: Path) -> None:
    commands = demo.next_commands(tmp_path)
    assert {shlex.split(command)[1] for command in commands} <= {command.name for command in app.registered_commands}


def test_a_python_without_its_source(
    fledge: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fledge.demo.data.stdlib_files", list)
    ran = fledge("demo", "--out", tmp_path)
    assert ran.code == 2 and "no source files of its standard library" in ran.err


def test_the_shipped_draft_is_sound(fledge: Callable[..., Ran]) -> None:
    """It has a probe of its present weights."""
    shipped = Path(demo.__file__).parents[1] / "demo"
    ran = fledge("check", "--target", shipped / "target", "--draft", shipped / "draft", "--device", "cpu")
    assert ran.code == 0 and "logits: " in ran.out and ran.out.endswith("The draft is sound.\n"), ran.out + ran.err


def test_the_most_frequent_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller draft proposes what the whole one does, but for tokens that are rarer than all that it kept."""
    shipped = Path(demo.__file__).parents[1] / "demo"
    monkeypatch.setattr(ship, "TARGET", str(shipped / "target"))
    monkeypatch.setattr(ship, "stdlib_files", lambda: [("kept.py", ship.TEXT * 2)])
    whole = load_draft(shipped / "draft")
    draft = ship.most_frequent(whole, 100)
    ids, known = draft.target_ids(), whole.target_ids()
    at = torch.searchsorted(known, ids)
    assert torch.equal(known[at], ids) and torch.equal(draft.head, whole.head[at])
    words = load_target(shipped / "target", weights=False).tokenizer("def __init__(self, x):")["input_ids"]
    assert {*words} <= {*ids.tolist()}
    assert 0.5 < draft.config.provenance.coverage <= 1
