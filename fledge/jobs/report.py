"""`fledge report`: an HTML page of training runs and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.jobs.options import Options, opt

NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Draw runs of fledge train and results of fledge eval --out side by side, as one HTML page."""

    sources: list[str] = opt(
        "directories of runs (also of those that are still training) and JSON files of fledge eval --out", flag="argument"
    )
    out: str = opt("the HTML file to write; only an earlier report is replaced", NAME)


def run(options: ReportOptions, say: Callable[[str], None]) -> None:
    """Writes the report. Raises ValueError or OSError, with the file, for sources that are no runs and no records."""
    from fledge.report.page import check_report_path, write_report

    check_report_path(options.out, "--out")
    found = write_report(options.sources, options.out)
    for note in found.notes:
        say(note)
    counts = [f"{len(x)} {name}{'s' * (len(x) != 1)}" for x, name in ((found.runs, "run"), (found.records, "record")) if x]
    say(f"{options.out} has {' and '.join(counts)}; open it in a browser")


def draw_beside(source: str | Path, out: str | Path, say: Callable[[str], None]) -> None:
    """Draws the report of a run or record that was just written. A failure is said and raises nothing: the results are
    there, and `fledge report` can draw them again."""
    from fledge.report.page import write_report

    try:
        write_report([source], out)
    except Exception as e:
        say(f"the report {out} was not drawn: {type(e).__name__}: {e}; try fledge report {source}")
    else:
        say(f"its report is {out}")
