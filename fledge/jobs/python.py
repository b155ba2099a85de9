"""`fledge.train_draft`: training as a Python function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.jobs.options import replace_former_names
from fledge.jobs.train import OUT, TrainOptions, run


@dataclass(frozen=True)
class TrainedDraft:
    """The result of `train_draft`: the directory of the draft, and the metrics of the last step."""

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

    `target` is a directory or hub id, `data` one or several data sources, and `out` the directory of the run. Further
    keywords are the options of the command with underscores, e.g. `steps=1000, draft_vocab=16000`; `TrainOptions` lists
    them. An option that is None counts as not given. `aux_layers` may be a list and `template_kwargs` a dict.
    `config="recipe.yaml"` takes options from a file; keywords override it. `resume="run"`, without other options,
    continues a run that was stopped. With `progress`, messages and a progress bar are printed to standard error;
    without, nothing is printed. Raises ValueError if the options or data are not valid, and KeyboardInterrupt after an
    interrupted run has saved its checkpoint.
    """
    from fledge.jobs.display import ProgressDisplay

    train_options = _options(target, data, out, options)
    display = ProgressDisplay(quiet=not progress)
    metrics = run(train_options, display.say, display)
    return TrainedDraft(Path(train_options.resume or train_options.out) / "draft", metrics)


def _options(target: Any, data: Any, out: Any, options: dict[str, Any]) -> TrainOptions:
    """The options as `TrainOptions`. An option counts as given unless it is None or a default of `train_draft`."""
    sources = [data] if isinstance(data, str | Path) else data
    options = replace_former_names(TrainOptions, options, str)
    if options.get("dry_run"):
        raise ValueError("dry_run is an option of the command, fledge train --dry-run; leave it out")
    options |= dict(target=target, data=[_text(source) for source in sources], out=out)
    if isinstance(kwargs := options.get("template_kwargs"), dict):
        options["template_kwargs"] = json.dumps(kwargs)
    if isinstance(layers := options.get("aux_layers"), list | tuple):
        options["aux_layers"] = ",".join(map(str, layers))
    options = {name: _text(value) for name, value in options.items()}
    defaults: dict[str, Any] = {"target": None, "data": [], "out": OUT}
    given = {name for name, value in options.items() if value is not None and value != defaults.get(name)}
    return TrainOptions(**options, given=frozenset(given))


def _text(value: Any) -> Any:
    """A path as a string; other values unchanged."""
    return str(value) if isinstance(value, Path) else value
