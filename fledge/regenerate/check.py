"""Compares generated answers with the tokens on which a draft will be trained.

A draft is trained on the tokens of a rendered conversation, or of a plain text. The target, here or on a server,
generated the answer's tokens after the prompt's tokens. Trained and generated tokens differ in two cases. The answer's
text tokenizes to different tokens ("retokenized"). Or the answer's text differs from the generated text ("rewritten"):
the template rewrites the text, special tokens were stripped, or a parser rewrote the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.data.messages import without_spaces
from fledge.data.record import Record
from fledge.data.spans import document_of, training_documents, turn_text
from fledge.data.template import EndlessTemplate
from fledge.engines.client import Answer
from fledge.regenerate.answerers import Question

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate

# results of a comparison, by the answer's tokens, or by the number of tokens if the server returns no tokens
SAME, RETOKENIZED, REWRITTEN = "same", "retokenized", "rewritten"
AS_MANY, NOT_AS_MANY, UNKNOWN = "as many", "not as many", "unknown"
ENOUGH = 16  # compared answers after which too many rewritten answers end the job
SHOWN = 4  # a message about a difference shows so many tokens


@dataclass(frozen=True)
class Turn:
    """An answer as training will read the answer: `text` is the prompt with the answer, to be tokenized as in training;
    empty if the template refuses the answer, for the reason `refusal`."""

    question: Question
    answer: Answer
    text: str
    refusal: str = ""

    @property
    def where(self) -> str:
        return f"{self.question.record.where}, answer {self.question.number or 1}"


def chat_turn(question: Question, messages: list[dict[str, Any]], answer: Answer) -> Turn:
    """The turn to compare: the last message of `messages`, which answers the question."""
    record = question.record
    try:
        text = turn_text(
            question.template, Record(record.where, messages=messages, tools=record.tools), question.prompt
        )
    except EndlessTemplate:
        raise
    except ValueError as e:  # training would refuse the messages, too
        return Turn(question, answer, "", refusal=str(e).removeprefix(f"{record.where}, "))
    return Turn(question, answer, text)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a turn. `prompt`: the difference between the server's prompt and the template's (empty
    without a difference). `answer`: SAME to UNKNOWN. `place`: the answer's first difference or refusal, in words."""

    prompt: str
    answer: str
    place: str = ""


@dataclass(frozen=True)
class _Trained:
    """The tokens that training makes of prompt and answer, without the stop token. The answer's tokens begin at
    `start`. `complete` tells whether `ids` end with the answer: a template without stop tokens may write text after the
    answer."""

    ids: list[int]
    start: int
    complete: bool


def compare(turn: Turn, *, spaces: bool = True) -> Comparison:
    """Compares the generated tokens with the tokens that training makes of the answer, up to the stop token.

    Stop tokens are not compared: a cut answer has no stop token, and the target's stop token may differ from the
    template's. `spaces`: whether an answer that differs only in white space, which templates trim, is REWRITTEN.
    """
    template = turn.question.template
    try:
        trained, refusal = _trained(template, turn), ""
    except ValueError as e:
        trained, refusal = None, str(e)
    prompt = _prompt_ids(template, turn, trained)
    difference, generated = turn.answer.prompt_difference(prompt), turn.answer.token_ids
    if generated is not None:
        stop = (i for i, token in enumerate(generated) if token in template.stop_ids)
        generated = generated[: next(stop, len(generated))]
    if not (generated or turn.answer.text or turn.answer.reasoning):
        return Comparison(difference, AS_MANY if generated is None else SAME)
    if trained is None:
        return Comparison(difference, REWRITTEN, refusal)
    if generated is None:
        return Comparison(difference, *_compare_number(turn.answer, trained, len(prompt)))
    return Comparison(difference, *_compare_tokens(template, turn.answer, trained, prompt, generated, spaces))


def _trained(template: ChatTemplate, turn: Turn) -> _Trained:
    """The tokens that training makes of a turn. Raises ValueError if training refuses the turn."""
    if turn.refusal:
        raise ValueError(turn.refusal)
    prompt = turn.question.prompt
    if chat := isinstance(prompt, str):
        document = document_of(template, turn.text, [(len(prompt), len(turn.text))], turn.where)
    else:
        [document] = training_documents(template, Record(turn.where, text=turn.text))
    supervised = (document.spans >= 0).nonzero()[0]
    ids = document.tokens[: int(supervised[-1]) + 1].tolist()
    stopped = ids[-1] in template.stop_ids
    return _Trained(ids[:-1] if stopped else ids, int(supervised[0]), stopped or not chat)


