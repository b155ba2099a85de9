"""`fledge.train_draft`: training as a Python function."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.commands.train import run
from fledge.data.sources import Source
from fledge.familiar import replace_aliases
from fledge.options import option_fields
from fledge.train.setup.options import OUT, TrainOptions

_DEFAULTS: dict[str, Any] = {"target": None, "data": (), "out": OUT}  # of the named parameters of `train_draft`


@dataclass(frozen=True)
class TrainedDraft:
    """The result of `train_draft`: the directory of the draft, and the metrics of the last step."""

    draft: Path
    metrics: dict[str, Any]


def train_draft(
    *,
    target: str | Path | None = None,
    data: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]] = (),
    out: str | Path = OUT,
    progress: bool = False,
    **options: Any,
) -> TrainedDraft:
    """Trains a draft as `fledge train` does.

    `target` is a directory or hub id, `data` one or several data sources, and `out` the directory of the run. A source
    with options of its own is a dict, e.g. `{"source": "a.jsonl", "template_kwargs": {"enable_thinking": True}}`.
    Further keywords are the options of the command with underscores, e.g. `steps=1000, draft_vocab=16000`;
    `TrainOptions` lists them, and `fledge train --help` their other names (`model`, `learning_rate`). An option that is
    None counts as not given. `aux_layers` may be a list and `template_kwargs` a dict.
    `config="recipe.yaml"` takes options from a file; keywords override it. `resume="run"`, without other options,
    continues a run that was stopped. With `progress`, messages and a progress bar are printed to standard error;
    without, nothing is printed. Raises TypeError for an unknown option, ValueError if the options or data are not
    valid, and KeyboardInterrupt after an interrupted run has saved its checkpoint.
    """
    from fledge.io.display import ProgressDisplay

    train_options = _options(target, data, out, options)
    display = ProgressDisplay(quiet=not progress)
    metrics = run(train_options, display.say, display)
    return TrainedDraft(Path(train_options.resume or train_options.out) / "draft", metrics)


def _options(target: Any, data: Any, out: Any, options: dict[str, Any]) -> TrainOptions:
    """The options as `TrainOptions`. An option counts as given unless it is None or a default of `train_draft`."""
    named = {"target": target, "data": data, "out": out}
    named = {name: value for name, value in named.items() if value is not None and value != _DEFAULTS[name]}
    options = {name: value for name, value in options.items() if value is not None}
    options = replace_aliases(TrainOptions, named | options, str)
    if unknown := options.keys() - {f.name for f in option_fields(TrainOptions)}:
        name = min(unknown)
        near = difflib.get_close_matches(name, [f.name for f in option_fields(TrainOptions)], 1)
        cure = f"did you mean {near[0]}?" if near else "TrainOptions lists them"
        raise TypeError(f"{name} is not an option of training; {cure}")
    target, data, out = (options.get(name, default) for name, default in _DEFAULTS.items())
    sources = [data] if isinstance(data, str | Path | Mapping) else data
    if options.get("dry_run"):
        raise ValueError("dry_run is an option of the command, fledge train --dry-run; leave it out")
    options |= dict(target=target, data=[_source(source) for source in sources], out=out)
    if isinstance(kwargs := options.get("template_kwargs"), dict):
        options["template_kwargs"] = json.dumps(kwargs)
    if isinstance(layers := options.get("aux_layers"), list | tuple):
        options["aux_layers"] = ",".join(map(str, layers))
    options = {name: _text(value) for name, value in options.items()}
    defaults = _DEFAULTS | {"data": []}
    given = {name for name, value in options.items() if value != defaults.get(name)}
    return TrainOptions(**options, given=frozenset(given))


def _source(given: str | Path | Mapping[str, Any]) -> str:
    return str(Source.parse(given)) if isinstance(given, Mapping) else _text(given)


def _text(value: Any) -> Any:
    """A path, or the name of a torch dtype, as a string; other values unchanged."""
    import torch

    return str(value).removeprefix("torch.") if isinstance(value, Path | torch.dtype) else value
