"""`fledge eval`: acceptance and speedup of drafts, and whether the output is identical to decoding without a draft."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.commands.decoding import AUTO, DecodeOptions, load_engines, names, prepare_rounds, ways
from fledge.methods import MOST_DEPTH, MOST_NODES
from fledge.options import SERVER_OPTIONS, api_key_env_option, columns_option, model_option, opt, request_timeout_option

if TYPE_CHECKING:
    from fledge.io.display import ResultPrinter


WORTH_TRYING = 1.03  # of the speed of the measured depth; smaller gains are within the noise of the times
FEW = 6  # records, each of which gets all its sentences


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
    depth: list[int | str] = opt(
        "length of a drafted chain, or depth of a tree, in tokens, or auto: chosen while decoding from acceptance and "
        "speed, with nothing drafted while that is faster; repeat to compare depths (default: as trained)",
        repeatable=True, minimum=1, maximum=MOST_DEPTH, word=AUTO,
    )  # fmt: skip
    tree_nodes: list[int | str] = opt(
        "number of nodes of a draft tree, including the root, or auto; repeat to compare sizes (default: 60)",
        repeatable=True, minimum=2, maximum=MOST_NODES, word=AUTO,
    )  # fmt: skip
    tree_width: list[int] = opt(
        "maximum number of children of a tree node; repeat to compare widths (default: 10)", repeatable=True,
        minimum=1, maximum=64,
    )  # fmt: skip
    prompts: list[str] = opt(
        "files, globs or hub ids of the prompts to decode, or mt_bench, gsm8k, humaneval, math500, alpaca, sum, qa, "
        "or a data set by name as in `fledge train --data`, e.g. ultrachat; repeatable", repeatable=True
    )  # fmt: skip
    columns: str | None = columns_option()
    limit: int | None = opt(
        "maximum number of prompts of each --prompts, evenly spaced over its files (default: all; 80 of a named set)",
        None, minimum=1,
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
        "HTML page of the results (default: beside --out, if that is given); fledge report draws several together", None
    )  # fmt: skip
    json: bool = opt("print the results as JSON instead of a table", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None:
            needless = (*SERVER_OPTIONS, "baseline_endpoint", "concurrency")
            self.refuse(needless, "without --endpoint; give it, or")
        if self.endpoint is not None and not self.draft:
            self.refuse(("batch", "device", "dtype", "target_impl"), "with --endpoint unless fledge decodes too, which")


def command(options: EvalOptions, progress: Any, printer: ResultPrinter) -> None:
    """Prints what `run` measures, as a table or as JSON, and draws its report. Raises ValueError as
    `refuse_changed_output` does."""
    from fledge.measure.record import record_text
    from fledge.report.page import check_report_path, report_file, report_record

    def show(record: dict[str, Any]) -> None:
        if options.json:
            print(record_text(record), flush=True)
        elif options.endpoint:
            from fledge.commands.evaluate_endpoint import print_table as print_servers_table

            print_servers_table(record, printer)
        else:
            print_table(record, printer)

    if options.report:
        check_report_path(options.report, "--report")
    record = run(options, progress, show)
    if options.report:
        report_record(record, options.report)
    elif options.out:
        report_file(Path(options.out), progress.say)
    refuse_changed_output(record)


def run(
    options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None] = lambda record: None
) -> dict[str, Any]:
    """Returns a record, or {label: record} if there are several drafts, ways of drafting or prompt files. A label names
    what differs between the records.

    `show` is called with the result before it is written to --out, so that no result is lost if the disk is full. Both
    also happen if the job ends after a part of the requests, before it raises KeyboardInterrupt, or TurnTooLong where
    answers have made a later turn too long for the target. Ctrl-C has no effect while a result is shown and written.
    """

    from fledge import __version__
    from fledge.commands.decoding import prepare_rounds
    from fledge.commands.evaluate_ways import load_engines, names, ways
    from fledge.data.sources import shadowed_presets
    from fledge.data.presets import shadowed_presets
    from fledge.decode.propose import Drafting
    from fledge.drafts.weights import draft_sha256, open_draft, read_draft_config
    from fledge.io.machine import command, restoring_signals
    from fledge.measure.prompts import prompt_set_name, read_prompts
    from fledge.measure.record import check_record_path, write_record
    from fledge.measure.run import EvaluationStopped, TurnTooLong, evaluate, longest_request
    from fledge.options import default_new_tokens

    if not options.prompts:
        raise ValueError("give --prompts FILE")
    for flag, values in (
        ("--draft", options.draft), ("--draft-mode", options.draft_mode), ("--depth", options.depth),
        ("--tree-nodes", options.tree_nodes), ("--tree-width", options.tree_width),
        ("--prompts", [prompt_set_name(p) for p in options.prompts]),
    ):  # fmt: skip
        if len(set(values)) < len(values):
            listed = ", ".join(map(str, values))
            raise ValueError(f"{flag} has {listed}: two of them would have the same name in the table")
    for message in shadowed_presets(options.prompts):
        progress.say(message)
    if options.endpoint:
        from fledge.commands.evaluate_endpoint import run as run_endpoint

        return run_endpoint(options, progress, show)
    if not options.target:
        raise ValueError("give --target MODEL, or --endpoint URL to measure a running server")
    if not options.draft:
        raise ValueError("give --draft DIR")
    if options.out:
        check_record_path(options.out, "--out")
    compared, sampling = ways(options), options.sampling()
    drafting = {way: Drafting(**way.options(options).drafting(way.mode)) for way in compared}
    for drafting_options in drafting.values():
        drafting_options.check_sampling(sampling)
    if options.batch < 1:
        raise ValueError(f"--batch {options.batch}: it must be at least 1")
    families = {draft: read_draft_config(draft).family for draft in options.draft}
    for way in compared:
        drafting[way].for_method(families[way.draft])
    sets = {prompt_set_name(p): read_prompts(p, options.limit, options.columns) for p in options.prompts}
    hashes = {draft: draft_sha256(open_draft(draft).tensors) for draft in options.draft}
    engines = load_engines(options, compared, progress.say)
    first = engines[0]  # also decodes without a draft
    max_new_tokens = options.max_new_tokens or default_new_tokens(128, first.target.context)
    kwargs = {way.draft: engine.template.kwargs for way, engine in zip(compared, engines, strict=True)}
    templated = any(p.text is None for prompts in sets.values() for p in prompts)
    if options.template_kwargs and not templated:
        raise ValueError("--template-kwargs has no effect because no prompt is a chat; leave it out")
    if templated and any(k != kwargs[options.draft[0]] for k in kwargs.values()):
        raise ValueError(
            f"the drafts were trained with different template arguments ({kwargs}), so their prompts would differ; "
            "give --template-kwargs for all, or evaluate them one by one"
        )
    longest = max(longest_request(first, p, max_new_tokens) for prompts in sets.values() for p in prompts)
    arms = [(engine, True) for engine in engines] + [(first, False)]
    prepare_rounds(arms, progress, batch=options.batch, tokens=longest, sampling=sampling)
    records: dict[str, Any] = {}
    stopped: BaseException | None = None
    with restoring_signals() as ignore_signals:  # until what was measured is shown and written
        for name, prompts in sets.items():
            labels = [f"{way} {name}".strip() if len(sets) > 1 else way for way in names(options, compared)]
            answers = len(arms) * sum(p.answers for p in prompts)
            origin = {"prompt_set": name, "command": command(), "fledge": __version__}
            drafts = {
                label: {"draft": way.draft, "draft_sha256": hashes[way.draft]}
                for label, way in zip(labels, compared, strict=True)
            }
            found: dict[str, Any] = {}
            try:
                if options.out and records:  # results so far; an error is reported when the final record is written
                    with contextlib.suppress(OSError, ValueError):
                        write_record(options.out, records)
                with progress.count(f"answers to {name} in {len(arms)} ways", answers, unit="answers") as advance:
                    found = evaluate(
                        dict(zip(labels, engines, strict=True)), prompts, sampling=sampling, batch=options.batch,
                        max_new_tokens=max_new_tokens, advance=advance, interrupted=ignore_signals,
                    )  # fmt: skip
            except (EvaluationStopped, TurnTooLong) as e:
                found, stopped = e.records, e
            except KeyboardInterrupt as e:
                ignore_signals()
                if not (records or found):
                    raise
                stopped = e
            records |= {label: record | drafts[label] | origin for label, record in found.items()}
            if stopped:
                break
        ignore_signals()
        record = _single(records)
        try:
            show(record)
        finally:
            if options.out:
                write_record(options.out, record)
    if stopped:
        raise stopped
    return record


def _single(records: dict[str, Any]) -> dict[str, Any]:
    """The record itself if there is only one, otherwise all records by label."""
    return next(iter(records.values())) if len(records) == 1 else records


def print_table(record: dict[str, Any], printer: ResultPrinter) -> None:
    """Prints a table with one row per record, and a summary of each. A narrow table omits columns, but never τ. Of more
    than FEW records, the summaries have only what has to be known to read the table."""
    records = {"": record} if "tau" in record else record
    rows = records.items()
    widths = [half_width(r) for r in records.values()]
    columns = {
        "prompts": [f"{name} {r['prompts']}".strip() for name, r in rows],
        "τ": [f"{r['tau']:.2f}" if r["tau"] else "-" for _, r in rows],
        "±": ["-" if width is None else f"{width:.2f}" for width in widths],
        "tokens/s": [f"{r['tokens_per_s']:.0f}" for _, r in rows],
        "baseline": [f"{r['baseline_tokens_per_s']:.0f}" for _, r in rows],
        "speedup": [f"{r['speedup']:.2f}x" for _, r in rows],
        "identical": ["-" if r["identical"] is None else f"{r['identical']}/{r['prompts']}" for _, r in rows],
        "repeats": [f"{r['repeated_8grams']:.0%}" for _, r in rows],
    }
    if all(width is None for width in widths):
        del columns["±"]
    optional = [c for c in ("repeats", "identical", "±", "baseline", "tokens/s", "speedup") if c in columns]
    omitted = printer.table(columns, optional=optional)
    for line in _sentences(records, "baseline" in omitted):
        printer.print(line)


def _sentences(records: dict[str, Any], speeds: bool) -> list[str]:
    """The sentences below a table; with `speeds`, also the speeds of both arms, which the table has no room for. Of
    more than FEW records, what is true of all is said once."""
    few = len(records) <= FEW
    of = {name: (summary_lines if few else notices)(r) for name, r in records.items()}
    if speeds:
        of = {name: [speed_line(records[name]), *lines] for name, lines in of.items()}
    if few:
        return [f"{name}: {line}" if name else line for name, lines in of.items() for line in lines]
    shared = [line for line in next(iter(of.values())) if all(line in lines for lines in of.values())]
    said = [f"{name}: {line}" for name, lines in of.items() for line in lines if line not in shared]
    return [
        *said, *shared, "α by position and the parts of a round are in the record: --json prints it, --out keeps it."
    ]  # fmt: skip


def half_width(r: dict[str, Any]) -> float | None:
    """What τ's 95 % interval has above τ, and as much below it, though no τ is below 1; None without an interval."""
    interval = r["tau_interval"]
    return interval[1] - r["tau"] if interval else None


