"""Compares the tokens per second of batched decoding with those of the same prompts decoded one at a time.

    python bench/batches.py --target DIR --draft DIR [DIR ..] --prompts FILE [FILE ..] --out bench/results/batches.json

Decodes `--limit` prompts greedily, alternating between the files and evenly spaced within each: at most `--batch` at a
time, where the next prompt starts when one ends, and one at a time, in the same run after a warm-up. Measured for each
draft as a chain and as a tree, and without a draft. Generation ends at stop tokens, so lengths differ. An output that
differs from that of the prompt alone counts as a near tie or as `different`, by the rule of `fledge eval`.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

from fledge.decode.engine import Engine, load
from fledge.eval.environment import environment
from fledge.eval.metrics import tau
from fledge.eval.prompts import read_prompts
from fledge.eval.record import check_record_path, write_record
from fledge.eval.run import first_prompt, near_ties
from fledge.jobs.options import parse_dtype
from fledge.types import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", nargs="+", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=Path("bench/results/batches.json"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--limit", type=int, default=None, help="number of prompts (default: --batch)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default=None)
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    target = load(options.target, device=options.device, dtype=parse_dtype(options.dtype)).target
    prompts = interleaved(options.prompts, options.limit or options.batch)
    rows = []
    for draft in options.draft:
        for mode in (None, "tree"):
            shape = dict(nodes=options.nodes, width=options.width) if mode == "tree" else {}
            engine = load(target, draft, mode=mode, **shape)
            rows += [measure(engine, prompts, Path(draft).parent.name, speculate=True, options=options)]
    rows += [measure(engine, prompts, "", speculate=False, options=options)]
    record = {"environment": environment(target.device.type, str(target.dtype)), "rows": rows}
    record["prompts"] = [Path(file).stem for file in options.prompts]
    record["prompt_tokens"] = [len(engine.template.prompt_ids(p)) for p in prompts]
    write_record(options.out, record)


def interleaved(files: list[str], limit: int) -> list[Any]:
    """The first turns of `limit` prompts, alternating between the files."""
    of_each = [read_prompts(file, -(-limit // len(files))) for file in files]
    return [first_prompt(p) for row in itertools.zip_longest(*of_each) for p in row if p is not None][:limit]


def measure(engine: Engine, prompts: list[Any], draft: str, *, speculate: bool, options: argparse.Namespace) -> dict:
    asked = dict(max_new_tokens=options.max_new_tokens, speculate=speculate)
    longest = max(len(engine.template.prompt_ids(p)) for p in prompts)
    engine.prepare(options.batch, tokens=longest + options.max_new_tokens, speculate=speculate)
    engine.generate_all(prompts, batch=options.batch, **(asked | {"max_new_tokens": 8}))
    made, speeds = {}, {}
    for batch in (1, options.batch):
        began = time.perf_counter()
        made[batch] = engine.generate_all(prompts, batch=batch, **asked)
        speeds[batch] = sum(len(c.tokens) for c in made[batch]) / (time.perf_counter() - began)
    one, many = made[1], made[options.batch]
    differing = [i for i, (a, b) in enumerate(zip(one, many, strict=True)) if a.tokens != b.tokens]
    ids = [engine.template.prompt_ids(p) for p in prompts]
    widths = (1, engine.drafting.verified) if speculate else (1,)
    ties, _ = near_ties(engine, differing, ids, many, one, Sampling(), widths, options.batch)
    row = {
        "draft": draft or None, "mode": engine.drafting.mode if speculate else None, "batch": options.batch,
        "tau": tau([c.trace for c in many]), "tokens": sum(len(c.tokens) for c in many),
        "tokens_per_s_alone": speeds[1], "tokens_per_s": speeds[options.batch],
        "times": speeds[options.batch] / speeds[1], "identical": len(prompts) - len(differing),
        "near_ties": ties, "different": len(differing) - ties, "prompts": len(prompts),
    }  # fmt: skip
    print(
        f"{draft or 'no draft':12} {row['mode'] or '-':9} {speeds[1]:.0f} tokens/s alone, {row['tokens_per_s']:.0f} "
        f"together, {row['times']:.1f} times; {row['identical']} of {row['prompts']} the same, {ties} near ties",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
