"""The reader's process: it reads files for the process that started it, and ends with it.

    python -m hybridtei.retrieval.ingest.reader_child

It takes frames of `Request` from standard input, and writes frames of `Found` to standard output:
one for each document or rejection, and an empty one at the end of a file. The system ends it when a
file takes more processor time or memory than `reader` allows.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from hybridtei.errors import LoadError
from hybridtei.retrieval.ingest.csv_rows import read_csv
from hybridtei.retrieval.ingest.document import Document, Rejection
from hybridtei.retrieval.ingest.formats import (
    HEAD_BYTES,
    HTML,
    PACKED,
    is_packed,
    unpacked,
)
from hybridtei.retrieval.ingest.mail import BOX, letters, read_mail
from hybridtei.retrieval.ingest.options import MEGABYTE, ReadOptions
from hybridtei.retrieval.ingest.reader import (
    HEADER,
    Found,
    Request,
    excerpt,
)
from hybridtei.retrieval.ingest.tables import Progress, json_records, read_jsonl, read_parquet
from hybridtei.retrieval.ingest.text import Unfit
from hybridtei.retrieval.ingest.whole import document_from, read_whole
from hybridtei.system import memory

TABLES = {
    **dict.fromkeys((".jsonl", ".ndjson"), read_jsonl),
    **dict.fromkeys((".csv", ".tsv", ".tab"), read_csv),
}
JSON = (".json", ".geojson", ".jsonld")
PARQUET = b"PAR1"


def read_file(path: Path, request: Request) -> Iterator[Progress]:
    """Yield (document or rejection, bytes of the file read so far). A file whose library is missing
    is a rejection."""
    label, size, options = request.label, request.size, request.options
    try:
        if is_packed(path):
            name = path.name
            if path.suffix.lower() in PACKED:
                name = path.stem
            with unpacked(path, options) as whole:
                for part, read_bytes in _read_plain(whole, name, label, options):
                    yield part, min(read_bytes, size)
        else:
            yield from _read_plain(path, path.name, label, options)
    except Unfit as error:
        yield Rejection(label, "file", str(error)), size
    except (LoadError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        yield Rejection(label, "file", f"cannot be read: {reason}"), size
    except MemoryError:
        reason = f"takes more than {request.memory_bytes / MEGABYTE:.0f} MB of memory to read"
        yield Rejection(label, "file", reason), size


def _read_plain(
    path: Path,
    name: str,
    label: str,
    options: ReadOptions,
) -> Iterator[Progress]:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    suffix = Path(name).suffix.lower()
    if head.startswith(PARQUET):
        yield from read_parquet(path, label, options)
    elif BOX.match(head):
        yield from _read_box(path, label, options)
    elif suffix in TABLES and not HTML.match(head):
        yield from TABLES[suffix](path, label, options, name)
    elif suffix in JSON and (records := json_records(path, options)):
        yield from records(path, label, options)
    else:
        yield read_whole(path, label, options, name), path.stat().st_size


def _read_box(path: Path, label: str, options: ReadOptions) -> Iterator[Progress]:
    """A document for each letter."""
    read_bytes = 0
    for number, (name, data) in enumerate(letters(path), 1):
        location = f"letter {number}"
        read_bytes += len(data)
        if len(data) > options.max_file_bytes:
            reason = f"the letter has {len(data)} bytes, allowed are {options.max_file_bytes}"
            yield Rejection(label, location, reason, data), read_bytes
            continue
        document_id = name or location.replace(" ", "-")
        part = document_from(data, read_mail, (label, document_id, location), options)
        yield part, read_bytes


class _Limits:
    """The limits of the file that is read: processor time since the last document, and memory
    beyond what the process had before."""

    def __init__(self, request: Request) -> None:
        self._seconds = request.seconds
        self._next = 0.0
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + request.memory_bytes, hard))
        self.renew()

    def renew(self) -> None:
        """Allow the processor time anew, at most once a second."""
        used = time.process_time()
        if used < self._next:
            return
        self._next = used + 1
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used + self._seconds) + 1, hard))


def _mapped_bytes() -> int:
    """The address space that this process has. Raises OSError where the system does not tell."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


def _plain(part: Document | Rejection) -> Found:
    if isinstance(part, Document):
        return Found(document=part)
    written = excerpt(part.written)
    return Found(
        rejection=Rejection(part.source, part.location, part.reason, written, part.document_id)
    )


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until their end."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Request)

    def answer(message: Found) -> None:
        body = encoder.encode(message)
        answers.write(HEADER.pack(len(body)) + body)

    while header := requests.read(HEADER.size):
        request = decoder.decode(requests.read(*HEADER.unpack(header)))
        path = Path(os.fsdecode(request.path))
        limits = _Limits(request)
        for part, read_bytes in read_file(path, request):
            message = _plain(part)
            message.read_bytes = read_bytes
            try:
                answer(message)
            except UnicodeEncodeError as error:
                place = Rejection(request.label, part.location, f"holds no text: {error}"[:300])
                answer(Found(rejection=place, read_bytes=read_bytes))
            limits.renew()
        answer(Found())
        answers.flush()


def main() -> None:
    """Serve the standard streams. What a library prints goes to standard error."""
    # A terminal signals this process too, but its parent ends it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory.limit_heaps()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(BrokenPipeError):
        serve(requests, answers)
    # The parent has ended: nobody reads what is left to flush
    os._exit(0)


if __name__ == "__main__":
    main()
