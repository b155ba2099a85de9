"""Compares decoding without a draft with transformers' own `generate`: greedy, one prompt at a time, both in turn.

    make demo
    python bench/generate.py --target build/demo/target --prompts build/demo/prompts.jsonl

`tokens_per_s` and `generate_tokens_per_s` are those of all prompts, prefill included, `speedup` the median of the
prompts' ratios, and `identical` the number of prompts whose tokens are the same.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fledge.decode.engine import Engine, resolve_device
from fledge.eval.environment import environment
from fledge.eval.prompts import read_prompts
from fledge.eval.record import check_record_path, write_record
from fledge.eval.run import first_prompt
from fledge.jobs.options import parse_dtype
from fledge.targets.loading import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=16, help="the most prompts")
    parser.add_argument("--new", type=int, default=128, help="the most new tokens of a prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--out", type=Path, default=Path("bench/results/generate.json"))
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    device, dtype = resolve_device(options.device), parse_dtype(options.dtype)
    target = load_target(options.target, device=device, dtype=dtype)
    engine, model = Engine(target), transformers_model(options.target, device, dtype)
    prompts = [first_prompt(p) for p in read_prompts(options.prompts, options.limit)]
    ids = [engine.template.prompt_ids(p) for p in prompts]

    def ours(i: int) -> list[int]:
        return engine.generate_all([ids[i]], max_new_tokens=options.new)[0].tokens

    def theirs(i: int) -> list[int]:
        given = torch.tensor([ids[i]], device=device)
        mask = torch.ones_like(given)
        out = model.generate(given, attention_mask=mask, max_new_tokens=options.new, do_sample=False)
        return out[0, len(ids[i]) :].tolist()

    for decode in (ours, theirs):
        decode(0)
    mine, other = [], []
    for i in range(len(ids)):
        for decode, done in [(ours, mine), (theirs, other)][:: 1 if i % 2 else -1]:
            done.append(timed(decode, i))
    speeds = [sum(len(tokens) for tokens, _ in done) / sum(seconds for _, seconds in done) for done in (mine, other)]
    record = {
        "environment": environment(device, options.dtype),
        "target": Path(options.target).name,
        "target_implementation": target.implementation,
        "prompts": len(ids),
        "new": options.new,
        "tokens_per_s": speeds[0],
        "generate_tokens_per_s": speeds[1],
        "speedup": statistics.median(t / s for (_, s), (_, t) in zip(mine, other, strict=True)),
        "identical": sum(a == b for (a, _), (b, _) in zip(mine, other, strict=True)),
    }
    print(record)
    write_record(options.out, record)


def transformers_model(path: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def timed(decode: Callable[[int], list[int]], i: int) -> tuple[list[int], float]:
    """The tokens of a prompt, and the seconds that they took."""
    start = time.perf_counter()
    tokens = decode(i)
    return tokens, time.perf_counter() - start


if __name__ == "__main__":
    main()
