"""PDF files by PDFium: the text of their pages, with the values of forms and the words of
annotations.

The order of words is that of the file, so columns and scripts from right to left come as their
program wrote them.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache
from threading import Lock
from typing import Any

from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Content, Unfit
from hybridtei.system.machine import require_extra

MAX_PAGES = 20_000
MAX_ANNOTATIONS, MAX_ANNOTATION_BYTES = 1_000, 100_000
# PDFium's mark of a hyphen at a line end, and the dots between a heading and its page.
LINE_HYPHEN = re.compile("[\ufffe\x02](?:\r?\n)?")
LEADERS = re.compile(r"(?:[ \t]?[.·…]){5,}[ \t]*")
# Titles that programs write if the author has entered none: program names, file names, paths
NO_TITLE = re.compile(
    r"untitled.*|(no )?title|none|document ?\d*|(powerpoint )?presentation|slide \d+|microsoft "
    r"\w+ - .*|\(anonymous\)|"
    r".*\.(docx?|pdf|dvi|tex|indd|pptx?|xlsx?|od[tps]|ps|rtf|pages|fm|qxd|pmd|txt|html?)|"
    r"([a-z]:)?[\\/]\S*.*|(file:|~/).*|"
    r"\S*[\\/]\S*|\W*",
    re.IGNORECASE,
)
# What a page may hold in place of text, in the order in which it is told. `DRAWN`: PDFium's numbers
PICTURES, SHAPES = "pictures and no text", "drawings and no text"
NO_LETTERS = "text in fonts that do not say which letters they draw: it was left out"
DAMAGED = "what is damaged"
LACKS = (PICTURES, SHAPES, NO_LETTERS, DAMAGED)
DRAWN = {PICTURES: 3, SHAPES: 2}
# Characters of a page whose font is asked
MAX_SAMPLE = 500
# Objects of a file that are forms, what they draw and show
NUMBER = re.compile(rb"(\d{1,9})\s+\d{1,5}\s+obj\b")
REFERENCE = re.compile(rb"/([^\s/<>\[\]()]{1,100})\s+(\d{1,9})\s+\d{1,5}\s+R")
DRAWS, SHOWS = re.compile(rb"/([^\s/<>\[\]()]{1,100})\s+Do\b"), re.compile(rb"\bT[jJ]\b")
MAX_DRAWN, MAX_FORM_DEPTH, MAX_FORM_BYTES, MAX_FIELDS = 200_000, 40, 1_000_000, 10_000
# PDFium is for one thread at a time.
PDFIUM = Lock()


def read_pdf(data: bytes, options: ReadOptions) -> Content:
    """The text of each page. Raises Unfit for a file that PDFium cannot open, and for one without
    text."""
    require_extra("qdrant", "pypdfium2")
    import pypdfium2

    drawn = _drawn_by_forms(data)
    if drawn > MAX_DRAWN:
        raise Unfit(f"the PDF's forms draw each other: {drawn} texts, allowed are {MAX_DRAWN}")
    with PDFIUM:
        try:
            with pypdfium2.PdfDocument(data) as document:
                return _content(document, options)
        except pypdfium2.PdfiumError as error:
            if getattr(error, "err_code", None) == pypdfium2.raw.FPDF_ERR_PASSWORD:
                raise Unfit("the PDF is encrypted, and opens with a password only") from None
            raise Unfit(f"not readable as PDF: {error}"[:500]) from None


def _drawn_by_forms(data: bytes) -> int:
    """The texts that a form of the file shows, with those of the forms that it draws. PDFium reads
    a form again at each place where it is drawn."""
    forms: dict[bytes, tuple[list[bytes], int]] = {}
    for part in data.split(b"endobj"):
        fields, _, content = part.partition(b"stream")
        number = NUMBER.search(fields[-MAX_FIELDS:])
        if number is None or b"/Form" not in fields:
            continue
        content = content.partition(b"endstream")[0].lstrip(b"\r\n")
        if b"FlateDecode" in fields:
            with suppress(zlib.error):
                content = zlib.decompressobj().decompress(content, MAX_FORM_BYTES)
        places = dict(REFERENCE.findall(fields))
        names = [places.get(name, b"") for name in DRAWS.findall(content)]
        forms[number[1]] = names, len(SHOWS.findall(content))

    @cache
    def drawn(number: bytes, depth: int) -> int:
        names, shown = forms.get(number, ((), 0))
        if depth > MAX_FORM_DEPTH:
            return 0
        counts = Counter(names)
        return shown + sum(drawn(name, depth + 1) * count for name, count in counts.items())

    return max((drawn(number, 0) for number in forms), default=0)


def _content(document: Any, options: ReadOptions) -> Content:
    document.init_forms()
    count = len(document)
    if count > MAX_PAGES:
        raise Unfit(f"the PDF has {count} pages, allowed are {MAX_PAGES}")
    pages: list[str] = []
    characters = 0
    lacks: Counter[str] = Counter()
    for number in range(count):
        text, lack = _page(document, number, options.max_document_characters - characters)
        pages.append(text)
        characters += len(text)
        lacks[lack] += 1
    title = document.get_metadata_value("Title").strip()
    notes = [f"{lacks[lack]} of {count} pages hold {lack}" for lack in LACKS if lacks[lack]]
    attached = document.count_attachments()
    if attached:
        notes.append(f"{attached} attached files were not read")
    if not any(pages):
        raise Unfit(f"the PDF holds no text: {', '.join(notes) or 'its pages are empty'}")
    if NO_TITLE.fullmatch(title):
        title = ""
    return Content(title or None, pages, notes, is_paged=True, is_wrapped=True)


def _page(document: Any, number: int, most: int) -> tuple[str, str]:
    """(the page's text, what it has instead of text, of `LACKS`)."""
    import pypdfium2

    try:
        page = document[number]
    except pypdfium2.PdfiumError:
        return "", DAMAGED
    with closing(page), closing(page.get_textpage()) as text_page:
        size = text_page.count_chars()
        if size > most:
            raise Unfit("the PDF's text is longer than allowed: see --max-document-characters")
        text = text_page.get_text_range() if size else ""
        if _lacks_letters(text_page, size):
            return "", NO_LETTERS
        text = LEADERS.sub(" ", LINE_HYPHEN.sub("-\n", text))
        text = "\n".join([text.strip(), *_annotations(page, document.formenv)]).strip()
        if text:
            return text, ""
        for lack, kind in DRAWN.items():
            if next(page.get_objects(filter=[kind], max_depth=3), None) is not None:
                return "", lack
        return "", ""


def _lacks_letters(text_page: Any, size: int) -> bool:
    """True if a font says for most characters only which shape to draw, and not which letter."""
    from pypdfium2 import raw

    sample = range(0, size, max(1, size // MAX_SAMPLE))
    errors = sum(raw.FPDFText_HasUnicodeMapError(text_page, place) == 1 for place in sample)
    return bool(2 * errors > len(sample))


def _annotations(page: Any, form: Any) -> Iterator[str]:
    """`name: value` of each filled field, and the words of each note."""
    from pypdfium2 import raw

    for place in range(min(raw.FPDFPage_GetAnnotCount(page), MAX_ANNOTATIONS)):
        annotation = raw.FPDFPage_GetAnnot(page, place)
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        if kind == raw.FPDF_ANNOT_WIDGET and form is not None:
            value = _string(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
            name = _string(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
            name = name or _string(raw.FPDFAnnot_GetFormFieldName, form, annotation)
            if value and value != "Off":
                yield f"{name}: {value}"
        elif kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET):
            words = _string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents")
            if words:
                yield words
        raw.FPDFPage_CloseAnnot(annotation)


def _string(read: Callable[..., int], *place: Any) -> str:
    """The string that PDFium writes into a buffer of the size that it says."""
    from pypdfium2 import raw

    size = read(*place, None, 0)
    if not 2 < size <= MAX_ANNOTATION_BYTES:
        return ""
    buffer = ctypes.create_string_buffer(size)
    read(*place, ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR)), size)
    return buffer.raw[: size - 2].decode("utf-16-le", "replace").strip()
