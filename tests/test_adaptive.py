"""How much is drafted is chosen while decoding: the choice is close to the best one, whatever it is the tokens stay the
same, and after a pause the draft goes on as if it had read along."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fledge.decode import adaptive, propose
from fledge.decode import batch as batches
from fledge.decode.adaptive import NOTHING, AcceptanceRates, Amount, AmountChooser, RoundCosts
from fledge.decode.engine import Engine
from fledge.decode.probe import probe
from fledge.decode.propose import DEPTHS, FAR, NODES, Drafting
from fledge.types import Sampling
from support.amounts import RandomAmounts
from support.decoding import prompts
from support.targets import P_EAGLE, read_alone, tiny_draft, tiny_target
from support.trees import good_pair, paths_of, propose_one

CHAINS = [Amount(d, d + 1) for d in (1, 2, 3, 5, 7, 10)]
WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth="auto"),
    "confident": dict(depth="auto", confidence=0.1),
    "nodes": dict(mode="tree", nodes="auto", width=4, depth=3),
    "depth of a tree": dict(mode="tree", nodes=10, width=3, depth="auto"),
    "depth and nodes": dict(mode="tree", nodes="auto", depth="auto", width=4),
}


# -- the choice -------------------------------------------------------------------------------------------------------


def simulate(
    chooser: AmountChooser, rounds: int, rate: Callable[[int], float], cost: Callable[[Amount], float], seed: int = 0
) -> tuple[int, float]:
    """The tokens and seconds of so many rounds of one request in a world in which a token is accepted with the
    probability `rate(round)`, and a round takes `cost(amount)` with some noise."""
    draw, current, tokens, seconds, unread = random.Random(seed), chooser.amounts[1], 0, 0.0, 0
    for n in range(rounds):
        if n % batches.HELD == 0:
            current = chooser.next(1, current)
        accepted = 0
        while accepted < current.depth and draw.random() < rate(n):
            accepted += 1
        took = cost(current) * draw.uniform(0.95, 1.05) * (5 if draw.random() < 0.02 else 1)
        chooser.add(current, [accepted], took if n % batches.HELD >= batches.WARM_UP else None)
        tokens, seconds, unread = tokens + accepted + 1, seconds + cost(current), unread + (current == NOTHING)
        if unread == 60:
            chooser.add_guesses(sum(draw.random() < rate(n) for _ in range(8)), 8, 8)
            unread = 0
    return tokens, seconds


def best_speed(rate: float, cost: Callable[[Amount], float]) -> float:
    return max(sum(rate**k for k in range(a.depth + 1)) / cost(a) for a in (NOTHING, *CHAINS))


@pytest.mark.parametrize("step", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("rate", [0.1, 0.4, 0.7, 0.95])
def test_the_choice_is_close_to_the_best(rate: float, step: float) -> None:
    """Tokens per second over 2,000 rounds, those in which other amounts are tried included, are within 5 percent of the
    best amount's, and within 3 percent of decoding without drafting where that is the best."""

    def cost(amount: Amount) -> float:
        return 1 + (0.1 + step * amount.depth if amount.depth else 0)

    tokens, seconds = simulate(AmountChooser(CHAINS, CHAINS[3], False), 2000, lambda n: rate, cost)
    best = best_speed(rate, cost)
    assert tokens / seconds > (0.97 if best == 1 else 0.95) * best


def test_speculation_comes_back() -> None:
    """Where drafts become acceptable after a long pause, guesses for committed tokens end the pause."""
    chooser = AmountChooser(CHAINS, CHAINS[3], False)

    def cost(amount: Amount) -> float:
        return 1 + 0.2 * amount.depth

    simulate(chooser, 500, lambda n: 0.1, cost)
    assert chooser.next(1, NOTHING) == NOTHING and "takes" in chooser.reason(1)
    tokens, seconds = simulate(chooser, 1500, lambda n: 0.9, cost, seed=1)
    assert tokens / seconds > 0.85 * best_speed(0.9, cost) and not chooser.reason(1)


def test_requests_rest() -> None:
    """Where drafting does not pay, more and more requests in a row are decoded without the draft, until it does."""
    chooser = AmountChooser(CHAINS, CHAINS[3], False)
    assert not chooser.rests(2)
    for amount, seconds in ((NOTHING, 1.0), (CHAINS[1], 2.0)):
        for _ in range(5):
            chooser.add(amount, [0, 0], seconds)
    resting = []
    for _ in range(400):
        resting.append(chooser.rests(2))
        chooser.rested += 2 * resting[-1]
    assert [i for i, rests in enumerate(resting) if not rests] == [32, 97, 226, 355]
    for _ in range(200):
        chooser.add(CHAINS[1], [2, 2], 2.0)
    assert not any(chooser.rests(2) for _ in range(5))


