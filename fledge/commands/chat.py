"""`fledge chat`: a conversation in the terminal, with the tokens tinted by who proposed them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.decode.options import DecodeOptions, prepare_rounds
from fledge.io.results import held_warnings
from fledge.options import opt

if TYPE_CHECKING:
    from fledge.chat import Pipes, Session, Terminal

RAW = "This model has no chat template: it continues each text that you type, on its own."
RAW_BY_OPTION = "It continues each text that you type, on its own, without the chat template."
HELP = """\
/draft on, /draft off: decode with the draft or without it
/reset: begin a new conversation
/help: list the commands
/exit: leave (or Ctrl-D)
Ctrl-C stops an answer, and keeps what there is of it."""


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
    """Loads the models and holds the conversation, until the user leaves or standard input ends."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        progress.say("loading ..")
    from fledge.chat import Pipes, Terminal

    session = open_session(options, progress)
    if not terminal:
        converse(session, Pipes(progress.say))
        return
    screen = Terminal()
    models = options.target + (f" with the draft {options.draft}" if options.draft else ", without a draft")
    raw = f"\n{RAW_BY_OPTION if options.raw else RAW}" if session.raw else ""
    screen.open(models + raw, session.has_draft)
    converse(session, screen)


def open_session(options: ChatOptions, progress: Any) -> Session:
    """Loads the models. Raises ValueError if the options do not fit the target."""
    from fledge.chat import Session
    from fledge.decode.scheduler import TOKENS

    sampling = options.sampling()
    engine = options.load_engine(options.draft, options.draft_mode, progress.say)
    raw = options.raw or engine.target.tokenizer.chat_template is None
    if raw and (options.system or options.template_kwargs):
        flag = "--system" if options.system else "--template-kwargs"
        raise ValueError(f"{options.target} has no chat template; leave {flag} out")
    session = Session(engine, sampling, options.max_new_tokens, system=options.system, raw=raw)
    arms = [(engine, drafts) for drafts in ((True, False) if options.draft else (False,))]
    prepare_rounds(arms, progress, batch=1, tokens=TOKENS, sampling=sampling)
    return session


def converse(session: Session, screen: Pipes | Terminal) -> None:
    """Answers texts and executes commands until the user leaves."""
    while (line := screen.ask()) is not None and line.rstrip() != "/exit":
        try:
            if line.startswith("/"):
                screen.say(execute(session, line))
                continue
            with held_warnings(), screen.answering() as stopped:
                answer = session.answer(line, screen.show, stopped, screen.say)
            screen.say(f"{answer.summary}\n")
        except ValueError as e:
            screen.fail(e)


def execute(session: Session, line: str) -> str:
    """Executes a command (a line that begins with a slash), and returns the message to show. Raises ValueError for an
    unknown command, and for /draft without a draft."""
    match line.split():
        case ["/draft", "on" | "off" as state]:
            session.switch_draft(state == "on")
            return f"the next answers are decoded {'with' if state == 'on' else 'without'} the draft"
        case ["/reset"]:
            session.reset()
            return "a new conversation"
        case ["/help"]:
            return HELP
    raise ValueError(
        f"{line:.40} is no command; there are /draft on, /draft off, /reset, /help and /exit. To send a text that "
        "begins with /, put a space before it"
    )
