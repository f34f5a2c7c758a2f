"""Files that real programs wrote (python-docx, openpyxl, python-pptx, odfpy, LibreOffice), read as
a person reads them, and packages that are changed by hand."""

import re
import zipfile
from io import BytesIO

import pytest

from conformance.documents.__main__ import FOLDER
from hybridtei.errors import LoadError
from hybridtei.retrieval.ingest import office
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from tests.retrieval.ingest.sources.archives import changed, packed
from tests.retrieval.ingest.sources.reading import one_of, text_of

OFFICE = FOLDER / "office"
SIGNS = "{} signs of fonts that do not say which they are were left out"
HEAD = "<w:hdr xmlns:w='w'><w:p><w:r><w:t>Contract No. HX-2207</w:t></w:r></w:p></w:hdr>"
DIAGRAM = "<dgm:dataModel xmlns:dgm='d' xmlns:a='a'><a:p><a:r><a:t>Inspect the hull</a:t></a:r></a:p></dgm:dataModel>"


@pytest.mark.parametrize(
    ("name", "lines", "absent"),
    [
        (
            "letter.docx",
            [
                "Contract No. HX-2207",
                "Page foot 77",
                "The dose is 10^6 units, H2O.",
                "Shown again.",
                "c10 c20 | c21 | c22",
                "Price 700 crowns.",
                "field12",
                "\\frac{a+b}{2}=xy^{3}",
                "東京へ行く",
                "Control words",
                "Boxed words",
                "A comment here",
            ],
            ["hidden words", "900", "PAGEREF", "とうきょう", "movedaway"],
        ),
        (
            "parts.xlsx",
            [
                "Anchor | 2026-03-14 | 2026-03-14 15:30:00 | 15:30:00 | 15% | TRUE | 1,234.50 € |  | 0815 | 30:00:00",
                "Merged |  | right",
                "Merged |  | below",
                "Tonnage by quarter",
                "Check this",
            ],
            ["46095.0", "0.6458"],
        ),
        ("since_1904.xlsx", ["2026-03-14"], []),
        (
            "letter.odt",
            [
                "The price is 700 crowns.",
                "The dose is 10^6 units[1] each   x y",
                "[1] At low tide.",
                "The crane lifts eight tonnes.",
                "check this",
                "A | B",
            ],
            ["900", "2026-02-01"],
        ),
        (
            "shifts.ods",
            ["Ada | off | off | off | late | 14.03.26", "Bo |  |  |  | night | 15 %", "same | x"],
            [],
        ),
        ("slides.pptx", ["t10 | t11", "10^6", "East | 19.2"], []),
        ("show.odp", ["First page words", "Second page words"], []),
        ("older.doc", ["Mooring", "c10 c20 | c21 | c22", "Control words"], ["PAGEREF"]),
        ("older.xls", ["Merged |  | below", "After empty row"], ["46095.0", "0.6458"]),
        ("older.ppt.gz", ["First page words", "Second page words"], []),
        ("letter.rtf", ["Mooring", "c10 c20 | c21 | c22", "Control words"], ["PAGEREF"]),
        ("letter.fodt", ["The price is 700 crowns.", "[1] At low tide.", "check this"], ["900"]),
    ],
)
def test_a_file_of_a_real_program(tmp_path, name, lines, absent):
    text = text_of(tmp_path / name, (OFFICE / name).read_bytes())
    assert [line for line in lines if line not in text.split("\n")] == []
    assert [words for words in absent if words in text] == []


def test_slides_come_in_the_order_of_the_show_each_with_its_notes(tmp_path):
    document = one_of(tmp_path / "a.pptx", (OFFICE / "slides.pptx").read_bytes())
    words = ("Table slide", "Title slide", "Say that flags are washed", "Chart slide")
    places = [document.text.index(part) + document.shift for part in words]
    assert [document.page_at(place) for place in places] == [1, 2, 3, 4]


def test_headings_of_styles_are_known_by_their_name(tmp_path):
    """A German Word has other ids of styles."""

    def change(styles):
        return styles.replace('w:styleId="Heading1"', 'w:styleId="berschrift1"')

    data = changed("letter.docx", "word/styles.xml", change)
    with zipfile.ZipFile(BytesIO(data)) as archive:
        document = archive.read("word/document.xml").decode()
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["word/document.xml"] = document.replace('"Heading1"', '"berschrift1"').encode()
    document = one_of(tmp_path / "a.docx", packed(parts))
    assert "Mooring" in [path for _, path, _ in document.outline.places]


