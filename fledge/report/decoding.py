"""The report of evaluations: reads records of evaluations, and makes the figures and sections of the page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.io.display import escaped
from fledge.io.fields import parse_json
from fledge.measure.metrics import pause_line
from fledge.measure.record import alpha_intervals
from fledge.report import page
from fledge.report.page import Figure, Sections, Table, listed, mapping, number, numbers, shown, spanned

MAX_BYTES = 2**28  # a larger JSON file is no record
REQUIRED = {"tau", "alpha"}  # fields of every record of an evaluation
FEW = 10  # with fewer requests, a result is only a hint
SHOWN_SAMPLES = 6
LINES = 10  # most records in a figure of lines
INTERVALS = "Whiskers are 95 % intervals over the requests"
ROUND = {"draft_ms": "draft", "verify_ms": "verification", "overhead_ms": "the rest"}


@dataclass(frozen=True)
class EvalRecord:
    """A record of an evaluation, by fledge's decoder or of a server (`served`), with a distinct label."""

    label: str
    source: Path
    fields: dict[str, Any]

    @property
    def served(self) -> bool:
        return "endpoint" in self.fields

    def number(self, key: str) -> float | None:
        return number(self.fields.get(key))

    def interval(self, key: str) -> tuple[float, float] | None:
        """An interval [low, high], e.g. of `tau`; None if not recorded."""
        found = numbers(self.fields.get(f"{key}_interval"))
        return (found[0], found[1]) if len(found) == 2 else None

    @property
    def requests(self) -> list[dict[str, Any]]:
        return listed(self.fields.get("requests"))


def read_records(path: Path) -> list[EvalRecord]:
    """The records in a JSON file, at any depth of named objects. Raises ValueError for a file without records."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is no record of fledge eval: it is larger than {MAX_BYTES >> 20} MiB")
    try:
        value = parse_json(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as e:
        raise ValueError(f"{path} is no record of fledge eval, which is JSON: {e}") from None
    found = records_in(value, path)
    if not found:
        raise ValueError(f"{path} is no record of fledge eval: nothing in it has τ (tau) and α (alpha)")
    return found


def records_in(value: Any, source: Path, names: tuple[str, ...] = ()) -> list[EvalRecord]:
    """The records in a parsed file. The label of a record is the names on the path to the record."""
    if not isinstance(value, dict) or len(names) > 8:
        return []
    if value.keys() >= REQUIRED and ("speedup" in value or "endpoint" in value):
        return [EvalRecord(" ".join(names), source, value)]
    return [record for name, inner in value.items() for record in records_in(inner, source, (*names, name))]


def decoding_sections(records: Sequence[EvalRecord]) -> Sections:
    """The sections of the page on the records."""
    own, of_files = [r for r in records if not r.served], {r.source: r for r in records}
    return {
        "targets": [r.fields.get("target") for r in records],
        "headline": [headline(r) for r in own],
        "warnings": [*few_requests(own), *(w for r in own for w in warnings(r))],
        "decoding": decoding_figures(own),
        "results": results(own),
        "pauses": pauses(own),
        "served": served([r for r in records if r.served]),
        "samples": samples(own),
        "origins": [page.origin(r.source.name, r.fields, r.fields.get("fledge")) for r in of_files.values()],
    }


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
    found = [(r, page.numbers_or_none(r.fields.get("alpha"))) for r in records]
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
            axes.plot(x, [y[k] for k in reached], **page.marked(i, r.label))
            for at, k in zip(x, reached, strict=True):
                if spans[i][k]:
                    axes.plot([at, at], spans[i][k], color=page.color(i), linewidth=1.1)
        axes.set_xlabel("position of the drafted token")
        axes.set_ylabel("acceptance rate α")
        axes.set_ylim(0, 1.03)
        axes.set_xticks(range(1, max(len(y) for _, y in drawn) + 1))
        page.legend(axes, len(drawn))

    rows = []
    for (r, y), of in zip(found, spans, strict=True):
        rows += [[r.label, str(k), spanned(a, span)] for k, (a, span) in enumerate(zip(y, of, strict=True), 1)]
    left_out = f" Drawn are the first {LINES} of {len(found)}; the table has all." if len(found) > LINES else ""
    caption = (
        "Share of accepted tokens among those drafted after accepted ones. "
        + (f"{INTERVALS}. " if any(map(any, spans)) else "")
        + "A long whisker at the end means that few rounds came so far: do not read it." + left_out
    )  # fmt: skip
    svg = page.drawing("alpha", plot, height=3.1 + 0.13 * len(drawn))
    return Figure("alpha", title, caption, svg, Table(("record", "position", "α [95 %]"), rows))


def _intervals(record: EvalRecord, count: int) -> Sequence[Any]:
    """The intervals of `count` positions; None for each position if the record's requests do not suffice."""
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
        page.stacked_bars(axes, {k: {part: max(v[key], 0.0) for key, part in ROUND.items()} for k, v in splits.items()})
        for i, split in enumerate(splits.values()):
            axes.plot([split["vanilla_token_ms"]] * 2, [i - 0.42, i + 0.42], color=page.INK, linewidth=2.2)
        axes.plot([], [], color=page.INK, linewidth=2.2, label="a token without a draft")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
        axes.set_xlabel("milliseconds")

    rows = [[label, *(shown(split[k], 2) for k in keys)] for label, split in splits.items()]
    caption = (
        "A mean round: drafting, the target's verification, and everything else; the mark is a token without a draft. "
        "A round pays if it commits more tokens than its bar is longer than the mark."
    )
    table = Table(("record", "draft ms", "verification ms", "rest ms", "token without ms"), rows)
    return Figure("round", title, caption, page.drawing("round", plot, height=1.75 + 0.42 * len(splits)), table)


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
                axes.plot(span, [i, i], color=page.color(0), linewidth=2)
            axes.plot([y], [i], color=page.color(0), marker="o", markersize=7)
            axes.annotate(f"{y:.2f}", (y, i), (0, 8), textcoords="offset points", ha="center", fontsize=10)
        axes.axvline(1, color=page.MUTED, linewidth=1.4, linestyle=(0, (4, 3)))
        page.bars_from_left(axes, [_row_label(r) for r, _, _ in found])
        axes.margins(x=0.12)
        axes.set_xlabel(axis)

    rows = [[r.label, prompt_set(r) or "–", spanned(y, span)] for r, y, span in found]
    says = f"{INTERVALS}." if any(span for *_, span in found) else ""
    svg = page.drawing(name, plot, height=1.1 + 0.46 * len(found))
    return Figure(name, title, caption.format(says), svg, Table(("record", "prompts", f"{what} [95 %]"), rows))


