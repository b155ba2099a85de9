"""Writes the HTML page of a report, which loads nothing from elsewhere, and reads the values that the page shows: a
missing value, and a value of a wrong type, counts as not recorded."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fledge.io.files import check_output_path, replace_text

MARK = '<meta name="generator" content="fledge report">'
SCALE = 6  # colours of depths

Sections = dict[str, Any]  # variables of the page's template; the page leaves out sections without variables


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
