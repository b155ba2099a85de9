"""The output of `fledge eval` for records: a table, and sentences that explain the figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from fledge.decode.options import AUTO
from fledge.io.results import ResultPrinter
from fledge.measure.endpoint import TOLERANCE, mismatch_sentence
from fledge.measure.metrics import alpha_text, pause_line

WORTH_TRYING = 1.03  # smallest suggested gain over the measured depth; smaller gains are within the noise of the times
FEW = 6  # up to so many records, every record gets all sentences


def print_table(record: dict[str, Any], printer: ResultPrinter) -> None:
    """Prints a table with one row per record, and a summary of each record. A narrow table omits columns, but never τ.
    For more than FEW records, the summaries have only the `notices`."""
    records = {"": record} if "tau" in record else record
    rows = records.items()
    widths = [half_width(r) for r in records.values()]
    columns = {
        "prompts": [f"{name} {r['prompts']}".strip() for name, r in rows],
        "τ": [f"{r['tau']:.2f}" if r["tau"] else "-" for _, r in rows],
        "±": ["-" if width is None else f"{width:.2f}" for width in widths],
        "tokens/s": [f"{r['tokens_per_s']:.0f}" for _, r in rows],
        "baseline": [f"{r['baseline_tokens_per_s']:.0f}" for _, r in rows],
        "speedup": [f"{r['speedup']:.2f}x" for _, r in rows],
        "identical": ["-" if r["identical"] is None else f"{r['identical']}/{r['prompts']}" for _, r in rows],
        "repeats": [f"{r['repeated_8grams']:.0%}" for _, r in rows],
    }
    if all(width is None for width in widths):
        del columns["±"]
    optional = [c for c in ("repeats", "identical", "±", "baseline", "tokens/s", "speedup") if c in columns]
    omitted = printer.table(columns, optional=optional)
    few = len(records) <= FEW
    of = {name: [*(figure_lines(r) if few else ()), *notices(r)] for name, r in rows}
    if "baseline" in omitted:
        of = {name: [speed_line(records[name]), *lines] for name, lines in of.items()}
    shared = [] if few else [line for line in next(iter(of.values())) if all(line in lines for lines in of.values())]
    _print_lines({name: [line for line in lines if line not in shared] for name, lines in of.items()}, printer)
    if not few:
        shared.append("α by position and the parts of a round are in the record: --json prints it, --out keeps it.")
    _print_lines({"": shared}, printer)


def _print_lines(of: dict[str, list[str]], printer: ResultPrinter) -> None:
    """Prints the sentences on each record, with the record's name."""
    for name, lines in of.items():
        for line in lines:
            printer.print(f"{name}: {line}" if name else line)


def half_width(r: dict[str, Any]) -> float | None:
    """The half width of τ's 95 % interval, above τ, since the lower end is cut at 1; None without an interval."""
    interval = r["tau_interval"]
    return interval[1] - r["tau"] if interval else None


def speed_line(r: dict[str, Any]) -> str:
    return (
        f"{r['tokens_per_s']:.0f} tokens/s with the draft, {r['baseline_tokens_per_s']:.0f} without: "
        f"{r['speedup']:.2f} times as fast."
    )


def figure_lines(r: dict[str, Any]) -> list[str]:
    """Sentences with figures that the table does not have."""
    lines = ["Every answer ended with its first token, before the first round of drafting: there is no τ."]
    if r["tau"]:
        lines = [f"α by position: {alpha_text(r['alpha'])}."]
    if r["tau"] and r["round"]:
        lines += round_lines(r)
    if "auto" in (r.get("depth"), r.get("nodes")):
        lines.append(pause_line(r["paused"], r["pause_reason"]))
    return lines


def round_lines(r: dict[str, Any]) -> list[str]:
    """Sentences on a record at batch 1: the parts of the time of a round, and the change that would gain most."""
    drafting, verification, rest, token = (
        r["round"][part] for part in ("draft_ms", "verify_ms", "overhead_ms", "vanilla_token_ms")
    )
    total = drafting + verification + rest
    lines = [
        f"A round takes {total:.2f} ms: drafting {drafting / total:.0%}, verification {verification / total:.0%}, the "
        f"rest {max(rest, 0) / total:.0%}. It commits {r['tau']:.2f} tokens in the time of {total / token:.2f} tokens "
        f"without the draft ({token:.2f} ms each)."
    ]
    gains = {}
    if r["mode"] == "chain" and r["depth"] != AUTO and not r["confidence"]:
        gains = chain_gains(r["alpha"], r["depth"], drafting, verification + rest)
    best = max(gains, key=gains.__getitem__, default=None)
    if best and gains[best] >= WORTH_TRYING:
        lines.append(
            f"By these times and α, --depth {best} instead of {r['depth']} would be {gains[best] - 1:.0%} faster."
        )
    elif r["speedup"] < 1:
        lines.append("The draft does not pay here: with --depth auto, nothing is drafted where that is faster.")
    elif drafting > verification:
        lines.append("Most would be gained by faster drafting: fledge train makes smaller drafts with --draft-vocab.")
    elif rest > verification:
        lines.append("Most would be gained outside the models: see whether other programs load the processor.")
    elif r["mode"] == "tree" and verification > 1.5 * token:
        lines.append("Most would be gained by faster verification: compare with fewer --tree-nodes.")
    else:
        lines.append(
            "Most would be gained by more accepted tokens: train the draft for longer, on the target's own answers"
            + (", or compare with --draft-mode tree." if r["mode"] == "chain" else ".")
        )
    return lines


