"""How large a thing a reader takes, and the settings all readers share."""

from __future__ import annotations

from dataclasses import dataclass

EXCERPT_CHARACTERS = 200
MAX_RECORD_BYTES = 1_000_000
MAX_DOCUMENT_CHARACTERS = 10_000_000  # and so the most chunks a document may have


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`text_field`, `id_field`: names in records; None takes `text`, and `_id` or `id`.

    A record is a line of jsonl, a row of csv or parquet; `max_file_bytes` bounds the files that are one document each.
    """

    text_field: str | None = None
    id_field: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES
    max_file_bytes: int = 100_000_000
    max_document_characters: int = MAX_DOCUMENT_CHARACTERS
    max_metadata_bytes: int = 64_000
    max_id_characters: int = 512


def excerpt(data: bytes | str) -> str:
    """Its beginning, printable."""
    if isinstance(data, bytes):
        data = data[: 4 * EXCERPT_CHARACTERS].decode(errors="backslashreplace")
    start = data[:EXCERPT_CHARACTERS]
    return start.encode(errors="backslashreplace").decode()
