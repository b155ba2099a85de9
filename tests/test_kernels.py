"""Triton kernels against plain definitions, on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fledge.config import RopeConfig
from fledge.data.documents import Document
from fledge.drafts.draft import Draft
from fledge.drafts.layers import Rotary
from fledge.ops import training
from fledge.ops.attention_ttt import OwnSteps, Queries, ttt_attention, ttt_attention_reference
from fledge.ops.device import computed_by
from fledge.ops.rope import apply_rope, cos_sin
from fledge.ops.training import GradientSums, swiglu, swiglu_reference, take_rows
from fledge.train.objective import ttt
from fledge.train.row_pass import Implementation, Objective
from fledge.types import Features, Packed
from support.devices import needs_triton
from support.losses import WAYS, LossCase, gradients, loss_case
from support.rows import DOCUMENTS, document, queries_of, row_of
from support.targets import features_for, tiny_draft, tiny_target

needs_triton()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
IMPLS = ["triton", pytest.param("flex", marks=GPU)]
LONG = [document(300, (2, 280), seed=1), document(1), document(90, (5, 60), (60, 90), seed=2), document(170, (0, 170))]


pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


def on_device(queries: Queries) -> Queries:
    return Queries(*(x.to(DEVICE) for x in (queries.slot_S, queries.first_S, queries.own_row_JS)), queries.blocks)


def inputs(row: Packed, slots: Tensor, own: list[int], H: int, G: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    T, S = row.token_T.numel(), slots.numel()
    shapes = [(S, H, d), (T, G, d), (T, G, d), *[(p, G, d) for p in own for _ in range(2)]]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def attention_and_gradients(way: str, leaves: list[Tensor], queries: Queries, weights: Tensor) -> list[Tensor]:
    """The output of attention, then the gradients of `leaves`."""
    q, k0, v0, *rest = leaves
    own = list(zip(rest[::2], rest[1::2], strict=True))
    if way == "reference":
        out = ttt_attention_reference(q, k0, v0, own, queries)
    else:
        out = ttt_attention(q, k0, v0, own, queries, way)
    found = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves, allow_unused=True)
    return [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))]


def relative_error(a: Tensor, b: Tensor) -> float:
    """The norm of the difference relative to the norm of `b`; infinite if there is a NaN."""
    off = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
    return off if off == off else float("inf")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("documents", "steps", "H", "G", "d"),
    [
        (DOCUMENTS, 0, 6, 3, 16),
        (DOCUMENTS, 1, 4, 4, 16),
        (DOCUMENTS, 3, 4, 1, 16),
        (LONG, 2, 4, 2, 32),
        (LONG, 0, 2, 1, 24),
        (DOCUMENTS, 2, 4, 2, 8),
        (LONG, 1, 2, 2, 80),
        ([document(129, (0, 129))], 2, 2, 1, 64),
        ([document(2, (0, 2)), document(1)], 0, 2, 1, 16),
    ],
)
@pytest.mark.parametrize("which", ["live", "all", "few"])
def test_attention(impl: str, documents: list[Document], steps: int, H: int, G: int, d: int, which: str) -> None:
    """Outputs and gradients equal the definition's in float64, for documents of one token and of hundreds, head sizes
    that are not powers of two, and queries that use only some keys of the earlier steps."""
    if impl == "flex" and d == 64:
        pytest.skip("FlexAttention has no float32 tile of this shape that fits a GPU's shared memory")
    row = row_of(documents, filler=3)
    slots = {
        "live": row.live(steps + 1)[steps],
        "all": torch.arange(row.token_T.numel()),
        "few": torch.arange(0, row.token_T.numel(), 7),
    }[which]
    S = slots.numel()
    sizes = [S + 5 * (steps - j) for j in range(steps)]
    plain = queries_of(row, slots, steps)
    at = [torch.randperm(p, generator=torch.Generator().manual_seed(p))[:S].sort().values for p in sizes]
    queries = on_device(Queries(plain.slot_S, plain.first_S, torch.stack(at).int() if at else plain.own_row_JS, ()))
    leaves = inputs(row, slots, sizes, H, G, d, torch.float32)
    weights = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours = attention_and_gradients(impl, leaves, queries, weights)
    exact = attention_and_gradients(
        "reference", [x.detach().double().requires_grad_() for x in leaves], queries, weights
    )
    for a, b in zip(ours, exact, strict=True):
        assert float((a.double() - b).norm()) <= 1e-5 * max(float(b.norm()), 1.0)


def test_steps_that_share_keys() -> None:
    """The gradients that two steps give one key of the own steps are summed. A second backward pass fails, because
    these sums are released after the first."""
    row = row_of(DOCUMENTS)
    live = row.live(3)[1:]
    at = torch.stack([torch.searchsorted(slots, live[1]).int() for slots in live])
    queries = [queries_of(row, live[0], 1), replace(queries_of(row, live[1], 2), own_row_JS=at)]
    leaves = inputs(row, live[0], [slots.numel() for slots in live], 4, 2, 16, torch.float32)
    q, k0, v0, *rest = leaves
    found = {}
    for attend in (ttt_attention_reference, partial(ttt_attention, impl="triton")):
        own, loss = OwnSteps(), 0.0
        for pair, asked in zip(zip(rest[::2], rest[1::2], strict=True), queries, strict=True):
            own.append(pair)
            loss = loss + attend(q[: asked.slot_S.numel()], k0, v0, own, on_device(asked)).square().sum()
        found[attend] = torch.autograd.grad(loss, leaves, retain_graph=True)
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="ran twice"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("H", "G", "d"), [(4, 2, 64), (8, 2, 128)])
def test_attention_in_16_bits(H: int, G: int, d: int, impl: str) -> None:
    """The error of the output and of each gradient is at most 1.5 times that of the plain definition in the same dtype:
    bfloat16 on a GPU, float16 in the interpreter, which cannot multiply bfloat16."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    row = row_of(LONG, filler=5)
    slots = row.live(3)[2]
    queries = on_device(queries_of(row, slots, 2))
    leaves = inputs(row, slots, [slots.numel()] * 2, H, G, d, dtype)
    weights = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = attention_and_gradients(
        "reference", [x.detach().double().requires_grad_() for x in leaves], queries, weights
    )
    plain = attention_and_gradients("reference", leaves, queries, weights)
    for ours, usual, true in zip(attention_and_gradients(impl, leaves, queries, weights), plain, exact, strict=True):
        assert relative_error(ours, true) <= 1.5 * relative_error(usual, true)


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_without_queries(impl: str) -> None:
    row = row_of([document(5)])
    leaves = inputs(row, torch.arange(0), [], 2, 1, 16, torch.float32)
    found = attention_and_gradients(impl, leaves, on_device(queries_of(row, torch.arange(0), 0)), leaves[0])
    assert not any(x.any() for x in found[1:])


