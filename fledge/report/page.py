"""Puts figures on one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fledge.io.display import escaped
from fledge.io.files import check_output_path, replace_text
from fledge.report.decoding import decoding_figures
from fledge.report.draw import Table, shown, spanned
from fledge.report.read import EvalRecord, Material, Run, mapping, material_of, number, read
from fledge.report.training import training_figures

NAME = "report.html"
MARK = '<meta name="generator" content="fledge report">'
FEW = 10  # with fewer requests, a result is only a hint
SHOWN_SAMPLES = 6
SCALE = 6  # colours of depths


def check_report_path(path: str | Path, flag: str) -> Path:
    """Checks that a report can be written at `path`. Raises ValueError, naming the option `flag`, if the path cannot be
    written, or has a file that is no report of fledge."""
    path = check_output_path(path, flag)
    if path.exists() and path.stat().st_size:
        with path.open(encoding="utf-8", errors="replace") as file:
            if MARK not in file.read(2000):
                raise ValueError(
                    f"{flag} {path} exists and is no report of fledge, so it is not replaced; choose another"
                )
    return path


def write_report(material: Material, out: str | Path) -> None:
    """Writes the report of the material. Raises ValueError if the file at `out` is no report of fledge."""
    out = check_report_path(out, "the report")
    page = render(material)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page)


def render(material: Material) -> str:
    """The page of a report as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("fledge.report", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["svg"] = Markup  # fledge's own drawings; matplotlib has escaped the texts
    own = [r for r in material.records if not r.served]
    return environment.get_template("report.html").render(
        mark=Markup(MARK),
        title=title(material),
        headline=[headline(r) for r in own],
        training_line=training_line(material.runs),
        notes=material.notes,
        warnings=[*few_requests(own), *(w for r in own for w in warnings(r))],
        decoding=decoding_figures(own),
        training=training_figures(material.runs),
        results=results(own),
        pauses=pauses(own),
        served=served([r for r in material.records if r.served]),
        samples=samples(own),
        vocabulary=[v for run in material.runs if (v := vocabulary(run))],
        runs=material.runs,
        origins=[origin(x) for x in (*material.runs, *{r.source: r for r in material.records}.values())],
        recipes=recipes(material.runs),
        scale=SCALE,
    )


def title(material: Material) -> str:
    """The title of the page, with the target's name if all runs and records have the same target."""
    targets = {str(x) for run in material.runs if (x := run.summary.get("target") or run.recipe.get("target"))}
    targets |= {str(x) for r in material.records if (x := r.fields.get("target"))}
    names = {Path(t).name for t in targets}
    return f"Drafts for {names.pop()}" if len(names) == 1 else "Drafts"


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
    from fledge.measure.metrics import pause_line

    shares = [(r, r.number("paused"), str(r.fields.get("pause_reason") or "")) for r in records]
    return [f"{r.label}: {pause_line(n, reason)}" for r, n, reason in shares if n and reason]


def training_line(runs: Sequence[Run]) -> list[str]:
    """A sentence on each run."""
    lines = []
    for run in runs:
        steps = run.steps[-1]["step"]
        planned = number(mapping(run.recipe.get("settled")).get("steps")) or number(run.recipe.get("steps"))
        of = f" of {planned:,.0f}: still training, or stopped" if planned and planned > steps else ""
        decoded = run.series("eval_tau")[1]
        last = f"; highest decoded τ {max(decoded):.2f}" if decoded else ""
        room, tokens = run.total("room"), run.total("tokens")
        packed = f"; {tokens / room:.0%} of the room in rows is used" if room else ""
        packed += f", {run.total('supervised') / tokens:.0%} of the tokens are supervised" if tokens else ""
        lines.append(f"{run.name}: {steps:,} steps{of}, {run.total('seconds') / 60:,.1f} minutes{last}{packed}.")
    return lines


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
    turns = itertools.zip_longest(*(filter(None, map(_sample, _listed(r.fields.get("samples")))) for r in records))
    labels = [r.label for r in records]
    found = [{"label": label, **s} for turn in turns for label, s in zip(labels, turn, strict=True) if s]
    return found[:SHOWN_SAMPLES]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _sample(value: Any) -> dict[str, Any] | None:
    """The prompt, the pieces and the drafted share of a sample answer; None if the value is no sample."""
    try:
        pieces = [(escaped(text, keep="\n\t"), int(proposer)) for text, proposer in value["pieces"]]
        drafted = sum(proposer > 0 for _, proposer in pieces) / max(len(pieces), 1)
        return {"prompt": escaped(value["prompt"], keep="\n\t"), "pieces": pieces, "drafted": f"{drafted:.0%}"}
    except (KeyError, TypeError, ValueError):
        return None


def vocabulary(run: Run) -> dict[str, Any] | None:
    """The coverage of a run's draft vocabulary, and the words that the vocabulary lacks; None if not recorded."""
    v = mapping(run.summary.get("vocabulary"))
    coverage = number(v.get("coverage"))
    if coverage is None:
        return None
    missing = v.get("missing")
    words = [
        (escaped(str(m["text"]), keep="\n\t").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣"), f"{count:,.0f}")
        for m in _listed(missing)
        if isinstance(m, dict) and "text" in m and (count := number(m.get("count"))) is not None
    ]
    size, target_size = number(v.get("size")), number(v.get("target_size"))
    return {"run": run.name, "coverage": coverage, "words": words, "size": shown(size, 0), "of": shown(target_size, 0)}


def origin(x: Run | EvalRecord) -> dict[str, Any]:
    """Command, versions and machine of a run or a record."""
    fields = x.summary if isinstance(x, Run) else x.fields
    command = fields.get("command")
    facts = {**mapping(fields.get("environment")), **mapping(fields.get("versions"))}
    if isinstance(x, Run):
        facts |= {"fledge": x.recipe["fledge_version"]} if "fledge_version" in x.recipe else {}
    elif "fledge" in fields:
        facts["fledge"] = fields["fledge"]
    words = [str(word) for word in command] if isinstance(command, list) else []
    facts = {k: str(v) for k, v in facts.items() if v is not None}
    return {"name": x.name if isinstance(x, Run) else x.source.name, "command": shlex.join(words), "facts": facts}


def recipes(runs: Sequence[Run]) -> Table | None:
    """The options of the runs side by side, with differing options first."""
    flat = [
        {k: v for k, v in run.recipe.items() if k != "settled"} | mapping(run.recipe.get("settled")) for run in runs
    ]
    keys = list(dict.fromkeys(k for options in flat for k in options))
    if not keys:
        return None
    rows = [[str(k), *(_option(options.get(k)) for options in flat)] for k in keys]
    if len(runs) > 1:
        rows = [[("≠ " if len(set(row[1:])) > 1 else "") + row[0], *row[1:]] for row in rows]
        rows.sort(key=lambda row: not row[0].startswith("≠"))
    return Table(("option", *(run.name for run in runs)), rows)


def _option(value: Any) -> str:
    return "–" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _span(found: tuple[float, float] | None, unit: str = "") -> str:
    return f"{found[0]:.2f} to {found[1]:.2f}{unit}" if found else ""


def report_record(record: dict[str, Any], out: str) -> None:
    """Draws the report of a new record of `fledge eval`."""
    write_report(material_of(record, Path(out).with_suffix("")), out)


def report_run(directory: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a complete run beside its metrics."""
    _draw_beside(directory, directory / NAME, say)


def report_file(record: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a record of `fledge eval --out` beside the record: record.html for record.json."""
    _draw_beside(record, record.with_name(f"{record.stem}.html"), say)


def _draw_beside(source: Path, out: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a source. A failure gives a message and no exception: the measured work is done, and `fledge
    report` can draw the report again."""
    try:
        write_report(read([source]), out)
    except Exception as e:
        say(f"the report {out} was not drawn ({type(e).__name__}: {e}); try fledge report {source}")
    else:
        say(f"its report is {out}")
