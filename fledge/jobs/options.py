"""Options as dataclasses: `opt` gives a field its help text, which the command line shows."""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from fledge.fields import check_template_kwargs
from fledge.files import replace_text

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.targets.interface import DecodingTarget
    from fledge.types import Sampling

LARGEST_RECORD = 2**26  # bytes; what is larger is not read to find out that it is none


class RenamedOption(FutureWarning):
    """An option was given by a name that it no longer has."""


def opt(
    help: str, default: Any = MISSING, *, many: bool = False, flag: str | None = None, least: float | None = None,
    above: float | None = None, most: float | None = None, formerly: str | None = None,
) -> Any:  # fmt: skip
    """A field that is a command-line flag: required without a default, repeatable with `many`; a number in bounds.
    `formerly` is the field's previous name, which is still accepted (see `by_current_names`)."""
    metadata = {"help": help, "flag": flag, "least": least, "above": above, "most": most, "formerly": formerly}
    if many:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """How an option is written on the command line."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A job's options. `given` are the names of those that were asked for, which a value that equals its default does
    not show; None takes those that differ from their defaults. Raises ValueError for a value of another type than the
    field's, for a number outside its bounds, and for an option that was given and would be dropped."""

    given: frozenset[str] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for f in flags(self):
            if problem := problem_with(type(self), f.name, getattr(self, f.name)):
                raise ValueError(f"{flag_of(f.name)} {problem}")

    def was_given(self, name: str) -> bool:
        """Whether an option was asked for."""
        if self.given is not None:
            return name in self.given
        f = next(f for f in flags(self) if f.name == name)
        return getattr(self, name) != default_of(f)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises ValueError where any of these options was given. `why` goes on from "--flag does nothing"."""
        given = [flag_of(name) for name in names if self.was_given(name)]
        if given:
            does, listed = "does" if len(given) == 1 else "do", ", ".join(given)
            raise ValueError(f"{listed} {does} nothing {why} leave {listed} out")

    def by_name(self) -> dict[str, Any]:
        """The options and their values, for a file."""
        return {f.name: getattr(self, f.name) for f in flags(self)}


def flags(options: Options | type[Options]) -> list[Field]:
    """The fields that are options of a command."""
    return [f for f in fields(options) if "help" in f.metadata]


def default_of(f: Field) -> Any:
    """An option's default; dataclasses.MISSING where it has none."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def problem_with(kind: type[Options], name: str, value: Any) -> str | None:
    """Why an option of a command cannot have this value: the value and the type or bounds that it should have. None
    where it can."""
    f = next(f for f in flags(kind) if f.name == name)
    if not is_a(_hints(kind)[name], value):
        return f"{value!r:.60} is not of type {f.type}"
    least, above, most = (f.metadata[k] for k in ("least", "above", "most"))
    if value is None or least is above is most is None:
        return None
    inside = (least is None or value >= least, above is None or value > above, most is None or value <= most)
    if all(inside) and (isinstance(value, int) or math.isfinite(value)):
        return None
    wanted = ((least, "at least"), (above, "above"), (most, "at most"))
    return f"{value}: it is " + " and ".join(f"{words} {bound}" for bound, words in wanted if bound is not None)


_hints = functools.cache(get_type_hints)


def by_current_names(
    kind: type[Options], values: Mapping[str, Any], written: Callable[[str], str] = flag_of
) -> dict[str, Any]:
    """The values of options that were given, with former names replaced by current ones. `written` turns a name into
    what the user wrote, for messages. Warns (RenamedOption) of each former name. Raises ValueError where an option is
    given by both names."""
    current = {f.metadata["formerly"]: f.name for f in flags(kind) if f.metadata["formerly"]}
    for old in current.keys() & values.keys():
        if current[old] in values:
            raise ValueError(f"{written(old)} is the former name of {written(current[old])}; give only the latter")
        notice = f"{written(old)} is now called {written(current[old])}; the next release will not know the old name"
        warnings.warn(notice, RenamedOption, stacklevel=3)
    return {current.get(name, name): value for name, value in values.items()}


