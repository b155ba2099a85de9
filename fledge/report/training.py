"""The report of training runs: reads the files of runs, and makes the figures and sections of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fledge.io.display import escaped
from fledge.io.fields import parse_json
from fledge.report import page
from fledge.report.page import Figure, Sections, Table, listed, mapping, number, numbers, shown

NAME = "report.html"
METRICS = {  # fields of every step of a run
    "step", "loss", "accept", "lr", "grad_norm", "tokens", "supervised", "room", "parts", "seconds", "tokens_per_s",
}  # fmt: skip
PARTS = {
    "data": "waiting for data", "target": "target", "draft": "draft", "optimizer": "optimizer", "save": "saving",
    "eval": "measuring τ",
}  # fmt: skip
POINTS = 600  # most points of a line on the page


@dataclass(frozen=True)
class RunRecord:
    """A training run: the metrics of the steps, the options by name (`recipe`), and the summary (maybe empty)."""

    name: str
    path: Path
    steps: list[dict[str, Any]]
    recipe: dict[str, Any]
    summary: dict[str, Any]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have the number `key`, and the numbers."""
        found = [(int(s["step"]), number(s.get(key))) for s in self.steps]
        return [step for step, y in found if y is not None], [y for _, y in found if y is not None]

    def total(self, key: str) -> float:
        """The sum of the number `key` over the steps."""
        return sum(self.series(key)[1])

    def columns(self, key: str) -> tuple[list[int], list[list[float]]]:
        """The steps whose `key` is a list of numbers with the same length as in the last step, and the lists."""
        found = [(int(s["step"]), numbers(s.get(key))) for s in self.steps]
        width = len(found[-1][1]) if found else 0
        kept = [(step, row) for step, row in found if width and len(row) == width]
        return [step for step, _ in kept], [row for _, row in kept]


def read_run(path: Path, notes: list[str]) -> RunRecord:
    """The run in a directory; omissions are added to `notes`. A run that is being written can be read."""
    metrics, recipe = path / "metrics.jsonl", path / "recipe.yaml"
    if not metrics.exists() and not recipe.exists():
        raise ValueError(f"{path} is no run of fledge train: it has neither metrics.jsonl nor recipe.yaml")
    steps, bad = [], 0
    for line in _text(metrics).splitlines() if metrics.exists() else ():
        if not line.strip():
            continue
        value = _parsed(line)
        if isinstance(value, dict) and value.keys() >= METRICS and isinstance(value["step"], int):
            steps.append(value)
        else:
            bad += 1
    if bad:
        notes.append(f"{metrics}: {bad} incomplete lines are left out. A run that still trains may be writing one.")
    options = _options(_text(recipe)) if recipe.exists() else {}
    found = _parsed(_text(path / "summary.json")) if (path / "summary.json").exists() else {}
    return RunRecord(path.resolve().name, path, steps, options, mapping(found))


