"""Parquet files of some kilobytes that stand for gigabytes: refused with the place and the limit, and without the memory."""

import json
import sys

import pyarrow
import pyarrow.parquet

from tests.ran import ran

MEMORY = 1_500_000_000  # address space of the reading process; what it needs without a bomb is a third of it
READ = """
import resource, sys, json
from pathlib import Path
import pyarrow, pyarrow.parquet, pyarrow.compute
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.files import documents_of, source_files
pyarrow.set_memory_pool(pyarrow.system_memory_pool())
pyarrow.set_cpu_count(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
(file,) = source_files(Path(sys.argv[1]))
found = [one for one, _ in documents_of(file, ReadOptions())]
print(json.dumps([[one.location, one.reason] if isinstance(one, Rejection) else [one.location, None] for one in found]))
"""


def read(path):
    """(location, reason against it) of what a process of little memory reads."""
    command = [sys.executable, "-c", READ, str(path), str(MEMORY)]
    done = ran(command, check=True)
    return [(location, reason) for location, reason in json.loads(done.stdout)]


def repeated(text, count):
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text])
    )


def written(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    assert path.stat().st_size < 40_000
    return path


def test_one_long_text_repeated(tmp_path):
    found = read(written(tmp_path / "in.parquet", text=repeated("x" * 32_000_000, 64)))
    assert len(found) == 64
    assert all("bytes up to `text`, allowed are 1000000" in reason for _, reason in found)


def test_a_list_of_one_long_text_repeated(tmp_path):
    lists = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 1, 1001], pyarrow.int32()), repeated("x" * 20_000_000, 1001)
    )
    ((_, one), (_, other)) = read(
        written(tmp_path / "in.parquet", text=pyarrow.array(["a", "b"]), tags=lists)
    )
    assert "20000001 bytes up to `tags`" in one
    assert "20000000001 bytes up to `tags`" in other


def test_a_list_of_very_many_numbers(tmp_path):
    numbers = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 10_000_000], pyarrow.int32()),
        pyarrow.nulls(10_000_000, pyarrow.int8()).cast("int64", safe=False),
    )
    ((location, reason),) = read(
        written(tmp_path / "in.parquet", text=pyarrow.array(["a"]), numbers=numbers)
    )
    assert location == "after row 0"
    assert "`numbers.list.element`" in reason
    assert "allowed are 64000000" in reason


def test_pages_that_unfold_to_much(tmp_path):
    long = pyarrow.array(["x" * 100_000_000])
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": long}), path, compression="zstd", use_dictionary=False
    )
    ((_, reason),) = read(path)
    assert "would become 1000" in reason


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
