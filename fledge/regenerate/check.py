"""Whether generated answers are what a draft will be trained on.

A draft is trained on the tokens of a rendered conversation, or of a plain text. The target, here or on a server,
generated the tokens of the answer after those of the prompt. The two differ where the answer's text tokenizes otherwise
than it was generated, and where the text is not what was generated: the template rewrites it, special tokens were
stripped, or a parser rewrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.data.chat_fields import without_spaces
from fledge.data.record import Record
from fledge.data.template import EndlessTemplate
from fledge.engines.client import Answer
from fledge.regenerate.answerers import Question

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate

# what a comparison finds, by the answer's tokens or, where the server does not return them, by their number
SAME, RETOKENIZED, REWRITTEN = "same", "retokenized", "rewritten"
AS_MANY, NOT_AS_MANY, UNKNOWN = "as many", "not as many", "unknown"
ENOUGH = 16  # answers after which the share of the rewritten ones may end the job
SHOWN = 4  # tokens of a difference that a message shows


@dataclass(frozen=True)
class Turn:
    """An answer, and what training will read of it: `text` is the prompt with the answer, as training tokenizes it, and
    `refusal` the reason for which there is none."""

    question: Question
    answer: Answer
    text: str
    refusal: str = ""

    @property
    def where(self) -> str:
        return f"{self.question.record.where}, answer {self.question.number or 1}"


def chat_turn(question: Question, messages: list[dict[str, Any]], answer: Answer) -> Turn:
    """The last of these messages, which answers the question, as the answer to compare."""
    record = question.record
    try:
        text = question.template.turn(Record(record.where, messages=messages, tools=record.tools), question.prompt)
    except EndlessTemplate:
        raise
    except ValueError as e:  # training would refuse it, too
        return Turn(question, answer, "", refusal=str(e).removeprefix(f"{record.where}, "))
    return Turn(question, answer, text)


@dataclass(frozen=True)
class Comparison:
    """How the server's prompt differs from the template's (empty if it does not), what was found of the answer (SAME
    to UNKNOWN), and the place where it differs, in words."""

    prompt: str
    answer: str
    place: str = ""


@dataclass(frozen=True)
class _Trained:
    """The tokens that training makes of prompt and answer, without the stop token. Those of the answer begin at
    `start`. `complete` says whether they end where the answer does: a template without stop tokens may write something
    after it."""

    ids: list[int]
    start: int
    complete: bool


def compare(turn: Turn, *, spaces: bool = True) -> Comparison:
    """Compares the generated tokens with those that training makes of the answer, up to the stop token.

    Stop tokens are not compared: a cut answer has none, and a target may end its answers with another one than its
    template does. `spaces`: whether an answer that differs in white space alone, which templates trim, is REWRITTEN.
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
    """What training makes of a turn. Raises ValueError if it refuses it."""
    if turn.refusal:
        raise ValueError(turn.refusal)
    prompt = turn.question.prompt
    if chat := isinstance(prompt, str):
        document = template.turn_document(turn.text, len(prompt), turn.where)
    else:
        [document] = template.documents(Record(turn.where, text=turn.text))
    supervised = (document.spans >= 0).nonzero()[0]
    ids = document.tokens[: int(supervised[-1]) + 1].tolist()
    stopped = ids[-1] in template.stop_ids
    return _Trained(ids[:-1] if stopped else ids, int(supervised[0]), stopped or not chat)


def _prompt_ids(template: ChatTemplate, turn: Turn, trained: _Trained | None) -> list[int]:
    """The prompt's tokens by the target's template. Tokenizing the prompt takes as long as all the rest, and is not
    needed where the server's tokens are those that training has before the answer."""
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
    """What is found of an answer by its tokens, and the place of a difference."""
    tokens, ids = prompt + generated, trained.ids
    if tokens == (ids if trained.complete else ids[: len(tokens)]):
        return SAME, ""
    text, read = _text(template, tokens), _text(template, ids)
    if answer.finish == "length":  # a cut answer may end within a character, which has no text
        text, read = text.rstrip("\ufffd"), read.rstrip("\ufffd")
    if not spaces:
        text, read = without_spaces(text), without_spaces(read)
    same = text == read or (not trained.complete and read.startswith(text))
    return (RETOKENIZED if same else REWRITTEN), _place(template, tokens, ids, len(prompt))


def _compare_number(answer: Answer, trained: _Trained, prompt: int) -> tuple[str, str]:
    """What is found of an answer by the number of its tokens, after a prompt of `prompt` tokens, and a difference."""
    if answer.tokens is None or not trained.complete:
        return UNKNOWN, ""
    number = len(trained.ids) - prompt
    if number <= answer.tokens <= number + (answer.finish == "stop"):  # some servers count the stop token
        return AS_MANY, ""
    return NOT_AS_MANY, f"{answer.tokens:,} tokens on the server, {number:,} by the target's template"


def _place(template: ChatTemplate, generated: list[int], trained: list[int], prompt: int) -> str:
    """The first difference of two sequences, of which the first `prompt` tokens are those of the prompt."""
    pairs = enumerate(zip(generated, trained, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(generated), len(trained)))
    token = f"token {at - prompt + 1:,}" if at >= prompt else "the end of the prompt"

    def shown(ids: list[int]) -> str:
        return " ".join(repr(_text(template, [token])) for token in ids[at : at + SHOWN]) or "nothing more"

    return f"{token}: {shown(generated)} generated, {shown(trained)} by the target's template"


def _text(template: ChatTemplate, ids: list[int]) -> str:
    return template.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class AnswerCheck:
    """Counts what comparisons found, and remembers the first of each kind."""

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
        """Whether more than half of the compared answers have another text than the server generated."""
        return 2 * self.counts[REWRITTEN] > self.compared

    def report(self, which: str, spaces: bool = True) -> Iterator[str]:
        """What to say at the end. `which` follows "answers" and says which were compared; `spaces` as in `compare`."""
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
