"""A session: a conversation, the engine that answers in it, and the settings of the next answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from fledge.jobs.chatting.conversation import Conversation, Exchange, Prompt
from fledge.jobs.chatting.tints import Pieces
from fledge.types import Sampling

if TYPE_CHECKING:
    from fledge.decode.engine import Engine

NEW_TOKENS = 512  # default maximum of new tokens per answer
ROOM = 4  # an answer gets at least this part of the context (a quarter), unless it is to be shorter


@dataclass(frozen=True)
class Settings:
    """How the next answer is decoded. `max_new_tokens` None: 512, or half of the context if that is less."""

    sampling: Sampling
    max_new_tokens: int | None = None
    drafts: bool = True


@dataclass(frozen=True)
class Answer:
    """An answer and what it took. `seconds` are those of the engine, prompt included, without what it took to show the
    text. `drafted`: whether it was decoded with the draft. `tau` is None without rounds of drafting."""

    text: str
    tokens: int
    seconds: float
    drafted: bool
    tau: float | None
    ended: str

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Session:
    """Answers in a conversation. `speeds` are those of the last answers with (True) and without the draft (False)."""

    def __init__(self, engine: Engine, conversation: Conversation, settings: Settings):
        self.engine, self.conversation, self.settings = engine, conversation, settings
        self.speeds: dict[bool, float] = {}

    @property
    def tokens(self) -> int:
        """The tokens of the conversation, as the model saw it last."""
        exchanges = self.conversation.exchanges
        return exchanges[-1].tokens if exchanges else 0

    @property
    def has_draft(self) -> bool:
        return self.engine.draft is not None

    @property
    def drafts(self) -> bool:
        """Whether the next answer is decoded with the draft."""
        return self.has_draft and self.settings.drafts

    @property
    def depth(self) -> Any:
        """The depth of drafting: a number, or "auto"."""
        return self.engine.drafting.depth

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer together, with the draft on or off."""
        target = self.engine.target
        drafted = 0 if target.rotary or not self.has_draft else self.engine.drafting.deepest
        return target.context - drafted

    @property
    def new_tokens(self) -> int:
        """The most tokens of an answer, if the context has room for them."""
        return self.settings.max_new_tokens or max(1, min(NEW_TOKENS, self.longest // 2))

    def toggle_draft(self, on: bool | None = None) -> bool:
        """Switches the draft on or off, or to the other. Returns whether it is on. Raises ValueError without one."""
        if not self.has_draft:
            raise ValueError("there is no draft; start fledge chat with --draft")
        self.settings = replace(self.settings, drafts=not self.settings.drafts if on is None else on)
        return self.settings.drafts

    def set_sampling(self, **fields: Any) -> None:
        """Changes fields of `Sampling`. Raises ValueError if one is out of range."""
        sampling = replace(self.settings.sampling, **fields)
        if self.has_draft:
            self.engine.drafting.check_sampling(sampling)
        self.settings = replace(self.settings, sampling=sampling)

    def set_max_new_tokens(self, n: int) -> None:
        if n < 1:
            raise ValueError("an answer has at least one token")
        self.settings = replace(self.settings, max_new_tokens=n)

    def set_depth(self, depth: int | str) -> None:
        """Drafts so many tokens a round from now on. Raises ValueError without a draft, and for depths that it does not
        have."""
        from fledge.decode.engine import Engine

        if not self.has_draft:
            raise ValueError("there is no draft; start fledge chat with --draft")
        old = self.engine
        drafting = {f.name: getattr(old.drafting, f.name) for f in fields(old.drafting)} | {"depth": depth}
        self.engine = Engine(old.target, old.draft, template_kwargs=old.template.kwargs, **drafting)

    def set_system(self, system: str | None) -> None:
        """Replaces the system prompt. Raises ValueError if the chat template does not take it."""
        if self.conversation.raw:
            raise ValueError("a system prompt needs a chat template, which is not used here")
        changed = replace(self.conversation, system=system, dropped=0)
        self.engine.template.prompt_ids(changed.prompt("a"), where="a chat with this system prompt")
        self.conversation = changed

    @contextmanager
    def retrying(self) -> Iterator[str]:
        """Context manager: takes the last exchange out, to answer its text again, and yields the text. The conversation
        is as before if that fails. Raises ValueError if there is none."""
        dropped = self.conversation.dropped
        exchange = self.conversation.undo()
        try:
            yield exchange.asked
        except BaseException:
            self.conversation.exchanges.append(exchange)
            self.conversation.dropped = dropped
            raise

    def answer(
        self, asked: str, show: Callable[[Pieces], None], stopped: Callable[[], bool], say: Callable[[str], None]
    ) -> Answer:
        """Answers a text, and adds both to the conversation.

        `show` gets the text in pieces while it is generated. If `stopped` returns True, the answer ends there. `say`
        gets a message if the conversation does not fit the context any more. Raises ValueError, and leaves the
        conversation as it was, if the text alone does not fit, or the template refuses it.
        """
        from fledge.decode.proposers import AttributedText
        from fledge.decode.request import Completion
        from fledge.eval.metrics import tau

        ids = self._fit(asked, say)
        limit = min(self.new_tokens, self.longest - len(ids))
        done, target = Completion(), self.engine.target
        shown: Pieces = []
        text = AttributedText(target.tokenizer, target.stop_ids)
        stream = self.engine.stream(
            ids, max_new_tokens=limit, sampling=self.settings.sampling, speculate=self.drafts,
            request=len(self.conversation.exchanges), into=done,
        )  # fmt: skip

        def give(pieces: Pieces) -> None:
            shown.extend(pieces)
            show(pieces)

        seconds, ended, cut = 0.0, False, False
        while not ended and not cut:
            began = time.perf_counter()
            ended = next(stream, None) is None
            seconds += time.perf_counter() - began
            give(text.take(done))
            cut = not ended and stopped()
        stream.close()
        give(text.finish())
        answer = Answer(
            "".join(piece for piece, _ in shown), len(done.tokens), seconds, self.drafts,
            tau([done.trace]) if done.trace.rounds else None, self._why(done.finish, cut, limit),
        )  # fmt: skip
        self.speeds[self.drafts] = answer.speed
        message = self._message(self.conversation.prompt(asked), ids, done.tokens)
        self.conversation.exchanges.append(Exchange(asked, message, len(ids) + len(done.tokens)))
        return answer

    def _message(self, prompt: Prompt, ids: list[int], generated: list[int]) -> dict[str, Any]:
        """An answer as a message of the conversation, special tokens included."""
        from fledge.data.answering import answer_text, history_message

        template = self.engine.template
        if isinstance(prompt, str):
            return {"role": "assistant", "content": answer_text(template, ids, generated)}
        return history_message(template, prompt, ids, generated)

    def opens_thinking(self, asked: str) -> bool:
        """Whether the template's prompt for an answer opens a thinking block, which the answer then begins in."""
        if self.conversation.raw:
            return False
        return self.engine.template.render(self.conversation.prompt(asked), prompt=True).rstrip().endswith("<think>")

    def _fit(self, asked: str, say: Callable[[str], None]) -> list[int]:
        """The token ids of the prompt. Says what was dropped to fit the context, if it was not said before."""
        try:
            asked.encode()
        except UnicodeEncodeError as e:  # Python decodes invalid bytes of standard input as lone surrogates
            raise ValueError("this text is not UTF-8; convert it to UTF-8") from e
        before = self.conversation.dropped
        room = min(self.new_tokens, max(1, self.longest // ROOM))
        ids = self.conversation.fit(asked, self._tokens_of, self.longest - room)
        if (now := self.conversation.dropped) > before:
            what = "the first exchange" if now == 1 else f"the first {now} exchanges"
            say(
                f"the conversation no longer fits the context of {self.longest:,} tokens: the model does not see "
                f"{what} any more (/reset begins anew)"
            )
        return ids

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        return self.engine.template.prompt_ids(prompt, where="the conversation")

    def _why(self, finish: str, cut: bool, limit: int) -> str:
        """Why an answer ended."""
        if cut:
            return "stopped"
        if finish == "stop":
            return "complete"
        return "token limit" if limit == self.new_tokens else "context full"


def summary(answer: Answer, other: float | None) -> str:
    """The line below an answer: τ, speed, tokens, and why it ended. `other` is the speed of the last answer decoded the
    other way, with or without the draft, if there was one. It fits 60 columns as long as the numbers are small."""
    tau = f"τ {answer.tau:.2f} · " if answer.tau is not None else ""
    way = "without" if answer.drafted else "with"
    compared = f" ({_amount(other)} {way})" if other is not None else ""
    tokens = f"{answer.tokens:,} token{'s' * (answer.tokens != 1)}"
    return f"{tau}{_amount(answer.speed)} tokens/s{compared} · {tokens} · {answer.ended}"


def exact(x: float) -> str:
    """A number with all its digits, e.g. 0.7, 1 and 12345678."""
    return str(x).removesuffix(".0")


def _amount(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
