"""Files that are one document: what a reader would see of them, or why not."""

from pathlib import Path

import pytest
from pypdf import PdfWriter

from hybridtei.retrieval.ingest.chunking import Document, Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.whole import read_whole


def read(path: Path, data: bytes, **options) -> Document | Rejection:
    path.write_bytes(data)
    return read_whole(path, "label", ReadOptions(**options))


def pdf_of(text: str) -> bytes:
    """One page, by hand."""
    stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(data)
    return data + b"xref\n0 6\n0000000000 65535 f \n" + table + trailer


def test_text_is_one_document(tmp_path):
    found = read(tmp_path / "a.txt", b"\xef\xbb\xbfone\n\ntwo \xc3\xa9\n")
    assert (found.document_id, found.source, found.indexed_text) == (
        "label",
        "label",
        "one\n\ntwo é",
    )


def test_markdown_opens_with_its_title(tmp_path):
    found = read(tmp_path / "a.md", b"# The title #\n\nbody **bold**\n")
    assert (found.title, found.text.strip()) == ("The title", "body **bold**")
    without = read(tmp_path / "b.md", b"body\n# later\n")
    assert (without.title, without.text) == (None, "body\n# later")


def test_html_as_a_reader_sees_it(tmp_path):
    page = b"""<html><head><title> A  page </title><style>x{}</style></head><body><h1>Head</h1>
        <p>foo <b>b</b>ar
        baz<br>next<script>var hidden</script></p><table><tr><td>a</td><td>b</td></tr></table></body></html>"""
    found = read(tmp_path / "a.html", page)
    assert found.title == "A page"
    assert found.text == "Head\nfoo bar baz\nnext\na\nb"


def test_html_in_the_encoding_it_declares(tmp_path):
    found = read(tmp_path / "a.html", b'<meta charset="iso-8859-1"><p>caf\xe9</p>')
    assert found.text == "café"
    wrong = read(tmp_path / "b.html", b'<meta charset="ascii"><p>caf\xe9</p>')
    assert wrong.text == "café"


def test_pdf(tmp_path):
    found = read(tmp_path / "a.pdf", pdf_of("boundary layer"))
    assert found.text == "boundary layer"


def test_a_pdf_of_pictures_or_under_lock(tmp_path):
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "blank.pdf")
    found = read_whole(tmp_path / "blank.pdf", "label", ReadOptions())
    assert "no text" in found.reason
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    locked = read_whole(tmp_path / "locked.pdf", "label", ReadOptions())
    assert "encrypted" in locked.reason


@pytest.mark.parametrize(
    ("name", "data", "options", "why"),
    [
        ("a.txt", bytes(range(32)), {}, "binary data"),
        ("a.txt", b" \n", {}, "holds no text"),
        ("a.html", b"<script>x</script>", {}, "holds no text"),
        ("a.txt", b"x" * 11, {"max_file_bytes": 10}, "11 bytes, allowed are 10"),
        ("a.txt", b"x" * 11, {"max_document_characters": 10}, "11 characters, allowed are 10"),
        ("a.pdf", b"nonsense", {}, "not readable as PDF"),
        ("a.pdf", b"", {}, "not readable as PDF"),
        ("a.pdf", pdf_of("long enough")[:300], {}, "PDF"),
    ],
)
def test_what_cannot_be_taken(tmp_path, name, data, options, why):
    found = read(tmp_path / name, data, **options)
    assert why in found.reason
