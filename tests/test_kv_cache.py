"""Caches are segments of a pool of slots: no two share a slot, contents stay as pools grow and requests come and go,
and rows attend to what they see."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from fledge.drafts import kv_cache
from fledge.drafts.kv_cache import CacheRows, KVCache, PromptRows, SlotPool, TreeRows
from fledge.ops.attention_tree import Visible

INTERRUPTED = {SlotPool.reserve, SlotPool.release, SlotPool._set_buffer, SlotPool._fit, KVCache.select}
LAYERS, G, H, D = 2, 2, 4, 3


def new_pool() -> SlotPool:
    return SlotPool(LAYERS, G, D, torch.device("cpu"), torch.float64)


def write(rows: CacheRows, layer: int, k_MGd: Tensor, v_MGd: Tensor) -> None:
    """Writes the rows' keys and values to their slots."""
    for buffer, new in zip(rows.cache.pool.buffer[layer], (k_MGd, v_MGd), strict=True):
        buffer.index_copy_(1, rows.slot_M, new.transpose(0, 1))


@torch.inference_mode()
def write_numbers(rows: CacheRows, numbers: Sequence[int]) -> None:
    """Writes rows whose keys are a number and whose values are its negative, plus a half in the second layer."""
    for layer in range(LAYERS):
        keys_MGd = (torch.tensor(numbers).double() + layer / 2)[:, None, None].expand(-1, G, D)
        write(rows, layer, keys_MGd, -keys_MGd)


def numbers_of(cache: KVCache) -> list[list[int]]:
    """The numbers in the committed slots of each sequence."""
    found = []
    for start, length in zip(cache.start_B.tolist(), cache.lengths, strict=True):
        held = cache.pool.buffer[..., start : start + length, :]
        numbers = held[0, 0, 0, :, 0]
        for layer, (x, sign) in itertools.product(range(LAYERS), enumerate((1, -1))):
            assert torch.equal(held[layer, x], sign * (numbers + layer / 2)[:, None].expand(G, -1, D))
        found.append(numbers.int().tolist())
    return found


def tree_rows(cache: KVCache, n: int) -> TreeRows:
    return TreeRows(cache, n, Visible(torch.ones(len(cache.segments), n, n, dtype=torch.bool)))


def filled(pool: SlotPool, sizes: Sequence[int], counts: Sequence[int], first: int = 0) -> KVCache:
    """A cache whose sequences hold counts[b] of the numbers from `first` on."""
    cache = KVCache(pool, sizes)
    write_numbers(PromptRows(cache, counts), range(first, first + sum(counts)))
    cache.keep(None, torch.tensor(counts))
    return cache


@pytest.fixture(autouse=True)
def as_decoding() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """New pools have one slot, so that they grow with every segment."""
    monkeypatch.setattr(kv_cache, "MIN_SLOTS", 1)


def interrupted_at(line: int, work: Callable[[], None]) -> bool:
    """Whether `work` was interrupted before it had executed so many lines of the functions INTERRUPTED."""
    codes, lines = {inspect.unwrap(f).__code__ for f in INTERRUPTED}, itertools.count()

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("kept", [(), (1,)], ids=["all released", "one kept"])
def test_an_interruption_makes_no_slot_free_that_is_used(kept: Sequence[int], small_pools: None) -> None:
    """Wherever it comes, while a cache grows the pool and while its sequences are removed."""
    for line in itertools.count():
        pool = new_pool()
        old = filled(pool, [3, 4, 2], [2, 3, 1])
        caches: list[KVCache] = []

        def work(pool=pool, old=old, caches=caches) -> None:
            caches.append(filled(pool, [40], [2], first=10))
            old.select(kept)

        ended = not interrupted_at(line, work)
        old.select([i for i, _ in enumerate(old.segments)] if ended else [])  # as the engine closes a batch
        used = [c for c in (old, *caches) if c.segments]
        new = filled(pool, [5, 50], [5, 30], first=100)
        assert numbers_of(new) == [[*range(100, 105)], [*range(105, 135)]]
        assert pool.buffer.shape[3] == pool.layers[0][0].shape[1]
        taken = [slot for c in (*used, new) for first, size in c.segments for slot in range(first, first + size)]
        assert len(taken) == len(set(taken)) and max(taken) < pool.slots
        if caches:
            assert numbers_of(caches[0]) == [[10, 11]]
        if ended:
            break
    assert line > 20


