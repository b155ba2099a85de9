"""Compares hidden states that vLLM captures with those of the same model here, and times their way into training.

    python bench/served_features.py --target DIR                     # needs a GPU and vLLM in this Python
    python bench/served_features.py --target DIR --tolerance 0.1 -- --quantization fp8

Starts `vllm serve` with the words of `fledge.states.vllm_files`, for the states of --layers (default: all but 0,
which vLLM overwrites), and with the arguments after `--`. Each captured state is compared with every state of the
target's own forward pass, so that the record says which number it has here (`best`), how far it is from that one and
from the next best, and how far its neighbours in the text are from it. The prompts are random tokens: short ones, one
that vLLM computes in several chunks, one of the longest length whose states it stores, and one twice. Then rows of
documents go through `VllmFeatures`, as training reads them.

Should the server not start or not write files, it is started again without asynchronous scheduling; then vLLM's `LLM`
class writes the files in a process of its own, which tells whether the connector or the server is the problem. All of
that ends after --seconds. The end of vLLM's log is printed if something fails; --log keeps all of it.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving import free_port

from fledge.data.documents import Document
from fledge.data.pack import Rows
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.states.vllm import Patience, VllmFeatures, VllmServer
from fledge.states.vllm_files import Captured, StatesFolder, lock_state, serve_words
from fledge.targets.loading import load_target
from fledge.targets.transformers import TransformersTarget
from fledge.types import Packed

SETTINGS = {  # of vLLM's environment, unless the caller set them
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the only one with this method; it is also chosen by itself
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
CHUNK = 2048  # tokens that vLLM computes at a time
START_SECONDS = 150  # the server's start, at most
TAIL = 60  # lines of a log that are printed
SHIFTS = (-1, 1)
Attempt = dict[str, Any]


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="directory of a small model")
    parser.add_argument("--layers", type=int, nargs="+", default=None)
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens that are timed")
    parser.add_argument("--seconds", type=float, default=190, help="time limit of everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of vLLM and of the target's own forward pass")
    parser.add_argument("--tolerance", type=float, default=0.05, help="the most that a layer's states may be apart")
    parser.add_argument("--log", type=Path, default=None, help="file for vLLM's output (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/served_features.json"))
    parser.add_argument("--offline", type=Path, default=None, help=argparse.SUPPRESS)  # the process with vLLM's LLM
    options = parser.parse_args(words[:at])
    options.arguments = words[at + 1 :]
    if options.offline:
        write_offline(json.loads(options.offline.read_text()))
        return
    check_record_path(options.out, "--out")
    deadline = time.monotonic() + options.seconds
    target = load_target(options.target, device=options.device, dtype=getattr(torch, options.dtype))
    layers = tuple(sorted(options.layers or range(1, target.num_layers + 1)))
    prompts = make_prompts(target)
    record = {
        "environment": environment(options.device, options.dtype), "engine": f"vllm {version()}",
        "target": options.target.name, "tolerance": options.tolerance, "arguments": shlex.join(options.arguments),
        "target_layers": target.num_layers, "layers": list(layers), "attempts": [],
    }  # fmt: skip
    failed = True
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work:
        log = options.log or Path(work) / "vllm.log"
        for name, run in (
            ("serve", lambda: with_server(target, layers, prompts, options, Path(work), log, deadline, [])),
            ("serve --no-async-scheduling", lambda: with_server(
                target, layers, prompts, options, Path(work), log, deadline, ["--no-async-scheduling"]
            )),
            ("offline", lambda: offline(target, layers, prompts, options, Path(work), log, deadline)),
        ):  # fmt: skip
            began = time.monotonic()
            attempt: Attempt = {"name": name}
            record["attempts"].append(attempt)
            try:
                record |= run()
                failed = not record["agrees"]
            except Exception as e:
                attempt["error"] = f"{type(e).__name__}: {e}"
                print(f"{name} failed: {attempt['error']}\nThe end of vLLM's log:", flush=True)
                print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL:]) if log.exists() else "-")
            attempt["seconds"] = time.monotonic() - began
            write_record(options.out, record)
            if "agrees" in record or time.monotonic() > deadline - 15:
                break
    print(json.dumps({k: v for k, v in record.items() if k != "states"}, indent=1), flush=True)
    sys.exit(failed)


def version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def make_prompts(target: TransformersTarget) -> list[list[int]]:
    """Prompts of random tokens, the longest as long as vLLM stores states of; the last is the first one again."""
    most = max_model_len(target) - 1
    lengths = [n for n in (1, 2, 17, 300, 1000) if n < most] + [min(most, CHUNK + CHUNK // 2), most]
    draw = torch.Generator().manual_seed(0)
    high = target.embedding.shape[0]
    prompts = [torch.randint(5, high, (n,), generator=draw).tolist() for n in lengths]
    return [*prompts, prompts[2]]


def max_model_len(target: TransformersTarget) -> int:
    return min(target.context, 2 * CHUNK)


# -- vLLM ---------------------------------------------------------------------------------------------------------


def with_server(
    target: TransformersTarget, layers: tuple[int, ...], prompts: Sequence[list[int]], options: argparse.Namespace,
    work: Path, log: Path, deadline: float, arguments: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """The record's values by a server."""
    states = work / "states"
    states.mkdir(exist_ok=True)
    words = serve_words(target.name, layers, max_model_len(target), str(states))[1:]
    words = [*words, *common_arguments(options.dtype), *options.arguments, *arguments]
    with serving(words, log, deadline) as (address, started):
        patience = Patience(answer=40, file=20, nudge=3)
        server = VllmServer(address, "-", print, patience=patience)
        print(f"the server started in {started:.0f} s, max_model_len {server.max_model_len}", flush=True)
        begin = time.monotonic()
        server.get(prompts[3], 0, threading.Event())  # the first request may compile
        first = time.monotonic() - begin
        with ThreadPoolExecutor(len(prompts)) as executor:
            captured = list(executor.map(lambda p: server.get(p, 0, threading.Event()), prompts))
        found = {"start_seconds": started, "first_request_seconds": first}
        found |= compare(target, layers, prompts, captured, options.tolerance)
        found["timing"] = measure(VllmFeatures(server, target, layers[:-1], layers), options.tokens, deadline)
        found["files_left"] = len(list(states.iterdir()))
        return found


