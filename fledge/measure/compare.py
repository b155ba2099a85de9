"""Compares decoding with drafts, each in one or several ways of drafting, with decoding without a draft."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fledge import __version__
from fledge.decode.drafting import Drafting
from fledge.decode.options import prepare_rounds
from fledge.drafts.weights import open_draft, read_draft_config
from fledge.io.fingerprints import draft_sha256
from fledge.io.machine import command, restoring_signals
from fledge.measure.options import EvalOptions, load_engines, names, ways
from fledge.measure.prompts import answers_of, prompt_set_name, read_prompts
from fledge.measure.record import check_record_path, write_record
from fledge.measure.run import EvaluationStopped, evaluate, longest_request
from fledge.options import default_new_tokens


def compare_drafts(options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns a record, or {label: record} for several drafts, ways of drafting or prompt files. A label names the
    values that differ between the records.

    `show` is called with the result before the result is written to --out, so that no result is lost if the disk is
    full. A partial result is shown and written before the function raises KeyboardInterrupt, or ValueError if answers
    have made a later turn too long for the target. Ctrl-C has no effect while a result is shown and written.
    """
    if not options.target:
        raise ValueError("give --target MODEL, or --endpoint URL to measure a running server")
    if not options.draft:
        raise ValueError("give --draft DIR")
    if options.out:
        check_record_path(options.out, "--out")
    compared, sampling = ways(options), options.sampling()
    drafting = [Drafting(**way.drafting(way.draft_mode)) for way in compared]
    for each in drafting:
        each.check_sampling(sampling)
    families = {draft: read_draft_config(draft).family for draft in options.draft}
    for way, each in zip(compared, drafting, strict=True):
        each.for_method(families[way.draft])
    sets = {prompt_set_name(p): read_prompts(p, options.limit, options.columns) for p in options.prompts}
    hashes = {draft: draft_sha256(open_draft(draft).tensors) for draft in options.draft}
    engines = load_engines(options, compared, progress.say)
    first = engines[0]  # this engine also decodes the baseline
    max_new_tokens = options.max_new_tokens or default_new_tokens(128, first.target.context)
    kwargs = {way.draft: engine.reader.template.kwargs for way, engine in zip(compared, engines, strict=True)}
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
    with restoring_signals() as ignore_signals:  # until the records are shown and written
        for name, prompts in sets.items():
            labels = [f"{way} {name}".strip() if len(sets) > 1 else way for way in names(options, compared)]
            answers = len(arms) * sum(map(answers_of, prompts))
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
            except EvaluationStopped as e:
                found, stopped = e.records, e.__cause__
            except KeyboardInterrupt as e:
                ignore_signals()
                if not (records or found):
                    raise
                stopped = e
            records |= {label: record | drafts[label] | origin for label, record in found.items()}
            if stopped:
                break
        ignore_signals()
        record = next(iter(records.values())) if len(records) == 1 else records
        try:
            show(record)
        finally:
            if options.out:
                write_record(options.out, record)
    if stopped:
        raise stopped
    return record
