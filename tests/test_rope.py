"""Rotary frequencies compared with transformers' own, and refused configurations."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from fledge.config import DraftConfig, RopeConfig
from fledge.drafts.layers import Rotary
from fledge.ops.rope import apply_rope, rope_frequencies
from support.targets import tiny_draft, tiny_target

SHORT = [1.0 + 0.1 * i for i in range(8)]
LONG = [2.0 + 0.5 * i for i in range(8)]
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
PARAMETERS = {
    "default": dict(rope_type="default"),
    "theta": dict(rope_type="default", rope_theta=500000.0),
    "linear": dict(rope_type="linear", factor=2.5),
    "llama3": LLAMA3,
    "llama3 long": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn one mscale": {**YARN, "mscale": 0.7},
    "yarn truncate": {**YARN, "truncate": False},
    "yarn gpt-oss": {**YARN, "truncate": False, "factor": 32.0, "original_max_position_embeddings": 4096},
    "yarn by lengths": {**YARN, "factor": None},
    "longrope": dict(rope_type="longrope", factor=4.0, short_factor=SHORT, long_factor=LONG,
                     original_max_position_embeddings=64),
    "longrope by lengths": dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG,
                                original_max_position_embeddings=64),
    "longrope attention_factor": dict(rope_type="longrope", factor=4.0, short_factor=SHORT, long_factor=LONG,
                                      original_max_position_embeddings=64, attention_factor=1.3),
}  # fmt: skip


def llama(parameters: dict, **config) -> LlamaConfig:
    shape = dict(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=512)
    return LlamaConfig(**{**shape, **config}, rope_parameters={"rope_theta": 10000.0, **parameters})


def theirs(config: LlamaConfig, long: bool = False) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and scale, for a call within the original length or (`long`) beyond it."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    original = config.rope_parameters.get("original_max_position_embeddings", 0)
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=original + 1 if long else None)


def assert_same(ours: tuple[torch.Tensor, float], reference: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-6, atol=0)
    assert ours[1] == pytest.approx(reference[1], rel=1e-9)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_transformers(name: str, long: bool) -> None:
    """Inverse frequencies and the factor on cos and sin are equal for every type and option, short and long."""
    config = llama(PARAMETERS[name])
    reference = theirs(config, long)
    rope = RopeConfig.from_hf(config.to_dict()).for_length(500 if long else 64)
    assert_same(rope_frequencies(rope, 16), reference)


def test_longrope_lists_differ() -> None:
    """for_length chooses the short factors up to the original length, and the long ones beyond it."""
    rope = RopeConfig.from_hf(llama(PARAMETERS["longrope"]).to_dict())
    short, long = (rope_frequencies(rope.for_length(n), 16)[0] for n in (64, 65))
    assert not torch.allclose(short, long)


@pytest.mark.parametrize("kind", ["longrope", "su"])
@pytest.mark.parametrize("long", [False, True])
def test_phi3_as_published(kind: str, long: bool) -> None:
    """Phi-3's config: `rope_scaling` of type `su`, the original length at the top level, a partly rotated head."""
    raw = dict(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_theta=10000.0,
        original_max_position_embeddings=64, partial_rotary_factor=0.5,
        rope_scaling=dict(type=kind, short_factor=SHORT[:4], long_factor=LONG[:4]),
    )  # fmt: skip
    scaling = {**raw["rope_scaling"], "type": "longrope"}  # transformers 5 no longer reads the old name
    config = Phi3Config(**{**raw, "rope_scaling": scaling}, pad_token_id=0)
    reference = theirs(config, long)
    for hf in (raw, config.to_dict()):
        rope = RopeConfig.from_hf(hf).for_length(500 if long else 64)
        assert rope.rope_type == "longrope"
        assert rope.original_max_position_embeddings == 64
        assert_same(rope_frequencies(rope, 16), reference)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_written_config_reads_back_equal(name: str) -> None:
    """A RoPE config that is written and read again is equal, also in the `rope_scaling` spelling."""
    rope = RopeConfig.from_hf(llama(PARAMETERS[name]).to_dict())
    again = RopeConfig.from_hf({"rope_parameters": rope.to_hf(), "max_position_embeddings": 512})
    old = {k: v for k, v in rope.to_hf().items() if k != "rope_theta"}
    older = RopeConfig.from_hf({"rope_theta": rope.rope_theta, "rope_scaling": old, "max_position_embeddings": 512})
    assert again == older == rope


