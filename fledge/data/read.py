"""Records from files and hub data sets, as {"messages", ...} or {"text"}, each with its place for error messages."""

from __future__ import annotations

import glob
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
READABLE = (".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".arrow", ".csv")


@dataclass(frozen=True)
class Record:
    """One conversation (`messages`, with `tools` where the data has them) or one plain `text`."""

    where: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[Any] | None = None

    def said(self) -> str:
        """What it says, wherever it stands."""
        return json.dumps([self.messages, self.text, self.tools], sort_keys=True, default=str)


def read_records(sources: list[str], seed: int = 0) -> list[Record]:
    """All records of all sources, in their order.

    A source is a file, a directory, a glob, or a hub data set `owner/name[:split]`; `@0.5` behind it takes half
    (drawn by `seed`), `@2` takes it twice. Raises ValueError naming file and line for what cannot be read.
    """
    records: list[Record] = []
    for source in sources:
        name, share = _split_share(source)
        own = [r for path in _paths(name) for r in _read_file(path)] if _is_local(name) else list(_read_hub(name))
        if not own:
            raise ValueError(f"{name} holds no records; give a file with `messages`, `conversations` or `text`")
        whole, part = divmod(share, 1)
        if not whole and not round(part * len(own)):
            raise ValueError(f"{source} takes none of its {len(own):,} records; take a larger share")
        chosen = sorted(random.Random(seed).sample(range(len(own)), round(part * len(own))))
        records += own * int(whole) + [own[i] for i in chosen]
    return records


def whole_path(source: str) -> str:
    """The source, from whatever directory it is read."""
    name, _ = _split_share(source)
    return os.path.abspath(name) + source[len(name) :] if _is_local(name) else source


def _split_share(source: str) -> tuple[str, float]:
    """`name@0.5` to name and share; an @ in a directory's name, or in that of a file that is there, is no share."""
    name, at, share = source.rpartition("@")
    if not at or "/" in share or Path(source).exists():
        return source, 1.0
    if not re.fullmatch(r"\d+(\.\d+)?", share) or not float(share):
        raise ValueError(f"{source}: what follows @ is the share to take, such as @0.5 or @2")
    return name, float(share)


def _is_local(name: str) -> bool:
    """Whether a source is there, is named as a file, or cannot be a hub id such as `owner/name-2.5:train[:100]`."""
    hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:.+)?", name)
    return Path(name).exists() or Path(name).suffix in READABLE or not hub_id


def _paths(name: str) -> list[Path]:
    found = [Path(p) for p in sorted(glob.glob(name, recursive=True))] or [Path(name)]
    files = [f for p in found for f in (_inside(p) if p.is_dir() else [p])]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; give files, globs or hub ids like owner/name")
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty")
    return files


def _inside(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.suffix in READABLE)


def _read_file(path: Path) -> Iterator[Record]:
    try:
        yield from _rows(path)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e}); convert it first") from e


def _rows(path: Path) -> Iterator[Record]:
    """JSON and JSON lines are read here, for errors that name the line; other formats by `datasets`."""
    if path.suffix in (".jsonl", ".ndjson") or (path.suffix == ".json" and _is_lines(path)):
        with path.open(encoding="utf-8-sig") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield _record(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")
    elif path.suffix == ".json":
        rows = _parse(path.read_text(encoding="utf-8-sig"), str(path))
        for i, row in enumerate(rows if isinstance(rows, list) else [rows]):
            yield _record(row, f"{path}, record {i + 1}")
    elif path.suffix == ".txt":
        yield Record(str(path), text=path.read_text(encoding="utf-8-sig"))
    else:
        if path.suffix not in READABLE:
            raise ValueError(f"{path}: fledge reads {', '.join(READABLE)}")
        import datasets

        kind = path.suffix.removeprefix(".")
        try:
            rows = datasets.load_dataset(kind, data_files=str(path), split="train")
        except Exception as e:  # whatever the reader of the format raises, wrapped by datasets in its own
            raise ValueError(f"{path} cannot be read as {kind}: {e.__cause__ or e}") from e
        for i, row in enumerate(rows):
            yield _record(row, f"{path}, row {i + 1}")


def _read_hub(name: str) -> Iterator[Record]:
    import datasets

    dataset, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(dataset, split=split or "train")
    except Exception as e:
        raise ValueError(f"{name} is no file here, and as a hub data set it cannot be loaded: {e}") from e
    for i, row in enumerate(rows):
        yield _record(row, f"{name}, row {i + 1}")


def _is_lines(path: Path) -> bool:
    """Whether a .json file holds JSON lines, as many on the hub do: its first line is a whole object, and not alone."""
    with path.open(encoding="utf-8-sig") as f:
        first = f.readline().strip()
        if not (first.startswith("{") and first.endswith("}")):
            return False
        try:
            json.loads(first)
        except ValueError:
            return False
        return any(line.strip() for line in f)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise ValueError(f"{where} is not JSON: {e}. Mend or remove it; nothing was skipped") from e


def _record(row: Any, where: str) -> Record:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with `messages`, `conversations` or `text`")
    if turns := row.get("messages") or row.get("conversations"):
        return Record(where, messages=_messages(row, turns, where), tools=row.get("tools"))
    if isinstance(row.get("text"), str):
        return Record(where, text=row["text"])
    raise ValueError(f"{where} has none of `messages`, `conversations` and `text` filled in, only {sorted(row)}")


def _messages(row: dict[str, Any], turns: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise ValueError(f"{where}: its messages are a {type(turns).__name__}, not a list: {str(turns)[:80]}")
    has_roles = all(isinstance(t, dict) and "role" in t for t in turns)
    one = _message if has_roles or row.get("messages") else _sharegpt
    messages = [one(t, where) for t in turns]
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: a message needs a `role` and a `content`, got {str(message)[:80]}")
    # table formats fill absent fields with null, which some templates take for present ones
    return {k: v for k, v in message.items() if v is not None or k == "content"}


def _sharegpt(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ValueError(f"{where}: a ShareGPT turn needs `from` and `value`, got {str(turn)[:80]}")
    role = SHAREGPT_ROLES.get(turn["from"])
    if role is None:
        raise ValueError(f"{where}: unknown speaker {turn['from']!r}; known are {', '.join(SHAREGPT_ROLES)}")
    return {"role": role, "content": turn["value"]}