def chain_gains(alpha: Sequence[float | None], depth: int, draft: float, others: float) -> dict[int, float]:
    """The speed with chains of each length up to `depth` + 2, relative to `depth`, estimated at `depth`.

    `draft` and `others` are the measured times of drafting and of the rest of a mean round, in the same unit. Drafting
    time is taken in proportion to the length, the rest as constant, and α beyond `depth` as equal to the last α.
    """
    rates = [a or 0.0 for a in alpha[:depth]]
    reached = list(accumulate([*rates, *rates[-1:] * 2], mul))
    speeds = {k: (1 + sum(reached[:k])) / (draft * k / depth + others) for k in range(1, len(reached) + 1)}
    return {k: speed / speeds[depth] for k, speed in speeds.items()} if len(rates) == depth else {}


def notices(r: dict[str, Any]) -> list[str]:
    """Sentences on the reliability of the figures: differing outputs, and disturbances of the measurement."""
    lines = []
    if "stopped" in r:
        lines.append(f"Stopped after {r['prompts']} of {r['stopped']} answers.")
    if r["identical"] is None:
        lines.append(
            "Outputs are not compared: with --draft-sampling sample, the distribution is the target's, but the tokens "
            "drawn differ."
        )
    elif r["different"]:
        lines.append(
            f"{r['different']} outputs DIFFER by more than the rounding noise between batch shapes "
            f"({r['batch_noise']:.2g})."
        )
    elif r["near_ties"]:
        lines.append(
            f"{r['near_ties']} outputs differ where the scores of two tokens are closer than the rounding noise "
            f"between batch shapes ({r['batch_noise']:.2g}); the others are identical, token for token."
        )
    else:
        lines.append("Every output is identical, token for token.")
    if r["batch"] > 1:
        lines.append(
            f"{r['batch']} prompts were decoded together, with the draft and without; only --batch 1 is compared with "
            "the generate method of transformers and shows the time of each part of a round."
        )
    if r["batch"] == 1 and 0 < r["tau"] < r["speedup"]:
        lines.append("A speedup above τ is not possible: something else slowed the baseline down. Measure again.")
    if "baseline_over_transformers" in r:
        ratio = r["baseline_over_transformers"]
        lines.append(f"The baseline runs at {ratio:.2f} times the speed of transformers' own generate.")
        if ratio < 0.95:
            lines.append("That is below 0.95, so the speedup is not meaningful.")
    return lines


def print_server_table(record: dict[str, Any], printer: ResultPrinter) -> None:
    """Prints a table with one row per record, and a summary of each. A narrow table omits columns, but never τ."""
    records = {"": record} if "tau" in record else record
    rows = records.values()
    columns = {
        "prompts": [f"{name} {r['prompts']}".strip() for name, r in records.items()],
        "τ": [_number(r["tau"]) for r in rows],
        "τ fledge": [_number(r["own"]["tau"]) if r["own"] else "-" for r in rows],
        "tokens/s": [_number(r["tokens_per_s"], 0) for r in rows],
        "speedup": [_number(r["speedup"]) + "x" * bool(r["speedup"]) for r in rows],
        "first token ms": [_number(r["ttft_ms"] and r["ttft_ms"]["median"], 1) for r in rows],
        "later ms": [_number(r["itl_ms"] and r["itl_ms"]["median"], 2) for r in rows],
        "identical": ["-" if r["identical"] is None else f"{r['identical']}/{r['requests']}" for r in rows],
    }
    printer.table(columns, optional=("identical", "later ms", "first token ms", "speedup", "tokens/s", "τ fledge"))
    _print_lines({name: server_lines(r) for name, r in records.items()}, printer)


def server_lines(r: dict[str, Any]) -> list[str]:
    """Sentences that explain the figures of a server's record."""
    lines = []
    if r["tau"]:
        lines.append(f"τ is from {r['counted']['source']}: {r['counted']['rounds']:,.0f} verifications.")
    else:
        lines.append(f"There is no τ: {r['note']}.")
    if r["alpha"]:
        lines.append(f"α by position: {alpha_text(r['alpha'])}.")
    elif r["tau"]:
        lines.append("There is no α by position: the server does not count it.")
    if own := r["own"]:
        lines.append(f"fledge's decoder on the same prompts: τ {own['tau']:.2f}, α {alpha_text(own['alpha'])}.")
        if r["tau"] and own["tau"]:
            lines.append(f"The server's τ differs from it by {r['tau'] / own['tau'] - 1:+.1%}.")
    if r["tokens_per_s"] is None:
        lines.append("There are no tokens/s: the server does not count the tokens of its answers.")
    if r["causes"]:
        lines += [f"τ differs by more than {TOLERANCE:.0%}. What is known to cause it:", *r["causes"]]
    elif sentence := mismatch_sentence(r):
        lines.append(sentence)
    if r["identical"] is not None:
        lines.append(
            f"{r['identical']} of {r['requests']} answers are those of the server without a draft, by {r['compared']}."
        )
    return lines


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if not value else f"{value:,.{digits}f}"
