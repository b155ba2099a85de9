"""Reads and writes recipe.yaml, which holds the options and the settled values of a run.

The keys are the options of `fledge train` with underscores. `settled` holds the values that were chosen for the target,
the data and the GPU: --resume reuses settled values, --config chooses new values.

A recipe is YAML as PyYAML's safe loader reads YAML 1.1, except that `1e-4` is a number. Anchors, aliases (which let a
short file expand to any size), duplicate keys and several documents are refused.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fledge import __version__
from fledge.data.documents import fingerprint
from fledge.data.pack import Rows
from fledge.data.read import absolute_source
from fledge.data.sources import Source
from fledge.drafts.draft import Draft
from fledge.io.fields import format_value
from fledge.io.files import check_output_path
from fledge.methods import CHOICES
from fledge.options import default_of, flag_of, has_type, option_fields, validation_problem
from fledge.train.checkpoint import RunDirectory
from fledge.train.ranks import restart_count
from fledge.train.setup.options import MACHINE, MOVABLE, TrainOptions, replace_aliases
from fledge.train.setup.recipe import (
    INEFFECTIVE,
    WITH_INIT_FROM,
    Recipe,
    ineffective_options,
    resolve,
    unsupported_options,
)
from fledge.train.setup.target import PreparedTarget
from fledge.train.trainer import Schedule

RECIPES = Path(__file__).parents[2] / "recipes"  # the packaged recipes, by name
HEADER = """\
# The options of a training run. The keys are the options of `fledge train` with underscores.
#
#   fledge train --config recipe.yaml --out another-run    starts a new run with these options; flags override them
#   fledge train --resume RUN                              continues the run in the directory of this file
#
# `settled` holds the values that were chosen for the target, the data and the GPU. Only --resume uses them.

