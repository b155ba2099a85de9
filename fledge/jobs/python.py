"""Training as a Python function: the job of `fledge train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.jobs.options import by_current_names
from fledge.jobs.train import OUT, TrainOptions, run


@dataclass(frozen=True)
class TrainedDraft:
    """What `train_draft` made: the directory of the draft, and the metrics of the last step."""

    draft: Path
    metrics: dict[str, Any]


def train_draft(
    *,
    target: str | Path | None = None,
    data: str | Path | Sequence[str | Path] = (),
    out: str | Path = OUT,
    progress: bool = False,
    **options: Any,
) -> TrainedDraft:
    """Trains a draft as `fledge train` does.

    `target` is a directory or hub id, `data` one source or several, and `out` the directory of the run. `options` are
    the command's, with underscores (`TrainOptions` has them all): `steps=1000, draft_vocab=16000`. `aux_layers` may be
    a list and `template_kwargs` a dict. `config="recipe.yaml"` takes options from a file, which those given here
    override (None: not given). `resume="run"` alone continues a run that was stopped. Nothing is printed, unless
    `progress` asks for the command's lines and bar on standard error. Raises ValueError for what cannot be trained, and
    KeyboardInterrupt when it was stopped and has saved its state.
    """
    from fledge.jobs.show import Show

    asked = _options(target, data, out, options)
    show = Show(quiet=not progress)
    metrics = run(asked, show.say, show)
    return TrainedDraft(Path(asked.resume or asked.out) / "draft", metrics)


def _options(target: Any, data: Any, out: Any, options: dict[str, Any]) -> TrainOptions:
    """The options with a record of those that were given: what is neither None nor a default of `train_draft`'s own."""
    sources = [data] if isinstance(data, str | Path) else data
    options = by_current_names(TrainOptions, options, str)
    options |= dict(target=target, data=[_text(source) for source in sources], out=out)
    if isinstance(kwargs := options.get("template_kwargs"), dict):
        options["template_kwargs"] = json.dumps(kwargs)
    if isinstance(layers := options.get("aux_layers"), list | tuple):
        options["aux_layers"] = ",".join(map(str, layers))
    options = {name: _text(value) for name, value in options.items()}
    unasked = {"target": None, "data": [], "out": OUT}
    given = {name for name, value in options.items() if value is not None and value != unasked.get(name)}
    return TrainOptions(**options, given=frozenset(given))


def _text(value: Any) -> Any:
    """A path as the text that options hold."""
    return str(value) if isinstance(value, Path) else value
