"""The reader of an ingest on Ray: the same batches that one process would make, sent on instead of embedded.

It runs on the driver's machine, so the files need to be nowhere else, in a process of its own beside the driver. Which files
a reader has depends on nothing but the files and the number of readers, and its batches on nothing but its files: a reader that
dies is run again, and its blocks are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tokenizers import Tokenizer as RawTokenizer

from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.ingest.chunking import Chunker, ChunkSettings
from hybridtei.ingest.documents import Rejected
from hybridtei.ingest.ledger import FinishedFile, Ledger, Stored
from hybridtei.ingest.prepare import Batch, Preparation
from hybridtei.ingest.progress import Tally
from hybridtei.ingest.quarantine import Quarantine
from hybridtei.ingest.sources.limits import ReadOptions
from hybridtei.ingest.sources.walk import SourceFile
from hybridtei.load import find_model, text_model
from hybridtei.on_ray.blocks import Sent, sent


@dataclass(frozen=True, slots=True)
class Recipe:
    """How sources become batches; `settings` as in `Preparation`."""

    model: ModelConfig
    engine: EngineConfig
    options: ReadOptions
    chunks: ChunkSettings
    settings: bytes


@dataclass(frozen=True, slots=True)
class Known:
    """What a ledger knew when the ingest began: of all documents, and of the files of one reader."""

    documents: Mapping[str, Stored]
    files: Mapping[str, FinishedFile]

    def stored_keys(self) -> Collection[str]:
        """See `Ledger.stored_keys`."""
        return self.documents.keys()

    def get(self, key: str) -> Stored | None:
        """See `Ledger.get`."""
        return self.documents.get(key)

    def finished(self, file: SourceFile, settings: bytes) -> FinishedFile | None:
        """See `Ledger.finished`."""
        return self.files.get(file.label)


class Rejections:
    """What a reader would put into quarantine, until it is sent."""

    def __init__(self) -> None:
        self._found: list[Rejected] = []

    def add(self, rejected: Rejected) -> None:
        """See `Quarantine.add`."""
        self._found.append(rejected)

    def taken(self) -> list[Rejected]:
        """Those since the last time."""
        found, self._found = self._found, []
        return found


def stored_documents(ledger: Ledger) -> dict[str, Stored]:
    """All that a ledger knows now."""
    return {key: stored for key, _ in ledger.items() if (stored := ledger.get(key)) is not None}


def shares(files: Sequence[SourceFile], readers: int) -> list[list[SourceFile]]:
    """The files in at most so many runs of about as many bytes, in order, none empty; the same for the same files."""
    total, before, found = max(1, sum(file.size for file in files)), 0, dict[int, list[SourceFile]]()
    for file in files:
        found.setdefault(min(readers - 1, before * readers // total), []).append(file)
        before += file.size
    return list(found.values())


def blocks(recipe: Recipe, files: Sequence[SourceFile], known: Known) -> Iterator[Sent]:
    """The batches of a reader, in order; the last one says so, and may hold nothing else."""
    spec = find_model(recipe.model)
    raw = RawTokenizer.from_file(str(spec.folder / "tokenizer.json"))
    chunker = Chunker(text_model(spec, recipe.engine), raw, recipe.chunks)
    rejections, tally = Rejections(), Tally()
    preparation = Preparation(
        files=files,
        options=recipe.options,
        chunker=chunker,
        ledger=cast(Ledger, known),  # of both, only reading is asked for
        quarantine=cast(Quarantine, rejections),
        settings=recipe.settings,
        tally=tally,
    )
    try:
        yield from _counted(preparation, rejections)
    finally:
        chunker.close()


def _counted(preparation: Preparation, rejections: Rejections) -> Iterator[Sent]:
    tally, before = preparation.tally, Tally()

    def taken(batch: Batch, *, is_last: bool = False) -> Sent:
        nonlocal before
        since, before = before, replace(tally)
        missing = list(preparation.missing)
        preparation.missing.clear()
        return sent(
            batch,
            preparation.files,
            rejections.taken(),
            skipped=tally.skipped - since.skipped,
            files_begun=tally.files - since.files,
            missing=missing,
            unclear=tally.unclear - since.unclear,
            is_last=is_last,
        )

    for batch in preparation.batches():
        yield taken(batch)
    yield taken(Batch(done_bytes=preparation.total_bytes), is_last=True)
