"""`fledge regenerate`: replaces the assistant's answers in the data by the target's own.

A draft trained on text that the target generated predicts the target better than a draft trained on other text.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

from fledge.io.files import check_output_path, exclusive_lock, sibling_path
from fledge.regenerate.options import RegenerateOptions


def run(options: RegenerateOptions, say: Callable[[str], None], progress: Any) -> None:
    """Writes one line per record, in the order of the data. After an interruption, the same command continues with the
    records that have no complete line.

    A line is written when the record's answers are complete. At the end, the lines are put into the order of the data.
    """
    from fledge.data.answering import stops_at_tool
    from fledge.data.read import read_records, with_columns
    from fledge.data.sources import shadowed_presets
    from fledge.regenerate.loop import regenerate

    if not options.data:
        raise ValueError("give --data FILE")
    if not options.target and not options.endpoint:
        raise ValueError("give --target MODEL, which answers, or --endpoint URL, the address of a server that does")
    out = check_output_path(options.out, "--out")
    refused: list[str] = []
    for message in shadowed_presets(options.data):
        say(message)
    sources = with_columns(options.data, options.columns)
    records = read_records(sources, options.seed, refused.append if options.skip_bad else None)[: options.limit]
    if stopped := sum(map(stops_at_tool, records)):
        say(
            f"{stopped:,} of {len(records):,} conversations end before the first result of a tool, as it answers the "
            "data's own call"
        )
    is_empty = [r.text is not None and not r.text.strip() for r in records]
    problems = [f"{r.where}: the text is empty, so there is no prompt to continue" for r in compress(records, is_empty)]
    if problems and not options.skip_bad:
        raise ValueError(f"{problems[0]}; remove the record, or skip such records by --skip-bad")
    refused += problems
    records = [r for r, empty in zip(records, is_empty, strict=True) if not empty]
    if refused and not records:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    with exclusive_lock(sibling_path(out, "lock"), str(out), say):
        try:
            regenerate(options, records, refused, out, say, progress)
        except KeyboardInterrupt:
            say(f"stopped; run the same command again to continue {out}")
            raise
