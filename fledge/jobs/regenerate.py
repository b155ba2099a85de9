"""`fledge regenerate`: replaces the assistant's answers in the data by the target's own.

A draft that is trained on text of the target predicts the target better.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.data.answering import (
    answer_message,
    answer_text,
    answered_conversation,
    count_answers,
    split_conversation,
    stops_at_tool,
    text_prompt,
)
from fledge.data.limit import EndlessTemplate
from fledge.files import check_output_path, exclusive_lock, sibling_path
from fledge.jobs.answer_check import ENOUGH, REWRITTEN, SAME, AnswerCheck, Turn, chat_turn, compare, own_answer
from fledge.jobs.answers_file import AnswersFile
from fledge.jobs.options import (
    MAX_SEED,
    NO_EFFECT_IF_GREEDY,
    SERVER_OPTIONS,
    Options,
    api_key_env_option,
    columns_option,
    default_new_tokens,
    dtype_option,
    model_option,
    opt,
    parse_dtype,
    parse_template_kwargs,
    request_timeout_option,
    trust_remote_code_option,
)

if TYPE_CHECKING:
    from fledge.data.record import Record
    from fledge.data.template import ChatTemplate
    from fledge.decode.engine import Engine
    from fledge.decode.request import Completion


NEW_TOKENS = 512  # default of --max-new-tokens


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(Options):
    """Answer the prompts of the data with the target, to train a draft on the target's own text."""

    target: str | None = opt(
        "target model: a directory or hub id; with --endpoint only its tokenizer is read, to check the texts", None
    )
    trust_remote_code: bool = trust_remote_code_option()
    draft: str | None = opt(
        "draft of the target, a directory or hub id, to generate the same text faster (default: none)", None
    )
    endpoint: str | None = opt(
        "address of an OpenAI-compatible server (vLLM, SGLang, ..) that answers, e.g. http://localhost:8000", None
    )
    model: str | None = model_option()
    api_key_env: str = api_key_env_option()
    concurrency: int = opt("number of requests that the server works on at any time", 64, minimum=1, maximum=4096)
    request_timeout: float = request_timeout_option()
    skip_bad: bool = opt("skip records that fledge, the chat template or the server refuses, and count them", False)
    data: list[str] = opt(
        "files, globs or hub ids with the prompts to answer, or sharegpt, ultrachat, perfectblend, magpie, openhermes, "
        "nemotron; repeatable", repeatable=True
    )  # fmt: skip
    columns: str | None = columns_option()
    out: str = opt("JSON lines file to write; an unfinished file is continued")
    max_new_tokens: int | None = opt(
        "maximum tokens per answer (default: 512, at most half of the target's context)", None, minimum=1
    )
    prompt_tokens: int = opt("tokens of a plain text that are kept as its prompt", 64, minimum=1)
    temperature: float = opt("sampling temperature; 0 decodes greedily", 0.0, minimum=0)
    top_p: float = opt(
        "sample from the most likely tokens whose probabilities sum to this value", 1.0, greater_than=0, maximum=1
    )
    top_k: int = opt("sample from the k most likely tokens; 0 keeps all; with --endpoint", 0, minimum=0)
    batch: int | None = opt("records answered together (default: 16, or 1 if the target cannot batch)", None)
    limit: int | None = opt("maximum number of records (default: all)", None, minimum=1)
    template_kwargs: str | None = opt("JSON object of chat template variables", None)
    seed: int = opt(
        "random seed of sampling (with --endpoint only if it is given) and of the shares (@0.5) of --data", 0,
        minimum=0, maximum=MAX_SEED,
    )  # fmt: skip
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = dtype_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            self.refuse(["top_p", "top_k"], NO_EFFECT_IF_GREEDY)
        if self.endpoint is None:
            self.refuse((*SERVER_OPTIONS, "concurrency", "top_k"), "without --endpoint; give it, or")
        else:
            self.refuse(("draft", "batch", "device", "dtype"), "with --endpoint, whose server decodes;")
            if self.trust_remote_code and not self.target:
                raise ValueError("--trust-remote-code has no effect without --target; give it, or leave the flag out")


