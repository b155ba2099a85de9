"""`fledge regenerate`: the target answers the data's prompts itself; a draft trained on its words fits it better."""

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

from fledge.files import exclusive_lock, sibling_path
from fledge.jobs.options import (
    GREEDY,
    LARGEST_SEED,
    Options,
    dtype_named,
    new_tokens,
    opt,
    place_of,
    template_kwargs,
    trust_option,
)

if TYPE_CHECKING:
    from fledge.data.record import Record
    from fledge.decode.engine import Engine


NEW_TOKENS = 512  # most tokens of an answer where nobody says


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(Options):
    """Have the target answer the data's prompts itself, for training on its own words."""

    target: str = opt("the model that answers: a directory or hub id")
    trust_remote_code: bool = trust_option()
    draft: str | None = opt("a draft of it, a directory or hub id, to answer sooner in the same words", None)
    data: list[str] = opt("files, globs or hub ids whose prompts are answered; repeatable", many=True)
    out: str = opt("JSON lines to write; an unfinished file is gone on with")
    max_new_tokens: int | None = opt(
        "most tokens of an answer (default: 512, at most half the target's context)", None, least=1
    )
    prompt_tokens: int = opt("tokens of a plain text that are kept as its prompt", 64, least=1)
    temperature: float = opt("0 is greedy", 0.0, least=0)
    top_p: float = opt("sample among the likeliest that hold this mass", 1.0, above=0, most=1)
    batch: int | None = opt("records answered together (default: 16, or each alone where the target must)", None)
    limit: int | None = opt("at most this many records", None, least=1)
    template_kwargs: str | None = opt("JSON passed to the chat template", None)
    seed: int = opt("of sampling, and of the shares (@0.5) of --data", 0, least=0, most=LARGEST_SEED)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            self.refuse(["top_p"], GREEDY)


def run(options: RegenerateOptions, say: Callable[[str], None], progress: Any) -> None:
    """Writes one line a record, in order; killed at any moment, the same command goes on after the last whole line."""
    from fledge.data.read import read_records

    if not options.data:
        raise ValueError("give --data FILE")
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch {options.batch} answers nothing; 1 is least")
    out = place_of(options.out, "--out")
    records = read_records(options.data, options.seed)[: options.limit]
    if empty := next((r for r in records if r.text is not None and not r.text.strip()), None):
        raise ValueError(f"{empty.where}: an empty text has nothing to go on with; remove it")
    with exclusive_lock(sibling_path(out, "lock"), str(out), say):
        try:
            _answer_rest(options, records, out, say, progress)
        except KeyboardInterrupt:
            say(f"stopped; the same command goes on with {out}")
            raise


