"""`fledge eval`: how often the draft is accepted, what that gains, and that no word changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fledge.jobs.options import dtype_named, opt, template_kwargs


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Decode prompts with and without the draft in one run, and report acceptance, speed and identity."""

    target: str = opt("the model that speaks: a directory or hub id")
    draft: str = opt("its draft")
    prompts: list[str] = opt("files of `turns`, `messages`, `prompt` or `text`; repeatable", many=True)
    limit: int | None = opt("at most this many prompts of each file, spread over it", None)
    max_new_tokens: int = opt("new tokens a prompt", 128)
    temperature: float = opt("0 is greedy", 0.0)
    top_k: int = opt("sample among the k likeliest only (0: all)", 0)
    top_p: float = opt("sample among the likeliest that hold this mass", 1.0)
    repetition_penalty: float = opt("above 1 makes repeats less likely", 1.0)
    draft_sampling: str = opt("how the draft chooses when sampling: greedy or sample", "greedy")
    seed: int = opt("of sampling", 0)
    depth: int | None = opt("most tokens drafted a round (default: as trained)", None)
    confidence: float = opt("draft on only while the draft gives its chain this probability (0: always)", 0.0)
    template_kwargs: str | None = opt("JSON passed to the chat template (default: as the draft was trained)", None)
    out: str | None = opt("also write the JSON here", None)
    json: bool = opt("print the JSON alone", False)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    draft_device: str | None = opt("where the draft sits (default: with the target)", None)
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)


def run(options: EvalOptions, progress: Any) -> dict[str, Any]:
    """One record for one prompts file, or {file name: record} for several."""
    from pathlib import Path

    from fledge.decode.engine import load
    from fledge.eval.prompts import read_prompts
    from fledge.eval.run import evaluate
    from fledge.jobs.options import write_json
    from fledge.types import Sampling

    if not options.prompts:
        raise ValueError("give --prompts FILE")
    sets = {Path(p).stem: read_prompts(p, options.limit) for p in options.prompts}
    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.repetition_penalty, options.seed,
        options.draft_sampling,
    )  # fmt: skip
    engine = load(
        options.target, options.draft, device=options.device, draft_device=options.draft_device,
        dtype=dtype_named(options.dtype), depth=options.depth, confidence=options.confidence,
        template_kwargs=template_kwargs(options.template_kwargs),
    )  # fmt: skip
    records = {}
    for name, prompts in sets.items():
        with progress.counting(f"decoding {name} with and without the draft", len(prompts)) as advance:
            records[name] = evaluate(
                engine, prompts, sampling=sampling, max_new_tokens=options.max_new_tokens, advance=advance
            )
    record = next(iter(records.values())) if len(records) == 1 else records
    if options.out:
        write_json(options.out, record)
    return record


def table(record: dict[str, Any], show: Callable[[Any], None]) -> None:
    """Prints records as a plain table and what they mean as sentences."""
    from rich import box
    from rich.table import Table

    records = {"": record} if "tau" in record else record
    out = Table(box=box.SIMPLE_HEAD)
    for column in ("prompts", "τ", "α by position", "tokens/s", "baseline", "speedup", "identical", "8-grams again"):
        out.add_column(column, justify="right")
    for name, r in records.items():
        out.add_row(
            f"{name} {r['prompts']}".strip(), f"{r['tau']:.2f}", " ".join(f"{a:.2f}" for a in r["alpha"]),
            f"{r['tokens_per_s']:.0f}", f"{r['baseline_tokens_per_s']:.0f}", f"{r['speedup']:.2f}x",
            "-" if r["identical"] is None else f"{r['identical']}/{r['prompts']}", f"{r['repeated_8grams']:.0%}",
        )  # fmt: skip
    show(out)
    for name, r in records.items():
        for line in _sentences(r):
            show(f"{name}: {line}" if name else line)


def _sentences(r: dict[str, Any]) -> list[str]:
    split = r["round"]
    lines = [
        f"A round: draft {split['draft_ms']:.2f} ms, verification {split['verify_ms']:.2f} ms, the rest "
        f"{split['overhead_ms']:.2f} ms; a token alone {split['vanilla_token_ms']:.2f} ms. If drafting cost what the "
        f"bytes of its weights do, the speedup would be {split['ceiling']:.2f}.",
        f"{r['not_looping']} of {r['prompts']} answers do not loop; τ on those {r['tau_not_looping']:.2f}.",
    ]
    if r["identical"] is None:
        lines.append("Sampled drafts keep the target's distribution, not its draws: outputs are not compared.")
    elif r["different"]:
        lines.append(f"{r['different']} outputs DIFFER beyond the noise of batch shapes ({r['batch_noise']:.2g}).")
    elif r["near_ties"]:
        lines.append(
            f"{r['near_ties']} outputs differ where two tokens' scores are closer than the noise of batch shapes "
            f"({r['batch_noise']:.2g}); the others are identical, token for token."
        )
    else:
        lines.append("Every output is identical, token for token.")
    if "baseline_over_transformers" in r:
        ratio = r["baseline_over_transformers"]
        lines.append(f"The baseline runs at {ratio:.2f} of transformers' own generate.")
        if ratio < 0.95:
            lines.append("That is under 0.95, so the speedup does not count.")
    return lines