def common_arguments(dtype: str) -> list[str]:
    return [
        "--dtype", dtype, "--enforce-eager", "--gpu-memory-utilization", "0.4", "--max-num-batched-tokens",
        str(CHUNK), "--max-num-seqs", "64",
    ]  # fmt: skip


@contextlib.contextmanager
def serving(words: Sequence[str], log: Path, deadline: float) -> Iterator[tuple[str, float]]:
    """A vLLM server in a process group of its own, which is ended afterwards: its address and the seconds of its
    start. Raises TimeoutError or ChildProcessError if it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words, "--host", "127.0.0.1", "--port", str(port)]
    print(" ".join(command), flush=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=child_environment()
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until = min(began + START_SECONDS, deadline - 10)
        while not is_healthy(address):
            if process.poll() is not None:
                raise ChildProcessError(f"the server ended with status {process.returncode}")
            if time.monotonic() > until:
                raise TimeoutError(f"the server did not answer within {time.monotonic() - began:.0f} s")
            time.sleep(0.5)
        yield address, time.monotonic() - began
    finally:
        end(process)


def child_environment(**more: str) -> dict[str, str]:
    return SETTINGS | os.environ | more


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def end(process: subprocess.Popen) -> None:
    """Ends a process and all that it started."""
    for how, patience in ((signal.SIGTERM, 8), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    time.sleep(1)  # until the GPU's memory is free


def offline(
    target: TransformersTarget, layers: tuple[int, ...], prompts: Sequence[list[int]], options: argparse.Namespace,
    work: Path, log: Path, deadline: float,
) -> dict[str, Any]:  # fmt: skip
    """The record's values by vLLM's LLM class, and the folder that it wrote."""
    states, request = work / "offline", work / "request.json"
    states.mkdir()
    words = serve_words(target.name, layers, max_model_len(target), str(states))
    configs = {
        flag: json.loads(words[words.index(flag) + 1]) for flag in ("--speculative-config", "--kv-transfer-config")
    }
    asked = dict(
        model=target.name, speculative_config=configs["--speculative-config"], prompts=prompts[:-1],
        kv_transfer_config=configs["--kv-transfer-config"], max_model_len=max_model_len(target), dtype=options.dtype,
    )  # fmt: skip
    request.write_text(json.dumps(asked))
    command = [sys.executable, __file__, "--target", target.name, "--offline", str(request)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        )  # fmt: skip
    try:
        if process.wait(max(deadline - time.monotonic() - 10, 1)):
            raise ChildProcessError(f"the process ended with status {process.returncode}")
    finally:
        end(process)
    folder = StatesFolder(states)
    captured = [folder.get(p, len(p), threading.Event()) for p in prompts]
    return compare(target, layers, prompts, captured, options.tolerance)


def write_offline(asked: dict[str, Any]) -> None:
    """Lets vLLM's LLM class, in this process, write the files of prompts.

    `LLM.generate` returns as soon as all texts are decoded, and in this process nothing makes vLLM's scheduler step
    any more, in whose next step the last files are written: the steps are made here.
    """
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": p} for p in asked.pop("prompts")]
    llm = LLM(
        **asked, enforce_eager=True, gpu_memory_utilization=0.4, max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )  # fmt: skip
    done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    files = [Path(d.kv_transfer_params["hidden_states_path"]) for d in done]
    print("locks after generate:", [lock_state(f) for f in files], flush=True)
    for step in range(2000):
        if all(lock_state(f) == "free" and f.exists() for f in files):
            print(f"all files were there after {step} more steps", flush=True)
            return
        llm.llm_engine.engine_core.get_output()
        time.sleep(0.005)
    raise TimeoutError(f"files are missing: {[lock_state(f) for f in files]}")


# -- measurements -------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare(
    target: TransformersTarget, layers: Sequence[int], prompts: Sequence[list[int]], captured: Sequence[Captured],
    tolerance: float,
) -> dict[str, Any]:  # fmt: skip
    """The distances of each captured state from the target's own, over all tokens of all prompts: relative to the norm
    of the latter. `agrees` tells whether each has its own number, text and position, and is within `tolerance` of it,
    and of each prompt's within twice as much."""
    n = target.num_layers
    ours = [own_states(target, p) for p in prompts]  # [T, n + 2, D] each; the last is after the final norm
    theirs = [c.states_TLD.to(target.device).float() for c in captured]
    whole = [tuple(t.shape) == (len(p), len(layers), o.shape[2]) for t, p, o in zip(theirs, prompts, ours, strict=True)]
    if not all(whole):
        raise ValueError(f"files have the shapes {[tuple(t.shape) for t in theirs]}")
    rows = []
    for column, layer in enumerate(layers):
        mine = torch.cat([t[:, column] for t in theirs])
        distances = [distance(mine, torch.cat([o[:, i] for o in ours])) for i in range(n + 2)]
        order = sorted(range(n + 2), key=distances.__getitem__)
        shifted = {str(s): distance(*shift(theirs, ours, column, layer, s)) for s in SHIFTS}
        names = [str(i) for i in range(n + 1)] + ["after the final norm"]
        rows.append(
            {"vllm": layer, "best": names[order[0]], "distance": distances[order[0]], "second": names[order[1]],
             "second_distance": distances[order[1]], "shifted": shifted,
             "equal": bool(torch.equal(mine, torch.cat([o[:, layer] for o in ours])))}
        )  # fmt: skip
        print(rows[-1], flush=True)
    per_prompt = [
        {"tokens": len(p), "worst": max(distance(t[:, c], o[:, layer]) for c, layer in enumerate(layers))}
        for p, t, o in zip(prompts, theirs, ours, strict=True)
    ]
    found: dict[str, Any] = {"states": rows, "prompts": per_prompt, "same_twice": same_twice(captured)}
    if layers[-1] == n:
        found["final"] = final_state(target, ours, theirs, captured)
    right = all(r["best"] == str(r["vllm"]) and r["distance"] < min(tolerance, r["second_distance"] / 2) for r in rows)
    aligned = all(r["distance"] < min(r["shifted"].values()) / 2 for r in rows)
    found["agrees"] = right and aligned and all(p["worst"] < 2 * tolerance for p in per_prompt)
    return found


