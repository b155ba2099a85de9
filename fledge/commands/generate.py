"""`fledge generate`: streams the answer to a prompt to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.decode.options import DecodeOptions, prepare_rounds
from fledge.io.display import escaped
from fledge.io.results import held_warnings, write_tinted
from fledge.options import opt

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.decode.request import Completion


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodeOptions):
    """Answer a prompt with the target; a draft makes it faster without changing the text."""

    prompt: str | None = opt("the prompt (default: read from standard input)", None)
    system: str | None = opt("system message before the prompt (default: none)", None)
    raw: bool = opt("continue the prompt as plain text, without the chat template", False)
    max_new_tokens: int | None = opt(
        "maximum number of new tokens (default: 256, or fewer if the context has less room)", None, minimum=1
    )
    stop: list[str] = opt("end the text before this string; repeatable", repeatable=True)
    stats: bool = opt(
        "print speed and acceptance to standard error at the end; a terminal also shows the draft's tokens tinted",
        False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw:
            self.refuse(("system", "template_kwargs"), "with --raw, which does not use the chat template;")


def run(options: GenerateOptions, progress: Any) -> None:
    """Generates the answer and streams it to standard output."""
    from fledge.decode.engine import NEW_TOKENS
    from fledge.decode.request import Completion
    from fledge.measure.metrics import alpha, alpha_text, tau

    sampling, engine = options.sampling(), options.load_engine(options.draft, options.draft_mode, progress.say)
    if options.prompt is None and sys.stdin.isatty():
        progress.say("type the prompt; end it with Ctrl-D on a line of its own")
    text = options.prompt if options.prompt is not None else sys.stdin.read()
    try:
        text.encode()
    except UnicodeEncodeError as e:  # Python decodes invalid bytes of standard input as lone surrogates
        raise ValueError("the prompt is not UTF-8 text; convert it to UTF-8") from e
    chats = engine.target.tokenizer.chat_template is not None
    if options.template_kwargs and not chats:
        raise ValueError(f"{options.target} has no chat template; leave --template-kwargs out")
    if not chats and not options.raw and engine.draft and engine.draft.config.provenance.template_sha256:
        progress.say(
            f"{options.target} has no chat template, so the prompt is continued as text, though the draft was trained "
            "on chats; copy the template's file (chat_template.jinja) from where the model is from, or give --raw"
        )
    done = Completion()
    prompt = engine.reader.read(_prompt(options, text, chats))
    stream = engine.stream(
        prompt, max_new_tokens=options.max_new_tokens, sampling=sampling, stop=options.stop, into=done
    )
    tokens = len(prompt) + (options.max_new_tokens or NEW_TOKENS)
    prepare_rounds([(engine, True)], progress, batch=1, tokens=tokens, sampling=sampling)
    terminal = sys.stdout.isatty()  # a terminal would interpret control characters; files and pipes get the exact text
    with held_warnings():
        if terminal and options.stats and options.draft:
            _show_tinted(engine, stream, done, options.stop)
        else:
            for piece in stream:
                sys.stdout.write(escaped(piece, keep="\n\t") if terminal else piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    if options.stats:
        speed = len(done.tokens) / done.trace.t_total
        line = f"{len(done.tokens)} tokens, {speed:.1f} tokens/s, ended by {done.finish}"
        if done.trace.rounds:
            acceptance = f"τ {tau([done.trace]):.2f}, α {alpha_text(alpha([done.trace]))}"
            line += f"; {len(done.trace.rounds)} rounds, {acceptance}"
        progress.say(line)


def _show_tinted(engine: Engine, stream: Iterator[str], done: Completion, stop: list[str]) -> None:
    """Shows an answer while `stream` generates it into `done`, the draft's tokens tinted."""
    from rich.console import Console

    from fledge.decode.request import AttributedText

    text = AttributedText(engine.target.tokenizer, engine.target.stop_ids, stop)
    console = Console(highlight=False, markup=False, emoji=False)
    for _ in stream:
        write_tinted(console, text.take(done))
    write_tinted(console, [*text.take(done), *text.finish()])


def _prompt(options: GenerateOptions, text: str, chats: bool) -> Any:
    if options.raw or (not chats and not options.system):
        return text
    system = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": text}]
