"""Reading data: every layout and format, shares, and an error that names the place for what cannot be read."""

from __future__ import annotations

import json

import pytest

from fledge.data.read import Record, read_records, whole_path

USER, ANSWER = {"role": "user", "content": "Can it fly?"}, {"role": "assistant", "content": "Soon."}
SYSTEM = {"role": "system", "content": "Be brief."}


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def texts(records: list[Record]) -> list[str | None]:
    return [r.text for r in records]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """`datasets` converts files into a cache, which is the test's own here."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def one(tmp_path, row) -> Record:
    (record,) = read_records([jsonl(tmp_path / "one.jsonl", [row])])
    return record


# -- layouts ------------------------------------------------------------------------------------------------------


def test_messages_are_taken_as_they_are(tmp_path):
    record = one(tmp_path, {"messages": [SYSTEM, USER, ANSWER], "tools": [{"name": "look"}], "source": "x"})
    assert record.messages == [SYSTEM, USER, ANSWER]
    assert record.tools == [{"name": "look"}] and record.text is None
    assert record.where.endswith("one.jsonl, line 1")


def test_sharegpt_speakers_become_roles(tmp_path):
    turns = [("system", "S"), ("human", "U"), ("gpt", "A"), ("observation", "T"), ("chatgpt", "B")]
    record = one(tmp_path, {"conversations": [{"from": f, "value": v} for f, v in turns]})
    assert [(m["role"], m["content"]) for m in record.messages] == [
        ("system", "S"), ("user", "U"), ("assistant", "A"), ("tool", "T"), ("assistant", "B")
    ]  # fmt: skip


def test_conversations_may_name_roles(tmp_path):
    assert one(tmp_path, {"conversations": [USER, ANSWER]}).messages == [USER, ANSWER]


@pytest.mark.parametrize("turns", [[USER, ANSWER], [{"from": "human", "value": "Can it fly?"}]], ids=["role", "from"])
def test_the_system_field_comes_first(tmp_path, turns):
    record = one(tmp_path, {"conversations": turns, "system": "Be brief."})
    assert record.messages[:2] == [SYSTEM, USER]


def test_a_system_message_is_not_doubled(tmp_path):
    record = one(tmp_path, {"conversations": [SYSTEM, USER, ANSWER], "system": "Be long."})
    assert record.messages == [SYSTEM, USER, ANSWER]


def test_null_fields_are_absent_but_content_stays(tmp_path):
    """Tables fill what a row lacks with null; a message that only calls a tool has content null."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    record = one(tmp_path, {"messages": [{**USER, "tool_calls": None}, call]})
    assert record.messages == [USER, call]


def test_text(tmp_path):
    assert one(tmp_path, {"text": "Once upon a time"}).text == "Once upon a time"


def test_a_filled_layout_wins_over_an_empty_one(tmp_path):
    assert one(tmp_path, {"messages": [], "conversations": None, "text": "kept"}).text == "kept"


# -- formats ------------------------------------------------------------------------------------------------------