def own_states(target: TransformersTarget, prompt: list[int]) -> torch.Tensor:
    """The states of a prompt by the target's own forward pass, float32 [T, n + 2, D]."""
    T = len(prompt)
    token, position = torch.tensor(prompt, dtype=torch.int32), torch.arange(T, dtype=torch.int32)
    zeros = torch.zeros(T, dtype=torch.int32)
    features = target.features(Packed(token, zeros, position, zeros), range(target.num_layers + 1))
    return torch.cat([features.aux_TAD, features.last_TD[:, None]], 1).float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def shift(theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor], column: int, layer: int, by: int) -> Any:
    """vLLM's states and the target's, `by` tokens further."""
    a = torch.cat([t[max(0, -by) : len(t) - max(0, by), column] for t in theirs])
    return a, torch.cat([o[max(0, by) : len(o) - max(0, -by), layer] for o in ours])


def same_twice(captured: Sequence[Captured]) -> float:
    """The distance of the states of the prompt that is there twice."""
    return distance(captured[-1].states_TLD.float(), captured[2].states_TLD.float())


def final_state(
    target: TransformersTarget, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor],
    captured: Sequence[Captured],
) -> dict[str, Any]:  # fmt: skip
    """vLLM's last state after the final norm, which is applied here, and what it makes of vLLM's next tokens."""
    normed = [target.norm(t[:, -1].to(target.dtype)) for t in theirs]
    found = {"normed_distance": distance(torch.cat(normed).float(), torch.cat([o[:, -1] for o in ours]))}
    pairs = [
        (c.next_token[1], float(target.logits(x[-1:]).float().log_softmax(-1)[0, c.next_token[0]]))
        for c, x in zip(captured, normed, strict=True)
        if c.next_token is not None
    ]
    return found | {"next_token_log_probabilities": pairs}


def measure(source: VllmFeatures, tokens: int, deadline: float) -> dict[str, Any]:
    """The speed of rows that are read as training reads them, from documents of 256 to 1,024 tokens."""
    draw, vocab, longest = np.random.default_rng(1), source.target.embedding.shape[0], source.states.max_model_len - 1
    lengths = np.minimum(draw.integers(256, 1025, max(tokens // 640, 1)), longest)
    documents = [Document(draw.integers(5, vocab, n, dtype=np.int32), np.zeros(n, dtype=np.int32)) for n in lengths]
    rows = Rows(documents, 4096, 0)
    began, read = time.perf_counter(), 0
    upcoming = source.ahead(rows[0, i] for i in range(len(rows.epoch(0))))
    for row in upcoming:
        features = source.features(row)
        read += sum(b - a for a, b in row.without_filler())
        if time.monotonic() > deadline - 20:
            upcoming.close()
            break
    if features.last_TD.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    states = len(source.captured) * features.last_TD.shape[1] * features.last_TD.element_size()
    return {
        "tokens": read,
        "tokens_per_s": read / seconds,
        "bytes_per_token": states,
        "MB_per_s": read * states / seconds / 1e6,
    }


if __name__ == "__main__":
    main()
