"""`fledge report` draws runs and records on one page that loads nothing, and says in a sentence what it cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fledge.commands.report import ReportOptions, run
from fledge.report.page import render
from fledge.report.read import read, report_file, sections_of
from fledge.report.training import report_run, smoothed, thinned
from support.reports import record, sweep, write_records, write_run

pytestmark = pytest.mark.usefixtures("drawing")
TRAINING = ("loss", "tau", "acceptance", "schedule", "step-parts", "speed", "vocabulary")
DECODING = ("alpha", "tau-decoded", "speedup", "round")


def page_of(*paths: Path) -> str:
    return render(sections_of(read(paths)))


def figures(page: str) -> set[str]:
    return set(re.findall(r'<figure id="([^"]*)"', page))


def test_the_page_has_every_figure(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), write_records(tmp_path / "sweep.json", sweep()))
    assert figures(page) >= {*TRAINING, *DECODING, "sample-1"}
    assert "Left out" not in page
    for said in ("highest decoded τ 2.10; 94% of the room in rows is used, 50% of the tokens are supervised",
                 "covers 93.00 % of the supervised tokens", "a run", "straße",
                 "proposed by the draft at depth 2", "fledge eval --out x.json", "A processor"):  # fmt: skip
        assert said in page, said


def test_it_loads_nothing(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), write_records(tmp_path / "sweep.json", sweep()))
    assert not re.findall(r"""(?:src|href)=["'](?!#)[^"']*|url\((?!#)[^)]*|@import|<link|<iframe""", page)
    addresses = set(re.findall(r"https?://[^\s\"'<]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not addresses
    assert len(page) < 2_000_000


def test_ids_are_unique_and_references_resolve(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), write_records(tmp_path / "sweep.json", sweep()))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)) and all(
        (a or b) in ids for a, b in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)
    )


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    sources = write_run(tmp_path / "run"), write_records(tmp_path / "r.json", record())
    assert page_of(*sources) == page_of(*sources)


def test_text_of_models_and_files_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", words=("<img src=x onerror=alert(2)>",))
    page = page_of(run, write_records(tmp_path / "r.json", {"<b>$x^2$</b>": record(), "b & c": record(tau=2.0)}))
    assert "<script>alert" not in page and "<img" not in page and "<b>$x" not in page
    assert "&lt;script&gt;alert(1)" in page and "return &lt;x&gt;" in page
    assert "\x1b" not in page and "\\x1b[31m" in page
    assert " f(x):\n\t</span>" in page  # whitespace is kept


def legend_of(page: str, figure: str) -> str:
    svg = page[page.index(f'<figure id="{figure}"') :]
    return re.sub(r"<[^>]*>", "\n", svg[svg.index("legend_1") : svg.index("</svg>")])


def test_names_that_begin_with_an_underscore_are_in_legends(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("_old", "new")]
    records = {f"{name} depth {n}": record(depth=n) for name in ("_old", "new") for n in (1, 3)}
    page = page_of(*runs, write_records(tmp_path / "r.json", records))
    for figure in ("loss", "tau", "acceptance", "schedule", "speed", "alpha"):
        assert re.search(r"\n\W?_old", legend_of(page, figure)), figure
        assert re.search(r"\nnew", legend_of(page, figure)), figure


def test_names_that_look_like_parts_of_a_drawing_stay_as_they_are(tmp_path: Path) -> None:
    names = ["#010101", 'id="url(#a)"', 'href="#b"']
    page = page_of(write_records(tmp_path / "r.json", {name: record() for name in names}))
    for figure in ("alpha", "speedup"):
        svg = page[page.index(f'<figure id="{figure}"') :]
        svg = svg[svg.index("<svg") : svg.index("</svg>")]
        text = re.sub(r"<[^>]*>", "\n", svg)
        assert all(f"\n{name}" in text for name in names), figure
        assert "#010101" not in "".join(re.findall(r"<[^>]*>", svg)) and "var(--ink)" in svg


def test_the_page_says_what_is_left_out(tmp_path: Path) -> None:
    """A run that was killed before its summary was written, and a record without samples."""
    run = write_run(tmp_path / "run")
    (run / "summary.json").unlink()
    page = page_of(run, write_records(tmp_path / "r.json", record(samples=[])))
    assert {"loss", "tau", "acceptance", "schedule", "step-parts", "speed", "alpha"} <= figures(page)
    assert figures(page).isdisjoint({"vocabulary", "sample-1"})
    assert all(f'id="{missing}-missing"' in page for missing in ("vocabulary", "samples"))


@pytest.mark.parametrize("name", ["demo.json", "draft_modes.json", "before_after_cpu.json"])
def test_committed_records_are_reported(name: str) -> None:
    page = page_of(Path(__file__).parents[1] / "bench" / "results" / name)
    assert {"alpha", "tau-decoded", "speedup"} <= figures(page)


def test_several_runs_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"try{i}" / "run", steps=40 + i) for i in range(10)]
    text = (runs[3] / "recipe.yaml").read_text().replace("lr: 0.002", "lr: 0.001")
    (runs[3] / "recipe.yaml").write_text(text)
    page = page_of(*runs)
    assert all(f"try{i}/run" in page for i in range(10))
    assert "≠ lr" in page and "≠ depth" not in page
    assert len(page) < 2_000_000


def test_differing_outputs_and_few_requests_are_warned_of(tmp_path: Path) -> None:
    page = page_of(write_records(tmp_path / "r.json", record(requests=4, identical=3, different=1)))
    assert "not lossless" in page and "Few requests" in page
    assert "not lossless" not in page_of(write_records(tmp_path / "r.json", record()))