def test_requests_rest_no_longer() -> None:
    """Guesses for answers that were decoded without the draft end the rest. Few waiting requests change nothing."""
    chooser, many = AmountChooser(CHAINS, CHAINS[3], False), 10
    for amount, seconds in ((NOTHING, 1.0), (CHAINS[1], 1.5)):
        for _ in range(5):
            chooser.add(amount, [0, 0], seconds)
    assert chooser.changes(False, 2, many) and not chooser.changes(False, 2, 7)
    probed = []
    assert chooser.rests(2)
    for rested in range(48):
        chooser.rested = rested
        if chooser.probes(2):
            probed.append(rested)
            chooser.add_guesses(2, 40, 40)
            assert not chooser.changes(True, 2, many)
    assert probed == [16, 32]
    chooser.add_guesses(38, 40, 40)
    assert chooser.changes(True, 2, many) and not chooser.changes(True, 2, 7)
    assert not chooser.rests(2)


def test_a_slower_machine_is_noticed() -> None:
    """Costs that were measured while something else ran are measured again."""
    chooser, busy = AmountChooser(CHAINS, CHAINS[3], False), [8.0]

    def cost(amount: Amount) -> float:
        return (busy[0] if amount.depth else 1) * (1 + 0.05 * amount.depth)

    simulate(chooser, 100, lambda n: 0.8, cost)
    assert chooser.next(1, NOTHING) == NOTHING
    busy[0] = 1
    tokens, seconds = simulate(chooser, 2000, lambda n: 0.8, cost)
    assert tokens / seconds > 0.85 * best_speed(0.8, cost)


def test_rates() -> None:
    """The expected tokens are those of the rounds so far, and deeper ones fall off."""
    rates = AcceptanceRates(6)
    for _ in range(2000):
        rates.add(4, [4, 0, 1, 2])
    assert rates.tokens(0) == 1
    assert rates.tokens(4) == pytest.approx(1 + (4 + 0 + 1 + 2) / 4, rel=0.05)
    assert rates.tokens(4) < rates.tokens(5) < rates.tokens(6) < rates.tokens(4) + 0.5
    for _ in range(200):
        rates.add_first(0, 1, 1)
    assert rates.tokens(4) < 1.4


def test_costs() -> None:
    """Unknown costs are interpolated between amounts, and scaled from other numbers of requests."""
    costs = RoundCosts()
    for amount, seconds in ((NOTHING, 1.0), (CHAINS[1], 3.0), (CHAINS[3], 6.0)):
        for _ in range(3):
            costs.add(1, amount, seconds)
    assert [costs.seconds(1, a) for a in CHAINS] == pytest.approx([2.0, 3.0, 4.0, 6.0, 8.0, 11.0])
    assert costs.seconds(4, CHAINS[1]) == 3.0
    for _ in range(3):
        costs.add(3, NOTHING, 2.0)
    assert costs.seconds(4, CHAINS[3]) == 12.0 and costs.seconds(1, CHAINS[3]) == 6.0
    costs.forget_all_but(NOTHING)
    assert not costs.timed(CHAINS[3]) and costs.timed(NOTHING)


