"""Packed weights on a CPU: their products, and decoding with them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fledge.decode.engine import Engine
from fledge.kernels import packed_weight
from fledge.kernels.linear import linear, strided_linear
from fledge.kernels.packed_weight import can_pack, has_packed_products, pack, packed_copy
from support.targets import tiny_draft, tiny_target

pytestmark = pytest.mark.skipif(not has_packed_products(), reason="needs oneDNN's packed products and an x86 CPU")


@pytest.fixture
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights too, for any number of rows."""
    monkeypatch.setattr(packed_weight, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(packed_weight, "LEAST_ROWS", 1)


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool, everything_is_packed) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 40, generator=generator), torch.randn(24, 40, generator=generator)
    b = torch.randn(24, generator=generator) if bias else None
    exact, packed = F.linear(x.double(), weight.double(), b if b is None else b.double()), pack(weight)
    with torch.no_grad():
        for found in (
            linear(x, packed, b), strided_linear(x, packed, b), linear(x[None], packed, b)[0],
            linear(x.T.contiguous().T, packed, b), linear(torch.cat((x, x), 1)[:, :40], packed, b),
        ):  # fmt: skip
            assert found.is_contiguous() and torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_when_copies_are_made_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.zeros(8, 8), torch.zeros(512, 512)
    assert pack(small) is small
    packed = pack(large)
    assert packed.data_ptr() == large.data_ptr(), "an alias"
    with torch.no_grad():
        assert packed_copy(packed, 1) is None and packed_copy(packed, 6) is not None
        assert packed_copy(large, 6) is None
    assert packed_copy(packed, 6) is None, "gradients would be lost"
    assert can_pack([small, large]) and not can_pack([small, large.double()])
    assert not can_pack([torch.zeros(8, 8, device="meta")])
    monkeypatch.setattr(packed_weight, "MOST_BYTES", 4 * 512 * 512)
    assert can_pack([large]) and not can_pack([small, large])


@pytest.mark.parametrize("tree", [False, True])
def test_decoding(tree: bool, everything_is_packed) -> None:
    """The tokens of transformers' own decoding, with and without a draft, for one request and for several."""
    target = tiny_target(native=True)
    options = dict(mode="tree", nodes=8, width=3) if tree else {}
    engine = Engine(target, tiny_draft(target), depth=3, **options)
    prompts = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8]]
    expected = [target.reference_generate(p, max_new_tokens=12) for p in prompts]
    for batch in (1, 3):
        found = engine.generate_all(prompts, batch=batch, max_new_tokens=12)
        assert [d.tokens for d in found] == expected
    assert packed_copy_of_layer(target) is not None


def test_changed_weights_are_packed_again(everything_is_packed) -> None:
    target = tiny_target(native=True)
    engine, prompt = Engine(target), [5, 6, 7]
    engine.generate_all([prompt], max_new_tokens=4)
    before = packed_copy_of_layer(target)
    engine.generate_all([prompt], max_new_tokens=4)
    assert packed_copy_of_layer(target) is before
    with torch.no_grad():
        for p in target.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    expected = target.reference_generate(prompt, max_new_tokens=12)
    assert engine.generate_all([prompt], max_new_tokens=12)[0].tokens == expected
    assert packed_copy_of_layer(target) is not before


def packed_copy_of_layer(target) -> torch.Tensor | None:
    with torch.no_grad():
        return packed_copy(target._decoder.layers[0].gate_up, 6)
