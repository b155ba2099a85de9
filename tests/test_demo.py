"""`fledge demo`: the commands that it prints are those that it runs, and it can run again in the same directory."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fledge.cli import app
from fledge.commands import demo
from fledge.commands.generate import GenerateOptions
from fledge.io.results import TINTS
from fledge.measure.options import EvalOptions
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.run import Display
from support.commands import Ran
from support.terminal import TerminalOf

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "fledge" / "demo"
RECORD = {
    "tau": 2.0, "tau_interval": [1.75, 2.25], "speedup": 1.5, "speedup_interval": [1.25, 1.75], "tokens_per_s": 30.0,
    "baseline_tokens_per_s": 20.0, "repeated_8grams": 0.04, "identical": 2, "different": 0, "prompts": 2,
}  # fmt: skip
FOUR = ["trained, greedy", "shipped, greedy", "trained, sampled", "shipped, sampled"]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of the commands that the demo runs; functions that only keep them take the place of the commands."""
    ran: list[Any] = []

    def train(options: TrainOptions, say: Any, progress: Any) -> dict[str, Any]:
        ran.append(options)
        (Path(options.resume or options.out) / "draft").mkdir(parents=True)
        return {}

    def evaluate(options: EvalOptions, progress: Any, show: Any = None) -> dict[str, Any]:
        ran.append(options)
        return RECORD if len(options.draft) == 1 else dict.fromkeys(options.draft, RECORD)

    monkeypatch.setattr("fledge.commands.features.run", lambda options, say, progress: ran.append(options))
    monkeypatch.setattr("fledge.commands.train.run", train)
    monkeypatch.setattr("fledge.commands.evaluate.run", evaluate)
    monkeypatch.setattr("fledge.commands.generate.run", lambda options, progress: ran.append(options))
    monkeypatch.setattr("fledge.commands.report.run", lambda options, say: ran.append(options))
    return ran


