"""The table of draft methods: facts about each, for options, configs, files and messages.

The computation of a method is a network in `fledge.drafts`, which `fledge.drafts.registry` finds by the method's name.
No other module compares a method's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MOST_DEPTH, MOST_NODES = 64, 1024  # that may be drafted in a round: the tokens of a path, and the nodes of a tree


def constant_gamma(depth: int) -> float:
    """The default of --gamma for methods that draft a token a pass, whatever the depth."""
    return 0.8


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
    place of tokens that are not known yet. `taps`: the target's hidden states that a draft reads by default, from the
    numbers of layers of the target and of the draft; None: the engines' default.

    Training:
    `layers` and `depth`: the defaults of --layers and --depth. `trained_depth`: the number of TTT steps, if the method
    fixes it; else None. `min_depth`: the fewest steps with which the method makes sense. `gamma`: step k has weight
    gamma^k, if the method fixes gamma; else None, and `gamma_of` is the default of --gamma, from the depth. `anchors`:
    the default of --anchors, the number of slots of a row that are trained; None: all live slots.
    `cross_entropy`: the weight of the distillation loss. `regression`: adds a Smooth L1 loss between the draft's output
    and the target's next hidden state. `cod_rate`: the default of --cod-rate, the share of the previous step's slots
    that a step keeps (conditional drop-token sampling). `options`: training options that other methods lack.
    `without`: options that the method does not support, with the reason.

    Checkpoints:
    `architectures`: the entry in config.json, the engines' class names. `layout`: the layout of config.json, "eagle" or
    "dflash" (`io.formats`). `engines`: the method's name in the start command of each engine that knows the method.
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
    taps: Callable[[int, int], tuple[int, ...]] | None = None
    layers: int = 1
    depth: int = 5
    trained_depth: int | None = None
    min_depth: int = 1
    gamma: float | None = None
    gamma_of: Callable[[int], float] = constant_gamma
    anchors: int | None = None
    cross_entropy: float = 1.0
    regression: bool = False
    cod_rate: float = 1.0
    options: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    layout: str = "eagle"
    engines: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NORMS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm")  # variants of EAGLE-3's draft
COD = ("cod_rate", "cod_min_rate")

EAGLE1 = Method(
    name="eagle1",
    title="EAGLE-1",
    paper="Li et al. 2024, arXiv:2401.15077",
    engines={"vllm": "eagle", "sglang": "EAGLE"},
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
    engines={"vllm": "eagle3", "sglang": "EAGLE3"},
    architectures=("LlamaForCausalLMEagle3",),
    options=(*COD, *NORMS, "gamma"),
)

PEAGLE = Method(
    name="peagle",
    title="P-EAGLE",
    paper="Hui et al. 2026, arXiv:2602.01469",
    engines={"vllm": "eagle3"},
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


def spread_taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """DFlash's default layers, as fledge's ids (`DraftConfig.aux_layers`): one for each of the draft's layers, spread
    from the output of the target's second layer to the output of the third last. A target with too few layers gives the
    outputs of all layers but the last, or as many as the draft has layers."""
    first, last = 1, target_layers - 3
    if last - first < draft_layers - 1:
        first, last = 0, max(target_layers - 2, 0)
    if draft_layers == 1:
        return (target_layers // 2 + 1,)
    return tuple(sorted({round(first + i * (last - first) / (draft_layers - 1)) + 1 for i in range(draft_layers)}))


def block_gamma(depth: int) -> float:
    """DFlash's default weight of each token of a block, relative to the token before: e^(-1/7) for blocks of 16 rows,
    which draft 15 tokens, e^(-1/5) for 10 and e^(-1/4) for 8 (section 4 of the paper)."""
    return math.exp(-1 / (7 if depth >= 15 else 5 if depth >= 9 else 4))


DFLASH = Method(
    name="dflash",
    title="DFlash",
    paper="Chen et al. 2026, arXiv:2602.06036",
    architectures=("DFlashDraftModel",),
    layout="dflash",
    engines={"vllm": "dflash", "sglang": "DFLASH"},
    borrows_head=True,
    one_pass=True,
    masks=True,
    taps=spread_taps,
    layers=5,
    depth=15,
    gamma_of=block_gamma,
    anchors=512,
    options=(
        "gamma",
        "dpace",
        "loss_temperature",
        "anchors",
        "block_causal",
        "block_conv",
        "candidate_selector",
        "sliding_window",
    ),
    without={
        "draft_vocab": "DFlash drafts over the target's whole vocabulary, with the target's head",
        "train_embeddings": "DFlash reads the target's embedding",
        "keep_out_of_vocab": "DFlash drafts over the target's whole vocabulary",
    },
)

METHODS: dict[str, Method] = {m.name: m for m in (EAGLE1, EAGLE3, PEAGLE, DFLASH)}


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
    "dflash": Choice(DFLASH, DFLASH.title),
}
