"""Decoding kernels against their definitions: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fledge.ops.attention_tree import (
    COUNTERS,
    Visible,
    VisibleBits,
    VisibleChain,
    pack_bits,
    tree_attention,
    tree_attention_reference,
)
from fledge.ops.device import computed_by, has_kernels
from fledge.ops.layer import add_rms_norm, join_embedding, rope_to_cache, silu_mul_fused
from fledge.ops.topk import MOST, argmax_rows, largest, likeliest
from support.devices import by_both, distance, needs_triton

needs_triton()

from fledge.ops import attention_tree_triton as kernels  # noqa: E402  (needs_triton skips before it)

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter neither rounds nor multiplies bfloat16
POISON = 1e4  # in the slots that nobody may see
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm


def chain_or_tree(B: int, S: int, J: int, generator: torch.Generator) -> Tensor:
    """Random ancestors among J >= S new slots, [B, S, J]: each row sees itself, and slots before it."""
    seen = torch.rand(B, S, J, generator=generator) < 0.4
    return seen.tril(-1) | torch.eye(S, J, dtype=torch.bool)


class Case:
    """Arguments of a call with random values, in pools of several layouts, and the slots that hold POISON."""

    def __init__(
        self, lengths: list[int], S: int, H: int, G: int, d: int, dtype: torch.dtype, J: int | None = None,
        integers: torch.dtype = torch.int64, layout: str = "GPd", seed: int = 0, chain: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        B, J = len(lengths), S if J is None else J
        gap = 5  # between the sequences, so that none starts at a multiple of a block
        ends = torch.tensor([gap + n + J for n in lengths]).cumsum(0)
        P = int(ends[-1]) + gap
        length = torch.tensor(lengths)
        start = ends - length - J
        visible, self.last = chain_or_tree(B, S, J, generator), None
        if chain:
            self.last = torch.randint(J, (B, S), generator=generator).to(DEVICE, integers)
            visible = VisibleChain(self.last.cpu(), J).mask_BSJ
        used = torch.zeros(P, dtype=torch.bool)
        for b in range(B):
            used[start[b] : start[b] + length[b]] = True
            used[start[b] + length[b] : ends[b]] = visible[b].any(0)
        pools = []
        for name in ("keys", "values"):
            pool = torch.randn(G, P, d, generator=generator, dtype=torch.float64)
            pool[:, ~used] = POISON
            if layout == "PGd" and name == "values":  # the two may differ
                pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
            elif layout == "wide":  # as a view of a pool with more heads and slots
                pool = torch.cat((pool, pool), 1).repeat(2, 1, 1)[:G, :P]
            pools.append(pool)
        self.q, (self.keys, self.values) = torch.randn(B, S, H, d, generator=generator, dtype=torch.float64), pools
        self.q, self.keys, self.values = (x.to(DEVICE, dtype) for x in (self.q, self.keys, self.values))
        self.start, self.length = (x.to(DEVICE, integers) for x in (start, length))
        self.visible = visible.to(DEVICE)
        self.position = (length[:, None] + visible.sum(-1) - 1).to(DEVICE, integers)

    def ours(self, impl: str = "triton", **options) -> Tensor:
        visible = Visible(self.visible) if self.last is None else VisibleChain(self.last, self.visible.shape[2])
        with computed_by(impl):
            return tree_attention(self.q, self.keys, self.values, self.start, self.length, visible, **options)

    def exact(self, window: int | None = None, scale: float | None = None) -> Tensor:
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        q, keys, values = (x.double() for x in (self.q, self.keys, self.values))
        return tree_attention_reference(
            q, keys, values, self.start, self.length, self.visible, scale, window, self.position
        )

    def check(self, impl: str = "triton", counters: Tensor | None = None, **options) -> None:
        positions = {"position_BS": self.position} if options.get("window") else {}
        found = self.ours(impl, counters=counters, **options, **positions)
        assert found.shape == self.q.shape and found.dtype == self.q.dtype and found.is_contiguous()
        assert distance(found, self.exact(**options)) <= TOLERANCE.get(self.q.dtype, 1e-12)


SMALL = [
    ([0], 1, 4, 4, 16, {}),
    ([65], 1, 6, 2, 24, {}),
    ([63, 0, 130], 5, 7, 1, 16, {"J": 9, "integers": torch.int32, "layout": "PGd"}),
    ([33, 64], 3, 4, 2, 80, {"layout": "wide"}),
    ([40], 24, 2, 2, 32, {"layout": "PGd"}),
]


@pytest.mark.parametrize(("lengths", "S", "H", "G", "d", "options"), SMALL)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_attention(lengths, S, H, G, d, options, window, dtype) -> None:
    """Values of the kernel; the slots that no row sees hold large numbers."""
    Case(lengths, S, H, G, d, dtype, **options).check(window=window)


@pytest.mark.parametrize("J", [1, 31, 32, 33, 63, 64, 65, 130])
def test_words_of_masks(J: int) -> None:
    """Bit by bit; rows and entries may be strided."""
    generator = torch.Generator().manual_seed(J)
    for B, S in ((1, 1), (2, 3), (1, 40)):
        mask = torch.rand(B, S, J, generator=generator) < 0.5
        mask[0, 0] = True
        wide = torch.cat((mask, mask), 2).to(DEVICE)[..., :J]
        for strided in (wide, wide.transpose(1, 2).contiguous().transpose(1, 2), wide[:, :1].expand(B, 2, J)):
            words = pack_bits(strided)
            assert words.shape == (*strided.shape[:2], -(-J // 64)) and words.dtype == torch.int64
            for row, packed in zip(strided.flatten(0, 1).tolist(), words.flatten(0, 1).tolist(), strict=True):
                assert sum(bit << j for j, bit in enumerate(row)) == sum(
                    w % 2**64 << 64 * k for k, w in enumerate(packed)
                )
            more = torch.cat((words, torch.full_like(words, -1)), 2)  # words behind the last one are not read
            assert torch.equal(VisibleBits(more, J).mask_BSJ, strided)


@pytest.mark.parametrize("S", [31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("window", [None, 16])
def test_new_slots_across_words(S: int, window: int | None) -> None:
    """Blocks of slots begin anywhere in a word, before the first one, and in the last; for few and for many rows."""
    for length in (0, 1, 64, 95):
        for dtype in (torch.float32, HALF):
            Case([length], S, 2, 1, 16, dtype).check(window=window)
    Case([40], 2, 2, 1, 16, torch.float32, J=S + 70).check(window=window)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_chains(window: int | None, integers: torch.dtype) -> None:
    """Rows that see the new slots up to one; the rows' stride may be 0."""
    for lengths, S, J in (([0], 1, 1), ([63, 130, 0], 3, 9), ([40], 33, 70), ([65, 3], 70, 70)):
        case = Case(lengths, S, 4, 2, 16, HALF, J=J, integers=integers, chain=True)
        case.check(window=window)
        found = case.ours("definition", window=window, position_BS=case.position)
        assert distance(found, case.exact(window)) <= TOLERANCE[HALF]
    case = Case([50, 9], 5, 2, 2, 16, torch.float32, integers=integers, chain=True)
    case.last = torch.arange(5, device=DEVICE, dtype=integers).expand(2, 5)
    case.visible = torch.ones(2, 5, 5, dtype=torch.bool, device=DEVICE).tril()
    for x in (case.keys, case.values):  # all new slots are seen now
        x[x == POISON] = 1.0
    case.check()


