"""Embedded chunks that wait: a stored document keeps its version until every chunk of the new one has vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from tempfile import SpooledTemporaryFile
from typing import Any

from hybridtei.engine import frames
from hybridtei.ingest.prepare import Piece
from hybridtei.outputs import Embeddings

MAX_HELD_BYTES = 64_000_000  # of vectors in memory; what is more goes to a temporary file


class HeldDocument:
    """Pieces of one document with their vectors, in the order in which they were added."""

    def __init__(self) -> None:
        self._vectors: Any = SpooledTemporaryFile(max_size=MAX_HELD_BYTES)  # noqa: SIM115 - open until `close`
        self._parts: list[tuple[list[Piece], int]] = []

    def add(self, pieces: Sequence[Piece], embeddings: Embeddings) -> None:
        """A row for each piece."""
        frame = b"".join(frames.encode(embeddings))
        self._vectors.write(frame)
        self._parts.append((list(pieces), len(frame)))

    def parts(self) -> Iterator[tuple[list[Piece], Embeddings]]:
        """As they were added."""
        self._vectors.seek(0)
        for pieces, size in self._parts:
            yield pieces, frames.decode(self._vectors.read(size))

    def close(self) -> None:
        """Give memory and file back."""
        self._vectors.close()
