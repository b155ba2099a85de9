"""Makes the rest of what `fledge demo` ships: the draft, the conversations to train on, and the prompts to measure on.

    python tools/make_demo_draft.py --data DIR --target fledge/demo/target --work runs/demo_draft --out fledge/demo

The target answers the prompts of the conversations it learnt from, half of them greedily and half at temperature 1
(`fledge regenerate`); the shipped draft is trained on all these answers (`fledge train`). WORK/chats.jsonl.gz has the
few conversations on which the demo trains its own draft, WORK/prompts.jsonl the held-out prompts on which it measures.
At the end, what ships is copied to OUT; `--ship-only` copies from an earlier WORK and runs nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

from assistant_chats import Chat, beginning, conversations

MIXED = {"bookings": 9000, "orders": 600, "stories": 2800, "sums": 7000}  # the conversations that the demo's come from
TEMPERATURES = {"greedy": 0, "sampled": 1}
DEMO = 1100  # conversations that the demo trains on
MEASURED = {"bookings": 16, "stories": 16, "sums": 16}  # held-out prompts
TARGET = "fledge/demo/target"  # how the shipped draft names its target, wherever the target was when it was trained
LICENCE = """
## Licence

The target is Fledgling, the assistant that ships with fledge. The draft was trained on answers of Fledgling and is
under the licence of Fledgling, CC BY-SA 4.0; fledge/demo/LICENSE names the sources.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the conversations; needed without --ship-only")
    parser.add_argument("--target", type=Path, default=Path(TARGET))
    parser.add_argument("--work", type=Path, default=Path("runs/demo_draft"), help="directory of all results")
    parser.add_argument("--out", type=Path, default=Path("fledge/demo"), help="directory of what ships")
    parser.add_argument("--ship-only", action="store_true", help="only copy what ships from --work to --out")
    parser.add_argument("--epochs", type=float, default=6, help="passes over the answers (default: 6)")
    parser.add_argument("--draft-vocab", type=int, default=2048, help="tokens that the draft proposes (default: 2048)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.ship_only:
        if options.data is None:
            parser.error("give --data, or --ship-only")
        make(options)
    ship(options.work, options.out)


def make(options: argparse.Namespace) -> None:
    """Makes the conversations, the prompts and the draft in WORK."""
    draw = random.Random(options.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    seen, held_out = conversations(options.data, options.seed)
    chats = [chat for kind, number in MIXED.items() for chat in draw.sample(seen[kind], min(number, len(seen[kind])))]
    draw.shuffle(chats)
    prompts = [
        beginning(chat, draw) for kind, number in MEASURED.items() for chat in draw.sample(held_out[kind], number)
    ]
    draw.shuffle(prompts)
    write(options.work / "prompts.jsonl", prompts)
    mixed = {id(chat) for chat in chats}
    rest = [chat for of_kind in seen.values() for chat in of_kind if id(chat) not in mixed] + seen["stories"]
    draw.shuffle(rest)
    for first, (name, temperature) in enumerate(TEMPERATURES.items()):
        write(options.work / f"{name}.jsonl", chats[first::2])
        write(options.work / f"more-{name}.jsonl", rest[first::2])
        for file in (f"{name}.jsonl", f"more-{name}.jsonl"):
            fledge(
                "regenerate", "--target", options.target, "--data", options.work / file, "--batch", 512,
                "--out", options.work / f"own-{file}", "--temperature", temperature, "--max-new-tokens", 320,
            )  # fmt: skip
    own = [options.work / f"own-{name}.jsonl" for name in TEMPERATURES]
    write_demo_chats(own, options.work / "chats.jsonl.gz", draw)
    own += [options.work / f"own-more-{name}.jsonl" for name in TEMPERATURES]
    fledge(
        "train", "--target", options.target, *(word for file in own for word in ("--data", file)),
        "--out", options.work / "run", "--epochs", options.epochs, "--depth", 5, "--draft-vocab", options.draft_vocab,
        "--max-length", 1024, "--row-length", 16384, "--fc-norm", "--norm-output", "--lr", 2e-3,
        "--weight-decay", 0.5, "--eval-tokens", 64,
    )  # fmt: skip


def ship(work: Path, out: Path) -> None:
    """Copies the draft, the conversations and the prompts from WORK to OUT, without paths of this machine."""
    draft = out / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(work / "run" / "draft", draft, copy_function=shutil.copyfile)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    record = json.loads((draft / "fledge" / "record.json").read_text(encoding="utf-8"))
    for known in (config, record["config"]):  # `fledge check` compares the two
        known["fledge"]["target"] = TARGET
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (draft / "fledge" / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    card = (draft / "README.md").read_text(encoding="utf-8").replace("---\n", "---\nlicense: cc-by-sa-4.0\n", 1)
    (draft / "README.md").write_text(card + LICENCE, encoding="utf-8")
    for name in ("chats.jsonl.gz", "prompts.jsonl"):
        shutil.copyfile(work / name, out / name)
    state_losses(out / "target")


def state_losses(target: Path) -> None:
    """Writes the held-out losses of pretrain.json into the table of the target's card."""
    figures = json.loads((target / "pretrain.json").read_text(encoding="utf-8"))
    before, after = figures["curve"][-1]["held_out"], figures["held_out_loss"]
    rows = "".join(f"| {kind} | {before[kind]:.2f} | {after[kind]:.2f} |\n" for kind in after)
    card = target / "README.md"
    text = re.sub(r"(?<=\| at the end, with doubled logits \|\n\|---\|---\|---\|\n)(\|.*\n)*", rows, card.read_text())
    card.write_text(text, encoding="utf-8")


def write(file: Path, chats: list[Chat]) -> None:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")


def write_demo_chats(own: list[Path], out: Path, draw: random.Random) -> None:
    """Writes those of the answered conversations on which the demo trains."""
    rows = [json.loads(line) for file in own for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "messages" in row]
    chosen = draw.sample(rows, min(DEMO, len(rows)))
    lines = "".join(json.dumps({"messages": row["messages"]}) + "\n" for row in chosen)
    out.write_bytes(gzip.compress(lines.encode(), mtime=0))  # without the time: the same rows give the same file


def fledge(*arguments: object) -> None:
    """Prints and runs a fledge command."""
    command = [str(a) for a in arguments]
    print("$ fledge " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", "fledge", *command], check=True)


if __name__ == "__main__":
    main()
