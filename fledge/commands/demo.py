"""`fledge demo`: trains a draft for the assistant that ships with fledge, and measures the assistant's speedup.

Every step is a `fledge` command, which is printed before it runs. OUT/result.json has the results.
"""

from __future__ import annotations

import filecmp
import itertools
import shlex
import shutil
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.commands import evaluate, features, generate, report, train
from fledge.io.files import check_output_path, replace_directory
from fledge.measure.options import EvalOptions
from fledge.measure.record import record_text
from fledge.options import Options, flag_of, opt
from fledge.train.setup.options import TrainOptions

if TYPE_CHECKING:
    from fledge.io.display import ProgressDisplay
    from fledge.io.results import ResultPrinter

MODELS, TEXTS = ("target", "draft"), ("chats.jsonl.gz", "prompts.jsonl")  # in fledge/demo, and copied to OUT
QUESTION = "Omar buys 4 books for 9 dollars each and pays with 50 dollars. How much change is there?"
FEATURES: dict[str, Any] = {"max_length": 512, "precision": "bfloat16"}
TRAIN: dict[str, Any] = {
    "depth": 4, "cod_rate": 0.7, "draft_vocab": 2048, "fc_norm": True, "norm_output": True, "row_length": 512,
    "lr": 3e-3, "gamma": 0.6, "weight_decay": 0.5, "eval_tokens": 32,
}  # fmt: skip
NEW_TOKENS = 128
TEMPERATURES = {"greedy": 0, "sampled": 1}


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """Train a draft for a small assistant that ships with fledge, and measure the speedup: minutes on two CPU cores."""

    out: str = opt("directory for the models, the data and the results; the demo can run in it again", "fledge-demo")
    quick: bool = opt("train nothing: measure only the draft that ships with the assistant", False)
    steps: int = opt("number of optimizer steps of the training", 1000, minimum=1)
    prompts: int = opt("number of prompts to decode, at least 2", 48, minimum=2, maximum=48)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quick:
            self.refuse(["steps"], "with --quick, which trains nothing;")


def run(options: DemoOptions, printer: ResultPrinter, progress: ProgressDisplay) -> None:
    """Runs the demo. `printer` prints the results.

    Raises ValueError if OUT has files that no earlier demo wrote, or if an output differs with a draft, and
    KeyboardInterrupt if the training was interrupted; the next run of the demo continues an interrupted training.
    """
    start = time.monotonic()
    demo = Demo(Path(options.out), printer, progress)
    demo.prepare()
    demo.answer(QUESTION)
    trained = {} if options.quick else {"trained": demo.train(demo.write_features(), options.steps)}
    drafts = trained | {"shipped": demo.out / "draft"}
    records: dict[str, Any] = {}
    for way, temperature in TEMPERATURES.items():
        measured = demo.measure(drafts, temperature, options.prompts)
        records |= {f"{name}, {way}": record for name, record in measured.items()}
    seconds = time.monotonic() - start
    result = record_text({"seconds": seconds, "results": records})
    (demo.out / "result.json").write_text(result + "\n", encoding="utf-8")
    demo.report([path.parent for path in trained.values()])
    printer.print("")
    printer.print(f"{seconds / 60:.1f} minutes. Tokens/s alone and with the draft; ± and brackets: 95 % intervals.")
    printer.table(table(records), optional=["identical"])
    printer.print(repeats(records))
    printer.print(f"Report: {demo.out / 'report.html'}")
    printer.print("")
    printer.print("Next: talk to the assistant, compare chains with trees, train a draft for a model of yours.")
    for command in next_commands(demo.out):
        printer.print(f"  {command}")


