"""Compares `fledge regenerate --endpoint` with vLLM's own benchmark, and kills it again and again.

    python bench/regenerate.py --target DIR --data CHATS.jsonl -- --max-model-len 2048 --enforce-eager

Starts `vllm serve` with the target (arguments after `--` go to it) and answers the first messages of --records chats of
the data by `vllm bench serve` and by `fledge regenerate --endpoint`, both greedily at --concurrency, --repeats times:
the two take turns in being first, since the server caches the prompts that the first one asks. The tokens are those
that the server counts, and the seconds are the whole command's without its imports. Then the command is killed --kills
times while it answers, each time in another part of the chats, and run to its end: the record has how many chats were
lost, answered twice, or answered otherwise than in the run that was not killed (the server's batches differ, so that
near ties may fall otherwise).
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from serving import PLAIN, Case, started

from fledge.commands.regenerate import run
from fledge.io.display import ProgressDisplay
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.regenerate.options import RegenerateOptions

START_SECONDS = 200
COMMAND_SECONDS = 120  # the most of a command that is not killed


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with `messages`")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--new", type=int, default=64, help="the most new tokens of an answer")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cuda", help="to name in the record")
    parser.add_argument("--out", type=Path, default=Path("bench/results/regenerate.json"))
    options = parser.parse_args(words[:at])
    options.engine = "vllm"  # as `started` reads it
    check_record_path(options.out, "--out")
    record = {
        "environment": environment(options.device, "bfloat16"),
        "target": Path(options.target).name, "concurrency": options.concurrency, "new": options.new, "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, started(options, Case(PLAIN, None, 0), words[at + 1 :]) as server:
        asked = write_prompts(options, Path(scratch))
        server.wait(START_SECONDS)
        measured = {"vllm bench serve": by_vllm, "fledge regenerate": by_fledge}
        for repeat in range(options.repeats):
            for what in list(measured)[:: -1 if repeat % 2 else 1]:
                record["rows"].append({"what": what} | measured[what](options, server.url, Path(scratch)))
                print(record["rows"][-1], flush=True)
            write_record(options.out, record)
        record["killed"] = killed(options, server.url, Path(scratch), asked)
        print(record["killed"])
        write_record(options.out, record)


def write_prompts(options: argparse.Namespace, scratch: Path) -> int:
    """Writes the first messages of some chats for both commands, and returns their number. Each is another one."""
    prompts = []
    with options.data.open() as lines:
        for line in lines:
            first = next(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user")
            if first not in prompts:
                prompts.append(first)
            if len(prompts) == options.records:
                break
    chats = [[{"role": "user", "content": p}, {"role": "assistant", "content": "-"}] for p in prompts]
    (scratch / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return len(prompts)


def by_vllm(options: argparse.Namespace, url: str, scratch: Path) -> dict[str, Any]:
    count = generated(url)
    result = scratch / "vllm.json"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat", "--base-url",
        url, "--endpoint", "/v1/chat/completions", "--model", options.target, "--dataset-name", "custom",
        "--dataset-path", str(scratch / "prompts.jsonl"), "--custom-output-len", str(options.new),
        "--skip-chat-template", "--disable-shuffle", "--num-prompts", str(options.records), "--max-concurrency",
        str(options.concurrency), "--temperature", "0", "--disable-tqdm", "--save-result", "--result-dir",
        str(scratch), "--result-filename", result.name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    found = json.loads(result.read_text())
    tokens = generated(url) - count
    return {
        "tokens": tokens, "seconds": found["duration"], "tokens_per_s": tokens / found["duration"],
        "completed": found["completed"],
    }  # fmt: skip


def by_fledge(options: argparse.Namespace, url: str, scratch: Path) -> dict[str, Any]:
    answers = scratch / "whole.jsonl"
    answers.unlink(missing_ok=True)
    count, began = generated(url), time.monotonic()
    given = RegenerateOptions(
        target=options.target, endpoint=url, data=[str(scratch / "chats.jsonl")], out=str(answers),
        concurrency=options.concurrency, max_new_tokens=options.new,
    )  # fmt: skip
    progress = ProgressDisplay()
    run(given, progress.say, progress)
    seconds, tokens = time.monotonic() - began, generated(url) - count
    return {
        "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
        "completed": len(answers.read_text().splitlines()),
    }  # fmt: skip


def generated(url: str) -> float:
    """The tokens that the server has generated."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    return sum(float(n) for n in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE))


def killed(options: argparse.Namespace, url: str, scratch: Path, asked: int) -> dict[str, Any]:
    """What the command writes when it is killed again and again, compared with what it wrote before."""
    out, draw, at = scratch / "killed.jsonl", random.Random(0), []
    command = [
        sys.executable, "-m", "fledge", "regenerate", "--endpoint", url, "--target", options.target, "--data",
        str(scratch / "chats.jsonl"), "--out", str(out), "--concurrency", str(options.concurrency),
        "--max-new-tokens", str(options.new),
    ]  # fmt: skip

    def written() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for part in range(options.kills):
        least = max(written() + 1, asked * (part + draw.random()) / options.kills)  # records to wait for
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and written() < least:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))  # not always just after a record was written
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:  # else it had ended before
            at.append(written())
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=COMMAND_SECONDS)
    first, second = (by_source(path) for path in (scratch / "whole.jsonl", out))
    return {
        "records_at_kills": at, "lost": asked - len(second), "twice": written() - len(second),
        "answered_otherwise": sum(second.get(source) != answer for source, answer in first.items()),
    }  # fmt: skip


def by_source(path: Path) -> dict[str, str]:
    """The answers of a file by the place of their chats in the data."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["source"]: row["messages"][-1]["content"] for row in rows}


if __name__ == "__main__":
    main()
