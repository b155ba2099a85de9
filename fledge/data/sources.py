"""Data sources as options name them: a path or hub id, the share of records to take, and the names of columns. Data
sets of the hub; PRESETS have short names.

A source without options of its own is a text, `PATH[@SHARE]`. A source with options is a mapping, the same in a recipe,
in Python and, as JSON, on the command line:

    data:
      - chats.jsonl@0.5
      - {source: thinking.jsonl, share: 2, template_kwargs: {enable_thinking: true}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from fledge.io.fields import check_template_kwargs, first_line, format_value, parse_json

READABLE = (".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".arrow", ".csv")
COMPRESSED = (".gz", ".zst")  # suffixes after those of texts
HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?(:(?P<split>.+))?")
MAX_SHARE = 100
KEYS = ("source", "share", "template_kwargs", "columns")


@dataclass(frozen=True)
class Source:
    """Where records come from, and how they are read.

    `path` is a file, a directory, a glob, or a hub data set `owner/name[@revision][:split]`. `share` is the part of the
    records to take, in (0, MAX_SHARE]: 0.5 a random half, 2 every record twice. `template_kwargs` are variables of the
    chat template for the source's chats; the source's variables take precedence over the command's. `columns` maps
    names of fledge's layouts to names of the source's columns (`{"messages": "dialog"}`). None: no entries.
    """

    path: str
    share: float = 1.0
    template_kwargs: dict[str, Any] | None = None
    columns: dict[str, str] | None = None

    @staticmethod
    def parse(value: str | Mapping[str, Any] | Source) -> Source:
        """The source that an option names: `PATH[@SHARE]`, or a mapping or JSON object with the keys KEYS.

        Raises ValueError, quoting the source, for anything else. The files need not exist.
        """
        if isinstance(value, Source):
            return value
        if isinstance(value, str) and value.lstrip().startswith("{") and not os.path.exists(value):
            try:
                value = parse_json(value)
            except ValueError as e:
                raise ValueError(
                    f"{value} is neither a file nor JSON ({e}); write a source with options as "
                    '\'{"source": "chats.jsonl", "template_kwargs": {"enable_thinking": true}}\''
                ) from e
        return Source(*split_share(value)) if isinstance(value, str) else _from_mapping(value)

    def as_option(self) -> str | dict[str, Any]:
        """The form that an option takes; `parse` reads it back."""
        ambiguous = split_share(self.path) != (self.path, 1.0)  # such as the revision of owner/name@1.0
        if self.template_kwargs is None and self.columns is None:
            return (
                f"{self.path}@{Decimal(repr(self.share)).normalize():f}" if self.share != 1 or ambiguous else self.path
            )
        written = {
            "source": self.path, "share": self.share if self.share != 1 or ambiguous else None,
            "template_kwargs": self.template_kwargs, "columns": self.columns,
        }  # fmt: skip
        return {key: value for key, value in written.items() if value is not None}

    def __str__(self) -> str:
        written = self.as_option()
        return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)


def split_share(text: str) -> tuple[str, float]:
    """Splits `name@0.5` into the name and the share (1.0 without a suffix).

    An @ in a directory's name or in the name of an existing file is not a separator. After a hub id, only a number is
    a share; any other suffix is a revision. Raises ValueError for a share that is not in (0, MAX_SHARE].
    """
    name, at, share = text.rpartition("@")
    if not at or "/" in share or os.path.exists(text):
        return text, 1.0
    if not re.fullmatch(r"\d+(\.\d+)?", share):
        if not is_local(name):
            return text, 1.0
        raise ValueError(f"{text}: the text after @ must be the share of the records to take, such as @0.5 or @2")
    if not 0 < float(share) <= MAX_SHARE:
        raise ValueError(f"{text}: the share after @ must be above 0 and at most {MAX_SHARE}")
    return name, float(share)


def is_local(name: str) -> bool:
    """Whether a source is a local path: it exists, has a file extension that fledge reads, or is not a valid hub id.

    A hub id may look like `owner/name-2.5:train[:100]`.
    """
    return os.path.exists(name) or Path(name).suffix in (*READABLE, *COMPRESSED) or not HUB_ID.fullmatch(name)


def _from_mapping(given: Mapping[str, Any]) -> Source:
    shown = json.dumps(given, default=repr, ensure_ascii=False)
    if unknown := sorted(given.keys() - set(KEYS), key=str):
        raise ValueError(f"{shown}: {format_value(unknown[0])} is not an option of a source; it has {', '.join(KEYS)}")
    path = given.get("source")
    if not isinstance(path, str) or not path:
        raise ValueError(f"{shown} names no source; add `source`, a file, glob or hub id")
    name, share = split_share(path)
    if (asked := given.get("share")) is not None:
        if name != path and is_local(name):
            raise ValueError(f"{shown} gives the share twice, as @{path.rpartition('@')[2]} and as `share`; keep one")
        number = isinstance(asked, int | float) and not isinstance(asked, bool)
        if not number or not 0 < asked <= MAX_SHARE:
            raise ValueError(f"{shown}: `share` must be a number above 0 and at most {MAX_SHARE}")
        name, share = path, float(asked)
    kwargs, columns = ({} if given.get(key) is None else given[key] for key in ("template_kwargs", "columns"))
    if not isinstance(kwargs, dict):
        raise ValueError(f"{shown}: `template_kwargs` must be a mapping such as {{enable_thinking: false}}")
    check_template_kwargs(kwargs, f"{shown}: `template_kwargs`")
    if not isinstance(columns, dict) or not all(isinstance(x, str) and x for x in (*columns, *columns.values())):
        raise ValueError(f"{shown}: `columns` must map names to names, such as {{messages: dialog}}")
    return Source(name, share, kwargs or None, columns or None)


def modes_of(sources: Iterable[str], template_kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """The distinct modes of data sources (see `data.template`), in order. A source's own variables take precedence over
    `template_kwargs`."""
    modes: list[dict[str, Any]] = []
    for source in sources:
        mode = {**(template_kwargs or {}), **(Source.parse(source).template_kwargs or {})}
        if mode not in modes:
            modes.append(mode)
    return tuple(modes)


@dataclass(frozen=True)
class HubData:
    """A data set of the hub.

    `split` is read for training, and `prompt_split` for prompts (None: `split`). `terms` is the licence and other
    conditions of use, for the documentation. `columns` maps names of fledge's layouts to the data set's columns; None
    if the columns already have the layouts' names. `name` is the source as the user wrote it.
    """

    hub_id: str
    split: str
    terms: str = ""
    config: str | None = None
    columns: dict[str, str] | None = None
    prompt_split: str | None = None
    revision: str | None = None
    name: str = ""

    def load(self) -> Any:
        """The data set, a `datasets.Dataset`. Raises ValueError if it cannot be loaded."""
        import datasets

        where = filter(None, (self.hub_id, self.config))
        try:
            return datasets.load_dataset(*where, split=self.split, revision=self.revision, trust_remote_code=False)
        except Exception as e:  # offline, unknown, gated or moved: each raises another type
            known = "not a local file" if self.hub_id in self.name else f"{self.hub_id} on the hub"
            raise ValueError(
                f"{self.name} is {known} and cannot be loaded from the hub: {first_line(e)}. Check its name, and load "
                "it once where the hub can be reached (the datasets library then keeps it)"
            ) from e


# data sets that drafts are usually trained on, by name; a source may name another split
PRESETS: dict[str, HubData] = {
    "sharegpt": HubData(
        "Aeala/ShareGPT_Vicuna_unfiltered", "train",
        "conversations that users of ChatGPT shared; OpenAI's terms may apply. Some have no messages, so "
        "fledge train needs --skip-bad",
    ),
    "ultrachat": HubData("HuggingFaceH4/ultrachat_200k", "train_sft", "MIT", prompt_split="test_sft"),
    "perfectblend": HubData("mlabonne/open-perfectblend", "train", "Apache-2.0"),
    "magpie": HubData("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "train", "Llama 3.1 community licence"),
    "openhermes": HubData("teknium/OpenHermes-2.5", "train", "a collection; its sources have licences of their own"),
    "nemotron": HubData(
        "nvidia/Llama-Nemotron-Post-Training-Dataset", "chat",
        "CC BY 4.0, a part under other licences (column license). The splits code, math and science are far larger",
        config="SFT", columns={"prompt": "input", "completion": "output", "system": "system_prompt"},
    ),
}  # fmt: skip


def find_hub_data(name: str, *, prompts: bool = False) -> HubData:
    """The data set that `name[@revision][:split]` names: a preset, or any data set of the hub. With `prompts`, a
    preset's split for prompts is the default."""
    parts = HUB_ID.fullmatch(name)
    known = PRESETS.get(parts["name"]) or HubData(parts["name"], "train")
    split = parts["split"] or (known.prompt_split if prompts else None) or known.split
    return replace(known, split=split, revision=parts["revision"], name=name)


def is_preset(path: str) -> bool:
    """Whether a source's path is the name of a preset and not the name of a file."""
    parts = HUB_ID.fullmatch(path)
    return parts is not None and parts["name"] in PRESETS and not Path(path).exists()


def shadowed_presets(sources: Sequence[Any]) -> list[str]:
    """A message for each source that is a local file or directory with the name of a preset."""
    paths = [Source.parse(source).path for source in sources]
    return [
        f"{path} is read from the disk; the data set of that name is {PRESETS[path].hub_id}"
        for path in paths
        if path in PRESETS and Path(path).exists()
    ]
