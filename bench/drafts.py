"""Trains a draft of every method for one target side by side on one GPU, as `bench/serving.py` compares them.

    python bench/drafts.py --target DIR --data CHATS.jsonl --steps 600 --out DIR

Each is OUT/METHOD/draft, with its log beside it. Further options of `fledge train` follow `--`. The exit status is 1 if
one of them failed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from fledge.jobs.training.recipe import CHOICES

COMMON = ["--max-length", "512", "--row-length", "8192"]
OWN = {"eagle1": []}  # it drafts one token at a time over the whole vocabulary
OTHERS = ["--depth", "7", "--draft-vocab", "4096"]


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", action="append", required=True, help="may be repeated")
    parser.add_argument("--methods", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words[:at])
    common = ["--target", options.target, *(word for data in options.data for word in ("--data", data))]
    common += ["--steps", str(options.steps), *COMMON]
    threads = str(max(1, (os.cpu_count() or 1) // len(options.methods)))
    began, running = time.monotonic(), {}
    for method in options.methods:
        out = options.out / method
        out.mkdir(parents=True)
        command = [sys.executable, "-m", "fledge", "train", "--method", method, "--out", str(out / "run"), *common]
        with (out / "log.txt").open("w") as log:
            running[method] = subprocess.Popen(
                [*command, *OWN.get(method, OTHERS), *words[at + 1 :]], stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": threads},
            )  # fmt: skip
    failed = [method for method, process in running.items() if process.wait()]
    for method in options.methods:
        if method not in failed:
            (options.out / method / "run" / "draft").rename(options.out / method / "draft")
        print(method, *(options.out / method / "log.txt").read_text().splitlines()[-6:], sep="\n  ", flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
