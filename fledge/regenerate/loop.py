"""The loop over the conversations of the data: each answer is part of the next answer's prompt. The output file has one
JSON line for each record, written when the record's answers are complete."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.data.answering import answered_conversation, count_answers, split_conversation
from fledge.data.record import Record
from fledge.data.spans import text_prompt
from fledge.data.template import EndlessTemplate
from fledge.engines.client import Answer
from fledge.io.fields import parse_json
from fledge.io.files import replace_file
from fledge.io.http import BadRequest, ServerProblem
from fledge.regenerate.answerers import Answerer, OwnEngine, Question, ServedModel
from fledge.regenerate.check import ENOUGH, REWRITTEN, UNKNOWN, AnswerCheck, Turn, chat_turn, compare

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate
    from fledge.regenerate.options import RegenerateOptions


def regenerate(
    options: RegenerateOptions, records: Sequence[Record], refused: list[str], out: Path, say: Callable[[str], None],
    progress: Any,
) -> None:  # fmt: skip
    """Answers the records that have no line in the output file yet, and puts the lines into the order of the data. The
    caller holds the lock of the output file. `refused` are the reasons of skipped records of the data.

    Raises ValueError for a refused record (unless --skip-bad), after writing the earlier records; for prompts and
    answers that the target's template renders otherwise; and if the server does not answer.
    """
    try:
        with ServedModel(options) if options.endpoint else OwnEngine(options) as answerer:
            file = AnswersFile(out, _headers(records, options, answerer.identity))
            done = len(file.done)
            if done == len(records):
                file.sort()
                say(f"{out} is complete: {done:,} records")
                return
            if done:
                say(f"continuing {out} after {done:,} of {len(records):,} records")
            loop = _Loop(options, answerer, records, refused, file, say)
            numbers = [count_answers(r) for r in records]
            answered = sum(numbers[i] for i in file.done)
            with file, progress.count("answers", sum(numbers), answered, unit="answers") as advance:
                loop.run(advance)
    except ServerProblem as e:
        raise ValueError(f"{e}; run the same command again to continue {out}") from e
    file.sort()
    if refused and not file.done:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    say(f"wrote {len(file.done):,} records to {out}")
    loop.report(" of this run" if done else "")


def _headers(records: Sequence[Record], options: RegenerateOptions, identity: list[Any]) -> list[dict[str, str]]:
    """The first fields of the rows: the location of the record, and a hash of everything that determines the record's
    answers. Hashes of records with the same content and location (`@2`) include a running number."""
    asked = [*identity, options.prompt_tokens, options.temperature, options.top_p, options.top_k]
    asked.append(options.template_kwargs)
    seen: Counter[str] = Counter()
    headers = []
    for r in records:
        content = json.dumps([asked, r.where, r.messages, r.text, r.tools, r.turns, r.prompt_length, r.template_kwargs])
        key = hashlib.sha256(f"{content}{seen[content] or ''}".encode()).hexdigest()[:16]
        seen[content] += 1
        headers.append({"source": r.where, "asked": key})
    return headers


class _Loop:
    """One run: the records that are being answered, and counts of events.

    After an answer, the record's next question is asked at once, so that the answerer always has work. Then the answer
    (`turn`) is compared with the target's template, and after a record's last answer, the record's row is written.
    """

    def __init__(
        self, options: RegenerateOptions, answerer: Answerer, records: Sequence[Record], refused: list[str],
        file: AnswersFile, say: Callable[[str], None],
    ):  # fmt: skip
        self.options, self.answerer, self.records = options, answerer, records
        self.refused, self.file, self.say = refused, file, say
        self.todo = iter([i for i in range(len(records)) if i not in file.done])
        self.open: dict[int, Generator[Question, Answer, dict[str, Any]]] = {}
        self.turn: Turn | None = None
        self.held: dict[int, dict[str, Any]] = {}
        self.check, self.counts = AnswerCheck(), Counter[str]()
        self.refusal: tuple[int, str] | None = None
        template = answerer.template
        for r in records:
            if r.text is None and template is not None and template.tokenizer.chat_template is None:
                raise ValueError(
                    f"{options.target} has no chat template, and {r.where} is a conversation; give the "
                    "instruction-tuned model as --target"
                )
            if r.text is not None and template is None and not r.prompt_length:
                raise ValueError(
                    f"{r.where}: of a plain text, the first --prompt-tokens are kept, as --target's tokenizer counts "
                    "them; give --target MODEL, or the data as `prompt` and `completion`"
                )

    def run(self, advance: Callable[[], None]) -> None:
        """Answers all records."""
        while self._fill():
            for index, answer in self.answerer.answers(self.open, advance):
                if index in self.open:
                    self._continue(index, answer)
                    if self.answerer.answers_meanwhile:
                        self._fill()
        if self.refusal:
            cure = "change or shorten the record, lower --max-new-tokens, or skip such records by --skip-bad"
            raise ValueError(f"{self.refusal[1]}; {cure}")
        if self.held or (self.check.mostly_rewritten and not self.file.done):
            self._explain_answers()

    def _fill(self) -> bool:
        """Opens records until `answerer.places` records are open. Returns whether any record is open."""
        while len(self.open) < self.answerer.places and not self.refusal:
            if (index := next(self.todo, None)) is None:
                break
            self.open[index] = self._converse(index, self.records[index])
            self._continue(index, None)
        return bool(self.open)

    def _continue(self, index: int, answer: Answer | BadRequest | None) -> None:
        """Hands an answer to the record `index`, and asks the record's next question. Rows are held back while most
        compared answers are rewritten: if rewritten answers end the job, the same command can be run again with a
        different server."""
        row, self.turn = None, None
        try:
            conversation = self.open[index]
            if isinstance(answer, BadRequest):
                raise answer
            self.counts["truncated"] += answer is not None and answer.finish == "length"
            self.answerer.ask(conversation.send(answer))
        except StopIteration as end:
            row = end.value
        except (EndlessTemplate, ServerProblem):
            raise
        except ValueError as e:  # the template or the answerer refuses the conversation
            self._refuse(index, e)
            return
        if self.turn is not None and not self._compare(self.turn):
            del self.open[index]
        elif row is not None:
            del self.open[index]
            self.held[index] = row
            if not self.check.mostly_rewritten:
                self.file.append(self.held)
                self.held = {}

    def _converse(self, index: int, record: Record) -> Generator[Question, Answer, dict[str, Any]]:
        """Yields the questions of a record, each after the previous answer, and returns the record's row."""
        template = self.answerer.template and self.answerer.template.of(record.template_kwargs)
        if record.text is not None:
            prompt, start = self._text_prompt(template, record.text, record.prompt_length)
            question = Question(index, 0, record, template, [], prompt)
            answer = yield question
            whole = start + answer.text
            if template is not None:
                self.turn = Turn(question, answer, whole)
            return {"prompt": start, "completion": answer.text} if record.prompt_length else {"text": whole}
        kept, rest = split_conversation(record)
        messages = list(kept)
        for number in itertools.count(1):
            while rest[0]["role"] != "assistant":
                messages.append(rest.pop(0))
            rest.pop(0)
            before = "" if template is None else template.prompt_text(messages, tools=record.tools, where=record.where)
            question = Question(index, number, record, template, messages, before)
            answer = yield question
            messages.append(message := self.answerer.message(question, answer))
            if template is not None:
                self.turn = chat_turn(question, messages, answer)
            if not any(m["role"] == "assistant" for m in rest):
                break
            if message.get("tool_calls"):
                self.counts["calls"] += 1
                break
        return answered_conversation(record, messages)

    def _text_prompt(self, template: ChatTemplate | None, text: str, length: int) -> tuple[str | list[int], str]:
        """The prompt of a plain text, as token ids (as text without a template) and as text: the first `length`
        characters of the text, or --prompt-tokens tokens if `length` is 0."""
        if not length:
            return text_prompt(template, text, self.options.prompt_tokens)
        return text[:length] if template is None else template.prompt_ids(text[:length]), text[:length]

    def _refuse(self, index: int, error: ValueError) -> None:
        """Skips a record that cannot be answered. Without --skip-bad, also drops all later records."""
        where = self.records[index].where
        reason = f"{where}: {str(error).removeprefix(f'{where}: ')}"
        del self.open[index]
        if self.options.skip_bad:
            self.refused.append(reason)
            return
        self.refusal = min(self.refusal or (index, reason), (index, reason))
        for later in [i for i in self.open if i > index]:
            del self.open[later]

    def _compare(self, turn: Turn) -> bool:
        """Compares an answer with the target's template. Returns False for an answer that is left out with its record.
        Raises ValueError for a prompt that the server tokenized differently, and if most answers are rewritten."""
        found = compare(turn, spaces=self.answerer.keeps_rewritten)
        if found.prompt:
            self._explain_prompt(turn.question.record, found.prompt)
        self.check.add(turn, found)
        if found.answer == UNKNOWN and self.check.counts[UNKNOWN] == 1:
            self.say(
                "the answers of this server cannot be compared with what the target's template gives, as it returns "
                "neither their token ids nor a number of tokens that can be compared; vLLM returns the ids"
            )
        if self.check.compared >= ENOUGH and self.check.mostly_rewritten:
            self._explain_answers()
        left_out = found.answer == REWRITTEN and not self.answerer.keeps_rewritten
        self.counts["left out"] += left_out
        return not left_out

    def _explain_prompt(self, record: Record, difference: str) -> None:
        """Raises ValueError for a prompt that the server tokenized differently. For records with tools, gives a message
        once instead, since servers rewrite the JSON of tools."""
        found = f"{record.where}: the prompt is not that of {self.options.target} ({difference})"
        if not record.tools:
            raise ValueError(
                f"{found}: the server has another template or thinking mode, adds a system prompt, or serves another "
                "model. Give --template-kwargs as the server needs them, or leave --target out to keep such answers"
            )
        self.counts["tools"] += 1
        if self.counts["tools"] == 1:
            self.say(f"{found}: the server renders tools in another way")

    def _explain_answers(self) -> None:
        """Raises ValueError for too many rewritten answers."""
        check, answerer, kept = self.check, self.answerer, len(self.file.done)
        written = f" (remove its {kept:,} records first, if they are of this server)"
        raise ValueError(
            f"{check.counts[REWRITTEN]:,} of {check.compared:,} answers are not what the {answerer.who} generated, the "
            f"first: {check.first[REWRITTEN]}. A draft would be trained on another text than it will see. "
            f"{answerer.cure}{written * bool(kept and answerer.keeps_rewritten)}"
        )

    def report(self, which: str) -> None:
        """Gives messages about compared, cut and skipped answers. `which` as in `AnswerCheck.report`."""
        for line in self.check.report(which, self.answerer.keeps_rewritten):
            self.say(line)
        sentences = {
            "left out": "records were left out: the chat template does not render their answers as the target "
            "generated them",
            "calls": "conversations end before the last question of the data, at a tool call of the target's own, as "
            "nobody answers it",
            "truncated": f"answers reached --max-new-tokens {self.answerer.max_new_tokens}; they are kept, cut at that "
            "length",
        }
        for name, sentence in sentences.items():
            if n := self.counts[name]:
                self.say(f"{n:,} {sentence}")
        if self.refused:
            self.say(f"{len(self.refused):,} records were refused (--skip-bad), the first because: {self.refused[0]}")
        if repeated := self.answerer.repeated:
            reasons = ", ".join(f"{reason} ({n:,})" for reason, n in repeated.most_common())
            self.say(f"{repeated.total():,} requests were repeated: {reasons}")


