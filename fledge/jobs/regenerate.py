"""`fledge regenerate`: replaces the assistant's answers in the data by the target's own.

A draft that is trained on text of the target predicts the target better.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.files import check_output_path, exclusive_lock, sibling_path
from fledge.jobs.options import (
    MAX_SEED,
    NO_EFFECT_IF_GREEDY,
    Options,
    default_new_tokens,
    opt,
    parse_dtype,
    parse_template_kwargs,
    trust_remote_code_option,
)

if TYPE_CHECKING:
    from fledge.data.record import Record
    from fledge.decode.engine import Engine


NEW_TOKENS = 512  # default of --max-new-tokens


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(Options):
    """Answer the prompts of the data with the target, to train a draft on the target's own text."""

    target: str = opt("target model: a directory or hub id")
    trust_remote_code: bool = trust_remote_code_option()
    draft: str | None = opt(
        "draft of the target, a directory or hub id, to generate the same text faster (default: none)", None
    )
    data: list[str] = opt("files, globs or hub ids with the prompts to answer; repeatable", repeatable=True)
    out: str = opt("JSON lines file to write; an unfinished file is continued")
    max_new_tokens: int | None = opt(
        "maximum tokens per answer (default: 512, at most half of the target's context)", None, minimum=1
    )
    prompt_tokens: int = opt("tokens of a plain text that are kept as its prompt", 64, minimum=1)
    temperature: float = opt("sampling temperature; 0 decodes greedily", 0.0, minimum=0)
    top_p: float = opt(
        "sample from the most likely tokens whose probabilities sum to this value", 1.0, greater_than=0, maximum=1
    )
    batch: int | None = opt("records answered together (default: 16, or 1 if the target cannot batch)", None)
    limit: int | None = opt("maximum number of records (default: all)", None, minimum=1)
    template_kwargs: str | None = opt("JSON object of chat template variables", None)
    seed: int = opt("random seed of sampling and of the shares (@0.5) of --data", 0, minimum=0, maximum=MAX_SEED)
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = opt("compute dtype (default: float32 on a CPU, otherwise the target's dtype)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            self.refuse(["top_p"], NO_EFFECT_IF_GREEDY)


def run(options: RegenerateOptions, say: Callable[[str], None], progress: Any) -> None:
    """Writes one line per record, in the order of the data. After an interruption, the same command continues after the
    last complete line."""
    from fledge.data.read import read_records

    if not options.data:
        raise ValueError("give --data FILE")
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch {options.batch}: it must be at least 1")
    out = check_output_path(options.out, "--out")
    records = read_records(options.data, options.seed)[: options.limit]
    if empty := next((r for r in records if r.text is not None and not r.text.strip()), None):
        raise ValueError(f"{empty.where}: the text is empty, so there is no prompt to continue; remove the record")
    with exclusive_lock(sibling_path(out, "lock"), str(out), say):
        try:
            _answer_remaining(options, records, out, say, progress)
        except KeyboardInterrupt:
            say(f"stopped; run the same command again to continue {out}")
            raise


def _answer_remaining(
    options: RegenerateOptions, records: list[Record], out: Path, say: Callable[[str], None], progress: Any
) -> None:
    """Answers the records that have no line in the output file yet. The caller holds the lock of the file."""
    from fledge.data.template import ChatTemplate
    from fledge.decode.engine import BATCH, load

    done = _count_finished(out, records, options)
    if done == len(records):
        say(f"{out} is complete: {done:,} records")
        return
    if done:
        say(f"continuing {out} after {done:,} of {len(records):,} records")
    engine = load(
        options.target, options.draft, device=options.device, dtype=parse_dtype(options.dtype),
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    max_new_tokens = options.max_new_tokens or default_new_tokens(NEW_TOKENS, engine.target.context)
    # the engine's own template would have the variables recorded in the draft; prompts must not depend on the draft
    kwargs = parse_template_kwargs(options.template_kwargs)
    engine.template = ChatTemplate(engine.target.tokenizer, engine.target.stop_ids, kwargs)
    group = 4 * (options.batch or BATCH)  # several batches, so that a finished request is replaced by the next one
    truncated = 0
    answers = [_count_answers(r) for r in records]
    counter = progress.count("answers", sum(answers), sum(answers[:done]))
    with out.open("ab", buffering=0) as f, counter as advance:
        for start in range(done, len(records), group):
            batch = records[start : start + group]
            rows, truncated_here = _answer_batch(batch, engine, options, max_new_tokens, start, advance)
            truncated += truncated_here
            try:
                _write_all(f, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            except OSError as e:
                cure = "free some disk space and run the same command again to continue"
                raise ValueError(f"{out} cannot be written: {e.strerror}; {cure}") from e
    say(f"wrote {len(records):,} records to {out}")
    if truncated:
        say(f"{truncated:,} answers reached --max-new-tokens {max_new_tokens}; they are kept, cut at that length")


def _write_all(f: FileIO, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file. A buffer that cannot be written would fail again when the file is
    closed."""
    while data:
        data = data[f.write(data) :]


def _count_finished(out: Path, records: list[Record], options: RegenerateOptions) -> int:
    """The number of complete lines in the output file. An incomplete last line is removed.

    Raises ValueError, and leaves the file unchanged, if it does not belong to these records and options.
    """
    if not out.exists():
        return 0
    content = out.read_bytes()
    *lines, incomplete = content.split(b"\n")
    expected_start = json.dumps(_row_header(records[0], options))[: len('{"source": "')].encode()
    ours = len(lines) <= len(records) and incomplete[: len(expected_start)] == expected_start[: len(incomplete)]
    for line, record in zip(lines, records, strict=False):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        ours = ours and isinstance(row, dict) and row.items() >= _row_header(record, options).items()
    if not ours:
        raise ValueError(
            f"{out} already exists and was not made from this --data with these options; choose another --out"
        )
    if incomplete:
        os.truncate(out, len(content) - len(incomplete))
    return len(lines)


def _row_header(record: Record, options: RegenerateOptions) -> dict[str, str]:
    """The first fields of a row: the location of its record, and a hash of everything that determines its answers."""
    max_new_tokens = options.max_new_tokens or NEW_TOKENS
    asked = [record.messages, record.text, record.tools, options.target, max_new_tokens, options.prompt_tokens]
    asked += [options.temperature, options.top_p, options.seed, options.template_kwargs]
    asked += [record.turns, record.prompt_length] if record.turns or record.prompt_length else []
    return {"source": record.where, "asked": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}


def _answer_batch(
    batch: list[Record], engine: Engine, options: RegenerateOptions, max_new_tokens: int, start: int,
    advance: Callable[[], None],
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """Generates all answers of these records. Each prompt contains the target's earlier answers of its conversation.

    Returns the rows to write and the number of answers that reached `max_new_tokens`. `start` is the index of the first
    record in the data: random draws are keyed by record and turn, so that a continued job generates the same text as an
    uninterrupted one. `advance` is called after each answer.
    """
    from fledge.types import Sampling

    template, sampling = engine.template, Sampling(options.temperature, top_p=options.top_p, seed=options.seed)

    def generate(prompts: dict[int, list[int]], turn: int) -> list[tuple[str, bool]]:
        """For each prompt, the answer and whether it was truncated. Keys are indices into `batch`."""
        room = engine.target.context - max_new_tokens
        if (long := next((i for i, ids in prompts.items() if len(ids) > room), None)) is not None:
            fewer = ", or lower --max-new-tokens" if len(prompts[long]) < engine.target.context else ""
            raise ValueError(
                f"{batch[long].where}: a prompt of {len(prompts[long])} tokens and an answer of {max_new_tokens} "
                f"exceed the target's context of {engine.target.context} tokens; shorten it{fewer}"
            )
        completions = engine.generate_all(
            list(prompts.values()), batch=options.batch, max_new_tokens=max_new_tokens, sampling=sampling,
            request=[((start + i) << 20) + turn for i in prompts],
            answered=lambda place: advance(),
        )  # fmt: skip
        return [(c.text, c.finish == "length") for c in completions]

    histories: list[list[dict[str, Any]]] = [[] for _ in batch]
    rows: list[dict[str, Any]] = [_row_header(r, options) for r in batch]
    truncated = 0
    prompts = {
        i: template.prompt_ids(r.text[: r.prompt_length])
        if r.prompt_length
        else template.prompt_ids(r.text)[: options.prompt_tokens]
        for i, r in enumerate(batch)
        if r.text
    }
    for i, (text, was_truncated) in zip(prompts, generate(prompts, 0), strict=True):
        if length := batch[i].prompt_length:
            rows[i] |= {"prompt": batch[i].text[:length], "completion": text}
        else:
            rows[i]["text"] = engine.target.tokenizer.decode(prompts[i], skip_special_tokens=True) + text
        truncated += was_truncated
    remaining: dict[int, list[dict[str, Any]]] = {}
    for i, record in enumerate(batch):
        if record.text is None:
            histories[i], remaining[i] = _split_conversation(record)
    for turn in itertools.count(1):
        for i in list(remaining):
            while remaining[i] and remaining[i][0]["role"] != "assistant":
                histories[i].append(remaining[i].pop(0))
            if not remaining[i]:
                del remaining[i]
        if not remaining:
            break
        asked = {i: template.prompt_ids(histories[i], tools=batch[i].tools, where=batch[i].where) for i in remaining}
        for i, (text, was_truncated) in zip(asked, generate(asked, turn), strict=True):
            histories[i].append({"role": "assistant", "content": text})
            remaining[i].pop(0)
            truncated += was_truncated
    for i, record in enumerate(batch):
        if record.text is None:
            messages, length = _without_unanswered_turns(histories[i]), record.prompt_length
            fields = (
                {"prompt": messages[:length], "completion": messages[length:]} if length else {"messages": messages}
            )
            rows[i] |= fields | ({"tools": record.tools} if record.tools else {})
    return rows, truncated


def _count_answers(record: Record) -> int:
    """The number of answers to generate for a record."""
    if record.text is not None:
        return 1
    return sum(m["role"] == "assistant" for m in _split_conversation(record)[1])


def _split_conversation(record: Record) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation in two parts: the messages to keep, and the rest, whose assistant messages are to be generated.

    The first part is the record's prompt, or an assistant message that opens the conversation. If the rest has no
    assistant message, a placeholder for one is added.
    """
    placeholder = {"role": "assistant"}
    if record.turns:
        return [], [m for turn in record.turns for m in ({"role": "user", "content": turn}, placeholder)]
    messages = record.messages or []
    kept = record.prompt_length or int(messages[0]["role"] == "assistant")
    rest = messages[kept:]
    return messages[:kept], [*rest, *([] if any(m["role"] == "assistant" for m in rest) else [placeholder])]


def _without_unanswered_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to its last assistant message."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return messages[: last + 1]
