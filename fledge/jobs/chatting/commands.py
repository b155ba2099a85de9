"""The commands of a conversation: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fledge.jobs.chatting.conversation import save
from fledge.jobs.chatting.session import Session, exact

KEYS = (
    ("F2 or Ctrl-T", "the draft on or off"),
    ("Alt-Enter or Ctrl-J", "a new line in the text"),
    ("arrow keys", "earlier texts"),
    ("Ctrl-C", "stop the answer, and keep what there is of it"),
)

Run = Callable[[Session, str], "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What a command leads to: something to say, another answer to the last text, or the end."""

    said: str = ""
    retries: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Command:
    """A command: its name, what may follow it, and a line of help."""

    name: str
    argument: str
    help: str
    run: Run


def is_command(line: str) -> bool:
    """Whether a line is a command. A text that begins with a slash is written with two."""
    return line.startswith("/") and not line.startswith("//")


def text_of(line: str) -> str:
    """The text of a line that is no command."""
    return line[1:] if line.startswith("//") else line


def execute(session: Session, line: str) -> Outcome:
    """Executes a command. Raises ValueError for one that does not exist or has a wrong argument, and OSError if a file
    cannot be written."""
    name, _, argument = line[1:].strip().partition(" ")
    name = OTHER_NAMES.get(name, name)
    if name not in COMMANDS:
        raise ValueError(
            f"there is no command /{name}; /help lists them (a text that begins with / is written with //)"
        )
    command, argument = COMMANDS[name], argument.strip()
    if argument and not command.argument:
        raise ValueError(f"/{name} takes nothing behind it")
    return command.run(session, argument)


def help_text() -> str:
    """A line for each command, and for the keys."""
    rows = [(f"/{c.name} {c.argument}".strip(), c.help) for c in COMMANDS.values()]
    return "\n".join(f"{left}: {right}" for left, right in [*rows, *KEYS])


def _draft(session: Session, argument: str) -> Outcome:
    if argument not in ("", "on", "off"):
        raise ValueError("/draft takes on, off or nothing, which shows whether it is on")
    if argument:
        session.toggle_draft(argument == "on")
    elif not session.has_draft:
        return Outcome("there is no draft")
    return Outcome(f"the next answers are decoded {'with' if session.drafts else 'without'} the draft")


def _depth(session: Session, argument: str) -> Outcome:
    if argument:
        session.set_depth(argument if argument == "auto" else _number(argument, int, "/depth", "or auto"))
    elif not session.has_draft:
        return Outcome("there is no draft")
    return Outcome(f"depth {session.depth}")


def _sampling(field: str, kind: type) -> Run:
    """A command that sets a field of `Sampling`, or shows it."""

    def run(session: Session, argument: str) -> Outcome:
        if argument:
            session.set_sampling(**{field: _number(argument, kind, "/" + field.replace("_", "-"))})
        sampling = session.settings.sampling
        without = sampling.greedy and field in ("top_k", "top_p", "seed")
        idle = "; it has no effect at temperature 0, which decodes greedily" if without else ""
        return Outcome(f"{field.replace('_', '-')} {exact(getattr(sampling, field))}{idle}")

    return run


def _max_new_tokens(session: Session, argument: str) -> Outcome:
    if argument:
        session.set_max_new_tokens(_number(argument, int, "/max-new-tokens"))
    return Outcome(f"answers have at most {session.new_tokens:,} tokens")


def _system(session: Session, argument: str) -> Outcome:
    if not argument:
        return Outcome(f"system prompt: {session.conversation.system or 'none'}")
    session.set_system(None if argument == "none" else argument)
    return Outcome("system prompt removed" if argument == "none" else "system prompt set; it applies from now on")


def _reset(session: Session, argument: str) -> Outcome:
    session.conversation.reset()
    return Outcome("a new conversation")


def _retry(session: Session, argument: str) -> Outcome:
    return Outcome(retries=True)


def _undo(session: Session, argument: str) -> Outcome:
    asked = " ".join(session.conversation.undo().asked.split())
    return Outcome(f"removed: {asked if len(asked) < 40 else asked[:40] + '…'}")


def _save(session: Session, argument: str) -> Outcome:
    if not argument:
        raise ValueError("/save needs the name of a file, e.g. /save chats.jsonl")
    rows = save(session.conversation, argument)
    return Outcome(f"saved; {argument} has {rows:,} row{'s' * (rows != 1)} for fledge train --data")


def _number(text: str, kind: type, command: str, otherwise: str = "") -> int | float:
    try:
        return kind(text)
    except ValueError as e:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{command} takes {what}{' ' * bool(otherwise)}{otherwise}, not {text!r:.40}") from e


_LISTED = [
    Command("draft", "[on|off]", "decode with the draft or without it", _draft),
    Command("depth", "[N|auto]", "tokens drafted a round", _depth),
    Command("temperature", "[T]", "0 decodes greedily", _sampling("temperature", float)),
    Command("top-p", "[P]", "sample from the likeliest tokens that sum to P", _sampling("top_p", float)),
    Command("top-k", "[K]", "sample from the K likeliest tokens; 0: all", _sampling("top_k", int)),
    Command("repetition-penalty", "[X]", "1 is none", _sampling("repetition_penalty", float)),
    Command("seed", "[N]", "the same seed gives the same text", _sampling("seed", int)),
    Command("max-new-tokens", "[N]", "the most tokens of an answer", _max_new_tokens),
    Command("system", "[TEXT|none]", "the system prompt", _system),
    Command("retry", "", "answer the last text again, with the settings of now", _retry),
    Command("undo", "", "remove the last text and its answer", _undo),
    Command("reset", "", "begin a new conversation", _reset),
    Command("save", "FILE", "add the conversation to a file that fledge train reads", _save),
    Command("help", "", "list the commands and keys", lambda session, argument: Outcome(help_text())),
    Command("quit", "", "leave (or Ctrl-D)", lambda session, argument: Outcome(ends=True)),
]
COMMANDS = {command.name: command for command in _LISTED}
OTHER_NAMES = {"exit": "quit", "bye": "quit"}  # of other chats, which are not listed
