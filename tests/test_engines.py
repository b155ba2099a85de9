"""Which drafts each engine supports (`fledge.engines.support`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fledge.config import Provenance, RopeConfig
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.registry import register
from fledge.engines.support import ENGINES, LIMITS, TITLES, minimum_version, unsupported
from fledge.methods import EAGLE3
from support.drafts_on_disk import HEADS, D, V, config
from support.methods import registered

LLAMA3 = RopeConfig("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                    original_max_position_embeddings=64)  # fmt: skip
LINEAR = RopeConfig("linear", factor=2.0)
ONE_PASS = dict(method="peagle", mask_token_id=7)
BLOCK = dict(method="dflash", mask_token_id=7, draft_vocab_size=V, aux_layers=(2, 4, 5))
EAGLE1 = dict(method="eagle1", num_aux_hidden_states=0, draft_vocab_size=V)
EAGLE31 = dict(fc_norm=True, norm_output=True)
OWN = dict(own_embeddings=True)
DEEP = Provenance(target_layers=8)

CASES = {
    "EAGLE-3": ({}, ""),
    "EAGLE-3, whole vocabulary": (dict(draft_vocab_size=V), ""),
    "EAGLE-3, default layers": (dict(aux_layers=(2, 4, 5), provenance=DEEP), ""),
    "EAGLE-3, other layers": (dict(aux_layers=(1, 4, 6), provenance=DEEP), "safeailab"),
    "EAGLE-3, unordered layers": (dict(aux_layers=(4, 2, 5), provenance=DEEP), "vllm sglang safeailab speculators"),
    "EAGLE-3, last layer": (dict(aux_layers=(2, 4, 8), provenance=DEEP), "sglang safeailab"),
    "EAGLE-3, default layers of 6": (dict(provenance=Provenance(target_layers=6)), "vllm sglang safeailab speculators"),
    "EAGLE-3, four layers": (dict(num_aux_hidden_states=4, aux_layers=(1, 2, 3, 4)), "safeailab"),
    "EAGLE-3, four unknown": (dict(num_aux_hidden_states=4), "vllm sglang safeailab speculators"),
    "EAGLE-3, two deep": (dict(num_hidden_layers=2), "safeailab"),
    "EAGLE-3, own embeddings": (OWN, "sglang"),
    "EAGLE-3, narrow": (OWN | dict(hidden_size=16, head_dim=4), ""),
    "EAGLE-3, wide heads": (dict(head_dim=D // HEADS * 2), "safeailab"),
    "EAGLE-3, residual": (dict(norm_before_residual=True), "sglang safeailab"),
    "EAGLE-3, norm before fc": (dict(norm_before_fc=True), "safeailab"),
    "EAGLE-3, q/k norms": (dict(qk_norm=True), "sglang safeailab"),
    "EAGLE-3, biases": (dict(attention_bias=True), "sglang safeailab"),
    "EAGLE-3, MLP biases": (dict(mlp_bias=True), "sglang safeailab"),
    "EAGLE-3, llama3": (dict(rope=LLAMA3), "safeailab"),
    "EAGLE-3, linear": (dict(rope=LINEAR), ""),
    "EAGLE-3, partial": (dict(rope=RopeConfig(partial_rotary_factor=0.5)), "safeailab"),
    "EAGLE-3.1": (EAGLE31, "safeailab"),
    "P-EAGLE": (ONE_PASS, "sglang safeailab"),
    "P-EAGLE with 3.1's norms": (ONE_PASS | EAGLE31, "sglang safeailab speculators"),
    "DFlash": (BLOCK, "safeailab speculators"),
    "DFlash, causal, windows, biases": (
        BLOCK | dict(block_causal=True, windows=(8,), attention_bias=True), "safeailab speculators"
    ),
    "DFlash, convolutions": (BLOCK | dict(block_conv=True), "safeailab speculators"),
    "DFlash, selector": (BLOCK | dict(candidate_selector=True), "safeailab speculators"),
    "DFlash, last layer": (BLOCK | dict(aux_layers=(2, 5, 8), provenance=DEEP), "sglang safeailab speculators"),
    "EAGLE-1": (EAGLE1, "speculators"),
    "EAGLE-1, two deep": (EAGLE1 | dict(num_hidden_layers=2), "speculators"),
    "EAGLE-1, biases": (EAGLE1 | dict(attention_bias=True), "safeailab speculators"),
    "EAGLE-1 with fc.bias": (EAGLE1 | dict(fc_bias=True), "vllm speculators"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_support_what_they_compute_as_trained(case, engine):
    changes, refusing = CASES[case]
    reason = unsupported(config(**changes), engine)
    assert (reason is not None) == (engine in refusing.split()), reason
    if reason:
        assert reason.startswith(f"{TITLES[engine]} (") and reason[-1] != "."


def test_each_limit_is_tried():
    """Some case above, or a draft of a method that engines do not know, has each limit."""
    with registered():
        register(replace(EAGLE3, name="unknown", engines={}), EagleDraft)
        drafts = [config(method="unknown"), *(config(**changes) for changes, _ in CASES.values())]
        tried = {i for draft in drafts for i, limit in enumerate(LIMITS) if limit.applies(draft)}
    assert tried == set(range(len(LIMITS)))


@pytest.mark.parametrize(
    ("changes", "engine", "version"),
    [
        ({}, "vllm", None), (EAGLE31, "vllm", "0.22"), (dict(qk_norm=True, norm_output=True), "vllm", "0.24"),
        (EAGLE31, "speculators", "0.25"), (dict(qk_norm=True), "speculators", "0.26"), (EAGLE31, "sglang", None),
        (dict(norm_before_fc=True), "sglang", "0.5.17"),
    ],
)  # fmt: skip
def test_the_version_that_a_draft_needs(changes, engine, version):
    assert minimum_version(config(**changes), engine) == version
