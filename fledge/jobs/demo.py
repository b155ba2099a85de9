"""`fledge demo`: trains a draft for the model that ships with fledge, and measures how much faster the model decodes.

Every step is a `fledge` command, which is printed before it runs. OUT/result.json has the results.
"""

from __future__ import annotations

import filecmp
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fledge.eval.record import record_text
from fledge.files import check_output_path, replace_directory
from fledge.jobs.options import Options, flag_of, opt

PAIR = ("target", "draft")  # the directories of the model and its draft, in fledge/demo and in OUT
WRITTEN = (*PAIR, "train.jsonl", "prompts.jsonl", "result.json")
SHARE = 0.4  # of the training text, which is more than twice what the steps below use
TRAIN: dict[str, Any] = {
    "aux_layers": "2,6,11", "fc_norm": True, "norm_output": True, "depth": 2, "draft_vocab": 1280, "max_length": 256,
    "row_length": 512, "lr": 2e-3, "gamma": 0.6, "eval_tokens": 32,
}  # fmt: skip
DECODE: dict[str, Any] = {"depth": ["auto"], "confidence": 0.3}


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """Train a draft for a small model that ships with fledge, and measure the speedup: minutes on two CPU cores."""

    out: str = opt("directory for the models, the data and the results; the demo can run in it again", "fledge-demo")
    quick: bool = opt("train nothing: measure only the draft that ships with the model", False)
    steps: int = opt("number of optimizer steps of the training", 680, minimum=1)
    prompts: int = opt("number of prompts to decode, at least 2", 16, minimum=2, maximum=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quick:
            self.refuse(["steps"], "with --quick, which trains nothing;")


def run(options: DemoOptions, say: Callable[[str], None], progress: Any) -> None:
    """Runs the demo. `say` prints a line of the result, `progress` is a `ProgressDisplay`.

    Raises ValueError if files in OUT are not those of an earlier demo, or if an output differs with a draft, and
    KeyboardInterrupt if the training was interrupted; the demo then continues it when it runs again.
    """
    start = time.monotonic()
    demo = Demo(Path(options.out), say, progress)
    demo.prepare(options.prompts)
    drafts = {"shipped": demo.out / "draft"}
    if options.quick:
        results = demo.measure(drafts, 0, options.prompts, 128)
    else:
        say("")
        say("First, a glance: a few continuations with the draft that ships.")
        demo.evaluate(drafts, 0, 4, 64, demo.out / "eval-first.json")
        drafts = {"trained just now": demo.train(options.steps)} | drafts
        results = demo.measure(drafts, 0, options.prompts, 128)
        results |= demo.measure(drafts, 1, options.prompts, 128)
    seconds = time.monotonic() - start
    result = record_text({"seconds": seconds, "results": results})
    (demo.out / "result.json").write_text(result + "\n", encoding="utf-8")
    demo.report(drafts, (0,) if options.quick else (0, 1))
    say("")
    say(f"In {seconds / 60:.1f} minutes:")
    for name, record in results.items():
        say(f"  {_summary(name, record)}")
    say("")
    say("Next, for example:")
    for command in next_commands(demo.out):
        say(f"  {command}")


class Demo:
    """The steps of the demo in the directory `out`."""

    def __init__(self, out: Path, say: Callable[[str], None], progress: Any):
        self.out, self.say, self.progress = out, say, progress

    def prepare(self, prompts: int) -> None:
        """Copies the pair of models to OUT, and writes the training text and the prompts."""
        from fledge.demo import data

        check_output_path(self.out, "--out", directory=True)
        bundled = Path(str(files("fledge.demo")))
        self._check_own(bundled)
        self.out.mkdir(parents=True, exist_ok=True)
        for name in PAIR:
            if not (self.out / name).is_dir():
                with replace_directory(self.out / name) as new:
                    shutil.copytree(bundled / name, new, dirs_exist_ok=True, copy_function=shutil.copyfile)
        self.say(f"A model of 7 M parameters is in {self.out / 'target'}, and a draft for it in {self.out / 'draft'}.")
        self.say(f"Writing training text and {prompts} prompts from the source of Python's standard library.")
        data.write(self.out, prompts)

    def _check_own(self, bundled: Path) -> None:
        """Raises ValueError if the demo would replace files that it did not write."""
        if not (self.out / "target").exists():
            taken = [name for name in WRITTEN if (self.out / name).exists()]
        else:
            weights = {name: f"{name}/model.safetensors" for name in PAIR if (self.out / name).exists()}
            taken = [name for name, file in weights.items() if not _same(bundled / file, self.out / file)]
        if taken:
            raise ValueError(f"{self.out / taken[0]} is not from an earlier demo; give another directory as --out")

    def train(self, steps: int) -> Path:
        """Trains a draft, or continues a training that was interrupted. Returns the draft's directory."""
        from fledge.jobs.train import TrainOptions, run

        runs = [self.out / "run", *sorted(self.out.glob("run-*"), key=lambda path: (len(path.name), path.name))]
        directory = next((path for path in runs if _interrupted(path, steps)), None)
        if directory:
            self.say("")
            self.say("Continuing the training of a draft for the bundled model.")
            given: dict[str, Any] = {"resume": str(directory)}
        else:
            self.say("")
            self.say("Training a draft for the bundled model.")
            directory = next(path for path in _numbered(self.out / "run") if not path.exists())
            data = [f"{self.out / 'train.jsonl'}@{SHARE}"]
            given = {"target": str(self.out / "target"), "data": data, "out": str(directory), "steps": steps} | TRAIN
        self._print_command("train", given)
        run(TrainOptions(**given, given=frozenset(given)), self.progress.say, self.progress)
        return directory / "draft"

    def measure(self, drafts: dict[str, Path], temperature: int, prompts: int, tokens: int) -> dict[str, Any]:
        """Measures drafts (by name) at a temperature and returns {"name, temperature t": record}."""
        self.say("")
        self.say(
            "Decoding continuations of held-out files without a draft and with "
            f"{'the draft' if len(drafts) == 1 else 'each draft'}, temperature {temperature}."
        )
        records = self.evaluate(drafts, temperature, prompts, tokens, self.out / f"eval-{temperature}.json")
        return {f"{name}, temperature {temperature}": record for name, record in records.items()}

    def evaluate(
        self, drafts: dict[str, Path], temperature: int, prompts: int, tokens: int, out: Path
    ) -> dict[str, Any]:
        """Decodes with each draft and without. Returns {name of the draft: record}."""
        from fledge.jobs.display import ResultPrinter
        from fledge.jobs.evaluate import EvalOptions, print_table, refuse_changed_output, run

        given: dict[str, Any] = {
            "target": str(self.out / "target"), "draft": [str(draft) for draft in drafts.values()],
            "prompts": [str(self.out / "prompts.jsonl")], "limit": prompts, "max_new_tokens": tokens,
            "temperature": temperature, "out": str(out),
        } | DECODE  # fmt: skip
        self._print_command("eval", given)
        options = EvalOptions(**given, given=frozenset(given))
        record = run(options, self.progress, lambda record: print_table(record, ResultPrinter()))
        refuse_changed_output(record)
        return {name: record if len(drafts) == 1 else record[str(draft)] for name, draft in drafts.items()}

    def report(self, drafts: dict[str, Path], temperatures: Sequence[int]) -> None:
        """Draws the runs of the drafts, and what was measured at these temperatures, on one page."""
        from fledge.jobs.report import ReportOptions, run

        runs = [draft.parent for draft in drafts.values() if draft.parent != self.out]
        records = [self.out / f"eval-{temperature}.json" for temperature in temperatures]
        sources = [str(path) for path in (*runs, *records)]
        page = str(self.out / "report.html")
        self.say("")
        self.say(f"$ {shlex.join(['fledge', 'report', *sources, '--out', page])}")
        run(ReportOptions(sources=sources, out=page, given=frozenset({"sources", "out"})), self.say)

    def _print_command(self, name: str, given: dict[str, Any]) -> None:
        self.say(f"$ {command_line(name, given)}")


def command_line(command: str, given: dict[str, Any]) -> str:
    """The `fledge` command, for a shell, that has these options (by name)."""
    words = ["fledge", command]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            words += [flag_of(name)] if one is True else [flag_of(name), str(one)]
    return shlex.join(words)


def next_commands(out: Path) -> list[str]:
    """Commands to try after the demo."""
    pair = {"target": str(out / "target"), "draft": str(out / "draft")}
    prompts = [str(out / "prompts.jsonl")]
    return [
        command_line("generate", pair | {"stats": True, "prompt": "import json"}),
        command_line("chat", pair),
        command_line("eval", pair | {"prompts": prompts, "draft_mode": "tree", "tree_nodes": "auto"}),
    ]


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _numbered(path: Path) -> Any:
    """The path, then the path with -1, -2, ... at its end."""
    yield path
    number = 0
    while True:
        number += 1
        yield path.with_name(f"{path.name}-{number}")


def _interrupted(run: Path, steps: int) -> bool:
    """Whether the directory holds a run of this many steps that has not ended: its draft is written at the end."""
    recipe = run / "recipe.yaml"
    return recipe.is_file() and not (run / "draft").is_dir() and f"\nsteps: {steps}\n" in recipe.read_text()


def _summary(name: str, r: dict[str, Any]) -> str:
    loops = f"τ {r['tau_not_looping']:.2f} on the {r['not_looping']} that do not loop" if r["not_looping"] else (
        "every answer loops")  # fmt: skip
    return (
        f"draft {name}: {r['speedup']:.2f} times as fast ({r['baseline_tokens_per_s']:.0f} to {r['tokens_per_s']:.0f} "
        f"tokens/s), τ {r['tau']:.2f} ({loops}; {r['repeated_8grams']:.0%} of 8-grams are repeats), "
        f"{r['identical']} of {r['prompts']} identical"
        + (f", {r['near_ties']} differing within rounding noise" if r["near_ties"] else "")
    )
