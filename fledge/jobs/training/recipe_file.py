"""recipe.yaml: what a run was asked to do and what it settled; read by --config and --resume.

Its keys are the command's options with underscores. `settled` holds what target, data and GPU decided: --resume goes on
with it, --config leaves it to be decided anew. Runs of earlier versions have a train.json instead, which --resume
still reads.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from fledge import __version__
from fledge.fields import format_value, shortened
from fledge.jobs.options import (
    RenamedOption,
    by_current_names,
    default_of,
    flag_of,
    flags,
    is_a,
    problem_with,
)
from fledge.jobs.train import NOT_FROM_FILE, TrainOptions
from fledge.jobs.training.plain_yaml import MOST_BYTES, read_yaml, write_yaml
from fledge.jobs.training.recipe import (
    SHAPE,
    WITH_INIT_FROM,
    WITH_STEPS,
    Settled,
    method_named,
    without_effect,
    without_effect_in,
)
from fledge.train.checkpoint import RunDirectory

HEADER = """\
# What this training run does. The keys are the options of `fledge train`, with underscores.
#
#   fledge train --config recipe.yaml --out another-run    trains anew as this file says; flags override it
#   fledge train --resume RUN                              continues the run whose directory this file is in
#
# `settled` is what target, data and GPU decided. Only --resume uses it.

"""
RUN_ONLY = ("config", "resume", "longest_row")  # options of one call of the command, not of a recipe
# settled values that --resume passes on as options, because they must not be decided again: other slots, for example,
# round differently
CONTINUED = ("depth", "max_length", "eval_tokens", "impl", "slots", "activations")
VERSION, SETTLED = "fledge_version", "settled"
DAMAGED = "it is damaged, start a new run"

Say = Callable[[str], None]


# -- writing -------------------------------------------------------------------------------------------------------


def recipe_text(options: TrainOptions, settled: Settled) -> str:
    """The text of recipe.yaml: every option that has a value and an effect, then what was settled. `options.method` is
    a name."""
    decided = {name: value for name, value in asdict(settled).items() if value is not None}
    return HEADER + write_yaml({VERSION: __version__, **_as_written(_with_absolute_paths(options)), SETTLED: decided})


def _as_written(options: TrainOptions) -> dict[str, Any]:
    choice = method_named(options.method)
    left_out = {*RUN_ONLY, "out", *choice.switches, *without_effect(options, choice.method)}
    values = {k: v for k, v in options.by_name().items() if v is not None and k not in left_out}
    if "template_kwargs" in values:
        values["template_kwargs"] = json.loads(values["template_kwargs"])
    return values


def _with_absolute_paths(options: TrainOptions) -> TrainOptions:
    """The options as they hold from any current directory."""
    from fledge.data.read import absolute_source

    paths = {n: getattr(options, n) for n in ("target", "init_from")}
    there = {n: os.path.abspath(path) for n, path in paths.items() if path and Path(path).exists()}
    prompts = absolute_source(options.eval_prompts) if options.eval_prompts else None
    return replace(options, data=[absolute_source(source) for source in options.data], eval_prompts=prompts, **there)


# -- --config ------------------------------------------------------------------------------------------------------


def with_config(options: TrainOptions, say: Say) -> TrainOptions:
    """The options with the values of their --config file, where flags do not override them. A value of the file counts
    as given where it differs from the default.

    A flag that decides over other options (`_overridden`) replaces what the file says of those, and `say` is told.
    Raises ValueError for a file that is no recipe, naming file, key and cure.
    """
    if options.config is None:
        return options
    file = Path(options.config)
    written = _without_command_line_options(_options_in(_mapping_in(file), file), file, say)
    defaults = {f.name: default_of(f) for f in flags(TrainOptions)}
    given = {name: getattr(options, name) for name in defaults if options.was_given(name)}
    differing = {name for name, value in written.items() if value != defaults[name]}
    for name, why in _overridden(given).items():
        if name in differing - given.keys() - {"steps", "epochs"}:  # of those two, one replaces the other
            say(f"{name} of {file} is not used {why.rpartition(';')[0]}")
        written.pop(name, None)
    with naming(options):
        return TrainOptions(**defaults | written | given, given=frozenset(given.keys() | (differing & written.keys())))


@contextlib.contextmanager
def naming(options: TrainOptions) -> Iterator[None]:
    """Names the --config file, if there is one, in the message of a ValueError: the options may be the file's."""
    try:
        yield
    except ValueError as e:
        if options.config is None:
            raise
        raise ValueError(f"{options.config}, with the flags given: {e}") from e


def _overridden(given: Mapping[str, Any]) -> dict[str, str]:
    """Options that a file's values are not taken of, because a flag that was given decides over them."""
    found = dict.fromkeys(["epochs"], WITH_STEPS) if "steps" in given else {}
    found |= dict.fromkeys(["steps"], "with --epochs;") if "epochs" in given else {}
    found |= dict.fromkeys(["method", *SHAPE], WITH_INIT_FROM) if "init_from" in given else {}
    return found | (without_effect_in(method_named(given["method"]).method) if "method" in given else {})


