"""`fledge eval`: how often the draft is accepted, what that gains, and that no word changed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import DecodeOptions, opt

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.jobs.show import Paper


@dataclass(frozen=True, kw_only=True)
class EvalOptions(DecodeOptions):
    """Decode prompts with a draft, or several, and without in one run; report acceptance, speed and identity."""

    draft: list[str] = opt("a draft of it, a directory or hub id; repeatable, to compare", many=True)
    draft_mode: list[str] = opt(
        "chain, tree (EAGLE-2's) or parallel (P-EAGLE's; default: chain or parallel, as the draft is); repeatable, to "
        "compare", many=True
    )  # fmt: skip
    prompts: list[str] = opt("files, globs or hub ids, in any layout that train takes; repeatable", many=True)
    limit: int | None = opt("at most this many prompts of each file, spread over it", None, least=1)
    max_new_tokens: int | None = opt(
        "new tokens a prompt (default: 128, at most half the target's context)", None, least=1
    )
    batch: int = opt("prompts decoded together, with and without the draft", 1)
    out: str | None = opt("also write the JSON here; a file that is no earlier record is left alone", None)
    json: bool = opt("print the JSON alone", False)


def run(
    options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None] = lambda record: None
) -> dict[str, Any]:
    """One record, or {what tells it from the others: record} for several drafts, modes or prompts files.

    `show` gets it before it is written, so that a disk that is full takes no figure away.
    """
    from pathlib import Path

    from fledge.decode.propose import Drafting
    from fledge.eval.prompts import read_prompts
    from fledge.eval.run import evaluate
    from fledge.jobs.options import new_tokens, place_of_record, write_json
    from fledge.models.weights import read_draft_config

    if not options.prompts:
        raise ValueError("give --prompts FILE")
    if not options.draft:
        raise ValueError("give --draft DIR")
    if options.out:
        place_of_record(options.out, "--out")
    modes, sampling = options.draft_mode or [None], options.sampling()
    for flag, values in (
        ("--draft", options.draft), ("--draft-mode", options.draft_mode),
        ("--prompts", [Path(p).stem for p in options.prompts]),
    ):  # fmt: skip
        if len(set(values)) < len(values):
            raise ValueError(f"{flag} has {', '.join(values)}: two would have one name in the table")
    drafting = {mode: Drafting(**options.drafting(mode)) for mode in modes}
    for how in drafting.values():
        how.check_sampling(sampling)
    if options.batch < 1:
        raise ValueError(f"--batch {options.batch} decodes nothing; 1 is least")
    for draft, mode in itertools.product(options.draft, modes):
        drafting[mode].for_method(read_draft_config(draft).family)
    sets = {Path(p).stem: read_prompts(p, options.limit) for p in options.prompts}
    varied = len(options.draft) > 1, len(modes) > 1, len(sets) > 1
    engines: dict[tuple[str, str | None], Engine] = {}
    target = None
    for way in itertools.product(options.draft, modes):
        engines[way] = options.engine(*way, target)
        target = engines[way].target
    most = options.max_new_tokens or new_tokens(128, target.context)
    kwargs = {draft: engine.template.kwargs for (draft, _), engine in engines.items()}
    templated = any(p.text is None for prompts in sets.values() for p in prompts)
    if options.template_kwargs and not templated:
        raise ValueError("no prompt is a chat, which --template-kwargs are for; leave them out")
    if templated and any(k != kwargs[options.draft[0]] for k in kwargs.values()):
        raise ValueError(
            f"the drafts were trained with different template arguments ({kwargs}), so that they would be asked "
            "different prompts; give --template-kwargs for all, or evaluate them one by one"
        )
    records: dict[str, Any] = {}
    for name, prompts in sets.items():
        if options.out and records:  # what is measured so far; if it cannot be written, that is told at the end
            with contextlib.suppress(OSError, ValueError):
                write_json(options.out, records)
        labels = {" ".join(itertools.compress((*way, name), varied)): engine for way, engine in engines.items()}
        what = f"{name} with and without " + ("the draft" if len(engines) == 1 else f"{len(engines)} ways of drafting")
        answers = (len(engines) + 1) * sum(p.answers for p in prompts)
        with progress.counting(f"answers to {what}", answers) as advance:
            records |= evaluate(
                labels, prompts, sampling=sampling, max_new_tokens=most, batch=options.batch,
                advance=advance,
            )  # fmt: skip
    record = _single(records)
    try:
        show(record)
    finally:
        if options.out:
            write_json(options.out, record)
    return record


def _single(records: dict[str, Any]) -> dict[str, Any]:
    """One record alone, or all by name."""
    return next(iter(records.values())) if len(records) == 1 else records


def table(record: dict[str, Any], paper: Paper) -> None:
    """Prints records as a table of one row each, and what they mean as sentences. τ stays in the narrowest table."""
    records = {"": record} if "tau" in record else record
    rows = records.items()
    columns = {
        "prompts": [f"{name} {r['prompts']}".strip() for name, r in rows],
        "τ": [f"{r['tau']:.2f}" if r["tau"] else "-" for _, r in rows],
        "tokens/s": [f"{r['tokens_per_s']:.0f}" for _, r in rows],
        "baseline": [f"{r['baseline_tokens_per_s']:.0f}" for _, r in rows],
        "speedup": [f"{r['speedup']:.2f}x" for _, r in rows],
        "identical": ["-" if r["identical"] is None else f"{r['identical']}/{r['prompts']}" for _, r in rows],
        "repeats": [f"{r['repeated_8grams']:.0%}" for _, r in rows],
    }
    gone = paper.table(columns, spare=("repeats", "identical", "baseline", "tokens/s", "speedup"))
    for name, r in rows:
        speed = (
            f"{r['tokens_per_s']:.0f} tokens/s with the draft, {r['baseline_tokens_per_s']:.0f} without: "
            f"{r['speedup']:.2f} times as fast."
        )
        for line in [*([speed] if "baseline" in gone else []), *_sentences(r)]:
            paper.print(f"{name}: {line}" if name else line)


def _sentences(r: dict[str, Any]) -> list[str]:
    lines = ["Every answer ended with its first token, before a draft was asked for: there is no τ."]
    if r["tau"]:
        lines = [f"α by position: {' '.join(f'{a:.2f}' for a in r['alpha'])}."]
    if r["tau"] and (split := r["round"]):
        lines.append(
            f"A round: draft {split['draft_ms']:.2f} ms, verification {split['verify_ms']:.2f} ms, the rest "
            f"{split['overhead_ms']:.2f} ms; a token alone {split['vanilla_token_ms']:.2f} ms. If drafting cost no "
            f"more than the bytes of its weights, and the rest nothing, the speedup would be {split['ceiling']:.2f}."
        )
    straight = f"; τ on those {r['tau_not_looping']:.2f}" if r["tau_not_looping"] else ""
    lines.append(
        f"{r['repeated_8grams']:.0%} of the 8-grams repeat earlier ones; {r['not_looping']} of {r['prompts']} answers "
        f"do not loop{straight}."
    )
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
    if r["batch"] > 1:
        lines.append(
            f"{r['batch']} prompts were decoded together, with the draft and without; only --batch 1 is compared with "
            "transformers' own generate, and shows the parts of a round."
        )
    if r["batch"] == 1 and 0 < r["tau"] < r["speedup"]:
        lines.append("A speedup over τ cannot be: something else slowed the baseline down. Measure again.")
    if "baseline_over_transformers" in r:
        ratio = r["baseline_over_transformers"]
        lines.append(f"The baseline runs at {ratio:.2f} of transformers' own generate.")
        if ratio < 0.95:
            lines.append("That is under 0.95, so the speedup does not count.")
    return lines