class Demo:
    """The steps of the demo in the directory `out`."""

    def __init__(self, out: Path, printer: ResultPrinter, progress: ProgressDisplay):
        self.out, self.progress = out, progress
        self._say = printer.print

    def prepare(self) -> None:
        """Copies the pair of models, the conversations and the prompts to OUT."""
        check_output_path(self.out, "--out", directory=True)
        bundled = Path(str(files("fledge"))) / "demo"
        self._check_own(bundled)
        self.out.mkdir(parents=True, exist_ok=True)
        for name in MODELS:
            if not (self.out / name).is_dir():
                with replace_directory(self.out / name) as new:
                    shutil.copytree(bundled / name, new, dirs_exist_ok=True, copy_function=shutil.copyfile)
        for name in TEXTS:
            shutil.copyfile(bundled / name, self.out / name)
        self._say(f"{self.out} has an assistant of 19 M parameters (target), a draft that was trained for it (draft),")
        self._say("conversations to train another draft on, and held-out prompts to measure both drafts on.")

    def _check_own(self, bundled: Path) -> None:
        """Raises ValueError if the demo would replace files that no earlier demo wrote."""
        known = [*(f"{name}/model.safetensors" for name in MODELS), *TEXTS]
        present = [name for name in known if (self.out / name.partition("/")[0]).exists()]
        foreign = [
            name for name in present
            if not (self.out / name).is_file() or not filecmp.cmp(bundled / name, self.out / name, shallow=False)
        ]  # fmt: skip
        if not foreign and not present and (self.out / "result.json").exists():
            foreign = ["result.json"]
        if foreign:
            raise ValueError(
                f"{self.out / foreign[0]} is not from a demo of this version of fledge; give another directory as --out"
            )

    def answer(self, question: str) -> None:
        """Shows the answer to a question, the draft's tokens tinted, and the speed."""
        pair = {name: str(self.out / name) for name in MODELS}
        given: dict[str, Any] = pair | {"prompt": question, "stats": True}
        self._print_command("The assistant answers a question; tokens of the draft are tinted.", "generate", given)
        generate.run(generate.GenerateOptions(**given, given=frozenset(given)), self.progress)

    def write_features(self) -> Path:
        """Writes the assistant's hidden states of the conversations. Returns the directory of the hidden states.

        Computing the hidden states anew in every pass would be most of the time of a training.
        """
        out = self.out / "features"
        given = {"target": str(self.out / "target"), "data": [str(self.out / TEXTS[0])], "out": str(out)} | FEATURES
        self._print_command("Writing what a draft learns from: hidden states of the assistant.", "features", given)
        options = features.FeaturesOptions(**given, given=frozenset(given))
        features.run(options, self.progress.say, self.progress)
        return out

    def train(self, states: Path, steps: int) -> Path:
        """Trains a draft, or continues an interrupted training. Returns the draft's directory."""
        runs = [self.out / "run", *sorted(self.out.glob("run-*"), key=lambda path: (len(path.name), path.name))]
        directory = next((path for path in runs if _interrupted(path, steps)), None)
        if directory:
            given: dict[str, Any] = {"resume": str(directory)}
            self._print_command("Continuing the training of a draft.", "train", given)
        else:
            names = itertools.chain(["run"], (f"run-{number}" for number in itertools.count(1)))
            directory = next(path for name in names if not (path := self.out / name).exists())
            given = {"features": str(states), "out": str(directory), "steps": steps} | TRAIN
            self._print_command("Training a draft from nothing. τ is computed on the training data.", "train", given)
        train.run(TrainOptions(**given, given=frozenset(given)), self.progress.say, self.progress)
        return directory / "draft"

    def measure(self, drafts: dict[str, Path], temperature: int, prompts: int) -> dict[str, Any]:
        """Decodes without a draft, and with chains of the depth that each draft (by name) was trained with.

        Returns {name: record}.
        """
        given: dict[str, Any] = {
            "target": str(self.out / "target"), "draft": [str(draft) for draft in drafts.values()],
            "draft_mode": ["chain"], "prompts": [str(self.out / TEXTS[1])], "limit": prompts,
            "max_new_tokens": NEW_TOKENS, "temperature": temperature, "out": str(self.out / f"eval-{temperature}.json"),
        }  # fmt: skip
        compared = "with each draft and without" if len(drafts) > 1 else "with the draft and without"
        self._print_command(f"Answering held-out prompts {compared}, temperature {temperature}.", "eval", given)
        record = evaluate.run(EvalOptions(**given, given=frozenset(given)), self.progress)
        evaluate.refuse_changed_output(record)
        return {name: record if len(drafts) == 1 else record[str(draft)] for name, draft in drafts.items()}

    def report(self, runs: list[Path]) -> None:
        """Draws the training runs and the measurements on one page."""
        records = [self.out / f"eval-{temperature}.json" for temperature in TEMPERATURES.values()]
        given: dict[str, Any] = {"sources": [*map(str, [*runs, *records])], "out": str(self.out / "report.html")}
        self._say("")
        self._say(f"$ {shlex.join(['fledge', 'report', *given['sources'], '--out', given['out']])}")
        report.run(report.ReportOptions(**given, given=frozenset(given)), lambda line: None)

    def _print_command(self, purpose: str, name: str, given: dict[str, Any]) -> None:
        self._say("")
        self._say(purpose)
        self._say(f"$ {command_line(name, given)}")


def command_line(command: str, given: dict[str, Any]) -> str:
    """The `fledge` command with the given options (by name), as text for a shell."""
    words = ["fledge", command]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            words += [flag_of(name)] if one is True else [flag_of(name), str(one)]
    return shlex.join(words)


def table(records: dict[str, Any]) -> dict[str, list[str]]:
    """The figures of records, as columns by heading."""
    from fledge.measure.table import half_width

    rows = records.values()
    widths = [half_width(r) for r in rows]
    return {
        "draft": list(records),
        "τ": [f"{r['tau']:.2f}" + ("" if w is None else f" ± {w:.2f}") for r, w in zip(rows, widths, strict=True)],
        "alone": [f"{r['baseline_tokens_per_s']:.0f}" for r in rows],
        "drafting": [f"{r['tokens_per_s']:.0f}" for r in rows],
        "speedup": [_with_interval(r["speedup"], r.get("speedup_interval")) for r in rows],
        "identical": [f"{r['identical']}/{r['prompts']}" for r in rows],
    }


def _with_interval(value: float, interval: list[float] | None) -> str:
    return f"{value:.2f}" + ("" if interval is None else f" ({interval[0]:.2f}-{interval[1]:.2f})")


def repeats(records: dict[str, Any]) -> str:
    """A sentence about the share of repeated 8-grams in the answers, since repetition makes drafting easy."""
    shares = [r["repeated_8grams"] for r in records.values()]
    return f"{min(shares):.0%} to {max(shares):.0%} of the 8-grams of the answers repeat earlier 8-grams."


def next_commands(out: Path) -> list[str]:
    """Commands to try after the demo."""
    pair = {name: str(out / name) for name in MODELS}
    trees = {"prompts": str(out / "prompts.jsonl"), "draft_mode": ["chain", "tree"]}
    own = {"target": "YOUR-MODEL", "data": "YOUR-CHATS.jsonl", "out": "YOUR-RUN"}
    return [command_line("chat", pair), command_line("eval", pair | trees), command_line("train", own)]


def _interrupted(run: Path, steps: int) -> bool:
    """Whether the directory holds an unfinished run of `steps` steps: a run without a draft, which is written last."""
    recipe = run / "recipe.yaml"
    return recipe.is_file() and not (run / "draft").is_dir() and f"\nsteps: {steps}\n" in recipe.read_text()
