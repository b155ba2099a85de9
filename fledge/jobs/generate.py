"""`fledge generate`: a prompt in, text out as it is committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fledge.jobs.options import dtype_named, opt, template_kwargs


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Decode with a draft: the target's own words, sooner."""

    target: str = opt("the model that speaks: a directory or hub id")
    draft: str | None = opt("its draft; without one it decodes token by token", None)
    prompt: str | None = opt("what to say to it (default: standard input)", None)
    system: str | None = opt("a system message before it", None)
    raw: bool = opt("continue the prompt as plain text, without the chat template", False)
    max_new_tokens: int = opt("most tokens to generate", 256)
    temperature: float = opt("0 is greedy", 0.0)
    top_k: int = opt("sample among the k likeliest only (0: all)", 0)
    top_p: float = opt("sample among the likeliest that hold this mass", 1.0)
    repetition_penalty: float = opt("above 1 makes repeats less likely", 1.0)
    draft_sampling: str = opt("how the draft chooses when sampling: greedy or sample", "greedy")
    seed: int = opt("of sampling; the same seed gives the same text", 0)
    stop: list[str] = opt("end the text before this string; repeatable", many=True)
    depth: int | None = opt("most tokens drafted a round (default: as trained)", None)
    confidence: float = opt("draft on only while the draft gives its chain this probability (0: always)", 0.0)
    template_kwargs: str | None = opt("JSON passed to the chat template (default: as the draft was trained)", None)
    stats: bool = opt("print speed and acceptance to standard error afterwards", False)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    draft_device: str | None = opt("where the draft sits (default: with the target)", None)
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)


def run(options: GenerateOptions, say: Callable[[str], None]) -> None:
    """Streams the text to standard output."""
    from fledge.decode.engine import Completion, load
    from fledge.eval.metrics import alpha, tau
    from fledge.types import Sampling

    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.repetition_penalty, options.seed,
        options.draft_sampling,
    )  # fmt: skip
    engine = load(
        options.target, options.draft, device=options.device, draft_device=options.draft_device,
        dtype=dtype_named(options.dtype), depth=options.depth, confidence=options.confidence,
        template_kwargs=template_kwargs(options.template_kwargs),
    )  # fmt: skip
    text = options.prompt if options.prompt is not None else sys.stdin.read()
    done = Completion()
    stream = engine.stream(
        _prompt(options, text, engine.target.tokenizer.chat_template is not None),
        max_new_tokens=options.max_new_tokens, sampling=sampling, stop=options.stop, into=done,
    )  # fmt: skip
    for piece in stream:
        sys.stdout.write(piece)
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