class AnswersFile:
    """A file with a row for each record, used as a context manager.

    `headers` are the first fields of the rows, in the order of the data and all different: `source`, the location of
    the record, and `asked`, a hash of everything that determines the record's answers. Rows are appended in any order.
    `done` holds the indices of complete rows, including rows of interrupted jobs. Raises ValueError, and leaves the
    file unchanged, if the file has a row without a matching header.
    """

    def __init__(self, path: Path, headers: Sequence[dict[str, str]]):
        self.path, self.headers = path, headers
        self._foreign = (
            f"{path} already exists and was not made from this --data with these options; choose another --out"
        )
        self.done: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}  # start and length of each row in the file, in bytes
        self._read()

    def _read(self) -> None:
        """Finds the complete rows, and removes an incomplete last line that is the beginning of a row."""
        if not self.path.exists():
            return
        indices = {(header["source"], header["asked"]): index for index, header in enumerate(self.headers)}
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    if not self._begins_row(line):
                        raise ValueError(
                            f"{self._foreign}. If {self.path} is an unfinished file of this command, remove its last "
                            "line, which is incomplete"
                        )
                    break
                try:
                    row = parse_json(line)
                    index = indices.pop((row["source"], row["asked"]))
                except (ValueError, KeyError, TypeError) as e:
                    raise ValueError(self._foreign) from e
                self.done.add(index)
                self._places[index] = end, len(line)
                end += len(line)
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)

    def _begins_row(self, line: bytes) -> bool:
        """Whether an incomplete line begins with a whole header, or, after complete rows, with a part of a header."""
        starts = (json.dumps(header, ensure_ascii=False)[:-1].encode() for header in self.headers)
        return any(line.startswith(start) or (self.done and start.startswith(line)) for start in starts)

    def __enter__(self) -> AnswersFile:
        self._file: FileIO = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, rows: dict[int, dict[str, Any]]) -> None:
        """Appends `rows`, fields by row index, without the headers, which are added here. Raises ValueError if the file
        cannot be written."""
        start, data = self._file.seek(0, os.SEEK_END), b""
        for index, row in rows.items():
            line = (json.dumps(self.headers[index] | row, ensure_ascii=False) + "\n").encode()
            self._places[index] = start + len(data), len(line)
            data += line
        try:
            while data:  # unbuffered: an unwritten buffer would fail again when the file is closed
                data = data[self._file.write(data) :]
        except OSError as e:
            cure = "free some disk space and run the same command again to continue"
            raise ValueError(f"{self.path} cannot be written: {e.strerror}; {cure}") from e
        self.done |= rows.keys()

    def sort(self) -> None:
        """Sorts the rows into the order of the data, if necessary: writes a sorted file, which then replaces the file
        atomically. A job that is killed meanwhile leaves a complete file in the old order."""
        if list(self._places) == sorted(self._places):
            return
        with self.path.open("rb") as old:

            def row(start: int, length: int) -> bytes:
                old.seek(start)
                return old.read(length)

            replace_file(self.path, (row(*self._places[index]) for index in sorted(self._places)))
