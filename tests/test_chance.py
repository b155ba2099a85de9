"""A draft accepted no more often than by chance gives one warning with likely causes; a working draft gives none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fledge.config import DraftConfig, Provenance
from fledge.data.record import Record
from fledge.decode.draft_size import CHANCE_ROUNDS, ChanceWarning, ChanceWatch
from fledge.decode.load import load
from fledge.drafts.weights import save_draft
from fledge.io.results import held_warnings
from fledge.measure.evaluator import greedy_traces
from fledge.types import Round, Sampling, Trace
from support.targets import tiny_draft, tiny_target, tiny_target_directory

PROMPTS = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
CONFIG = DraftConfig(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=400,
    draft_vocab_size=400, target_hidden_size=32, provenance=Provenance(target="another-model"),
)  # fmt: skip


def warned(run: Callable[[], Any]) -> list[str]:
    """The messages of the ChanceWarnings that `run` gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if w.category is ChanceWarning]


def warnings_after(
    *traces: Trace, sampling: Sampling | None = None, acceptance: ChanceWatch | None = None
) -> list[str]:
    acceptance = acceptance or ChanceWatch()
    return warned(lambda: acceptance.add(traces, [sampling or Sampling()] * len(traces), CONFIG, "my-model"))


def rounds(accepted: int, missed: int) -> Trace:
    return Trace([Round(4, 2)] * accepted + [Round(4, 0)] * missed)


def test_the_warning_about_a_draft_at_chance_names_likely_causes():
    (message,) = warnings_after(rounds(2, 118))
    assert (
        "was accepted in only 2 of 120 rounds, about as often as by chance, so the draft only makes my-model slower"
        in message
    )
    assert "another target of the same size (its config names another-model)" in message
    assert "norm_before_residual (false) is wrong" in message and "other layers than its config names" in message
    (message,) = warned(lambda: ChanceWatch().add([rounds(2, 118)], [Sampling()], CONFIG, "another-model"))
    assert "another target" not in message  # the config names the one that is used
    alone = replace(CONFIG, method="eagle1", aux_layers=None)
    (message,) = warned(lambda: ChanceWatch().add([rounds(2, 118)], [Sampling()], alone, "another-model"))
    assert message.endswith("Likely causes: it was trained on too little text of this kind")


@pytest.mark.parametrize(
    ("trace", "sampling"),
    [
        (rounds(10, 110), Sampling()),  # the draft is useful
        (rounds(0, CHANCE_ROUNDS - 1), Sampling()),  # too few rounds to judge
        (Trace([Round(0, 0)] * 200), Sampling()),  # nothing was drafted
        (rounds(0, 200), Sampling(temperature=1.5)),  # nearly random text
        (rounds(0, 200), Sampling(processors=[lambda ids, scores: scores])),  # processors change the text
    ],
    ids=["accepted", "few", "empty", "hot", "processors"],
)
def test_other_drafts_give_no_warning(trace, sampling):
    assert not warnings_after(trace, sampling=sampling)


def test_requests_add_up_and_one_warning_is_enough():
    found = ChanceWatch()
    assert not warnings_after(rounds(0, 60), acceptance=found)
    assert len(warnings_after(rounds(0, 60), acceptance=found)) == 1
    assert not warnings_after(rounds(0, 60), acceptance=found)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_an_engine_warns_of_a_draft_with_wrong_weights(target, mode):
    tree = dict(nodes=4, width=2) if mode == "tree" else {}
    engine = load(target, tiny_draft(target), depth=2, mode=mode, **tree)
    assert not warned(lambda: engine.generate(PROMPTS[0], max_new_tokens=30))
    assert len(warned(lambda: engine.generate_all(PROMPTS, max_new_tokens=60))) == 1
    plain = load(target)
    assert not warned(lambda: plain.generate_all(PROMPTS, max_new_tokens=60))


def test_training_does_not_warn_of_an_untrained_draft(target):
    engine = load(target, tiny_draft(target), depth=2)
    assert not warned(lambda: greedy_traces(engine, [Record("a prompt", text="the young bird")] * 3, 60))


def test_the_command_line_prints_the_warning_as_a_sentence(fledge, tmp_path, monkeypatch):
    """The command line prints the warning without a file name and line number; other warnings keep them."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restores it after the test
    directory = tiny_target_directory(tmp_path)
    save_draft(tiny_draft(tiny_target()), tmp_path / "draft", torch.float32)
    words = ["--target", directory, "--draft", tmp_path / "draft", "--prompt", "falls until", "--max-new-tokens", 150]
    (message,) = warned(lambda: fledge("generate", *words))
    shown = warnings.formatwarning(message, ChanceWarning, "engine.py", 7, "self._acceptance.add(..)")
    assert shown == f"fledge: {message}\n"
    assert "engine.py:7: UserWarning: other" in warnings.formatwarning("other", UserWarning, "engine.py", 7)


def test_the_warning_comes_after_the_text(target, monkeypatch) -> None:
    """The rest of a text, such as the beginning of a stop string, comes first; a command ends the line before it shows
    a warning."""
    monkeypatch.setattr("fledge.decode.draft_size.CHANCE_ROUNDS", 1)
    monkeypatch.setattr("fledge.decode.draft_size.AT_CHANCE", 2.0)
    engine, came = load(target, tiny_draft(target)), []
    plain = engine.generate(PROMPTS[0], max_new_tokens=9, speculate=False).text
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *given, **line: came.append("warning"))
        came += engine.stream(PROMPTS[0], max_new_tokens=9, stop=[f"{plain[-1]} and more"])
        assert came[-1] == "warning" and "".join(came[:-1]) == plain
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *given, **line: came.append(str(given[0])))
        with held_warnings():
            warnings.warn("held", stacklevel=1)
            came.append("the end of the line")
    assert came[-2:] == ["the end of the line", "held"]
