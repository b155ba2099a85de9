"""Measures how long training data takes to be ready, and the memory that it needs: at the first start, which tokenizes
it, and at the second, which finds it in the cache.

    python bench/data.py --target fledge/demo/target --records 200000 --out bench/results/data.json

The data is one file of random conversations, drawn by a seed: two to six messages of words of the target's vocabulary,
200 to 800 words together. It and the cache are in a temporary directory (--work names another parent).

Each start is a process of its own, which loads the target and then does what `fledge train` does with its data: it asks
the cache, chooses a draft vocabulary and packs the first epoch. `data_s` is the time of that, and `start_s` includes
imports and loading the target. `cpu` is the CPU time of the process and its workers as a share of all cores. `peak_gib`
is the highest memory (RSS) of the process after the target was loaded, minus that with the target; `workers_gib` that
of its workers together. `epoch_gib` is the highest memory of the process, counted likewise, after every row of an epoch
was made.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record

STARTED = time.time()
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)  # for targets without a template
SHORTEST, LONGEST = 200, 800  # words of a conversation
MAX_LENGTH, ROW_LENGTH, DRAFT_VOCAB = 2048, 4096, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fledge/demo/target")
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--workers", type=int, help="worker processes (default: as fledge train chooses)")
    parser.add_argument("--work", type=Path, help="directory in which a temporary directory is made")
    parser.add_argument("--out", type=Path, default=Path("bench/results/data.json"))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # one start, on data in this directory
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    check_record_path(options.out, "--out")
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        file = Path(work) / "chats.jsonl"
        write_conversations(file, options)
        record = {"environment": environment("cpu", "int32"), "target": Path(options.target).name}
        record |= {"records": options.records, "file_mb": file.stat().st_size / 1e6}
        for start in ("first", "second"):
            words = [sys.executable, __file__, "--measure", work, "--target", options.target]
            words += ["--workers", str(options.workers)] if options.workers else []
            record[start] = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
            print(f"{start} start: {json.dumps(record[start])}", flush=True)
        record["cache_mb"] = sum(f.stat().st_size for f in Path(work, "cache").rglob("*") if f.is_file()) / 1e6
        assert record["first"]["sha256"] == record["second"]["sha256"], "the documents of the two starts differ"
    write_record(options.out, record)


def write_conversations(file: Path, options: argparse.Namespace) -> None:
    """Writes random conversations whose words are tokens of the target's vocabulary."""
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(options.target).get_vocab()
    words = sorted(w[1:] for w in vocabulary if w.startswith("\u0120") and w[1:].isalpha())  # U+0120 is a space
    draw = random.Random(0)
    with file.open("w") as f:
        for _ in range(options.records):
            turns, total = draw.choice((2, 4, 6)), draw.randint(SHORTEST, LONGEST)
            contents = (" ".join(draw.choices(words, k=total // turns)) for _ in range(turns))
            chat = [{"role": r, "content": c} for r, c in zip(("user", "assistant") * turns, contents, strict=False)]
            f.write(json.dumps({"messages": chat}) + "\n")


def measure(options: argparse.Namespace) -> dict:
    """One start, with the sources and the cache in the directory `options.measure`."""
    from fledge.data.documents import fingerprint
    from fledge.data.pack import Rows
    from fledge.data.template import ChatTemplate
    from fledge.data.token_cache import DataRequest, load_data
    from fledge.io.display import ProgressDisplay
    from fledge.targets.loading import load_target
    from fledge.train.setup.draft import choose_vocabulary

    target = load_target(options.target, device="cpu")
    target.tokenizer.chat_template = target.tokenizer.chat_template or CHAT
    template = ChatTemplate(target.tokenizer, target.stop_ids)
    show = ProgressDisplay()
    request = DataRequest((str(options.measure / "chats.jsonl"),), 0, template, MAX_LENGTH, False, hold_out=16)
    before, cpu, begin = rss(os.getpid()), cpu_seconds(), time.perf_counter()
    with peak_memory() as peak:
        data = load_data(request, options.measure / "cache", options.workers, show.say, show.count)
        loaded = time.perf_counter() - begin
        choose_vocabulary(data.documents, target.embedding.shape[0], DRAFT_VOCAB, target.stop_ids)
        rows = Rows(data.documents, ROW_LENGTH, seed=0)
        first = rows.epoch(0)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        found = {
            "start_s": time.time() - STARTED, "data_s": seconds, "cache_s": loaded,
            "cpu": cpu / seconds / os.cpu_count(), "tokens": data.report.tokens, "documents": len(data.documents),
            "rows": len(first), "sha256": fingerprint(data.documents),
            "peak_gib": (peak()[0] - before) / 2**30, "workers_gib": peak()[1] / 2**30,
        }  # fmt: skip
        address = (0, 0)
        while address[0] == 0:
            rows[address]
            address = rows.next(address)
        return found | {"epoch_gib": (peak()[0] - before) / 2**30}


def cpu_seconds() -> float:
    """CPU time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def rss(process: int | str) -> int:
    """The memory of a process in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


@contextlib.contextmanager
def peak_memory() -> Iterator:
    """Context manager: yields a function that gives the highest memory so far, of this process and of its children."""
    own, others, ended = 0, 0, threading.Event()

    def look() -> tuple[int, int]:
        nonlocal own, others
        children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
        own, others = max(own, rss(os.getpid())), max(others, sum(map(rss, children)))
        return own, others

    def watch() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(OSError):  # a thread has ended
                look()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield look
    finally:
        ended.set()
        watching.join()


if __name__ == "__main__":
    main()