def _prompt_ids(template: ChatTemplate, turn: Turn, trained: _Trained | None) -> list[int]:
    """The prompt's tokens by the target's template. Tokenizing the prompt takes half of the comparison's time, and is
    skipped if the server's prompt tokens equal the tokens that training has before the answer."""
    prompt = turn.question.prompt
    if not isinstance(prompt, str):
        return prompt
    known = turn.answer.prompt_ids
    if trained is not None and known is not None and trained.ids[: trained.start] == known:
        return known
    return template.rendered_ids(prompt)


def _compare_tokens(
    template: ChatTemplate, answer: Answer, trained: _Trained, prompt: list[int], generated: list[int], spaces: bool
) -> tuple[str, str]:  # fmt: skip
    """The result of comparing an answer by tokens (SAME, RETOKENIZED or REWRITTEN), and the first difference."""
    tokens, ids = prompt + generated, trained.ids
    if tokens == (ids if trained.complete else ids[: len(tokens)]):
        return SAME, ""
    text, read = template.decode(tokens), template.decode(ids)
    if answer.finish == "length":  # a cut answer may end within a character
        text, read = text.rstrip("\ufffd"), read.rstrip("\ufffd")
    if not spaces:
        text, read = without_spaces(text), without_spaces(read)
    same = text == read or (not trained.complete and read.startswith(text))
    return (RETOKENIZED if same else REWRITTEN), _place(template, tokens, ids, len(prompt))


def _compare_number(answer: Answer, trained: _Trained, prompt: int) -> tuple[str, str]:
    """The result of comparing numbers of tokens (AS_MANY to UNKNOWN), after `prompt` tokens, and the difference."""
    if answer.tokens is None or not trained.complete:
        return UNKNOWN, ""
    number = len(trained.ids) - prompt
    if number <= answer.tokens <= number + (answer.finish == "stop"):  # some servers count the stop token
        return AS_MANY, ""
    return NOT_AS_MANY, f"{answer.tokens:,} tokens on the server, {number:,} by the target's template"


def _place(template: ChatTemplate, generated: list[int], trained: list[int], prompt: int) -> str:
    """The first difference of two token sequences, as text. Both sequences start with `prompt` prompt tokens."""
    pairs = enumerate(zip(generated, trained, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(generated), len(trained)))
    token = f"token {at - prompt + 1:,}" if at >= prompt else "the end of the prompt"

    def shown(ids: list[int]) -> str:
        return " ".join(repr(template.decode([token])) for token in ids[at : at + SHOWN]) or "nothing more"

    return f"{token}: {shown(generated)} generated, {shown(trained)} by the target's template"


class AnswerCheck:
    """Counts the results of comparisons, and remembers the first turn of each result."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, turn: Turn, found: Comparison) -> None:
        self.counts[found.answer] += 1
        self.first.setdefault(found.answer, f"{turn.where}, {found.place}")

    @property
    def compared(self) -> int:
        """The number of answers whose tokens were compared."""
        return self.counts[SAME] + self.counts[RETOKENIZED] + self.counts[REWRITTEN]

    @property
    def mostly_rewritten(self) -> bool:
        """Whether more than half of the compared answers are REWRITTEN."""
        return 2 * self.counts[REWRITTEN] > self.compared

    def report(self, which: str, spaces: bool = True) -> Iterator[str]:
        """The final messages. `which` follows "answers" and names the compared answers; `spaces` as in `compare`."""
        n, number = self.counts, self.counts[AS_MANY] + self.counts[NOT_AS_MANY]
        if self.compared:
            yield (
                f"{self.compared:,} answers{which} compared with what the target's template gives: {n[SAME]:,} are the "
                f"same tokens, {n[RETOKENIZED]:,} the same text in other tokens{' or white space' * (not spaces)}, "
                f"{n[REWRITTEN]:,} another text"
            )
        if number:
            yield (
                f"{number:,} answers{which} compared by their number of tokens, as the server returns no token ids: "
                f"{n[AS_MANY]:,} have that of the target's template, {n[NOT_AS_MANY]:,} another one"
            )
        if n[UNKNOWN]:
            yield f"{n[UNKNOWN]:,} answers{which} not compared with what the target's template gives"
        names = {RETOKENIZED: "in other tokens", REWRITTEN: "with another text", NOT_AS_MANY: "of another number"}
        yield from (f"the first {name}: {self.first[kind]}" for kind, name in names.items() if n[kind])
