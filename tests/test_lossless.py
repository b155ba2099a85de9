"""Speculative decoding generates the same tokens as the target alone, and stops at the right place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.decode import verify
from fledge.decode.engine import Completion, Engine
from fledge.decode.load import load
from fledge.decode.propose import Proposer
from fledge.decode.rounds import Rounds, RoundState
from fledge.decode.text import TextStream
from fledge.drafts.kv_cache import KVCache
from fledge.targets.cache import TargetCache
from fledge.targets.native import NativeTarget
from fledge.targets.transformers import TransformersTarget
from fledge.train import objective
from fledge.train.objective import accepted_per_round
from fledge.train.row_pass import Objective
from fledge.types import Prompt, Sampling, Tree, Verdict
from support.decoding import SAMPLINGS, Remembers, assert_same, both, fit_head, prompts, spoken
from support.mutations import replace_function
from support.rows import row_of
from support.targets import (
    BOTH_IMPLEMENTATIONS,
    P_EAGLE,
    SLIDING,
    exact_target,
    features_for,
    greedy_by_transformers,
    read_alone,
    tiny_draft,
    tiny_target,
    tiny_tokenizer,
)


def draft_answer(monkeypatch: pytest.MonkeyPatch, truth: Sequence[int], wrong: float, seed: int = 0) -> None:
    """Makes the proposer draft the tokens of `truth` (prompt and answer), except that with probability `wrong` a token
    stays the one that the draft chose."""
    draw = random.Random(seed)

    def propose_answer(propose: Any, proposer: Proposer, state: RoundState) -> Tree:
        (tokens,), (length,) = propose(proposer, state).token_BN.tolist(), state.length_B.tolist()
        for k, place in enumerate(range(length + 1, len(truth)), start=1):
            if k < len(tokens) and draw.random() >= wrong:
                tokens[k] = truth[place]
        return Tree(torch.tensor([tokens]), None, len(tokens) - 1)

    replace_function(monkeypatch, Proposer, "propose", propose_answer)


def prompt_with_long_answer(engine: Engine, n: int, **options: Any) -> tuple[list[int], Completion]:
    """A prompt whose answer by the target alone has at least n tokens, and its first n tokens."""
    for prompt in prompts(50, seed=10):
        done = engine.generate(prompt, max_new_tokens=n, speculate=False, **options)
        if len(done.tokens) == n and len(set(done.tokens)) > n // 2:
            return prompt, done
    raise AssertionError(f"no prompt has an answer of {n} tokens")


def accepted(completions: Sequence[Completion]) -> list[int]:
    return [r.accepted for c in completions for r in c.trace.rounds]


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("vocabulary", [400, 150])
@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_greedy_is_vanilla(depth: int, vocabulary: int, native: bool) -> None:
    """With an untrained draft, which is almost always wrong, greedy decoding gives the same tokens (in float64)."""
    target = exact_target(native)
    engine = load(target, tiny_draft(target, draft_vocab_size=vocabulary), depth=depth)
    for prompt in prompts(6, seed=depth):
        assert_same(*both(engine, prompt, max_new_tokens=30))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mistral"])
@pytest.mark.parametrize(("depth", "native"), [(1, False), (3, False), (6, False), (3, True)])
def test_greedy_is_vanilla_when_drafts_are_good(
    family: str, depth: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are wrong at random places, rounds accept every number of tokens from 0 to `depth`, and the
    answer stays the same."""
    target = tiny_target(family, dtype=torch.float64, native=native)
    engine = load(target, tiny_draft(target, draft_vocab_size=250), depth=depth)
    done = []
    for i, prompt in enumerate(prompts(6, seed=depth)):
        plain = engine.generate(prompt, max_new_tokens=50, speculate=False)
        draft_answer(monkeypatch, prompt + plain.tokens, wrong=0.25, seed=i)
        fast = engine.generate(prompt, max_new_tokens=50)
        assert_same(fast, plain)
        done.append(fast)
    assert set(accepted(done)) == set(range(depth + 1))
    assert len(accepted(done)) < sum(len(c.tokens) for c in done)


