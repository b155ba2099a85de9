"""Makes fledge/demo/draft, the draft that ships with fledge. It is trained longer than that of the demo, and on a GPU.

    python -m fledge.demo.ship --out fledge/demo/draft

The training has four `fledge` commands. The draft is trained on source text of the standard library and installed
packages; meanwhile the target continues parts of this text, most of them greedily and some at temperature 1; then the
draft is trained on these continuations, which resemble the text it will meet in decoding. Held-out files
(fledge/demo/corpus.py) are not used. Of the draft's vocabulary, only the most frequent tokens are kept in the end: the
head takes much of a pass of such a small draft on a CPU, so that how many tokens pay is best seen afterwards.

    python -m fledge.demo.ship --probe-only --out fledge/demo/draft

The draft's probe for `fledge check` (its subfolder `fledge`) is not that of the training, which would hold text of
installed packages. It is computed from the finished draft and the target, on the CPU, with the text TEXT and the
beginnings of its parts as prompts, and records what these weights compute. `--probe-only` writes nothing else.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from fledge.data.pack import make_row
from fledge.demo.corpus import held_out, package_files, stdlib_files
from fledge.demo.data import write_lines
from fledge.demo.pretrain import PACKAGES, machine, versions
from fledge.eval.probe import Excerpt, Record, decode, excerpt_range, probe_files, spacings
from fledge.models.draft import Draft
from fledge.models.weights import load_draft, save_draft, target_sha256
from fledge.targets.compatibility import connect_draft
from fledge.targets.loading import load_target
from fledge.types import Document

WORK = Path("runs/ship")
TARGET = "fledge/demo/target"
TEXT = '''import math


class Vector:
    """A vector in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return Vector(self.x - other.x, self.y - other.y)

    def length(self):
        return math.sqrt(self.x * self.x + self.y * self.y)


def read_numbers(path):
    with open(path) as f:
        return [float(line) for line in f if line.strip()]