def test_partial_rotary() -> None:
    """Only the first part of every head is rotated, with the frequencies of a head of that size."""
    config = llama(dict(rope_type="default", partial_rotary_factor=0.5))
    rope = RopeConfig.from_hf(config.to_dict())
    assert_same(rope_frequencies(rope, 16), theirs(config))
    frequencies, _ = rope_frequencies(rope, 16)
    assert frequencies.numel() == 4
    angle = torch.cat((frequencies, frequencies))[None, None] * 3
    x = torch.randn(1, 2, 16)
    turned = apply_rope(x, angle.cos(), angle.sin())
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.allclose(turned[..., :8], x[..., :8])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_dynamic_is_refused(where: str) -> None:
    """Dynamic RoPE cannot be trained on packed rows, since its frequencies depend on the length of a call."""
    with pytest.raises(ValueError, match=r"dynamic.*length of a call"):
        RopeConfig.from_hf({where: dict(rope_type="dynamic", factor=2.0), "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="unknown RoPE type"):
        RopeConfig.from_hf({where: dict(rope_type="spiral")})


def test_factor_lists_must_fit() -> None:
    """A longrope list that is missing or does not fit the head is refused with both lengths."""
    rope = RopeConfig.from_hf(llama(PARAMETERS["longrope"]).to_dict())
    with pytest.raises(ValueError, match=r"short_factor has 8 entries.*needs 4"):
        rope_frequencies(rope, 8)
    with pytest.raises(ValueError, match=r"long_factor has 8 entries"):
        rope_frequencies(rope.for_length(500), 8)
    missing = {k: v for k, v in PARAMETERS["longrope"].items() if k != "long_factor"}
    rope = RopeConfig.from_hf({"rope_theta": 1e4, "rope_scaling": missing, "max_position_embeddings": 512})
    with pytest.raises(ValueError, match=r"long_factor has 0 entries"):
        rope_frequencies(rope.for_length(500), 16)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn", "longrope"])
def test_rotary_equals_the_targets(name: str) -> None:
    """cos and sin at several positions equal those of the target's own rotary module."""
    parameters = {
        k: v[:4] if isinstance(v, list) else v for k, v in {"rope_theta": 10000.0, **PARAMETERS[name]}.items()
    }
    target = tiny_target(rope_parameters=parameters, max_length=256)
    rotary = tiny_draft(target).rotary
    position = torch.tensor([0, 3, 63, 64, 65, 255])
    cos, sin = rotary(position, torch.float32)
    their_cos, their_sin = target.decoder.rotary_emb(torch.zeros(1), position[None])
    torch.testing.assert_close(cos[:, 0], their_cos[0])
    torch.testing.assert_close(sin[:, 0], their_sin[0])


def test_frequencies_stay_exact_in_16_bits() -> None:
    """A draft cast to bfloat16 rotates by the same angles, also at large positions."""
    config = DraftConfig.for_target(llama(PARAMETERS["default"]).to_dict(), max_length=512)
    exact, cast = Rotary(config), Rotary(config).to(torch.bfloat16)
    position = torch.tensor([0, 1, 1000, 100_003])
    for a, b in zip(exact(position, torch.float32), cast(position, torch.float32), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("stated", "original"),
    [
        (dict(rope_parameters=YARN), 64),
        (
            dict(rope_parameters={**YARN, "original_max_position_embeddings": 64}, original_max_position_embeddings=96),
            96,
        ),
        (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}), 512),
    ],
)
def test_the_trained_length_is_the_one_transformers_takes(stated, original):
    """The original length is the top level's, else the nested one, else max_position_embeddings."""
    hf = dict(max_position_embeddings=512, rope_theta=10000.0, **stated)
    assert RopeConfig.from_hf(hf).original_max_position_embeddings == original


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_missing_factor_is_named(kind):
    with pytest.raises(ValueError, match="needs a `factor`"):
        RopeConfig.from_hf(dict(rope_parameters={"rope_type": kind}, max_position_embeddings=512))
