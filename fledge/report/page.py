"""The HTML page of a report, which loads nothing from elsewhere, and its figures: SVG in colours that the page's style
sheet defines. A missing value, and a value of a wrong type, counts as not recorded.

matplotlib draws in placeholder colours. CSS variables replace the placeholders, so that a drawing serves the light and
the dark page. Text stays text. Equal data give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.io.files import check_output_path, replace_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARK = '<meta name="generator" content="fledge report">'
SCALE = 6  # colours of depths

Sections = dict[str, Any]  # variables of the page's template; the page leaves out sections without variables

INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0401{i:02x}" for i in range(1, 7))  # distinct lines
DEPTHS = tuple(f"#0501{i:02x}" for i in range(1, 7))  # positions, from the first to the last: one scale
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "osD^vPX"
WIDTH = 6.6  # inches, of 72 CSS pixels
ZERO_WIDTH = "\N{ZERO WIDTH SPACE}"

_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid"}
_VARIABLES |= {c: f"s{i}" for i, c in enumerate(SERIES, 1)} | {c: f"d{i}" for i, c in enumerate(DEPTHS, 1)}
_PLACEHOLDER = re.compile("|".join(_VARIABLES))

_STYLE = {
    "svg.hashsalt": "fledge", "svg.fonttype": "none", "font.size": 11,
    "axes.titlesize": 11, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "axes.titlecolor": INK, "text.color": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "grid.color": GRID, "grid.linewidth": 0.8, "lines.linewidth": 1.8,
    "xtick.major.size": 0, "ytick.major.size": 0, "axes.labelsize": 10.5, "xtick.labelsize": 10, "ytick.labelsize": 10,
    "legend.frameon": False, "legend.fontsize": 10, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "axes.unicode_minus": True, "text.parse_math": False, "hatch.linewidth": 0.6,
}  # fmt: skip


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


def write_page(out: str | Path, sections: Callable[[], Sections]) -> None:
    """Writes the page with the `sections`. Raises ValueError if the file at `out` is no report of fledge."""
    out = check_report_path(out, "the report")
    page = render(sections())
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page)


def write_beside(source: Path, out: Path, sections: Callable[[], Sections], say: Callable[[str], None]) -> None:
    """Writes the page of a run or record. A failure gives a message and no exception: the measured work is done, and
    `fledge report` can draw the report again."""
    try:
        write_page(out, sections)
    except Exception as e:
        say(f"the report {out} was not drawn ({type(e).__name__}: {e}); try fledge report {source}")
    else:
        say(f"its report is {out}")


def render(sections: Sections) -> str:
    """The page as HTML."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("fledge.report", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # fledge's own drawings; matplotlib has escaped the texts
    names = {Path(str(target)).name for target in sections["targets"] if target}
    title = f"Drafts for {names.pop()}" if len(names) == 1 else "Drafts"
    return environment.get_template("report.html").render(mark=Markup(MARK), title=title, scale=SCALE, **sections)


def origin(name: str, fields: dict[str, Any], version: Any) -> dict[str, Any]:
    """The command, versions and machine of a run's summary or a record, for the section "origin". `version` is the
    version of fledge; None if not recorded."""
    facts = {**mapping(fields.get("environment")), **mapping(fields.get("versions"))}
    facts |= {} if version is None else {"fledge": version}
    facts = {k: str(v) for k, v in facts.items() if v is not None}
    return {"name": name, "command": shlex.join(map(str, listed(fields.get("command")))), "facts": facts}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if valid else None


def numbers(value: Any) -> list[float]:
    """The list if `value` is a list of finite numbers, else an empty list."""
    found = [number(v) for v in value] if isinstance(value, list) else []
    return [] if None in found else found


def numbers_or_none(value: Any) -> list[float | None]:
    """The list if `value` is a list of finite numbers and nulls with at least one number, else an empty list."""
    rest = [v for v in value if v is not None] if isinstance(value, list) else []
    return [number(v) for v in value] if numbers(rest) else []


def mapping(value: Any) -> dict[str, Any]:
    """The value if `value` is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """The value if `value` is a list, else an empty list."""
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Table:
    """The numbers under a figure, as text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure: the id on the page, the finding (`title`), instructions for reading (`caption`), the drawing, and a
    table of the numbers. `missing` is a sentence about the missing data, if there is nothing to draw."""

    id: str
    title: str
    caption: str = ""
    svg: str = ""
    table: Table | None = None
    missing: str = ""


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table, or a dash."""
    return "–" if value is None else f"{value:,.{digits}f}"


def spanned(value: float | None, interval: tuple[float, float] | None, digits: int = 2) -> str:
    """A number as text, with the interval if known."""
    between = f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval and value is not None else ""
    return shown(value, digits) + between


def drawing(name: str, plot: Callable[..., None], *, panels: int = 1, height: float = 3.0) -> str:
    """The SVG that `plot` draws into the axes of the panels. `name` makes the SVG's ids unique on the page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Drawing(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(panels, 1, squeeze=False, sharex=True)
        plot(*axes.flat)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(out.getvalue(), name)


def color(i: int) -> str:
    """The colour of the i-th line; the first six lines have different colours."""
    return SERIES[i % len(SERIES)]


def style(i: int, label: str) -> dict[str, Any]:
    """Colour, dashes and label of the i-th line. Neighbouring lines differ in dashes too."""
    return {"color": color(i), "linestyle": DASHES[(i // len(SERIES) + i) % len(DASHES)], "label": in_legend(label)}


def marked(i: int, label: str) -> dict[str, Any]:
    """The `style` of the i-th line, with a marker."""
    return style(i, label) | {"marker": MARKERS[i % len(MARKERS)]}


def depth_color(k: int, of: int) -> str:
    """The colour of the k-th of several positions, from 0."""
    return DEPTHS[round(k * (len(DEPTHS) - 1) / max(of - 1, 1))]


def legend(axes: Axes, entries: int) -> None:
    """Draws a legend above the axes, where the legend hides nothing."""
    if entries > 1:
        columns = 2 if entries > 3 else entries
        handles, labels = axes.get_legend_handles_labels()
        labels = [in_legend(label, 74 // columns) for label in labels]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": columns}
        axes.legend(handles, labels, **place, borderaxespad=0.2, handlelength=2.6)


def in_legend(label: str, width: int | None = None) -> str:
    """A label for a legend, shortened to `width` (None: whole). matplotlib leaves out labels that begin with `_`."""
    text = label.removeprefix(ZERO_WIDTH)
    text = text if width is None else shortened(text, width)
    return ZERO_WIDTH + text if text.startswith("_") else text


def bars_from_left(axes: Axes, labels: Sequence[str]) -> None:
    """Prepares axes for one horizontal bar or dot per label, with the first label on top."""
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", labelcolor=INK)


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


def shortened(label: str, width: int = 34) -> str:
    """A label that fits beside a drawing: the beginning and the end of a long label."""
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in label)
    keep = width // 2
    return printable if len(printable) <= width else f"{printable[: keep - 1]}…{printable[-keep:]}"


def _for_page(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 aria-hidden="true"', svg, count=1)
    return re.sub(r"<[^>]*>", lambda tag: _tag_for_page(tag[0], name), svg)


def _tag_for_page(tag: str, name: str) -> str:
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = tag.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    return _PLACEHOLDER.sub(lambda m: f"var(--{_VARIABLES[m[0]]})", tag)
