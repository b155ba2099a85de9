"""Copies of weights on a CPU: their products, and decoding with them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fledge.decode.load import load
from fledge.io import machine
from fledge.ops import linear as linear_module
from fledge.ops import packed_weight
from fledge.ops.linear import linear, strided_linear
from fledge.ops.packed_weight import (
    Fingerprint,
    can_pack,
    fits_half,
    has_half_products,
    has_onednn_products,
    pack,
    packed_copy,
)
from fledge.targets.transformers import TransformersTarget
from support.targets import tiny_draft, tiny_target

HALF_ONLY = pytest.mark.skipif(not has_half_products(), reason="needs FBGEMM's products, and an x86 CPU")
WHOLE_ONLY = pytest.mark.skipif(not has_onednn_products(), reason="needs oneDNN's products, and an x86 CPU")
PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C compiler, with which weights have other copies (test_compiled.py)."""
    monkeypatch.setattr(packed_weight, "library", lambda: None)


@pytest.fixture(params=[pytest.param(True, marks=HALF_ONLY), pytest.param(False, marks=WHOLE_ONLY)])
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether weights are copied in 16 bits, or else in oneDNN's layout; small ones too, for any number of rows."""
    monkeypatch.setattr(packed_weight, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(packed_weight, "LEAST_ROWS", 1)
    if not request.param:
        monkeypatch.setattr(packed_weight, "has_half_products", lambda: False)
    return request.param


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, half: bool) -> list[int]:
    """The numbers of outputs of the products with such copies."""
    outputs = []

    def counted(x, copy, bias):
        found = packed_weight.packed_linear(x, copy, bias)
        if half != isinstance(copy, torch.Tensor):
            outputs.append(found.shape[-1])
        return found

    monkeypatch.setattr(linear_module, "packed_linear", counted)
    return outputs


def target_of_16_bits(native: bool = True, **options) -> TransformersTarget:
    """A target in float32 whose weights are those of a bfloat16 checkpoint."""
    target = tiny_target(native=native, **options)
    with torch.no_grad():
        for p in target.model.parameters():
            p.copy_(p.bfloat16())
    return target


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool, half: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 40, generator=generator), torch.randn(24, 40, generator=generator).bfloat16().float()
    b = torch.randn(48, generator=generator)[::2] if bias else None
    exact, (packed,) = F.linear(x.double(), weight.double(), b if b is None else b.double()), pack([weight])
    assert packed_weight.fits_half(weight) and isinstance(packed.packed_copy, torch.Tensor) != half
    with torch.no_grad():
        for found in (
            linear(x, packed, b), strided_linear(x, packed, b), linear(x[None], packed, b)[0],
            linear(x.T.contiguous().T, packed, b), linear(torch.cat((x, x), 1)[:, :40], packed, b),
        ):  # fmt: skip
            assert found.is_contiguous() and torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5)


@WHOLE_ONLY
def test_when_copies_in_the_layout_of_onednn_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weight, "has_half_products", lambda: False)
    for weight, first in ((torch.zeros(8, 8), 9), (torch.zeros(512, 512), 3)):
        (packed,) = pack([weight])
        assert packed.data_ptr() == weight.data_ptr(), "an alias"
        with torch.no_grad():
            assert packed_copy(packed, first - 1) is None and packed_copy(packed, first) is not None
            assert packed_copy(weight, first) is None
        assert packed_copy(packed, first) is None, "gradients would be lost"
    large = torch.zeros(512, 512)
    monkeypatch.setattr(packed_weight, "free_bytes", lambda device: 2 * 4 * 512 * 512 - 1)
    assert pack([large])[0] is large


def test_what_can_have_copies() -> None:
    weight = torch.zeros(8, 8)
    assert can_pack([weight]) == (has_half_products() or has_onednn_products())
    assert not can_pack([weight, weight.double()]) and not can_pack([torch.zeros(8, 8, device="meta")])


