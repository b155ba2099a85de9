"""Times training steps on a CPU with and without `heap.retain_freed_memory` (fledge/train/heap.py).

    python bench/heap.py --target fledge/demo/target --data fledge/demo/chats.jsonl.gz --out bench/results/heap.json

Runs alternate between the two, each in a process of its own. Records the median time of a step and the page faults per
step of each process, without its first steps.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.jobs import train
from fledge.jobs.demo import TRAIN
from fledge.jobs.display import ProgressDisplay
from fledge.train import heap

FIRST = 10  # initial steps that are not measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("bench/results/heap.json"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    rows = []
    for kept in (False, True) * options.turns:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            rows.append(alone.submit(measure, kept, options).result())
        print("{step_ms:.1f} ms a step, {faults:,.0f} page faults, freed memory kept: {kept}".format(**rows[-1]))
    write_record(options.out, {"environment": environment("cpu", "float32"), "steps": options.steps, "rows": rows})


def measure(kept: bool, options: argparse.Namespace) -> dict:
    """Trains with the demo's options. Returns the row of the record."""
    if not kept:
        heap.retain_freed_memory = lambda: False
    faults: list[int] = []
    show = ProgressDisplay(quiet=True)
    show.step = lambda steps, metrics: faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    with tempfile.TemporaryDirectory() as out:
        asked = train.TrainOptions(
            target=options.target, data=[options.data], out=out, steps=options.steps, device="cpu", **TRAIN
        )
        train.run(asked, show.say, show)
        steps = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return {
        "kept": kept,
        "step_ms": 1e3 * statistics.median(m["seconds"] for m in steps[FIRST:]),
        "faults": (faults[-1] - faults[FIRST - 1]) / (len(faults) - FIRST),
    }


if __name__ == "__main__":
    main()
