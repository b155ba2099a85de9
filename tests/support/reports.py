"""Runs and records of evaluations as `fledge train` and `fledge eval` write them, with figures that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECIPE = "fledge_version: 0.1.0\ntarget: my-target\nlr: 0.002\ndepth: 3\nsettled:\n  steps: {steps}\n"
ENVIRONMENT = {
    "device": "A processor", "dtype": "float32", "cores": 2, "threads": 2, "python": "3.11", "torch": "2.13",
    "transformers": "5.23", "commit": "abc",
}  # fmt: skip


def write_run(path: Path, *, steps: int = 120, words: tuple[str, ...] = ("straße", "<b>")) -> Path:
    """A run's directory."""
    path.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        share = step / steps
        metrics: dict[str, Any] = {
            "step": step, "loss": 8 - 5 * share, "tau": 1 + share, "accept": [0.6 * share, 0.5 * share, 0.4 * share],
            "lr": 1e-3 * share, "grad_norm": 2.0, "seconds": 0.1, "tokens_per_s": 5000.0 + step % 7,
        }  # fmt: skip
        parts = {"data": 0.01, "target": 0.03, "draft": 0.05, "optimizer": 0.01}
        metrics |= {"tokens": 480, "room": 512, "supervised": 240, "parts": parts, "peak_gib": 1.5}
        if step % (steps // 4) == 0:
            metrics["eval_tau"] = 1.1 + share
        lines.append(json.dumps(metrics))
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (path / "recipe.yaml").write_text(RECIPE.format(steps=steps))
    missing = [{"token": i, "text": text, "count": 50 - i} for i, text in enumerate(words)]
    vocabulary = {"size": 1280, "target_size": 4096, "coverage": 0.93, "missing": missing}
    summary = {"command": ["fledge", "train", "--out", "a run"], "versions": {"fledge": "0.1.0"},
               "environment": ENVIRONMENT, "target": "my-target", "vocabulary": vocabulary}  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def record(*, requests: int = 12, **fields: Any) -> dict[str, Any]:
    """A record of an evaluation; `fields` replace some of it."""
    pieces = [["def", 0], [" f(x):\n\t", 1], ["return <x>", 2], ["\x1b[31m", 9], [" & more", 0]]
    found: dict[str, Any] = {
        "tau": 2.5, "alpha": [0.8, 0.7], "tokens_per_s": 60.0, "baseline_tokens_per_s": 40.0, "speedup": 1.5,
        "tau_interval": [2.25, 2.75], "speedup_interval": [1.25, 1.75],
        "identical": requests, "near_ties": 0, "different": 0, "prompts": requests, "batch": 1, "mode": "chain",
        "depth": 2, "max_new_tokens": 64, "sampling": {"temperature": 0.0}, "target": "my-target",
        "round": {"draft_ms": 2.0, "verify_ms": 5.0, "overhead_ms": 0.5, "vanilla_token_ms": 4.0},
        "environment": ENVIRONMENT, "prompt_set": "prompts", "command": ["fledge", "eval", "--out", "x.json"],
        "fledge": "0.1.0", "samples": [{"prompt": "<script>alert(1)</script>", "pieces": pieces}],
        "requests": [
            {"tokens": 60 + i, "rounds": 24, "committed": 55 + i, "drafted": 48, "reached": [24, 18 + i % 3],
             "passed": [18 + i % 3, 12], "seconds": 1.0, "baseline_seconds": 1.5}
            for i in range(requests)
        ],
    }  # fmt: skip
    return found | fields


def write_records(path: Path, records: dict[str, Any]) -> Path:
    path.write_text(json.dumps(records))
    return path


def sweep() -> dict[str, Any]:
    """Records of three depths and two sizes of trees."""
    chains = {f"depth {d}": record(depth=d, tau=1.5 + d / 5, speedup=1 + d / 20) for d in (1, 3, 5)}
    trees = {f"tree {n} nodes": record(mode="tree", depth=4, nodes=n, tau=2 + n / 30) for n in (8, 30)}
    return chains | trees