@HALF_ONLY
def test_which_weights_have_copies_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which rounding to float16 takes less than float32's own rounding."""
    monkeypatch.setattr(packed_weight, "CHECKED", 1000)
    exact = 0.02 * torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    exact[0, 0] = 2**-18 * (1 + 2**-7)  # a bfloat16, but no float16
    of_bfloat16, of_float16 = exact.bfloat16().float(), exact.half().float()
    assert fits_half(of_bfloat16) and not torch.equal(of_bfloat16.half().float(), of_bfloat16)
    assert fits_half(of_float16) and fits_half(torch.zeros(3, 3)) and not fits_half(exact)
    for value in (65_505.0, 1e5, 2e19, float("inf"), float("nan")):
        assert not fits_half(torch.cat((of_float16.flatten(), torch.tensor([value]))))
    assert not fits_half(of_bfloat16 * 1e-4), "smaller than float16 has with all its digits"
    assert not fits_half(of_bfloat16 * 1e-24), "whose squares are zero in float32"
    monkeypatch.setattr(packed_weight, "free_bytes", lambda device: 2 * 2 * of_float16.numel())
    (packed,) = pack([of_float16])
    with torch.no_grad():
        assert packed_copy(packed, 1) is not None
    assert packed_copy(packed, 1) is None, "gradients would be lost"
    assert pack([of_float16, of_float16])[0] is of_float16, "too much memory"


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_decoding(family: str, tree: bool, used: list[int]) -> None:
    """The tokens of transformers' own decoding, for one request and for several."""
    target = target_of_16_bits(family=family, tie_word_embeddings=family == "llama")
    options = dict(mode="tree", nodes=8, width=3) if tree else {}
    draft = tiny_draft(target, draft_vocab_size=100).bfloat16().float()
    engine = load(target, draft, depth=3, **options)
    prompts = [PROMPT, [9], [3, 4, 5, 6, 7, 8]]
    expected = [target.reference_generate(p, max_new_tokens=12) for p in prompts]
    for batch in (1, 3):
        used.clear()
        found = engine.generate_all(prompts, batch=batch, max_new_tokens=12)
        assert [d.tokens for d in found] == expected
        passes, drafting = used.count(400), used.count(100)  # each has one product with the head
        assert passes >= 4 and len(used) >= passes * (1 + 2 * 8) + drafting * 5, "every layer's projections"
        assert drafting >= 8


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_targets_that_transformers_computes(family: str, used: list[int]) -> None:
    """Their linear layers have copies while fledge decodes. At any other time, the model computes with its weights."""
    target = target_of_16_bits(native=False, family=family)
    engine, prompts = load(target, tiny_draft(target, draft_vocab_size=100), depth=3), [PROMPT, [9], PROMPT * 2]
    expected = [target.reference_generate(p, max_new_tokens=12) for p in prompts]
    assert not used
    for batch in (1, 3):
        used.clear()
        found = engine.generate_all(prompts, batch=batch, max_new_tokens=12)
        assert [d.tokens for d in found] == expected
        assert (passes := used.count(400)) >= 4 and len(used) >= passes * (1 + 4 * 8), "every layer's projections"
    used.clear()
    for model in (target.model, copy.deepcopy(target.model), pickle.loads(pickle.dumps(target.model))):
        with torch.no_grad():
            model(torch.tensor([PROMPT]))
    assert not used
    with torch.no_grad():
        changed_in_place(target.model)
    expected = target.reference_generate(PROMPT, max_new_tokens=12)
    assert engine.generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected


def changed_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))


def changed_through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.copy_(p + torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))


def one_row_of_a_part(model: nn.Module) -> None:
    """Of a weight that the target has joined with another, in numbers that no sample of the fingerprint has."""
    model.model.layers[0].mlp.up_proj.weight[5, 1:3].mul_(400)


def another_head(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))


