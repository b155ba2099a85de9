"""Runs the same jobs with two checkouts of fledge on one machine, in turn, and records both.

    git worktree add ../before HEAD~20
    python bench/before_after.py --checkouts before=../before now=. --out bench/results/before_after.json

Three things are measured with each checkout, each named by its commit:
`demo`: `fledge demo`: τ, tokens per second and speedup of the demo's drafts.
`family`: every method trained for `--steps` steps on the demo's conversations, on the CPU in float32, then τ and α of
greedy decoding on 8 of the demo's prompts. Both checkouts read the bundled target and text of this checkout.
`step`: `bench/train_step.py` for rows of 2,048 and 8,192 supervised tokens, `--repeats` times in turn; needs a GPU.
`--only` chooses among them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fledge.eval.environment import environment
from fledge.eval.record import write_record

CLI = [sys.executable, "-c", "from fledge.cli import main; main()"]
BUNDLED = Path(__file__).resolve().parents[1] / "fledge" / "demo"
METHODS = ("eagle3", "eagle3.1", "peagle", "eagle1")
TRAIN = "--depth 4 --max-length 256 --row-length 512 --lr 2e-3 --eval-tokens 1 --device cpu".split()
EVAL = "--limit 8 --max-new-tokens 64 --depth 4 --device cpu --json".split()
KEPT = ("tau", "alpha", "speedup", "tokens_per_s", "baseline_tokens_per_s", "identical", "near_ties", "prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", nargs=2, required=True, metavar="COMMIT=DIR")
    parser.add_argument("--out", type=Path, default=Path("bench/results/before_after.json"))
    parser.add_argument("--only", nargs="*", choices=["demo", "family", "step"], default=["demo", "family", "step"])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each method of the family")
    parser.add_argument("--repeats", type=int, default=2, help="runs of bench/train_step.py with each checkout")
    parser.add_argument("--cores", nargs=2, metavar="LIST", help="CPU lists (as taskset takes them): run the demo and "
                        "the family with both checkouts side by side on these")  # fmt: skip
    options = parser.parse_args()
    checkouts = [Checkout(*text.split("=", 1), cores) for text, cores in
                 zip(options.checkouts, options.cores or [None, None], strict=True)]  # fmt: skip
    record: dict[str, Any] = {"environment": environment("cuda" if "step" in options.only else "cpu", "float32")}
    record["environment"]["commit"] = [checkout.commit for checkout in checkouts]
    if "demo" in options.only:
        record["demo"] = in_turn(checkouts, demo, side_by_side=bool(options.cores))
        write_record(options.out, record)
    if "family" in options.only:
        record["family"] = in_turn(checkouts, lambda c: family(c, options.steps), side_by_side=bool(options.cores))
        write_record(options.out, record)
    if "step" in options.only:
        for _ in range(options.repeats):
            for checkout in checkouts:
                record.setdefault("step", {}).setdefault(checkout.commit, []).append(step(checkout))
        write_record(options.out, record)
    print(json.dumps(record, indent=2))


class Checkout:
    """A directory with fledge at a commit, and the CPU cores that its programs may use."""

    def __init__(self, commit: str, directory: str, cores: str | None):
        self.commit, self.directory = commit, Path(directory).resolve()
        self.prefix = ["taskset", "-c", cores] if cores else []

    def run(self, *command: object) -> str:
        """Runs a command there and returns its standard output."""
        path = os.pathsep.join([str(self.directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        ran = subprocess.run(
            [*self.prefix, *map(str, command)], cwd=self.directory, env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if ran.returncode:
            sys.exit(f"{self.commit}: {' '.join(map(str, command))} ended with {ran.returncode}")
        return ran.stdout


def in_turn(checkouts: list[Checkout], work: Any, side_by_side: bool) -> dict[str, Any]:
    with ThreadPoolExecutor(len(checkouts) if side_by_side else 1) as pool:
        return {c.commit: result for c, result in zip(checkouts, pool.map(work, checkouts), strict=True)}


def demo(checkout: Checkout) -> dict[str, Any]:
    checkout.run(*CLI, "demo", "--out", "build/demo")
    found = json.loads((checkout.directory / "build/demo/result.json").read_text())
    return {"seconds": found["seconds"]} | {name: pick(r) for name, r in found["results"].items()}


def family(checkout: Checkout, steps: int) -> dict[str, Any]:
    """Every method, trained and evaluated; `loss` are the first and the last step's."""
    found, target = {}, BUNDLED / "target"
    with tempfile.TemporaryDirectory() as work:
        for method in METHODS:
            out, vocabulary = Path(work) / method, [] if method == "eagle1" else ["--draft-vocab", 2048]
            checkout.run(
                *CLI, "train", "--target", target, "--data", BUNDLED / "chats.jsonl.gz", "--out", out,
                "--method", method, "--steps", steps, *vocabulary, *TRAIN,
            )  # fmt: skip
            losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
            record = checkout.run(
                *CLI, "eval", "--target", target, "--draft", out / "draft", "--prompts", BUNDLED / "prompts.jsonl",
                *EVAL,
            )  # fmt: skip
            found[method] = {"loss": [losses[0], losses[-1]]} | pick(json.loads(record))
    return found


def step(checkout: Checkout) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "step.json"
        words = "--tokens 2048 8192 --supervised 1 --impls triton".split()
        checkout.run(sys.executable, checkout.directory / "bench/train_step.py", *words, "--out", out)
        return [{k: row[k] for k in ("T", "ms", "gib", "tflops")} for row in json.loads(out.read_text())["rows"]]


def pick(record: dict[str, Any]) -> dict[str, Any]:
    return {k: record[k] for k in KEPT}


if __name__ == "__main__":
    main()
