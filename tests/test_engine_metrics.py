"""Acceptance as engines count it, in fledge's terms."""

from __future__ import annotations

import pytest

from fledge.engines.metrics import (
    Acceptance,
    Counters,
    Samples,
    of_requests,
    sglang_counters,
    vllm_counters,
)
from fledge.measure.metrics import alpha, tau
from fledge.types import Round, Trace
from support.openai_server import FakeServer

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 3e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 130.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="2"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 30.0
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0
vllm:generation_tokens_total{engine="0",model_name="a b"} 235.0
not a sample
"""


def test_vllms_counters_over_all_engines():
    found = vllm_counters(VLLM)
    acceptance = found.acceptance
    assert (acceptance.rounds, acceptance.accepted, acceptance.drafted) == (100, 130, 300)
    assert acceptance.by_position == (80, 30, 20) and (found.tokens, found.running) == (235, 3)
    assert acceptance.tau == 2.3 and acceptance.depth == 3
    assert acceptance.alpha == pytest.approx([0.8, 30 / 80, 20 / 30])
    assert Acceptance(10, 4, 30, (4, 0, 0), "s").alpha == [0.4, 0.0, None], "no round reached the third"
    assert vllm_counters("vllm:generation_tokens_total 7").acceptance is None
    assert Samples('a{x="q\\"},} 1"} 2\na 3').get("b", "a") == 5


def test_differences_of_counters():
    earlier = Counters(Acceptance(10, 13, 30, (8, 5), "s"), tokens=20, requests=None)
    spent = vllm_counters(VLLM).since(earlier)
    assert spent.acceptance == Acceptance(90, 117, 270, (72, 25, 20), vllm_counters(VLLM).acceptance.source)
    assert spent.tokens == 215
    assert vllm_counters(VLLM).since(Counters()) == vllm_counters(VLLM)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_counts_of_an_engine_are_fledges_definitions(engine: str):
    """The server's simulated rounds, counted as each engine does, and as traces of fledge's decoder."""
    server = FakeServer(engine=engine, accepts=(0, 3, 1, 1, 2))
    accepted = [server.speculate(tokens)[1] for tokens in (30, 17, 41)]
    traces = [Trace(rounds=[Round(drafted=3, accepted=a, t_draft=0, t_verify=0) for a in of]) for of in accepted]
    if engine == "vllm":
        found = vllm_counters(server.metrics_text()).acceptance
    else:
        found = of_requests(
            {"spec_verify_ct": len(of), "spec_num_correct_drafts": sum(of), "spec_num_proposed_drafts": 3 * len(of),
             "completion_tokens": 0, "spec_correct_drafts_histogram": [of.count(k) for k in range(4)]}
            for of in accepted
        )  # fmt: skip
    assert found.tau == pytest.approx(tau(traces)) and found.alpha == pytest.approx(alpha(traces))
    assert found.depth == 3


def test_sglang_without_counts_of_accepted_tokens():
    metas = [{"spec_verify_ct": 4, "completion_tokens": 11}, {"spec_verify_ct": 2, "completion_tokens": 5}]
    found = of_requests(metas)
    assert found.tau == pytest.approx((10 + 4) / 6) and found.alpha is None and found.depth is None
    assert of_requests([*metas, {"completion_tokens": 1}]) == found, "a request that ended with its first token"
    assert of_requests([*metas, {"completion_tokens": 3}]) is None and of_requests([]) is of_requests([{}]) is None
    partial = [meta | {"spec_num_correct_drafts": 3, "spec_correct_drafts_histogram": [1, 0]} for meta in metas]
    assert of_requests(partial).alpha is None, "histograms that do not count every verification say nothing"


def test_samples_that_no_engine_counts_are_left_out():
    """Infinite values, positions without end and long lines; separators of Unicode are a part of a label."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines = [f"{name.replace('accepted_tokens_per_pos', 'drafts')} 4", f"{name.replace('_per_pos', '')} 1e999"]
    lines += [f'{name}{{position="{k}"}} 2' for k in (0, 1024, 10**11, "9" * 5000)]
    lines += ['vllm:generation_tokens_total{x="\u2028"} 7', "a" * 10**6 + " 1", "b{" + "c" * 10**6 + "} 1"]
    samples = Samples("\n".join(lines))
    assert samples.by_position(name) == (2.0,) and samples.get("vllm:generation_tokens_total") == 7
    assert samples.get(name.replace("_per_pos", "")) is None and vllm_counters("\n".join(lines)).acceptance is None
    with pytest.raises(ValueError, match="has a list of 1 as its histogram of accepted tokens"):
        of_requests([{"spec_verify_ct": 1, "completion_tokens": 3, "spec_accept_histogram": ["1"]}])


def test_sglangs_counters():
    server = FakeServer(engine="sglang", accepts=(3,))
    for tokens in (9, 17):  # each ends at a whole round: 1 + 2 * 4, 1 + 4 * 4
        server.speculate(tokens)
    found = sglang_counters(server.metrics_text())
    assert found.acceptance.tau == 4.0 and found.acceptance.alpha is None and found.requests == 2
    assert sglang_counters("").acceptance is None