def test_json_lists_and_single_objects(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    (tmp_path / "single.json").write_text(json.dumps({"text": "c"}))
    records = read_records([str(tmp_path / "list.json"), str(tmp_path / "single.json")])
    assert texts(records) == ["a", "b", "c"]
    assert records[1].where.endswith("list.json, record 2")


def test_txt_is_one_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo Ünïcødé\n", encoding="utf-8")
    assert texts(read_records([str(tmp_path / "a.txt")])) == ["one\n\ntwo Ünïcødé\n"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert texts(read_records([str(tmp_path / "a.jsonl")])) == ["a"]


def test_blank_lines_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n  \n{"text": "b"}')
    assert [r.where[-6:] for r in read_records([str(tmp_path / "a.jsonl")])] == ["line 2", "line 4"]


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"one, two",1\nthree,2\n')
    records = read_records([str(tmp_path / "a.csv")])
    assert texts(records) == ["one, two", "three"] and records[1].where.endswith("a.csv, row 2")


def test_parquet(tmp_path):
    import datasets

    rows = [{"messages": [USER, ANSWER], "tools": None}, {"messages": [SYSTEM, USER, ANSWER], "tools": None}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [r.messages for r in read_records([str(tmp_path / "a.parquet")])] == [r["messages"] for r in rows]


# -- sources ------------------------------------------------------------------------------------------------------


def test_globs_directories_and_many_sources_in_order(tmp_path):
    for name in ("b", "a", "deep/c"):
        jsonl(tmp_path / "d" / f"{name}.jsonl", [{"text": name}])
    (tmp_path / "d" / "e.txt").write_text("e")
    (tmp_path / "d" / "README.md").write_text("not data")
    single = jsonl(tmp_path / "z.jsonl", [{"text": "z"}])
    assert texts(read_records([single, str(tmp_path / "d" / "*.jsonl")])) == ["z", "a", "b"]
    assert texts(read_records([str(tmp_path / "d"), single])) == ["a", "b", "deep/c", "e", "z"]
    assert texts(read_records([str(tmp_path / "**" / "c.jsonl")])) == ["deep/c"]


@pytest.mark.parametrize(("share", "count"), [("0.25", 25), ("0.5", 50), ("1", 100), ("2", 200), ("1.5", 150)])
def test_a_share_takes_that_many(tmp_path, share, count):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(100)]) + f"@{share}"
    records = read_records([source], seed=3)
    assert len(records) == count
    assert set(texts(records)) <= {str(i) for i in range(100)}
    assert len(set(texts(records))) == min(count, 100)


def test_shares_are_drawn_by_the_seed(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(100)]) + "@0.3"
    first, again, other = (texts(read_records([source], seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_a_share_of_nothing_is_refused(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(40)]) + "@0.01"
    with pytest.raises(ValueError, match="takes none of its 40 records"):
        read_records([source])


def test_what_a_record_says_is_its_own(tmp_path):
    """Wherever it stands: a chat held out is held out of every file that has it."""
    rows = [{"messages": [{"role": "user", "content": str(i // 2)}]} for i in range(6)]
    records = read_records([jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows[:2])])
    assert len({r.said() for r in records}) == 3 and len({r.where for r in records}) == 8


@pytest.mark.parametrize(("source", "whole"), [("a.jsonl@0.5", True), ("*.jsonl", True), ("owner/name:train@2", False)])
def test_a_source_is_the_same_from_anywhere(source, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert whole_path(source) == (f"{tmp_path}/{source}" if whole else source)


def test_an_at_sign_in_a_path_is_no_share(tmp_path):
    plain = jsonl(tmp_path / "me@home" / "a.jsonl", [{"text": "a"}])
    named = jsonl(tmp_path / "b@2.jsonl", [{"text": "b"}])
    assert texts(read_records([plain, f"{plain}@2", named])) == ["a", "a", "a", "b"]


@pytest.mark.parametrize("name", ["owner/nothing", "owner/Nothing-2.5", "owner/nothing:test", "owner/n:train[:10]"])
def test_a_hub_id_out_of_reach_is_one_clear_error(monkeypatch, tmp_path, name):
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="is no file here, and as a hub data set it cannot be loaded") as error:
        read_records([name])
    assert str(error.value).startswith(f"{name} is") and "\n" not in str(error.value)


# -- what cannot be read --------------------------------------------------------------------------------------------


def refused(source, match):
    with pytest.raises(ValueError, match=match) as error:
        read_records([str(source)])
    return str(error.value)


def test_missing_and_empty_files(tmp_path):
    refused(tmp_path / "none.jsonl", r"none\.jsonl does not exist")
    refused(tmp_path / "none*.jsonl", "does not exist")
    (tmp_path / "empty.jsonl").touch()
    refused(tmp_path / "empty.jsonl", r"empty\.jsonl is empty")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    refused(tmp_path / "blank.jsonl", "holds no records")
    (tmp_path / "void").mkdir()
    refused(tmp_path / "void", "holds no records")


def test_broken_json_names_its_line(tmp_path):
    lines = [json.dumps({"text": str(i)}) for i in range(10_000)]
    lines[6_999] = '{"text": "cut o'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert "nothing was skipped" in refused(tmp_path / "a.jsonl", r"a\.jsonl, line 7000 is not JSON")
    (tmp_path / "a.json").write_text('[{"text": "a"},')
    refused(tmp_path / "a.json", r"a\.json is not JSON")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "answer": "b"}, r"line 1 has none of .* only \['answer', 'prompt'\]"),
        ({"messages": []}, "line 1 has none of"),
        ({"text": 5}, "line 1 has none of"),
        (["text"], "line 1 is a list, not an object"),
        ({"messages": "hello"}, "line 1: its messages are a str, not a list"),
        ({"conversations": {"from": "human", "value": "x"}}, "line 1: its messages are a dict, not a list"),
        ({"messages": [USER, {"content": "no role"}]}, "line 1: a message needs a `role`"),
        ({"messages": [{"role": None, "content": "null role"}]}, "line 1: a message needs a `role`"),
        ({"messages": ["hello"]}, "line 1: a message needs a `role`"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "line 1: unknown speaker 'martian'; known are human"),
        ({"conversations": [{"from": "human"}]}, "line 1: a ShareGPT turn needs `from` and `value`"),
    ],
)
def test_odd_rows_are_refused_with_their_place(tmp_path, row, match):
    refused(jsonl(tmp_path / "a.jsonl", [row]), match)


def test_files_of_other_kinds_are_named(tmp_path):
    (tmp_path / "a.md").write_text("# hello")
    refused(tmp_path / "a.md", r"a\.md: fledge reads \.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    refused(tmp_path / "a.parquet", r"a\.parquet cannot be read as parquet")
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    refused(tmp_path / "a.jsonl", r"a\.jsonl is not UTF-8")


@pytest.mark.parametrize("share", ["half", "-1", "", "0.5x"])
def test_a_share_that_is_no_number_is_refused(tmp_path, share):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    refused(f"{source}@{share}", "what follows @ is the share to take")


def test_json_lines_named_json(tmp_path):
    """Many hub files hold JSON lines under the name .json; their errors name the line too."""
    file = tmp_path / "chats.json"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [r.text for r in read_records([str(file)])] == ["one", "two"]
    file.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_records([str(file)])
