"""Evaluation prompts, which are records to answer: named sets of the hub that are usual for measuring EAGLE drafts,
and data in the formats of training data; and the traces of decoding prompts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.data.read import SourceReader, read_records, with_columns
from fledge.data.record import Record, parse_record
from fledge.data.sources import COMPRESSED, HubData, Source, is_preset
from fledge.decode.draft_size import ChanceWarning
from fledge.types import Trace

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.decode.request import PromptLike

DEFAULT_PROMPTS = 80  # number of prompts of a named set without --limit, as in the evaluations of the EAGLE papers


def read_prompts(source: str | Path, limit: int | None = None, columns: str | None = None) -> list[Record]:
    """At most `limit` prompts of a source, evenly spaced. The source is a file, a glob, a hub id, or a name in
    PROMPT_SETS or PRESETS that is not the name of a file. Without a limit, DEFAULT_PROMPTS prompts of a named set are
    read. `columns` is the value of --columns. Raises ValueError like `read_records` and `read_prompt_set`."""
    if str(source) in PROMPT_SETS and not Path(source).exists():
        return [prompt_of(record) for record in read_prompt_set(str(source), limit)]
    parsed = Source.parse(str(source))
    if parsed.template_kwargs:
        raise ValueError(f"{source}: prompts have no template_kwargs of their own; give --template-kwargs")
    if is_preset(parsed.path):
        if parsed.share != 1:
            raise ValueError(f"{source}: of a data set by name, a number of prompts is read; give --limit, not a share")
        reader = SourceReader(parsed, prompts=True)
        return [prompt_of(record) for record in reader.spread(limit or DEFAULT_PROMPTS)]
    return spread([prompt_of(record) for record in read_records(with_columns([str(source)], columns))], limit)


def _column(name: str, before: str = "") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that turns a row into one user turn: `before`, an instruction, followed by the column `name`."""
    return lambda row: {"turns": [before + row[name]]}


# the data set of each set, and a function that turns a row into a layout of `fledge.data.record` without answers
PROMPT_SETS: dict[str, tuple[HubData, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "mt_bench": (HubData("HuggingFaceH4/mt_bench_prompts", "train"), lambda row: {"turns": list(row["prompt"])}),
    "gsm8k": (HubData("openai/gsm8k", "test", config="main"), _column("question")),
    "humaneval": (HubData("openai/openai_humaneval", "test"), _column("prompt")),
    "math500": (HubData("HuggingFaceH4/MATH-500", "test"), _column("problem")),
    "alpaca": (HubData("tatsu-lab/alpaca", "train"), lambda row: {k: row[k] for k in ("instruction", "input")}),
    "sum": (HubData("abisee/cnn_dailymail", "test", config="3.0.0"), _column("article", "Summarize: ")),
    "qa": (HubData("google-research-datasets/nq_open", "validation"), _column("question")),
}


def read_prompt_set(name: str, limit: int | None = None) -> list[Record]:
    """`limit` prompts of a named set (None: DEFAULT_PROMPTS), as records, evenly spaced over the split; every call
    returns the same prompts. Raises ValueError if the set cannot be loaded, or lacks an expected column."""
    data, row_of = PROMPT_SETS[name]
    rows, records = replace(data, name=name).load(), []
    for i in spread(list(range(len(rows))), limit or DEFAULT_PROMPTS):
        where = f"{name}, row {i + 1}"
        try:
            records.append(parse_record(row_of(rows[i]), where))
        except (KeyError, TypeError) as e:
            raise ValueError(
                f"{where}: {data.hub_id} has other columns than fledge reads ({', '.join(rows[i])}); give a file of "
                "prompts"
            ) from e
    return records


def prompt_set_name(source: str) -> str:
    """The name of a source of prompts in tables and records: the name of a file without suffixes, or of a set."""
    path = Path(Source.parse(source).path)
    return Path(path.stem).stem if path.suffix in COMPRESSED else path.stem


def spread(items: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the items, evenly spaced and in order."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def prompt_of(record: Record) -> Record:
    """The part of a record that is a prompt.

    If the record has user turns only, the turns are the prompt, each to be answered in order. Otherwise the prompt is
    the part that the record marks as prompt. Without a mark, the prompt ends before the middle assistant turn, after
    the last message if there is no assistant turn, or in the middle of a text, between two words.
    """
    if record.turns:
        return record
    if record.text is not None:
        cut = record.prompt_length or _middle(record.text)
        return replace(record, text=record.text[:cut], prompt_length=0)
    messages = record.messages or []
    answers = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
    cut = record.prompt_length or (answers[len(answers) // 2] if answers else len(messages))
    return replace(record, messages=messages[:cut], prompt_length=0)


def answers_of(prompt: Record) -> int:
    """The number of answers to generate."""
    return max(len(prompt.turns), 1)


def _middle(text: str) -> int:
    """The length of the whole words in the first half of a text; half the length of a text that is a single word."""
    half = text[: max(len(text) // 2, 1)]
    last = max(half.rfind(space) for space in " \n\t")
    return len(half[: last + 1].rstrip()) or len(half)


def conversation(prompt: Record, answers: Sequence[dict[str, Any]]) -> Any:
    """The raw text, or the messages before the next answer, given the earlier answers as messages."""
    if prompt.text is not None:
        return prompt.text
    messages = [*(prompt.messages or [])]
    for i, turn in enumerate(prompt.turns[: len(answers) + 1]):
        messages.append({"role": "user", "content": turn})
        if i < len(answers):
            messages.append(answers[i])
    return messages


def first_prompt(prompt: Record) -> Any:
    """The input of the first answer: the raw text, or the messages before the first answer."""
    return conversation(prompt, ())


def quiet_traces(engine: Engine, prompts: Sequence[PromptLike], max_new_tokens: int) -> list[Trace]:
    """The traces of greedy decoding. `ChanceWarning` is suppressed, since a draft in training may be at chance."""
    if not prompts:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChanceWarning)
        done = engine.generate_all(prompts, max_new_tokens=max_new_tokens)
    return [c.trace for c in done]
