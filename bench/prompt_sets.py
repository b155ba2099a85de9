"""Decodes sets of prompts with a draft in several ways and without it, and records tokens per second.

    python bench/prompt_sets.py --target DIR --draft DIR --prompts SETS/*.jsonl --out bench/results/prompt_sets.json

Graphs are captured first. Every way then decodes each set twice without being counted, so that `auto` has its
measurements. Then the ways with and without the draft take turns, and each goes first as often as the other: one of
`--repeats` measurements decodes the set several times with each, until `--seconds` have passed. The way "alone" decodes
without the draft in both turns, so that its row tells what chance makes of equal work. `tokens_per_s` is the median,
with prefill and host in it. `speedup` is the median over the measurements of the speed with the draft over that
without it, `speedup_iqr` its lower and upper quartile, and `passes` how often a measurement decodes the set with each.
`paused` is the share of rounds that drafted nothing, in all that was measured. `sets` has the geometric mean of the
speedups of each way and set, over the batches and temperatures, which chance changes less than those of single rows.
"""

import argparse
import gc
import math
import statistics
import time
from pathlib import Path
from typing import Any

from fledge.decode.engine import Completion, Engine
from fledge.decode.load import load
from fledge.decode.scheduler import prepare
from fledge.io.machine import environment, resolve_device
from fledge.measure.metrics import paused, tau
from fledge.measure.prompts import first_prompt, read_prompts
from fledge.measure.record import check_record_path, write_record
from fledge.targets.loading import load_target
from fledge.types import Sampling

ALONE = "alone"
WAYS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "as trained": {},
    "auto": dict(depth="auto"),
    "tree auto": dict(mode="tree", depth="auto", nodes="auto"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("bench/results/prompt_sets.json"))
    parser.add_argument("--ways", nargs="+", default=["as trained", "auto"], choices=WAYS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=8, help="prompts of each set, times the batch up to 4")
    parser.add_argument("--new", type=int, default=128, help="the most new tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each row")
    parser.add_argument("--seconds", type=float, default=1.0, help="the least seconds of a measurement")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    target = load_target(options.target, device=resolve_device(options.device))
    record = {"environment": environment(target.device.type, str(target.dtype).removeprefix("torch.")), "rows": []}
    for way in options.ways:
        engine = load(target, options.draft, **WAYS[way])
        for batch in options.batch:
            for temperature in options.temperature:
                for file in options.prompts:
                    prompts = [first_prompt(p) for p in read_prompts(str(file), options.limit * min(batch, 4))]
                    asked = dict(batch=batch, max_new_tokens=options.new, temperature=temperature)
                    row = {"way": way, "batch": batch, "temperature": temperature, "set": file.stem}
                    record["rows"].append(
                        row | measure(engine, prompts, asked, way != ALONE, options.repeats, options.seconds)
                    )
                    print({k: rounded(v) for k, v in record["rows"][-1].items()}, flush=True)
                    record["sets"] = of_sets(record["rows"])
                    write_record(options.out, record)
    for of_set in record["sets"]:
        print({k: rounded(v) for k, v in of_set.items()})


def of_sets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The geometric mean of the speedups of each way and set."""
    speedups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        speedups.setdefault((row["way"], row["set"]), []).append(row["speedup"])
    return [
        {"way": way, "set": name, "rows": len(x), "speedup": statistics.geometric_mean(x)}
        for (way, name), x in speedups.items()
    ]


def rounded(value: Any) -> Any:
    """A number with three digits after the point; a list of them likewise."""
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return round(value, 3) if isinstance(value, float) else value


def measure(
    engine: Engine, prompts: list[Any], options: dict[str, Any], drafts: bool, repeats: int, seconds: float
) -> dict[str, Any]:  # fmt: skip
    """The row of a set of prompts; with `drafts` False, of decoding without the draft beside itself."""
    tokens = max(len(engine.reader.template.prompt_ids(p)) for p in prompts) + options["max_new_tokens"]
    sampling = Sampling(temperature=options["temperature"])
    prepare([(engine, True), (engine, False)], options["batch"], tokens=tokens, sampling=sampling)
    for _ in range(2):
        decode(engine, prompts, options, drafts)
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # else each full collection reads all objects of the libraries, which takes as long as many rounds
    took, _ = decode(engine, prompts, options, False)
    passes = max(1, math.ceil(seconds / (2 * took)))
    fast, plain, traces = [], [], []
    for n in range(repeats):
        times, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        for i in range(passes):
            for measured in (True, False) if (n + i) % 2 else (False, True):
                took, done = decode(engine, prompts, options, measured and drafts)
                times[measured] += took
                counts[measured] += sum(len(c.tokens) for c in done)
                traces += [c.trace for c in done if measured]
        fast.append(counts[True] / times[True])
        plain.append(counts[False] / times[False])
    ratios = [a / b for a, b in zip(fast, plain, strict=True)]
    quartiles = statistics.quantiles(ratios, method="inclusive") if repeats > 1 else ratios * 3
    return {
        "prompts": len(prompts), "passes": passes, "tokens_per_s": statistics.median(fast),
        "plain_tokens_per_s": statistics.median(plain), "speedup": quartiles[1],
        "speedup_iqr": [quartiles[0], quartiles[2]], "tau": tau(traces), "paused": paused(traces),
        "reason": engine.chooser.reason if engine.chooser else "",
    }  # fmt: skip


def decode(
    engine: Engine, prompts: list[Any], options: dict[str, Any], speculate: bool
) -> tuple[float, list[Completion]]:
    """The seconds of decoding the prompts, and the completions."""
    start = time.perf_counter()
    done = engine.generate_all(prompts, speculate=speculate, **options)
    return time.perf_counter() - start, done


if __name__ == "__main__":
    main()