@pytest.mark.parametrize("change", [changed_in_place, changed_through_data, one_row_of_a_part, another_head])
def test_changed_weights_are_packed_again(change, used: list[int]) -> None:
    target = target_of_16_bits()
    engine = load(target)
    engine.generate_all([PROMPT], max_new_tokens=4)
    before = target._packed
    engine.generate_all([PROMPT], max_new_tokens=4)
    assert target._packed is before
    with torch.no_grad():
        change(target.model)
    expected = target.reference_generate(PROMPT, max_new_tokens=12)
    assert engine.generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected
    assert target._packed is not before


@pytest.mark.parametrize(
    "of", [lambda w: w, lambda w: w.mT, lambda w: w[::2, ::2]], ids=["whole", "transposed", "strided"]
)
def test_a_fingerprint_sees_writes_that_are_not_counted(of) -> None:
    memory = torch.randn(64, 48)
    weight = of(memory)
    known = Fingerprint([weight], [weight])
    assert known.fits([weight], [weight])
    weight.data.add_(1)
    assert not known.fits([weight], [weight]) and not known.fits([weight.clone()], [weight])


def test_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the machine, or of a container that has less."""
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUPS", ((tmp_path / "none", used), (limit, used)))
    assert machine.free_bytes("cpu") is None
    machine.MEMINFO.write_text("MemTotal:  64 kB\nMemAvailable:    8 kB\n")
    limit.write_text("max\n")
    used.write_text("3000\n")
    assert machine.free_bytes("cpu") == 8192
    limit.write_text("5000\n")
    assert machine.free_bytes("cpu") == 2000
    limit.write_text("2000\n")
    assert machine.free_bytes("cpu") == 0


def test_a_lack_of_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights themselves are used."""

    def fails(weight, half):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(packed_weight, "copy_of", fails)
    weight = torch.zeros(512, 512)
    assert pack([weight])[0] is weight


def test_the_copies_of_a_draft(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each matrix, and one of the keys and values that a prompt has of the last layer. They follow the draft's
    weights."""
    copied, copy_of = [], packed_weight.copy_of
    monkeypatch.setattr(packed_weight, "copy_of", lambda w, half: (copied.append(tuple(w.shape)), copy_of(w, half))[1])
    target = target_of_16_bits()
    draft = tiny_draft(target, draft_vocab_size=100, num_hidden_layers=2).bfloat16().float()
    engine = load(target, draft, depth=3)
    for _ in range(2):
        engine.generate_all([PROMPT], max_new_tokens=20)
        assert len(copied) == 8 * 4 + 1 + 2 * 4 + 3
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).bfloat16())
    found = engine.generate(PROMPT, max_new_tokens=20)
    assert len(copied) == 8 * 4 + 1 + 2 * (2 * 4 + 3)
    fresh = load(target, draft, depth=3).generate(PROMPT, max_new_tokens=20)
    assert (found.tokens, found.trace.rounds[0].accepted) == (fresh.tokens, fresh.trace.rounds[0].accepted)


def test_a_head_that_is_not_packed_is_the_present_one() -> None:
    target = tiny_target(native=True, dtype=torch.float64)
    engine = load(target)
    engine.generate_all([PROMPT], max_new_tokens=4)
    another_head(target.model)
    expected = target.reference_generate(PROMPT, max_new_tokens=12)
    assert engine.generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected


def test_a_model_made_in_inference_mode(used: list[int]) -> None:
    with torch.inference_mode():
        target = target_of_16_bits()
    for prompt in (PROMPT, PROMPT * 5):  # of few rows, and of more
        expected = target.reference_generate(prompt, max_new_tokens=12)
        assert load(target).generate_all([prompt], max_new_tokens=12)[0].tokens == expected and used


def test_copies_of_a_target_pack_anew(used: list[int]) -> None:
    target = target_of_16_bits()
    expected = load(target).generate_all([PROMPT], max_new_tokens=12)[0].tokens
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        used.clear()
        assert load(other).generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected and used