def run(options: RegenerateOptions, say: Callable[[str], None], progress: Any) -> None:
    """Writes one line per record, in the order of the data. After an interruption, the same command continues with the
    records that have no complete line.

    With --endpoint, lines are written as the answers come, and put into the order of the data when all are there.
    """
    from fledge.data.presets import shadowed_presets
    from fledge.data.read import read_records, with_columns

    if not options.data:
        raise ValueError("give --data FILE")
    if not options.target and not options.endpoint:
        raise ValueError("give --target MODEL, which answers, or --endpoint URL, the address of a server that does")
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch {options.batch}: it must be at least 1")
    out = check_output_path(options.out, "--out")
    refused: list[str] = []
    for message in shadowed_presets(options.data):
        say(message)
    sources = with_columns(options.data, options.columns)
    records = read_records(sources, options.seed, refused.append if options.skip_bad else None)[: options.limit]
    if stopped := sum(map(stops_at_tool, records)):
        say(
            f"{stopped:,} of {len(records):,} conversations end before the first result of a tool, as it answers the "
            "data's own call"
        )
    is_empty = [r.text is not None and not r.text.strip() for r in records]
    problems = [f"{r.where}: the text is empty, so there is no prompt to continue" for r in compress(records, is_empty)]
    if problems and not options.skip_bad:
        raise ValueError(f"{problems[0]}; remove the record, or skip such records by --skip-bad")
    refused += problems
    records = [r for r, empty in zip(records, is_empty, strict=True) if not empty]
    if refused and not records:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    with exclusive_lock(sibling_path(out, "lock"), str(out), say):
        try:
            if options.endpoint:
                from fledge.jobs.regenerate_endpoint import answer_remaining

                answer_remaining(options, records, refused, out, say, progress)
            else:
                _answer_remaining(options, records, refused, out, say, progress)
        except KeyboardInterrupt:
            say(f"stopped; run the same command again to continue {out}")
            raise


def _answer_remaining(
    options: RegenerateOptions, records: list[Record], refused: list[str], out: Path, say: Callable[[str], None],
    progress: Any,
) -> None:  # fmt: skip
    """Answers the records that have no line in the output file yet. The caller holds the lock of the file. `refused`
    are the reasons for which records of the data were skipped.

    Raises ValueError for a record that cannot be answered (unless --skip-bad), after those before it are written.
    """
    from fledge.data.template import ChatTemplate
    from fledge.decode.engine import BATCH, load

    file = AnswersFile(out, [_row_header(r, options) for r in records])
    todo, done = [i for i in range(len(records)) if i not in file.done], len(file.done)
    if not todo:
        file.sort()
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
    check, counts = AnswerCheck(), Counter[str]()
    answers = [count_answers(r) for r in records]
    counter = progress.count("answers", sum(answers), sum(answers[i] for i in file.done), unit="answers")
    with file, counter as advance:
        for first in range(0, len(todo), group):
            places = todo[first : first + group]
            batch = [records[i] for i in places]
            rows, bad = _answer_batch(batch, engine, options, max_new_tokens, places, advance, check, counts)
            if bad and not options.skip_bad:
                file.append({place: row for place, row in zip(places[: min(bad)], rows, strict=False) if row})
                raise ValueError(f"{bad[min(bad)]}; or skip such records by --skip-bad")
            refused += bad.values()
            file.append({place: row for place, row in zip(places, rows, strict=True) if row})
            if check.mostly_rewritten and (check.compared >= ENOUGH or not file.done):
                _explain_answers(check, options)
    file.sort()
    if refused and not file.done:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    say(f"wrote {len(file.done):,} records to {out}")
    if check.compared > check.counts[SAME]:
        for line in check.report(" of this run" if done else "", spaces=False):
            say(line)
    if counts["left out"]:
        say(
            f"{counts['left out']:,} records were left out: the chat template does not render their answers as the "
            "target generated them"
        )
    if counts["calls"]:
        say(
            f"{counts['calls']:,} conversations end before the last question of the data, at a tool call of the "
            "target's own, as nobody answers it"
        )
    if truncated := counts["truncated"]:
        say(f"{truncated:,} answers reached --max-new-tokens {max_new_tokens}; they are kept, cut at that length")
    if refused:
        say(f"{len(refused):,} records were refused (--skip-bad), the first because: {refused[0]}")


def _row_header(record: Record, options: RegenerateOptions) -> dict[str, str]:
    """The first fields of a row: the location of its record, and a hash of everything that determines its answers."""
    max_new_tokens = options.max_new_tokens or NEW_TOKENS
    asked = [record.messages, record.text, record.tools, options.target, max_new_tokens, options.prompt_tokens]
    asked += [options.temperature, options.top_p, options.seed, options.template_kwargs]
    asked += [record.turns, record.prompt_length] if record.turns or record.prompt_length else []
    asked += [record.template_kwargs] if record.template_kwargs else []
    return {"source": record.where, "asked": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}


def _prompt_ids(engine: Engine, record: Record, history: list[dict[str, Any]]) -> list[int]:
    """The prompt of a record's next answer. Warns if the draft was not trained in this mode of the template."""
    template = engine.template.of(record.template_kwargs)
    engine.warn_of_mode(history, template, tools=record.tools)
    return template.prompt_ids(history, tools=record.tools, where=record.where)


