"""Windows, packed rows, row addresses through the epochs, and the draft vocabulary: no token is lost, repeated or
mixed up."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.data.documents import Document, windows
from fledge.data.pack import FILLER_LENGTH, Rows, make_row, pack
from fledge.data.record import Record
from fledge.data.spans import training_documents
from fledge.data.template import ChatTemplate
from fledge.data.tokenize import make_documents
from fledge.train.setup.draft import choose_vocabulary
from support.rows import live_by_definition
from support.targets import tiny_tokenizer


def document(spans: list[int], first: int = 0) -> Document:
    """A document with the tokens first, first + 1, ... and the given spans."""
    tokens = np.arange(first, first + len(spans), dtype=np.int32)
    return Document(tokens, np.array(spans, dtype=np.int32))


def some(*lengths: int) -> list[Document]:
    """Documents of the given lengths. All tokens but the first are in one span; no token id occurs twice."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [document([-1] + [0] * (n - 1), a) for n, a in zip(lengths, starts, strict=True)]


def live(d: Document) -> set[int]:
    """The tokens of a document's slots that are live at step 0, by definition."""
    return {int(d.tokens[t]) for t, _ in live_by_definition(d, 1)}


SPANS = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=8).map(
    lambda runs: [i if on else -1 for i, (on, n) in enumerate(runs) for _ in range(n)]
)

# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_long_document_is_cut_and_nothing_is_lost():
    whole = document([-1] * 3 + [0] * 20)
    parts = windows(whole, 10)
    assert [len(p.tokens) for p in parts] == [10, 10, 3]
    assert np.array_equal(np.concatenate([p.tokens for p in parts]), whole.tokens)
    assert np.array_equal(np.concatenate([p.spans for p in parts]), whole.spans)
    for part in parts:
        n = len(part.tokens)
        assert make_row([part], 10).position_T[:n].tolist() == list(range(n))


def test_a_document_that_fits_stays_whole():
    whole = document([-1, 0, 0])
    assert [d.tokens.tolist() for d in windows(whole, 3)] == [[0, 1, 2]]


def test_windows_without_live_slots_are_dropped():
    silent, single = [-1] * 4, [-1, 0, -1, -1]
    assert [d.tokens.tolist() for d in windows(document([*silent, -1, 0, 0, 0, *single]), 4)] == [[4, 5, 6, 7]]
    assert windows(document([-1, 0, 1, 2]), 4) == []  # three spans of one token: x_{t+1}, x_{t+2} are never in one
    assert windows(document([0, 0]), 4) == []  # the slot before the first token has no hidden state


@settings(max_examples=200, deadline=None)
@given(SPANS, st.integers(1, 9))
def test_windows_keep_every_slot_that_fits_into_one(spans, length):
    whole = document(spans)
    parts = windows(whole, length)
    kept = set().union(*(live(p) for p in parts))
    assert kept == {t for t in live(whole) if t // length == (t + 2) // length}
    assert all(live(p) and len(p.tokens) <= length for p in parts)
    assert [t for p in parts for t in p.tokens.tolist()] == sorted({t for p in parts for t in p.tokens.tolist()})


# -- packing ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(0, 9), st.integers(1, 8))
def test_every_document_is_packed_once_and_no_row_overflows(lengths, seed, open_rows):
    rows = pack(some(*lengths), 50, seed, open_rows)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= 50 for row in rows)


def test_packing_is_decided_by_the_seed():
    documents = some(*(random.Random(i).randrange(5, 60) for i in range(60)))
    first, again, other = (pack(documents, 100, seed) for seed in (1, 1, 2))
    assert first == again
    assert sorted(map(sorted, first)) != sorted(map(sorted, other))


@pytest.mark.parametrize("longest", [100, 512])
def test_rows_are_nearly_full(longest):
    lengths = [random.Random(7 + i).randrange(10, longest) for i in range(600)]
    rows = pack(some(*lengths), 512, seed=0)
    assert len(rows) <= math.ceil(1.06 * sum(lengths) / 512)


def test_the_fullest_row_that_fits_is_chosen():
    """In rows of 10 that hold 6 and 7, best fit adds 3 to 7 and 4 to 6; first fit may need a third row."""
    drawn = {seed: pack(some(6, 7, 3, 4), 10, seed) for seed in range(40)}
    large_first = [rows for seed, rows in drawn.items() if set(shuffled(4, seed)[:2]) == {0, 1}]
    assert len(large_first) > 3
    assert all({tuple(sorted(row)) for row in rows} == {(0, 3), (1, 2)} for rows in large_first)


