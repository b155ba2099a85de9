"""Runs the same jobs with two checkouts of fledge on one machine, in turn, and records both.

    git worktree add ../before HEAD~20
    python bench/before_after.py --checkouts before=../before now=. --out bench/results/before_after.json

Each checkout, named by its commit, is measured in five parts, among which `--only` chooses:
`demo`: `fledge demo`: τ, tokens per second and speedup of the demo's drafts.
`family`: every method trained for `--steps` steps on the demo's conversations, on the CPU in float32, then τ and α of
greedy decoding on 8 of the demo's prompts. Both checkouts read the bundled target and text of this checkout.
`step`: `bench/train_step.py` of the checkout for rows of 2,048 and 8,192 supervised tokens; needs a GPU.
`rounds`: `bench/decode.py` of the checkout: one token, a chain, a tree and one pass, for 1 and 8 prompts, with models
of the shape `8b` on a GPU and `tiny` on a CPU, where the time is fledge's own overhead.
`start`: seconds of `fledge --help`, to the first token of `fledge generate` and to the first step of `fledge train` on
the bundled pair. The last two are less `transformers_s`, the seconds in which a program imports torch and transformers
and loads the bundled target and its tokenizer, measured just before.
Runs of the last three alternate, `--repeats` times; the medians are printed with their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fledge.io.machine import environment
from fledge.measure.record import write_record

CLI = [sys.executable, "-c", "from fledge.cli import main; main()"]
BUNDLED = Path(__file__).resolve().parents[1] / "fledge" / "demo"
METHODS = ("eagle3", "eagle3.1", "peagle", "eagle1")
TRAIN = "--depth 4 --max-length 256 --row-length 512 --lr 2e-3 --eval-tokens 1".split()
EVAL = "--limit 8 --max-new-tokens 64 --depth 4 --device cpu --json".split()
KEPT = ("tau", "alpha", "speedup", "tokens_per_s", "baseline_tokens_per_s", "identical", "near_ties", "prompts")
LOADING = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32), AutoTokenizer.from_pretrained(sys.argv[1])
"""


def main() -> None:
    once, repeated = {"demo": demo, "family": family}, {"step": step, "rounds": rounds, "start": start}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", nargs=2, required=True, metavar="COMMIT=DIR")
    parser.add_argument("--out", type=Path, default=Path("bench/results/before_after.json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of repeated parts")
    parser.add_argument("--only", nargs="*", choices=[*once, *repeated], help="default: all that the device can do")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each method of the family")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the last three parts with each checkout")
    parser.add_argument("--cores", nargs=2, metavar="LIST", help="CPU lists (as taskset takes them): run the demo and "
                        "the family with both checkouts side by side on these")  # fmt: skip
    options = parser.parse_args()
    parts = options.only or [part for part in (*once, *repeated) if part != "step" or options.device != "cpu"]
    if "step" in parts and options.device == "cpu":
        parser.error("--only step needs a GPU")
    checkouts = [Checkout(*text.split("=", 1), cores) for text, cores in
                 zip(options.checkouts, options.cores or [None, None], strict=True)]  # fmt: skip
    record: dict[str, Any] = {"environment": environment(options.device, "float32")}
    record["environment"]["commit"] = [checkout.commit for checkout in checkouts]
    for part in parts:
        if part in once:
            with ThreadPoolExecutor(2 if options.cores else 1) as pool:
                found = list(pool.map(once[part], checkouts, [options] * 2))
            record[part] = {checkout.commit: result for checkout, result in zip(checkouts, found, strict=True)}
            print(json.dumps({part: record[part]}, indent=2), flush=True)
        else:
            record[part] = {checkout.commit: [] for checkout in checkouts}
            for turn in range(options.repeats):  # before, now, now, before, ..: a slow drift of the machine cancels
                for checkout in checkouts[:: -1 if turn % 2 else 1]:
                    record[part][checkout.commit].append(repeated[part](checkout, options))
            show_medians(part, record[part])
        write_record(options.out, record)


