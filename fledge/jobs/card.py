"""`fledge card`: writes the model card of a draft that has none, and puts measurements into a card."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import Options, opt
from fledge.json_text import read_json

if TYPE_CHECKING:
    from fledge.jobs.model_card import Measurement


@dataclass(frozen=True, kw_only=True)
class CardOptions(Options):
    """Write the model card (README.md) of a draft that has none, or put measurements of `fledge eval` into a card."""

    draft: str = opt("directory of the draft")
    eval: list[str] = opt(
        "file that `fledge eval --out` wrote; its measurements replace those in the card; repeatable", repeatable=True
    )


def run(options: CardOptions, say: Callable[[str], None]) -> None:
    """Writes the card. Raises ValueError if there is no such draft or record, and if there is nothing to do."""
    from fledge.files import replace_text
    from fledge.jobs.model_card import CARD, MEASURED, measured_text, with_section

    directory = local_draft(options.draft)
    measurements = [m for file in options.eval for m in read_measurements(Path(file), directory)]
    card = directory / CARD
    if not card.exists():
        replace_text(card, new_card(directory, measurements))
        say(f"Wrote {card}.")
        return
    if not measurements:
        raise ValueError(f"{card} exists; give --eval FILE to put measurements into it")
    try:
        text = with_section(read_card(card), MEASURED, measured_text(measurements))
    except ValueError as e:
        raise ValueError(f"{card}: {e}") from e
    replace_text(card, text)
    count = "1 measurement" if len(measurements) == 1 else f"{len(measurements)} measurements"
    say(f"Put {count} into {card}; the rest of it is unchanged.")


def local_draft(name: str) -> Path:
    """The directory of a draft. Raises ValueError if it is none on this machine."""
    from fledge.hub import hub_id
    from fledge.models.weights import check_draft

    if hub_id(name) and not Path(name).parent.is_dir():
        raise ValueError(f"{name} is not a directory here; give the directory of the draft, such as run/draft")
    check_draft(name)
    return Path(name)


def read_card(file: Path) -> str:
    """The text of a card. Raises ValueError if it is not UTF-8."""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8 text; convert it") from e


def new_card(directory: Path, measurements: list[Measurement] | None = None) -> str:
    """A card from what a draft's files tell, and measurements. Raises ValueError for damaged files."""
    from fledge.engines.export import needs_export
    from fledge.jobs.model_card import card_text
    from fledge.models.weights import open_draft

    draft = open_draft(directory)
    return card_text(
        draft.config, exports=lambda engine: needs_export(draft, engine),
        measurements=measurements or _measured_in_training(directory),
    )  # fmt: skip


def exported_card(name: str, exported: Path) -> dict[str, bytes]:
    """The card of a draft, by directory or hub id, for its files in another layout, in `exported`; empty without a
    card. Its commands are those for the new files, unless their section was removed."""
    from fledge.engines.export import needs_export
    from fledge.hub import draft_directory
    from fledge.jobs.model_card import CARD, SERVING, serving_text, with_section
    from fledge.models.weights import open_draft

    card = draft_directory(name) / CARD
    if not card.is_file():
        return {}
    text, draft = read_card(card), open_draft(exported)
    commands = serving_text(draft.config, lambda engine: needs_export(draft, engine))
    with contextlib.suppress(ValueError):  # the section was removed
        text = with_section(text, SERVING, commands)
    return {CARD: text.encode()}


def _measured_in_training(directory: Path) -> list[Measurement]:
    """The τ that training recorded in the draft's probe."""
    from fledge.eval.probe import read_probe
    from fledge.jobs.model_card import Measurement

    try:
        probe = read_probe(directory)
    except ValueError:
        return []
    known = probe and probe.record.eval_tau
    return [Measurement("prompts held out in training", "greedy", known)] if known else []


# -- records ----------------------------------------------------------------------------------------------------------


def read_measurements(file: Path, directory: Path) -> list[Measurement]:
    """The measurements in a record of `fledge eval`, without those of other drafts. Raises ValueError, naming the file,
    for anything else, and if there are none of this draft."""
    from fledge.eval.record import is_record
    from fledge.jobs.model_card import measurement_of
    from fledge.models.weights import draft_sha256, open_draft

    try:
        content = read_json(file)
    except FileNotFoundError as e:
        raise ValueError(f"--eval {file} does not exist; fledge eval --out FILE writes it") from e
    except ValueError as e:
        raise ValueError(f"--eval {file} is not JSON ({e})") from e
    if not is_record(content):
        raise ValueError(f"--eval {file} is not a record that fledge eval --out wrote")
    records: dict[str, Any] = {"": content} if "tau" in content else content
    draft = open_draft(directory)
    known = draft_sha256(draft.tensors)
    target = draft.config.provenance.target
    own = {
        label: None if (record.get("draft_for") or target) != target else _own_label(label, record, directory, known)
        for label, record in records.items()
    }
    if all(shown is None for shown in own.values()):
        others = sorted({str(record.get("draft") or label) for label, record in records.items()} - {""})
        named = f": {', '.join(others)}" if others else ""
        raise ValueError(f"--eval {file} has measurements of other drafts only{named}; measure {directory} itself")
    try:
        return [measurement_of(records[label], shown) for label, shown in own.items() if shown is not None]
    except ValueError as e:
        raise ValueError(f"--eval {file}: {e}") from e


def _own_label(label: str, record: dict[str, Any], directory: Path, known: str) -> str | None:
    """The label of a record without the draft's name, with which it begins if several drafts were compared; None if
    that is another draft. `known` is the hash of the weights, which older records don't have: of these, a draft is
    another one if its name in the label is that of another directory."""
    if recorded := record.get("draft_sha256"):
        return label.removeprefix(str(record.get("draft"))).strip() if recorded == known else None
    words = label.split(" ")
    for n in range(len(words), 0, -1):
        name = Path(" ".join(words[:n]))
        if (name / "config.json").is_file():
            return " ".join(words[n:]) if name.resolve() == directory.resolve() else None
    return label