def _answer_batch(
    batch: list[Record], engine: Engine, options: RegenerateOptions, max_new_tokens: int, places: Sequence[int],
    advance: Callable[[], None], check: AnswerCheck, counts: Counter[str],
) -> tuple[list[dict[str, Any]], dict[int, str]]:  # fmt: skip
    """Generates all answers of these records. Each prompt contains the target's earlier answers of its conversation.

    Returns the rows to write, without their headers, and by the index of each record that cannot be answered, the
    reason. A row is empty if its record cannot be answered, or has an answer that `check` finds to be other text than
    the target generated. `counts` gets the numbers of answers that reached `max_new_tokens` ("truncated"), of records
    with other text ("left out") and of conversations that end at a call ("calls"). `places` are the indices of the
    records in the data: random draws are keyed by record and turn, so that a continued job generates the same text as
    an uninterrupted one. `advance` is called after each answer.
    """
    from fledge.types import Sampling

    sampling = Sampling(options.temperature, top_p=options.top_p, seed=options.seed)

    bad: dict[int, str] = {}
    altered: set[int] = set()  # records with an answer that the template renders as other text

    def generate(prompts: dict[int, list[int]], turn: int) -> dict[int, Completion]:
        """For each prompt that fits the target's context, the answer; the others become `bad`. Keys are indices into
        `batch`."""
        room = engine.target.context - max_new_tokens
        for i in [i for i, ids in prompts.items() if len(ids) > room]:
            ids = prompts.pop(i)
            fewer = ", or lower --max-new-tokens" if len(ids) < engine.target.context else ""
            bad[i] = (
                f"{batch[i].where}: a prompt of {len(ids)} tokens and an answer of {max_new_tokens} exceed the "
                f"target's context of {engine.target.context} tokens; shorten it{fewer}"
            )
        completions = engine.generate_all(
            list(prompts.values()), batch=options.batch, max_new_tokens=max_new_tokens, sampling=sampling,
            request=[(places[i] << 20) + turn for i in prompts],
            answered=lambda place: advance(),
        )  # fmt: skip
        counts["truncated"] += sum(done.finish == "length" for done in completions)
        return dict(zip(prompts, completions, strict=True))

    def is_same(template: ChatTemplate, turn: Turn) -> bool:
        """Whether training will read the text that was generated."""
        found = compare(template, turn, spaces=False)
        check.add(turn, found)
        counts["left out"] += found.answer == REWRITTEN
        return found.answer != REWRITTEN

    histories: list[list[dict[str, Any]]] = [[] for _ in batch]
    rows: list[dict[str, Any]] = [{} for _ in batch]
    starts = {i: _text_start(engine.template, r, options.prompt_tokens) for i, r in enumerate(batch) if r.text}
    for i, done in generate({i: ids for i, (ids, _) in starts.items()}, 0).items():
        ids, start = starts[i]
        text = answer_text(engine.template, ids, done.tokens)
        if is_same(engine.template, Turn(batch[i], 1, ids, own_answer(ids, done, text), start + text)):
            rows[i] = {"prompt": start, "completion": text} if batch[i].prompt_length else {"text": start + text}
    remaining: dict[int, list[dict[str, Any]]] = {}
    for i, record in enumerate(batch):
        if record.text is None:
            histories[i], remaining[i] = split_conversation(record)
    for turn in itertools.count(1):
        for i in list(remaining):
            while remaining[i] and remaining[i][0]["role"] != "assistant":
                histories[i].append(remaining[i].pop(0))
            if not remaining[i]:
                del remaining[i]
        if not remaining:
            break
        asked: dict[int, list[int]] = {}
        for i in remaining:
            try:
                asked[i] = _prompt_ids(engine, batch[i], histories[i])
            except EndlessTemplate:
                raise
            except ValueError as e:  # the template refuses the conversation
                bad[i] = str(e)
        answers = generate(asked, turn)
        remaining = {i: rest for i, rest in remaining.items() if i not in bad}
        for i, done in answers.items():
            record, history, ids = batch[i], histories[i], asked[i]
            template = engine.template.of(record.template_kwargs)
            message, _ = answer_message(template, history, ids, done.tokens, record.tools)
            before = template.prompt_text(history, tools=record.tools)
            answer = own_answer(ids, done, answer_text(template, ids, done.tokens))
            history.append(message)
            remaining[i].pop(0)
            if not is_same(template, chat_turn(template, record, history, turn, before, answer)):
                del remaining[i]
                altered.add(i)
            elif message.get("tool_calls") and any(m["role"] == "assistant" for m in remaining[i]):
                counts["calls"] += 1
                del remaining[i]
    for i, record in enumerate(batch):
        if record.text is None and i not in bad and i not in altered:
            rows[i] = answered_conversation(record, histories[i])
    return rows, bad


def _text_start(template: ChatTemplate, record: Record, tokens: int) -> tuple[list[int], str]:
    """The prompt of a plain text, as token ids and as text: what the record marks as prompt, or its first `tokens`
    tokens."""
    if length := record.prompt_length:
        return template.prompt_ids(record.text[:length]), record.text[:length]
    return text_prompt(template, record.text, tokens)


def _explain_answers(check: AnswerCheck, options: RegenerateOptions) -> None:
    """Raises ValueError for answers whose text is not what the target generated."""
    raise ValueError(
        f"{check.counts[REWRITTEN]:,} of {check.compared:,} answers are not what the target generated, the first: "
        f"{check.first[REWRITTEN]}. A draft would be trained on another text than it will see. The chat template of "
        f"{options.target} does not render the answers as they were generated: give --template-kwargs as the answers "
        "need them, or a target with the chat template that it was trained with"
    )