def _row_label(record: EvalRecord) -> str:
    prompts = prompt_set(record)
    return record.label if prompts in record.label else f"{record.label} · {prompts}"


def prompt_set(record: EvalRecord) -> str:
    """The name of a record's prompts; empty if not recorded."""
    return str(record.fields.get("prompt_set") or "")


def headline(r: EvalRecord) -> dict[str, Any]:
    """The main figures of a record, as text."""
    speed, tau = r.number("speedup"), r.number("tau")
    return {
        "label": r.label,
        "speedup": shown(speed) + "×" * (speed is not None),
        "speedup_span": _span(r.interval("speedup"), "×"),
        "tau": shown(tau or None),
        "tau_span": _span(r.interval("tau")),
        "identical": identical(r),
        "differs": bool(r.number("different")),
        "what": measured(r),
    }


def identical(r: EvalRecord) -> str:
    """The number of outputs that are identical to decoding without the draft, as text."""
    same, prompts = r.number("identical"), r.number("prompts")
    return "not compared" if same is None or prompts is None else f"{same:.0f} of {prompts:.0f}"


def measured(r: EvalRecord) -> str:
    """The conditions of a record's measurement, in a line."""
    f, environment = r.fields, mapping(r.fields.get("environment"))
    temperature = number(mapping(f.get("sampling")).get("temperature"))
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}" if temperature is not None else ""
    prompts, new = r.number("prompts"), r.number("max_new_tokens")
    parts = [
        f"{prompts:.0f} answers" if prompts is not None else "",
        f"of up to {new:.0f} tokens" if new is not None else "",
        f"to {f['prompt_set']}" if isinstance(f.get("prompt_set"), str) else "",
    ]
    drafting = " ".join(str(f[k]) for k in ("mode",) if k in f) + (f" of depth {f['depth']}" if "depth" in f else "")
    where = " ".join(str(environment[k]) for k in ("device", "dtype") if k in environment)
    return ", ".join(x for x in (" ".join(p for p in parts if p), kind, drafting.strip(), where) if x)