def speed_line(r: dict[str, Any]) -> str:
    return (
        f"{r['tokens_per_s']:.0f} tokens/s with the draft, {r['baseline_tokens_per_s']:.0f} without: "
        f"{r['speedup']:.2f} times as fast."
    )


def refuse_changed_output(record: dict[str, Any]) -> None:
    """Raises ValueError if an output of the record, or of one of several records by label, differs with a draft."""
    if any(r.get("different") for r in ([record] if "tau" in record else record.values())):
        raise ValueError("decoding with the draft changed the output by more than rounding noise; please report this")


def summary_lines(r: dict[str, Any]) -> list[str]:
    """Sentences about a record: what its figures mean."""
    return figure_lines(r) + notices(r)


def figure_lines(r: dict[str, Any]) -> list[str]:
    """Sentences with figures that the table does not have."""
    from fledge.measure.metrics import alpha_text, pause_line

    lines = ["Every answer ended with its first token, before the first round of drafting: there is no τ."]
    if r["tau"]:
        lines = [f"α by position: {alpha_text(r['alpha'])}."]
    if r["tau"] and r["round"]:
        lines += round_lines(r)
    if "auto" in (r.get("depth"), r.get("nodes")):
        lines.append(pause_line(r["paused"], r["pause_reason"]))
    if r["bytes_per_round"]:
        lines.append(f"{r['bytes_per_round'] / 1e3:.1f} KB a round between the devices of draft and target.")
    tau = f"; τ on those {r['tau_not_looping']:.2f}" if r["tau_not_looping"] else ""
    lines.append(
        f"{r['repeated_8grams']:.0%} of the 8-grams repeat earlier ones; {r['not_looping']} of {r['prompts']} answers "
        f"do not loop{tau}."
    )
    return lines


