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
SHARES = ("supervised_share", "filled")  # drawn from 0 to 1
POINTS = 600  # of a line on the page; more cannot be told apart


def training_figures(runs: Sequence[Run]) -> list[Figure]:
    """All figures of the runs."""
    makers = (loss, tau, acceptance, schedule, packing, step_parts, speed)
    return [make(runs) for make in makers] if runs else []


def loss(runs: Sequence[Run]) -> Figure:
    """The smoothed loss of each run."""
    title = "Loss over training"
    if len(runs) == 1 and len(y := runs[0].series("loss")[1]) > 1:
        first, last = (smoothed(y)[i] for i in (min(smoothing_window(len(y)), len(y)) - 1, -1))
        title = f"The loss {_moved(first, last)}"
    caption = (
        f"Mean loss of the scored slots of a step. {_smoothing(runs)} Read the slope: a line that is still falling at "
        "the end has not had enough steps; one that rises or jumps asks for a lower learning rate."
    )
    return _lines("loss", title, caption, runs, (("loss", "loss", 3),), height=3.1)


def tau(runs: Sequence[Run]) -> Figure:
    """Simulated τ, and decoded τ where it was measured."""
    title = "Tokens per round (τ) over training"
    keys = {run.name: "tau" if run.series("tau")[1] else "tau_slots" for run in runs}
    if len(runs) == 1:
        decoded = runs[0].series("eval_tau")[1]
        y = smoothed(runs[0].series(keys[runs[0].name])[1])
        if len(decoded) > 1:
            title = f"Decoded τ {_moved(decoded[0], decoded[-1])}"
        elif len(y) > 1:
            end = f"; decoded, it is {decoded[0]:.2f}" if decoded else ""
            title = f"Simulated τ {_moved(y[min(smoothing_window(len(y)), len(y)) - 1], y[-1])}{end}"

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

    rows = []
    for run in runs:
        rows += [[run.name, "simulated", *row] for row in _sampled(*run.series(keys[run.name]), 3)]
        rows += [[run.name, "decoded", *row] for row in _sampled(*run.series("eval_tau"), 3)]
    caption = (
        "1 means that no drafted token is accepted. Line: simulated on the training rows. "
        f"{_smoothing(runs, faint=False)} Markers: decoded on held-out prompts, which is what counts. Decoded far "
        "below simulated means that the target's own text differs from the training data: train on answers of the "
        "target (fledge regenerate)."
    )
    height = 3.1 + 0.16 * len(runs)
    return Figure("tau", title, caption, drawing("tau", plot, height=height), Table(("run", "kind", "step", "τ"), rows))


def acceptance(runs: Sequence[Run]) -> Figure:
    """Acceptance by position: all positions of one run, or the first position of several."""
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

    _, (_, rows) = next((name, found) for name, found in data.items() if found[1])
    title = "Acceptance of the first drafted token over training"
    if len(runs) == 1:
        last = [smoothed([row[k] for row in rows])[-1] for k in (0, len(rows[0]) - 1)]
        title = f"α of the first drafted token ends at {last[0]:.2f}"
        title += f", of position {len(rows[0])} at {last[1]:.2f}" if len(rows[0]) > 1 else ""
    caption = (
        "How much of the target's distribution the draft covers at each drafted token. "
        + f"{_smoothing(runs, faint=False)} "
        + ("Positions go from dark to light. " if len(runs) == 1 else "The table has the later positions. ")
        + "It falls with the position, since the draft continues from its own tokens; a steep fall asks for training "
        "with more --depth."
    )
    table = [
        [name, f"{steps[i]:,}", " ".join(f"{a:.2f}" for a in rows[i])]
        for name, (steps, rows) in data.items()
        for i in sampled_rows(len(rows))
    ]
    return Figure(
        "acceptance", title, caption, drawing("acceptance", plot, height=3.1 + 0.1 * len(runs)),
        Table(("run", "step", "α by position"), table),
    )  # fmt: skip


def schedule(runs: Sequence[Run]) -> Figure:
    """Learning rate and gradient norm."""
    caption = (
        f"The gradient norm is that before clipping. {_smoothing(runs)} A norm that keeps rising, or peaks with the "
        "learning rate, asks for a lower --lr."
    )
    panels = (("lr", "learning rate", 6), ("grad_norm", "gradient norm", 2))
    return _lines("schedule", "Learning rate and gradient norm", caption, runs, panels, height=4.2)


def packing(runs: Sequence[Run]) -> Figure:
    """The supervised share of tokens, and how full rows are."""
    shares = [_with_ratios(run) for run in runs]
    title = "Supervised share and packing"
    means = [y for _, y in (run.series("filled") for run in shares) if y]
    if len(runs) == 1 and means:
        supervised = shares[0].series("supervised_share")[1]
        title = f"{_mean(means[0]):.0%} of the room in rows is used"
        title = f"{_mean(supervised):.0%} of the tokens are supervised, and {title}" if supervised else title
    caption = (
        f"Above: supervised tokens of all tokens. Below: tokens of the room in the rows, the rest is filler. "
        f"{_smoothing(runs)} Little supervised: long prompts with short answers. Rows less than 0.9 full: raise "
        "--row-length."
    )
    panels = (("supervised_share", "supervised / tokens", 3), ("filled", "tokens / room", 3))
    return _lines("packing", title, caption, shares, panels, height=4.2)


def step_parts(runs: Sequence[Run]) -> Figure:
    """The mean time of a step by part."""
    means = {run.name: _mean_parts(run) for run in runs}
    title = "Time of a step by part"
    if len(runs) == 1:
        found = next(iter(means.values()))
        largest = max(found, key=found.__getitem__)
        title = f"{found[largest] / max(sum(found.values()), 1e-12):.0%} of a step's time goes to: {PARTS[largest]}"

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
    return Figure("step-parts", title, caption, svg, Table(("run", "part", "ms per step"), rows))


