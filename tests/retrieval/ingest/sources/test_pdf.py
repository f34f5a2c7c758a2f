"""PDF files as a reader sees them: their words, pages, forms and notes."""

import pytest

from hybridtei.retrieval.ingest.chunking import Chunk
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.prepare import PendingDocument
from tests.retrieval.ingest.sources.pdfs import (
    DRAWN,
    FONT,
    LOCKED_AES,
    OPEN_AES,
    nested_forms,
    pdf_of,
    shown,
)
from tests.retrieval.ingest.sources.reading import one_of, text_of

FIELD = (
    "<< /Type /Annot /Subtype /Widget /FT /Tx /T (surname) /TU (Family name) /V (Lovelace) "
    "/Rect [0 0 100 20] >>"
)
EMPTY_FIELD = "<< /Type /Annot /Subtype /Widget /FT /Tx /T (empty) /Rect [0 0 100 20] >>"
NOTE = "<< /Type /Annot /Subtype /Text /Contents (Check the torque) /Rect [0 0 20 20] >>"
LINK = "<< /Type /Annot /Subtype /Link /Contents (a link) /Rect [0 0 20 20] >>"


def test_words_are_whole_and_lines_stay(tmp_path):
    page = shown(
        "the boundary layer sepa-\nrates from a well-known plate,\nas a well-\nknown law says"
    )
    expected = "the boundary layer separates from a well-known plate,\nas a well-known law says"
    assert text_of(tmp_path / "a.pdf", pdf_of(page)) == expected


def test_dots_of_a_table_of_contents_are_no_text(tmp_path):
    page = shown("Install . . . . . . . . . . 7\nRemove ............ 9")
    assert text_of(tmp_path / "a.pdf", pdf_of(page)) == "Install 7\nRemove 9"


def test_a_password_that_is_empty_is_no_lock(tmp_path):
    assert text_of(tmp_path / "a.pdf", OPEN_AES) == "boundary layer"
    locked = one_of(tmp_path / "b.pdf", LOCKED_AES)
    assert isinstance(locked, Rejection)
    assert "encrypted" in locked.reason


def test_forms_and_notes_are_read(tmp_path):
    data = pdf_of(shown("Application"), annotations=[NOTE, LINK], fields=[FIELD, EMPTY_FIELD])
    assert text_of(tmp_path / "a.pdf", data) == (
        "Application\nCheck the torque\nFamily name: Lovelace"
    )


def test_pages_of_pictures_are_counted(tmp_path):
    document = one_of(tmp_path / "a.pdf", pdf_of(shown("one"), DRAWN, shown("three"), DRAWN))
    assert document.text == "one\n\nthree"
    assert document.notes == ["2 of 4 pages hold pictures and no text"]
    assert (
        "holds no text: 2 of 2 pages hold pictures"
        in one_of(tmp_path / "b.pdf", pdf_of(DRAWN, DRAWN)).reason
    )


def test_a_chunk_says_its_page(tmp_path):
    data = pdf_of(shown("one"), DRAWN, shown("three"), shown("four"), title="A title")
    document = one_of(tmp_path / "a.pdf", data)
    pending = PendingDocument(document, "digest", "settings", None)
    pages = [
        pending.payload_of(Chunk(0, word, document.indexed_text.index(word), 1))["page"]
        for word in ("A title", "one", "three", "our")
    ]
    assert pages == [1, 1, 3, 4]
    assert "page" not in PendingDocument(
        one_of(tmp_path / "a.txt", "one"), "", "", None
    ).payload_of(Chunk(0, "one", 0, 1))


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Microsoft Word - Document1.doc", None),
        ("untitled", None),
        ("Untitled-2", None),
        ("manual_v3.indd", None),
        (r"C:\\Users\\me\\My Documents\\plan", None),
        ("/home/me/plan", None),
        ("file:///home/me/plan", None),
        ("scans/2024-11", None),
        ("---", None),
        ("TCP/IP in a nutshell", "TCP/IP in a nutshell"),
        ("Pages of history", "Pages of history"),
    ],
)
def test_what_is_no_title(tmp_path, title, expected):
    assert one_of(tmp_path / "a.pdf", pdf_of(shown("one"), title=title)).title == expected


@pytest.mark.parametrize("data", [b"%PDF-nonsense", pdf_of(shown("long enough"))[:300]])
def test_a_broken_file_is_told(tmp_path, data):
    found = one_of(tmp_path / "a.pdf", data)
    assert isinstance(found, Rejection)
    assert "PDF" in found.reason


def test_a_text_that_is_too_long_is_not_read(tmp_path):
    assert (
        "longer than allowed"
        in one_of(
            tmp_path / "a.pdf", pdf_of(*[shown("x" * 50)] * 3), max_document_characters=120
        ).reason
    )


def test_pages_of_drawings_and_fonts_without_letters_are_told(tmp_path):
    drawn = "20 300 m 40 340 l 60 300 l S"
    assert one_of(tmp_path / "a.pdf", pdf_of(shown("The first page is typed."), drawn)).notes == [
        "1 of 2 pages hold drawings and no text"
    ]
    names = " ".join(f"/g{number}" for number in range(256))
    font = f"<< /Type /Font /Subtype /Type1 /BaseFont /A /FirstChar 0 /LastChar 255 /Encoding << /Differences [ 0 {names} ] >> >>"
    data = pdf_of(shown("words in it"), shown("more words")).replace(FONT, font.encode(), 1)
    assert (
        "2 of 2 pages hold text in fonts that do not say which letters they draw"
        in one_of(tmp_path / "b.pdf", data).reason
    )


def test_forms_that_draw_each_other_are_counted_before(tmp_path):
    assert (
        "forms draw each other: 1000000 texts, allowed are 200000"
        in one_of(tmp_path / "a.pdf", nested_forms(6)).reason
    )
    assert "lighthouse" in text_of(tmp_path / "b.pdf", nested_forms(2))
