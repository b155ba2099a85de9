"""Trains the same small draft with each implementation of the training step, and compares τ.

    python bench/impls.py --target DIR --data sgd_train.jsonl --prompts sgd_dev.jsonl --out bench/results/impls.json

Each implementation is trained with several seeds (initial weights and order of the data). τ is measured by greedy
decoding of the same 32 prompts. Two implementations agree if their mean τ differ by at most two standard errors of the
difference. Rows of the same training that --out already has are not computed again.
"""

import argparse
import itertools
import json
import shutil
import statistics
from pathlib import Path

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.jobs import train
from fledge.jobs.display import ProgressDisplay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/impls"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/impls.json"))
    parser.add_argument("--impls", nargs="*", default=["eager", "flex", "triton"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    check_record_path(options.out, "--out")

    paths = dict(target=options.target, data=[options.data], eval_prompts=options.prompts)
    sizes = dict(steps=options.steps, depth=5, draft_vocab=options.draft_vocab, max_length=512, row_length=8192)
    names = (options.target, options.data, options.prompts)
    trained = dict(zip(paths, (Path(name).name for name in names), strict=True)) | sizes
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    if record.get("trained") != trained:
        record = {"environment": environment(options.device, "bfloat16"), "trained": trained, "rows": []}
    done = {(row["seed"], row["impl"]) for row in record["rows"]}
    for seed, impl in itertools.product(options.seeds, options.impls):
        if (seed, impl) in done:
            continue
        out = options.work / f"{impl}-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        asked = train.TrainOptions(
            **paths, **sizes, out=str(out), save_every=10**6, seed=seed, impl=impl, device=options.device
        )
        show = ProgressDisplay(quiet=True)
        last = train.run(asked, show.say, show)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        late = lines[len(lines) // 2 :]
        speed = sum(m["tokens_per_s"] * m["seconds"] for m in late) / sum(m["seconds"] for m in late)
        row = {"impl": impl, "seed": seed, "tau": last["eval_tau"], "loss": last["loss"], "tokens_per_s": speed}
        record["rows"].append(row)
        print(f"{impl:7} seed {seed}: τ {row['tau']:.3f}, loss {row['loss']:.4f}, {speed:,.0f} tokens/s", flush=True)
        write_record(options.out, record)
    several = [impl for impl in options.impls if sum(r["impl"] == impl for r in record["rows"]) > 1]
    means = {impl: mean_and_error(record["rows"], impl) for impl in several}
    record["means"] = means
    record["agree"] = {f"{a} and {b}": agree(means[a], means[b]) for a, b in itertools.combinations(means, 2)}
    write_record(options.out, record)
    print(json.dumps({"means": record["means"], "agree": record["agree"]}, indent=1))


def mean_and_error(rows: list[dict], impl: str) -> dict[str, float]:
    """The mean τ over seeds and its standard error."""
    taus = [r["tau"] for r in rows if r["impl"] == impl]
    return {"tau": statistics.mean(taus), "error": statistics.stdev(taus) / len(taus) ** 0.5}


def agree(a: dict[str, float], b: dict[str, float]) -> bool:
    return abs(a["tau"] - b["tau"]) <= 2 * (a["error"] ** 2 + b["error"] ** 2) ** 0.5


if __name__ == "__main__":
    main()
