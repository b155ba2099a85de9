"""The figures of training runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fledge.report.draw import Figure, Table, bars_from_left, color, depth_color, drawing, legend, marked, shown, style
from fledge.report.read import Run, mapping, number

PARTS = {
    "data": "waiting for data", "target": "target", "draft": "draft", "optimizer": "optimizer", "save": "saving",
    "eval": "measuring τ",
}  # fmt: skip
POINTS = 600  # most points of a line on the page


def training_figures(runs: Sequence[Run]) -> list[Figure]:
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


def tau(runs: Sequence[Run]) -> Figure:
    """Simulated τ, and decoded τ if measured."""
    keys = {run.name: "tau" if run.series("tau")[1] else "tau_slots" for run in runs}

    def plot(axes) -> None:
        for i, run in enumerate(runs):
            x, y = run.series(keys[run.name])
            axes.plot(*thinned(x, smoothed(y)), **style(i, f"{run.name}, simulated"))
            x, y = run.series("eval_tau")
            if y:
                axes.plot(x, y, **marked(i, f"{run.name}, decoded") | {"linestyle": "-", "linewidth": 0.8})
        axes.set_xlabel("step")
        axes.set_ylabel("τ, tokens per round")
        legend(axes, 2 * len(runs))

    caption = (
        "1 means that no drafted token is accepted. Line: simulated on the training rows. "
        f"{_smoothing(runs, faint=False)} Markers: decoded on held-out prompts, which is what counts. Decoded far "
        "below simulated means that the target's own text differs from the training data: train on answers of the "
        "target (fledge regenerate)."
    )
    svg = drawing("tau", plot, height=3.1 + 0.16 * len(runs))
    return Figure("tau", "Tokens per round (τ) over training", caption, svg)


def acceptance(runs: Sequence[Run]) -> Figure:
    """Acceptance by position: all positions of a single run, or the first position of several runs."""
    data = {run.name: run.columns("accept") for run in runs}

    def plot(axes) -> None:
        for i, (name, (steps, rows)) in enumerate(data.items()):
            for k in range(len(rows[0]) if rows and len(data) == 1 else min(1, len(rows))):
                looks = style(i, name)
                if len(data) == 1:
                    looks = {"color": depth_color(k, len(rows[0])), "linestyle": "-", "label": f"position {k + 1}"}
                axes.plot(*thinned(steps, smoothed([row[k] for row in rows])), **looks)
        axes.set_xlabel("step")
        axes.set_ylabel("acceptance rate α")
        axes.set_ylim(0, 1)
        legend(axes, len(axes.lines))

    title = "Acceptance over training" if len(runs) == 1 else "Acceptance of the first drafted token over training"
    caption = (
        "How much of the target's distribution the draft covers at each drafted token. "
        + f"{_smoothing(runs, faint=False)} "
        + ("Positions go from dark to light. " if len(runs) == 1 else "")
        + "It falls with the position, since the draft continues from its own tokens; a steep fall asks for training "
        "with more --depth."
    )
    return Figure("acceptance", title, caption, drawing("acceptance", plot, height=3.1 + 0.1 * len(runs)))


def step_parts(runs: Sequence[Run]) -> Figure:
    """The mean time of a step by part."""
    means = {run.name: _mean_parts(run) for run in runs}

    def plot(axes) -> None:
        stacked_bars(axes, {name: {PARTS[k]: 1e3 * v for k, v in found.items()} for name, found in means.items()})
        axes.set_xlabel("milliseconds per step")

    rows = [[name, PARTS[k], shown(1e3 * v, 2)] for name, found in means.items() for k, v in found.items()]
    caption = (
        "Mean over all steps, of the first process. Saving and measuring τ, in few steps, are spread over all. "
        "Much waiting for data: more --data-workers or a faster disk. Mostly target: store its hidden states once "
        "(fledge features)."
    )
    svg = drawing("step-parts", plot, height=1.5 + 0.42 * len(means))
    return Figure("step-parts", "Time of a step by part", caption, svg, Table(("run", "part", "ms per step"), rows))


def _lines(name: str, title: str, caption: str, runs: Sequence[Run], panels: Sequence[tuple[str, str]]) -> Figure:
    """A figure with a smoothed line for each run, and a panel for each of (key, axis label)."""

    def plot(*all_axes) -> None:
        for axes, (key, label) in zip(all_axes, panels, strict=True):
            for i, run in enumerate(runs):
                x, y = run.series(key)
                if len(runs) == 1 and len(y) > 1 and key != "lr":
                    axes.plot(*thinned(x, y), color=color(0), linewidth=0.6, alpha=0.3)
                # a mean of learning rates would be a value that no step used
                shape = y if key in ("lr", "peak_gib") else smoothed(y)
                axes.plot(*thinned(x, shape), **style(i, run.name))
            axes.set_ylabel(label)
        all_axes[-1].set_xlabel("step")
        legend(all_axes[0], len(runs))

    svg = drawing(name, plot, panels=len(panels), height=1.6 + 1.4 * len(panels) + 0.1 * len(runs))
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


def stacked_bars(axes, bars: dict[str, dict[str, float]]) -> None:
    """Draws a horizontal bar for each name, stacked from the name's parts by label."""
    parts = list(dict.fromkeys(part for found in bars.values() for part in found))
    left = dict.fromkeys(bars, 0.0)
    for i, part in enumerate(parts):
        widths = [found.get(part, 0.0) for found in bars.values()]
        axes.barh(range(len(bars)), widths, left=[*left.values()], height=0.6, color=color(i), label=part)
        left = {name: at + width for (name, at), width in zip(left.items(), widths, strict=True)}
    bars_from_left(axes, list(bars))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)


def _mean_parts(run: Run) -> dict[str, float]:
    found = [mapping(step.get("parts")) for step in run.steps]
    found = [parts for parts in found if parts]
    means = {key: sum(number(parts.get(key)) or 0.0 for parts in found) / max(len(found), 1) for key in PARTS}
    return {key: mean for key, mean in means.items() if mean > 0}


def _smoothing(runs: Sequence[Run], *, faint: bool = True) -> str:
    windows = sorted({smoothing_window(len(run.steps)) for run in runs})
    span = f"{windows[0]:,}" if len(windows) == 1 else f"{windows[0]:,} to {windows[-1]:,}"
    behind = "; the thin line behind it is each step's value" if faint and len(runs) == 1 else ""
    return f"Lines are means over {span} steps{behind}." if windows[-1] > 1 else ""
