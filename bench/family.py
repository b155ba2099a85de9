"""Trains a draft of every method on the same tokens, and records acceptance and speed for each mode of drafting.

    python bench/family.py --target DIR --chats DIR --out bench/results/family.json

`--chats` is a directory with sgd_train, sgd_dev, gsm8k_train and stories (.jsonl files of messages); the last 32
records of the latter two are held out. Four drafts are trained on the same rows for `--steps` steps, in parallel
processes. Then each draft decodes in each mode at temperatures 0 and 1: τ and α over 32 prompts, 16 at a time, with at
most 64 new tokens. After that, a single process measures the time of a round and tokens per second over a few prompts,
one at a time. The prompts of `long` are three dialogues each, longer than any training document. Rows with a `depth`
other than the trained one, or with other tree sizes, serve to choose defaults.
"""

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fledge.commands import train
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.io.display import ProgressDisplay
from fledge.io.machine import environment
from fledge.measure.metrics import alpha, alpha_text, tau
from fledge.measure.prompts import first_prompt, read_prompts
from fledge.measure.record import check_record_path, write_record
from fledge.types import Sampling

METHODS = ("eagle1", "eagle3", "eagle3.1", "peagle")
DEPTH, HELD, NEW = 5, 32, 64
SETS = ("sgd_dev", "gsm8k", "stories")


@dataclass(frozen=True)
class Setting:
    """A row of the record: the method, the drafting options, the temperature and the prompt set. `width` is 0 for
    chains, and for trees of P-EAGLE, which have none."""

    method: str
    mode: str
    temperature: float
    set: str
    depth: int = DEPTH
    nodes: int = 0
    width: int = 0

    def engine(self, work: Path, target: Any) -> Engine:
        tree = dict(nodes=self.nodes, width=self.width or None) if self.mode == "tree" else {}
        return load(target, str(work / self.method / "draft"), depth=self.depth, mode=self.mode, **tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/family"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/family.json"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=HELD, help="prompts of each set")
    parser.add_argument("--timed", type=int, default=2, help="prompts of each set that are timed, one at a time")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    split(options)
    with ProcessPoolExecutor(len(options.methods), multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(train_and_decode, options.methods, [options] * len(options.methods)))
    rows = [row for _, mine in found for row in mine]
    target = load(options.target, device=options.device).target
    dtype = str(target.dtype).removeprefix("torch.")
    record = {"environment": environment(target.device.type, dtype), "training": [t for t, _ in found], "rows": rows}
    print(*record["training"], sep="\n", flush=True)
    # rows that compare methods first
    for row in sorted(rows, key=lambda r: (r["depth"] != DEPTH or r["nodes"] not in (0, 32), r["temperature"])):
        row |= measure_speed(Setting(**{k: row[k] for k in Setting.__dataclass_fields__}), target, options)
        print(describe(row), flush=True)
        write_record(options.out, record)


def split(options: argparse.Namespace) -> None:
    """Splits the data into training files and held-out prompts."""
    data = options.work / "data"
    data.mkdir(parents=True, exist_ok=True)

    def lines(name: str) -> list[str]:
        return (options.chats / f"{name}.jsonl").read_text().splitlines()

    def write(name: str, some: list[str]) -> None:
        (data / f"{name}.jsonl").write_text("\n".join(some) + "\n")

    for name, held in (("gsm8k_train", "gsm8k"), ("stories", "stories_held")):
        write(name, lines(name)[:-HELD])
        write(held, lines(name)[-HELD:])
    write("sgd_train", lines("sgd_train"))
    write("sgd_dev", lines("sgd_dev"))
    dialogues = [json.loads(line)["messages"] for line in lines("sgd_dev")[: 3 * HELD]]
    joined = [list(itertools.chain(*dialogues[i : i + 3])) for i in range(0, len(dialogues), 3)]
    # a prompt ends before the middle answer, so the dialogues are written twice
    write("long", [json.dumps({"messages": [*j, *j]}) for j in joined])


def prompts_of(name: str, options: argparse.Namespace) -> list[Any]:
    file = options.work / "data" / f"{'stories_held' if name == 'stories' else name}.jsonl"
    return [first_prompt(p) for p in read_prompts(file, options.prompts)]


