"""Parquet files of some kilobytes that stand for gigabytes: refused, without the memory."""

import pyarrow
import pyarrow.parquet

from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions


def read(path):
    """(location, reason against it) of each part."""
    (file,) = source_files(path)
    parts = (part for part, _ in documents_of(file, ReadOptions()))
    return [(part.location, None if isinstance(part, Document) else part.reason) for part in parts]


def repeated(text, count):
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text])
    )


def written(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    assert path.stat().st_size < 40_000
    return path


def test_one_long_text_repeated(tmp_path):
    rows = read(written(tmp_path / "in.parquet", text=repeated("x" * 20_000_000, 4)))
    assert [location for location, _ in rows] == ["row 1", "row 2", "row 3", "row 4"]
    assert all("20000000 characters, allowed are" in reason for _, reason in rows)


def test_a_list_of_one_long_text_repeated(tmp_path):
    lists = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 1, 1001], pyarrow.int32()), repeated("x" * 20_000_000, 1001)
    )
    columns = {"text": pyarrow.array(["a", "b"]), "tags": lists}
    first, (_, reason) = read(written(tmp_path / "in.parquet", **columns))
    assert first == ("row 1", None)
    assert "takes more than 1000 MB of memory" in reason


def test_a_list_of_very_many_numbers(tmp_path):
    numbers = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 10_000_000], pyarrow.int32()),
        pyarrow.nulls(10_000_000, pyarrow.int8()).cast("int64", safe=False),
    )
    columns = {"text": pyarrow.array(["a"]), "numbers": numbers}
    ((_, reason),) = read(written(tmp_path / "in.parquet", **columns))
    assert "more than 1000 MB of memory" in reason


def test_a_text_that_unfolds_to_much(tmp_path):
    path = tmp_path / "in.parquet"
    table = pyarrow.table({"text": pyarrow.array(["x" * 100_000_000])})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    ((location, reason),) = read(path)
    assert location == "row 1"
    assert "100000000 characters, allowed are" in reason


def test_many_equal_texts_and_nested_values_are_none(tmp_path):
    lists = pyarrow.array([["a", None], [], None] * 1000)
    maps = pyarrow.array(
        [[("k", "v")], [], None] * 1000, pyarrow.map_(pyarrow.string(), pyarrow.string())
    )
    structs = pyarrow.array([{"a": "b", "c": [1.5]}, None, {"a": None, "c": None}] * 1000)
    found = read(
        written(
            tmp_path / "in.parquet",
            text=repeated("one text", 3000),
            lists=lists,
            maps=maps,
            structs=structs,
        )
    )
    assert [reason for _, reason in found] == [None] * 3000