def is_a(hint: Any, value: Any) -> bool:
    """Whether a value has an annotated type: a class, a union, or a list of one of these."""
    if isinstance(hint, UnionType):
        return any(is_a(kind, value) for kind in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(is_a(get_args(hint)[0], x) for x in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def template_kwargs(text: str | None) -> dict[str, Any] | None:
    """--template-kwargs as a dict. Raises ValueError where it is no JSON object, or sets more than a template's
    variables."""
    if text is None:
        return None
    try:
        kwargs = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"--template-kwargs is not JSON ({e}); write e.g. '{{\"enable_thinking\": false}}'") from e
    if not isinstance(kwargs, dict):
        raise ValueError("--template-kwargs must be a JSON object such as '{\"enable_thinking\": false}'")
    return check_template_kwargs(kwargs, "--template-kwargs")


def place_of(path: str | Path, flag: str, *, directory: bool = False) -> Path:
    """Where a job will write a file or a directory. Raises ValueError, before the work, where it cannot."""
    if not str(path):
        raise ValueError(f"{flag} is empty; give it a name")
    path = Path(path)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{flag} {path} is a link that leads nowhere; remove it or choose another name")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if there == path and not (path.is_dir() if directory else path.is_file()):
        kind = "a directory" if path.is_dir() else "a file" if path.is_file() else "a device, pipe or socket"
        raise ValueError(f"{flag} {path} is {kind}; choose another name")
    if there != path and not there.is_dir():
        raise ValueError(f"{flag} {path} cannot be made: {there} is no directory; choose another name")
    places = [there]
    if path.is_file():
        places.append(Path(os.path.realpath(path)).parent)  # which gets the file that replaces or locks it
    if locked := next((p for p in places if not os.access(p, os.W_OK)), None):
        raise ValueError(f"{flag} {path} cannot be written: {locked} is not yours to write to; choose another name")
    return path


def place_of_record(path: str | Path, flag: str) -> Path:
    """Where a job will write its JSON record. Raises ValueError, before the work, where it cannot, or where a file is
    there that is not an earlier record."""
    path = place_of(path, flag)
    if path.exists() and path.stat().st_size and not _is_record_file(path):
        raise ValueError(
            f"{flag} {path} is there and is no record that fledge wrote; it is left alone, choose another name"
        )
    return path


def _is_record_file(file: Path) -> bool:
    if file.stat().st_size > LARGEST_RECORD:
        return False
    try:
        return is_record(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError):
        return False


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record of ours: an object that says under `environment` what it was measured on, as
    `fledge.eval.environment` does, or an object of nothing but records."""
    if not isinstance(value, dict) or not value:
        return False
    measured_on = value.get("environment")
    if isinstance(measured_on, dict):
        return {"device", "dtype", "python", "torch", "transformers", "commit"} <= measured_on.keys()
    return all(is_record(v) for v in value.values())


def dtype_named(name: str | None):
    """A torch dtype by name, or None. Raises ValueError for others than the floating-point ones."""
    if name is None:
        return None
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"--dtype {name} is none of {', '.join(known)}")
    return known[name]


def write_json(path: str | Path, record: Any) -> None:
    """Writes a record whole or not at all, over an earlier one if there is one. Raises ValueError for another file."""
    path = place_of_record(path, "the record")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=2) + "\n")


def trust_option() -> Any:
    """The flag of every command that loads a target."""
    return opt("run the code that a target's files bring (auto_map); read that code first", False)


def new_tokens(default: int, context: int) -> int:
    """New tokens where nobody says: `default`, or half of the target's context where that is less."""
    return max(1, min(default, context // 2))


GREEDY = "at --temperature 0, which takes the likeliest token; give a higher --temperature, or"
LARGEST_SEED = 2**64 - 1  # that torch takes, and that two draws' keys tell apart
DRAFTING = ("draft_mode", "depth", "tree_nodes", "tree_width", "draft_cache", "confidence", "draft_device")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Options):
    """What every command that decodes lets its user choose."""

    target: str = opt("the model that speaks: a directory or hub id (owner/name or owner/name@revision)")
    trust_remote_code: bool = trust_option()
    draft: str | None = opt("its draft, a directory or hub id; without one it decodes token by token", None)
    temperature: float = opt("0 is greedy", 0.0, least=0)
    top_k: int = opt("sample among the k likeliest only (0: all)", 0, least=0)
    top_p: float = opt("sample among the likeliest that hold this mass", 1.0, above=0, most=1)
    repetition_penalty: float = opt("above 1 makes repeats less likely", 1.0, above=0)
    draft_sampling: str = opt("how the draft chooses when sampling: greedy or sample", "greedy")
    seed: int = opt("of sampling; the same seed gives the same text", 0, least=0, most=LARGEST_SEED)
    draft_mode: str | None = opt(
        "chain, tree (EAGLE-2's: several continuations verified at once), or parallel, P-EAGLE's one pass (default: "
        "chain or parallel, as the draft is)", None
    )  # fmt: skip
    depth: int | None = opt(
        "tokens drafted a round; of a tree the longest path, a pass each (default: as trained)", None, least=1, most=64
    )
    tree_nodes: int = opt("nodes of a tree, its root included", 60)
    tree_width: int = opt("most children of a tree's node", 10)
    draft_cache: str = opt("stable, or unstable: keep what the draft made itself of accepted tokens", "stable")
    confidence: float = opt("draft on only while the draft gives its chain this probability (0: always)", 0.0)
    template_kwargs: str | None = opt("JSON passed to the chat template (default: as the draft was trained)", None)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    draft_device: str | None = opt("where the draft sits (default: with the target)", None)
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            self.refuse(("top_k", "top_p", "seed", "draft_sampling"), GREEDY)
        if not self.draft:
            self.refuse((*DRAFTING, "draft_sampling"), "without a draft; give --draft, or")
        elif "tree" not in (self.draft_mode or ()):  # the one mode, or among several
            self.refuse(("tree_nodes", "tree_width"), "in a chain; give --draft-mode tree, or")

    def sampling(self) -> Sampling:
        """How the target chooses its tokens."""
        from fledge.types import Sampling

        return Sampling(
            self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.seed, self.draft_sampling
        )

    def drafting(self, mode: str | None) -> dict[str, Any]:
        """The fields of `fledge.decode.propose.Drafting`. Raises ValueError for an unknown --draft-cache."""
        if self.draft_cache not in ("stable", "unstable"):
            raise ValueError(f"--draft-cache {self.draft_cache} is neither stable nor unstable")
        return dict(
            mode=mode, depth=self.depth, confidence=self.confidence, nodes=self.tree_nodes, width=self.tree_width,
            stable=self.draft_cache == "stable",
        )  # fmt: skip

    def engine(self, draft: str | None, mode: str | None, target: DecodingTarget | None = None) -> Engine:
        """An engine of a target, which may be loaded already, and a draft."""
        from fledge.decode.engine import load

        return load(
            target or self.target, draft, device=self.device, draft_device=self.draft_device,
            dtype=dtype_named(self.dtype), **self.drafting(mode),
            template_kwargs=template_kwargs(self.template_kwargs), trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