class Checkout:
    """A directory with fledge at a commit, and the CPU cores that its programs may use."""

    def __init__(self, commit: str, directory: str, cores: str | None):
        self.commit, self.directory = commit, Path(directory).resolve()
        self.prefix = ["taskset", "-c", cores] if cores else []

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        """Starts a command there, with standard output to read without delay."""
        path = os.pathsep.join([str(self.directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [*self.prefix, *map(str, command)], cwd=self.directory, env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip

    def run(self, *command: object) -> str:
        """Runs a command there and returns its standard output."""
        process = self.start(*command)
        out = process.communicate()[0].decode()
        if process.returncode:
            sys.exit(f"{self.commit}: {' '.join(map(str, command))} ended with {process.returncode}")
        return out

    def seconds(self, *command: object, until: Callable[[subprocess.Popen[bytes]], object] | None = None) -> float:
        """The seconds of a command to its end, or, if `until` is given, until this returns true; it is then killed."""
        began = time.perf_counter()
        if until is None:
            self.run(*command)
            return time.perf_counter() - began
        process = self.start(*command)
        while not until(process):
            if process.poll() is not None:
                sys.exit(f"{self.commit}: {' '.join(map(str, command))} ended with {process.returncode}")
            time.sleep(0.005)
        took = time.perf_counter() - began
        process.kill()
        process.communicate()
        return took


def demo(checkout: Checkout, options: argparse.Namespace) -> dict[str, Any]:
    checkout.run(*CLI, "demo", "--out", "build/demo")
    found = json.loads((checkout.directory / "build/demo/result.json").read_text())
    return {"seconds": found["seconds"]} | {name: pick(r) for name, r in found["results"].items()}


def family(checkout: Checkout, options: argparse.Namespace) -> dict[str, Any]:
    """Every method, trained and evaluated; `loss` are the first and the last step's."""
    found, target = {}, BUNDLED / "target"
    with tempfile.TemporaryDirectory() as work:
        for method in METHODS:
            out, vocabulary = Path(work) / method, [] if method == "eagle1" else ["--draft-vocab", 2048]
            checkout.run(
                *CLI, "train", "--target", target, "--data", BUNDLED / "chats.jsonl.gz", "--out", out,
                "--method", method, "--steps", options.steps, *vocabulary, *TRAIN, "--device", "cpu",
            )  # fmt: skip
            losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
            record = checkout.run(
                *CLI, "eval", "--target", target, "--draft", out / "draft", "--prompts", BUNDLED / "prompts.jsonl",
                *EVAL,
            )  # fmt: skip
            found[method] = {"loss": [losses[0], losses[-1]]} | pick(json.loads(record))
    return found


def step(checkout: Checkout, options: argparse.Namespace) -> dict[str, float]:
    rows = rows_of(checkout, "train_step", *"--tokens 2048 8192 --supervised 1 --impls triton".split())
    return {f"{row['T']} tokens, {k}": row[k] for row in rows for k in ("ms", "gib", "tflops")}


def rounds(checkout: Checkout, options: argparse.Namespace) -> dict[str, float]:
    sizes = "--shape tiny --context 128 --new 60" if options.device == "cpu" else "--shape 8b"
    rows = rows_of(checkout, "decode", *sizes.split(), "--engine", "fledge", "--device", options.device)
    return {f"{row['what']}, batch {row['batch']}, {k}": row[k] for row in rows for k in ("ms", "wall_ms")}


def rows_of(checkout: Checkout, program: str, *words: object) -> list[dict[str, Any]]:
    """The rows of the record that a benchmark of the checkout writes."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "record.json"
        checkout.run(sys.executable, checkout.directory / f"bench/{program}.py", *words, "--out", out)
        return json.loads(out.read_text())["rows"]


def start(checkout: Checkout, options: argparse.Namespace) -> dict[str, float]:
    target = BUNDLED / "target"
    found = {
        "transformers_s": checkout.seconds(sys.executable, "-c", LOADING, target),
        "help_s": checkout.seconds(*CLI, "--help"),
    }
    pair = ["--target", target, "--device", options.device]
    with tempfile.TemporaryDirectory() as work:
        asked = [*pair, "--draft", BUNDLED / "draft", "--prompt", "What is 5 + 2?"]
        data = ["--data", f"{BUNDLED / 'chats.jsonl.gz'}@0.1", "--data-cache", work, "--out", f"{work}/run"]
        metrics = Path(work, "run", "metrics.jsonl")
        found["first_token_s"] = checkout.seconds(*CLI, "generate", *asked, until=lambda p: p.stdout.read(1))
        found["first_step_s"] = checkout.seconds(
            *CLI, "train", *pair, *data, "--steps", 9, "--draft-vocab", 2048, *TRAIN,
            until=lambda p: metrics.exists() and metrics.stat().st_size,
        )  # fmt: skip
    return {name: s - found["transformers_s"] * name.startswith("first") for name, s in found.items()}


def show_medians(part: str, runs: dict[str, list[dict[str, float]]]) -> None:
    """Prints the median of each figure with both checkouts, and the ratio of the second to the first."""
    print(f"{part}: {' -> '.join(runs)}, medians of {len(next(iter(runs.values())))}")
    for name in next(iter(runs.values()))[0]:
        before, now = (statistics.median(run[name] for run in found) for found in runs.values())
        print(f"  {name}: {before:.4g} -> {now:.4g} ({now / before:.3f})", flush=True)


def pick(record: dict[str, Any]) -> dict[str, Any]:
    return {k: record[k] for k in KEPT}


if __name__ == "__main__":
    main()
