"""Training as a Python function: the job of `fledge train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.jobs.train import TrainOptions, run


@dataclass(frozen=True)
class TrainedDraft:
    """What `train_draft` made: the directory of the draft, and the metrics of the last step."""

    draft: Path
    metrics: dict[str, Any]


def train_draft(
    *,
    target: str | Path | None = None,
    data: str | Path | Sequence[str | Path] = (),
    out: str | Path = "draft-run",
    progress: bool = False,
    **options: Any,
) -> TrainedDraft:
    """Trains a draft as `fledge train` does.

    `target` is a directory or hub id, `data` one source or several, and `out` the directory of the run. `options` are
    the command's, with underscores (`TrainOptions` has them all): `steps=1000, draft_vocab=16000`. `aux_layers` may be
    a list and `template_kwargs` a dict. `resume="run"` alone goes on with a run that was stopped. Nothing is printed,
    unless `progress` asks for the command's lines and bar on standard error. Raises ValueError for what cannot be
    trained, and KeyboardInterrupt when it was stopped and has saved its state.
    """
    from fledge.jobs.show import Show

    sources = [data] if isinstance(data, str | Path) else data
    options |= dict(target=target, data=[_text(source) for source in sources], out=out)
    if isinstance(kwargs := options.get("template_kwargs"), dict):
        options["template_kwargs"] = json.dumps(kwargs)
    if isinstance(layers := options.get("aux_layers"), list | tuple):
        options["aux_layers"] = ",".join(map(str, layers))
    asked = TrainOptions(**{name: _text(value) for name, value in options.items()})
    show = Show(quiet=not progress)
    metrics = run(asked, show.say, show)
    return TrainedDraft(Path(asked.resume or asked.out) / "draft", metrics)


def _text(value: Any) -> Any:
    """A path as the text that options hold."""
    return str(value) if isinstance(value, Path) else value
