"""Times rounds of vLLM on a model with random weights. `bench/decode.py --engine vllm` starts it once for each case.

    python bench/vllm_rounds.py --model DIR --out rows.json
    python bench/vllm_rounds.py --model DIR --draft DIR --depth 7 --method peagle --out rows.json

`--model` needs only a config.json. The prompts are token ids, decoding is greedy, and vLLM has its own defaults (CUDA
graphs, compiled), except that it keeps no prefixes, so that the timed run computes its prompts as the warm-up does.
`wall_ms` is defined as in `bench/decode.py`; the rounds of a draft are vLLM's own count (`spec_decode_num_drafts`) over
the batch. `tokens_per_round` is 1 if the draft is never accepted.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LOADER = "random_target"
REPEATS = 3  # timed runs, as in bench/decode.py
SETTINGS = {  # of vLLM's environment, unless the caller set them
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
DRAFTS = "vllm:spec_decode_num_drafts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=None)
    parser.add_argument("--depth", type=int, default=7, help="drafted tokens of a round")
    parser.add_argument("--method", default="eagle3", choices=("eagle3", "peagle", "dflash"), help="of the draft")
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new", type=int, default=200, help="tokens after each prompt")
    options = parser.parse_args()
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    import vllm  # after its environment is set

    found: dict[str, Any] = {"engine": f"vllm {vllm.__version__}", "rows": []}
    options.out.write_text(json.dumps(found))
    llm = start(options)
    for context, batch in itertools.product(options.context, options.batch):
        row = {"context": context, "batch": batch}
        try:
            row |= measure(llm, options.draft is not None, batch, context, options.new)
        except Exception as e:  # the other rows are still worth having
            row["error"] = f"{type(e).__name__}: {e}"
        found["rows"].append(row)
        options.out.write_text(json.dumps(found))


def start(options: argparse.Namespace) -> Any:
    """vLLM's engine."""
    from vllm import LLM

    register_loader()
    speculative = {}
    if options.draft is not None:
        method = "dflash" if options.method == "dflash" else "eagle3"
        draft = dict(method=method, model=str(options.draft), num_speculative_tokens=options.depth)
        draft |= {"parallel_drafting": True} if options.method == "peagle" else {}
        speculative = dict(speculative_config=draft, disable_log_stats=False)  # the statistics count rounds
    return LLM(
        model=str(options.model), load_format=LOADER, skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=max(2048, max(options.context) + options.new + 2 * options.depth),
        max_num_seqs=max(options.batch), gpu_memory_utilization=0.5, enable_prefix_caching=False, **speculative,
    )  # fmt: skip


def register_loader() -> None:
    """Gives vLLM a load format with random weights for the target and those of the file for the draft. Its own "dummy"
    never sees the draft's files, and would draft with the target's head, which is several times as large."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader, register_model_loader

    class RandomTarget(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            if model_config.runner_type == "draft":
                DefaultModelLoader(LoadConfig()).load_weights(model, model_config)
            else:
                super().load_weights(model, model_config)

    register_model_loader(LOADER)(RandomTarget)


def measure(llm: Any, speculative: bool, batch: int, context: int, new: int) -> dict[str, Any]:
    """The times of decoding `batch` prompts of `context` tokens."""
    from vllm import SamplingParams

    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(5, 500) for _ in range(context)]} for _ in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    llm.generate(prompts, sampling, use_tqdm=False)  # compiles
    before = count_drafts(llm) if speculative else 0
    walls = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        done = llm.generate(prompts, sampling, use_tqdm=False)
        walls.append(time.perf_counter() - began)
    wall = statistics.median(walls)
    rounds = (count_drafts(llm) - before) / batch / REPEATS if speculative else new - 1
    lengths = [len(d.outputs[0].token_ids) for d in done]
    if lengths != [new] * batch or not rounds:
        raise ValueError(f"vLLM made {lengths} tokens in {rounds} rounds, not {new} of each prompt")
    return dict(
        rounds=rounds, wall_ms=1e3 * wall / rounds, tokens_per_s=batch * new / wall, tokens_per_round=(new - 1) / rounds
    )


def count_drafts(llm: Any) -> int:
    """The number of drafts so far; each request has one a round."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == DRAFTS)


def run(
    model: Path, draft: Path | None, *, depth: int, method: str, contexts: list[int], batches: list[int], new: int
) -> list[dict[str, Any]]:
    """Runs this program in a process of its own, which frees the GPU's memory at its end. Returns a row for each
    context and batch, which has an `error` in place of times if vLLM failed."""
    out = model / "rows.json"
    out.write_text(json.dumps({"engine": "vllm", "rows": []}))
    words = ["--draft", draft, "--depth", depth, "--method", method] if draft else []
    words += ["--context", *contexts, "--batch", *batches, "--new", new, "--model", model, "--out", out]
    child = subprocess.run(
        [sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found = json.loads(out.read_text())
    rows = found["rows"]
    said = [line for line in child.stdout.splitlines() if line.strip()]
    if child.returncode:
        print("\n".join(said[-40:]), flush=True)
    for context, batch in list(itertools.product(contexts, batches))[len(rows) :]:
        last = next((line for line in reversed(said) if "rror" in line), "it named no error")
        cause = f"vLLM ended with status {child.returncode}: {last}"
        rows.append({"context": context, "batch": batch, "error": cause})
    return [{"engine": found["engine"]} | row for row in rows]


if __name__ == "__main__":
    main()