def shuffled(n: int, seed: int) -> list[int]:
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a document of 11 tokens does not fit a row of 10"):
        pack(some(3, 11), 10, seed=0)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_lays_documents_out_and_fills_its_tail():
    row = make_row([document([-1, 0, 0], 10), document([-1, -1], 20), document([0, 0, -1, 1, 1], 30)], 13)
    assert row.token_T.tolist() == [10, 11, 12, 20, 21, 30, 31, 32, 33, 34, 0, 0, 0]
    assert row.span_T.tolist() == [-1, 0, 0, -1, -1, 1, 1, -1, 2, 2, -1, -1, -1]
    assert row.position_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert row.doc_T.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, -1, -1, -1]
    assert row.documents() == [(0, 3), (3, 5), (5, 10), (10, 13)] and row.without_filler() == [(0, 3), (3, 5), (5, 10)]
    assert {t.dtype for t in (row.token_T, row.span_T, row.position_T, row.doc_T)} == {torch.int32}


def test_filler_is_split_into_short_documents():
    """Filler of any length is split, so that attention over it costs no more than over real documents."""
    row = make_row(some(3), 3 + 2 * FILLER_LENGTH + 5)
    edges = [0, 3, 3 + FILLER_LENGTH, 3 + 2 * FILLER_LENGTH, 3 + 2 * FILLER_LENGTH + 5]
    assert row.documents() == list(pairwise(edges)) and row.without_filler() == [(0, 3)]
    assert all(row.position_T[a:b].tolist() == list(range(b - a)) for a, b in row.documents())


def test_a_full_row_has_no_filler():
    row = make_row(some(3, 4), 7)
    assert row.documents() == [(0, 3), (3, 7)] and int(row.doc_T.max()) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=4), st.integers(0, 5))
def test_a_row_is_live_where_its_documents_are_and_never_in_the_filler(many, filler):
    documents = [document(spans, 100 * i) for i, spans in enumerate(many)]
    row = make_row(documents, sum(map(len, many)) + filler)
    slots = row.live(3)
    assert sorted(row.token_T[slots[0]].tolist()) == sorted(set().union(*map(live, documents)))
    for k, slots_S in enumerate(slots):
        for t in slots_S.tolist():
            read = row.span_T[t + 1 : t + 3 + k]
            assert len(set(read.tolist())) == 1 and read[0] >= 0 and row.doc_T[t] == row.doc_T[t + 2 + k]
    held = [s for s in row.span_T.unique().tolist() if s >= 0]
    assert len(held) == sum(len(np.unique(d.spans[d.spans >= 0])) for d in documents), "two documents share a span id"


def test_addresses_run_through_the_epochs():
    lengths = [random.Random(i).randrange(3, 30) for i in range(20)]
    rows = Rows(some(*lengths), 32, seed=5)
    place, epochs = (0, 0), {}
    while place[0] < 3:
        epochs.setdefault(place[0], []).append((place, rows[place], rows.tokens(place)))
        place = rows.next(place)
    for epoch, seen in epochs.items():
        assert [p for p, _, _ in seen] == [(epoch, i) for i in range(len(rows.epoch(epoch)))]
        tokens = [t for _, row, n in seen for t in row.token_T[:n].tolist()]
        assert sorted(tokens) == list(range(sum(lengths))), "an epoch does not contain every document exactly once"
    assert rows.epoch(0) != rows.epoch(1) != rows.epoch(2)
    again = Rows(some(*lengths), 32, seed=5)
    place, row, _ = epochs[1][2]
    assert torch.equal(again[place].token_T, row.token_T), "the row differs when it is made again"
    assert torch.equal(rows[place].token_T, row.token_T)
    assert Rows(some(*lengths), 32, seed=6).epoch(0) != rows.epoch(0)


# -- from records to documents ----------------------------------------------------------------------------------------


def talk(answer: str) -> Record:
    return Record("here", messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}])


def test_the_report_counts_documents_and_refused_records():
    chats = ChatTemplate(tiny_tokenizer(), [1])
    bad, calls = Record("bad", messages=[{"role": "user", "content": "x"}]), []
    records = [talk("A young bird."), talk("It tries its wings, falls, and tries again. " * 3), bad]
    documents, report = make_documents(records, chats, 32, skip_bad=True, advance=lambda: calls.append(1))
    whole = [d for r in records[:2] for d in training_documents(chats, r)]
    assert (report.records, report.refused, report.windowed, len(calls)) == (3, 1, 1, 3)
    assert report.documents == len(documents) == 1 + len(windows(whole[1], 32)) > 2
    assert report.tokens == sum(len(d.tokens) for d in documents)
    assert report.supervised == sum(int((d.spans >= 0).sum()) for d in documents)
    assert "3 records" in str(report) and "1 refused" in str(report) and "1 longer than a window" in str(report)
    assert "the first because: bad has no assistant message to train on" in str(report)
    with pytest.raises(ValueError, match="bad has no assistant message"):
        make_documents(records, chats, 32)
    with pytest.raises(ValueError, match="every record was refused, the first because: bad has no assistant message"):
        make_documents([bad, bad], chats, 32, skip_bad=True)
    _, report = make_documents(records, chats, 32, skip_bad=True, skipped=["line 9 says nothing"])
    assert (report.records, report.refused, report.first_refusal) == (4, 2, "line 9 says nothing")


