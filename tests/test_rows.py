"""Every format of data files, compressed and damaged, and columns under other names."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fledge.data import rows as rows_module
from fledge.data.read import read_records, with_columns
from fledge.data.rows import file_rows
from fledge.data.sources import Source
from support.files import write_rows
from support.targets import tiny_target_directory

ROWS = [
    {"messages": [{"role": "user", "content": f"Can bird {i} fly?"}, {"role": "assistant", "content": "Söon." * i}]}
    for i in range(1, 40)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def write(path: Path, rows=ROWS) -> Path:
    """Writes rows in the format that the suffixes name."""
    kind = path.suffixes[0] if path.suffix in (".gz", ".zst") else path.suffix
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
        return path
    if kind == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as f:
            f.write_table(table, max_chunksize=10)
        return path
    if kind == ".csv":
        text = "messages,label\n" + "".join(
            f'"{json.dumps(r["messages"]).replace(chr(34), chr(34) * 2)}",\n' for r in rows
        )
    elif kind == ".json":
        text = json.dumps(rows, indent=1)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.compress(data[:100], "zstd", asbytes=True) + pa.compress(data[100:], "zstd", asbytes=True)
    path.write_bytes(data)
    return path


NAMES = ["jsonl", "ndjson", "json", "csv", "parquet", "arrow"]
PACKED = [f"{name}.{packed}" for name in ("jsonl", "ndjson", "json", "csv") for packed in ("gz", "zst")]


@pytest.mark.parametrize("suffix", [*NAMES, *PACKED])
def test_every_format_gives_the_same_records(suffix, tmp_path):
    path = write(tmp_path / f"chats.{suffix}")
    records = read_records([str(path)])
    assert [r.messages for r in records] == [row["messages"] for row in ROWS]
    assert records[2].where.startswith(f"{path}, ") and records[2].where.endswith(" 3")


def test_directories_and_globs_of_mixed_formats(tmp_path):
    for i, suffix in enumerate(("jsonl.zst", "parquet", "csv.gz")):
        write(tmp_path / f"{i}.{suffix}", ROWS[i : i + 1])
    (tmp_path / "code.tar.gz").write_bytes(b"no data")
    (tmp_path / "more.parquet.gz").write_bytes(b"not compressed as a whole")
    expected = [row["messages"] for row in ROWS[:3]]
    assert [r.messages for r in read_records([str(tmp_path)])] == expected
    assert [r.messages for r in read_records([str(tmp_path / "*.parque[t]")])] == expected[1:2]
    assert [r.messages for r in read_records([f"{tmp_path}/*.zst@2"])] == expected[:1] * 2
    with pytest.raises(ValueError, match=r"none\.jsonl\.zst does not exist"):
        read_records([str(tmp_path / "none.jsonl.zst")])


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "parquet", "arrow"])
@pytest.mark.parametrize("damage", ["cut", "overwritten", "another format"])
def test_damaged_files_give_one_sentence(suffix, damage, tmp_path):
    path = write(tmp_path / f"chats.{suffix}", ROWS * 50)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes({
        "cut": data[:middle], "overwritten": data[:middle] + b"\xff" * 400 + data[middle + 400 :],
        "another format": b"<html>not found</html>" * 100,
    }[damage])  # fmt: skip
    with pytest.raises(ValueError, match=rf"chats\.{suffix}") as error:
        read_records([str(path)])
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert ("cannot be read as" in str(error.value)) or (", line " in str(error.value) and damage == "overwritten")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl.gz", '{"text": "a"}\n' + '{"text": "' + "a" * 3000),
        ("a.json.gz", '{"text": "a"}\n' + '{"text": "' + "a" * 3000),
        ("a.json.gz", '{"text": "' + "a" * 3000),
        ("a.json.gz", '{"text":\n "' + "a" * 3000),
        ("a.json.gz", '[{"text": "' + "a" * 3000),
        ("a.csv.gz", "text,b\n" + "a" * 3000),
        ("a.txt.gz", "a" * 3000),
    ],
)
def test_a_line_or_record_without_end_is_not_read(name, text, tmp_path, monkeypatch):
    """Compressed data may hold a thousand times as much as the file; the rest of it would be damaged here."""
    for limit, value in (("LONGEST", 1000), ("LONGEST_TEXT", 2000)):
        monkeypatch.setattr(rows_module, limit, value)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) + gzip.compress(b" " * 10**6) * 9)
    with pytest.raises(ValueError, match=r"cannot be read as gz.*: it has .*more than [12],000 characters; it may be"):
        read_records([str(tmp_path / name)])


def test_a_cut_file_says_how_far_it_went(tmp_path):
    path = write(tmp_path / "chats.jsonl.zst", ROWS * 500)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"cannot be read as zst after [\d,]+ rows: Truncated compressed stream; it may"
    ):
        read_records([str(path)])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[{"text": "a"}, {"text": ]', "record 2 is not JSON"),
        ('[{"text": "a"} {"text": "b"}]', "after record 1, the list neither goes on nor ends"),
        ('[{"text": "a"}', "after record 1, the list neither goes on nor ends"),
        ('[{"text": "a"}] more', "after record 1, the list neither"),
        ("[" * 100_000, "record 1 is nested too deeply"),
        ('{"text": "a"', "is not JSON"),
    ],
)
def test_broken_lists_name_the_record(text, match, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        read_records([str(tmp_path / "a.json")])


def test_broken_csv_names_the_line(tmp_path):
    file = tmp_path / "a.csv"
    for text, match in (("text,b\na,b\nc,d,e\n", "line 3 has more cells"), ("text,b\na\n", "line 2 has fewer cells")):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"cannot be read as csv.*: {match} than the header"):
            read_records([str(file)])
    file.write_text('text\n"never closed\n')
    with pytest.raises(ValueError, match="cannot be read as csv: unexpected end of data"):
        read_records([str(file)])
    file.write_text(f"text,note\n{'x' * 200_000},\n7,\n")
    assert [r.text for r in read_records([str(file)])] == ["x" * 200_000, "7"], "numbers stay text, and texts are long"
    csv.field_size_limit(131072)


def test_only_a_part_of_a_file_is_in_memory(tmp_path):
    """The first row of a file is there before the rest is read: the rest may even be damaged."""
    for suffix in ("jsonl.zst", "jsonl.gz", "parquet", "arrow"):
        path = write(tmp_path / f"chats.{suffix}", ROWS * 300)
        if suffix != "parquet":  # whose directory is at its end
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
        assert next(file_rows(path))[0]["messages"] == ROWS[0]["messages"], suffix


def test_fields_that_a_table_fills_with_null_are_absent(tmp_path):
    """All arguments of a table's calls have the same fields."""
    calls = [{"function": {"name": "look", "arguments": a}} for a in ({"at": "bird"}, {"for": "a wing"})]
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [c]}]}
        for c in calls
    ]
    for suffix in ("parquet", "arrow"):
        records = read_records([str(write(tmp_path / f"a.{suffix}", rows))])
        assert [r.messages[1] for r in records] == [row["messages"][1] for row in rows]
    explicit = [{"function": {"name": "look", "arguments": {"at": None}}}]
    rows[0]["messages"][1]["tool_calls"] = explicit
    assert read_records([str(write(tmp_path / "a.jsonl", rows))])[0].messages[1]["tool_calls"] == explicit


