"""Command options as dataclasses: each field is an option, and `opt` gives it a help text, a default and bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, cast, get_args, get_origin, get_type_hints

from fledge.io.fields import check_template_kwargs, parse_json

# aliases by option name, known to users of vLLM, TRL, axolotl and SpecForge
ALIASES = {
    "target": ("model",),
    "draft": ("draft_model",),
    "data": ("dataset",),
    "out": ("output_dir", "output"),
    "lr": ("learning_rate",),
    "epochs": ("num_epochs",),
    "steps": ("max_steps",),
    "max_length": ("max_seq_length",),
    "rows_per_step": ("batch_size",),
    "batch": ("batch_size",),
    "warmup": ("warmup_ratio",),
    "clip": ("max_grad_norm",),
    "eval_every": ("eval_steps",),
    "save_every": ("save_steps",),
    "log": ("report_to",),
    "depth": ("num_speculative_tokens",),
    "max_new_tokens": ("max_tokens",),
}


def opt(
    help: str, default: Any = MISSING, *, repeatable: bool = False, flag: str | None = None,
    minimum: float | None = None, greater_than: float | None = None, maximum: float | None = None,
    word: str | None = None, may_be_empty: bool = False, choices: Collection[str] = (),
) -> Any:  # fmt: skip
    """A dataclass field that is a command-line option.

    An option without a default is required. `repeatable` makes it a list. `flag="argument"` makes it a positional
    argument. `minimum`, `greater_than` and `maximum` bound a number, or each number of a list, and `word` may stand in
    its place. An empty text is refused, unless the option `may_be_empty` or has an empty default. `choices` are all
    values that a text may have.
    """
    metadata = {
        "help": help, "flag": flag, "minimum": minimum, "greater_than": greater_than, "maximum": maximum,
        "word": word, "may_be_empty": may_be_empty, "choices": choices,
    }  # fmt: skip
    if repeatable:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The command-line flag of an option: `--max-length` for `max_length`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a job.

    `given` holds the names of the options that the user gave, including options given with their default value. `given`
    None counts all options that differ from their defaults as given. Raises ValueError for a value of the wrong type,
    for a number out of bounds, and for a given option that would have no effect.
    """

    panel: ClassVar[str] = "Options"  # the heading in --help of the options that a class itself defines
    given: frozenset[str] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for f in option_fields(self):
            if problem := validation_problem(type(self), f.name, getattr(self, f.name)):
                raise ValueError(f"{flag_of(f.name)} {problem}")

    def was_given(self, name: str) -> bool:
        """Whether the user gave an option."""
        if self.given is not None:
            return name in self.given
        f = next(f for f in option_fields(self) if f.name == name)
        return getattr(self, name) != default_of(f)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises ValueError if any of these options was given. `why` completes the sentence "--flag has no effect
        <why> leave --flag out"."""
        given = [flag_of(name) for name in names if self.was_given(name)]
        if given:
            have, listed = "has" if len(given) == 1 else "have", ", ".join(given)
            raise ValueError(f"{listed} {have} no effect {why} leave {listed} out")

    def as_dict(self) -> dict[str, Any]:
        """The values of all options by name."""
        return {f.name: getattr(self, f.name) for f in option_fields(self)}


def option_fields(options: Options | type[Options]) -> list[Field[Any]]:
    """The dataclass fields that are command-line options: fields of the base classes first, in their order. A class
    with several bases (groups of options) puts its own fields first."""
    kind = options if isinstance(options, type) else type(options)
    known = {f.name: f for f in fields(kind) if "help" in f.metadata}
    return [known[name] for name in panels_of(kind) if name in known]


def panels_of(kind: type[Options]) -> dict[str, str]:
    """The heading of each option in --help."""
    return {name: cls.panel for cls in _groups(kind) for name in vars(cls).get("__annotations__", ())}


def names_of(kind: type[Options]) -> tuple[str, ...]:
    """The names of all options."""
    return tuple(f.name for f in option_fields(kind))


def _groups(kind: type[Options]) -> list[type[Options]]:
    """The classes that define the options of a class, in the order of --help."""
    of_bases = [cls for base in kind.__bases__ if issubclass(base, Options) for cls in _groups(base)]
    return [kind, *of_bases] if len(kind.__bases__) > 1 else [*of_bases, kind]


