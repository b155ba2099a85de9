"""Packed weights on a CPU: their products, and decoding with them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fledge.decode.engine import Engine
from fledge.kernels import linear as linear_module
from fledge.kernels import packed_weight
from fledge.kernels.linear import linear, strided_linear
from fledge.kernels.packed_weight import can_pack, has_packed_products, pack, packed_copy
from support.targets import tiny_draft, tiny_target

pytestmark = pytest.mark.skipif(not has_packed_products(), reason="needs oneDNN's packed products and an x86 CPU")
PROMPT = [5, 6, 7]


@pytest.fixture
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights too, for any number of rows."""
    monkeypatch.setattr(packed_weight, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(packed_weight, "LEAST_ROWS", 1)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, everything_is_packed) -> list[int]:
    """The numbers of outputs of the packed products."""
    outputs = []

    def counted(x, copy, bias):
        outputs.append(copy.shape[0])
        return packed_weight.packed_linear(x, copy, bias)

    monkeypatch.setattr(linear_module, "packed_linear", counted)
    return outputs


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool, everything_is_packed) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 40, generator=generator), torch.randn(24, 40, generator=generator)
    b = torch.randn(48, generator=generator)[::2] if bias else None
    exact, packed = F.linear(x.double(), weight.double(), b if b is None else b.double()), pack(weight)
    with torch.no_grad():
        for found in (
            linear(x, packed, b), strided_linear(x, packed, b), linear(x[None], packed, b)[0],
            linear(x.T.contiguous().T, packed, b), linear(torch.cat((x, x), 1)[:, :40], packed, b),
        ):  # fmt: skip
            assert found.is_contiguous() and torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("least", [3, 4])
def test_when_copies_are_used(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weight, "LEAST_ROWS", least)
    monkeypatch.setattr(packed_weight, "MANY_ROWS", 9)
    for weight, first in ((torch.zeros(8, 8), 9), (torch.zeros(512, 512), least)):
        packed = pack(weight)
        assert packed.data_ptr() == weight.data_ptr(), "an alias"
        with torch.no_grad():
            assert packed_copy(packed, first - 1) is None and packed_copy(packed, first) is not None
            assert packed_copy(weight, first) is None
        assert packed_copy(packed, first) is None, "gradients would be lost"
    small, large = torch.zeros(8, 8), torch.zeros(512, 512)
    monkeypatch.setattr(packed_weight, "MANY_ROWS", None)
    assert pack(small) is small and pack(large) is not large
    assert can_pack([small, large]) and not can_pack([small, large.double()])
    assert not can_pack([torch.zeros(8, 8, device="meta")])
    monkeypatch.setattr(packed_weight, "MOST_BYTES", 4 * 512 * 512)
    assert can_pack([large]) and not can_pack([small, large])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_decoding(family: str, tree: bool, used: list[int]) -> None:
    """The tokens of transformers' own decoding, for one request and for several."""
    target = tiny_target(family, native=True, tie_word_embeddings=family == "llama")
    options = dict(mode="tree", nodes=8, width=3) if tree else {}
    engine = Engine(target, tiny_draft(target), depth=3, **options)
    prompts = [PROMPT, [9], [3, 4, 5, 6, 7, 8]]
    expected = [target.reference_generate(p, max_new_tokens=12) for p in prompts]
    for batch in (1, 3):
        used.clear()
        found = engine.generate_all(prompts, batch=batch, max_new_tokens=12)
        assert [d.tokens for d in found] == expected
        passes = used.count(400)  # each has one product with the head
        assert passes >= 4 and len(used) >= passes * (1 + 2 * 8), "every layer's projections"


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
    target = tiny_target(native=True)
    engine = Engine(target)
    engine.generate_all([PROMPT], max_new_tokens=4)
    before = target._packed
    engine.generate_all([PROMPT], max_new_tokens=4)
    assert target._packed is before
    with torch.no_grad():
        change(target.model)
    expected = target.reference_generate(PROMPT, max_new_tokens=12)
    assert engine.generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected
    assert target._packed is not before


def test_a_head_that_is_not_packed_is_the_present_one() -> None:
    target = tiny_target(native=True, dtype=torch.float64)
    engine = Engine(target)
    engine.generate_all([PROMPT], max_new_tokens=4)
    another_head(target.model)
    expected = target.reference_generate(PROMPT, max_new_tokens=12)
    assert engine.generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected


def test_a_model_made_in_inference_mode(used: list[int]) -> None:
    with torch.inference_mode():
        target = tiny_target(native=True)
    for prompt in (PROMPT, PROMPT * 5):  # of few rows, and of more
        expected = target.reference_generate(prompt, max_new_tokens=12)
        assert Engine(target).generate_all([prompt], max_new_tokens=12)[0].tokens == expected and used


def test_copies_of_a_target_pack_anew(used: list[int]) -> None:
    target = tiny_target(native=True)
    expected = Engine(target).generate_all([PROMPT], max_new_tokens=12)[0].tokens
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        used.clear()
        assert Engine(other).generate_all([PROMPT], max_new_tokens=12)[0].tokens == expected and used
