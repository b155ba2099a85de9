"""Reads the files of `fledge train` and `fledge eval`. Missing fields of a record, and fields of a wrong type, count as
not recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fledge.io.fields import parse_json

MAX_BYTES = 2**28  # a larger JSON file is no record
REQUIRED = {"tau", "alpha"}  # fields of every record of an evaluation
METRICS = {  # fields of every step of a run
    "step", "loss", "accept", "lr", "grad_norm", "tokens", "supervised", "room", "parts", "seconds", "tokens_per_s",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
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


@dataclass(frozen=True)
class EvalRecord:
    """A record of an evaluation, by fledge's decoder or of a server (`served`), with a distinct label."""

    label: str
    source: Path
    fields: dict[str, Any]

    @property
    def served(self) -> bool:
        return "endpoint" in self.fields

    def number(self, key: str) -> float | None:
        return number(self.fields.get(key))

    def interval(self, key: str) -> tuple[float, float] | None:
        """An interval [low, high], e.g. of `tau`; None if not recorded."""
        found = numbers(self.fields.get(f"{key}_interval"))
        return (found[0], found[1]) if len(found) == 2 else None

    @property
    def requests(self) -> list[dict[str, Any]]:
        found = self.fields.get("requests")
        return found if isinstance(found, list) else []


@dataclass(frozen=True)
class Material:
    """The content of a report. `notes` are sentences about parts that were left out on reading."""

    runs: list[Run]
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


def material_of(record: dict[str, Any], source: str | Path) -> Material:
    """A new record of `fledge eval`, or an object of records by label, as material. `source` names the record."""
    return Material([], _labelled(records_in(record, Path(source))))


def read_run(path: Path, notes: list[str]) -> Run:
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
    return Run(path.resolve().name, path, steps, options, mapping(found))


def read_records(path: Path) -> list[EvalRecord]:
    """The records in a JSON file, at any depth of named objects. Raises ValueError for a file without records."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is no record of fledge eval: it is larger than {MAX_BYTES >> 20} MiB")
    try:
        value = parse_json(_text(path))
    except ValueError as e:
        raise ValueError(f"{path} is no record of fledge eval, which is JSON: {e}") from None
    found = records_in(value, path)
    if not found:
        raise ValueError(f"{path} is no record of fledge eval: nothing in it has τ (tau) and α (alpha)")
    return found


def records_in(value: Any, source: Path, names: tuple[str, ...] = ()) -> list[EvalRecord]:
    """The records in a parsed file. The label of a record is the names on the path to the record."""
    if not isinstance(value, dict) or len(names) > 8:
        return []
    if value.keys() >= REQUIRED and ("speedup" in value or "endpoint" in value):
        return [EvalRecord(" ".join(names), source, value)]
    return [record for name, inner in value.items() for record in records_in(inner, source, (*names, name))]


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
