"""Named sets of prompts from the hub: those on which EAGLE drafts are usually measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fledge.data.presets import quiet_hub
from fledge.data.record import Record, parse_record

DEFAULT_PROMPTS = 80  # of a set without a limit, as in the evaluations of the EAGLE papers


@dataclass(frozen=True)
class PromptSet:
    """A data set of the hub: its id, config and split, and `row_of`, which turns a row into one of the layouts of
    `fledge.data.record` that has no answers."""

    hub_id: str
    split: str
    row_of: Callable[[dict[str, Any]], dict[str, Any]]
    config: str | None = None


def _column(name: str, before: str = "") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A column that holds one user message, after an instruction."""
    return lambda row: {"turns": [before + row[name]]}


PROMPT_SETS: dict[str, PromptSet] = {
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts", "train", lambda row: {"turns": list(row["prompt"])}),
    "gsm8k": PromptSet("openai/gsm8k", "test", _column("question"), config="main"),
    "humaneval": PromptSet("openai/openai_humaneval", "test", _column("prompt")),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test", _column("problem")),
    "alpaca": PromptSet(
        "tatsu-lab/alpaca", "train", lambda row: {"instruction": row["instruction"], "input": row["input"]}
    ),
    "sum": PromptSet("abisee/cnn_dailymail", "test", _column("article", "Summarize: "), config="3.0.0"),
    "qa": PromptSet("google-research-datasets/nq_open", "validation", _column("question")),
}


def read_prompt_set(name: str, limit: int | None = None) -> list[Record]:
    """The prompts of a named set, as records: `limit` of them (None: DEFAULT_PROMPTS), evenly spaced over the split, so
    always the same. Raises ValueError if the set cannot be loaded, or if its columns are not the expected ones."""
    import datasets

    source = PROMPT_SETS[name]
    try:
        with quiet_hub():
            rows = datasets.load_dataset(source.hub_id, source.config, split=source.split, trust_remote_code=False)
    except Exception as e:  # offline, unknown, or moved: each raises another type
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ValueError(
            f"--prompts {name} is {source.hub_id} on the hub, which cannot be loaded: {reason}. Load it once where the "
            "hub can be reached (the datasets library then keeps it), or give a file of prompts"
        ) from e
    taken = min(limit or DEFAULT_PROMPTS, len(rows))
    indices = [i * len(rows) // taken for i in range(taken)]
    records = []
    for i in indices:
        where = f"{name}, row {i + 1}"
        try:
            records.append(parse_record(source.row_of(rows[i]), where))
        except (KeyError, TypeError) as e:
            raise ValueError(
                f"{where}: {source.hub_id} has other columns than fledge reads ({', '.join(rows[i])}); give a file of "
                "prompts"
            ) from e
    return records
