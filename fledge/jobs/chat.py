"""`fledge chat`: a conversation in the terminal, with the tokens tinted by who proposed them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.jobs.display import held_warnings
from fledge.jobs.options import DecodeOptions, opt

if TYPE_CHECKING:
    from fledge.jobs.chatting.screen import Screen
    from fledge.jobs.chatting.session import Session

RAW = "This model has no chat template: it continues each text that you type, on its own."
RAW_BY_OPTION = "It continues each text that you type, on its own, without the chat template."


@dataclass(frozen=True, kw_only=True)
class ChatOptions(DecodeOptions):
    """Talk to the target, and see what a draft contributes. Reads turns from standard input if it is not a terminal."""

    system: str | None = opt("system prompt (default: none)", None)
    raw: bool = opt("continue each text as plain text, without the chat template", False)
    max_new_tokens: int | None = opt(
        "maximum new tokens per answer (default: 512, at most half of the target's context)", None, minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw:
            self.refuse(("system", "template_kwargs"), "with --raw, which does not use the chat template;")


def run(options: ChatOptions, progress: Any) -> None:
    """Loads the models and holds the conversation, until it is left or standard input ends."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        progress.say("loading ..")
    from fledge.jobs.chatting.screen import Pipes, Terminal

    session = open_session(options, progress)
    if not terminal:
        converse(session, Pipes(progress.say))
        return
    screen = Terminal(session)
    screen.open(_opening(options, session))
    converse(session, screen)


def open_session(options: ChatOptions, progress: Any) -> Session:
    """Loads the models. Raises ValueError if the options do not fit the target."""
    from fledge.decode.prepare import TOKENS
    from fledge.jobs.chatting.conversation import Conversation
    from fledge.jobs.chatting.session import Session, Settings
    from fledge.jobs.prepare import prepare_rounds

    sampling = options.sampling()
    engine = options.load_engine(options.draft, options.draft_mode, progress.say)
    raw = options.raw or engine.target.tokenizer.chat_template is None
    if raw and (options.system or options.template_kwargs):
        flag = "--system" if options.system else "--template-kwargs"
        raise ValueError(f"{options.target} has no chat template; leave {flag} out")
    session = Session(engine, Conversation(raw), Settings(sampling, options.max_new_tokens))
    if options.system:
        session.set_system(options.system)
    arms = [(engine, drafts) for drafts in ((True, False) if options.draft else (False,))]
    prepare_rounds(arms, progress, batch=1, tokens=TOKENS, sampling=sampling)
    return session


def converse(session: Session, screen: Screen) -> None:
    """Answers texts and executes commands until the user leaves."""
    from fledge.jobs.chatting.commands import execute, is_command, text_of

    while (line := screen.ask()) is not None:
        try:
            if not is_command(line):
                _reply(session, screen, text_of(line))
                continue
            outcome = execute(session, line)
            if outcome.ends:
                return
            if outcome.said:
                screen.say(outcome.said)
            if outcome.retries:
                with session.retrying() as asked:
                    _reply(session, screen, asked)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as e:
            screen.fail(e)


def _reply(session: Session, screen: Screen, asked: str) -> None:
    from fledge.jobs.chatting.session import summary

    with held_warnings(), screen.answering(session.opens_thinking(asked)) as stopped:
        answer = session.answer(asked, screen.show, stopped, screen.say)
    screen.summarize(summary(answer, session.speeds.get(not answer.drafted)))


def _opening(options: ChatOptions, session: Session) -> str:
    models = options.target + (f" with the draft {options.draft}" if options.draft else ", without a draft")
    if not session.conversation.raw:
        return models
    return f"{models}\n{RAW_BY_OPTION if options.raw else RAW}"
