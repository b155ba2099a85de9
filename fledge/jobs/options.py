"""Options as dataclasses: `opt` gives a field its help text, which the command line shows."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.models.target import Target
    from fledge.types import Sampling


def opt(help: str, default: Any = MISSING, *, many: bool = False, flag: str | None = None) -> Any:
    """A field that is a command-line flag: required without a default, repeatable with `many`."""
    metadata = {"help": help, "flag": flag}
    if many:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def template_kwargs(text: str | None) -> dict[str, Any] | None:
    """--template-kwargs as a dict. Raises ValueError where it is not a JSON object."""
    if text is None:
        return None
    try:
        kwargs = json.loads(text)
    except ValueError as e:
        raise ValueError(f"--template-kwargs is not JSON ({e}); write e.g. '{{\"enable_thinking\": false}}'") from e
    if not isinstance(kwargs, dict):
        raise ValueError("--template-kwargs must be a JSON object such as '{\"enable_thinking\": false}'")
    return kwargs


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
    """Writes a record whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(record, indent=2) + "\n")
    new.replace(path)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What every command that decodes lets its user choose."""

    target: str = opt("the model that speaks: a directory or hub id")
    draft: str | None = opt("its draft; without one it decodes token by token", None)
    temperature: float = opt("0 is greedy", 0.0)
    top_k: int = opt("sample among the k likeliest only (0: all)", 0)
    top_p: float = opt("sample among the likeliest that hold this mass", 1.0)
    repetition_penalty: float = opt("above 1 makes repeats less likely", 1.0)
    draft_sampling: str = opt("how the draft chooses when sampling: greedy or sample", "greedy")
    seed: int = opt("of sampling; the same seed gives the same text", 0)
    draft_mode: str | None = opt(
        "chain, tree (EAGLE-2's: several continuations verified at once), or parallel, P-EAGLE's one pass (default: "
        "chain or parallel, as the draft is)", None
    )  # fmt: skip
    depth: int | None = opt(
        "tokens drafted a round; of a tree the longest path, a pass each (default: as trained)", None
    )
    tree_nodes: int = opt("nodes of a tree, its root included", 60)
    tree_width: int = opt("most children of a tree's node", 10)
    draft_cache: str = opt("stable, or unstable: keep what the draft made itself of accepted tokens", "stable")
    confidence: float = opt("draft on only while the draft gives its chain this probability (0: always)", 0.0)
    template_kwargs: str | None = opt("JSON passed to the chat template (default: as the draft was trained)", None)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    draft_device: str | None = opt("where the draft sits (default: with the target)", None)
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)

    def sampling(self) -> Sampling:
        """How the target chooses its tokens."""
        from fledge.types import Sampling

        return Sampling(
            self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.seed, self.draft_sampling
        )

    def engine(self, draft: str | None, mode: str | None, target: Target | None = None) -> Engine:
        """A loaded pair, of a target that may be loaded already."""
        from fledge.decode.engine import load

        if self.draft_cache not in ("stable", "unstable"):
            raise ValueError(f"--draft-cache {self.draft_cache} is neither stable nor unstable")

        return load(
            target or self.target, draft, device=self.device, draft_device=self.draft_device,
            dtype=dtype_named(self.dtype), depth=self.depth, confidence=self.confidence, mode=mode,
            nodes=self.tree_nodes, width=self.tree_width, stable=self.draft_cache == "stable",
            template_kwargs=template_kwargs(self.template_kwargs),
        )  # fmt: skip
