"""Writes the result of a run of `fledge demo` into bench/results/demo.json, and into the tables of the pages.

python tools/demo_tables.py build/demo/result.json
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "results" / "demo.json"
PAGES = ("README.md", "docs/benchmarks.md")
HEADER = (
    "| `make demo`, two CPU cores | τ | tokens/s alone | with the draft | speedup | identical |\n"
    "|---|---|---|---|---|---|\n"
)
DRAFTS = {"shipped": "the draft that ships", "trained": "the draft it trains"}
WAYS = {"greedy": "greedy", "sampled": "temperature 1"}


def rows(results: dict[str, Any]) -> str:
    """The rows of the table, one for each draft and temperature."""
    lines = []
    for way, temperature in WAYS.items():
        for draft, title in DRAFTS.items():
            r = results[f"{draft}, {way}"]
            low, high = r["speedup_interval"]
            lines.append(
                f"| {title}, {temperature} | {r['tau']:.2f} ± {r['tau_interval'][1] - r['tau']:.2f} "
                f"| {r['baseline_tokens_per_s']:.0f} | {r['tokens_per_s']:.0f} "
                f"| {r['speedup']:.2f} ({low:.2f} to {high:.2f}) | {r['identical']} of {r['prompts']} |\n"
            )
    return "".join(lines)


def main() -> None:
    shutil.copyfile(sys.argv[1], RECORD)
    new = rows(json.loads(RECORD.read_text(encoding="utf-8"))["results"])
    for name in PAGES:
        page = ROOT / name
        text = re.sub(rf"(?<={re.escape(HEADER)})(\|.*\n)*", new, page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
