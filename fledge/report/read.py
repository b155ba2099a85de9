"""Reads runs and records of evaluations, and writes a report of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fledge.report import page
from fledge.report.decoding import EvalRecord, decoding_sections, read_records
from fledge.report.training import RunRecord, read_run, training_sections


@dataclass(frozen=True)
class Material:
    """The content of a report. `notes` are sentences about parts that were left out on reading."""

    runs: list[RunRecord]
    records: list[EvalRecord]
    notes: list[str] = field(default_factory=list)


def read(paths: Sequence[str | Path]) -> Material:
    """Reads directories of runs and JSON files of evaluations. Raises ValueError or OSError, with the path, for
    anything else, and for runs without a step and no records."""
    runs, records, notes = [], [], []
    for path in dict.fromkeys(map(Path, paths)):
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; give the directory of a run or a file of fledge eval --out"
            )
        if path.is_dir() or path.name == "metrics.jsonl":
            runs.append(read_run(path if path.is_dir() else path.parent, notes))
        else:
            records += read_records(path)
    if not records and not any(run.steps for run in runs):
        empty = ", ".join(str(run.path) for run in runs)
        raise ValueError(f"{empty} has no steps yet; its report can be drawn after the first step")
    notes += [f"{run.path} has no steps yet." for run in runs if not run.steps]
    runs = [run for run in runs if run.steps]
    names = _distinct([run.path for run in runs])
    return Material([replace(run, name=n) for run, n in zip(runs, names, strict=True)], _labelled(records), notes)


def sections_of(material: Material) -> page.Sections:
    """All sections of a report."""
    runs, records = training_sections(material.runs), decoding_sections(material.records)
    joined = {name: [*runs[name], *records[name]] for name in ("targets", "origins")}
    return runs | records | joined | {"notes": material.notes}


def report_file(record: Path, say: Callable[[str], None]) -> None:
    """Draws the report of a record of `fledge eval --out` beside the record: record.html for record.json."""
    page.write_beside(record, record.with_suffix(".html"), lambda: sections_of(read([record])), say)


def _labelled(records: list[EvalRecord]) -> list[EvalRecord]:
    """The records; for several files, the label starts with the file's name."""
    files = list(dict.fromkeys(r.source for r in records))
    names = dict(zip(files, _distinct([f.with_suffix("") for f in files]), strict=True))

    def label(record: EvalRecord) -> str:
        named = [names[record.source]] * (len(files) > 1 or not record.label)
        return ": ".join([*named, *([record.label] if record.label else [])])

    return [replace(r, label=label(r)) for r in records]


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Distinct names for the paths: the last n parts of each path, with the smallest n that gives distinct names."""
    full = [path.resolve().parts for path in paths]
    for n in range(1, max(map(len, full), default=1) + 1):
        names = ["/".join(parts[-n:]) for parts in full]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