def test_segments_are_allocated_released_and_merged(small_pools: None) -> None:
    """A segment takes the first free range that is large enough, and adjacent free ranges are one."""
    pool = new_pool()
    assert pool.allocate([4, 3, 5]) == [(0, 4), (4, 3), (7, 5)] and pool.slots == 12
    pool.release(4, 3)
    assert pool.allocate([4]) == [(12, 4)] and pool.slots == 16, "3 slots are too few"
    assert pool.allocate([2]) == [(4, 2)]
    pool.release(0, 4)
    pool.release(7, 5)
    assert pool.allocate([7]) == [(16, 7)], "4 and 6 slots are free, which are not adjacent"
    pool.release(4, 2)
    assert pool.allocate([12]) == [(0, 12)], "they are now"
    assert pool.slots == 23
    assert pool.allocate([2]) == [(23, 2)] and pool.slots == 28, "a pool grows by a quarter at least"


def test_segments_are_allocated_together_or_not_at_all(small_pools: None) -> None:
    """The pool grows once for several segments."""
    pool = new_pool()
    pool.allocate([4])
    assert pool.allocate([3, 9]) == [(4, 3), (7, 9)] and pool.slots == 16


def test_memory_is_freed_with_the_last_segment(small_pools: None) -> None:
    pool = new_pool()
    pool.reserve(10)
    assert pool.slots == 10
    a, b = pool.allocate([3, 4])
    assert pool.slots == 10
    pool.release(*a)
    assert pool.slots == 10
    pool.release(*b)
    assert pool.slots == pool.buffer.numel() == 0
    pool.allocate([6])
    buffer = pool.buffer
    pool.reserve(3)
    assert pool.buffer is buffer, "it has as many"


def test_segments_come_and_go_in_the_room_that_was_made(small_pools: None) -> None:
    """Without growth, whatever the sizes and the order; then another size, and more or larger ones than was said."""
    pool, draw = new_pool(), random.Random(0)
    kept = pool.allocate([3])
    for most, size in ((4, 10), (3, 7), (3, 12)):
        pool.make_room(most, size)
        buffer, taken = pool.buffer, []
        for _ in range(200):
            if len(taken) == most or (taken and draw.random() < 0.4):
                pool.release(*taken.pop(draw.randrange(len(taken))))
            else:
                taken += pool.allocate([draw.randint(1, size) for _ in range(draw.randint(1, most - len(taken)))])
        assert pool.buffer is buffer
        for segment in taken:
            pool.release(*segment)
    slots = pool.slots
    assert slots < 3 + 4 * 10 + 3 * 12
    many = pool.allocate([1] * (slots - 3))
    assert pool.slots == slots, "small segments are not widened where that does not fit"
    pool.allocate([20])
    assert pool.slots == slots + 20 and len({first for first, _ in [*kept, *many]}) == slots - 2


def test_a_new_pool_has_room_for_more_than_one_short_request() -> None:
    pool = new_pool()
    assert pool.allocate([5]) == [(0, 5)] and pool.slots == kv_cache.MIN_SLOTS == 256
    pool.allocate([300])
    assert pool.slots == 556


def test_growth_keeps_contents_and_adds_zeros(small_pools: None) -> None:
    pool = new_pool()
    cache = filled(pool, [4, 5], [3, 5])
    before = pool.buffer.clone()
    pool.reserve(20)
    assert torch.equal(pool.buffer[..., :9, :], before) and not pool.buffer[..., 9:, :].any()
    assert numbers_of(cache) == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_a_path_is_moved_to_the_front() -> None:
    """Each sequence keeps its own nodes and their number; what stands behind its kept ones in a path is not counted."""
    cache = filled(new_pool(), [20, 20, 20], [2, 0, 5])
    write_numbers(tree_rows(cache, 6), range(100, 118))
    cache.keep(torch.tensor([[0, 2, 5], [0, 0, 0], [0, 1, 4]]), torch.tensor([3, 1, 2]))
    assert numbers_of(cache) == [[0, 1, 100, 102, 105], [106], [2, 3, 4, 5, 6, 112, 113]]
    write_numbers(tree_rows(cache, 2), range(200, 206))
    cache.keep(None, torch.tensor([2, 0, 1]))
    assert numbers_of(cache) == [[0, 1, 100, 102, 105, 200, 201], [106], [2, 3, 4, 5, 6, 112, 113, 204]]


