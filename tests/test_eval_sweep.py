"""`fledge eval` over depths and trees: which ways of drafting it measures, and what a record has of each request."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge import __version__
from fledge.commands import evaluate as evaluate_job
from fledge.data.record import Record
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.drafts.weights import save_draft
from fledge.io.display import ProgressDisplay
from fledge.io.results import ResultPrinter
from fledge.measure import record as record_module
from fledge.measure import run as eval_run
from fledge.measure import table as table_module
from fledge.measure.options import EvalOptions, names, ways
from fledge.measure.record import record_text, speedup_interval, tau_interval
from fledge.measure.run import EvaluationStopped, evaluate
from fledge.measure.table import FEW, print_table, round_lines
from fledge.types import Sampling
from support.commands import TESTS
from support.decoding import fit_head, spoken
from support.files import write_rows
from support.targets import exact_target, tiny_draft, tiny_target, tiny_target_directory
from support.terminal import TerminalOf

TEXTS = ["the young bird", "it can fly", "tries again", "its wings", "falls and", "until it can"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), root / "draft")
    write_rows(root / "prompts.jsonl", [{"prompt": text} for text in TEXTS])
    write_rows(root / "others.jsonl", [{"prompt": text} for text in TEXTS[:2]])
    return root


@pytest.fixture
def measure(made: Path, fledge: Any) -> Any:
    words = ["eval", "--target", made / "target", "--draft", made / "draft", "--prompts", made / "prompts.jsonl"]
    return lambda *more: fledge(*words, "--max-new-tokens", 8, *more)


# -- which ways ---------------------------------------------------------------------------------------------------


def options(words: dict[str, Any]) -> EvalOptions:
    return EvalOptions(target="t", prompts=["p"], **{"draft": ["d"]} | words)


@pytest.mark.parametrize(
    ("given_words", "expected"),
    [
        ({}, [""]),
        ({"depth": [3]}, [""]),
        ({"depth": [1, "auto"]}, ["depth 1", "depth auto"]),
        ({"draft_mode": ["tree"], "tree_nodes": [8, 16]}, ["8 nodes", "16 nodes"]),
        ({"draft_mode": ["tree"], "tree_width": [2, 4]}, ["width 2", "width 4"]),
        (
            {"draft_mode": ["chain", "tree"], "depth": [1, 3], "tree_nodes": [8, 16]},
            ["chain depth 1", "chain depth 3"]
            + [f"tree depth {depth} {nodes} nodes" for depth in (1, 3) for nodes in (8, 16)],
        ),
        ({"draft": ["a", "b"], "depth": [1, 2]}, ["a depth 1", "a depth 2", "b depth 1", "b depth 2"]),
    ],
)
def test_all_combinations_are_measured_and_named_by_what_differs(given_words, expected) -> None:
    """A chain has no nodes, so it is measured once for each depth."""
    asked = options(given_words)
    found = ways(asked)
    assert names(asked, found) == expected and len(set(found)) == len(expected)
    for way in found:
        assert way.drafting(way.draft_mode)["depth"] == way.depth


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--depth", 3, "--depth", 3), "--depth has 3, 3: two of them would have the same name"),
        (("--depth", 3, "--depth", 0), "--depth 0: it must be at least 1"),
        (("--depth", "deep"), "'deep' is neither a number nor auto"),
        (("--tree-nodes", 8, "--tree-nodes", 16), "in a chain; give --draft-mode tree"),
        (("--draft-mode", "tree", "--tree-nodes", 1), "--tree-nodes 1: it must be at least 2"),
        (("--endpoint", "http://localhost:1", "--depth", 1, "--depth", 2), "a server has one draft and one way"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(words, reason, measure) -> None:
    went = measure(*words)
    assert went.code == 2 and reason in went.err, went.err


def test_a_sweep_has_a_record_for_each_way_and_prompt_set(measure, made: Path, tmp_path: Path) -> None:
    """Each draft is loaded once, and the records are those of separate runs."""
    out = tmp_path / "sweep.json"
    sweep = "--depth 1 --depth 2 --draft-mode chain --draft-mode tree --tree-nodes 4 --tree-nodes 8".split()
    went = measure(*sweep, "--prompts", made / "others.jsonl", "--out", out)
    assert went.code == 0, went.err
    records = json.loads(out.read_text())
    assert len(records) == 12
    for label, r in records.items():
        expected = [r["mode"], f"depth {r['depth']}", *([f"{r['nodes']} nodes"] if r["mode"] == "tree" else [])]
        assert label == " ".join([*expected, r["prompt_set"]]) and r["identical"] == r["prompts"]
        assert r["prompts"] == {"prompts": 6, "others": 2}[r["prompt_set"]] and r["fledge"] == __version__
        assert r["command"][:2] == ["fledge", "eval"] and str(out) in r["command"]
    alone = json.loads(measure("--depth", 2, "--draft-mode", "tree", "--tree-nodes", 8, "--json").out)
    same = records["tree depth 2 8 nodes prompts"]
    assert [alone[k] for k in ("tau", "alpha", "depth", "nodes")] == [
        same[k] for k in ("tau", "alpha", "depth", "nodes")
    ]


# -- what a record has of each request ----------------------------------------------------------------------------

PROMPTS = [Record("a prompt", text=text) for text in TEXTS]


@functools.cache
def practised() -> Engine:
    """An engine whose draft was fitted to some of the target's answers, so that part of its tokens are accepted."""
    target = exact_target()
    draft, plain = tiny_draft(target, hidden_size=256, intermediate_size=256), load(target)
    fit_head(target, draft, [spoken(plain, plain.reader.template.prompt_ids(text), 24)[0] for text in TEXTS[::2]], 3)
    return load(target, draft, depth=3)