def test_unknown_attention_is_refused() -> None:
    row = row_of([document(5)])
    leaves = inputs(row, torch.arange(5), [], 2, 1, 16, torch.float32)
    with pytest.raises(ValueError, match="eager, flex, triton"):
        ttt_attention(*leaves, [], queries_of(row, torch.arange(5), 0), "fast")


def to_device(case: LossCase, dtype: torch.dtype) -> LossCase:
    hidden = [h.detach().to(DEVICE, dtype).requires_grad_() for h in case.hidden]
    head = case.head.detach().to(DEVICE, dtype).requires_grad_()
    teacher, ids = case.teacher.to(DEVICE, dtype), case.ids.to(DEVICE)
    return LossCase(hidden, head, case.rows, teacher, ids, case.weights, case.labels)


@pytest.mark.parametrize(("chunk", "W"), [(7, 37), (1000, 12), (7, 1)])
@pytest.mark.parametrize(("kind", "temperature"), WAYS)
@pytest.mark.parametrize("keep", [False, True])
def test_loss(kind: str, temperature: float, W: int, chunk: int, keep: bool) -> None:
    """Loss, per-step sums, hits and gradients equal those of plain torch in float64."""
    case, exact = to_device(loss_case(W), torch.float32), to_device(loss_case(W), torch.float64)
    asked = dict(kind=kind, temperature=temperature, chunk=chunk, keep_out_of_vocab=keep)
    loss, scores = case(**asked, impl="triton")
    expected, true = exact(**asked)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.loss_K.double(), true.loss_K, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.accept_K.double(), true.accept_K, rtol=1e-4, atol=1e-5)
    assert torch.equal(scores.scored_K, true.scored_K)
    assert all(torch.equal(a, b) for a, b in zip(scores.hits, true.hits, strict=True))
    for a, b in zip(case.gradients(2 * loss), exact.gradients(2 * expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "temperature"), WAYS)