@pytest.mark.parametrize(("lengths", "S", "H", "G", "d", "options"), SMALL)
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
def test_the_definition_with_torchs_attention(lengths, S, H, G, d, options, window) -> None:
    for dtype in (torch.float64, torch.float32):
        Case(lengths, S, H, G, d, dtype, **options).check("definition", window=window)


@pytest.mark.parametrize("processors", [1, 3, 8, 500])
def test_shares(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One share, some, and more than a sequence has blocks: some programs then have nothing to read."""
    monkeypatch.setattr(kernels, "_processors", lambda device: processors)
    for window in (None, 1, 40):
        Case([200, 7], 2, 2, 1, 16, torch.float32).check(window=window, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_calls_share_counters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters are zeros after calls with several numbers of programs and shares, whose results are those of calls
    with counters of their own, bit by bit."""
    monkeypatch.setattr(kernels, "_processors", lambda device: 30)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    for lengths, S, H in (([500], 3, 2), ([300, 7, 0], 40, 4), ([500], 3, 2), ([70], 1, 2)):
        case = Case(lengths, S, H, 2, 16, dtype)
        case.check(counters=counters)
        assert not counters.any()
        assert torch.equal(case.ours(counters=counters), case.ours())


def test_the_number_of_shares() -> None:
    assert kernels.share_count(8, 10**6, 64, 264) == 33
    assert kernels.share_count(8, 256, 64, 264) == 4  # a small pool
    assert kernels.share_count(1, 10**6, 64, 264) == kernels.MOST_SHARES
    assert kernels.share_count(500, 10**6, 64, 264) == 1
    assert [kernels.share_count(8, 10**6, 64, n, apart=True) for n in (264, 255, 8, 1)] == [32, 16, 1, 1]


def test_tiles_of_large_trees_depend_on_the_context() -> None:
    large = kernels.LARGE
    assert kernels.tiles_for(240, 128, HALF, large, 16_384, 8, False).rows == 128
    assert kernels.tiles_for(240, 128, HALF, large, 1024, 8, False).rows == 64
    assert kernels.tiles_for(240, 256, HALF, large, 16_384, 8, False).rows == 64, "heads that fill the registers"
    assert kernels.tiles_for(240, 128, HALF, large // 2, 16_384, 8, False).rows == 64, "little shared memory"
    assert kernels.tiles_for(32, 128, HALF, large, 16_384, 8, False).rows == 32


def test_many_shares_are_combined_apart() -> None:
    """Of few sequences with long contexts, whose rows fit in one block."""
    large = kernels.LARGE
    for chain in (True, False):
        assert kernels.tiles_for(32, 128, HALF, large, 16_384, 16, chain).combine_apart
        for rows, slots, heads, shared in ((32, 1024, 8, large), (32, 16_384, 24, large), (32, 16_384, 8, large // 2)):
            assert not kernels.tiles_for(rows, 128, HALF, shared, slots, heads, chain).combine_apart
        assert not kernels.tiles_for(240, 128, HALF, large, 16_384, 8, chain).combine_apart


def test_tiles_of_chains() -> None:
    """Their blocks may have more slots than a word has bits; those of rows that see slots by a mask may not."""
    large = kernels.LARGE
    assert kernels.tiles_for(32, 128, HALF, large, 1024, 8, True).slots == 128
    assert kernels.tiles_for(32, 128, HALF, large, 1024, 64, True).slots == 64, "many sequences"
    for rows, d, dtype, shared in itertools.product((4, 32, 240), (64, 256), (HALF, torch.float32), (0, large)):
        assert kernels.tiles_for(rows, d, dtype, shared, 16_384, 8, False).slots <= kernels.WORD


@pytest.mark.parametrize(
    "given",
    [
        kernels.AttentionTiles(rows=16, slots=16, warps=4, stages=2, per_processor=2, at_once=1),
        kernels.AttentionTiles(rows=32, slots=64, warps=4, stages=2, apart=True, at_once=8),
        kernels.AttentionTiles(rows=128, slots=32, warps=8, stages=2, apart=True),
        kernels.AttentionTiles(rows=16, slots=16, warps=4, stages=2, per_processor=2, combine_apart=True, late=True),
        kernels.AttentionTiles(rows=32, slots=64, warps=4, stages=2, per_processor=100, apart=True, combine_apart=True),
    ],
    ids=lambda t: f"{t.rows}x{t.slots}",
)
def test_other_tiles(given: kernels.AttentionTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sweep asks for gives the same results."""
    monkeypatch.setattr(kernels, "tiles_for", lambda *_: given)
    Case([90, 0, 33], 7, 8, 2, 16, HALF).check(window=20)
    Case([90, 33], 7, 8, 2, 16, HALF, J=9, chain=True).check()
    Case([200, 7, 0], 3, 3, 1, 24, torch.float32).check(window=1, scale=0.3)  # some shares see nothing
    Case([5], 1, 2, 2, 16, HALF, chain=True).check()  # a single share


def test_wide_blocks_need_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "tiles_for", lambda *_: kernels.AttentionTiles(rows=32, slots=128, warps=8, stages=3))
    for window in (None, 20):
        Case([300, 0, 128, 33], 8, 8, 2, 16, HALF, chain=True).check(window=window)
    with pytest.raises(ValueError, match="blocks of 128 slots need a chain"):
        Case([300], 8, 8, 2, 16, HALF).check()


def test_a_window_on_a_long_chain() -> None:
    """The last rows see no slot of the prefix, and new slots in blocks before their own."""
    case = Case([20], 40, 2, 2, 16, torch.float32)
    case.visible = torch.ones(1, 40, 40, dtype=torch.bool, device=DEVICE).tril()
    case.position = case.length[:, None] + torch.arange(40, device=DEVICE)
    for x in (case.keys, case.values):  # all new slots are seen now
        x[x == POISON] = 1.0
    case.check(window=1)


def test_strided_queries_and_visibility() -> None:
    case = Case([50, 3], 3, 4, 2, 16, torch.float32)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.visible = case.visible.transpose(1, 2).contiguous().transpose(1, 2)
    case.check()
    case.visible = torch.cat((case.visible.contiguous(), torch.ones_like(case.visible)), 2)[..., :3]
    case.position = case.position.T.contiguous().T
    case.check(window=4)


def test_where_kernels_compute() -> None:
    assert has_kernels(torch.device("cuda"), torch.bfloat16) and has_kernels(torch.device("cuda:1"), torch.float32)
    assert not has_kernels(torch.device("cuda"), torch.float64) and not has_kernels(torch.device("cpu"), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[n] for n in (0, 1, 63, 64, 65, 513, 4000)] + [[513, 0, 4000, 64, 1]])
@pytest.mark.parametrize("S", [1, 8, 60])
@pytest.mark.parametrize("window", [None, 16])
def test_attention_on_a_gpu(lengths: list[int], S: int, window: int | None) -> None:
    for H, G, d in ((4, 4, 64), (6, 2, 80), (7, 1, 96), (32, 8, 128), (28, 4, 128)):
        Case(lengths, S, H, G, d, torch.bfloat16).check(window=window)
    for H, G in ((4, 2), (32, 8)):
        Case(lengths, S, H, G, 128, torch.bfloat16, J=S + 9, chain=True).check(window=window)
    Case(lengths, S, 4, 2, 256, torch.bfloat16, layout="PGd").check(window=window)
    Case(lengths, S, 8, 2, 128, torch.float16, J=70, layout="wide").check(window=window)
    for d in (128, 256):
        Case(lengths, S, 8, 2, d, torch.float32, layout="PGd").check(window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 8, 60])
def test_equal_calls_have_equal_results(S: int) -> None:
    """Many calls with the same counters, whose shares are done in any order."""
    case = Case([9000, 300], S, 32, 8, 128, torch.bfloat16)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    case.check(counters=counters)
    found = case.ours(counters=counters)
    assert all(torch.equal(case.ours(counters=counters), found) for _ in range(500))
    assert not counters.any()


def table(M: int, r: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of M random positions, with equal halves."""
    generator = torch.Generator().manual_seed(M)
    angle = torch.rand(M, r // 2, generator=generator, dtype=torch.float64).mul(6).repeat(1, 2)
    return angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


SHAPES = [
    (1, 64),
    (3, 100),
    pytest.param(60, 4096, marks=pytest.mark.gpu),
    pytest.param(8, 16384, marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, HALF]


@pytest.mark.parametrize(("M", "E"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(M: int, E: int, dtype: torch.dtype) -> None:
    wide, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(M, 2 * E), (M, E), (E,)]))
    x = wide[:, E:]  # rows may be strided
    for other in (None, residual):
        (normed, total), definition = by_both(add_rms_norm, x, other, weight, 1e-5)
        assert torch.equal(total, x if other is None else x + other)
        exact, _ = add_rms_norm(total.double(), None, weight.double(), 1e-5)
        assert normed.dtype == dtype and distance(normed, exact) <= TOLERANCE[dtype]
        for a, b in zip((normed, total), definition, strict=True):
            assert a.dtype == b.dtype and distance(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_the_definition_of_the_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight = randn(5, 100, dtype=dtype) * 0.02, randn(100, dtype=dtype, seed=1)  # small: eps has an effect
    expected = torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-4)
    tolerance = 1e-14 if dtype == torch.float64 else TOLERANCE[dtype]
    for mode in (torch.inference_mode(), torch.enable_grad()):  # what the first call keeps serves the second
        with mode:
            rows = x.clone().requires_grad_(torch.is_grad_enabled())
            with computed_by("definition"):
                normed, _ = add_rms_norm(rows, None, weight, 1e-4)
            assert normed.dtype == dtype and distance(normed.detach(), expected) <= tolerance
    normed.sum().backward()
    assert rows.grad is not None and bool(rows.grad.isfinite().all())


@pytest.mark.parametrize(("M", "E"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", ["", "token", "token and state"])
def test_join_embedding(normed: str, M: int, E: int, dtype: torch.dtype) -> None:
    wide, embedding = randn(M, 2 * E, dtype=dtype), randn(70, E, dtype=dtype, seed=1)
    gains = [randn(E, dtype=dtype, seed=i) if name in normed else None for i, name in enumerate(("token", "state"), 2)]
    token, state = torch.arange(M, device=DEVICE) * 37 % 70, wide[:, E:]  # rows may be strided
    wider = [None if gain is None else gain.double() for gain in gains]
    norms = [x if g is None else add_rms_norm(x, None, g, 1e-5)[0] for x, g in zip(
        (embedding.double()[token], state.double()), wider, strict=True
    )]  # fmt: skip
    row = torch.arange(2 * M + 1, device=DEVICE) * 5 % M  # states may be read several times, or not
    for impl in ("triton", "definition"):
        with computed_by(impl):
            found, read = join_embedding(token, state, embedding, *gains, 1e-5)
            chosen, read_again = join_embedding(token[row], state, embedding, *gains, 1e-5, row_M=row)
            expected, _ = join_embedding(token[row], state[row].contiguous(), embedding, *gains, 1e-5)
        assert found.dtype == dtype and distance(found, torch.cat(norms, -1)) <= TOLERANCE[dtype]
        assert torch.equal(read, state)
        if not normed:
            assert torch.equal(found, torch.cat((embedding[token], state), -1))
        assert torch.equal(chosen, expected) and torch.equal(read_again, state[row])


@pytest.mark.parametrize(("M", "width"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_fused(M: int, width: int, dtype: torch.dtype) -> None:
    x = randn(M, 2 * width, dtype=dtype)
    exact = torch.nn.functional.silu(x.double()[:, :width]) * x.double()[:, width:]
    for impl in ("triton", "definition"):
        with computed_by(impl):
            found = silu_mul_fused(x)
        assert found.shape == (M, width) and found.dtype == dtype and distance(found, exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("M", "H", "G", "d", "r"),
    [
        (1, 4, 2, 16, 16),
        (3, 3, 1, 24, 8),
        (2, 2, 2, 80, 32),
        (2, 9, 3, 16, 8),
        pytest.param(60, 32, 8, 128, 128, marks=pytest.mark.gpu),
        pytest.param(8, 28, 4, 96, 48, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("norms", ["", "q", "qk"])
@pytest.mark.parametrize("layout", ["GPd", "PGd"])
def test_rope_to_cache(M: int, H: int, G: int, d: int, r: int, norms: str, layout: str) -> None:
    """Queries, keys and values; the other slots keep what they hold."""
    P = 2 * M + 3
    slot = torch.randperm(P, generator=torch.Generator().manual_seed(M))[:M].to(DEVICE)
    for dtype in DTYPES:
        qkv = randn(M, (H + 2 * G) * d, dtype=dtype)
        gains = [randn(d, dtype=dtype, seed=i) if name in norms else None for i, name in enumerate("qk")]
        cos, sin = table(M, r, torch.float32)

        def results(impl: str, dtype: torch.dtype, qkv=qkv, gains=gains, cos=cos, sin=sin) -> list[Tensor]:
            keys = torch.full((G, P, d) if layout == "GPd" else (P, G, d), 7.0).to(DEVICE, dtype)
            keys, values = keys if layout == "GPd" else keys.transpose(0, 1), torch.full_like(keys, 7.0).view(G, P, d)
            cast = [None if x is None else x.to(dtype) for x in gains]
            tables = (cos.double(), sin.double()) if dtype == torch.float64 else (cos, sin)
            with computed_by(impl):
                q = rope_to_cache(qkv.to(dtype), *tables, H, keys, values, slot, *cast, 1e-6)
            return [q, keys, values]

        exact = results("definition", torch.float64)
        others = torch.ones(P, dtype=torch.bool).index_fill_(0, slot.cpu(), False).to(DEVICE)
        assert (exact[1][:, others] == 7).all() and not (exact[1][:, slot] == 7).any()
        for impl in ("triton", "definition"):
            for a, b in zip(results(impl, dtype), exact, strict=True):
                assert a.shape == b.shape and a.dtype == dtype and distance(a, b) <= TOLERANCE[dtype]
            _, keys, values = results(impl, dtype)
            assert (keys[:, others] == 7).all() and (values[:, others] == 7).all()
            assert torch.equal(values[:, slot].transpose(0, 1).flatten(1), qkv[:, (H + G) * d :])


@pytest.mark.parametrize("impl", ["definition", "triton"])
@pytest.mark.parametrize(("M", "n"), [(6, 1), (6, 2), (60, 4)])
def test_rows_share_their_rotation(M: int, n: int, impl: str) -> None:
    """Consecutive rows have one position; the rows of cos and sin may be strided."""
    qkv, slot = randn(M, 4 * 16, dtype=torch.float32), torch.arange(M, device=DEVICE)
    tables = [torch.cat((x, x), -1)[:, :16] for x in table(n, 16, torch.float32)]
    made = []
    for cos, sin in (tables, [x.repeat_interleave(M // n, 0) for x in tables]):
        keys, values = torch.zeros(2, 1, M, 16, device=DEVICE)
        with computed_by(impl):
            made.append((rope_to_cache(qkv, cos, sin, 2, keys, values, slot), keys, values))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_rope_to_cache_rotates_as_a_draft_does() -> None:
    """Against `apply_rope`, in float64."""
    from fledge.ops.rope import apply_rope

    qkv, (cos, sin) = randn(3, 4 * 8, dtype=torch.float64), table(3, 6, torch.float64)
    keys, values = torch.zeros(2, 1, 5, 8, dtype=torch.float64, device=DEVICE)
    q = rope_to_cache(qkv, cos, sin, 2, keys, values, torch.tensor([4, 0, 2], device=DEVICE))
    rotated = apply_rope(qkv.view(3, 4, 8)[:, :3], cos[:, None], sin[:, None])
    torch.testing.assert_close(q, rotated[:, :2])
    torch.testing.assert_close(keys[0, [4, 0, 2]], rotated[:, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_a_captured_graph_follows_the_device(window: int | None) -> None:
    """A replayed graph of writing and attending uses the lengths, slots, positions and visibility of the moment."""
    torch.use_deterministic_algorithms(False)  # the filling of new memory is no part of a graph
    B, S, H, G, d, P, dtype = 3, 8, 32, 8, 128, 6000, torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    keys, values = (randn(G, P, d, dtype=dtype, seed=i) for i in (1, 2))
    qkv, (cos, sin) = randn(B * S, (H + 2 * G) * d, dtype=dtype, seed=3), table(B * S, d, torch.float32)
    start = torch.tensor([0, 2000, 4000], device=DEVICE)
    length = torch.zeros(B, dtype=torch.int64, device=DEVICE)
    visible = torch.zeros(B, S, S, dtype=torch.bool, device=DEVICE)
    position, slot = (torch.zeros(B, S, dtype=torch.int64, device=DEVICE) for _ in range(2))
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)

    def call() -> Tensor:
        q = rope_to_cache(qkv, cos, sin, H, keys, values, slot.view(-1))
        return tree_attention(
            q.view(B, S, H, d), keys, values, start, length, Visible(visible), window=window, position_BS=position,
            counters=counters,
        )  # fmt: skip

    def set_inputs(lengths: list[int]) -> None:
        length.copy_(torch.tensor(lengths))
        visible.copy_(chain_or_tree(B, S, S, generator))
        position.copy_(length[:, None] + visible.sum(-1) - 1)
        slot.copy_((start + length)[:, None] + torch.arange(S, device=DEVICE))

    set_inputs([5, 10, 15])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([0, 1, 64], [1900, 63, 500], [3, 1500, 700]):
        set_inputs(lengths)
        qkv.normal_()
        graph.replay()
        found, pools = out.clone(), (keys.clone(), values.clone())
        with computed_by("definition"):
            q = rope_to_cache(qkv, cos, sin, H, keys, values, slot.view(-1)).view(B, S, H, d)
        assert distance(pools[0], keys) <= 1e-2 and torch.equal(pools[1], values)
        exact = tree_attention_reference(
            q.double(), keys.double(), values.double(), start, length, visible, d**-0.5, window, position
        )
        assert distance(found, exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (1, 20_000), (2, 3, 8193), (2, 8192), (2, 16_385)])
def test_argmax_of_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The first of equal largest numbers, also where it is the last number, all are -inf, or chunks have equal ones."""
    x = torch.randn(shape, device=DEVICE).to(dtype)
    tied, last, none = x.clone(), torch.full_like(x, -torch.inf), torch.full_like(x, -torch.inf)
    tied[..., 3] = tied[..., 5] = tied[..., -1] = 9.0
    last[..., -1] = -3.0
    assert (by_both(argmax_rows, tied)[0] == 3).all()
    for rows in (x, tied, last, none, x[..., ::2]):
        found, expected = by_both(argmax_rows, rows)
        assert torch.equal(found, expected)
        ids_V = torch.randperm(rows.shape[-1], device=DEVICE)
        assert all(torch.equal(found, ids_V[expected]) for found in by_both(argmax_rows, rows, ids_V))
    for rows in (torch.full_like(x, torch.nan), torch.where(x > 0, torch.nan, x)):
        found, _ = by_both(argmax_rows, rows)
        assert ((found >= 0) & (found < x.shape[-1])).all()


def in_order(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row and their places, the first of equal numbers first."""
    values, places = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], places[..., :k]


def check_largest(x: Tensor, k: int) -> None:
    """`largest` exactly, and the log-probabilities of `likeliest` up to rounding."""
    values, places = in_order(x, k)
    found, _ = by_both(largest, x, k)
    assert found[0].dtype == x.dtype and found[1].dtype == torch.int64
    assert torch.equal(found[0], values) and torch.equal(found[1], places)
    (logp, token), (plain, _) = by_both(likeliest, x, k)
    assert logp.dtype == torch.float32 and token.dtype == torch.int64 and torch.equal(token, places)
    exact = x.double().log_softmax(-1).gather(-1, places).float()
    torch.testing.assert_close(logp, exact, rtol=1e-6, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(logp, plain, rtol=1e-6, atol=1e-5, equal_nan=True)


LARGEST = [  # of one chunk and of several, of which the last may be shorter than k
    (1, 10),
    (20, 37),
    (2, 3, 2048),
    (4, 2051),
    (1, 7000),
    pytest.param((1, 32_000), marks=pytest.mark.gpu),
    pytest.param((10, 32_000), marks=pytest.mark.gpu),
    pytest.param((8, 10, 151_936), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("shape", LARGEST)
def test_the_largest_of_rows(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    """Equal numbers, zeros of both signs, all below zero, and fewer numbers above -inf than k, at either end or none;
    rows may be strided."""
    x = randn(*shape, dtype=dtype, seed=k)
    few, none, last = (torch.full_like(x, -torch.inf) for _ in range(3))
    few[..., 2] = few[..., 5] = 3.0
    last[..., -1] = -3.0
    wide = torch.cat((x, x), -1)
    for rows in (x, x.round(), -x.abs() - 1, torch.zeros_like(x) * x.sign(), few, last, none, wide[..., : x.shape[-1]]):
        check_largest(rows, k)
    check_largest(wide[..., ::2], k)


def test_the_largest_with_nan() -> None:
    """NaN comes first, whatever its sign; log-probabilities of its row are NaN, of other rows they are not."""
    x = randn(2, 3000, dtype=torch.float32)
    x[0, 7], x[0, 2999] = torch.nan, -torch.tensor(torch.nan)
    (values, places), _ = by_both(largest, x, 3)
    assert values.isnan().tolist() == [[True, True, False], [False] * 3] and places[0, :2].tolist() == [7, 2999]
    (logp, token), (plain, _) = by_both(likeliest, x, 3)
    assert logp[0].isnan().all() and torch.equal(token, places)
    torch.testing.assert_close(logp[1], plain[1])


def test_as_many_of_a_row() -> None:
    """As many as the kernels take, more, and no row."""
    x = randn(2, 2100, dtype=torch.float32)
    for k in (MOST, MOST + 1):
        check_largest(x, k)
    assert [y.shape for y in by_both(likeliest, x[:0], 3)[0]] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_more_likely_tokens_than_the_kernels_take(dtype: torch.dtype) -> None:
    """The kernels' log-probabilities, bit by bit, and no copy of the logits; NaN and infinite numbers count alike."""
    x = randn(6, 5000, dtype=dtype)
    x[1, 7], x[2, 9], x[3, :4990] = torch.nan, torch.inf, -torch.inf
    x[4] = -torch.inf
    with computed_by("triton"):
        few, more = likeliest(x, MOST)[0], likeliest(x, MOST + 9)[0]
        assert torch.equal(more[:, :MOST].nan_to_num(7.0), few.nan_to_num(7.0))
    plain = likeliest(x.cpu(), MOST + 9)[0]
    torch.testing.assert_close(more.cpu(), plain, rtol=1e-6, atol=1e-5, equal_nan=True)
    if x.is_cuda:
        large = torch.zeros(100, 100_000, dtype=dtype, device=x.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        likeliest(large, MOST + 9)
        assert torch.cuda.max_memory_allocated() - before < large.nbytes