def warnings(r: EvalRecord) -> list[str]:
    """Sentences about doubts in the figures of a record."""
    found = []
    if different := r.number("different"):
        found.append(
            f"{r.label}: {different:.0f} outputs differ from those without the draft by more than rounding noise. "
            "Decoding is not lossless here; please report it."
        )
    if (stopped := r.number("stopped")) is not None:
        found.append(f"{r.label}: stopped, with {shown(r.number('prompts'), 0)} of {stopped:.0f} answers.")
    tau, speed = r.number("tau"), r.number("speedup")
    if tau and speed and r.number("batch") == 1 and speed > tau:
        found.append(f"{r.label}: a speedup above τ is not possible; something else slowed the baseline down.")
    if (ratio := r.number("baseline_over_transformers")) is not None and ratio < 0.95:
        found.append(
            f"{r.label}: decoding without a draft is slower than transformers' own, so the speedup is too high."
        )
    return found


def few_requests(records: Sequence[EvalRecord]) -> list[str]:
    """A warning that names the records with fewer than FEW requests, if any."""
    counts = [(r, len(r.requests) or r.number("prompts")) for r in records]
    few = [f"{r.label} ({n:.0f})" for r, n in counts if n is not None and n < FEW]
    named = ", ".join(few)
    return [f"Few requests, so that these figures are a hint: {named}."] if few else []


def pauses(records: Sequence[EvalRecord]) -> list[str]:
    """A sentence on each record in which speculation paused for a known reason."""
    shares = [(r, r.number("paused"), str(r.fields.get("pause_reason") or "")) for r in records]
    return [f"{r.label}: {pause_line(n, reason)}" for r, n, reason in shares if n and reason]


def results(records: Sequence[EvalRecord]) -> Table | None:
    """All records in a table."""
    if not records:
        return None
    rows = []
    for r in records:
        amounts = [r.fields.get("mode"), r.fields.get("depth"), r.fields.get("nodes")]
        rows.append([
            r.label, " ".join(str(x) for x in amounts if x is not None), spanned(r.number("tau"), r.interval("tau")),
            shown(r.number("baseline_tokens_per_s"), 0), shown(r.number("tokens_per_s"), 0),
            spanned(r.number("speedup"), r.interval("speedup")), identical(r),
        ])  # fmt: skip
    return Table(
        ("record", "drafting", "τ [95 %]", "tokens/s alone", "with draft", "speedup [95 %]", "identical"), rows
    )


def served(records: Sequence[EvalRecord]) -> Table | None:
    """The records of servers in a table."""
    rows = []
    for r in records:
        own, first, later = (mapping(r.fields.get(k)) for k in ("own", "ttft_ms", "itl_ms"))
        server = mapping(r.fields.get("server"))
        rows.append([
            r.label, " ".join(str(server[k]) for k in ("engine", "version") if server.get(k)) or "–",
            shown(r.number("concurrency"), 0), shown(r.number("tau")), shown(number(own.get("tau"))),
            shown(r.number("tokens_per_s"), 0), shown(r.number("speedup")),
            shown(number(first.get("median")), 1), shown(number(later.get("median")), 2),
        ])  # fmt: skip
    columns = (
        "record", "server", "in flight", "τ", "τ of fledge", "tokens/s", "speedup", "first token ms", "later ms"
    )  # fmt: skip
    return Table(columns, rows) if rows else None


def samples(records: Sequence[EvalRecord]) -> list[dict[str, Any]]:
    """At most SHOWN_SAMPLES sample answers, in pieces with the proposer of each piece; the records take turns."""
    turns = itertools.zip_longest(*(filter(None, map(_sample, listed(r.fields.get("samples")))) for r in records))
    labels = [r.label for r in records]
    found = [{"label": label, **s} for turn in turns for label, s in zip(labels, turn, strict=True) if s]
    return found[:SHOWN_SAMPLES]


def _sample(value: Any) -> dict[str, Any] | None:
    """The prompt, the pieces and the drafted share of a sample answer; None if the value is no sample."""
    try:
        pieces = [(escaped(text, keep="\n\t"), int(proposer)) for text, proposer in value["pieces"]]
        drafted = sum(proposer > 0 for _, proposer in pieces) / max(len(pieces), 1)
        return {"prompt": escaped(value["prompt"], keep="\n\t"), "pieces": pieces, "drafted": f"{drafted:.0%}"}
    except (KeyError, TypeError, ValueError):
        return None


def _span(found: tuple[float, float] | None, unit: str = "") -> str:
    return f"{found[0]:.2f} to {found[1]:.2f}{unit}" if found else ""
