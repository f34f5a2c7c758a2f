"""Reads a file as an ingest does."""

from pathlib import Path

from hybridtei.retrieval.ingest.chunking import Document, Rejection
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions


def all_of(path: Path, data: bytes | str, **options) -> list[Document | Rejection]:
    """All documents and rejections of a file with this content."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    (file,) = source_files(path, "label")
    return [found for found, _ in documents_of(file, ReadOptions(**options))]


def text_of(path: Path, data: bytes | str, **options) -> str:
    """The indexed text of a file that is one document."""
    (document,) = all_of(path, data, **options)
    assert isinstance(document, Document), document
    return document.indexed_text