def report_run(directory: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a complete run beside its metrics."""
    notes: list[str] = []
    page.write_beside(
        directory, directory / NAME, lambda: training_sections([read_run(directory, notes)]) | {"notes": notes}, say
    )


def training_sections(runs: Sequence[RunRecord]) -> Sections:
    """The sections of the page on the runs."""
    return {
        "targets": [run.summary.get("target") or run.recipe.get("target") for run in runs],
        "runs": runs,
        "training_line": training_line(runs),
        "training": training_figures(runs),
        "vocabulary": [v for run in runs if (v := vocabulary(run))],
        "origins": [page.origin(run.name, run.summary, run.recipe.get("fledge_version")) for run in runs],
        "recipes": recipes(runs),
    }


def training_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """All figures of the runs."""
    if not runs:
        return []
    smoothing = _smoothing(runs)
    memory = [("peak_gib", "peak memory, GiB")] if any(run.series("peak_gib")[1] for run in runs) else []
    return [
        _lines(
            "loss", "Loss over training", f"Mean loss of the scored slots of a step. {smoothing} Read the slope: a "
            "line that is still falling at the end has not had enough steps; one that rises or jumps asks for a lower "
            "learning rate.", runs, [("loss", "loss")],
        ),
        tau(runs),
        acceptance(runs),
        _lines(
            "schedule", "Learning rate and gradient norm", f"The gradient norm is that before clipping. {smoothing} A "
            "norm that keeps rising, or peaks with the learning rate, asks for a lower --lr.", runs,
            [("lr", "learning rate"), ("grad_norm", "gradient norm")],
        ),
        step_parts(runs),
        _lines(
            "speed", "Training speed", f"Tokens without filler. {smoothing} Dips are other work of the machine, or "
            "waiting for data. Memory is recorded on GPUs only.", runs, [("tokens_per_s", "tokens/s"), *memory],
        ),
    ]  # fmt: skip


def tau(runs: Sequence[RunRecord]) -> Figure:
    """Simulated τ, and decoded τ if measured."""
    # with a cod rate, the metrics have only the mean over trained slots
    keys = {run.name: "tau" if run.series("tau")[1] else "tau_slots" for run in runs}

    def plot(axes) -> None:
        for i, run in enumerate(runs):
            x, y = run.series(keys[run.name])
            axes.plot(*thinned(x, smoothed(y)), **page.style(i, f"{run.name}, simulated"))
            x, y = run.series("eval_tau")
            if y:
                axes.plot(x, y, **page.marked(i, f"{run.name}, decoded") | {"linestyle": "-", "linewidth": 0.8})
        axes.set_xlabel("step")
        axes.set_ylabel("τ, tokens per round")
        page.legend(axes, 2 * len(runs))

    caption = (
        "1 means that no drafted token is accepted. Line: simulated on the training rows. "
        f"{_smoothing(runs, faint=False)} Markers: decoded on held-out prompts, which is what counts. Decoded far "
        "below simulated means that the target's own text differs from the training data: train on answers of the "
        "target (fledge regenerate)."
    )
    svg = page.drawing("tau", plot, height=3.1 + 0.16 * len(runs))
    return Figure("tau", "Tokens per round (τ) over training", caption, svg)


def acceptance(runs: Sequence[RunRecord]) -> Figure:
    """Acceptance by position: all positions of a single run, or the first position of several runs."""
    data = {run.name: run.columns("accept") for run in runs}

    def plot(axes) -> None:
        for i, (name, (steps, rows)) in enumerate(data.items()):
            for k in range(len(rows[0]) if rows and len(data) == 1 else min(1, len(rows))):
                looks = page.style(i, name)
                if len(data) == 1:
                    looks = {"color": page.depth_color(k, len(rows[0])), "linestyle": "-", "label": f"position {k + 1}"}
                axes.plot(*thinned(steps, smoothed([row[k] for row in rows])), **looks)
        axes.set_xlabel("step")
        axes.set_ylabel("acceptance rate α")
        axes.set_ylim(0, 1)
        page.legend(axes, len(axes.lines))

    title = "Acceptance over training" if len(runs) == 1 else "Acceptance of the first drafted token over training"
    caption = (
        "How much of the target's distribution the draft covers at each drafted token. "
        + f"{_smoothing(runs, faint=False)} "
        + ("Positions go from dark to light. " if len(runs) == 1 else "")
        + "It falls with the position, since the draft continues from its own tokens; a steep fall asks for training "
        "with more --depth."
    )
    return Figure("acceptance", title, caption, page.drawing("acceptance", plot, height=3.1 + 0.1 * len(runs)))


def step_parts(runs: Sequence[RunRecord]) -> Figure:
    """The mean time of a step by part."""
    means = {run.name: _mean_parts(run) for run in runs}

    def plot(axes) -> None:
        page.stacked_bars(axes, {name: {PARTS[k]: 1e3 * v for k, v in found.items()} for name, found in means.items()})
        axes.set_xlabel("milliseconds per step")

    rows = [[name, PARTS[k], shown(1e3 * v, 2)] for name, found in means.items() for k, v in found.items()]
    caption = (
        "Mean over all steps, of the first process. Saving and measuring τ, in few steps, are spread over all. "
        "Much waiting for data: more --data-workers or a faster disk. Mostly target: store its hidden states once "
        "(fledge features)."
    )
    svg = page.drawing("step-parts", plot, height=1.5 + 0.42 * len(means))
    return Figure("step-parts", "Time of a step by part", caption, svg, Table(("run", "part", "ms per step"), rows))


def _lines(name: str, title: str, caption: str, runs: Sequence[RunRecord], panels: Sequence[tuple[str, str]]) -> Figure:
    """A figure with a smoothed line for each run, and a panel for each of (key, axis label)."""

    def plot(*all_axes) -> None:
        for axes, (key, label) in zip(all_axes, panels, strict=True):
            for i, run in enumerate(runs):
                x, y = run.series(key)
                if len(runs) == 1 and len(y) > 1 and key != "lr":
                    axes.plot(*thinned(x, y), color=page.color(0), linewidth=0.6, alpha=0.3)
                # a mean of learning rates would be a value that no step used
                shape = y if key in ("lr", "peak_gib") else smoothed(y)
                axes.plot(*thinned(x, shape), **page.style(i, run.name))
            axes.set_ylabel(label)
        all_axes[-1].set_xlabel("step")
        page.legend(all_axes[0], len(runs))

    svg = page.drawing(name, plot, panels=len(panels), height=1.6 + 1.4 * len(panels) + 0.1 * len(runs))
    return Figure(name, title, caption, svg)


def smoothing_window(steps: int) -> int:
    """The number of steps in each mean of a smoothed line."""
    return max(1, steps // 20)


def smoothed(y: Sequence[float]) -> list[float]:
    """For each value, the mean of the last `smoothing_window` values up to the value; of fewer values at the start."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - smoothing_window(len(y)))
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def thinned(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """About `points` points of a series: the smallest and the largest value of each of points / 2 equal parts."""
    if len(x) <= points:
        return list(x), list(y)
    kept: set[int] = {0, len(x) - 1}
    values = np.asarray(y)
    for part in np.array_split(np.arange(len(x)), points // 2):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    order = sorted(kept)
    return [x[i] for i in order], [float(y[i]) for i in order]


def _mean_parts(run: RunRecord) -> dict[str, float]:
    found = [mapping(step.get("parts")) for step in run.steps]
    found = [parts for parts in found if parts]
    means = {key: sum(number(parts.get(key)) or 0.0 for parts in found) / max(len(found), 1) for key in PARTS}
    return {key: mean for key, mean in means.items() if mean > 0}


def _smoothing(runs: Sequence[RunRecord], *, faint: bool = True) -> str:
    windows = sorted({smoothing_window(len(run.steps)) for run in runs})
    span = f"{windows[0]:,}" if len(windows) == 1 else f"{windows[0]:,} to {windows[-1]:,}"
    behind = "; the thin line behind it is each step's value" if faint and len(runs) == 1 else ""
    return f"Lines are means over {span} steps{behind}." if windows[-1] > 1 else ""


def training_line(runs: Sequence[RunRecord]) -> list[str]:
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


def vocabulary(run: RunRecord) -> dict[str, Any] | None:
    """The coverage of a run's draft vocabulary, and the words that the vocabulary lacks; None if not recorded."""
    v = mapping(run.summary.get("vocabulary"))
    coverage = number(v.get("coverage"))
    if coverage is None:
        return None
    missing = v.get("missing")
    words = [
        (escaped(str(m["text"]), keep="\n\t").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣"), f"{count:,.0f}")
        for m in listed(missing)
        if isinstance(m, dict) and "text" in m and (count := number(m.get("count"))) is not None
    ]
    size, target_size = number(v.get("size")), number(v.get("target_size"))
    return {"run": run.name, "coverage": coverage, "words": words, "size": shown(size, 0), "of": shown(target_size, 0)}


def recipes(runs: Sequence[RunRecord]) -> Table | None:
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


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _options(text: str) -> dict[str, Any]:
    import yaml

    try:
        return mapping(yaml.safe_load(text))
    except yaml.YAMLError:
        return {}
