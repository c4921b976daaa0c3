"""Every value of a data file as the file says it, in every form, and the place of a value that cannot be read."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
import string
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo.common.data.row_reader import RowReader
from gspo.common.data.row_store import RowStore
from gspo.common.data.strict_json import MAX_DEPTH
from gspo.common.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))
# Without the time, which would name a case otherwise in each worker of a test run.
GZIP = gzip.compress(b'{"a": 1}\n' * 99, mtime=0)


def columns_of(path: Path, **types: Any) -> list[dict[str, Any]]:
    return [row.columns for row in RowReader("data.prompts", [path], types)]


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_cells_of_csv_are_text(tmp_path: Path) -> None:
    """Zeros in front, NA and True are answers: no type is guessed."""
    cells = ["007", "010", "00", "1.50", "NA", "None", "null", "N/A", "", "True", "2024-01-05", " 42", "1e5", "a,b\nc"]
    rows = "".join(f'code {number},"{cell}"\r\n' for number, cell in enumerate(cells))
    path = written(tmp_path, "p.csv", f"\ufeffprompt,answer\r\n{rows}\r\n")
    assert [row["answer"] for row in columns_of(path)] == cells
    assert columns_of(written(tmp_path, "index.csv", ",a\n0,x\n")) == [{"Unnamed: 0": "0", "a": "x"}]


def test_a_type_reads_a_column_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, "p.csv", 'i,n,b,j,t,gone\n007,1.50,True,"[{""a"": null}]",1,x\n-3,,false,,2,x\n')
    types = {"i": "number", "n": "number", "b": "boolean", "j": "json", "t": "text", "gone": "omit"}
    assert columns_of(path, **types) == [
        {"i": 7, "n": 1.5, "b": True, "j": [{"a": None}], "t": "1"},
        {"i": -3, "n": None, "b": False, "j": None, "t": "2"},
    ]
    assert columns_of(written(tmp_path, "p.jsonl", '{"a": 42, "b": [1]}'), a="text", b="text") == [
        {"a": "42", "b": "[1]"}
    ]


@pytest.mark.parametrize(
    ("cell", "kind", "problem"),
    [
        ("x", "number", "column 'a' is no number: x"),
        ("nan", "number", "column 'a' is no number: nan"),
        ("1_0", "number", "column 'a' is no number: '1_0'"),
        ("yes", "boolean", "column 'a' is neither true nor false: 'yes'"),
        ("[1", "json", "column 'a' is not JSON"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, cell: str, kind: str, problem: str) -> None:
    path = written(tmp_path, "p.csv", f"a\n{cell}\n")
    with pytest.raises(InputError) as caught:
        columns_of(path, a=kind)
    assert f"p.csv, line 2: {problem}" in str(caught.value).replace('"', "'")
    assert "data.types.a: text" in str(caught.value)


def test_json_keeps_types_and_numbers_in_any_order_of_rows(tmp_path: Path) -> None:
    """Guessed types made a date of "2024-01-05", and 42.0 of 42 beside 0.5."""
    values = ["2024-01-05", 42, 0.5, 9007199254740993, 123456789012345678901234567890, "42", True, None, 1e-7, -0.0]
    values += ["12:30:00", {"when": ["2024-01-05", 1]}, [1, 2.5, "x"], {"a": 1, "b": None}, "", "\u2028\x00"]
    for order in (values, values[::-1]):
        rows = [{"answer": value, "n": place} for place, value in enumerate(order)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        for name, text in {
            "p.jsonl": lines,
            "bom.jsonl": f"\ufeff{lines}",
            "crlf.jsonl": lines.replace("\n", "\r\n\r\n"),
            "pretty.jsonl": "\n".join(json.dumps(row, indent=2) for row in rows),
            "list.json": json.dumps(rows),
            "pretty.json": json.dumps(rows, indent=2),
        }.items():
            read = columns_of(written(tmp_path, name, text))
            assert json.dumps(read) == json.dumps(rows), name  # tells 42 from 42.0, and True from 1
        path = written(tmp_path, "p.jsonl.gz", gzip.compress(lines.encode()))
        assert columns_of(path) == rows


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("p.jsonl", '{"a": 1}\n{"a": NaN}\n', "p.jsonl, line 2, character 7: NaN is not JSON"),
        ("p.jsonl", '{"a": 1e400}', "line 1, character 7: 1e400 is beyond the numbers"),
        ("p.jsonl", '{"a": 1, "a": 2}', 'line 1, character 2: "a" is a key twice'),
        ("p.jsonl", '{"a": "\\ud800"}', "line 1, character 8: has half of a surrogate pair"),
        ("p.jsonl", f'{{"a": {"1" * 5000}}}', "has a whole number of more than 4300 digits"),
        ("p.jsonl", '{"a": 1}\n{"a":\n{"a": 2}\n', "line 2, character 6: is not JSON"),
        ("p.jsonl", '{"a": 1} x', "line 1, character 10: is not JSON"),
        ("p.jsonl", '{"a": 1}\n7\n', "line 2: is a number, and a row is an object"),
        ("p.json", "[1]", "line 1: is a number, and a row is an object"),
        ("p.json", '[{"a": 1},\n{"a": 2},]', "line 2: is the last row of the list, and a comma"),
        ("p.json", '[{"a": 1}\n{"a": 2}]', "line 1: is not followed by a comma"),
        ("p.json", '[{"a": 1}', "line 1: is not followed by a comma"),
        ("p.json", '[{"a": 1}] x', "line 1: is the last row of the list, and something"),
        ("p.jsonl", b'{"a": "\xff"}', "line 1: is not UTF-8"),
        ("p.csv", "a,b\n1,2\n1\n", "p.csv, line 3: has 1 cells, and the header has 2"),
        ("p.csv", 'a,b\n1,"2\n', "line 2: is not CSV"),
        ("p.csv", "a,a\n1,2\n", "line 1: names two columns 'a'"),
        ("p.csv", b"a\n\xff\n", "line 2: is not UTF-8"),
        ("p.csv", "a,b\n1,2\n".encode("utf-16-be"), "line 1: has zero bytes, as UTF-16 has"),
        ("p.csv", "prompt;answer\n1,5;2\n", "line 1: separates cells by ';', and CSV by commas: prompt;answer"),
        ("p.csv", "prompt\tanswer\na\t2\n", r"line 1: separates cells by '\t', and CSV by commas"),
        ("p.jsonl.gz", GZIP[:-9], "p.jsonl.gz cannot be read (Compressed file ended"),
        ("p.jsonl.gz", GZIP[:10] + b"\xff" * 9, "p.jsonl.gz cannot be read (Error -3 while decompress"),
        ("p.csv", "a,b\n", "has no rows"),
        ("p.jsonl", "\n \n", "has no rows"),
    ],
)
def test_what_cannot_be_read_is_placed(tmp_path: Path, name: str, text: str | bytes, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        columns_of(written(tmp_path, name, text))
    assert problem in str(caught.value)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 5_000, 100_000])
def test_deep_nesting_is_an_error(tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    path = written(tmp_path, "p.jsonl", f'{{"a": 1}}\n{{"a": {deep}}}\n')
    with pytest.raises(InputError, match=rf"line 2, character 1: is nested deeper than {MAX_DEPTH} levels"):
        columns_of(path)
    shallow = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert len(columns_of(written(tmp_path, "q.jsonl", f'{{"a": {shallow}}}'))) == 1


CALLS = [
    {"prompt": [{"role": "user", "content": "x", "tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}]},
    {"prompt": [{"role": "user", "content": "y", "tool_calls": [{"name": "add", "arguments": {"x": 1}}], "name": "n"}]},
]
SCHEMAS = [
    {"prompt": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "extra_info": {"a": 1}},
    {"prompt": "b", "schema": {"type": "string", "minLength": 2}, "extra_info": {"b": [{"c": "d"}, {"e": "f"}]}},
]


@pytest.mark.parametrize("rows", [CALLS, SCHEMAS])
def test_the_nulls_that_a_table_adds_are_not_data(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "p.parquet", tmp_path / "saved"):
        assert columns_of(path) == rows, path
    table = pa.Table.from_pylist([{"a": None, "b": [None, 1]}, {"a": 1, "b": None}])
    pq.write_table(table, tmp_path / "q.parquet")
    assert columns_of(tmp_path / "q.parquet") == [{"a": None, "b": [None, 1]}, {"a": 1, "b": None}]


def test_typed_columns_keep_their_types(tmp_path: Path) -> None:
    day, time = datetime.date(2024, 1, 5), datetime.datetime(2024, 1, 5, 1, 2, 3)  # noqa: DTZ001 - a table's time without a zone
    columns: dict[str, tuple[pa.DataType, Any, Any]] = {
        "large": (pa.int64(), 9007199254740993, 9007199254740993),
        "unsigned": (pa.uint64(), 2**64 - 1, 2**64 - 1),
        "half": (pa.float16(), 0.5, 0.5),
        "day": (pa.date32(), day, "2024-01-05"),
        "time": (pa.timestamp("ns"), time, "2024-01-05 01:02:03"),
        "exact": (pa.decimal128(30, 2), Decimal("1.50"), "1.50"),
        "map": (pa.map_(pa.string(), pa.int64()), [("a", 1), ("b", None)], {"a": 1, "b": None}),
        "word": (pa.dictionary(pa.int8(), pa.string()), "x", "x"),
        "fixed": (pa.list_(pa.float32(), 2), [0.5, 1.0], [0.5, 1.0]),
        "json": (pa.json_(), '{"a": null, "b": 1e2}', {"a": None, "b": 100.0}),
        "flag": (pa.bool_(), True, True),
        "struct": (pa.struct({"day": pa.date32(), "n": pa.int8()}), {"day": day}, {"day": "2024-01-05"}),
    }
    arrays = [
        pa.array([value], kind.storage_type if name == "json" else kind) for name, (kind, value, _) in columns.items()
    ]
    arrays = [
        pa.ExtensionArray.from_storage(pa.json_(), a) if n == "json" else a
        for n, a in zip(columns, arrays, strict=True)
    ]
    pq.write_table(pa.table(arrays, names=list(columns)), tmp_path / "p.parquet")
    (row,) = columns_of(tmp_path / "p.parquet")
    assert json.dumps(row) == json.dumps({name: right for name, (_, _, right) in columns.items()})


def test_a_value_of_a_table_that_cannot_be_read_is_placed(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(pa.table({"a": bad}), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet, row 2: column 'a' cannot be read"):
        columns_of(tmp_path / "p.parquet")


def test_bytes_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    image = {"bytes": PNG, "path": "a.png"}
    rows = [{"prompt": "p", "image": image, "images": [image, image], "raw": PNG, "extra": {"n": 1, "thumb": PNG}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    reader = RowReader("data.prompts", [tmp_path / "p.parquet"], {"raw": "base64"})
    assert [row.columns for row in reader] == [
        {"prompt": "p", "raw": base64.b64encode(PNG).decode(), "extra": {"n": 1}}
    ]
    assert reader.left_out == {"image": "images", "images": "images", "extra": "bytes"}
    asked = columns_of(tmp_path / "p.parquet", image="base64", images="omit", raw="omit")
    assert asked == [
        {"prompt": "p", "image": {"bytes": base64.b64encode(PNG).decode(), "path": "a.png"}, "extra": {"n": 1}}
    ]


def test_several_files_are_one_data_set_of_all_their_columns(tmp_path: Path) -> None:
    first = written(tmp_path, "a.jsonl", '{"prompt": "a", "x": 1}\n\n{"prompt": "b"}\n')
    second = written(tmp_path, "b.csv", "prompt,y\nc,2\n")
    store = RowStore(RowReader("data.prompts", [first, second]))
    assert store.names == ["prompt", "x", "y"]
    assert store.rows([2, 0]) == [{"prompt": "c", "x": None, "y": "2"}, {"prompt": "a", "x": 1, "y": None}]
    assert [store.place(number) for number in range(3)] == [
        f"{first}, line 1", f"{first}, line 3", f"{second}, line 2",
    ]  # fmt: skip
    second.write_text("changed")
    assert store.values("prompt", [2]) == ["c"]  # the run has its own copy


def test_a_folder_reads_its_files_as_they_would_be_read_alone(tmp_path: Path) -> None:
    written(tmp_path, "train-0.jsonl", '{"prompt": "a", "answer": "2024-01-05"}\n')
    written(tmp_path, "train-1.jsonl", '{"prompt": "b", "answer": 42}\n')
    written(tmp_path, "test.jsonl", '{"prompt": "c", "answer": 1}\n')
    assert [row["answer"] for row in columns_of(tmp_path)] == ["2024-01-05", 42]
    (texts := tmp_path / "texts").mkdir()
    written(texts, "train.txt", "one\ntwo\n")
    assert columns_of(texts) == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("dataset_dict.json", "[]", "list indices must be integers"),
        ("a.xml", "<a/>", "No such file"),
        ("script.py", "", "Dataset scripts are no longer supported"),
        ("a.jsonl.gz", "no gzip", "Not a gzipped file"),
    ],
)
def test_a_folder_that_cannot_be_opened_is_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    """`datasets` raises a class of its own for each."""
    folder = tmp_path / "script"
    folder.mkdir()
    written(folder, name, text)
    with pytest.raises(InputError, match=f"script.* cannot be read .*{problem}"):
        columns_of(folder)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array(["x"]), pa.array(["y"])], names=["a", "a"]), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet cannot be read \(two columns have the name 'a'\)"):
        columns_of(tmp_path / "p.parquet")


def test_a_type_that_no_column_has_is_known(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["1"], "image": [PNG]}), tmp_path / "p.parquet")
    second = written(tmp_path, "p.jsonl", '{"b": "2"}')
    types = dict.fromkeys(("a", "b", "image"), "omit") | {"c": "number"}
    reader = RowReader("data.prompts", [tmp_path / "p.parquet", second], types)  # type: ignore[arg-type]
    assert [row.columns for row in reader] == [{}, {}] and reader.unused_types == {"c"}


def test_base64_of_a_column_without_bytes_has_no_effect(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["1"], "raw": [PNG]}), tmp_path / "p.parquet")
    types: dict[str, Any] = {"a": "base64", "raw": "base64"}
    reader = RowReader("data.prompts", [tmp_path / "p.parquet"], types)
    assert [row.columns["a"] for row in reader] == ["1"]
    assert (reader.unused_types, reader.left_out) == ({"a"}, {})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("p.jsonl", GZIP, "p.jsonl is gzip by its first bytes. Name it p.jsonl.gz"),
        ("p.parquet", GZIP, "p.parquet is gzip by its first bytes"),
        ("p.json", b"PAR1....", "p.json is Parquet by its first bytes. Let its name end in .parquet"),
        ("p.csv", b"PK\x03\x04....", "p.csv is a zip archive or an Excel workbook by its first bytes"),
        ("p.jsonl.gz", b"\x28\xb5\x2f\xfd....", "p.jsonl.gz is zstd by its first bytes. Unpack it: zstd -d"),
    ],
)
def test_a_file_of_another_form_than_its_name_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        columns_of(written(tmp_path, name, content))
    assert problem in str(caught.value)


def test_a_full_disk_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "p.jsonl", '{"a": 1}\n' * 5000)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: Path("/dev/full").open("r+b"))  # noqa: SIM115 - RowStore's
    with pytest.raises(InputError, match=r"TMPDIR: .* cannot hold .*\(No space left on device\)"):
        RowStore(RowReader("data.prompts", [path]))


def test_saved_json_columns_are_decoded(tmp_path: Path) -> None:
    mixed = {"a": [[{"b": 0}, {"c": None}], [1, "x"]]}
    saved = datasets.Dataset.from_dict(mixed, on_mixed_types="use_json")
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "p.parquet")
    for path in (tmp_path / "saved", tmp_path / "p.parquet"):
        assert [row["a"] for row in columns_of(path)] == mixed["a"]


def test_a_folder_of_the_cache_of_datasets_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"a": 1}\n{"a": 2}\n')
    cached = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert columns_of(Path(cached.cache_files[0]["filename"]).parent) == [{"a": 1}, {"a": 2}]


# Values that a table cannot change: no struct, for its nulls are not data, and whole numbers of 64 bits.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "text": TEXTS,
    "whole": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "list": st.lists(st.integers(-9, 9), max_size=3),
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | LEAVES["float"] | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.lists(st.text(string.ascii_letters + " ._é", min_size=1, max_size=6), min_size=1, max_size=4, unique=True)
CHECK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same(read: Sequence[Any], rows: Sequence[Any]) -> bool:
    """Equal with types: 1, 1.0 and true differ, and so does the order of keys in no way."""
    return json.dumps(read, sort_keys=True) == json.dumps(rows, sort_keys=True)


@CHECK
@given(data=st.data())
def test_what_is_written_in_json_is_read(tmp_path: Path, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.dictionaries(TEXTS, JSON_VALUES, max_size=4), min_size=1, max_size=6))
    is_ascii = data.draw(st.booleans())
    indent = data.draw(st.sampled_from([None, 0, 2]))
    lines = "\n".join(json.dumps(row, ensure_ascii=is_ascii) for row in rows)
    pretty = "\n".join(json.dumps(row, ensure_ascii=is_ascii, indent=indent) for row in rows)
    whole = json.dumps(rows, ensure_ascii=is_ascii, indent=indent)
    for name, text in {"p.jsonl": lines, "q.jsonl": pretty, "p.json": whole}.items():
        path = written(tmp_path, name, text)
        assert same(columns_of(path), rows)
        store = RowStore(RowReader("data.prompts", [path]))
        full = [{**dict.fromkeys(store.names), **row} for row in rows]
        assert same(store.rows(range(len(rows))), full)


@CHECK
@given(data=st.data())
def test_what_is_written_in_csv_is_read(tmp_path: Path, data: st.DataObject) -> None:
    import csv

    names = data.draw(NAMES)
    cell = TEXTS.filter(lambda text: "\r" not in text)  # a carriage return is the writer's own end of a line
    rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, cell)), min_size=1, max_size=6))
    with (tmp_path / "p.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, quoting=data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])))
        writer.writeheader()
        writer.writerows(rows)
    assert columns_of(tmp_path / "p.csv") == rows


@CHECK
@given(data=st.data())
def test_what_is_written_in_a_table_is_read(tmp_path: Path, data: st.DataObject) -> None:
    names = data.draw(NAMES)
    kinds = {name: LEAVES[data.draw(st.sampled_from(sorted(LEAVES)))] | st.none() for name in names}
    rows = data.draw(st.lists(st.fixed_dictionaries(kinds), min_size=1, max_size=6))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=data.draw(st.integers(1, 4)))
    assert same(columns_of(tmp_path / "p.parquet"), rows)
