"""Runs the tests and measurements that need GPUs, in one call: those named, in this order, within a time limit.

    python bench/gpu.py tests kernels features --out OUT
    python bench/gpu.py --seconds 550 draft prompt_sets --target DIR --data CHATS --prompts SETS --out OUT
    python bench/gpu.py --list

Each stage is a command of its own, which writes its record OUT/STAGE.json (those of scaling, OUT/scale.json); all its
output goes to OUT/log.txt. A stage that fails does not end the others. One that would exceed the time that is left is
not started, and one that takes twice its estimate is ended. The table at the end, also in OUT/stages.json, has each
stage's seconds and exit code. Stages about a trained draft use the one that `draft` trains, unless --draft names
another; `vllm` and `sglang` use the drafts of `draft_eagle1` and the like. On a machine to which the sources were
copied without their repository, FLEDGE_COMMIT=COMMIT names what the records are of.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = "-m pytest -q -p no:cacheprovider -W ignore -n 6"
# tests of the code that computes otherwise on a GPU, which also run without the marker
ON_BOTH = "experts top_filter dynamic_tree native packed_attention check features prefetch rounds"


@dataclass(frozen=True)
class Stage:
    """A command, after `python`: {target}, {draft}, {data}, {prompts}, {work}, {records} and {out} are filled in."""

    command: str
    seconds: int  # estimated, on an H200
    gpus: int = 1
    needs: tuple[str, ...] = ()


TRAINED = ("target", "prompts")
SERVED = {"vllm": "eagle1 eagle3 eagle3.1 peagle", "sglang": "eagle1 eagle3 eagle3.1"}
TREES = {"vllm": "", "sglang": "--tree 5:16:4 7:60:10"}  # vLLM drafts chains only
LIMITS = {  # of the memory of one of the engines that start together
    "vllm": "--dtype bfloat16 --max-model-len 2048 --enforce-eager --gpu-memory-utilization 0.06 "
    "--kv-cache-memory-bytes 2G",
    "sglang": "--dtype bfloat16 --context-length 2048 --mem-fraction-static 0.5 --max-total-tokens 65536 "
    "--attention-backend triton --sampling-backend pytorch --disable-cuda-graph",
}


def trained(method: str) -> Stage:
    """Trains a draft, which `serving` measures; EAGLE-1 drafts one token at a time over the whole vocabulary."""
    words = "" if method == "eagle1" else "--depth 7 --draft-vocab 4096 "
    return Stage(
        f"-m fledge train --target {{target}} --data {{data}} --method {method} {words}--max-length 512 "
        f"--row-length 8192 --steps 600 --out {{work}}/drafts/{method}", 60, needs=("target", "data"),
    )  # fmt: skip


def serving(engine: str) -> str:
    drafts = " ".join(f"{method}={{work}}/drafts/{method}/draft" for method in SERVED[engine].split())
    return (
        f"bench/serving.py --engine {engine} --target {{target}} --draft {drafts} --k 3 5 7 {TREES[engine]} "
        "--concurrency 1 4 16 --prompts {prompts}/gsm8k.jsonl --limit 48 --new 64 --parallel 15 --out {out} -- "
        + LIMITS[engine]
    )


STAGES = {
    "tests": Stage(f"{PYTEST} -m gpu tests", 240),
    "more_tests": Stage(f"{PYTEST} {' '.join(f'tests/test_{name}.py' for name in ON_BOTH.split())}", 180),
    "two_gpu_tests": Stage(f"{PYTEST} tests/test_two_gpus.py", 220, gpus=2),
    "block_step": Stage("bench/block_step.py --out {out}", 200),
    "features": Stage("bench/features.py --device cuda --out {out}", 80),
    "kernels": Stage("bench/decode_kernels.py --out {out}", 60),
    "kernels_dflash": Stage("bench/decode_kernels.py --shape qwen3-8b --lengths 512 --out {out}", 60),
    "attention": Stage("bench/decode_kernels.py --sweep attention --lengths 16384 --out {out}", 90),
    "experts": Stage("bench/decode_kernels.py --shape 30b-a3b --out {out}", 60),
    "rounds": Stage("bench/decode.py --out {out}", 120),
    "rounds_dflash": Stage(
        "bench/decode.py --shape qwen3-8b --case token 'block of 15' 'block tree of 64' --batch 1 16 --engine fledge "
        "--out {out}", 120,
    ),
    "rounds_16k": Stage(
        "bench/decode.py --context 16384 --case 'chain of 7' --batch 1 --out {out}", 60
    ),
    "rounds_sampled": Stage(
        "bench/decode.py --case token 'chain of 7' --engine fledge --sampling greedy temperature top-p "
        "'top-k and top-p' --out {out}", 120,
    ),
    "rounds_moe": Stage("bench/decode.py --shape 30b-a3b --out {out}", 150),
    "engines": Stage("bench/decode.py --engine fledge transformers vllm --out {out}", 360),
    "draft": Stage(
        "-m fledge train --target {target} --data {data} --method eagle3 --depth 5 --draft-vocab 4096 "
        "--max-length 512 --row-length 8192 --steps 1200 --out {work}", 100, needs=("target", "data"),
    ),
    "prompt_sets": Stage(
        "bench/prompt_sets.py --target {target} --draft {draft} --prompts {prompts}/*.jsonl --batch 1 16 "
        "--temperature 0 1 --repeats 7 --out {out}", 400, needs=TRAINED,
    ),
    "served_features": Stage("bench/served_features.py --target {target} --out {out}", 190, needs=("target",)),
    **{f"draft_{method}": trained(method) for method in SERVED["vllm"].split()},
    "vllm": Stage(serving("vllm"), 200, needs=TRAINED),
    "regenerate": Stage(
        "bench/regenerate.py --target {target} --data {data} --out {out} -- " + LIMITS["vllm"], 200,
        needs=("target", "data"),
    ),
    "sglang": Stage(serving("sglang"), 300, needs=TRAINED),
    "scale": Stage(
        "bench/scale.py --gpus 1 2 --tokens 8192 --source online disk --out {out}", 240, gpus=2
    ),
    "scale_70b": Stage(
        "bench/scale.py --gpus 2 --shape 70b --shard-target --tokens 4096 --out {records}/scale.json", 180, gpus=2
    ),
    "scale_moe": Stage(
        "bench/scale.py --gpus 1 2 --shape 30b-a3b --tokens 4096 --out {records}/scale.json", 180, gpus=2
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--list", action="store_true", help="print each stage's command, seconds and GPUs, and stop")
    parser.add_argument("--out", type=Path, help="directory of the records")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of everything")
    parser.add_argument("--target", type=Path, help="a chat model")
    parser.add_argument("--draft", type=Path, help="its draft (default: the one that the stage `draft` trains)")
    parser.add_argument("--data", nargs="*", help="chats to train it on")
    parser.add_argument("--prompts", type=Path, help="directory with gsm8k.jsonl and other sets of prompts")
    options = parser.parse_args()
    if options.list:
        for name, stage in STAGES.items():
            print(f"{name}: {stage.seconds} s, GPUs: {stage.gpus}\n    python {stage.command}")
        return
    check(parser, options)
    options.out.mkdir(parents=True, exist_ok=True)
    results, end = {}, time.monotonic() + options.seconds
    with (options.out / "log.txt").open("a") as log:
        for name in options.stages:
            left = end - time.monotonic()
            if STAGES[name].seconds > left:
                results[name] = {"seconds": 0.0, "exit_code": None}
            else:
                results[name] = run(command_of(name, options), min(2 * STAGES[name].seconds, left), log)
            (options.out / "stages.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, result in results.items():
        print(f"{name}: {'not started' if result['exit_code'] is None else result}")
    sys.exit(any(result["exit_code"] != 0 for result in results.values()))


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with a message unless the stages are known and have what they need."""
    if not options.stages or options.out is None:
        parser.error("name at least one stage, and --out")
    for name in options.stages:
        if name not in STAGES:
            parser.error(f"{name} is no stage; they are {', '.join(STAGES)}")
        if missing := [f"--{need}" for need in STAGES[name].needs if not getattr(options, need)]:
            parser.error(f"{name} needs {' and '.join(missing)}")


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command line of a stage, for a shell, which expands patterns."""
    work = options.out.resolve() / "run"
    filled = STAGES[name].command.format(
        target=options.target, draft=options.draft or work / "draft", data=" --data ".join(options.data or []),
        prompts=options.prompts, work=work, records=options.out.resolve(),
        out=options.out.resolve() / f"{name}.json",
    )  # fmt: skip
    return f"{sys.executable} {filled}"


def run(command: str, seconds: float, log) -> dict[str, float | int]:
    """Runs a command in a process group of its own, with its output in the log and its last lines printed."""
    print(f"$ {command}", flush=True)
    start, at = time.monotonic(), log.seek(0, os.SEEK_END)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    written = Path(log.name).read_bytes()[at:].decode(errors="replace")
    print("\n".join(written.splitlines()[-12:]), flush=True)
    return {"seconds": round(time.monotonic() - start, 1), "exit_code": process.returncode}


if __name__ == "__main__":
    main()
