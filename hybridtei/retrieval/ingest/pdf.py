"""PDF files by PDFium: the text of their pages, with the values of forms and the words of
annotations.

The order of words is that of the file, so columns and scripts from right to left come as their
program wrote them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import closing
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
# PDFium is for one thread at a time.
PDFIUM = Lock()


def read_pdf(data: bytes, options: ReadOptions) -> Content:
    """The text of each page. Raises Unfit for a file that PDFium cannot open, and for one without
    text."""
    require_extra("qdrant", "pypdfium2")
    import pypdfium2

    with PDFIUM:
        try:
            with pypdfium2.PdfDocument(data) as document:
                return _content(document, options)
        except pypdfium2.PdfiumError as error:
            if getattr(error, "err_code", None) == pypdfium2.raw.FPDF_ERR_PASSWORD:
                raise Unfit("the PDF is encrypted, and opens with a password only") from None
            raise Unfit(f"not readable as PDF: {error}"[:500]) from None


def _content(document: Any, options: ReadOptions) -> Content:
    document.init_forms()
    count = len(document)
    if count > MAX_PAGES:
        raise Unfit(f"the PDF has {count} pages, allowed are {MAX_PAGES}")
    pages: list[str] = []
    pictures = characters = 0
    for number in range(count):
        text, has_picture = _page(document, number, options.max_document_characters - characters)
        pages.append(text)
        characters += len(text)
        pictures += has_picture
    title = document.get_metadata_value("Title").strip()
    if not any(pages):
        raise Unfit(f"the PDF holds no text: {pictures} of its {count} pages hold pictures")
    notes = []
    if pictures:
        notes = [f"{pictures} of {count} pages hold pictures and no text"]
    return Content(None if NO_TITLE.fullmatch(title) else title, pages, notes, is_paged=True)


def _page(document: Any, number: int, most: int) -> tuple[str, bool]:
    """(the page's text, whether it has a picture instead of text)."""
    import pypdfium2

    try:
        page = document[number]
    except pypdfium2.PdfiumError:
        # A damaged page counts as a page without text
        return "", False
    with closing(page), closing(page.get_textpage()) as text_page:
        size = text_page.count_chars()
        if size > most:
            raise Unfit("the PDF's text is longer than allowed: see --max-document-characters")
        text = text_page.get_text_range() if size else ""
        text = LEADERS.sub(" ", LINE_HYPHEN.sub("-\n", text))
        text = "\n".join([text.strip(), *_annotations(page, document.formenv)]).strip()
        if text:
            return text, False
        images = page.get_objects(filter=[pypdfium2.raw.FPDF_PAGEOBJ_IMAGE], max_depth=3)
        return "", next(images, None) is not None


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
