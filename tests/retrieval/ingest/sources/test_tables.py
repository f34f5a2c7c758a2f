"""Records of jsonl, csv and parquet: the good ones come through, whatever lies between them."""

import pyarrow
import pyarrow.parquet
import pytest

from hybridtei.retrieval.ingest.csv_rows import read_csv
from hybridtei.retrieval.ingest.document import Document, Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.tables import read_jsonl, read_parquet

SMALL = ReadOptions(max_record_bytes=1000, max_document_characters=500, max_metadata_bytes=100)


def read(reader, path, options=SMALL):
    """(documents, {location: reason})."""
    found = [found for found, _ in reader(path, "s", options)]
    documents = [one for one in found if isinstance(one, Document)]
    return documents, {one.location: one.reason for one in found if isinstance(one, Rejection)}


def test_jsonl(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"_id": "a", "title": "T", "text": "one", "year": 1958, "tags": ["x"]}\n\n"two"\n{"id": 7, "text": "three"}\n'
    )
    documents, rejected = read(read_jsonl, path)
    assert rejected == {}
    assert [(one.document_id, one.text, one.title) for one in documents] == [
        ("a", "one", "T"),
        ("line-3", "two", None),
        ("7", "three", None),
    ]
    assert documents[0].metadata == {"year": 1958, "tags": ["x"]}
    assert documents[0].indexed_text == "T\none"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": ""}', "is empty"),
        (b'{"text": "' + b"x" * 2000 + b'"}', "2012 bytes, allowed are 1000"),
        (b'{"text": "' + b"x" * 600 + b'"}', "600 characters, allowed are 500"),
        (b'{"text": "\\ud800"}', "not JSON"),
        (b'{"text": "a"', "not JSON"),
        (b"[" * 900, "not JSON"),
        (b"5", "neither an object nor a string"),
        (b'{"text": 5}', "is int, should be a string"),
        (b'{"text": null}', "is null"),
        (b'{"body": "a"}', "has no `text`; it has `body`"),
        (b'{"text": "a", "title": 5}', "`title` is int"),
        (b'{"text": "a", "id": true}', "`id` is bool"),
        (b'{"text": "a", "id": ""}', "`id` has 0 characters"),
    ],
)
def test_a_bad_line_is_named_and_its_neighbours_come_through(tmp_path, line, why):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line + b'\n{"text": "z"}\n')
    documents, rejected = read(read_jsonl, path)
    assert [one.text for one in documents] == ["x", "z"]
    assert list(rejected) == ["line 2"]
    assert why in rejected["line 2"]


def test_other_fields(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"body": "a", "key": "k", "id": "meta"}\n{"body": "b"}\n')
    documents, rejected = read(read_jsonl, path, ReadOptions(text_field="body", id_field="key"))
    assert [(one.document_id, one.text, one.metadata) for one in documents] == [
        ("k", "a", {"id": "meta"})
    ]
    assert "has no `key`" in rejected["line 2"]


def test_csv(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,text,score\r\n1,"two\nlines, one cell",0.5\r\n2,short\r\n3,a,b,c\r\n4,bad \xff,1\r\n'
        + b"5,"
        + b"x" * 2000
        + b',1\r\n6,"un"closed,2\r\n7,,3\r\n8,last,NaN\r\n'
    )
    documents, rejected = read(read_csv, path)
    assert [(one.document_id, one.text) for one in documents] == [
        ("1", "two\nlines, one cell"),
        ("4", "bad \ufffd"),
        ("6", "unclosed"),
        ("8", "last"),
    ]
    assert documents[0].metadata == {"score": "0.5"}
    assert rejected["line 4"] == "the row has 2 cells, the header 3"
    assert rejected["line 5"] == "the row has 4 cells, the header 3"
    assert "allowed are 1000" in rejected["line 7"]
    assert "is empty" in rejected["line 9"]


def test_parquet(tmp_path):
    path = tmp_path / "in.parquet"
    table = pyarrow.table(
        {
            "id": pyarrow.array(["a", "b", "c", "d", None]),
            "text": pyarrow.array(["one", "", "x" * 2000, "nan", "none"]),
            "score": pyarrow.array([0.5, 1.0, 1.0, float("nan"), None]),
        }
    )
    pyarrow.parquet.write_table(table, path)
    documents, rejected = read(read_parquet, path)
    assert [(one.document_id, one.metadata) for one in documents] == [
        ("a", {"score": 0.5}),
        ("d", {}),
        ("row-5", {}),
    ]
    assert documents[1].notes == ("fields that cannot be stored were left out: score",)
    assert "is empty" in rejected["row 2"]
    assert "allowed are" in rejected["row 3"]


def test_parquet_with_text_that_is_none(tmp_path):
    path = tmp_path / "in.parquet"
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"a\xffok")],
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), path)
    documents, rejected = read(read_parquet, path)
    assert [one.text for one in documents] == ["ok"]
    assert rejected["row 1"] == "`text` is not UTF-8: byte 1 of the cell"


def test_what_is_no_parquet(tmp_path):
    path = tmp_path / "in.parquet"
    path.write_bytes(b"PAR1 nonsense PAR1")
    documents, rejected = read(read_parquet, path)
    assert documents == []
    assert "not readable as parquet" in rejected["after row 0"]


def test_a_row_of_many_lines_is_bounded(tmp_path):
    path = tmp_path / "in.csv"
    first = '",\n"'.join(["x" * 50] * 5)
    second = 'y\n","' * 10_000
    path.write_text(f'id,text\n1,"{first}"\n2,"{second}"\n' + "3,last\n" * 1000)
    documents, rejected = read(read_csv, path)
    assert documents[-1].text == "last"
    assert any("more than 1000 bytes" in reason for reason in rejected.values())


def test_a_row_with_two_mistakes_spoils_no_other(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b'id,text\n1,"a"b\xff\n2,kept\n')
    documents, rejected = read(read_csv, path)
    assert [one.text for one in documents] == ["ab\ufffd", "kept"]
    assert rejected == {}


def test_metadata_that_are_too_long_are_left_out_and_told(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "year": 1958, "more": "' + "x" * 200 + '"}')
    ((document,), rejected) = read(read_jsonl, path)
    assert rejected == {}
    assert document.metadata == {"year": 1958}
    assert document.notes == ("fields that cannot be stored were left out: more",)


def test_a_picture_in_a_column_refuses_no_row(tmp_path):
    path = tmp_path / "in.parquet"
    table = pyarrow.table({"text": ["The quay is long."], "image": [b"\x89PNG"], "depth": [2.5]})
    pyarrow.parquet.write_table(table, path)
    ((document,), rejected) = read(read_parquet, path, ReadOptions())
    assert rejected == {}
    assert document.metadata == {"depth": 2.5}
    assert document.notes == ("fields that cannot be stored were left out: image",)