def test_the_printed_commands_are_those_that_run(fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "a demo"  # the space has to be quoted
    ran = fledge("demo", "--out", out, "--prompts", 4)
    printed = [shlex.split(line[2:]) for line in ran.out.splitlines() if line.startswith("$ fledge ")]
    direct, jobs[:] = list(jobs), []
    assert [words[1] for words in printed] == ["generate", "features", "train", "eval", "eval", "report"], ran.err
    shutil.rmtree(out / "run")
    for words in printed:
        assert fledge(*words[1:]).code == 0
    assert jobs == direct and [options.given for options in jobs] == [options.given for options in direct]


def test_drafts_are_measured_in_one_fixed_way(fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path) -> None:
    fledge("demo", "--out", tmp_path)
    measured = [options for options in jobs if isinstance(options, EvalOptions)]
    assert [options.temperature for options in measured] == [0, 1]
    for options in measured:
        assert options.depth == [] and options.draft_mode == ["chain"] and options.confidence == 0
        assert [Path(draft).parent.name for draft in options.draft] == ["run", tmp_path.name]
    (shown,) = (options for options in jobs if isinstance(options, GenerateOptions))
    assert shown.stats and shown.depth is None


def test_the_table_has_every_draft_and_temperature(fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path) -> None:
    ran = fledge("demo", "--out", tmp_path, "--prompts", 4)
    result = json.loads((tmp_path / "result.json").read_text())
    assert ran.code == 0 and list(result) == ["seconds", "results"] and list(result["results"]) == FOUR
    for name in FOUR:
        assert re.search(rf"^ {name} +2\.00 ± 0\.25 +20 +30 +1\.50 \(1\.25-1\.75\) +2/2 *$", ran.out, re.M), ran.out
    assert "4% to 4% of the 8-grams" in ran.out and f"Report: {tmp_path / 'report.html'}" in ran.out


def test_quick_trains_nothing(fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path) -> None:
    assert fledge("demo", "--out", tmp_path, "--prompts", 4, "--quick").code == 0
    assert list(json.loads((tmp_path / "result.json").read_text())["results"]) == FOUR[1::2]
    assert not any(isinstance(options, TrainOptions) for options in jobs)
    ran = fledge("demo", "--out", tmp_path, "--quick", "--steps", 3)
    assert ran.code == 2 and "--steps" in ran.err and "trains nothing" in ran.err


def test_too_few_prompts_for_intervals(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORD, "tau_interval", None)
    monkeypatch.setitem(RECORD, "speedup_interval", None)
    ran = fledge("demo", "--out", tmp_path, "--quick", "--prompts", 2)
    assert re.search(r"^ shipped, greedy +2\.00 +20 +30 +1\.50 +2/2 *$", ran.out, re.M), ran.out + ran.err


def test_another_run_trains_again_and_continues_what_was_interrupted(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path
) -> None:
    for _ in range(2):
        assert fledge("demo", "--out", tmp_path, "--prompts", 4).code == 0
    trained = [options for options in jobs if isinstance(options, TrainOptions)]
    assert [Path(options.out).name for options in trained] == ["run", "run-1"]
    interrupted = tmp_path / "run-1"
    shutil.rmtree(interrupted / "draft")
    (interrupted / "recipe.yaml").write_text(f"method: eagle3\nsteps: {trained[0].steps}\nlr: 0.1\n")
    fledge("demo", "--out", tmp_path, "--prompts", 4, "--steps", 7)  # of another length: a new run
    ran = fledge("demo", "--out", tmp_path, "--prompts", 4)
    assert f"fledge train --resume {interrupted}" in ran.out and (interrupted / "draft").is_dir()
    assert (tmp_path / "run-2" / "draft").is_dir() and not (tmp_path / "run-3").exists()


@pytest.mark.parametrize("name", ["target", "draft", "chats.jsonl.gz", "prompts.jsonl", "result.json"])
def test_files_of_others_are_not_replaced(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path, name: str
) -> None:
    own = tmp_path / name
    if name in demo.MODELS:
        own.mkdir()
        own = own / "model.safetensors"
    own.write_text("mine")
    ran = fledge("demo", "--out", tmp_path)
    assert ran.code == 2 and "give another directory as --out" in ran.err and own.read_text() == "mine" and not jobs


def test_a_changed_model_in_the_directory_is_named(fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path) -> None:
    assert fledge("demo", "--out", tmp_path, "--quick").code == 0
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    ran = fledge("demo", "--out", tmp_path, "--quick")
    assert ran.code == 2 and f"{weights} is not from a demo of this version" in ran.err


def test_a_changed_output_ends_the_demo(
    fledge: Callable[..., Ran], jobs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORD, "different", 1)
    ran = fledge("demo", "--out", tmp_path, "--quick")
    assert ran.code == 2 and "changed the output" in ran.err


def test_the_commands_to_try_next_exist(tmp_path: Path) -> None:
    commands = [shlex.split(command) for command in demo.next_commands(tmp_path)]
    assert len(commands) == 3 and commands[0][1] == "chat"
    assert {words[1] for words in commands} <= {command.name for command in app.registered_commands}


def test_a_small_demo_is_interrupted_and_runs(
    fledge: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the pair that ships: answers, trains for three steps, measures and draws."""
    lines = gzip.decompress((SHIPPED / "chats.jsonl.gz").read_bytes()).splitlines(keepends=True)
    monkeypatch.setattr(demo, "files", lambda package: tmp_path / "bundled")
    shutil.copytree(SHIPPED, tmp_path / "bundled" / "demo")
    (tmp_path / "bundled" / "demo" / "chats.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:40])))
    words = "demo", "--out", tmp_path / "demo", "--steps", 3, "--prompts", 3
    with monkeypatch.context() as patch:
        patch.setattr(Display, "after", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert fledge(*words).code == 130
    assert not (tmp_path / "demo" / "run" / "draft").exists()
    ran = fledge(*words)
    assert ran.code == 0, ran.err
    assert f"fledge train --resume {tmp_path / 'demo' / 'run'}" in ran.out
    assert "τ" in ran.err and "tokens/s" in ran.err and (tmp_path / "demo" / "report.html").is_file()
    results = json.loads((tmp_path / "demo" / "result.json").read_text())["results"]
    assert list(results) == FOUR and all(r["identical"] == r["prompts"] == 3 for r in results.values())
    assert all(results[f"shipped, {way}"]["tau"] > 1.5 for way in demo.TEMPERATURES)


def test_the_shipped_draft_is_sound(fledge: Callable[..., Ran]) -> None:
    """It has a probe of its present weights."""
    ran = fledge("check", "--target", SHIPPED / "target", "--draft", SHIPPED / "draft", "--device", "cpu")
    assert ran.code == 0 and "logits: " in ran.out and ran.out.endswith("The draft is sound.\n"), ran.out + ran.err


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_the_pages_show_the_recorded_run(page: str) -> None:
    tables = runpy.run_path(str(ROOT / "tools" / "demo_tables.py"))
    rows = tables["rows"](json.loads((ROOT / "bench" / "results" / "demo.json").read_text())["results"])
    assert tables["HEADER"] + rows in (ROOT / page).read_text(encoding="utf-8"), "run tools/demo_tables.py"


def test_the_card_states_the_recorded_losses() -> None:
    card, figures = (SHIPPED / "target" / name for name in ("README.md", "pretrain.json"))
    for kind, loss in json.loads(figures.read_text())["held_out_loss"].items():
        assert re.search(rf"^\| {kind} \| [\d.]+ \| {loss:.2f} \|$", card.read_text(), re.M)


def test_what_ships_has_no_path_of_a_machine() -> None:
    texts = [*SHIPPED.glob("**/*.json"), *SHIPPED.glob("**/*.md")]
    assert texts and not any(re.search(r"/(tmp|home|root|work)/", file.read_text()) for file in texts)


def test_generate_tints_the_tokens_of_the_draft() -> None:
    words = ["generate", "--target", SHIPPED / "target", "--draft", SHIPPED / "draft", "--prompt", "What is 12 + 13?"]
    with TerminalOf(*words, "--stats", "--max-new-tokens", 40) as terminal:
        assert terminal.wait_for_end() == 0, terminal.text
        tints = {tint.removeprefix("#") for tint in TINTS}
        assert any(tints & terminal.colours(line) for line in terminal.lines if line.strip()), terminal.text
        assert "tokens/s" in terminal.text
