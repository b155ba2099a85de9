"""Trains a draft from stored features of each precision, and measures its τ: what rounding on the disk costs.

    python bench/features_precision.py --data chats.jsonl --prompts prompts.jsonl --train '--steps 250 --depth 2'

The runs differ in nothing but the precision: same documents, rows, initial weights and steps. float32 is the reference.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.features.cache import FeatureCache

PRECISIONS = ("float32", "bfloat16", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fledge/demo/target")
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", required=True, help="prompts on which τ is measured")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--features", default="", help="options of fledge features, as one word")
    parser.add_argument("--train", default="", help="options of fledge train, as one word")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("build/features-precision"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/features_precision.json"))
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    rows = []
    for precision in options.precisions:
        cache, run = options.work / f"{precision}-features", options.work / f"{precision}-{time.time_ns()}"
        words = shlex.split(options.features)
        words += ["--data", options.data, "--out", cache, "--precision", precision, "--device", options.device]
        fledge("features", "--target", options.target, *words)
        words = shlex.split(options.train)
        words += ["--out", run, "--eval-prompts", options.prompts, "--device", options.device]
        fledge("train", "--features", cache, *words)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = steps[-len(steps) // 5 :]
        known = FeatureCache.open(cache).manifest
        size = sum(f.stat().st_size for f in cache.glob("*.safetensors"))
        row = {
            "precision": precision, "bytes_per_token": size / known.tokens, "tokens": known.tokens,
            "steps": len(steps), "tau": steps[-1]["eval_tau"], "loss": sum(m["loss"] for m in last) / len(last),
            "simulated_tau": sum(m["tau"] for m in last) / len(last),
        }  # fmt: skip
        print(row, flush=True)
        rows.append(row)
    settings = {"target": options.target, "features": options.features, "train": options.train}
    write_record(options.out, {"environment": environment(options.device, "float32"), **settings, "rows": rows})


def fledge(*words: object) -> None:
    """Runs a fledge command in a process of its own; ends the program if it fails."""
    print("fledge", *words, flush=True)
    if subprocess.run([sys.executable, "-m", "fledge", *map(str, words)]).returncode:
        sys.exit(1)


if __name__ == "__main__":
    main()