def speed(runs: Sequence[Run]) -> Figure:
    """Tokens per second, and memory where it is recorded."""
    title = "Training speed"
    if len(runs) == 1 and (y := runs[0].series("tokens_per_s")[1]):
        title = f"Training runs at {sorted(y)[len(y) // 2]:,.0f} tokens/s"
        if memory := runs[0].series("peak_gib")[1]:
            title += f" and takes {max(memory):.1f} GiB"
    panels = [("tokens_per_s", "tokens/s", 0)]
    if any(run.series("peak_gib")[1] for run in runs):
        panels.append(("peak_gib", "peak memory, GiB", 2))
    caption = (
        f"Tokens without filler. {_smoothing(runs)} Dips are other work of the machine, or waiting for data. "
        "Memory is recorded on GPUs only."
    )
    return _lines("speed", title, caption, runs, panels, height=1.6 + 1.4 * len(panels))


def _lines(
    name: str, title: str, caption: str, runs: Sequence[Run], panels: Sequence[tuple[str, str, int]], *, height: float
) -> Figure:  # fmt: skip
    """A figure with a smoothed line for each run, and a panel for each of (key, axis label, digits)."""

    def plot(*all_axes) -> None:
        for axes, (key, label, _) in zip(all_axes, panels, strict=True):
            for i, run in enumerate(runs):
                x, y = run.series(key)
                if len(runs) == 1 and len(y) > 1 and key != "lr":
                    axes.plot(*thinned(x, y), color=color(0), linewidth=0.6, alpha=0.3)
                # an average would show a learning rate that was never used
                shape = y if key in ("lr", "peak_gib") else smoothed(y)
                axes.plot(*thinned(x, shape), **style(i, run.name))
            axes.set_ylabel(label)
            if key in SHARES:
                axes.set_ylim(0, 1.05)
        all_axes[-1].set_xlabel("step")
        legend(all_axes[0], len(runs))

    rows = [
        [run.name, label, *row]
        for run in runs
        for key, label, digits in panels
        for row in _sampled(*run.series(key), digits)
    ]
    svg = drawing(name, plot, panels=len(panels), height=height + 0.1 * len(runs))
    return Figure(name, title, caption, svg, Table(("run", "of", "step", "value"), rows))


def smoothing_window(steps: int) -> int:
    """The number of steps that a smoothed line is the mean of."""
    return max(1, steps // 20)


def smoothed(y: Sequence[float]) -> list[float]:
    """The mean of the `smoothing_window` values up to each one; of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - smoothing_window(len(y)))
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def thinned(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most about `points` of a series: the smallest and the largest of each of points / 2 equal parts."""
    if len(x) <= points:
        return list(x), list(y)
    kept: set[int] = {0, len(x) - 1}
    values = np.asarray(y)
    for part in np.array_split(np.arange(len(x)), points // 2):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    order = sorted(kept)
    return [x[i] for i in order], [float(y[i]) for i in order]


def sampled_rows(n: int, rows: int = 40) -> list[int]:
    """The indices of at most `rows` of n entries, evenly spaced, for a table; the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, rows))}) if n else []


def stacked_bars(axes, bars: dict[str, dict[str, float]]) -> None:
    """Horizontal bars, one a name, stacked from the parts by label."""
    parts = list(dict.fromkeys(part for found in bars.values() for part in found))
    left = dict.fromkeys(bars, 0.0)
    for i, part in enumerate(parts):
        widths = [found.get(part, 0.0) for found in bars.values()]
        axes.barh(range(len(bars)), widths, left=[*left.values()], height=0.6, color=color(i), label=part)
        left = {name: at + width for (name, at), width in zip(left.items(), widths, strict=True)}
    bars_from_left(axes, list(bars))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)


def _with_ratios(run: Run) -> Run:
    steps = []
    for step in run.steps:
        tokens, room, supervised = (number(step.get(k)) for k in ("tokens", "room", "supervised"))
        ratios = {}
        if tokens and supervised is not None:
            ratios["supervised_share"] = supervised / tokens
        if tokens is not None and room:
            ratios["filled"] = tokens / room
        steps.append({"step": step["step"], **ratios})
    return Run(run.name, run.path, steps, run.recipe_text, run.recipe, run.summary)


def _mean_parts(run: Run) -> dict[str, float]:
    found = [mapping(step.get("parts")) for step in run.steps]
    found = [parts for parts in found if parts]
    means = {key: sum(number(parts.get(key)) or 0.0 for parts in found) / max(len(found), 1) for key in PARTS}
    return {key: mean for key, mean in means.items() if mean > 0}


def _sampled(x: Sequence[int], y: Sequence[float], digits: int) -> list[list[str]]:
    return [[f"{x[i]:,}", shown(y[i], digits)] for i in sampled_rows(len(x), 20)]


def _smoothing(runs: Sequence[Run], *, faint: bool = True) -> str:
    windows = sorted({smoothing_window(len(run.steps)) for run in runs})
    span = f"{windows[0]:,}" if len(windows) == 1 else f"{windows[0]:,} to {windows[-1]:,}"
    behind = "; the thin line behind it is each step's value" if faint and len(runs) == 1 else ""
    return f"Lines are means over {span} steps{behind}." if windows[-1] > 1 else ""


def _moved(first: float, last: float) -> str:
    verb = "rose" if last > first else "fell"
    return f"{verb} from {first:.2f} to {last:.2f}" if f"{first:.2f}" != f"{last:.2f}" else f"stayed at {last:.2f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