# -- columns ----------------------------------------------------------------------------------------------------------

QUESTION = {"question": "Can it fly?", "answer": "Soon.", "text": "another text", "system": "Be brief."}


def test_columns_under_other_names(tmp_path):
    file = str(write_rows(tmp_path / "a.jsonl", [QUESTION]))
    (record,) = read_records(with_columns([file], "instruction=question, output=answer"))
    assert [m["content"] for m in record.messages] == ["Be brief.", "Can it fly?", "Soon."]
    (record,) = read_records(with_columns([file], "prompt=question,completion=answer"))
    assert record.text == "Can it fly?Soon." and record.prompt_length == len("Can it fly?")
    own = {"source": file, "columns": {"text": "answer"}}
    texts = [r.text for r in read_records(with_columns([own, file, f"{file}@2"], "text=question"))]
    assert texts == ["Soon.", *["Can it fly?"] * 3], "a source's own mapping comes first"
    assert with_columns([file], None) == [file]


def test_missing_and_unknown_columns_are_explained(tmp_path):
    file = str(write_rows(tmp_path / "a.jsonl", [QUESTION, {"dialog": ROWS[0]["messages"]}]))
    with pytest.raises(ValueError, match=r"line 1 has no column ask.*its columns are question, answer, text, system"):
        read_records(with_columns([file], "text=ask"))
    with pytest.raises(ValueError, match=r"--columns: question is not a name .*; write prompt=question"):
        with_columns([file], "question=prompt")
    with pytest.raises(ValueError, match=r"`columns` of .*: ask is not a name that fledge reads \(messages, "):
        read_records([Source(file, columns={"ask": "question"})])
    for wrong in ("question", "text=", "", "text=a,text=b"):
        with pytest.raises(ValueError, match="--columns"):
            with_columns([file], wrong)
    refused: list[str] = []
    read_records([file], skip=refused.append)
    assert "Name the right ones with --columns messages=COLUMN" in refused[0]
    write_rows(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(
        ValueError, match=r"its fields are answer .str., question .str.\. Name the right ones with --columns"
    ):
        read_records([file])


@pytest.mark.parametrize(
    ("names", "roles"), [(("from", "content"), ("human", "gpt")), (("speaker", "text"), ("user", "bot")),
                         (("role", "value"), ("user", "model")), (("role", "content"), ("human", "gpt"))],
)  # fmt: skip
def test_names_of_roles_and_contents(names, roles, tmp_path):
    said = [{names[0]: role, names[1]: text} for role, text in zip(roles, ("Can it?", "Soon."), strict=True)]
    for field in ("messages", "conversations"):
        (record,) = read_records([str(write_rows(tmp_path / "a.jsonl", [{field: said}]))])
        expected = [{"role": "user", "content": "Can it?"}, {"role": "assistant", "content": "Soon."}]
        assert record.messages == expected


# -- commands ---------------------------------------------------------------------------------------------------------


def test_train_reads_compressed_data_with_columns_and_several_workers(fledge, tmp_path):
    tiny_target_directory(tmp_path)
    renamed = [{"dialog": row["messages"]} for row in ROWS]
    path = write(tmp_path / "chats.jsonl.zst", renamed)
    words = ["train", "--target", tmp_path / "target", "--data", path, "--out", tmp_path / "run"]
    words += "--steps 1 --depth 2 --max-length 64 --row-length 128 --device cpu --draft-vocab 200".split()
    refused = fledge(*words)
    assert refused.code == 2 and "--columns messages=COLUMN" in " ".join(refused.err.split()), refused.err
    went = fledge(*words, "--columns", "messages=dialog", "--data-workers", 2)
    assert went.code == 0 and "39 records" in went.err, went.err
