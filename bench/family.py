"""Trains a draft of each method for the same time, and records acceptance and speed as chain and as trees.

    python bench/family.py --target DIR --chats DIR --out bench/results/block.json
    python bench/family.py --target DIR --chats DIR --own FILE.. --draft eagle3 dflash --seconds 240 --out RECORD

`--chats` is a directory with sgd_train, sgd_dev, gsm8k_train and stories (.jsonl files of messages); the last 32
records of the latter two are held out. The drafts are trained one after the other on the same files, each for
`--seconds` seconds: a few steps are timed first, which gives the number of steps. `tokens` are those of the rows that
were trained on, `seconds` the steps' own. With `--own`, they are trained on these files instead, which `fledge
regenerate` wrote; the rows have `data` "own".

Each draft then decodes 32 prompts of each set greedily, with at most `--new` new tokens, as a chain and as trees: one
prompt at a time (`--timed` of them), and 16 together. `tau`, `alpha` and `rounds` are those of all prompts,
`round_ms` and `draft_ms` the time of a round alone and its share of drafting, `tokens_per_s` the speed of one prompt
at a time, without reading it, and `tokens_per_s_16` that of 16 together, with reading them. Engines are prepared
before, so that rounds are captured on a GPU. The mode "none" decodes without a draft. Rows of a record of the same
machine, commit and options are kept, and not measured again.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from fledge.commands import train
from fledge.decode.load import load
from fledge.decode.request import Completion
from fledge.drafts.weights import read_draft_config
from fledge.io.display import ProgressDisplay
from fledge.io.machine import environment
from fledge.measure.metrics import alpha, tau
from fledge.measure.prompts import first_prompt, read_prompts
from fledge.measure.record import check_record_path, write_record

DEPTH, HELD, BATCH, CALIBRATION = 7, 32, 16, 16
SETS = ("sgd_dev", "gsm8k", "stories")
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": dict(method="eagle3"),
    "peagle": dict(method="peagle"),
    "dflash": dict(method="dflash"),
    "dflash causal": dict(method="dflash", block_causal=True),
    "dflash conv": dict(method="dflash", block_conv=True),
    "dflash causal conv": dict(method="dflash", block_causal=True, block_conv=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--own", nargs="*", default=[], help="files that the target wrote, to train on instead")
    parser.add_argument("--work", type=Path, default=Path("runs/family"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/block.json"))
    parser.add_argument("--draft", nargs="*", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--seconds", type=float, nargs="*", default=[60.0, 240.0], help="of training")
    parser.add_argument("--layers", type=int, help="of every draft (default: each method's own)")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="of methods that have one")
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 60, 256], help="of trees, the root included")
    parser.add_argument("--prompts", type=int, default=HELD, help="prompts of each set")
    parser.add_argument("--timed", type=int, default=4, help="prompts of each set that are decoded alone")
    parser.add_argument("--new", type=int, default=64, help="the most new tokens of a prompt")
    parser.add_argument("--row-length", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    split(options)
    target = load(options.target, device=options.device).target
    machine = environment(target.device.type, str(target.dtype).removeprefix("torch."))
    fixed = {name: getattr(options, name) for name in ("layers", "draft_vocab", "nodes", "prompts", "timed", "new")}
    record: dict[str, Any] = {"environment": machine, "options": fixed, "training": [], "rows": []}
    if options.out.is_file() and (found := json.loads(options.out.read_text()))["environment"] == machine:
        record = found if found["options"] == fixed else record
    if not any(row["mode"] == "none" for row in record["rows"]):
        record["rows"] += decoded(options, target, None)
    data = "own" if options.own else "corpus"
    for name in options.draft:
        for seconds in options.seconds:
            case = {"draft": name, "data": data, "asked_seconds": seconds}
            if any(case.items() <= row.items() for row in record["training"]):
                continue
            trained = case | trained_draft(options, name, data, seconds)
            print(trained, flush=True)
            record["rows"] += [case | row for row in decoded(options, target, folder(options, name, data, seconds))]
            record["training"].append(trained)
            write_record(options.out, record)


def split(options: argparse.Namespace) -> None:
    """Splits the data into training files and held-out prompts."""
    data = options.work / "data"
    data.mkdir(parents=True, exist_ok=True)

    def lines(name: str) -> list[str]:
        return (options.chats / f"{name}.jsonl").read_text().splitlines()

    def write(name: str, some: list[str]) -> None:
        (data / f"{name}.jsonl").write_text("\n".join(some) + "\n")

    for name, held in (("gsm8k_train", "gsm8k"), ("stories", "stories_held")):
        write(name, lines(name)[:-HELD])
        write(held, lines(name)[-HELD:])
    write("sgd_train", lines("sgd_train"))
    write("sgd_dev", lines("sgd_dev"))


def prompts_of(name: str, options: argparse.Namespace) -> list[Any]:
    file = options.work / "data" / f"{'stories_held' if name == 'stories' else name}.jsonl"
    return [first_prompt(p) for p in read_prompts(file, options.prompts)]


def folder(options: argparse.Namespace, name: str, data: str, seconds: float) -> Path:
    return options.work / f"{name.replace(' ', '-')}-{data}-{seconds:g}"


def trained_draft(options: argparse.Namespace, name: str, data: str, seconds: float) -> dict[str, Any]:
    """Trains a draft for so many seconds. Returns the facts of its training."""
    out = folder(options, name, data, seconds)
    more = {"layers": options.layers} if options.layers else {}
    more |= {} if DRAFTS[name]["method"] == "dflash" else {"draft_vocab": options.draft_vocab}
    corpus = [str(options.work / "data" / f"{file}.jsonl") for file in ("sgd_train", "gsm8k_train", "stories")]

    def run(steps: int) -> list[dict[str, Any]]:
        shutil.rmtree(out, ignore_errors=True)
        asked = train.TrainOptions(
            target=options.target, data=options.own or corpus, out=str(out), depth=DEPTH, steps=steps, max_length=512,
            row_length=options.row_length, save_every=10**6, eval_tokens=1, device=options.device,
            eval_prompts=str(options.work / "data" / "sgd_dev.jsonl"),
            **DRAFTS[name], **more,
        )  # fmt: skip
        train.run(asked, lambda line: None, ProgressDisplay(quiet=True))
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    first = run(CALIBRATION)
    a_step = statistics.median(m["seconds"] for m in first[CALIBRATION // 2 :])
    steps = run(max(round(seconds / a_step), CALIBRATION))
    return {
        "steps": len(steps), "seconds": sum(m["seconds"] for m in steps), "loss": steps[-1]["loss"],
        "tokens": sum(m["tokens_per_s"] * m["seconds"] for m in steps),
    }  # fmt: skip


def decoded(options: argparse.Namespace, target: Any, run: Path | None) -> list[dict[str, Any]]:
    """The rows of a run's draft; of the target alone without a run."""
    draft, modes, rows = run and str(run / "draft"), [("none", {})], []
    if draft:
        one_pass = read_draft_config(draft).family.one_pass
        tree: dict[str, Any] = dict(mode="tree") if one_pass else dict(mode="tree", width=10)
        modes = [("chain", dict(mode="parallel" if one_pass else "chain"))]
        modes += [(f"tree of {nodes}", tree | dict(nodes=nodes)) for nodes in options.nodes]
    for mode, given in modes:
        engine = load(target, draft, depth=DEPTH, **given) if draft else load(target)
        for batch in (1, BATCH):
            engine.prepare(batch)
        for name in SETS:
            prompts = prompts_of(name, options)
            engine.generate_all(prompts[:BATCH], batch=BATCH, max_new_tokens=8)
            engine.generate(prompts[0], max_new_tokens=8)
            alone = [engine.generate(p, max_new_tokens=options.new) for p in prompts[: options.timed]]
            began = time.perf_counter()
            together = engine.generate_all(prompts, batch=BATCH, max_new_tokens=options.new)
            rows.append({"mode": mode, "set": name} | facts(alone, together, time.perf_counter() - began))
            print(run and run.name, rows[-1], flush=True)
    return rows


def facts(alone: list[Completion], together: list[Completion], seconds_16: float) -> dict[str, Any]:
    """The figures of a row, from the answers to prompts alone and together, and the seconds of the latter."""
    traces, rounds = [c.trace for c in together], [r for c in alone for r in c.trace.rounds]
    seconds = sum(c.trace.t_total - c.trace.t_prefill for c in alone)
    found = {
        "tokens_per_s": sum(len(c.tokens) for c in alone) / seconds,
        "tokens_per_s_16": sum(len(c.tokens) for c in together) / seconds_16,
    }
    if not rounds:
        return found
    return found | {
        "tau": tau(traces), "alpha": alpha(traces), "rounds": sum(len(t.rounds) for t in traces),
        "round_ms": 1e3 * seconds / len(rounds), "draft_ms": 1e3 * sum(r.t_draft for r in rounds) / len(rounds),
    }  # fmt: skip


if __name__ == "__main__":
    main()