"""
RUN_ONLY = ("config", "resume", "out", *MACHINE)  # options of a single command, which a recipe cannot set
# settled values that --resume passes on as options, because the values must not change: another number of slots, for
# example, changes the rounding
RESUMED_VALUES = ("depth", "max_length", "eval_tokens", "rows_per_step", "impl", "slots", "activations")
VERSION, SETTLED = "fledge_version", "settled"
DAMAGED = "the file is damaged; start a new run"
BREAKS = re.compile("[\x85\u2028\u2029]")
# numbers of YAML 1.2 that PyYAML, which follows YAML 1.1, takes for strings
FLOATS = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)[eE][-+]?[0-9]+$")

Say = Callable[[str], None]


def settle(
    recipe: Recipe, prepared: PreparedTarget, draft: Draft, rows: Rows, schedule: Schedule
) -> dict[str, Any]:  # fmt: skip
    """The values of a run that depend on the target, the data and the device; `settled` in recipe.yaml. Lengths are in
    tokens, `slots` is the number of slots in flight, and `data_sha256` the fingerprint of the training documents."""
    implementation = schedule.implementation
    values = dict(
        depth=recipe.depth,
        max_length=prepared.max_length,
        row_length=rows.row_length,
        eval_tokens=prepared.eval_tokens,
        draft_vocab=draft.config.draft_vocab_size,
        mask_token=draft.config.mask_token_id,
        steps=schedule.steps,
        rows_per_step=schedule.rows_per_step,
        lr=schedule.lr,
        impl=implementation.attention,
        slots=implementation.slots,
        activations="recompute" if implementation.recompute else "keep",
        data_sha256=fingerprint(rows.documents),
    )
    return {name: value for name, value in values.items() if value is not None}


def recipe_text(options: TrainOptions, settled: Mapping[str, Any]) -> str:
    """The text of recipe.yaml: all options that have a value and an effect, then the settled values. `options.method`
    must not be None."""
    given, choice = _with_absolute_paths(options).as_dict(), CHOICES[options.method]
    omitted = {*RUN_ONLY, *choice.switches, *ineffective_options(given), *unsupported_options(choice.method)}
    values = {k: v for k, v in given.items() if v is not None and k not in omitted}
    if "template_kwargs" in values:
        values["template_kwargs"] = json.loads(values["template_kwargs"])
    if "data" in values:
        values["data"] = [Source.parse(source).as_option() for source in values["data"]]
    return HEADER + write_yaml({VERSION: __version__, **values, SETTLED: dict(settled)})


def _with_absolute_paths(options: TrainOptions) -> TrainOptions:
    """The options with absolute paths, which are valid in any current directory."""
    paths = {n: getattr(options, n) for n in ("target", "init_from", "data_cache", "features", "features_from")}
    existing = {n: os.path.abspath(path) for n, path in paths.items() if path and Path(path).exists()}
    if options.features_map:
        there, _, here = options.features_map.partition("=")
        existing["features_map"] = f"{there}={os.path.abspath(here)}"
    prompts = absolute_source(options.eval_prompts) if options.eval_prompts else None
    return replace(options, data=[absolute_source(source) for source in options.data], eval_prompts=prompts, **existing)


def with_config(options: TrainOptions, say: Say) -> TrainOptions:
    """The options merged with the options in the --config file. Flags override the file. A value of the file counts as
    given if the value differs from the default.

    Some flags make options of the file irrelevant (see `_overridden`): the file's value is ignored, and `say` says so.
    Raises ValueError, naming the file, the key and a remedy, if the file is not a valid recipe.
    """
    if options.config is None:
        return options
    file = find_recipe_file(options.config)
    written = _options_in(_mapping_in(file), file)
    written.pop("trust_remote_code", None)  # a file cannot grant trust; the target's loading says what to give
    defaults = {f.name: default_of(f) for f in option_fields(TrainOptions)}
    given = {name: getattr(options, name) for name in defaults if options.was_given(name)}
    differing = {name for name, value in written.items() if value != defaults[name]}
    for name, why in _overridden(given).items():
        if name in differing - given.keys() - {"steps", "epochs"}:  # --steps and --epochs silently replace each other
            say(f"{name} of {file} is not used {why.rpartition(';')[0]}")
        written.pop(name, None)
    with naming_config_file(options):
        return TrainOptions(**defaults | written | given, given=frozenset(given.keys() | (differing & written.keys())))


@contextlib.contextmanager
def naming_config_file(options: TrainOptions) -> Iterator[None]:
    """Context manager: adds the name of the --config file, if there is one, to the message of a ValueError, since the
    options in the message may come from the file."""
    try:
        yield
    except ValueError as e:
        if options.config is None:
            raise
        raise ValueError(f"{options.config}, combined with the given flags: {e}") from e


def _overridden(given: Mapping[str, Any]) -> dict[str, str]:
    """Options whose values in the file are ignored because of a given flag, each with the reason."""
    found = {"steps": "with --epochs;"} if "epochs" in given else {}
    found |= {"method": WITH_INIT_FROM} if "init_from" in given else {}
    unsupported = unsupported_options(CHOICES[given["method"]].method) if "method" in given else {}
    return found | ineffective_options(given) | unsupported


def resume_options(directory: RunDirectory, asked: TrainOptions) -> tuple[TrainOptions, dict[str, Any]]:
    """The options with which a run continues, and the run's settled values by name (see `settle`).

    Trust is not read from the file: a run that was started with --trust-remote-code needs the flag again. Raises
    ValueError if there is no run, if the run's file is damaged, or if --trust-remote-code is given and the run was
    started without the flag.
    """
    file = directory.options_file()
    try:
        content = _mapping_in(file)
        if not isinstance(settled := content.get(SETTLED), dict) or "data_sha256" not in settled:
            raise ValueError(f"{file} has no settled values (key {SETTLED})")
        values = _options_in(content, file)
    except ValueError as e:
        raise ValueError(f"{e}; {DAMAGED}") from e
    if asked.trust_remote_code and values.get("trust_remote_code") is not True:
        raise ValueError(f"the run in {directory.path} was started without it; leave --trust-remote-code out")
    values |= {name: settled[name] for name in RESUMED_VALUES if name in settled}
    values |= {name: getattr(asked, name) for name in ("resume", "trust_remote_code", *MACHINE)}
    if values.get("features_from") is None:
        asked.refuse(MOVABLE, f"with the run in {directory.path}, which was started without --features-from;")
    values |= {name: getattr(asked, name) for name in MOVABLE if asked.was_given(name)}
    for option, (names, why) in INEFFECTIVE.items():
        if values.get(option):
            asked.refuse([name for name in names if name in MACHINE and getattr(asked, name)], why)
    values["out"] = asked.resume
    try:
        return TrainOptions(**values, given=frozenset()), settled
    except ValueError as e:
        raise ValueError(f"{file}: {e}; {DAMAGED}") from e


def check_settled(recorded: Mapping[str, Any], settled: Mapping[str, Any], directory: RunDirectory) -> None:
    """Raises ValueError if a resumed run has other settled values than when it was started."""
    if recorded["data_sha256"] != settled["data_sha256"]:
        raise ValueError(
            f"the data differs from that of the run in {directory.path}; resuming needs the same files and the same "
            "chat template"
        )
    for name, before in recorded.items():
        if before != (now := settled.get(name)):
            raise ValueError(
                f"{directory.options_file()}: {SETTLED}.{name} is {format_value(before)}, but the options and data "
                f"give {format_value(now)}; undo the change to this file or to the target, or start a new run"
            )


def recipe_names() -> list[str]:
    """The names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def find_recipe_file(given: str) -> Path:
    """The file of --config: an existing file, or else the packaged recipe of this name.

    Raises ValueError, listing the names, if the text looks like the name of an unknown recipe. Returns a path that does
    not exist unchanged.
    """
    file = Path(given)
    if file.is_file() or len(file.parts) != 1 or file.suffix in (".yaml", ".yml"):
        return file
    names = recipe_names()
    if given in names:  # even if a run's directory has this name
        return RECIPES / f"{given}.yaml"
    if file.exists():
        return file
    close = difflib.get_close_matches(given.lower(), names, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"--config {given} is neither a file nor one of fledge's recipes, {', '.join(names)}{meant}")


