"""`fledge eval`: measures acceptance and speedup of drafts, and compares the output with decoding without a draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fledge.io.results import ResultPrinter
from fledge.measure.options import EvalOptions


def command(options: EvalOptions, progress: Any, printer: ResultPrinter) -> None:
    """Prints the records of `run`, as a table or as JSON, and draws the report. Raises ValueError like
    `refuse_changed_output`."""
    from fledge.measure import table
    from fledge.measure.record import record_text
    from fledge.report.read import report_file

    print_table = table.print_server_table if options.endpoint else table.print_table

    def show(record: dict[str, Any]) -> None:
        if options.json:
            print(record_text(record), flush=True)
        else:
            print_table(record, printer)

    record = run(options, progress, show)
    if options.out:
        report_file(Path(options.out), progress.say)
    refuse_changed_output(record)


def run(
    options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None] = lambda record: None
) -> dict[str, Any]:
    """Measures drafts (`compare_drafts`), or a running server (`measure_server`)."""
    from fledge.data.sources import shadowed_presets
    from fledge.measure.prompts import prompt_set_name

    if not options.prompts:
        raise ValueError("give --prompts FILE")
    for flag, values in (
        ("--draft", options.draft), ("--draft-mode", options.draft_mode), ("--depth", options.depth),
        ("--tree-nodes", options.tree_nodes), ("--tree-width", options.tree_width),
        ("--concurrency", options.concurrency), ("--prompts", [prompt_set_name(p) for p in options.prompts]),
    ):  # fmt: skip
        if len(set(values)) < len(values):
            listed = ", ".join(map(str, values))
            raise ValueError(f"{flag} has {listed}: two of them would have the same name in the table")
    for message in shadowed_presets(options.prompts):
        progress.say(message)
    if options.endpoint:
        from fledge.measure.server import measure_server

        return measure_server(options, progress, show)
    from fledge.measure.run import compare_drafts

    return compare_drafts(options, progress, show)


def refuse_changed_output(record: dict[str, Any]) -> None:
    """Raises ValueError if an output of the record, or of any record in {label: record}, differs with a draft."""
    if any(r.get("different") for r in ([record] if "tau" in record else record.values())):
        raise ValueError("decoding with the draft changed the output by more than rounding noise; please report this")