def mean(values):
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)
'''
PROMPTS, NEW_TOKENS = 8, 32  # prompts that are decoded for the probe, and the tokens of each answer
CONTINUED = {"greedy": 0, "sampled": 1}  # temperatures at which the target continues prompts
SHAPE = "--aux-layers 2,6,11 --fc-norm --norm-output".split()  # as that of the draft that the demo trains
STEPS = "--depth 5 --max-length 512 --row-length 8192 --save-every 500".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("fledge/demo/draft"), help="output directory (default: fledge/demo/draft)"
    )
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps on source text (default: 1500)")
    parser.add_argument(
        "--own-steps", type=int, default=5000, help="optimizer steps on the target's own text (default: 5000)"
    )
    parser.add_argument(
        "--own-records", type=int, default=30_000, help="number of continuations by the target (default: 30000)"
    )
    parser.add_argument(
        "--draft-vocab", type=int, default=3840, help="tokens that the draft is trained to propose (default: 3840)"
    )
    parser.add_argument("--keep", type=int, default=2560, help="of them, those that are kept (default: 2560)")
    parser.add_argument(
        "--megabytes", type=float, default=40, help="megabytes of package source to train on (default: 40)"
    )
    parser.add_argument("--probe-only", action="store_true", help="write only the probe of the draft in --out")
    options = parser.parse_args()
    if options.probe_only:
        write_probe(options.out)
        return

    start = time.monotonic()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    write_texts(options.megabytes, options.own_records)
    first = ["--data", WORK / "text.jsonl", "--out", WORK / "first", "--steps", options.steps, "--lr", "2e-3"]
    first += ["--draft-vocab", options.draft_vocab, *SHAPE]
    with ThreadPoolExecutor() as threads:
        continued = threads.submit(continue_prompts)
        fledge("train", "--target", TARGET, *first, *STEPS)
        continued.result()
    own = [word for name in CONTINUED for word in ("--data", WORK / f"own-{name}.jsonl")]
    own += ["--data", WORK / "text.jsonl@0.05", "--out", WORK / "second"]
    more = ["--init-from", WORK / "first" / "draft", "--steps", options.own_steps, "--lr", "1e-3"]
    fledge("train", "--target", TARGET, *own, *more, *STEPS)
    save_draft(most_frequent(load_draft(WORK / "second" / "draft"), options.keep), options.out)
    record = {
        "seconds": time.monotonic() - start,
        "machine": machine(),
        "versions": versions(),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "runs": {name: last_metrics(WORK / name) for name in ("first", "second")},
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    write_probe(options.out)


def continue_prompts() -> None:
    """Writes the target's continuations of the prompts."""
    for name, temperature in CONTINUED.items():
        fledge(
            "regenerate", "--target", TARGET, "--data", WORK / f"prompts-{name}.jsonl",
            "--out", WORK / f"own-{name}.jsonl", "--prompt-tokens", 192, "--max-new-tokens", 192, "--batch", 1024,
            "--temperature", temperature,
        )  # fmt: skip


def most_frequent(whole: Draft, size: int) -> Draft:
    """The draft with only those `size` tokens of its vocabulary that are the most frequent in the standard library."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = [text for path, text in stdlib_files() if not held_out(path)]
    ids = [i for encoded in tokenizer(texts)["input_ids"] for i in encoded]
    counts, known = torch.bincount(torch.tensor(ids), minlength=whole.config.vocab_size), whole.target_ids()
    kept = counts[known].topk(size).indices.sort().values
    coverage = float(counts[known[kept]].sum() / counts.sum())
    draft = Draft(replace(whole.config, draft_vocab_size=size).with_provenance(coverage=coverage, target=TARGET))
    draft.load_state_dict(whole.state_dict() | {n: whole.state_dict()[n][kept] for n in ("lm_head.weight", "d2t")})
    draft.set_vocabulary(known[kept])
    return draft


def write_probe(directory: Path) -> None:
    """Writes the probe of a finished draft, as `fledge train` does for the draft that it saves."""
    target, draft = load_target(TARGET), load_draft(directory)
    layers = connect_draft(draft, target)
    tokens = torch.tensor(target.tokenizer(TEXT)["input_ids"], dtype=torch.int32)
    document = Document(tokens, torch.zeros_like(tokens))
    start, end, steps = excerpt_range(document)
    features = target.features(make_row([document], tokens.numel()), layers)
    states = draft.select_states(features)[start:end].to("cpu", torch.bfloat16)
    excerpt = Excerpt(tokens[:end].long(), states, steps)
    size = tokens.numel() // PROMPTS
    prompts = [tokens[: size * (i + 1)].tolist() for i in range(PROMPTS)]
    training = json.loads((directory / "training.json").read_text())["runs"]["second"]
    record = Record(
        layers=list(layers),
        precision=str(target.dtype).removeprefix("torch."),
        steps=steps,
        spacings=spacings(excerpt, draft.config.provenance.max_length),
        target_sha256=target_sha256(target.embedding, target.head_weight, target.last_layer_weights()),
        chats=[],
        step=training["step"],
        eval_tau=training.get("eval_tau"),
        decoding=decode(target, draft, prompts, NEW_TOKENS, draft.config.provenance.depth),
    )
    for path, content in probe_files(draft, torch.bfloat16, excerpt, record).items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_bytes(content)


def write_texts(megabytes: float, records: int) -> None:
    """Writes text.jsonl to train on, and for each of CONTINUED prompts-NAME.jsonl, with excerpts of the same files that
    start at a random line. Three quarters of these `records` are continued greedily."""
    random.seed(0)
    packages = package_files(PACKAGES)
    random.shuffle(packages)
    texts = [text for path, text in stdlib_files() if not held_out(path)]
    size = 0
    for _, text in packages:
        if size < megabytes * 1e6:
            texts.append(text)
            size += len(text)
    random.shuffle(texts)
    write_lines(WORK / "text.jsonl", [{"text": text} for text in texts])
    prompts = []
    while len(prompts) < records:
        text = random.choice(texts)
        start = text.find("\n", random.randrange(len(text))) + 1
        if start and len(text) - start > 1000:
            prompts.append({"text": text[start : start + 1000]})
    parts = zip(CONTINUED, (prompts[records // 4 :], prompts[: records // 4]), strict=True)
    for name, part in parts:
        write_lines(WORK / f"prompts-{name}.jsonl", part)


def fledge(*arguments: object) -> None:
    """Prints and runs a fledge command."""
    command = [str(a) for a in arguments]
    print("$ fledge " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", "fledge.cli", *command], check=True)


def last_metrics(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    main()
