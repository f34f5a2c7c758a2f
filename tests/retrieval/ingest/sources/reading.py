"""Reads a file as an ingest does."""

from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions


def all_of(path, data, **options):
    """All documents and rejections of a file with this content."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    (file,) = source_files(path, "label")
    return [found for found, _ in documents_of(file, ReadOptions(**options))]


def one_of(path, data, **options):
    """The only part of a file."""
    (part,) = all_of(path, data, **options)
    return part


def text_of(path, data, **options):
    """The indexed text of a file that is one document."""
    document = one_of(path, data, **options)
    assert isinstance(document, Document), document
    return document.indexed_text
