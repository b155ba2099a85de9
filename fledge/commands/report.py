"""`fledge report`: an HTML page of training runs and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fledge.options import Options, opt

NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Draw runs of fledge train and results of fledge eval --out side by side, as one HTML page."""

    sources: list[str] = opt(
        "directories of runs, also of those still training, and JSON files of fledge eval --out", flag="argument"
    )  # fmt: skip
    out: str = opt("the HTML file to write; only an earlier report is replaced", NAME)


def run(options: ReportOptions, say: Callable[[str], None]) -> None:
    """Writes the report. Raises ValueError or OSError, with the file, for a source that is no run and no record."""
    from fledge.report.page import check_report_path, write_page
    from fledge.report.read import read, sections_of

    check_report_path(options.out, "--out")
    found = read(options.sources)
    write_page(options.out, lambda: sections_of(found))
    for note in found.notes:
        say(note)
    counts = [
        f"{len(x)} {name}{'s' * (len(x) > 1)}" for x, name in ((found.runs, "run"), (found.records, "record")) if x
    ]
    say(f"{options.out} has {' and '.join(counts)}; open it in a browser")
