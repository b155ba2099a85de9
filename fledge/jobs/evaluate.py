"""`fledge eval`: acceptance and speedup of drafts, and whether the output is identical to decoding without a draft."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import (
    SERVER_OPTIONS,
    DecodeOptions,
    api_key_env_option,
    model_option,
    opt,
    request_timeout_option,
)

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.jobs.display import ResultPrinter


@dataclass(frozen=True, kw_only=True)
class EvalOptions(DecodeOptions):
    """Decode prompts with one or more drafts and without; report acceptance, speed and identity of the outputs."""

    target: str | None = opt(
        "target model: a directory or hub id (owner/name or owner/name@revision); with --endpoint and without --draft "
        "only its tokenizer is read", None
    )  # fmt: skip
    draft: list[str] = opt("draft of the target: a directory or hub id; repeat to compare drafts", repeatable=True)
    draft_mode: list[str] = opt(
        "chain, tree (EAGLE-2's draft tree), or parallel (P-EAGLE: the whole chain in one pass); repeat to compare "
        "modes (default: parallel for a P-EAGLE draft, otherwise chain)", repeatable=True
    )  # fmt: skip
    prompts: list[str] = opt(
        "files, globs or hub ids of the prompts to decode, or mt_bench, gsm8k, humaneval, math500, alpaca, sum, qa; "
        "repeatable", repeatable=True
    )  # fmt: skip
    limit: int | None = opt(
        "maximum number of prompts per file, evenly spaced over the file (default: all; 80 of a named set)", None,
        minimum=1,
    )  # fmt: skip
    max_new_tokens: int | None = opt(
        "maximum new tokens per prompt (default: 128, at most half of the target's context)", None, minimum=1
    )
    batch: int = opt("number of prompts decoded together, with and without the draft", 1)
    endpoint: str | None = opt(
        "address of a running vLLM or SGLang to measure, beside fledge's decoder if --target and --draft are given",
        None,
    )
    baseline_endpoint: str | None = opt("address of the same server without a draft, to compare with", None)
    concurrency: list[int] = opt(
        "number of requests in flight at the server; repeat to compare (default: 1)", repeatable=True
    )
    model: str | None = model_option()
    api_key_env: str = api_key_env_option()
    request_timeout: float = request_timeout_option()
    out: str | None = opt("also write the results to this JSON file; only an earlier result is replaced", None)
    report: str | None = opt(
        "also draw the results as an HTML page in this file; fledge report draws those of --out, several together", None
    )  # fmt: skip
    json: bool = opt("print the results as JSON instead of a table", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None:
            self.refuse((*SERVER_OPTIONS, "baseline_endpoint", "concurrency"), "without --endpoint; give it, or")
        elif not self.draft:
            self.refuse(("batch", "device", "dtype", "target_impl"), "with --endpoint unless fledge decodes too, which")


def run(
    options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None] = lambda record: None
) -> dict[str, Any]:
    """Returns a record, or {label: record} if there are several drafts, modes or prompt files. A label names what
    differs between the records.

    `show` is called with the result before it is written to --out, so that no result is lost if the disk is full.
    """
    from pathlib import Path

    from fledge.decode.propose import Drafting
    from fledge.eval.prompts import read_prompts
    from fledge.eval.record import check_record_path, write_record
    from fledge.eval.run import evaluate, longest_request
    from fledge.jobs.options import default_new_tokens
    from fledge.jobs.prepare import prepare_rounds
    from fledge.models.weights import read_draft_config

    if not options.prompts:
        raise ValueError("give --prompts FILE")
    for flag, values in (
        ("--draft", options.draft), ("--draft-mode", options.draft_mode),
        ("--prompts", [Path(p).stem for p in options.prompts]),
    ):  # fmt: skip
        if len(set(values)) < len(values):
            raise ValueError(f"{flag} has {', '.join(values)}: two of them would have the same name in the table")
    if options.endpoint:
        from fledge.jobs.evaluate_endpoint import run as run_endpoint

        return run_endpoint(options, progress, show)
    if not options.target:
        raise ValueError("give --target MODEL, or --endpoint URL to measure a running server")
    if not options.draft:
        raise ValueError("give --draft DIR")
    if options.out:
        check_record_path(options.out, "--out")
    modes, sampling = options.draft_mode or [None], options.sampling()
    drafting = {mode: Drafting(**options.drafting(mode)) for mode in modes}
    for drafting_options in drafting.values():
        drafting_options.check_sampling(sampling)
    if options.batch < 1:
        raise ValueError(f"--batch {options.batch}: it must be at least 1")
    for draft, mode in itertools.product(options.draft, modes):
        drafting[mode].for_method(read_draft_config(draft).family)
    sets = {Path(p).stem: read_prompts(p, options.limit) for p in options.prompts}
    varied = len(options.draft) > 1, len(modes) > 1, len(sets) > 1
    engines: dict[tuple[str, str | None], Engine] = {}
    target = None
    for combination in itertools.product(options.draft, modes):
        engines[combination] = options.load_engine(*combination, progress.say, target)
        target = engines[combination].target
    max_new_tokens = options.max_new_tokens or default_new_tokens(128, target.context)
    kwargs = {draft: engine.template.kwargs for (draft, _), engine in engines.items()}
    templated = any(p.text is None for prompts in sets.values() for p in prompts)
    if options.template_kwargs and not templated:
        raise ValueError("--template-kwargs has no effect because no prompt is a chat; leave it out")
    if templated and any(k != kwargs[options.draft[0]] for k in kwargs.values()):
        raise ValueError(
            f"the drafts were trained with different template arguments ({kwargs}), so their prompts would differ; "
            "give --template-kwargs for all, or evaluate them one by one"
        )
    first = next(iter(engines.values()))  # also decodes without a draft
    longest = max(longest_request(first, p, max_new_tokens) for prompts in sets.values() for p in prompts)
    arms = [(engine, True) for engine in engines.values()] + [(first, False)]
    prepare_rounds(arms, progress, batch=options.batch, tokens=longest, sampling=sampling)
    records: dict[str, Any] = {}
    for name, prompts in sets.items():
        if options.out and records:  # results so far; an error is reported when the final record is written
            with contextlib.suppress(OSError, ValueError):
                write_record(options.out, records)
        labels = {" ".join(itertools.compress((*key, name), varied)): engine for key, engine in engines.items()}
        compared = "the draft" if len(engines) == 1 else f"{len(engines)} ways of drafting"
        answers = (len(engines) + 1) * sum(p.answers for p in prompts)
        with progress.count(f"answers to {name} with and without {compared}", answers) as advance:
            records |= evaluate(
                labels, prompts, sampling=sampling, max_new_tokens=max_new_tokens, batch=options.batch,
                advance=advance,
            )  # fmt: skip
    record = _single(records)
    try:
        show(record)
    finally:
        if options.out:
            write_record(options.out, record)
    return record


def _single(records: dict[str, Any]) -> dict[str, Any]:
    """The record itself if there is only one, otherwise all records by label."""
    return next(iter(records.values())) if len(records) == 1 else records


def print_table(record: dict[str, Any], printer: ResultPrinter) -> None:
    """Prints a table with one row per record, and a summary of each. A narrow table omits columns, but never τ."""
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
    omitted = printer.table(columns, optional=("repeats", "identical", "baseline", "tokens/s", "speedup"))
    for name, r in rows:
        speed = (
            f"{r['tokens_per_s']:.0f} tokens/s with the draft, {r['baseline_tokens_per_s']:.0f} without: "
            f"{r['speedup']:.2f} times as fast."
        )
        for line in [*([speed] if "baseline" in omitted else []), *summary_lines(r)]:
            printer.print(f"{name}: {line}" if name else line)


def amounts_line(r: dict[str, Any]) -> str:
    """How much was drafted, and why nothing was, if that is so now."""
    reason = f": {r['pause_reason']}" if r["pause_reason"] else ""
    return f"Speculation paused in {r['paused']:.0%} of the rounds{reason}."


def summary_lines(r: dict[str, Any]) -> list[str]:
    """Sentences about a record: what its figures mean."""
    lines = ["Every answer ended with its first token, before the first round of drafting: there is no τ."]
    if r["tau"]:
        lines = [f"α by position: {' '.join(f'{a:.2f}' for a in r['alpha'])}."]
    if r["tau"] and (split := r["round"]):
        lines.append(
            f"A round: draft {split['draft_ms']:.2f} ms, verification {split['verify_ms']:.2f} ms, the rest "
            f"{split['overhead_ms']:.2f} ms; a token without the draft {split['vanilla_token_ms']:.2f} ms. The speedup "
            f"would be {split['ceiling']:.2f} if drafting took only the time to read its weights, and the rest no time."
        )
    if "auto" in (r.get("depth"), r.get("nodes")):
        lines.append(amounts_line(r))
    if r["bytes_per_round"]:
        lines.append(f"{r['bytes_per_round'] / 1e3:.1f} KB a round between the devices of draft and target.")
    tau = f"; τ on those {r['tau_not_looping']:.2f}" if r["tau_not_looping"] else ""
    lines.append(
        f"{r['repeated_8grams']:.0%} of the 8-grams repeat earlier ones; {r['not_looping']} of {r['prompts']} answers "
        f"do not loop{tau}."
    )
    if r["identical"] is None:
        lines.append(
            "Outputs are not compared: with --draft-sampling sample, the distribution is the target's, but the tokens "
            "drawn differ."
        )
    elif r["different"]:
        lines.append(
            f"{r['different']} outputs DIFFER by more than the rounding noise between batch shapes "
            f"({r['batch_noise']:.2g})."
        )
    elif r["near_ties"]:
        lines.append(
            f"{r['near_ties']} outputs differ where the scores of two tokens are closer than the rounding noise "
            f"between batch shapes ({r['batch_noise']:.2g}); the others are identical, token for token."
        )
    else:
        lines.append("Every output is identical, token for token.")
    if r["batch"] > 1:
        lines.append(
            f"{r['batch']} prompts were decoded together, with the draft and without; only --batch 1 is compared with "
            "the generate method of transformers and shows the time of each part of a round."
        )
    if r["batch"] == 1 and 0 < r["tau"] < r["speedup"]:
        lines.append("A speedup above τ is not possible: something else slowed the baseline down. Measure again.")
    if "baseline_over_transformers" in r:
        ratio = r["baseline_over_transformers"]
        lines.append(f"The baseline runs at {ratio:.2f} times the speed of transformers' own generate.")
        if ratio < 0.95:
            lines.append("That is below 0.95, so the speedup is not meaningful.")
    return lines