def _without_command_line_options(values: dict[str, Any], file: Path, say: Say) -> dict[str, Any]:
    if "out" in values:
        say(f"out of {file} is not used; --out names the directory of the new run")
    if values.get("trust_remote_code"):
        say(
            f"trust_remote_code of {file} is not honoured: a file cannot grant trust. Give --trust-remote-code if the "
            "target's own code has to run"
        )
    return {name: value for name, value in values.items() if name not in NOT_FROM_FILE}


# -- --resume ------------------------------------------------------------------------------------------------------


def resumed(directory: RunDirectory, asked: TrainOptions) -> tuple[TrainOptions, dict[str, Any]]:
    """The options that a run continues with, and what it had settled, by the names of `Settled`.

    Trust is not taken from the file: where the run was started with --trust-remote-code, the flag is needed again.
    Raises ValueError where there is no run, where its file is damaged, or where trust is given that it did not have.
    """
    file = directory.options_file()
    try:
        values, settled = (_from_train_json if file == directory.old_config else _from_recipe)(file)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{e}; {DAMAGED}") from e
    if asked.trust_remote_code and values.get("trust_remote_code") is not True:
        raise ValueError(f"{directory.path} was started without it; leave --trust-remote-code out")
    values |= {name: settled[name] for name in CONTINUED if name in settled}
    values |= {"resume": asked.resume, "out": asked.resume, "trust_remote_code": asked.trust_remote_code}
    try:
        return TrainOptions(**values, given=frozenset()), settled
    except ValueError as e:
        raise ValueError(f"{file}: {e}; {DAMAGED}") from e


def check_settled(recorded: Mapping[str, Any], settled: Settled, directory: RunDirectory) -> None:
    """Raises ValueError where a run that is resumed settles anything otherwise than it did when it was started."""
    if recorded["data_sha256"] != settled.data_sha256:
        raise ValueError(
            f"the data is not what {directory.path} was started with; resuming needs the same files and the same "
            "chat template"
        )
    for name, before in recorded.items():
        if before != (now := getattr(settled, name)):
            raise ValueError(
                f"{directory.options_file()}: {SETTLED}.{name} is {format_value(before)}, but the options and data "
                f"give {format_value(now)}; undo the change of the file or the target, or start a new run"
            )


def _from_recipe(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    content = _mapping_in(file)
    settled = content.get(SETTLED)
    if not isinstance(settled, dict) or "data_sha256" not in settled:
        raise ValueError(f"{file} lacks what the run settled ({SETTLED})")
    hints = get_type_hints(Settled)
    for name, value in settled.items():
        if name not in hints or not is_a(hints[name], value):
            raise ValueError(f"{file}: {SETTLED}.{shortened(name)} cannot be {format_value(value)}")
    return _options_in(content, file), settled


def _from_train_json(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of an earlier version. Options that there are no more are left out."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON ({e})") from e
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object")
    options, sha256 = content.get("options"), content.get("data_sha256")
    if not isinstance(options, dict) or not isinstance(sha256, str):
        raise ValueError(f"{file} lacks the run's options")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedOption)  # nobody typed these names
        options = by_current_names(TrainOptions, options)
    known = {f.name for f in flags(TrainOptions)} - {"config"}
    return {name: value for name, value in options.items() if name in known}, {"data_sha256": sha256}


# -- reading -------------------------------------------------------------------------------------------------------


def _mapping_in(file: Path) -> dict[str, Any]:
    """The keys and values of a recipe. Raises ValueError, naming the file, where it is none."""
    if file.is_dir():
        raise ValueError(f"{file} is a directory; a recipe is a file, such as {file / 'recipe.yaml'}")
    if not file.is_file():
        raise ValueError(f"{file} does not exist or is no plain file; a recipe is a YAML file such as RUN/recipe.yaml")
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} has more than {MOST_BYTES:,} bytes; it is no recipe")
    try:
        content = read_yaml(file.read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {format_value(content)}; a recipe is made of lines such as `steps: 1000`")
    return content


def _options_in(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The options in a recipe by name. A key without a value is as if it were not there. Raises ValueError, naming file
    and key, for unknown keys and values of another type than the option's."""
    values = {k: v for k, v in content.items() if v is not None and k not in (VERSION, SETTLED)}
    values = by_current_names(TrainOptions, values, lambda name: f"{file}: {name}")
    known = {f.name for f in flags(TrainOptions)}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]}?" if close else "the keys are the names of its flags, with underscores"
            raise ValueError(f"{file}: {format_value(name)} is no option of fledge train; {cure}")
        if name in RUN_ONLY:
            raise ValueError(f"{file}: {name} cannot be set in a file; give {flag_of(name)} on the command line")
        values[name] = _as_option(name, value)
        if problem := problem_with(TrainOptions, name, values[name]):
            raise ValueError(f"{file}: {name}: {problem}; change it or leave it out")
    return values


def _as_option(name: str, value: Any) -> Any:
    """A value as the option holds it, of the other ways to write it in a file: one source of data, a list of layers, a
    template's variables."""
    if name == "data" and isinstance(value, str):
        return [value]
    if name == "aux_layers" and is_a(list[int], value):
        return ",".join(map(str, value))
    if name == "aux_layers" and is_a(int, value):
        return str(value)
    return json.dumps(value) if name == "template_kwargs" and isinstance(value, dict) else value
