"""The draft methods, a row each: what a draft reads, which head it has, how it is trained, drafts and is written.

Everything that differs between methods is a field of `Method`; no other module asks for a method by its name. A new
method is a row here, an objective in `train/objective.py` and, where it drafts in another way, a source of candidates
in `decode/sources.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Method:
    """One family of drafts.

    `name` is what a draft's config.json records; `title` and `paper` are for people.

    What it reads and computes:
    `reads_layers`: hidden states of several target layers, fused by `fc`; False: the target's final hidden state alone.
    `fuses_embedding`: `fc` joins token embedding and hidden state before the first layer, which is then a plain decoder
    layer without an input norm; False: the first layer's projections read both side by side, each normed.
    `borrows_head`: logits are the target's head applied to the last layer's output, over the target's whole
    vocabulary; False: a norm and a head of the draft's own.
    `one_pass`: all tokens of a round are drafted in one pass, in which a mask token and a learned state stand for what
    is not known yet; False: one pass drafts one token.

    How it is trained:
    `trained_depth`: the number of steps trained, where the method fixes it; else None. `least_depth`: the fewest steps
    with which it drafts as intended. `gamma`: the weight of step k is gamma^k, where the method fixes gamma; else None.
    `cross_entropy`: the weight of the distillation loss. `regression`: the draft's output is also fitted to the
    target's next hidden state by a Smooth L1 loss. `drops_slots`: fewer slots are trained the deeper the step
    (conditional drop-token sampling). `options`: the training options that only this method has; `without`: those that
    it lacks, with the reason.

    How it is written:
    `architectures`: what config.json says, each the class name of an engine; `first_layer`: the prefix of the first
    layer's tensors on disk; `notes`: what engines and trainers other than fledge do with such a draft, for people.
    """

    name: str
    title: str
    paper: str
    architectures: tuple[str, ...]
    reads_layers: bool = True
    fuses_embedding: bool = False
    borrows_head: bool = False
    one_pass: bool = False
    trained_depth: int | None = None
    least_depth: int = 1
    gamma: float | None = None
    cross_entropy: float = 1.0
    regression: bool = False
    drops_slots: bool = False
    options: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    first_layer: str = "midlayer"
    notes: tuple[str, ...] = ()


EAGLE1 = Method(
    name="eagle1",
    title="EAGLE-1",
    paper="Li et al. 2024, arXiv:2401.15077",
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
        "gamma": "EAGLE-1 trains one step",
        "draft_vocab": "EAGLE-1 drafts over the target's whole vocabulary",
        "aux_layers": "EAGLE-1 reads the target's final hidden state",
        "train_embeddings": "EAGLE-1 reads the target's embedding",
        "fc_norm": "EAGLE-1 has no such norm",
        "norm_output": "EAGLE-1 has no such norm",
        "norm_before_fc": "EAGLE-1 has no such norm",
        "norm_before_residual": "EAGLE-1 has no such norm",
        "qk_norm": "EAGLE-1 has no such norm",
    },
    first_layer="layers.0",
)

EAGLE3 = Method(
    name="eagle3",
    title="EAGLE-3",
    paper="Li et al. 2025, arXiv:2503.01840",
    architectures=("LlamaForCausalLMEagle3",),
)

PEAGLE = Method(
    name="peagle",
    title="P-EAGLE",
    paper="Hui et al. 2026, arXiv:2602.01469",
    architectures=("LlamaForCausalLMEagle3",),
    one_pass=True,
    least_depth=2,
    gamma=1.0,
    drops_slots=True,
    options=("cod_rate", "cod_min_rate"),
    without={"gamma": "the depths of P-EAGLE have equal weights"},
    notes=(
        "SGLang has no P-EAGLE and would draft one token a pass with it; vLLM serves it with parallel_drafting.",
        "SpecForge reads this file as a one-layer EAGLE-3 draft; continue its training with fledge.",
    ),
)

METHODS: dict[str, Method] = {m.name: m for m in (EAGLE1, EAGLE3, PEAGLE)}


@dataclass(frozen=True)
class Choice:
    """What `fledge train --method` can be: a method, and the switches of a draft's config that it turns on."""

    method: Method
    title: str
    switches: tuple[str, ...] = ()


CHOICES: dict[str, Choice] = {
    "eagle3": Choice(EAGLE3, EAGLE3.title),
    "eagle3.1": Choice(EAGLE3, "EAGLE-3.1", switches=("fc_norm", "norm_output")),
    "peagle": Choice(PEAGLE, PEAGLE.title),
    "eagle1": Choice(EAGLE1, EAGLE1.title),
}
