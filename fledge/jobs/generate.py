"""`fledge generate`: a prompt in, text out as it is committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fledge.jobs.options import DecodeOptions, opt
from fledge.jobs.show import escaped


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodeOptions):
    """Decode with a draft: the target's own words, sooner."""

    prompt: str | None = opt("what to say to it (default: standard input)", None)
    system: str | None = opt("a system message before it", None)
    raw: bool = opt("continue the prompt as plain text, without the chat template", False)
    max_new_tokens: int | None = opt("most tokens to generate (default: at most 256 of those that fit)", None, least=1)
    stop: list[str] = opt("end the text before this string; repeatable", many=True)
    stats: bool = opt("print speed and acceptance to standard error afterwards", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw:
            self.refuse(("system", "template_kwargs"), "with --raw, which leaves the chat template out;")


def run(options: GenerateOptions, say: Callable[[str], None]) -> None:
    """Streams the text to standard output."""
    from fledge.decode.engine import Completion
    from fledge.eval.metrics import alpha, tau

    sampling, engine = options.sampling(), options.engine(options.draft, options.draft_mode)
    if options.prompt is None and sys.stdin.isatty():
        say("type the prompt; Ctrl-D on a line of its own ends it")
    text = options.prompt if options.prompt is not None else sys.stdin.read()
    try:
        text.encode()
    except UnicodeEncodeError as e:  # how Python stands for bytes that were no text
        raise ValueError("the prompt is not UTF-8 text; convert it first") from e
    chats = engine.target.tokenizer.chat_template is not None
    if options.template_kwargs and not chats:
        raise ValueError(f"{options.target} has no chat template; leave --template-kwargs out")
    done = Completion()
    stream = engine.stream(
        _prompt(options, text, chats), max_new_tokens=options.max_new_tokens, sampling=sampling, stop=options.stop,
        into=done,
    )  # fmt: skip
    terminal = sys.stdout.isatty()  # which would obey what a model may write; a file or a pipe gets every character
    for piece in stream:
        sys.stdout.write(escaped(piece, keep="\n\t") if terminal else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if options.stats:
        speed = len(done.tokens) / done.trace.t_total
        line = f"{len(done.tokens)} tokens, {speed:.1f} tokens/s, ended by {done.finish}"
        if done.trace.rounds:
            steps = " ".join(f"{a:.2f}" for a in alpha([done.trace]))
            line += f"; {len(done.trace.rounds)} rounds, τ {tau([done.trace]):.2f}, α {steps}"
        say(line)


def _prompt(options: GenerateOptions, text: str, chats: bool) -> Any:
    if options.raw or (not chats and not options.system):
        return text
    system = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": text}]
