"""`fledge report`: an HTML page of training runs and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import Options, opt

if TYPE_CHECKING:
    from fledge.report.read import Material

NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Draw runs of fledge train and results of fledge eval --out side by side, as one HTML page."""

    sources: list[str] = opt(
        "directories of runs, also of those still training, and JSON files of fledge eval --out", flag="argument"
    )  # fmt: skip
    out: str = opt("the HTML file to write; only an earlier report is replaced", NAME)


def run(options: ReportOptions, say: Callable[[str], None]) -> None:
    """Writes the report. Raises ValueError or OSError, with the file, for sources that are no runs and no records."""
    from fledge.report.page import check_report_path
    from fledge.report.read import read

    check_report_path(options.out, "--out")
    found = read(options.sources)
    draw(found, options.out)
    for note in found.notes:
        say(note)
    counts = [
        f"{len(x)} {name}{'s' * (len(x) > 1)}" for x, name in ((found.runs, "run"), (found.records, "record")) if x
    ]
    say(f"{options.out} has {' and '.join(counts)}; open it in a browser")


def draw(material: Material, out: str | Path) -> None:
    """Writes the page. Raises ValueError if another file than an earlier report is at `out`."""
    from fledge.report.page import write_report

    write_report(material, out)


def report_record(record: dict[str, Any], out: str) -> None:
    """Draws the report of what `fledge eval` returned."""
    from fledge.report.read import material_of

    draw(material_of(record, Path(out).with_suffix("")), out)


def report_run(directory: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a complete run beside its metrics."""
    _draw_beside(directory, directory / NAME, say)


def report_file(record: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a record of `fledge eval --out` beside it: record.html for record.json."""
    _draw_beside(record, record.with_name(f"{record.stem}.html"), say)


def _draw_beside(source: Path, out: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a source. A failure is said and raises nothing: the work is done, and `fledge report` can
    draw it again."""
    from fledge.report.read import read

    try:
        draw(read([source]), out)
    except Exception as e:
        say(f"the report {out} was not drawn ({type(e).__name__}: {e}); try fledge report {source}")
    else:
        say(f"its report is {out}")
