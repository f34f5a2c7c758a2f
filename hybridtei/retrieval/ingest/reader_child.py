"""The reader's process: it reads files for the process that started it, and ends with it.

    python -m hybridtei.retrieval.ingest.reader_child PIPE

It takes a `Request` from the pipe, and answers by a `Found` for each document or rejection, and an
empty one at the end of the file. The system ends it when a file takes more processor time or memory
than `reader` allows.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

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


def _limit_memory(more_bytes: int) -> None:
    """Let this process have so much address space beyond what it has, if the system tells that."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        size = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _message(part: Document | Rejection, read_bytes: int) -> bytes:
    try:
        if isinstance(part, Document):
            return msgspec.msgpack.encode(Found(document=part, read_bytes=read_bytes))
        rejection = replace(part, written=excerpt(part.written))
        return msgspec.msgpack.encode(Found(rejection=rejection, read_bytes=read_bytes))
    except UnicodeEncodeError as error:
        reason = f"holds no text: {error}"[:300]
        return _message(Rejection(part.source, part.location, reason), read_bytes)


def serve(pipe: Connection) -> None:
    """Answer requests until their end, which is an EOFError."""
    decoder = msgspec.msgpack.Decoder(Request)
    while True:
        request = decoder.decode(pipe.recv_bytes())
        _limit_memory(request.memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, request.seconds)
        for part, read_bytes in read_file(Path(os.fsdecode(request.path)), request):
            pipe.send_bytes(_message(part, read_bytes))
            signal.setitimer(signal.ITIMER_PROF, request.seconds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(msgspec.msgpack.encode(Found()))


def main() -> None:
    """Serve the pipe whose number is the first argument."""
    # A terminal signals this process too, but its parent ends it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory.limit_heaps()
    with suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
