"""Stored documents that the source no longer holds: which they are, and when they may be deleted.

An unreadable file, a folder without permission or a source that yields nothing says nothing about what was in it, so documents
from there are never among them.
"""

from __future__ import annotations

from collections.abc import Set

from hybridtei.ingest.documents import source_of
from hybridtei.ingest.prepare import Preparation


def missing_from_source(preparation: Preparation) -> list[str]:
    """Keys, once the whole source was read: of documents that left their file, and of files that left the source."""
    present = {file.label for file in preparation.files}
    labels = {source_of(key) for key in preparation.ledger.stored_keys()}
    gone = {label for label in labels if _is_below(label, preparation.label) and not _may_be_there(label, present, preparation)}
    return preparation.missing + [key for key in preparation.ledger.stored_keys() if source_of(key) in gone]


def may_delete(preparation: Preparation) -> bool:
    """Whether the source yielded a document at all: an empty or unreadable one must not empty the collection."""
    return preparation.tally.documents + preparation.tally.skipped > 0


def _is_below(label: str, root: str) -> bool:
    return bool(root) and (label == root or label.startswith(f"{root}/"))


def _may_be_there(label: str, present: Set[str], preparation: Preparation) -> bool:
    """The file was found, or it is below a folder that could not be read."""
    parts = label.split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return label in present or any(preparation.quarantine.of(folder) for folder in above)
