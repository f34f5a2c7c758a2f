"""The collection as the ledger of an ingest: its documents and its sources.

One scroll at the start reads which versions of a document are stored. A version is a digest of the
content and a hash of the settings; it is complete if all its chunks exist. Points of another
version have other ids, so a new version is written beside the old one, which is deleted afterwards.

A source is a resolved path with a name in the collection: the last part of the path, or
`--source-name`. The metadata map names to paths. A file or folder below a known path belongs to
that source, so it can be refreshed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from hybridtei.errors import CollectionMismatch, InvalidInput
from hybridtei.retrieval.ingest.chunking import (
    CHUNK,
    CHUNKS,
    DIGEST,
    DOCUMENT_ID,
    FILE,
    SETTINGS,
    SOURCE,
)
from hybridtei.retrieval.ingest.files import printable
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Store, pages_of
from hybridtei.retrieval.store.query import Filter, Match

IDS_AT_ONCE = 1000
FIELDS = (SOURCE, DOCUMENT_ID, DIGEST, SETTINGS, CHUNKS, CHUNK, FILE)


@dataclass(slots=True)
class StoredVersion:
    """The points of a version of a document. `file`: size and times of its file. `numbers`: {id:
    number of the chunk}.

    The values come from payloads, which other programs may have changed.
    """

    digest: Any
    settings: Any
    chunks: Any
    file: Any
    numbers: dict[PointId, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if every chunk is stored once."""
        if len(self.numbers) != self.chunks:
            return False
        return set(self.numbers.values()) == set(range(self.chunks))

    def is_version(self, digest: str, settings: str) -> bool:
        """True if it is complete, with this digest and these settings."""
        return self.digest == digest and self.settings == settings and self.is_complete


# {label of a file: {id of a document: its versions}}
StoredDocuments = dict[str, dict[str, list[StoredVersion]]]


async def stored_documents(store: Store, name: str, source: Source) -> StoredDocuments:
    """Read the documents of a source and of sources inside it. Raises CollectionMismatch for points
    of 0.1."""
    documents: StoredDocuments = {}
    labels, of_file = source.labels, None
    if source.place.is_file():
        of_file = Filter(must=[Filter(key=SOURCE, match=Match(value=source.label))])
    pages = pages_of(store, name, IDS_AT_ONCE, scroll_filter=of_file, with_payload=FIELDS)
    async for records in pages:
        for record in records:
            label = str(record.payload.get(SOURCE))
            if DIGEST in record.payload and is_below(label, labels):
                if SETTINGS not in record.payload:
                    raise CollectionMismatch(
                        f"collection {name!r}: hybridtei 0.1 stored {label}, without the settings "
                        "that this version compares. Ingest the sources into a new collection, "
                        f"then delete this one with `hybridtei collections delete {name}`"
                    )
                versions = documents.setdefault(label, {}).setdefault(
                    str(record.payload.get(DOCUMENT_ID)), []
                )
                _note(record.id, record.payload, versions)
    return documents


def _note(identity: PointId, payload: Mapping[str, Any], versions: list[StoredVersion]) -> None:
    """Add a point to its version."""
    number = payload.get(CHUNK)
    file = payload.get(FILE)
    digest = payload[DIGEST]
    settings = intern(str(payload[SETTINGS]))
    chunks = payload.get(CHUNKS)
    for version in versions:
        if (version.digest, version.settings, version.chunks) == (digest, settings, chunks):
            break
    else:
        version = StoredVersion(digest, settings, chunks, file)
        versions.append(version)
    # The points of a version that disagree on its file name none
    if version.file != file:
        version.file = None
    version.numbers[identity] = number if type(number) is int else -1


def is_below(label: str, labels: Iterable[str]) -> bool:
    """True if a file with this label belongs to one of the sources."""
    return any(label == source or label.startswith(f"{source}/") for source in labels)


# A key of a collection's metadata
SOURCES = "ingest_sources"


class SourceTaken(InvalidInput):
    """Another source of the collection has this name. `other`: its path."""

    def __init__(self, place: Path, name: str, other: Path) -> None:
        super().__init__(
            f"{place}: the collection has a source {name!r}, which is {other}. Name this source "
            "with --source-name NAME; if it is the same source at a new path, use --source-name "
            f"{name}"
        )
        self.other = other


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder in a collection. `place`: its known path. `label`: the start of its files'
    labels, and so of its documents' ids. `known`: {path: name} of the collection's sources, from
    the metadata. `is_new`: this source is not among them."""

    place: Path
    label: str
    known: Mapping[Path, str] = field(default_factory=dict)
    is_new: bool = False

    @classmethod
    def of(
        cls, source: Path, existing: CollectionSchema | None, chosen: str | None = None
    ) -> Source:
        """The source of this path. `chosen`: the user's name for it. Raises InvalidInput if another
        path has its name."""
        place = Path(printable(str(source.resolve())))
        record = existing and existing.metadata.get(SOURCES)
        sources: dict[Path, str] = {}
        if isinstance(record, Mapping):
            sources = {Path(str(path)): str(name) for name, path in record.items()}
        for above in (place, *place.parents):
            if above in sources and chosen in (None, sources[above]):
                label = "/".join((sources[above], *place.relative_to(above).parts))
                return cls(place, label, sources)
        name = chosen or place.name or "root"
        other = next((path for path, taken in sources.items() if taken == name), None)
        if chosen is None and other is not None:
            raise SourceTaken(place, name, other)
        return cls(place, name, sources, is_new=True)

    @property
    def labels(self) -> list[str]:
        """The labels of this source and of sources inside it."""
        inside = [name for path, name in self.known.items() if self.place in path.parents]
        return [self.label, *inside]

    @property
    def record(self) -> dict[str, Any]:
        """The metadata of a new source."""
        if not self.is_new:
            return {}
        sources = {name: str(path) for path, name in self.known.items()}
        return {SOURCES: sources | {self.label: str(self.place)}}