def record_of(batch: int = 1) -> dict[str, Any]:
    return evaluate({"": practised()}, PROMPTS, sampling=Sampling(), max_new_tokens=12, batch=batch)[""]


whole_record = functools.cache(record_of)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_requests_add_up_to_the_figures_of_the_record(batch: int) -> None:
    r = whole_record() if batch == 1 else record_of(batch)
    sums = {k: sum(q[k] for q in r["requests"]) for k in ("tokens", "rounds", "committed", "drafted")}
    assert len(r["requests"]) == r["prompts"] == 6
    assert sums["committed"] / sums["rounds"] == r["tau"] and sums["tokens"] / 6 == r["mean_new_tokens"]
    for k, alpha in enumerate(r["alpha"]):
        reached, passed = (sum(q[key][k] for q in r["requests"] if len(q[key]) > k) for key in ("reached", "passed"))
        assert alpha == (passed / reached if reached else None)
    assert r["tau_interval"] == tau_interval(r["requests"]) and r["tau"] > 1.2
    assert r["tau_interval"][0] <= r["tau"] <= r["tau_interval"][1]
    if batch > 1:
        assert not any({"seconds", "baseline_seconds"} & q.keys() for q in r["requests"])
        assert r["speedup_interval"] is None
    else:
        seconds = sum(q["seconds"] for q in r["requests"])
        assert sums["tokens"] / seconds == pytest.approx(r["tokens_per_s"])
        baseline = sum(q["tokens"] for q in r["requests"]) / sum(q["baseline_seconds"] for q in r["requests"])
        assert baseline == pytest.approx(r["baseline_tokens_per_s"])
        assert r["speedup_interval"] == speedup_interval(r["requests"])


def test_samples_have_the_text_of_the_answers_and_who_proposed_it() -> None:
    r = whole_record()
    assert [s["prompt"] for s in r["samples"]] == [TEXTS[0], TEXTS[2], TEXTS[4]]
    plain = load(practised().target)
    for sample in r["samples"]:
        answer = plain.generate(sample["prompt"], max_new_tokens=12).text
        assert "".join(text for text, _ in sample["pieces"]) == answer
        assert all(0 <= by <= 3 for _, by in sample["pieces"])
    assert any(by > 1 for sample in r["samples"] for _, by in sample["pieces"])