def test_loss_in_16_bits(kind: str, temperature: float) -> None:
    """The error of the loss and of each gradient is at most 1.5 times that of plain torch in this dtype: bfloat16 on
    a GPU, float16 in the interpreter, which cuts off the bits that bfloat16 lacks."""
    case = to_device(loss_case(300, V=500, P=90), torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    exact = LossCase(
        [h.detach().double().requires_grad_() for h in case.hidden], case.head.detach().double().requires_grad_(),
        case.rows, case.teacher.double(), case.ids, case.weights, case.labels,
    )  # fmt: skip
    true = exact.reference(kind, temperature)
    wanted = [true, *exact.gradients(true)]
    found = {}
    for impl in ("eager", "triton"):
        loss, _ = case(kind=kind, temperature=temperature, impl=impl)
        found[impl] = [loss, *case.gradients(loss)]
    for ours, usual, b in zip(found["triton"], found["eager"], wanted, strict=True):
        if b.numel():
            assert relative_error(ours, b) <= 1.5 * relative_error(usual, b) + 1e-4


@pytest.mark.parametrize(("W", "V"), [(5000, 9001), (4097, 4097)])
@pytest.mark.parametrize(("kind", "temperature"), WAYS)
def test_loss_of_many_words(kind: str, temperature: float, W: int, V: int) -> None:
    """The loss is right for vocabularies that span several blocks of the kernels."""
    case, exact = (to_device(loss_case(W, V=V, P=31), dtype) for dtype in (torch.float32, torch.float64))
    asked = dict(kind=kind, temperature=temperature)
    (loss, scores), (expected, true) = case(**asked, impl="triton"), exact(**asked)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.accept_K.double(), true.accept_K, rtol=1e-5, atol=1e-6)
    assert torch.equal(scores.scored_K, true.scored_K) and scores.scored_K[0] > 0
    assert all(torch.equal(a, b) for a, b in zip(scores.hits, true.hits, strict=True))
    for a, b in zip(case.gradients(loss), exact.gradients(expected), strict=True):
        assert not b.numel() or relative_error(a, b) < 1e-5


def test_loss_of_ties_takes_the_first() -> None:
    """Among equal logits the lowest id counts as the draft's choice, as in torch's argmax."""
    case = to_device(loss_case(12), torch.float32)
    with torch.no_grad():
        case.head.zero_()
    _, scores = case(impl="triton")
    _, plain = case()
    assert all(torch.equal(a, b) for a, b in zip(scores.hits, plain.hits, strict=True))


@pytest.mark.parametrize(("H", "d", "rotated"), [(4, 16, 16), (3, 24, 24), (2, 16, 8), (1, 10, 6)])
def test_rope(H: int, d: int, rotated: int) -> None:
    """Outputs and gradients equal plain torch's, for full and partial rotation and head sizes that are not powers of
    two."""
    from fledge.ops.training_triton import rope

    x = torch.randn(7, H, d, device=DEVICE).requires_grad_()
    angle = torch.randn(7, 1, rotated // 2, device=DEVICE).repeat(1, 1, 2)
    ours, plain = rope(x, angle.cos(), angle.sin()), apply_rope(x, angle.cos(), angle.sin())
    torch.testing.assert_close(ours, plain)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weights)[0] for y in (ours, plain)))


