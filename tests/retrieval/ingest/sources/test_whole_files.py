"""Files that are one document: what a reader would see of them, or why not."""

import pytest

from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.whole import read_whole


def read(path, data, **options):
    path.write_bytes(data)
    return read_whole(path, "label", ReadOptions(**options))


def test_html_as_a_reader_sees_it(tmp_path):
    page = b"""<html><head><title> A  page </title><style>x{}</style></head><body><h1>Head</h1>
        <p>foo <b>b</b>ar
        baz<br>next<script>var hidden</script></p><table><tr><td>a</td><td>b</td></tr></table></body></html>"""
    found = read(tmp_path / "a.html", page)
    assert found.title == "A page"
    assert found.text == "Head\nfoo bar baz\nnext\na | b"


@pytest.mark.parametrize(
    ("name", "data", "options", "why"),
    [
        ("a.txt", bytes(range(32)), {}, "binary data"),
        ("a.txt", b" \n", {}, "holds no text"),
        ("a.html", b"<script>x</script>", {}, "holds no text"),
        ("a.txt", b"x" * 11, {"max_file_bytes": 10}, "11 bytes, allowed are 10"),
        ("a.txt", b"x" * 11, {"max_document_characters": 10}, "11 characters, allowed are 10"),
    ],
)
def test_what_cannot_be_taken(tmp_path, name, data, options, why):
    found = read(tmp_path / name, data, **options)
    assert why in found.reason