def test_answers_of_other_lengths_have_both(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate_all

    def shorter(self: Engine, prompts: Any, **options: Any) -> Any:
        given = options | {"max_new_tokens": 4 if options["speculate"] else 8}
        return generate(self, prompts, **given)

    monkeypatch.setattr(Engine, "generate_all", shorter)
    sampling = Sampling(temperature=1.0, draft="sample")
    record = evaluate({"": practised()}, PROMPTS[:2], sampling=sampling, max_new_tokens=8)[""]
    assert all(q["tokens"] <= 4 < q["baseline_tokens"] <= 8 for q in record["requests"])


# -- interruption -------------------------------------------------------------------------------------------------


def interrupt_after(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """Ctrl-C before an answer that is not part of the warm-up."""
    generate, done = eval_run._Comparison._generate, []

    def generating(self: Any, arm: Any, prompts: Any, batch: int, options: dict[str, Any]) -> Any:
        if "request" in options:
            if len(done) == answers:
                raise KeyboardInterrupt
            done.append(arm)
        return generate(self, arm, prompts, batch, options)

    monkeypatch.setattr(eval_run._Comparison, "_generate", generating)


def test_an_interruption_after_the_last_answer_loses_none(monkeypatch) -> None:
    """Then transformers' `generate` is timed, which a record may lack."""

    def interrupt(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_run, "compare_with_transformers", interrupt)
    with pytest.raises(EvaluationStopped) as stopped:
        record_of()
    (record,) = stopped.value.records.values()
    assert record["prompts"] == record["stopped"] == 6 and "baseline_over_transformers" not in record


@pytest.mark.parametrize("answers", [1, 2, 5])
def test_an_interrupted_evaluation_has_what_all_arms_have_answered(answers: int, monkeypatch) -> None:
    whole = whole_record()
    interrupt_after(monkeypatch, answers)
    with pytest.raises((KeyboardInterrupt, EvaluationStopped)) as stopped:
        record_of()
    if answers < 2:  # the two arms of a request
        assert not isinstance(stopped.value, EvaluationStopped)
        return
    (record,) = stopped.value.records.values()
    assert (record["prompts"], record["stopped"]) == (answers // 2, 6)
    for ours, theirs in zip(record["requests"], whole["requests"], strict=False):
        assert {k: v for k, v in ours.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }


def test_an_interrupted_sweep_is_shown_and_written(measure, made: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "r.json"
    words = ["--depth", 1, "--depth", 2, "--prompts", made / "others.jsonl", "--out", out]
    for answers, expected in (
        (1, {}), (10, {"prompts": 3}), (19, {"prompts": 6}), (22, {"prompts": 6, "others": 1}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            interrupt_after(patch, answers)
            went = measure(*words)
        assert went.code == 130, went.err
        records = json.loads(out.read_text()) if expected else {}
        assert {r["prompt_set"]: r["prompts"] for r in records.values()} == expected
        assert ("Stopped after" in went.out) == any("stopped" in r for r in records.values())
        assert ("τ" in went.out) == bool(expected) and out.exists() == bool(expected)


def test_a_turn_that_does_not_fit_loses_nothing(fledge: Any, tmp_path: Path) -> None:
    """The answers have made it too long. What was measured until then is shown and written."""
    target = tiny_target_directory(tmp_path, max_position_embeddings=64)
    save_draft(tiny_draft(tiny_target(max_position_embeddings=64)), tmp_path / "draft")
    turns = ["bird", "it can fly until it can fly"]
    write_rows(tmp_path / "turns.jsonl", [{"turns": turns[:1]}, {"turns": turns}])
    out = tmp_path / "r.json"
    words = ["--prompts", tmp_path / "turns.jsonl", "--max-new-tokens", 24, "--out", out]
    went = fledge("eval", "--target", target, "--draft", tmp_path / "draft", *words)
    said = " ".join(went.err.split())
    assert went.code == 2 and "turns.jsonl, line 2, turn 2: the prompt has" in said and "Traceback" not in said, said
    assert "Stopped after 2 of 3 answers" in went.out and "τ" in went.out
    record = json.loads(out.read_text())
    assert (record["prompts"], record["stopped"]) == (2, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("during", ["_record", "print_table", "replace_text"])
def test_a_second_interruption_loses_nothing(
    during: str, number: int, measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"_record": eval_run, "print_table": table_module, "replace_text": record_module}[during]
    whole = getattr(module, during)

    def stopped_again(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        return whole(*args)

    monkeypatch.setattr(module, during, stopped_again)
    interrupt_after(monkeypatch, 5)
    went = measure("--out", tmp_path / "r.json")
    assert went.code == 130 and not went.err.count("Traceback"), went.err
    assert "Stopped after 2 of 6 answers" in went.out
    assert json.loads((tmp_path / "r.json").read_text())["prompts"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(("during", "code"), [("_record", 130), ("print_table", 0), ("replace_text", 0)])
def test_an_interruption_of_a_finished_evaluation_loses_nothing(
    during: str, code: int, measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"_record": eval_run, "print_table": table_module, "replace_text": record_module}[during]
    whole, calls = getattr(module, during), []

    def stopped(*args: Any) -> Any:
        if not calls:
            calls.append(during)
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*args)

    monkeypatch.setattr(module, during, stopped)
    went = measure("--out", tmp_path / "r.json")
    assert went.code == code and calls, went.err
    assert json.loads((tmp_path / "r.json").read_text())["prompts"] == 6
    assert "τ" in went.out and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_evaluation_in_another_thread(made: Path, tmp_path: Path) -> None:
    """There, no signal can be ignored, and none arrives."""
    options = EvalOptions(
        target=str(made / "target"), draft=[str(made / "draft")], prompts=[str(made / "prompts.jsonl")],
        max_new_tokens=8, out=str(tmp_path / "r.json"),
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        record = pool.submit(evaluate_job.run, options, ProgressDisplay()).result()
    assert json.loads((tmp_path / "r.json").read_text())["prompts"] == record["prompts"] == 6


def test_ctrl_c_again_and_again_until_the_process_ends(tmp_path: Path) -> None:
    """Also while Python frees what is left, where the signal's default action would end the process."""
    demo, prompts, out = TESTS.parent / "fledge" / "demo", tmp_path / "prompts.jsonl", tmp_path / "out" / "r.json"
    write_rows(prompts, [{"prompt": f"{text} {i}"} for i in range(50) for text in TEXTS])
    words = ["--target", demo / "target", "--draft", demo / "draft", "--prompts", prompts, "--max-new-tokens", 8]
    with TerminalOf("eval", *words, "--out", out, width=120) as terminal:
        terminal.wait(lambda: re.search(r"\b[4-9]/600", terminal.text))
        while terminal.process.poll() is None:
            with contextlib.suppress(OSError):  # the process has ended since
                terminal.type("\x03")
            time.sleep(0.02)
        assert terminal.wait_for_end() == 130, terminal.text
        assert "Stopped after" in terminal.text and "Traceback" not in terminal.text, terminal.text
    assert json.loads(out.read_text())["prompts"] >= 2 and [p.name for p in out.parent.iterdir()] == ["r.json"]


# -- how it is shown ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_of_a_sweep_fits_the_terminal(width: int, capsys, monkeypatch) -> None:
    record = whole_record()
    monkeypatch.setenv("COLUMNS", str(width))
    sweep = {f"tree depth {depth} {nodes} nodes": record for depth in (1, 3, 5) for nodes in (8, 16, 32)}
    assert len(sweep) > FEW
    print_table(sweep, ResultPrinter())
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith(" ")]
    assert all(len(line) <= width for line in table) and "τ" in table[1]
    assert ("±" in table[1]) == (width >= 60)
    assert lines.count("Every output is identical, token for token.") == 1


def test_few_requests_have_no_interval_in_the_table(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    record = whole_record()
    print_table(record | {"tau_interval": None}, ResultPrinter())
    assert "±" not in capsys.readouterr().out
    above = record["tau_interval"][1] - record["tau"]
    print_table({"many": record, "two": record | {"tau_interval": None}}, ResultPrinter())
    assert re.search(
        rf"many 6 +{record['tau']:.2f} +{above:.2f} .*\n.*two 6 +{record['tau']:.2f} +- ", capsys.readouterr().out
    )


PAYS = {  # by what is changed in the record: the end of the sentence on what would make decoding faster
    "By these times and α, --depth 1 instead of 3 would be 46% faster.": {},
    "compare with --draft-mode tree.": dict(alpha=[0.9, 0.5, 0.2], round=dict(draft_ms=0.3, verify_ms=4.0)),
    "--depth 5 instead of 3 would be 44% faster.": dict(alpha=[1.0, 1.0, 1.0], round=dict(draft_ms=0.3, verify_ms=4.0)),
    "with --depth auto, nothing is drafted where that is faster.": dict(depth=1, alpha=[0.1], speedup=0.5),
    "fledge train makes smaller drafts with --draft-vocab.": dict(mode="tree"),
    "compare with fewer --tree-nodes.": dict(mode="tree", round=dict(verify_ms=9.0)),
    "see whether other programs load the processor.": dict(mode="parallel", round=dict(draft_ms=1.0, overhead_ms=5.0)),
    "train the draft for longer, on the target's own answers.": dict(mode="parallel", round=dict(draft_ms=1.0)),
}


@pytest.mark.parametrize("end", PAYS)
def test_a_round_s_parts_and_what_would_make_decoding_faster(end: str) -> None:
    parts = dict(draft_ms=3.0, verify_ms=2.0, overhead_ms=0.5, vanilla_token_ms=2.0)
    given = dict(tau=1.6, speedup=1.2, mode="chain", depth=3, confidence=0.0, alpha=[0.5, 0.2, 0.1], round={})
    r = given | PAYS[end]
    shares, pays = round_lines(r | {"round": parts | r["round"]})
    assert pays.endswith(end)
    if not r["round"]:
        assert shares == (
            "A round takes 5.50 ms: drafting 55%, verification 36%, the rest 9%. It commits 1.60 tokens in the time of "
            "2.75 tokens without the draft (2.00 ms each)."
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(["[\n 1\n]"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_the_text_of_a_record_is_its_json(value: Any) -> None:
    assert json.loads(record_text(value)) == value


def test_a_request_takes_few_lines() -> None:
    request = {"tokens": 3, "reached": [1, 2, 3], "passed": [0, 0, 0]}
    assert '"reached": [1, 2, 3],\n' in record_text({"requests": [request]})