@pytest.mark.parametrize("reads", ["both", "norm", "stream"])
@pytest.mark.parametrize(("N", "E"), [(0, 16), (1, 16), (7, 24), (600, 40)])
def test_norm_with_input(N: int, E: int, reads: str) -> None:
    """The norm and its input, as both outputs of one function, have the right values and gradients whichever of them is
    used, also with more rows than programs of the kernel."""
    from fledge.ops.training_triton import norm_with_input

    x, gain = torch.randn(N, E, device=DEVICE).requires_grad_(), torch.randn(E, device=DEVICE).requires_grad_()
    weights, found = torch.randn(2, N, E, device=DEVICE), []
    for out in (norm_with_input(x, gain, 1e-3), (torch.nn.functional.rms_norm(x, (E,), gain, 1e-3), x)):
        wanted = {"both": (0, 1), "norm": (0,), "stream": (1,)}[reads]
        loss = sum((out[i] * weights[i]).sum() for i in wanted)
        found.append([*out, *torch.autograd.grad(loss, (x, gain), materialize_grads=True)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_rows_taken() -> None:
    """take_rows copies rows; gradients flow back through the first entries, which are distinct, and not through the
    padding after them."""
    x, rows = torch.randn(9, 4, dtype=torch.float64).requires_grad_(), torch.tensor([7, 2, 3, 3, 3]).int()
    taken = take_rows(x, rows, 3)
    assert torch.equal(taken, x[rows.long()])
    weights = torch.cat((torch.randn(3, 4), torch.zeros(2, 4))).double()
    assert torch.equal(*(torch.autograd.grad(y, x, weights)[0] for y in (taken, x.index_select(0, rows))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frequencies", [3, 8])
def test_cos_and_sin(frequencies: int, dtype: torch.dtype) -> None:
    """The kernel's cos and sin equal torch's, also for large positions and with a scale."""
    from fledge.ops.rope_triton import cos_sin_triton

    yarn = RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    config = replace(tiny_draft(tiny_target(tokenizer=False)).config, head_dim=2 * frequencies, rope=yarn)
    rotary, positions = Rotary(config).to(DEVICE), torch.tensor([0, 1, 7, 100_000], device=DEVICE)
    assert rotary.scale != 1.0
    given = rotary.frequencies, rotary.scale, dtype
    with computed_by("definition"):
        plain = cos_sin(positions, *given)
    for ours, expected in zip(cos_sin_triton(positions, *given), plain, strict=True):
        torch.testing.assert_close(ours, expected)
    assert cos_sin_triton(positions[:0], *given)[0].shape == (0, 2 * frequencies)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("S", [0, 1, 37])
def test_mlp(S: int, recompute: bool) -> None:
    """Outputs and gradients equal plain torch's, with activations stored or recomputed, and with weight gradients
    returned to autograd or summed in GradientSums."""
    torch.manual_seed(0)
    shapes = (S, 24), (40, 24), (40, 24), (24, 40), (S, 24)
    leaves = [torch.randn(s, device=DEVICE).requires_grad_() for s in shapes]
    plain = swiglu_reference(*leaves)
    weights = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, leaves, weights)
    for sums in (None, GradientSums([])):
        ours = swiglu(*leaves, recompute=recompute, gradients=sums)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
        ours.backward(weights)
        for leaf, b in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad, b, rtol=1e-4, atol=1e-3)
            leaf.grad = None


@pytest.mark.parametrize("O", [3, 1024, 2500])
def test_rows_are_added(O: int) -> None:
    """add_rows_ adds to the given rows only, for rows shorter than one block and for rows of several blocks."""
    from fledge.ops.training_triton import add_rows_

    total, rows = torch.randn(9, O, device=DEVICE), torch.tensor([7, 2, 8], device=DEVICE).int()
    x = torch.randn(3, O, device=DEVICE).half()
    expected = total.index_add(0, rows, x.float())
    add_rows_(total, rows, x)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("part", ["mlp", "mlp recomputed", "norm", "rope", "shared products"])
def test_parts_in_16_bits(part: str) -> None:
    """The error of each part's outputs and gradients is at most 1.5 times that of plain torch in the same dtype:
    bfloat16 on a GPU, float16 in the interpreter, which does not round bfloat16 as a GPU does."""
    from fledge.ops.training_triton import norm_with_input, rope

    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    S, E, inner = 40, 256, 1536
    shapes = {
        "norm": [(S, E), (E,)],
        "rope": [(S, 4, 64)],
        "shared products": [(S, E), (S, E), (inner, 2 * E)],
        "mlp": [(S, E), (inner, E), (inner, E), (E, inner), (S, E)],
    }[part.split(" r")[0]]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator) / (s[-1] ** 0.5 if s[0] != S else 1) for s in shapes]
    angle = torch.randn(S, 1, 32, generator=generator).repeat(1, 1, 2).to(DEVICE)
    rows = torch.randperm(S, generator=generator).int().to(DEVICE)
    shared: list[training.SharedProducts] = []

    def triton(leaves: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        if part == "norm":
            return norm_with_input(*leaves, 1e-5)[0]
        if part == "rope":
            return rope(*leaves, cos, sin)
        if part == "shared products":
            x, y, weight = leaves
            shared.append(training.SharedProducts(x, weight))
            return shared[0].with_rows(rows, y, weight)[0]
        return swiglu(*leaves, recompute=part == "mlp recomputed")

    def plain(leaves: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        if part == "norm":
            return torch.nn.functional.rms_norm(leaves[0], (E,), leaves[1], 1e-5)
        if part == "rope":
            return apply_rope(*leaves, cos, sin)
        if part == "shared products":
            x, y, weight = leaves
            return torch.cat((x[rows.long()], y), 1) @ weight.T
        return swiglu_reference(*leaves)

    found = []
    for way, dtype in ((triton, half), (plain, half), (plain, torch.float64)):
        leaves = [x.to(DEVICE, half).to(dtype).requires_grad_() for x in given]
        out = way(leaves, *(x.to(half).to(dtype) for x in (angle.cos(), angle.sin())))
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, half).to(dtype)
        out.backward(weights)
        if way is triton and shared:
            shared[0].backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    for ours, usual, true in zip(*found, strict=True):
        assert ours.dtype == half and relative_error(ours, true) <= 1.5 * relative_error(usual, true)


@pytest.mark.parametrize("slots", [None, 9])
@pytest.mark.parametrize("attention", IMPLS)
@pytest.mark.parametrize("variant", [{}, dict(num_hidden_layers=2, fc_norm=True, norm_output=True, qk_norm=True)])
def test_training_step(variant: dict, attention: str, slots: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, counts and gradients of a whole row equal the eager implementation's, with padded matrix heights."""
    multiple = 4 if DEVICE == "cpu" else training.ROW_MULTIPLE  # Triton's interpreter is slow
    monkeypatch.setattr(training, "ROW_MULTIPLE", multiple)
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    draft = tiny_draft(target, draft_vocab_size=131, **variant)
    row = row_of(DOCUMENTS[4:] if DEVICE == "cpu" else DOCUMENTS, filler=5)
    features = features_for(draft, target, row)
    plain = ttt(draft, row, features, target.logits, Objective(depth=4))
    expected = {n: g.to(DEVICE) for n, g in gradients(draft, plain.loss).items()}
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding)
    ways = Implementation(attention, "triton", "triton", slots, recompute=slots is not None)
    step = ttt(draft, row, features, lambda x: target.logits(x.to(DEVICE)), Objective(depth=4), ways)
    torch.testing.assert_close(step.loss.cpu(), plain.loss, rtol=1e-4, atol=0)
    assert torch.equal(step.hit_K, plain.hit_K) and torch.equal(step.scored_K, plain.scored_K)
    assert step.simulated == plain.simulated
    for name, g in gradients(draft, step.loss).items():
        assert relative_error(g, expected[name]) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.parametrize("attention", IMPLS)
def test_no_kernel_is_compiled_for_a_count(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first row, no kernel is compiled again for rows of the same length, whatever their documents and
    numbers of live slots."""
    import triton
    from torch._dynamo.utils import counters

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: compiled.append(str(told["src"].name)))
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    target.model.to(DEVICE)
    draft = tiny_draft(target, draft_vocab_size=128).to(DEVICE)  # a width at which each row of logits is aligned
    draft.share_target_weights(target.embedding)
    ways = Implementation(attention, "triton", "triton", slots=300)
    for tried, starts in enumerate([(0, 9), (0, 333), (1, 700), (400, 401), (901, 993), (17, 18), (5, 444)]):
        row = row_of([document(512, (starts[0] % 512, 512)), document(7), document(505, (starts[1] % 505, 505))])
        ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=4, loss="mixed"), ways)
        draft.zero_grad()
        if tried == 0:
            assert compiled or attention == "flex"
            compiled.clear()
            graphs = counters["stats"]["unique_graphs"]
    assert not compiled and counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("slots", [None, 9])
def test_a_row_without_live_slots(slots: int | None) -> None:
    """A row without live slots gives zero loss, zero counts and zero gradients."""
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    draft = tiny_draft(target, draft_vocab_size=131)
    row = row_of([document(9), document(1, (0, 1))], filler=3)
    features = features_for(draft, target, row)
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding)
    ways = Implementation("triton", "triton", "triton", slots)
    step = ttt(draft, row, features, lambda x: target.logits(x.to(DEVICE)), Objective(depth=3), ways)
    assert step.loss == 0 and not step.live_K.any() and not step.scored_K.any()
    assert not any(p.grad.any() for p in draft.parameters() if p.grad is not None)


@pytest.mark.parametrize("bias", [False, True])
def test_recomputing_stores_less(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With recomputation, no tensor of the MLP's intermediate size is saved for the backward pass, with or without
    biases, and the gradients stay the same."""
    monkeypatch.setattr(training, "ROW_MULTIPLE", 4)
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    draft = tiny_draft(target, draft_vocab_size=131, intermediate_size=76, mlp_bias=bias)
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding)
    row = row_of(DOCUMENTS)
    features = features_for(draft, target, row)
    saved, found = {}, {}
    for recompute in (False, True):
        inside: list[int] = []

        def pack(x: Tensor, inside: list[int] = inside) -> Tensor:
            inside += [x.numel()] if x.dim() == 2 and x.shape[1] == 76 and x.shape[0] != 64 else []
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ways = Implementation(layers="triton", recompute=recompute)
            step = ttt(draft, row, features, target.logits, Objective(depth=2), ways)
        saved[recompute], found[recompute] = sum(inside), gradients(draft, step.loss)
    assert saved[False] > 0 and saved[True] == 0
    for name, g in found[True].items():
        assert relative_error(g, found[False][name]) < 1e-5, name


FROZEN = {
    "the hidden side": ("fc", "hidden_norm", "q_proj", "k_proj", "v_proj"),
    "the embedding side": ("input_layernorm",),
    "the projections": ("q_proj", "k_proj", "v_proj"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If some parameters are frozen, the gradients of the others equal the eager ones, and frozen ones get none."""
    monkeypatch.setattr(training, "ROW_MULTIPLE", 4 if DEVICE == "cpu" else training.ROW_MULTIPLE)
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    draft = tiny_draft(target, draft_vocab_size=131)
    row = row_of(DOCUMENTS)
    features = features_for(draft, target, row)
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding)
    for n, p in draft.named_parameters():
        p.requires_grad_(not any(part in n for part in FROZEN[name]))
    found = {}
    for layers in ("eager", "triton"):
        ways = Implementation(layers=layers, loss=layers)
        ttt(draft, row, features, lambda x: target.logits(x.to(DEVICE)), Objective(depth=3), ways)
        found[layers] = {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}
        draft.zero_grad()
    assert found["triton"].keys() == found["eager"].keys()
    for n, g in found["triton"].items():
        assert relative_error(g, found["eager"][n]) < 1e-3, n


@pytest.mark.gpu
@pytest.mark.parametrize("attention", IMPLS)
def test_training_step_in_16_bits(attention: str) -> None:
    """In bfloat16, the error of the loss and of each gradient of a whole row is at most 1.5 times that of the plain
    definition, also in chunks of slots."""
    target = tiny_target(tokenizer=False, hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4)
    draft = tiny_draft(target, draft_vocab_size=131)
    row = row_of(LONG, filler=5)
    draft, features = draft.to(DEVICE, torch.bfloat16), features_for(draft, target, row)
    features = Features(*(x.to(DEVICE, torch.bfloat16) for x in (features.aux_TAD, features.last_TD)))
    head = target.head.weight.to(DEVICE, torch.bfloat16)

    def gradients_of(draft: Draft, ways: Implementation) -> dict[str, Tensor]:
        draft.share_target_weights(target.embedding)
        seen = Features(features.aux_TAD.to(draft.dtype), features.last_TD.to(draft.dtype))
        step = ttt(draft, row, seen, lambda x: x @ head.to(draft.dtype).T, Objective(depth=4), ways)
        return {"loss": step.loss, **gradients(draft, step.loss)}

    exact = gradients_of(copy.deepcopy(draft).double(), Implementation())
    usual = gradients_of(draft, Implementation())
    for slots in (None, 100):
        for name, ours in gradients_of(draft, Implementation(attention, "triton", "triton", slots)).items():
            allowed = 1.5 * relative_error(usual[name], exact[name]) + 1e-3
            assert relative_error(ours, exact[name]) <= allowed, (name, slots)