def _answer_rest(
    options: RegenerateOptions, records: list[Record], out: Path, say: Callable[[str], None], progress: Any
) -> None:
    """Answers the records that have no line in the file yet, which no other process may write."""
    from fledge.data.template import ChatTemplate
    from fledge.decode.engine import BATCH, load

    done = _finished(out, records, options)
    if done == len(records):
        say(f"{out} is complete: {done:,} records")
        return
    if done:
        say(f"going on with {out} after {done:,} of {len(records):,} records")
    engine = load(
        options.target, options.draft, device=options.device, dtype=dtype_named(options.dtype),
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    most = options.max_new_tokens or new_tokens(NEW_TOKENS, engine.target.context)
    # what is asked does not depend on what the draft was trained with
    kwargs = template_kwargs(options.template_kwargs)
    engine.template = ChatTemplate(engine.target.tokenizer, engine.target.stop_ids, kwargs)
    together = 4 * (options.batch or BATCH)  # so that others take the place of those that end
    cut = 0
    answers = [_answers(r) for r in records]
    counting = progress.counting("answers", sum(answers), sum(answers[:done]))
    with out.open("ab", buffering=0) as f, counting as advance:
        for start in range(done, len(records), together):
            batch = records[start : start + together]
            rows, unfinished = _answer(batch, engine, options, most, start, advance)
            cut += unfinished
            try:
                _write(f, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            except OSError as e:
                cure = "make room and give the same command to go on"
                raise ValueError(f"{out} cannot be written on: {e.strerror}; {cure}") from e
    say(f"wrote {len(records):,} records to {out}")
    if cut:
        say(f"{cut:,} answers reached --max-new-tokens {most}; they are kept as far as they go")


def _write(f: FileIO, data: bytes) -> None:
    """Writes all of it. Nothing stays in a buffer, whose writing would fail again when the file is closed."""
    while data:
        data = data[f.write(data) :]


def _finished(out: Path, records: list[Record], options: RegenerateOptions) -> int:
    """Whole lines already there; a torn last line is cut off. Raises ValueError, and leaves the file alone, where they
    are not what these records and options make."""
    if not out.exists():
        return 0
    text = out.read_bytes()
    *lines, torn = text.split(b"\n")
    begins = json.dumps(_head(records[0], options))[: len('{"source": "')].encode()
    ours = len(lines) <= len(records) and torn[: len(begins)] == begins[: len(torn)]
    for line, record in zip(lines, records, strict=False):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        ours = ours and isinstance(row, dict) and row.items() >= _head(record, options).items()
    if not ours:
        raise ValueError(f"{out} is there, and not of this --data and these options; choose another --out")
    if torn:
        os.truncate(out, len(text) - len(torn))
    return len(lines)


def _head(record: Record, options: RegenerateOptions) -> dict[str, str]:
    """What a line begins with: where its record is from, and a hash of all that decides its answers."""
    most = options.max_new_tokens or NEW_TOKENS
    asked = [record.messages, record.text, record.tools, options.target, most, options.prompt_tokens]
    asked += [options.temperature, options.top_p, options.seed, options.template_kwargs]
    asked += [record.turns, record.prompt_length] if record.turns or record.prompt_length else []
    return {"source": record.where, "asked": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}


def _answer(
    batch: list[Record], engine: Engine, options: RegenerateOptions, most: int, start: int,
    advance: Callable[[], None],
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """Answers every assistant turn anew in at most `most` tokens, each behind the target's own earlier answers.
    Returns rows, answers cut.
    Draws are numbered by record, of which `start` came before, and turn: a resumed run draws as an unbroken one.
    `advance` is called for each answer."""
    from fledge.types import Sampling

    template, sampling = engine.template, Sampling(options.temperature, top_p=options.top_p, seed=options.seed)

    def answers(prompts: dict[int, list[int]], turn: int) -> list[tuple[str, bool]]:
        room = engine.target.context - most
        if (long := next((i for i, ids in prompts.items() if len(ids) > room), None)) is not None:
            fewer = ", or lower --max-new-tokens" if len(prompts[long]) < engine.target.context else ""
            raise ValueError(
                f"{batch[long].where}: {len(prompts[long])} tokens stand before an answer of {most}, "
                f"and the target reads at most {engine.target.context}; shorten it{fewer}"
            )
        done = engine.generate_all(
            list(prompts.values()), batch=options.batch, max_new_tokens=most, sampling=sampling,
            request=[((start + i) << 20) + turn for i in prompts],
            answered=lambda place: advance(),
        )  # fmt: skip
        return [(c.text, c.finish == "length") for c in done]

    told: list[list[dict[str, Any]]] = [[] for _ in batch]
    rows: list[dict[str, Any]] = [_head(r, options) for r in batch]
    cut = 0
    prompts = {
        i: template.prompt_ids(r.text[: r.prompt_length])
        if r.prompt_length
        else template.prompt_ids(r.text)[: options.prompt_tokens]
        for i, r in enumerate(batch)
        if r.text
    }
    for i, (text, unfinished) in zip(prompts, answers(prompts, 0), strict=True):
        if given := batch[i].prompt_length:
            rows[i] |= {"prompt": batch[i].text[:given], "completion": text}
        else:
            rows[i]["text"] = engine.target.tokenizer.decode(prompts[i], skip_special_tokens=True) + text
        cut += unfinished
    waiting: dict[int, list[dict[str, Any]]] = {}
    for i, record in enumerate(batch):
        if record.text is None:
            told[i], waiting[i] = _to_answer(record)
    for turn in itertools.count(1):
        for i in list(waiting):
            while waiting[i] and waiting[i][0]["role"] != "assistant":
                told[i].append(waiting[i].pop(0))
            if not waiting[i]:
                del waiting[i]
        if not waiting:
            break
        asked = {i: template.prompt_ids(told[i], tools=batch[i].tools, where=batch[i].where) for i in waiting}
        for i, (text, unfinished) in zip(asked, answers(asked, turn), strict=True):
            told[i].append({"role": "assistant", "content": text})
            waiting[i].pop(0)
            cut += unfinished
    for i, record in enumerate(batch):
        if record.text is None:
            answered, given = _without_open_end(told[i]), record.prompt_length
            said = {"prompt": answered[:given], "completion": answered[given:]} if given else {"messages": answered}
            rows[i] |= said | ({"tools": record.tools} if record.tools else {})
    return rows, cut


def _answers(record: Record) -> int:
    """How many answers a record asks for."""
    if record.text is not None:
        return 1
    return sum(m["role"] == "assistant" for m in _to_answer(record)[1])


def _to_answer(record: Record) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation in two: messages that are only read, which are those given as a prompt or an opening of the
    assistant's, and those with answers to be made anew. A prompt without any gets a place for one."""
    place = {"role": "assistant"}
    if record.turns:
        return [], [m for turn in record.turns for m in ({"role": "user", "content": turn}, place)]
    messages = record.messages or []
    read = record.prompt_length or int(messages[0]["role"] == "assistant")
    rest = messages[read:]
    return messages[:read], [*rest, *([] if any(m["role"] == "assistant" for m in rest) else [place])]


def _without_open_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drops user turns after the last answer: nobody answers them."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return messages[: last + 1]
