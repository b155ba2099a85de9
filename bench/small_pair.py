"""Trains drafts for a small chat model on one GPU within a time limit, and records their τ.

    python bench/small_pair.py --target DIR --chats DIR --prompts DIR --out bench/results/small_pair.json

One draft is trained on `sgd_train` for `--seconds`, to compare with a known result of a plain trainer. Another is
trained on all chat files for `--mixed-seconds`, and evaluated on every prompt set. Training time is the time spent in
optimizer steps, without reading data and evaluation.
"""

import argparse
import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

from fledge.decode.engine import resolve_device
from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.jobs import evaluate, train
from fledge.jobs.display import ProgressDisplay

PATHS = ("target", "data", "eval_prompts", "out")  # options that are left out of the record
CALIBRATION = 40  # steps to measure the time of a step; the first half is warm-up
MIXED = ("sgd_train", "gsm8k_train", "stories", "taskmaster")
PROMPT_SETS = ("sgd_dev", "mt_bench", "humaneval", "gsm8k", "alpaca", "qa", "sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--chats", type=Path, required=True, help="folder of sgd_train.jsonl, sgd_dev.jsonl and others")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the six prompt sets")
    parser.add_argument("--work", type=Path, default=Path("runs/small_pair"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/small_pair.json"))
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--mixed-seconds", type=float, default=150)
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--limit", type=int, default=16, help="prompts of each of the six sets")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    check_record_path(options.out, "--out")

    base = train.TrainOptions(
        target=str(options.target), depth=5, draft_vocab=4096, max_length=512, row_length=8192, save_every=10**6,
        eval_prompts=str(options.chats / "sgd_dev.jsonl"), lr=options.lr, device=options.device,
    )  # fmt: skip
    records = {"environment": environment(resolve_device(options.device), "float32")}
    for name, files, seconds in (
        ("sgd", ("sgd_train",), options.seconds),
        ("mixed", MIXED, options.mixed_seconds),
    ):
        if seconds <= 0:
            continue
        data = [str(options.chats / f"{file}.jsonl") for file in files]
        trained = train_within(replace(base, data=data), options.work / name, seconds)
        sets = PROMPT_SETS[:1] if name == "sgd" else PROMPT_SETS
        records[name] = {"training": trained, "eval": {}}
        for prompt_set in sets:
            records[name]["eval"][prompt_set] = measure(options, options.work / name / "draft", prompt_set)
            write_record(options.out, records)
        print(json.dumps({s: round(r["tau"], 3) for s, r in records[name]["eval"].items()}), flush=True)


def train_within(options: train.TrainOptions, out: Path, seconds: float) -> dict:
    """Measures the time of a step, then trains for the number of steps that fit in `seconds`."""
    show = ProgressDisplay()
    shutil.rmtree(out, ignore_errors=True)
    train.run(replace(options, steps=CALIBRATION, out=str(out), eval_tokens=1), show.say, show)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = int(seconds / statistics.median(m["seconds"] for m in lines[CALIBRATION // 2 :]))
    shutil.rmtree(out)
    last = train.run(replace(options, steps=steps, out=str(out)), show.say, show)
    show.close()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": sum(m["seconds"] for m in lines),
        "steps": steps,
        "tokens": sum(m["tokens_per_s"] * m["seconds"] for m in lines),
        "walked_tau_last_steps": sum(m["tau"] for m in lines[-50:]) / 50,
        "decoded_tau": last["eval_tau"],
        "options": {k: v for k, v in options.as_dict().items() if k not in PATHS},
        "data": [Path(d).stem for d in options.data],
    }


def measure(options: argparse.Namespace, draft: Path, name: str) -> dict:
    """Runs `fledge eval` on a prompt set, in float32. For sgd_dev, with 32 dialogues and at most 64 new tokens, as in
    the known result."""
    dialogues = name == "sgd_dev"
    return evaluate.run(
        evaluate.EvalOptions(
            target=str(options.target), draft=[str(draft)], limit=32 if dialogues else options.limit,
            prompts=[str((options.chats if dialogues else options.prompts) / f"{name}.jsonl")],
            max_new_tokens=64 if dialogues else 128, device=options.device, dtype="float32",
            batch=options.batch,
        ),
        ProgressDisplay(quiet=True),
    )  # fmt: skip


if __name__ == "__main__":
    main()