@pytest.mark.parametrize(
    ("name", "part", "content", "words"),
    [
        ("letter.docx", "word/header9.xml", HEAD.replace("2207", "3308"), "HX-3308"),
        ("letter.docx", "word/diagrams/data1.xml", DIAGRAM, "Inspect the hull"),
        ("slides.pptx", "ppt/diagrams/data1.xml", DIAGRAM, "Inspect the hull"),
        ("parts.xlsx", "xl/drawings/drawing9.xml", DIAGRAM, "Inspect the hull"),
    ],
)
def test_words_that_the_library_leaves_out_are_added(tmp_path, name, part, content, words):
    assert words in text_of(tmp_path / name, changed(name, part, lambda _: content))


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("styles.docx", ["1 hidden runs of words were left out", SIGNS.format(1)]),
        ("styles.rtf", ["1 hidden runs of words were left out", SIGNS.format(3)]),
        ("styles.fodt.gz", ["1 hidden runs of words were left out", SIGNS.format(3)]),
        (
            "styles.doc",
            [
                SIGNS.format(3),
                "in doc, deleted and hidden words and exponents are read as plain text",
                "39 characters of headers, comments and text boxes were not read",
            ],
        ),
        ("hidden.xls", []),
        ("older.xls", ["2 charts and text boxes were left out"]),
    ],
)
def test_what_is_not_read_is_told(tmp_path, name, notes):
    assert one_of(tmp_path / name, (OFFICE / name).read_bytes()).notes == notes


@pytest.mark.parametrize("name", ["styles.docx", "styles.rtf", "styles.fodt.gz"])
def test_words_that_a_style_or_a_change_takes_away_are_no_text(tmp_path, name):
    text = text_of(tmp_path / name, (OFFICE / name).read_bytes())
    assert ("700" in text, "900" in text, "unseen" in text) == (True, False, False)


def test_formulas_without_a_value_are_told(tmp_path):
    assert one_of(tmp_path / "a.xlsx", (OFFICE / "parts.xlsx").read_bytes()).notes == [
        "2 formulas have no stored value"
    ]


def test_cells_that_repeat_one_text_have_a_budget(tmp_path):
    cells = '<row><c t="inlineStr"><is><t>lighthouse</t></is></c></row>' * 100
    data = changed(
        "since_1904.xlsx",
        "xl/worksheets/sheet1.xml",
        lambda sheet: sheet.replace("</sheetData>", f"{cells}</sheetData>"),
    )
    assert (
        "longer than allowed"
        in one_of(tmp_path / "a.xlsx", data, max_document_characters=1000).reason
    )


def test_an_archive_that_lies_about_a_size_is_refused(tmp_path):
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", b" " * 10_000)
    assert (
        "packed by a method that is not read" in one_of(tmp_path / "a.docx", data.getvalue()).reason
    )


def test_a_chapter_that_is_named_often_is_there_once(tmp_path):
    def change(package):
        return re.sub(r"(<itemref[^<>]*/>)", r"\1" * 100, package)

    data = changed("book.epub", "OEBPS/content.opf", change)
    assert text_of(tmp_path / "a.epub", data).count("The crane lifts eight tonnes.") == 1


def test_a_document_of_office_that_is_encrypted(tmp_path):
    assert (
        one_of(tmp_path / "a.docx", (OFFICE / "secret.docx").read_bytes()).reason == "is encrypted"
    )


def test_without_the_library_the_file_is_refused_by_its_name(monkeypatch):
    def absent(extra, module):
        raise LoadError(f"{module} is not installed: the extra `{extra}` has it")

    monkeypatch.setattr(office, "require_extra", absent)
    with pytest.raises(LoadError, match="anydoc is not installed"):
        office.read_office((OFFICE / "letter.docx").read_bytes(), ReadOptions())


@pytest.mark.parametrize("name", ["letter.docx", "parts.xlsx", "slides.pptx", "letter.odt"])
def test_damaged_files_are_read_or_refused(tmp_path, name):
    """A hundred files, each with 20 changed bytes."""
    data = (OFFICE / name).read_bytes()
    for seed in range(25):
        changed_data = bytearray(data)
        for place in range(20):
            at = (seed * 7919 + place * 104_729) % len(data)
            changed_data[at] = (changed_data[at] + seed + place + 1) % 256
        part = one_of(tmp_path / name, bytes(changed_data))
        assert isinstance(part, Rejection) <= bool(getattr(part, "reason", ""))


def test_rows_that_a_filter_hides_and_hidden_columns_are_text(tmp_path):
    """They are data that the author wrote; Excel hides them until the filter is taken away."""
    data = changed(
        "parts.xlsx",
        "xl/worksheets/sheet1.xml",
        lambda sheet: sheet.replace('<row r="2"', '<row r="2" hidden="1"').replace(
            "<sheetData>", '<cols><col min="9" max="9" hidden="1"/></cols><sheetData>'
        ),
    )
    shown = text_of(tmp_path / "shown.xlsx", (OFFICE / "parts.xlsx").read_bytes())
    assert text_of(tmp_path / "hidden.xlsx", data) == shown
    assert "Anchor" in shown
    assert "0815" in shown


def test_only_a_number_of_rtf_is_an_exponent(tmp_path):
    rtf = rb"{\rtf1 10{\super\fs20 6} on the 4{\super\fs20 th} and {\up6 x}.}"
    assert text_of(tmp_path / "a.rtf", rtf) == "10^6 on the 4th and x."
