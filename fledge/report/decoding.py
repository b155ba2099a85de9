"""The figures of evaluations by fledge's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fledge.report.draw import INK, MUTED, Figure, Table, bars_from_left, color, drawing, legend, marked, shown, spanned
from fledge.report.read import EvalRecord, mapping, number, numbers_or_none
from fledge.report.training import stacked_bars

LINES = 10  # most records in a figure of lines
INTERVALS = "Whiskers are 95 % intervals over the requests"
ROUND = {"draft_ms": "draft", "verify_ms": "verification", "overhead_ms": "the rest"}


def decoding_figures(records: Sequence[EvalRecord]) -> list[Figure]:
    """All figures of the records."""
    if not records:
        return []
    return [
        alpha(records),
        _dots(
            "tau-decoded", "τ", "tau", "τ, tokens per round", "Tokens committed per round; at 1, drafting is useless. "
            "{} Where intervals are far apart, the difference is more than chance on these prompts.", records,
        ),
        _dots(
            "speedup", "Speedup", "speedup", "times as fast as without a draft", "Tokens per second with the draft "
            "over those without it, in the same run. Left of the line at 1, decoding is faster without the draft. {}",
            sorted(records, key=prompt_set),
        ),
        rounds(records),
    ]  # fmt: skip


def alpha(records: Sequence[EvalRecord]) -> Figure:
    """α by position, with intervals for records with requests."""
    found = [(r, numbers_or_none(r.fields.get("alpha"))) for r in records]
    found = [(r, y) for r, y in found if y]
    title = "Acceptance by position when decoding"
    if not found:
        return Figure("alpha", title, missing="It needs rounds in which something was drafted.")
    spans = [_intervals(r, len(y)) for r, y in found]
    drawn = found[:LINES]

    def plot(axes) -> None:
        for i, (r, y) in enumerate(drawn):
            reached = [k for k, a in enumerate(y) if a is not None]
            x = [k + 1 + 0.06 * (i - (len(drawn) - 1) / 2) for k in reached]
            axes.plot(x, [y[k] for k in reached], **marked(i, r.label))
            for at, k in zip(x, reached, strict=True):
                if spans[i][k]:
                    axes.plot([at, at], spans[i][k], color=color(i), linewidth=1.1)
        axes.set_xlabel("position of the drafted token")
        axes.set_ylabel("acceptance rate α")
        axes.set_ylim(0, 1.03)
        axes.set_xticks(range(1, max(len(y) for _, y in drawn) + 1))
        legend(axes, len(drawn))

    rows = []
    for (r, y), of in zip(found, spans, strict=True):
        rows += [[r.label, str(k), spanned(a, span)] for k, (a, span) in enumerate(zip(y, of, strict=True), 1)]
    left_out = f" Drawn are the first {LINES} of {len(found)}; the table has all." if len(found) > LINES else ""
    caption = (
        "Share of accepted tokens among those drafted after accepted ones. "
        + (f"{INTERVALS}. " if any(map(any, spans)) else "")
        + "A long whisker at the end means that few rounds came so far: do not read it." + left_out
    )  # fmt: skip
    svg = drawing("alpha", plot, height=3.1 + 0.13 * len(drawn))
    return Figure("alpha", title, caption, svg, Table(("record", "position", "α [95 %]"), rows))


def _intervals(record: EvalRecord, count: int) -> Sequence[Any]:
    """The intervals of `count` positions; None for each position if the record's requests do not suffice."""
    from fledge.measure.intervals import alpha_intervals

    try:
        spans = alpha_intervals(record.requests)
    except (KeyError, TypeError, ValueError):  # requests of an incomplete record
        spans = []
    return spans if len(spans) == count else [None] * count


def rounds(records: Sequence[EvalRecord]) -> Figure:
    """The parts of a round beside a token without a draft."""
    title = "Time of a round by part"
    splits = {r.label: mapping(r.fields.get("round")) for r in records}
    keys = (*ROUND, "vanilla_token_ms")
    splits = {k: v for k, v in splits.items() if all(number(v.get(key)) is not None for key in keys)}
    if not splits:
        return Figure("round", title, missing="It needs a record of --batch 1; in a batch, requests share their time.")

    def plot(axes) -> None:
        stacked_bars(axes, {k: {part: max(v[key], 0.0) for key, part in ROUND.items()} for k, v in splits.items()})
        for i, split in enumerate(splits.values()):
            axes.plot([split["vanilla_token_ms"]] * 2, [i - 0.42, i + 0.42], color=INK, linewidth=2.2)
        axes.plot([], [], color=INK, linewidth=2.2, label="a token without a draft")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
        axes.set_xlabel("milliseconds")

    rows = [[label, *(shown(split[k], 2) for k in keys)] for label, split in splits.items()]
    caption = (
        "A mean round: drafting, the target's verification, and everything else; the mark is a token without a draft. "
        "A round pays if it commits more tokens than its bar is longer than the mark."
    )
    table = Table(("record", "draft ms", "verification ms", "rest ms", "token without ms"), rows)
    return Figure("round", title, caption, drawing("round", plot, height=1.75 + 0.42 * len(splits)), table)


def _dots(name: str, what: str, key: str, axis: str, caption: str, records: Sequence[EvalRecord]) -> Figure:
    """A figure of the number `key` (named `what`) of each record, with intervals, explained at {} in `caption`."""
    found = [(r, r.number(key), r.interval(key)) for r in records]
    found = [(r, y, span) for r, y, span in found if y]
    title = f"{what} of each record" if len(records) > 1 else what
    if not found:
        return Figure(name, title, missing="It needs rounds in which something was drafted.")

    def plot(axes) -> None:
        for i, (_, y, span) in enumerate(found):
            if span:
                axes.plot(span, [i, i], color=color(0), linewidth=2)
            axes.plot([y], [i], color=color(0), marker="o", markersize=7)
            axes.annotate(f"{y:.2f}", (y, i), (0, 8), textcoords="offset points", ha="center", fontsize=10)
        axes.axvline(1, color=MUTED, linewidth=1.4, linestyle=(0, (4, 3)))
        bars_from_left(axes, [_row_label(r) for r, _, _ in found])
        axes.margins(x=0.12)
        axes.set_xlabel(axis)

    rows = [[r.label, prompt_set(r) or "–", spanned(y, span)] for r, y, span in found]
    says = f"{INTERVALS}." if any(span for *_, span in found) else ""
    svg = drawing(name, plot, height=1.1 + 0.46 * len(found))
    return Figure(name, title, caption.format(says), svg, Table(("record", "prompts", f"{what} [95 %]"), rows))


def _row_label(record: EvalRecord) -> str:
    prompts = prompt_set(record)
    return record.label if prompts in record.label else f"{record.label} · {prompts}"


def prompt_set(record: EvalRecord) -> str:
    """The name of a record's prompts; empty if not recorded."""
    return str(record.fields.get("prompt_set") or "")