@BOTH_IMPLEMENTATIONS
def test_greedy_in_float32(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the tokens are the same too, unless the target's two largest logits differ by less than 1e-3, where
    the rounding of another batch shape may swap them."""
    target = tiny_target(native=native)
    engine = load(target, tiny_draft(target), depth=4)
    same = 0
    for i, prompt in enumerate(prompts(12, seed=7)):
        plain = engine.generate(prompt, max_new_tokens=40, speculate=False)
        draft_answer(monkeypatch, prompt + plain.tokens, wrong=0.3, seed=i)
        fast = engine.generate(prompt, max_new_tokens=40)
        same += fast.tokens == plain.tokens
        if fast.tokens != plain.tokens:
            at = next(j for j, (a, b) in enumerate(zip(fast.tokens, plain.tokens, strict=False)) if a != b)
            logits, _ = read_alone(target, prompt + plain.tokens[:at])
            best = logits[-1].topk(2).values
            assert best[0] - best[1] < 1e-3
    assert same >= 11


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", SLIDING)
def test_vanilla_is_transformers(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a draft, the engine generates the tokens of transformers' greedy `generate`, on targets with
    sliding windows too: the last prompt is longer than the window, and rejected tokens are rolled back inside it."""
    target = tiny_target(dtype=torch.float64, native=native, **SLIDING[name])
    engine = load(target, tiny_draft(target), depth=5)
    for i, prompt in enumerate([*prompts(3, seed=3), prompts(1, seed=4)[0] * 20]):
        prompt = prompt[:60]
        theirs = greedy_by_transformers(target.model, prompt, 48)
        assert engine.generate(prompt, max_new_tokens=48, speculate=False).tokens == theirs
        draft_answer(monkeypatch, prompt + theirs, wrong=0.3, seed=i)
        assert engine.generate(prompt, max_new_tokens=48).tokens == theirs


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", SLIDING)
def test_rollback_is_exact(name: str, native: bool) -> None:
    """After tokens were not accepted, the cache gives the logits of a fresh cache that never held them."""
    target = tiny_target(dtype=torch.float64, native=native, **SLIDING[name])
    tokens = torch.randint(400, (300,), generator=torch.Generator().manual_seed(5))
    used, junk, before = target.new_cache([300]), random.Random(0), 40
    target.prefill([Prompt(tokens[:40].tolist())], used)
    for at in (41, 47, 55, 80, 120, 263):  # transformers' cache doubles its capacity in between
        wrong = torch.tensor([junk.choices(range(400), k=junk.randint(1, 9))])
        target.verify(Tree.chain(torch.cat([tokens[None, before:at], wrong], dim=1)), used)
        used.keep(None, torch.tensor([at - before]))
        assert used.lengths == [at]
        found, _ = target.verify(Tree.chain(tokens[None, at : at + 3]), used)
        direct, _ = read_alone(target, tokens[: at + 3].tolist())
        torch.testing.assert_close(found[0], direct[at:], rtol=0, atol=1e-11)
        used.keep(None, torch.tensor([0]))
        before = at


@pytest.mark.parametrize(("memory", "native"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_is_vanilla_at_the_same_seed(
    name: str, memory: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With coupled drafts, speculative sampling draws the same tokens as token-by-token sampling, and a logits
    processor that has state is called with the same prefixes in the same order, once each."""
    target = exact_target(native)
    engine = load(target, tiny_draft(target), depth=4)
    done = []
    for i, prompt in enumerate(prompts(4, seed=8)):
        seen = [(Remembers(),) if memory else () for _ in range(2)]
        slow, quick = (Sampling(**SAMPLINGS[name], processors=p) for p in seen)
        plain = engine.generate(prompt, max_new_tokens=40, sampling=slow, request=i, speculate=False)
        draft_answer(monkeypatch, prompt + plain.tokens, wrong=0.25, seed=i)
        fast = engine.generate(prompt, max_new_tokens=40, sampling=quick, request=i)
        assert_same(fast, plain)
        done.append(fast)
        if memory:
            shown = seen[0][0].prefixes
            assert shown == [tuple(prompt + plain.tokens[:j]) for j in range(len(plain.tokens))]
            assert seen[1][0].prefixes[: len(shown)] == shown
    assert {0, 4} <= set(accepted(done))


@pytest.mark.parametrize("vocabulary", [400, 150])
@pytest.mark.parametrize("mode", ["chain", "tree", "parallel"])
def test_coupled_drafts_guess_the_targets_draws(mode: str, vocabulary: int) -> None:
    """Where draft and target have the same distribution, every draw of the target is drafted that the draft's
    vocabulary has: here, with heads of zeros, all tokens are equally likely. Without a draft the text is the same."""
    depth = 2 if mode == "tree" else 4  # a deeper tree has no room for all levels of such tokens
    target = tiny_target(native=True)
    method = P_EAGLE if mode == "parallel" else {}
    draft = tiny_draft(target, draft_vocab_size=vocabulary, **method)
    for head in (target.head.weight, draft.lm_head.weight):
        head.data.zero_()
    engine = load(target, draft, depth=depth, mode=mode)
    options = dict(max_new_tokens=60, sampling=Sampling(temperature=0.7, seed=1))
    done = engine.generate(prompts(3, seed=2), **options)
    plain = engine.generate(prompts(3, seed=2), speculate=False, **options)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    drafted = set(draft.target_ids().tolist())
    for completion in done:
        at = 1  # the first token is that of the prompt's pass
        for r in completion.trace.rounds[:-1]:
            unknown = (i for i in range(depth) if completion.tokens[at + i] not in drafted)
            assert r.accepted == next(unknown, depth)
            at += r.accepted + 1
    assert {0, 1, 2} <= set(accepted(done)) or vocabulary == 400


def test_seeds_and_requests_differ() -> None:
    """Different seeds or request numbers draw different tokens; the same seed and number draw the same tokens."""
    engine = load(exact_target())
    prompt = prompts(1)[0]

    def sampled(seed: int, request: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.5, seed=seed)
        return tuple(engine.generate(prompt, max_new_tokens=20, sampling=sampling, request=request).tokens)

    drawn = {(s, r): sampled(s, r) for s in range(3) for r in range(3)}
    assert len(set(drawn.values())) == 9
    assert sampled(1, 2) == drawn[1, 2]


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("vocabulary", [400, 120])
def test_sampled_drafts_never_leave_the_target(vocabulary: int, native: bool) -> None:
    """With top_k=1 only one token is possible, so sampled drafts give the target's greedy tokens."""
    target = exact_target(native)
    engine = load(target, tiny_draft(target, draft_vocab_size=vocabulary), depth=3)
    for i, prompt in enumerate(prompts(5, seed=9)):
        plain = engine.generate(prompt, max_new_tokens=30, speculate=False)
        sampling = Sampling(temperature=1.0, top_k=1, draft="sample", seed=i)
        assert engine.generate(prompt, max_new_tokens=30, sampling=sampling).tokens == plain.tokens


def test_a_draft_equal_to_its_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling with q = p accepts every draft, and the engine passes the `q` that the draft was sampled
    from."""
    target = exact_target()
    engine = load(target, tiny_draft(target, draft_vocab_size=150), depth=3)
    seen = []

    def spy(rule, tree, scores_BNV, length_B, sampling, target_ids_W):
        drafted = tree.token_BN[0, 1:].tolist()
        assert target_ids_W.tolist() == engine.draft.target_ids().tolist()
        torch.testing.assert_close(tree.q_BKW.sum(-1), torch.ones(1, 3, dtype=torch.float64))
        places = [target_ids_W.tolist().index(t) for t in drafted]
        assert all(tree.q_BKW[0, k, place] > 0 for k, place in enumerate(places))
        seen.append(drafted)
        perfect = replace(tree, q_BKW=scores_BNV.double().softmax(-1)[:, :-1])
        ((_, tokens),) = rule(perfect, scores_BNV, length_B, sampling, torch.arange(400)).to_lists()
        assert tokens[:-1] == drafted
        return rule(tree, scores_BNV, length_B, sampling, target_ids_W)

    replace_function(monkeypatch, verify, "accept_by_rejection", spy)
    engine.generate([5, 6, 7], max_new_tokens=20, sampling=Sampling(temperature=0.8, draft="sample"))
    assert seen


@pytest.mark.parametrize("processed", [False, True])
def test_stop_inside_an_accepted_run(processed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token among the accepted drafts ends the answer: it is the answer's last token."""
    target = tiny_target(dtype=torch.float64)
    engine = load(target, tiny_draft(target), depth=6)
    sampling = Sampling(repetition_penalty=1.0001 if processed else 1.0)
    prompt, done = prompt_with_long_answer(engine, 40, sampling=sampling)
    free = done.tokens
    inside = set()
    for at in range(1, 14):
        stop = free[at]
        end = free.index(stop) + 1
        target.model.generation_config.eos_token_id = [stop]
        draft_answer(monkeypatch, prompt + free, wrong=0.0)
        fast, plain = both(engine, prompt, max_new_tokens=40, sampling=sampling)
        assert fast.tokens == plain.tokens == free[:end]
        assert fast.finish == plain.finish == "stop"
        inside.add((end - 2) % 7)
    assert len(inside) > 4, "the stop tokens must fall at different places within a round"


def test_drafts_beyond_learned_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts may pass the end of the target's context if its positions are rotary. If they are learned embeddings,
    there is no position left, so decoding raises ValueError."""
    engine = load(exact_target(), tiny_draft(exact_target()), depth=6)
    prompt = [5] * 500
    assert_same(*both(engine, prompt, max_new_tokens=12))
    monkeypatch.setattr(engine.target, "rotary", False)
    with pytest.raises(ValueError, match="a context of 512 tokens, the last 6 of which are for drafted tokens"):
        engine.generate(prompt, max_new_tokens=12)
    assert_same(*both(engine, prompt, max_new_tokens=6))


class FailsAfterEnd:
    """A logits processor that fails if it is called for a token after the end of the answer, as a grammar would."""

    def __init__(self, prompt: int, limit: int, stop: int = -1, text: Sequence[int] = ()):
        self.places, self.stop, self.text = range(prompt, prompt + limit), stop, list(text)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[1] in self.places and self.stop not in ids[0, self.places[0] :]
        assert not self.text or ids[0, -len(self.text) :].tolist() != self.text
        return scores


@pytest.mark.parametrize("drawn", ["greedy", "sample"])
@pytest.mark.parametrize("end", ["limit", "stop", "string"])
def test_processors_are_asked_for_nothing_after_the_end(end: str, drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits processors are not called for accepted tokens that lie after the end of the answer."""
    target = tiny_target(dtype=torch.float64)
    engine = load(target, tiny_draft(target), depth=6)
    sampling = Sampling(temperature=1.0, draft="sample") if drawn == "sample" else Sampling()
    if drawn == "sample":  # a uniform of 0 accepts every drafted token
        monkeypatch.setattr(verify, "uniforms", lambda *of: torch.zeros(1, dtype=torch.float64))
    prompt, whole = prompt_with_long_answer(engine, 24, sampling=sampling)
    if drawn == "sample":
        whole = engine.generate(prompt, max_new_tokens=24, sampling=sampling)
    else:
        draft_answer(monkeypatch, [*prompt, *whole.tokens], 0.0)
    tokens, limit, stop, more = whole.tokens, 24, -1, {}
    if end == "limit":
        limit = 10
    elif end == "stop":
        stop = tokens[next(i for i in range(9, 24) if tokens[i] not in tokens[:i])]
        target.model.generation_config.eos_token_id = [stop]
    else:
        more = dict(stop=[target.tokenizer.decode(tokens[9:11])])
    ends = FailsAfterEnd(len(prompt), limit, stop, tokens[9:11] if end == "string" else ())
    asked = dict(max_new_tokens=limit, sampling=replace(sampling, processors=[ends]), **more)
    done = engine.generate(prompt, **asked)
    assert len(done.tokens) < 24 and max(r.accepted for r in done.trace.rounds) >= 3
    if drawn == "greedy":
        assert_same(done, engine.generate(prompt, speculate=False, **asked))


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_length_is_kept(wrong: float, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """max_new_tokens ends the answer at exactly that length, also in the middle of a round."""
    target = exact_target(native)
    engine = load(target, tiny_draft(target), depth=5)
    prompt, free = prompt_with_long_answer(engine, 20)
    for n in range(1, 20):
        draft_answer(monkeypatch, prompt + free.tokens, wrong, seed=n)
        fast = engine.generate(prompt, max_new_tokens=n)
        assert (fast.tokens, fast.finish) == (free.tokens[:n], "length")
        assert fast.text == target.tokenizer.decode(free.tokens[:n])


def test_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string may lie within one token or span several. The text ends before it, the tokens end with the one
    that completes it, and the streamed pieces add up to the text."""
    target = exact_target()
    engine = load(target, tiny_draft(target), depth=5)
    prompt, free = prompt_with_long_answer(engine, 60)
    tokens, text = free.tokens, free.text
    starts = {len(target.tokenizer.decode(tokens[:i])) for i in range(len(tokens))}
    whole = [at for at in range(len(text) - 3) if "\ufffd" not in text[at : at + 3]]
    straddling = [at for at in whole if starts & {at + 1, at + 2}]
    assert len(straddling) > 4
    for at in [*whole[:4], *straddling[:12]]:
        stop = text[at : at + 3]
        draft_answer(monkeypatch, prompt + tokens, 0.3, seed=at)
        for speculate in (False, True):
            done = Completion()
            options = dict(max_new_tokens=60, stop=("never there", stop), speculate=speculate, into=done)
            pieces = list(engine.stream(prompt, **options))
            assert "".join(pieces) == done.text == text[: text.find(stop)]
            assert done.finish == "stop"
            assert done.tokens == tokens[: len(done.tokens)]
            assert stop in target.tokenizer.decode(done.tokens)
            assert stop not in target.tokenizer.decode(done.tokens[:-1])


def stream_in_groups(
    tokens: Sequence[int], sizes: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], TextStream]:
    """The pieces of text that a TextStream returns if tokens arrive in groups of the given sizes, used in a cycle."""
    stream, pieces, at, turn = TextStream(tiny_tokenizer(), stop), [], 0, 0
    while at < len(tokens) and not stream.stopped:
        size = sizes[turn % len(sizes)]
        stream.append(tokens[at : at + size])
        pieces.append(stream.take())
        at, turn = at + size, turn + 1
    return [*pieces, stream.finish()], stream


groups = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab 你é🦆\u200d ing", max_size=25), sizes=groups)
def test_streaming_is_the_text(text: str, sizes: list[int]) -> None:
    """Pieces hold only complete characters, even if a character's bytes are split over tokens or groups, and they add
    up to the text."""
    pieces, stream = stream_in_groups(tiny_tokenizer()(text)["input_ids"], sizes)
    assert "".join(pieces) == stream.text == text
    assert all("\ufffd" not in p for p in pieces)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 321), max_size=25), sizes=groups)
def test_streaming_of_any_tokens(tokens: list[int], sizes: list[int]) -> None:
    """For any tokens, special tokens and invalid UTF-8 included, the pieces add up to the tokenizer's decoding of all
    tokens at once."""
    pieces, stream = stream_in_groups(tokens, sizes)
    assert "".join(pieces) == stream.text == tiny_tokenizer().decode(tokens, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab你🦆", max_size=20),
    stop=st.text("ab你🦆", min_size=1, max_size=4),
    sizes=groups,
    cut=st.integers(0, 3),
)
@example(text="xyEND🦆", stop="END", sizes=[1], cut=2)
def test_streaming_stops(text: str, stop: str, sizes: list[int], cut: int) -> None:
    """The text ends before the first stop string, however tokens and groups split it, and the pieces never go beyond
    that end. Leaving out the last `cut` tokens may leave the last character incomplete."""
    tokens = tiny_tokenizer()(text)["input_ids"]
    tokens = tokens[: len(tokens) - cut]
    whole = tiny_tokenizer().decode(tokens)
    pieces, stream = stream_in_groups(tokens, sizes, (stop,))
    assert "".join(pieces) == stream.text == whole.split(stop)[0]
    assert stream.stopped == (stop in whole)


class ByteTokenizer:
    """A tokenizer whose tokens are the given bytes, for splits that the tiny tokenizer does not make."""

    def __init__(self, *pieces: bytes):
        self.pieces = pieces

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return b"".join(self.pieces[t] for t in tokens).decode(errors="replace")


def test_a_stop_string_before_half_a_character() -> None:
    """A stop string is found even if the token that completes it also begins a character that is never completed."""
    stream = TextStream(ByteTokenizer(b"some EN", b"D\xf0\x9f"), ("END",))
    stream.append([0, 1])
    assert stream.take() == "some "
    assert stream.finish() == ""
    assert stream.text == "some "
    assert stream.stopped


def test_the_first_of_several_stop_strings() -> None:
    """If two stop strings appear, the text ends before the one that begins first."""
    stream = TextStream(ByteTokenizer(b"abc", b"def", b"ghi"), ("ef", "bcde"))
    stream.append([0, 1, 2])
    assert stream.take() == "a"
    assert stream.stopped
    assert stream.tokens == [0, 1]


@pytest.mark.parametrize("vocabulary", [400, 350])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_simulated_rounds_are_decoded_rounds(depth: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the target's greedy text, the decoding that training simulates accepts as many tokens in each round as the
    decoder does. The text's end cuts the last round."""
    target = exact_target()
    draft = tiny_draft(target, draft_vocab_size=vocabulary, hidden_size=256, intermediate_size=256)
    engine = load(target, draft, depth=depth)
    asked = [p for p in prompts(6, longest=12, seed=13) if len(p) > 1]
    fit_head(target, draft, [spoken(engine, asked[0], 40)[0]], depth)
    seen: dict[str, Any] = {}
    simulate = objective.simulate_decoding

    def recorded(live: Any, hits: Any) -> tuple[int, int]:
        seen.update(live=live, hits=hits)
        return simulate(live, hits)

    monkeypatch.setattr(objective, "simulate_decoding", recorded)
    every = []
    for prompt in asked:
        document, done = spoken(engine, prompt, 40)
        row = row_of([document])
        step = objective.ttt(draft, row, features_for(draft, target, row), target.logits, Objective(depth=depth))
        left, decoded = len(done.tokens) - 1, []
        for r in done.trace.rounds:
            decoded.append(min(r.accepted, left))
            left -= r.accepted + 1
        assert accepted_per_round(seen["live"], seen["hits"]) == decoded
        assert step.simulated == (sum(decoded) + len(decoded), len(decoded))
        every += decoded
    assert {0, depth} <= set(every), "both rejections and full acceptance must occur"


def commit_the_drafts_token(rule: Any, tree: Tree, *given: Any) -> Verdict:
    verdict = rule(tree, *given)
    (N,), count_B1 = tree.token_BN.shape[1:], verdict.count_B[:, None]
    drafted_B1 = tree.token_BN.gather(1, count_B1.clamp_max(N - 1))
    wrong_BR = verdict.token_BR.scatter(1, count_B1 - 1, drafted_B1)
    return replace(verdict, token_BR=torch.where(count_B1 < N, wrong_BR, verdict.token_BR))


def commit_one_too_many(verify_trees: Any, *given: Any) -> Tensor:
    R = (results := verify_trees(*given)).shape[1] // 2 - 1
    token_BR, path_BR, count_B1, drafted_B1 = results.split([R, R, 1, 1], dim=1)
    token_BR, path_BR = (torch.cat([x, x[:, :1]], dim=1) for x in (token_BR, path_BR))
    return torch.cat([token_BR.scatter(1, count_B1, 5), path_BR, count_B1 + 1, drafted_B1], dim=1)


def forget_a_token_too_few(keep: Any, cache: TargetCache | KVCache, path_BR: Any, count_B: Tensor) -> None:
    keep(cache, path_BR, count_B + 1)


def forget_nothing(keep: Any, cache: TargetCache, path_BR: Any, count_B: Tensor) -> None:
    pass


MUTATIONS = [  # (owner, function, what replaces it, the target's implementation is native)
    (verify, "accept_by_match", commit_the_drafts_token, False),
    (Rounds, "verify_trees", commit_one_too_many, False),
    (TargetCache, "keep", forget_a_token_too_few, False),
    (TargetCache, "keep", forget_nothing, False),
    (KVCache, "keep", forget_a_token_too_few, True),
]


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "native"), MUTATIONS, ids=[f"{m[0].__name__}: {m[2].__name__}" for m in MUTATIONS]
)
def test_breaking_it_is_noticed(
    owner: Any, name: str, wrong: Any, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the verification rule or the rollback changes the tokens or stops the engine."""
    target = exact_target(native)
    engine = load(target, tiny_draft(target), depth=4)
    prompt, done = prompt_with_long_answer(engine, 30)
    plain = done.tokens
    replace_function(monkeypatch, owner, name, wrong)
    draft_answer(monkeypatch, prompt + plain, wrong=0.3)
    try:
        broken = engine.generate(prompt, max_new_tokens=30).tokens
    except RuntimeError:  # the tensor shapes no longer fit
        return
    assert broken != plain


@pytest.mark.gpu
@BOTH_IMPLEMENTATIONS
def test_two_devices(native: bool) -> None:
    """A target on the GPU with its draft on the CPU generates the same tokens as the target alone."""
    made = tiny_target(dtype=torch.float64)
    target = (NativeTarget if native else TransformersTarget)(made.model.to("cuda"), made.tokenizer)
    engine = load(target, tiny_draft(made).cpu(), depth=4)
    assert (engine.target.device.type, engine.draft.device.type) == ("cuda", "cpu")
    for prompt in prompts(4, seed=15):
        assert_same(*both(engine, prompt, max_new_tokens=30))


def test_a_stop_token_that_is_no_special_token_is_not_in_the_text():
    """The stop token is the last token and is not part of the text, even if the tokenizer does not count it among its
    special tokens."""
    target = tiny_target()
    engine = load(target, tiny_draft(target))
    free = engine.generate("it can fly", max_new_tokens=12)
    stop = next(t for t in free.tokens[1:] if t > 2)
    end = free.tokens.index(stop)
    target.model.generation_config.eos_token_id = [stop]
    done = engine.generate("it can fly", max_new_tokens=12)
    assert done.finish == "stop" and done.tokens == free.tokens[: end + 1]
    assert done.text == target.tokenizer.decode(free.tokens[:end], skip_special_tokens=True)


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_while_confident_changes_no_token(temperature, native):
    """With a confidence threshold, rounds stop drafting at different depths, and the answer stays the same."""
    target = tiny_target(dtype=torch.float64, native=native)
    draft = tiny_draft(target, draft_vocab_size=100)
    sampling = Sampling(temperature=temperature, seed=2)
    options = dict(max_new_tokens=30, sampling=sampling)
    drafted = set()
    for prompt in ("it can fly", " wings", "a"):
        plain = load(target, draft, depth=5).generate(prompt, speculate=False, **options)
        confident = load(target, draft, depth=5, confidence=0.005).generate(prompt, **options)
        assert confident.tokens == plain.tokens
        drafted |= {r.drafted for r in confident.trace.rounds}
    assert min(drafted) >= 1 and max(drafted) <= 5 and len(drafted) > 1


def test_confidence_outside_its_range_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="confidence"):
        load(target, tiny_draft(target), confidence=1.0)