def default_of(f: Field[Any]) -> Any:
    """The default of an option, or dataclasses.MISSING if it is required."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def validation_problem(kind: type[Options], name: str, value: Any) -> str | None:
    """Why `value` is not valid for the option `name`: its type or bounds. None if it is valid."""
    f, hint = next(f for f in option_fields(kind) if f.name == name), _hints(cast(Hashable, kind))[name]
    if get_origin(hint) is list:
        if not has_type(hint, value):
            return f"{value!r:.60} is not of type {f.type}"
        problems = (_value_problem(f, get_args(hint)[0], x) for x in value)
        return next((problem for problem in problems if problem), None)
    return _value_problem(f, hint, value)


def _value_problem(f: Field[Any], hint: Any, value: Any) -> str | None:
    """`validation_problem` of a single value, with the expected type `hint`."""
    if (word := f.metadata["word"]) and isinstance(value, str):
        return None if value == word else f"{value!r:.60} is neither a number nor {word}"
    if not has_type(hint, value):
        return f"{value!r:.60} is not of type {f.type}"
    if value == "" and f.default != "" and not f.metadata["may_be_empty"]:  # a variable of the shell that is not set?
        return "is empty; give it a value, or leave it out"
    if value is not None and (choices := f.metadata["choices"]) and value not in choices:
        return f"{value:.60} is not one of {', '.join(choices)}"
    minimum, greater_than, maximum = (f.metadata[k] for k in ("minimum", "greater_than", "maximum"))
    if value is None or minimum is greater_than is maximum is None:
        return None
    satisfied = (
        minimum is None or value >= minimum,
        greater_than is None or value > greater_than,
        maximum is None or value <= maximum,
    )
    if all(satisfied) and (isinstance(value, int) or math.isfinite(value)):
        return None
    bounds = ((minimum, "at least"), (greater_than, "above"), (maximum, "at most"))
    return f"{value}: it must be " + " and ".join(f"{text} {bound}" for bound, text in bounds if bound is not None)


_hints = functools.cache(get_type_hints)


def has_type(hint: Any, value: Any) -> bool:
    """Whether a value has an annotated type: a class, a union, or a list of one of these."""
    if isinstance(hint, UnionType):
        return any(has_type(kind, value) for kind in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(has_type(get_args(hint)[0], x) for x in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def aliases_of(kind: type[Options], name: str) -> tuple[str, ...]:
    """The other names of an option in a command. A name that the command uses for another option is left out: `--model`
    of `fledge eval` is the server's model."""
    taken = {f.name for f in option_fields(kind)}
    return tuple(alias for alias in ALIASES.get(name, ()) if alias not in taken)


def same_option(first: str, second: str) -> str:
    """The message for two names of one option."""
    return f"{first} and {second} are the same option; give one of them"


def parse_template_kwargs(text: str | None) -> dict[str, Any] | None:
    """--template-kwargs as a dict. Raises ValueError if it is not a JSON object, or sets anything but variables of a
    chat template."""
    if text is None:
        return None
    try:
        kwargs = parse_json(text)
    except ValueError as e:
        raise ValueError(f"--template-kwargs is not JSON ({e}); write e.g. '{{\"enable_thinking\": false}}'") from e
    if not isinstance(kwargs, dict):
        raise ValueError("--template-kwargs must be a JSON object such as '{\"enable_thinking\": false}'")
    return check_template_kwargs(kwargs, "--template-kwargs")


def dtype_option() -> Any:
    """The --dtype option of the commands that compute."""
    return opt(
        "compute dtype: auto, bf16, fp16, fp32 or fp64 (default: auto, float32 on a CPU, otherwise the target's "
        "dtype)", None
    )  # fmt: skip


def trust_remote_code_option() -> Any:
    """The --trust-remote-code option, which every command that loads a target has."""
    return opt("run the Python code in the target's files (auto_map); read that code first", False)


def columns_option() -> Any:
    """The --columns option of the commands that read data."""
    return opt(
        "names of the data's columns, as NAME=COLUMN,.., e.g. messages=dialog or prompt=ask,completion=reply; for "
        "sources without columns of their own (docs/data.md)", None
    )  # fmt: skip


SERVER_OPTIONS = ("model", "api_key_env", "request_timeout")


def model_option() -> Any:
    """The --model option of the commands that use a server."""
    return opt("name of the server's model (default: its only one)", None)


def api_key_env_option() -> Any:
    """The --api-key-env option of the commands that use a server. The key itself is no option, since others can read a
    command line."""
    return opt("environment variable that holds the server's API key, if it asks for one", "OPENAI_API_KEY")


def request_timeout_option() -> Any:
    """The --request-timeout option of the commands that use a server."""
    return opt("maximum seconds of a request, from sending it to the end of its answer", 600.0, greater_than=0)


def default_new_tokens(limit: int, context: int) -> int:
    """The default number of new tokens: `limit`, or half of the target's context if that is less."""
    return max(1, min(limit, context // 2))


NO_EFFECT_IF_GREEDY = "at --temperature 0, which decodes greedily; give a higher --temperature, or"
MAX_SEED = 2**64 - 1  # larger seeds are not accepted by torch, nor told apart by the keys of random draws