def settings_of(method: str) -> list[Setting]:
    one, width = ("parallel", 0) if method == "peagle" else ("chain", 8)
    found = []
    for name in SETS:
        for temperature in (0.0, 1.0):
            found.append(Setting(method, one, temperature, name))
            found.append(Setting(method, "tree", temperature, name, nodes=32, width=width))
    deeper = [
        Setting(method, one, 0.0, name, depth=depth) for name, depth in (("sgd_dev", 10), ("long", 5), ("long", 10))
    ]
    found += deeper if method != "eagle1" else []
    if method in ("eagle3", "peagle"):
        sizes = [(5, 8, 4), (5, 16, 4), (5, 16, 8), (5, 60, 10), (7, 60, 10)]
        if method == "peagle":
            sizes = [(5, 8, 0), (5, 16, 0), (5, 60, 0), (7, 60, 0)]
        found += [Setting(method, "tree", 0.0, "sgd_dev", depth, nodes, width) for depth, nodes, width in sizes]
        found += [Setting(method, one, 0.0, "sgd_dev", depth=depth) for depth in (2, 3, 4, 7)]
    return found


def train_and_decode(method: str, options: argparse.Namespace) -> tuple[dict, list[dict]]:
    """Trains a method's draft, and measures τ and α of every setting. Returns the training's summary and the rows."""
    show = ProgressDisplay(quiet=True)
    data = [str(options.work / "data" / f"{name}.jsonl") for name in ("sgd_train", "gsm8k_train", "stories")]
    asked = train.TrainOptions(
        target=options.target, data=data, out=str(options.work / method), method=method, depth=DEPTH,
        steps=options.steps, draft_vocab=None if method == "eagle1" else 4096, max_length=512, row_length=8192,
        save_every=10**6, eval_prompts=str(options.work / "data" / "sgd_dev.jsonl"), eval_tokens=1,
        device=options.device,
    )  # fmt: skip
    last = train.run(asked, lambda line: None, show)
    lines = [json.loads(line) for line in (options.work / method / "metrics.jsonl").read_text().splitlines()]
    trained = {
        "method": method, "steps": options.steps, "seconds": sum(m["seconds"] for m in lines), "loss": last["loss"],
        "tokens": sum(m["tokens_per_s"] * m["seconds"] for m in lines),
    }  # fmt: skip
    target, rows = load(options.target, device=options.device).target, []
    for setting in settings_of(method):
        sampling = Sampling(temperature=setting.temperature)
        done = setting.engine(options.work, target).generate_all(
            prompts_of(setting.set, options), batch=16, max_new_tokens=NEW, sampling=sampling
        )
        traces = [c.trace for c in done]
        rows.append(
            {**vars(setting), "tau": tau(traces), "alpha": alpha(traces), "rounds": sum(len(t.rounds) for t in traces)}
        )
    return trained, rows


def measure_speed(setting: Setting, target: Any, options: argparse.Namespace) -> dict[str, float]:
    """Decodes a few prompts one at a time, after a warm-up of 8 tokens."""
    engine, sampling = setting.engine(options.work, target), Sampling(temperature=setting.temperature)
    asked = prompts_of(setting.set, options)[: options.timed]
    engine.generate(asked[0], max_new_tokens=8, sampling=sampling)
    done = [engine.generate(p, max_new_tokens=NEW, sampling=sampling) for p in asked]
    rounds = [r for c in done for r in c.trace.rounds]
    decoding = sum(c.trace.t_total - c.trace.t_prefill for c in done)
    return {
        "round_ms": 1e3 * decoding / max(len(rounds), 1),
        "draft_ms": 1e3 * sum(r.t_draft for r in rounds) / max(len(rounds), 1),
        "tokens_per_s": sum(len(c.tokens) for c in done) / sum(c.trace.t_total for c in done),
    }


def describe(row: dict) -> str:
    tree = f" {row['nodes']}" + (f"x{row['width']}" if row["width"] else "") if row["nodes"] else ""
    return (
        f"{row['method']:9} {row['mode']}{tree:6} depth {row['depth']:2} T={row['temperature']:.0f} {row['set']:8} "
        f"τ {row['tau']:.2f}  α {alpha_text(row['alpha'])}  round {row['round_ms']:.1f} ms, of that "
        f"drafting {row['draft_ms']:.1f}; {row['tokens_per_s']:.0f} tokens/s"
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