def test_data_without_live_slots_is_refused():
    with pytest.raises(ValueError, match="no record has an assistant turn of two or more tokens"):
        make_documents([talk("")], ChatTemplate(tiny_tokenizer(), [1]), 32)


# -- the draft vocabulary ---------------------------------------------------------------------------------------------


def spoken(tokens: list[int], spans: list[int]) -> Document:
    return Document(np.array(tokens, dtype=np.int32), np.array(spans, dtype=np.int32))


def test_the_most_frequent_supervised_tokens_are_chosen_ascending():
    documents = [spoken([9, 9, 9, 5, 5, 3], [-1, -1, -1, 0, 0, 0]), spoken([5, 7, 3, 8], [-1, 0, 0, 0])]
    ids, coverage = choose_vocabulary(documents, 10, 2)  # counts: 3 and 5 twice, 7 and 8 once
    assert ids.tolist() == [3, 5] and ids.dtype == torch.int64
    assert coverage == 4 / 6


def test_ties_go_to_the_lower_id_and_kept_ids_come_first():
    documents = [spoken([8, 2, 6, 4], [0, 0, 0, 0])]
    assert choose_vocabulary(documents, 10, 3)[0].tolist() == [2, 4, 6]
    all_alike = [spoken(list(range(9_999, -1, -1)), [0] * 10_000)]
    assert choose_vocabulary(all_alike, 10_000, 5_000)[0].tolist() == list(range(5_000))
    ids, coverage = choose_vocabulary(documents, 10, 3, keep=[9, 12, -1])  # ids outside the vocabulary are ignored
    assert ids.tolist() == [2, 4, 9] and coverage == 0.5
    assert choose_vocabulary(documents, 10, 1, keep=[9, 7])[0].tolist() == [7]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=60), st.integers(1, 20), st.sets(st.integers(0, 19), max_size=3)
)
def test_the_chosen_vocabulary_has_the_highest_coverage(tokens, size, keep):
    ids, coverage = choose_vocabulary([spoken(tokens, [0] * len(tokens))], 20, size, keep)
    assert ids.tolist() == sorted(set(ids.tolist())) and len(ids) == size
    free = max(size - len(keep), 0)
    counts = sorted((tokens.count(i) for i in range(20) if i not in keep), reverse=True)
    best = sum(counts[:free]) + sum(tokens.count(i) for i in ids.tolist() if i in keep)
    assert coverage == pytest.approx(best / len(tokens))
    assert len(keep) > size or keep <= set(ids.tolist())


def test_documents_are_counted_together_in_bounded_groups(monkeypatch):
    """A count is as long as the vocabulary, so one count per document would take a minute for 200,000 documents."""
    from fledge.train.setup import draft

    counted, bincount = [], np.bincount
    monkeypatch.setattr(np, "bincount", lambda x, **k: counted.append(len(x)) or bincount(x, **k))
    documents = [spoken([i % 10, (i * i) % 10], [-1, 0]) for i in range(1_000)]
    together = choose_vocabulary(documents, 10, 4)
    assert counted == [1_000]
    monkeypatch.setattr(draft, "TOKENS_PER_CHUNK", 300)  # documents of two tokens, one of them supervised
    ids, coverage = choose_vocabulary(documents, 10, 4)
    assert counted == [1_000, *[150] * 6, 100]
    assert ids.tolist() == together[0].tolist() and coverage == together[1]
    with pytest.raises(ValueError, match="has token id 9, but the target's vocabulary ends at 8"):
        choose_vocabulary(documents, 9, 3)


def test_sizes_and_tokens_outside_the_vocabulary_are_refused():
    documents = [spoken([1, 9], [-1, 0])]
    for size in (0, -1, 11):
        with pytest.raises(ValueError, match=rf"--draft-vocab {size} is outside 1\.\.10"):
            choose_vocabulary(documents, 10, size)
    with pytest.raises(ValueError, match="has token id 9, but the target's vocabulary ends at 8"):
        choose_vocabulary(documents, 9, 3)
    ids, coverage = choose_vocabulary([spoken([1], [-1])], 10, 10)
    assert ids.tolist() == list(range(10)) and coverage == 0.0
