"""Shared by the commands that decode: options, and the preparation of rounds before the first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fledge.io.fields import parse_dtype
from fledge.methods import MOST_DEPTH, MOST_NODES
from fledge.options import (
    MAX_SEED,
    NO_EFFECT_IF_GREEDY,
    Options,
    dtype_option,
    opt,
    parse_template_kwargs,
    trust_remote_code_option,
)

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.io.display import ProgressDisplay
    from fledge.targets.interface import DecodingTarget
    from fledge.types import Sampling

AUTO = "auto"
DRAFTING_OPTIONS = ("draft_mode", "depth", "tree_nodes", "tree_width", "draft_cache", "confidence", "draft_device")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Options):
    """The options of the commands that decode."""

    target: str = opt("target model: a directory or hub id (owner/name or owner/name@revision)")
    trust_remote_code: bool = trust_remote_code_option()
    draft: str | None = opt("draft model: a directory or hub id (default: none, decode without a draft)", None)
    temperature: float = opt("sampling temperature; 0 decodes greedily", 0.0, minimum=0)
    top_k: int = opt("sample from the k most likely tokens only; 0 samples from all", 0, minimum=0)
    top_p: float = opt(
        "sample from the most likely tokens whose probabilities sum to this value", 1.0, greater_than=0, maximum=1
    )
    repetition_penalty: float = opt("penalty on tokens that occurred before; 1 is none", 1.0, greater_than=0)
    draft_sampling: str = opt(
        "how drafted tokens are drawn when sampling: coupled (with the random numbers of the target's draws; the text "
        "is that without the draft) or sample (on their own; more are accepted, and only the distribution is the same)",
        "coupled",
    )  # fmt: skip
    seed: int = opt("random seed of sampling; the same seed gives the same text", 0, minimum=0, maximum=MAX_SEED)
    draft_mode: str | None = opt(
        "chain, tree (EAGLE-2's draft tree, or the most likely prefixes, for P-EAGLE and DFlash), or parallel (P-EAGLE "
        "and DFlash: the whole chain in one pass) (default: parallel if the draft can, otherwise chain)", None
    )  # fmt: skip
    depth: int | str | None = opt(
        "length of a drafted chain, or depth of a tree, in tokens, or auto: chosen while decoding from acceptance and "
        "speed, with nothing drafted while that is faster (default: as trained)", None, minimum=1,
        maximum=MOST_DEPTH, word=AUTO,
    )  # fmt: skip
    tree_nodes: int | str = opt(
        "number of nodes of a draft tree, including the root, or auto", 60, minimum=2, maximum=MOST_NODES, word=AUTO
    )
    tree_width: int | None = opt(
        "maximum number of children of a tree node (default: 10); trees of drafts that draft in one pass, as P-EAGLE, "
        "have no width", None, minimum=1, maximum=64,
    )  # fmt: skip
    draft_cache: str = opt(
        "stable: recompute the draft's cache of accepted tokens from the target's hidden states; unstable: keep what "
        "drafting computed for them", "stable"
    )  # fmt: skip
    confidence: float = opt(
        "stop drafting a chain when its probability under the draft falls below this value; 0 never stops early", 0.0,
        minimum=0, maximum=1,
    )  # fmt: skip
    template_kwargs: str | None = opt(
        "JSON object of chat template variables (default: those of the draft's training; if it was trained in several "
        "modes, the variables that these share)", None
    )  # fmt: skip
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    draft_device: str | None = opt("device of the draft (default: the target's device)", None)
    dtype: str | None = dtype_option()
    target_impl: str = opt(
        "what computes the target: native (fledge's forward pass), transformers, or auto (native where supported)",
        "auto",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            self.refuse(("top_k", "top_p", "seed", "draft_sampling"), NO_EFFECT_IF_GREEDY)
        if not self.draft:
            self.refuse((*DRAFTING_OPTIONS, "draft_sampling"), "without a draft; give --draft, or")
        elif "tree" not in (self.draft_mode or ()):  # draft_mode is a string, or a list of several in `fledge eval`
            self.refuse(("tree_nodes", "tree_width"), "in a chain; give --draft-mode tree, or")

    def sampling(self) -> Sampling:
        """The sampling options as `fledge.types.Sampling`."""
        from fledge.types import Sampling

        return Sampling(
            self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.seed, self.draft_sampling
        )

    def drafting(self, mode: str | None) -> dict[str, Any]:
        """The fields of `fledge.decode.drafting.Drafting`. Raises ValueError for an unknown --draft-cache."""
        if self.draft_cache not in ("stable", "unstable"):
            raise ValueError(f"--draft-cache {self.draft_cache} is neither stable nor unstable")
        return dict(
            mode=mode, depth=self.depth, confidence=self.confidence, nodes=self.tree_nodes, width=self.tree_width,
            stable=self.draft_cache == "stable",
        )  # fmt: skip

    def load_engine(
        self, draft: str | None, mode: str | None, say: Callable[[str], None], target: DecodingTarget | None = None
    ) -> Engine:
        """Loads an engine with a draft. `target` is the loaded target; None loads the target too.

        If --target-impl allows native computation but the target is not computed natively, `say` is told so.
        """
        from fledge.data.template import several_modes
        from fledge.decode.load import load

        loading: dict[str, Any] = {}
        if target is None:
            loading = dict(
                device=self.device, dtype=parse_dtype(self.dtype), trust_remote_code=self.trust_remote_code,
                target_impl=self.target_impl,
            )  # fmt: skip
        engine = load(
            target or self.target, draft, draft_device=self.draft_device if draft else None, **loading,
            **self.drafting(mode), template_kwargs=parse_template_kwargs(self.template_kwargs),
        )  # fmt: skip
        loaded, loaded_draft = engine.target, engine.draft
        chat = loaded.tokenizer.chat_template is not None
        if loaded_draft is not None and chat and self.template_kwargs is None:
            choice = several_modes(loaded_draft.config.provenance, engine.reader.template.kwargs)
            if choice:
                say(choice)
        if target is None and loaded.implementation not in ("native", self.target_impl):
            say(f"{loaded.name} is computed by {loaded.implementation}")
        return engine


def prepare_rounds(
    arms: Sequence[tuple[Engine, bool]], progress: ProgressDisplay, *, batch: int, tokens: int, sampling: Sampling
) -> None:
    """Captures rounds with `fledge.decode.scheduler.prepare`, shows the progress, and reports the cost, if any."""
    from fledge.decode.scheduler import prepare

    prepared = prepare(arms, batch, tokens=tokens, sampling=sampling, count=progress.count)
    if prepared.rounds:
        progress.say(str(prepared))