def round_lines(r: dict[str, Any]) -> list[str]:
    """Sentences on a record at batch 1: where the time of a round goes, and what would make decoding faster."""
    from fledge.measure.metrics import chain_gains

    drafting, verification, rest, token = (
        r["round"][part] for part in ("draft_ms", "verify_ms", "overhead_ms", "vanilla_token_ms")
    )
    total = drafting + verification + rest
    lines = [
        f"A round takes {total:.2f} ms: drafting {drafting / total:.0%}, verification {verification / total:.0%}, the "
        f"rest {max(rest, 0) / total:.0%}. It commits {r['tau']:.2f} tokens in the time of {total / token:.2f} tokens "
        f"without the draft ({token:.2f} ms each)."
    ]
    gains = {}
    if r["mode"] == "chain" and r["depth"] != AUTO and not r["confidence"]:
        gains = chain_gains(r["alpha"], r["depth"], drafting, verification + rest)
    best = max(gains, key=gains.__getitem__, default=None)
    if best and gains[best] >= WORTH_TRYING:
        lines.append(
            f"By these times and α, --depth {best} instead of {r['depth']} would be {gains[best] - 1:.0%} faster."
        )
    elif r["speedup"] < 1:
        lines.append("The draft does not pay here: with --depth auto, nothing is drafted where that is faster.")
    elif drafting > verification:
        lines.append("Most would be gained by faster drafting: fledge train makes smaller drafts with --draft-vocab.")
    elif rest > verification:
        lines.append("Most would be gained outside the models: see whether other programs load the processor.")
    elif r["mode"] == "tree" and verification > 1.5 * token:
        lines.append("Most would be gained by faster verification: compare with fewer --tree-nodes.")
    else:
        lines.append(
            "Most would be gained by more accepted tokens: train the draft for longer, on the target's own answers"
            + (", or compare with --draft-mode tree." if r["mode"] == "chain" else ".")
        )
    return lines


def notices(r: dict[str, Any]) -> list[str]:
    """Sentences on how far the figures can be relied on: whether outputs differ, and what disturbed the measurement."""
    lines = []
    if "stopped" in r:
        lines.append(f"Stopped after {r['prompts']} of {r['stopped']} answers.")
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