def _mapping_in(file: Path) -> dict[str, Any]:
    """The keys and values of a recipe file. Raises ValueError, naming the file, if the file is not a recipe."""
    if file.is_dir():
        raise ValueError(f"{file} is a directory; a recipe is a file, such as {file / 'recipe.yaml'}")
    if not file.is_file():
        raise ValueError(
            f"{file} does not exist or is not a regular file; a recipe is a YAML file such as RUN/recipe.yaml"
        )
    try:
        content = read_yaml(file.read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} contains {format_value(content)}; a recipe consists of lines such as `steps: 1000`")
    return content


def _options_in(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The options in a recipe by name. Keys without a value are ignored. Raises ValueError, naming the file and the
    key, for unknown keys and for values of the wrong type."""
    values = {k: v for k, v in content.items() if v is not None and k not in (VERSION, SETTLED)}
    values = replace_aliases(values, lambda name: f"{file}: {name}")
    known = {f.name for f in option_fields(TrainOptions)}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]}?" if close else "the keys are the names of its flags with underscores"
            raise ValueError(f"{file}: {format_value(name)} is not an option of fledge train; {cure}")
        if name in RUN_ONLY:
            raise ValueError(f"{file}: {name} cannot be set in a file; give {flag_of(name)} on the command line")
        try:
            values[name] = as_option(name, value)
        except ValueError as e:
            raise ValueError(f"{file}: {name}: {e}") from e
        if problem := validation_problem(TrainOptions, name, values[name]):
            raise ValueError(f"{file}: {name}: {problem}; change it or leave it out")
    return values


def as_option(name: str, value: Any) -> Any:
    """Converts the alternative forms that a file and `train_draft` may use: a single data source, a source with
    options, a list of layers, a mapping of template variables."""
    if name == "data" and isinstance(value, str | Mapping):
        return as_option(name, [value])
    if name == "data" and isinstance(value, list):
        return [str(Source.parse(source)) if isinstance(source, Mapping) else source for source in value]
    if name == "aux_layers" and has_type(list[int], value):
        return ",".join(map(str, value))
    if name == "aux_layers" and has_type(int, value):
        return str(value)
    return json.dumps(value, default=str) if name == "template_kwargs" and isinstance(value, dict) else value


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: anchors (&) and aliases (*) are not allowed; repeat the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; keep one")
            seen.add(key.value)
        found = super().construct_mapping(node, deep)
        if (odd := next((key for key in found if not isinstance(key, str)), "")) != "":
            raise ValueError(f"line {node.start_mark.line + 1}: the key {odd} is no text; put it in quotes")
        return found


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOATS, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Raises ValueError, with the line number if known, if it is not valid or refused."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as e:
        raise ValueError(f"it is not YAML: {' '.join(str(e).split())}") from e
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def write_yaml(value: dict[str, Any]) -> str:
    """A mapping as YAML that `read_yaml` reads back, in the same order."""
    # PyYAML does not escape these line breaks
    unicode = not BREAKS.search(json.dumps(value, ensure_ascii=False))
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=unicode, width=120)


def restarted_options(options: TrainOptions) -> TrainOptions:
    """The options of a process that torchrun started again (--max-restarts): options to resume the run in --out, if
    --out holds a run; else `options` unchanged."""
    if options.resume or not restart_count() or not RunDirectory(options.out).recipe.is_file():
        return options
    kept = {name: getattr(options, name) for name in ("trust_remote_code", *MACHINE)}
    return TrainOptions(resume=options.out, **kept, given=frozenset({"resume", *kept}))


def complete_options(
    options: TrainOptions, leads: bool, say: Say
) -> tuple[TrainOptions, dict[str, Any] | None, RunDirectory]:
    """The options with those of --config or of the --resume run, that run's settled values (None for a new run), and
    the run's directory. With `leads`, raises ValueError if the directory of a new run is not free."""
    options = with_config(options, say)
    directory = RunDirectory(options.resume or options.out)
    if options.resume:
        return *resume_options(directory, options), directory
    if leads:
        check_output_path(options.out, "--out", directory=True)
        directory.check_free()
    return options, None, directory


def resolve_recipe(options: TrainOptions, directory: RunDirectory, *, imagined: bool = False) -> Recipe:
    """The recipe of complete options; `imagined` is as in `recipe.resolve`."""
    if options.resume and options.init_from and directory.checkpoint.exists():
        # the draft of --init-from may have changed since the run was started
        options = replace(options, init_from=str(directory.checkpoint))
    with naming_config_file(options):
        return resolve(options, imagined=imagined)