def test_the_reason_of_pauses_is_told(tmp_path: Path) -> None:
    """`depth auto`: why nothing was drafted. Nothing is told where no round paused or no reason is known."""
    paused = record() | dict(depth="auto", paused=0.25, pause_reason="a round takes too long")
    page = page_of(write_records(tmp_path / "r.json", paused))
    assert "Speculation paused in 25% of the rounds: a round takes too long." in page
    assert "Speculation paused" not in page_of(write_records(tmp_path / "r.json", paused | dict(paused=0.0)))
    assert "Speculation paused" not in page_of(write_records(tmp_path / "r.json", paused | dict(pause_reason="")))


def test_intervals_are_those_of_the_record(tmp_path: Path) -> None:
    assert "95 %: 2.25 to 2.75" in page_of(write_records(tmp_path / "r.json", record()))
    assert "95 %: 2.25" not in page_of(write_records(tmp_path / "r.json", record(tau_interval=None)))


def test_a_run_that_is_still_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: len(whole) // 2])
    page = page_of(run)
    assert "loss" in figures(page) and "still training, or stopped" in page and "incomplete" in page


def test_one_step_is_enough(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0])
    assert "loss" in figures(page_of(run))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "is no run of fledge train"),
        (lambda p: (p.mkdir(), (p / "recipe.yaml").write_text("lr: 1")), "has no steps yet"),
        (lambda p: p.write_text(""), "is no record of fledge eval"),
        (lambda p: p.write_text("[1, 2"), "is no record of fledge eval"),
        (lambda p: p.write_text('{"a": {"tau": 1}}'), "is no record of fledge eval"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "is no record of fledge eval"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, write, said: str) -> None:
    write(tmp_path / "source")
    with pytest.raises((ValueError, OSError), match=said) as e:
        run(ReportOptions(sources=[str(tmp_path / "source")], out=str(tmp_path / "out.html")), print)
    assert "source" in str(e.value) and not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("value", [None, "text", [], {}, True, -1, [[1]], [None]])
def test_fields_of_another_type_are_left_out(tmp_path: Path, value) -> None:
    records = {f"without {key}": record() | {key: value} for key in record()}
    assert "speedup" in figures(page_of(write_records(tmp_path / "r.json", records)))


def test_only_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    source, out = write_records(tmp_path / "r.json", record()), tmp_path / "out.html"
    for _ in range(2):
        run(ReportOptions(sources=[str(source)], out=str(out)), print)
    with pytest.raises(ValueError, match="is no report of fledge"):
        run(ReportOptions(sources=[str(source)], out=str(source)), print)


def test_a_report_that_cannot_be_drawn_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    directory = write_run(tmp_path / "run")
    report_run(directory, said.append)
    assert (directory / "report.html").exists() and len(said) == 1
    monkeypatch.setattr("fledge.report.page.render", lambda sections: 1 / 0)
    report_run(directory, said.append)
    assert "was not drawn" in said[1] and "fledge report" in said[1] and len(said) == 2


def test_the_report_of_a_record_is_beside_it(tmp_path: Path) -> None:
    said: list[str] = []
    file = write_records(tmp_path / "sweep.json", sweep())
    report_file(file, said.append)
    assert figures((tmp_path / "sweep.html").read_text()) >= {"speedup", "alpha"}
    (tmp_path / "other.html").write_text("notes")
    report_file(write_records(tmp_path / "other.json", sweep()), said.append)
    assert (tmp_path / "other.html").read_text() == "notes" and "is no report of fledge" in said[1]


def test_a_position_that_no_round_reached_has_no_point(tmp_path: Path) -> None:
    page = page_of(write_records(tmp_path / "r.json", record(alpha=[0.8, 0.0, None])))
    assert "alpha" in figures(page)
    rows = re.findall(r"<td[^>]*>(\d)</td>\s*<td[^>]*>([^<]*)</td>", page)
    assert ("1", "0.80") in rows and ("2", "0.00") in rows and ("3", "–") in rows, rows
    assert "alpha" not in figures(page_of(write_records(tmp_path / "none.json", record(alpha=[None, None]))))


def test_records_of_servers_are_a_table(tmp_path: Path) -> None:
    served = {
        "tau": 2.1, "alpha": None, "endpoint": "http://localhost:8000", "concurrency": 4, "tokens_per_s": 300.0,
        "speedup": None, "own": {"tau": 2.2}, "server": {"engine": "vllm", "version": "0.20"}, "ttft_ms": None,
        "itl_ms": {"median": 3.0}, "environment": {},
    }  # fmt: skip
    page = page_of(write_records(tmp_path / "r.json", served))
    assert "servers" in figures(page) and "vllm 0.20" in page


def test_long_series_are_thinned_and_keep_their_peaks() -> None:
    x, y = list(range(100_000)), [0.0] * 100_000
    y[54_321] = 9.0
    few_x, few_y = thinned(x, y)
    assert len(few_x) <= 700 and max(few_y) == 9.0 and few_x[few_y.index(9.0)] == 54_321
    assert smoothed([1.0, 3.0]) == [1.0, 3.0]
    assert smoothed([4.0] * 100) == [4.0] * 100


def test_json_without_a_run_is_not_mistaken(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"deep": {"er": record()}}))
    assert read([tmp_path / "r.json"]).records[0].label == "deep er"