def test_amounts_of_drafting() -> None:
    """Chains may be deeper than those trained, and the trained depth comes first."""
    draft = tiny_draft(tiny_target())
    trained = draft.config.provenance.depth or 5
    resolved = Drafting(depth="auto").for_draft(draft.config)
    assert resolved.amounts[0] == Amount(trained, trained + 1)
    assert {a.depth for a in resolved.amounts} == {trained, *(d for d in DEPTHS if d <= max(2 * trained, FAR))}
    trees = Drafting(mode="tree", nodes="auto", depth=4).for_draft(draft.config)
    assert sorted(a.nodes for a in trees.amounts) == sorted(NODES) and trees.verified == max(NODES)
    assert Drafting(depth=3).for_draft(draft.config).amounts == (Amount(3, 4),)


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amounts change every other round, and the draft reads along every few tokens."""
    monkeypatch.setattr(batches, "HELD", 2)
    monkeypatch.setattr(batches, "SETTLED", 2)
    monkeypatch.setattr(batches, "UNREAD", 6)
    monkeypatch.setattr(propose, "UNREAD", 6)


@pytest.mark.parametrize("way", WAYS)
def test_no_token_changes(way: str, short: None) -> None:
    """Whatever is drafted, and for requests that come and go."""
    target, draft, _ = good_pair(native=True)
    engine = Engine(target, draft, **WAYS[way])
    asked = prompts(6, longest=14, seed=3)
    samplings = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(repetition_penalty=1.2)] * 2
    plain = engine.generate_all(asked, sampling=samplings, max_new_tokens=30, speculate=False)
    for seed in range(3):
        RandomAmounts(engine, seed)
        fast = engine.generate_all(asked, sampling=samplings, max_new_tokens=30, batch=seed + 1)
        assert [c.tokens for c in fast] == [c.tokens for c in plain]


@pytest.mark.parametrize("options", [dict(P_EAGLE), dict(method="eagle1")], ids=["peagle", "eagle1"])
def test_other_methods(options: dict[str, Any], short: None) -> None:
    target = tiny_target(dtype=torch.float64, native=True)
    engine = Engine(target, tiny_draft(target, **options), depth="auto")
    asked = prompts(4, seed=6)
    RandomAmounts(engine, 0)
    fast, plain = (engine.generate_all(asked, batch=2, max_new_tokens=30, speculate=s) for s in (True, False))
    assert [c.tokens for c in fast] == [c.tokens for c in plain]


@pytest.mark.parametrize("way", ["chain", "nodes"])
def test_after_a_pause_the_draft_goes_on(way: str, short: None) -> None:
    """Each round accepts what it would with an empty cache, pauses before it or not, and the guesses for the tokens of
    a pause are the draft's."""
    target, draft, asked = good_pair(native=True)
    engine = Engine(target, draft, **WAYS[way])
    for seed, prompt in enumerate(asked[:3]):
        amounts = RandomAmounts(engine, seed, rest=0)
        done = engine.generate(prompt, max_new_tokens=40)
        text = prompt + engine.generate(prompt, max_new_tokens=60, speculate=False).tokens
        assert len(done.trace.rounds) > 8 and text[len(prompt) :][: len(done.tokens)] == done.tokens
        hits, end = [], len(prompt) + 1
        _, features = read_alone(target, text, engine.layers)
        states = draft.select_states(features)
        for r in done.trace.rounds:
            proposer = engine.drafting.proposer(draft)
            amount = next(a for a in engine.drafting.amounts if not r.drafted or r.drafted == a.depth)
            if way == "chain":
                proposer.use(amount)
                paths = paths_of(propose_one(proposer, torch.tensor(text[1:end]), states[: end - 1], 256))
                right = max((len(p) for p in paths if list(p) == text[end : end + len(p)]), default=0)
                if r.drafted:
                    assert r.accepted == right
                else:
                    hits.append(right > 0)
            end += r.accepted + 1
        guessed = sum(made for _, made in amounts.guesses)
        assert guessed or not hits
        if way == "chain":
            assert sum(right for right, _ in amounts.guesses) == sum(hits[:guessed])


@pytest.mark.parametrize("options", [{}, P_EAGLE], ids=["eagle3", "peagle"])
def test_guesses_for_a_complete_answer(options: dict[str, Any]) -> None:
    """They are those of the draft with an empty cache, for the tokens that it has the target's states of."""
    target, draft, asked = good_pair(native=True)
    draft = tiny_draft(target, **options) if options else draft
    engine = Engine(target, draft, depth=1)
    prompt = asked[0]
    done = engine.generate(prompt, max_new_tokens=20, speculate=False)
    text = prompt + done.tokens
    states = draft.select_states(read_alone(target, text, engine.layers)[1])
    right = []
    for end in range(2, len(text)):
        proposer = engine.drafting.proposer(draft)
        paths = paths_of(propose_one(proposer, torch.tensor(text[1:end]), states[: end - 1], 256))
        right.append(any(path[0] == text[end] for path in paths if path))
    prober = engine.drafting.proposer(draft)
    for new in (1, 7, 20, 500):
        made = min(new, len(text) - 2)
        assert probe(target, prober, engine.layers, text, new) == (sum(right[-made:]), made)
    assert 0 < sum(right) < len(right) or options
    assert probe(target, prober, engine.layers, text[:2], 1) == (0, 0)
    assert prober.source.pool.slots == target.pool.slots == 0


def test_resting_requests_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose draft does not pay asks it for guesses of one answer in many, and changes no token."""
    target, draft, asked = good_pair(native=True)
    engine = Engine(target, draft, depth="auto")
    for amount, seconds in ((NOTHING, 1.0), (engine.chooser.smaller, 9.0)):
        for _ in range(5):
            engine.chooser.add(amount, [0], seconds)
    monkeypatch.setattr(adaptive, "PROBE", 2)
    guesses: list[int] = []
    monkeypatch.setattr(engine.chooser, "add_guesses", lambda right, made, rounds: guesses.append(made))
    done = engine.generate_all(asked[:7], batch=2, max_new_tokens=9)
    plain = engine.generate_all(asked[:7], batch=2, max_new_tokens=9, speculate=False)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert not any(r.drafted for c in done for r in c.trace.rounds) and guesses and max(guesses) == 9
    assert engine.chooser.rested == 7 and target.pool.slots == 0


def test_a_pause_needs_the_stable_cache() -> None:
    target = tiny_target()
    for options, message in (
        (dict(depth="auto", stable=False), "stable draft cache"),
        (dict(depth="automatic"), "neither a number nor auto"),
        (dict(mode="tree", nodes="auto", shape=None, depth="auto", stable=False), "stable draft cache"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(target, tiny_draft(target), **options)