def test_sequences_leave_and_join(small_pools: None) -> None:
    """Sequences keep their slots when others leave or the order changes, and segments of those that left are free."""
    pool = new_pool()
    cache = filled(pool, [4, 6, 5], [2, 3, 4])
    cache.select([2, 0])
    assert numbers_of(cache) == [[5, 6, 7, 8], [0, 1]] and cache.segments == [(10, 5), (0, 4)]
    joining = filled(pool, [5, 3], [5, 1], first=20)
    assert joining.segments[0] == (4, 5)
    cache.append(joining)
    assert numbers_of(cache) == [[5, 6, 7, 8], [0, 1], [20, 21, 22, 23, 24], [25]]
    cache.select([])
    assert (cache.lengths, cache.segments, pool.slots) == ([], [], 0)
    cache.append(filled(pool, [2], [1], first=7))
    assert numbers_of(cache) == [[7]]


class Requests(RuleBasedStateMachine):
    """Requests come, go, are read and decoded, as lists of numbers and in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.numbers = new_pool(), itertools.count()
        self.cache, self.texts = KVCache(self.pool), []
        self.minimum, kv_cache.MIN_SLOTS = kv_cache.MIN_SLOTS, 4

    def teardown(self) -> None:
        kv_cache.MIN_SLOTS = self.minimum

    def some(self, n: int) -> list[int]:
        return list(itertools.islice(self.numbers, n))

    @rule(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3), data=st.data())
    def join(self, sizes: list[int], data: st.DataObject) -> None:
        counts = [data.draw(st.integers(0, size)) for size in sizes]
        joining = KVCache(self.pool, sizes)
        for part in (counts, [0] * len(sizes)):
            numbers = [self.some(n) for n in part]
            write_numbers(PromptRows(joining, part), [*itertools.chain(*numbers)])
            joining.keep(None, torch.tensor(part))
            self.texts += numbers if part is counts else []
        self.cache.append(joining)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), drafted=st.integers(1, 5), is_tree=st.booleans())
    def decode(self, data: st.DataObject, drafted: int, is_tree: bool) -> None:
        room = min(size - len(text) for (_, size), text in zip(self.cache.segments, self.texts, strict=True))
        if (n := min(room, drafted)) < 1:
            return
        numbers = [self.some(n) for _ in self.texts]
        write_numbers(tree_rows(self.cache, n), [*itertools.chain(*numbers)])
        nodes = st.lists(st.integers(1, n - 1), unique=True).map(sorted) if is_tree and n > 1 else st.just([])
        counts = data.draw(st.lists(st.integers(1, n), min_size=len(numbers), max_size=len(numbers)))
        paths = [[0, *data.draw(nodes)] if is_tree else list(range(count)) for count in counts]
        for text, new, path in zip(self.texts, numbers, paths, strict=True):
            text += [new[node] for node in path]
        padded = torch.tensor([[*path, *path[-1:] * (n - len(path))] for path in paths])
        self.cache.keep(padded if is_tree else None, torch.tensor([len(path) for path in paths]))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        staying = data.draw(st.lists(st.sampled_from(range(len(self.texts))), unique=True))
        self.cache.select(staying)
        self.texts = [self.texts[b] for b in staying]

    @rule(slots=st.integers(0, 60))
    def reserve(self, slots: int) -> None:
        self.pool.reserve(slots)

    @invariant()
    def each_has_its_text(self) -> None:
        assert numbers_of(self.cache) == self.texts

    @invariant()
    def each_slot_has_one_owner(self) -> None:
        """A slot is free or in one segment, and free ranges are as large as they can be."""
        free, used = list(self.pool._free), [(first, first + size) for first, size in self.cache.segments]
        owned = [slot for first, end in free + used for slot in range(first, end)]
        assert sorted(owned) == list(range(self.pool.slots))
        ranges = sorted(r for r in free if r[0] < r[1])
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRequests = Requests.TestCase


# -- attention --------------------------------------------------------------------------------------------------------


def attention(q_Hd: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The attention of one row to keys and values [n, G, d], by definition, [H, d]."""
    keys, values = (x.repeat_interleave(H // G, dim=1) for x in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", q_Hd, keys) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


def random_rows(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(rows, n, D, generator=generator, dtype=torch.float64) for n in (H, G, G))


@pytest.mark.parametrize("window", [None, 1, 3, 4, 50])
def test_prompts_attend_to_what_was_before(window: int | None) -> None:
    """Prompts of different lengths are read together and in parts."""
    cache = KVCache(new_pool(), [9, 14, 7])
    given: list[list[tuple[Tensor, ...]]] = [[], [], []]
    for counts in ([4, 1, 7], [5, 9, 0], [0, 4, 0]):
        rows, (q, k, v) = PromptRows(cache, counts), random_rows(sum(counts))
        write(rows, 1, k, v)
        found, at = rows.read(1, q, scale=0.7, window=window), 0
        for b, count in enumerate(counts):
            for i in range(at, at + count):
                given[b].append((k[i], v[i]))
                keys, values = (torch.stack(x) for x in zip(*given[b][-(window or 99) :], strict=True))
                torch.testing.assert_close(found[i], attention(q[i], keys, values, 0.7))
            at += count
        cache.keep(None, torch.tensor(counts))
    assert cache.lengths == [9, 14, 7]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
def test_nodes_attend_to_their_paths(window: int | None) -> None:
    """A node sees the committed tokens and its ancestors, or of these the last ones that a window has, also if a path
    is longer than the window."""
    parents, (k_P, v_P) = [[-1, 0, 0, 1, 3, 4], [-1, 0, 1, 2, 3, 0]], random_rows(5)[1:]
    paths = [[], []]
    for b, of in enumerate(parents):
        for n, parent in enumerate(of):
            paths[b].append([*(paths[b][parent] if n else []), n])
    lengths, N = [4, 1], 6
    cache = KVCache(new_pool(), [20, 20])
    write(PromptRows(cache, lengths), 0, k_P, v_P)
    cache.keep(None, torch.tensor(lengths))
    visible_BNN = torch.tensor([[[m in path for m in range(N)] for path in of] for of in paths])
    position_BN = cache.length_B[:, None] + visible_BNN.sum(-1) - 1
    q, k, v = random_rows(2 * N)
    rows = TreeRows(cache, N, Visible(visible_BNN), position_BN)
    write(rows, 0, k, v)
    found = rows.read(0, q, window=window)
    for b, n in itertools.product(range(2), range(N)):
        before, nodes = slice(4 * b, 4 * b + lengths[b]), [N * b + m for m in paths[b][n]]
        keys, values = (torch.cat([x[before], y[nodes]])[-(window or 99) :] for x, y in ((k_P, k), (v_P, v)))
        torch.testing.assert_close(found[N * b + n], attention(q[N * b + n], keys, values, D**-0.5))


def test_later_rows_attend_to_earlier_ones_behind_the_committed() -> None:
    """Rows of a second pass, none of which were committed before, see those of the first that they are told to see."""
    cache = filled(new_pool(), [12, 12], [0, 0])
    q, k, v = random_rows(4)
    write(TreeRows(cache, 2, Visible(torch.ones(2, 2, 2, dtype=torch.bool))), 0, k, v)
    more = random_rows(5)
    q, k2, v2 = (x[:2] for x in more)
    seen = torch.tensor([[[True, False, True]], [[False, True, True]]])
    rows = TreeRows(cache, 1, Visible(seen), slot_Bn=cache.next_slots(3)[:, 2:])
    write(rows, 0, k2, v2)
    found = rows.read(0, q)
    for b, first in ((0, 0), (1, 3)):
        keys, values = torch.stack([k[first], k2[b]]), torch.stack([v[first], v2[b]])
        torch.testing.assert_close(found[b], attention(q[b], keys, values, D**-0.5))
