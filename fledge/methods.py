"""The table of draft methods: facts about each, for options, configs, files and messages.

The computation of a method is a network in `fledge.drafts`, which `fledge.drafts.registry` finds by the method's name.
No other module compares a method's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_DEPTH, MOST_NODES = 64, 1024  # that may be drafted in a round: the tokens of a path, and the nodes of a tree


@dataclass(frozen=True)
class Method:
    """A draft method.

    `name` is written to a draft's config.json; `title` and `paper` are for messages.

    Inputs and computation:
    `reads_layers`: reads hidden states of several target layers, joined by `fc`; False: only the final hidden state.
    `fuses_embedding`: `fc` joins token embedding and hidden state before the first layer, which is then an ordinary
    decoder layer without an input norm; False: the first layer's projections read both concatenated, each normed.
    `borrows_head`: the logits are the target's head applied to the last layer's output, over the target's whole
    vocabulary; False: the draft has a norm and a head of its own.
    `one_pass`: one pass drafts all tokens of a round; False: one pass drafts one token. `masks`: reads a mask token in
    place of tokens that are not known yet.

    Training:
    `trained_depth`: the number of TTT steps, if the method fixes it; else None. `min_depth`: the fewest steps with
    which the method makes sense. `gamma`: step k has weight gamma^k, if the method fixes gamma; else None.
    `cross_entropy`: the weight of the distillation loss. `regression`: adds a Smooth L1 loss between the draft's output
    and the target's next hidden state. `cod_rate`: the default of --cod-rate, the share of the previous step's slots
    that a step keeps (conditional drop-token sampling). `options`: training options that other methods lack.
    `without`: options that the method does not support, with the reason.

    Checkpoints:
    `architectures`: the entry in config.json, the engines' class names. `served`: other engines know the method.
    `notes`: how engines and trainers other than fledge treat such a draft, for messages.
    """

    name: str
    title: str
    paper: str
    architectures: tuple[str, ...]
    reads_layers: bool = True
    fuses_embedding: bool = False
    borrows_head: bool = False
    one_pass: bool = False
    masks: bool = False
    trained_depth: int | None = None
    min_depth: int = 1
    gamma: float | None = None
    cross_entropy: float = 1.0
    regression: bool = False
    cod_rate: float = 1.0
    options: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    served: bool = False
    notes: tuple[str, ...] = ()


NORMS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm")  # variants of EAGLE-3's draft
COD = ("cod_rate", "cod_min_rate")

EAGLE1 = Method(
    name="eagle1",
    title="EAGLE-1",
    paper="Li et al. 2024, arXiv:2401.15077",
    served=True,
    architectures=("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"),  # SGLang's name, and vLLM's
    reads_layers=False,
    fuses_embedding=True,
    borrows_head=True,
    trained_depth=1,
    gamma=1.0,
    cross_entropy=0.1,
    regression=True,
    options=("fc_bias", "feature_noise"),
    without={
        "draft_vocab": "EAGLE-1 drafts over the target's whole vocabulary",
        "aux_layers": "EAGLE-1 reads the target's final hidden state",
        "train_embeddings": "EAGLE-1 reads the target's embedding",
    },
)

EAGLE3 = Method(
    name="eagle3",
    title="EAGLE-3",
    paper="Li et al. 2025, arXiv:2503.01840",
    served=True,
    architectures=("LlamaForCausalLMEagle3",),
    options=(*COD, *NORMS, "gamma"),
)

PEAGLE = Method(
    name="peagle",
    title="P-EAGLE",
    paper="Hui et al. 2026, arXiv:2602.01469",
    served=True,
    architectures=("LlamaForCausalLMEagle3",),
    one_pass=True,
    masks=True,
    min_depth=2,
    gamma=1.0,
    cod_rate=0.8,
    options=(*COD, *NORMS),
    notes=(
        "vLLM drafts all tokens of a round in one pass only with parallel_drafting in --speculative-config.",
        "SpecForge loads this file as a one-layer EAGLE-3 draft; continue its training with fledge.",
    ),
)

METHODS: dict[str, Method] = {m.name: m for m in (EAGLE1, EAGLE3, PEAGLE)}


@dataclass(frozen=True)
class Choice:
    """A value of `fledge train --method`: a method, and the fields of a draft's config that it sets to True."""

    method: Method
    title: str
    switches: tuple[str, ...] = ()


CHOICES: dict[str, Choice] = {
    "eagle3": Choice(EAGLE3, EAGLE3.title),
    "eagle3.1": Choice(EAGLE3, "EAGLE-3.1", switches=("fc_norm", "norm_output")),
    "peagle": Choice(PEAGLE, PEAGLE.title),
    "eagle1": Choice(EAGLE1, EAGLE1.title),
}
