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
from fledge.ops.compiled import MOST_ROWS, CompiledWeight, library
from fledge.ops.linear import Fingerprint, can_pack, linear, pack, packed_copy, strided_linear
from fledge.targets.transformers import TransformersTarget
from support.targets import tiny_draft, tiny_target

pytestmark = pytest.mark.skipif(library() is None, reason="needs Linux and a C compiler with OpenMP")
PROMPT = [5, 6, 7]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of outputs of the products with copies, but for those in compiled layers."""
    outputs, product = [], CompiledWeight.product

    def counted(self, x, bias=None):
        outputs.append(self.shape[0])
        return product(self, x, bias)

    monkeypatch.setattr(CompiledWeight, "product", counted)
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
def test_products(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 40, generator=generator), torch.randn(24, 40, generator=generator).bfloat16().float()
    b = torch.randn(48, generator=generator)[::2] if bias else None
    exact, (packed,) = F.linear(x.double(), weight.double(), b if b is None else b.double()), pack([weight])
    with torch.no_grad():
        for found in (
            linear(x, packed, b), strided_linear(x, packed, b), linear(x[None], packed, b)[0],
            linear(x.T.contiguous().T, packed, b), linear(torch.cat((x, x), 1)[:, :40], packed, b),
        ):  # fmt: skip
            assert found.is_contiguous() and torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_when_copies_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    for weight, size in ((whole, 4), (whole.half().float(), 2), (whole.bfloat16().float(), 2)):
        monkeypatch.setattr(linear_module, "free_bytes", lambda device, size=size: 2 * size * whole.numel())
        (packed,) = pack([weight])
        assert packed.data_ptr() == weight.data_ptr(), "an alias"
        with torch.no_grad():
            assert packed_copy(packed, 1) is not None and packed_copy(packed, MOST_ROWS) is not None
            assert packed_copy(packed, MOST_ROWS + 1) is None and packed_copy(weight, 1) is None
        assert packed_copy(packed, 1) is None, "gradients would be lost"
        assert pack([weight, weight])[0] is weight, "too much memory"


def test_what_can_have_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 8)
    assert can_pack([weight])
    monkeypatch.setattr(linear_module, "library", lambda: pytest.fail("it was compiled"))
    assert not can_pack([weight, weight.double()]) and not can_pack([torch.zeros(8, 8, device="meta")])


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
        assert used.count(400) >= 4 and used.count(100) >= 4, "each pass has one product with the head"


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

    def fails(weight):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(linear_module, "CompiledWeight", fails)
    weight = torch.zeros(512, 512)
    assert pack([weight])[0] is weight


def test_the_copies_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each matrix, and one of the keys and values that a prompt has of the last layer. They follow the draft's
    weights."""
    copied, create = [], CompiledWeight.__init__
    monkeypatch.setattr(CompiledWeight, "__init__", lambda self, w: (copied.append(tuple(w.shape)), create(self, w))[1])
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
