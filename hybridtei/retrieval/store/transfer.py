"""Moves a collection as a stream of JSON lines to another machine or store: a header, one line a
point, the number of points.

    {"hybridtei":"0.4.0","collection":"notes","schema":{"vectors":{…},"sparse":{…},"metadata":{…}}}
    {"id":7,"payload":{…},"vectors":{"dense":[0.25,…],"sparse":{"indices":[3,…],"values":[1.5,…]}}}
    {"points":1}

Numbers are the shortest decimals that are read as the same float32, so vectors keep all bits. (Also
for float16 from some thirty dimensions on: Qdrant normalises vectors again, and they round to the
same numbers.) Points are in the order of their ids, so that an export can continue after the last
one. A stream without the last line was cut off. Pages and the length of a line bound the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import orjson
from msgspec import Struct

from hybridtei import __version__
from hybridtei.errors import CollectionMismatch, InvalidInput, InvalidPoint, StoreUnavailable
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Stored, pages_of
from hybridtei.retrieval.store.collection import (
    OF_ONE_STORE,
    CollectionSchemas,
    schema_to_dict,
)
from hybridtei.retrieval.store.plan import FINGERPRINT
from hybridtei.retrieval.store.points import check_points
from hybridtei.retrieval.store.query import Imported
from hybridtei.system.shape import explain

# Points of one scroll; the largest multi-vectors take 256 MiB, the embedded engine's bound of an
# answer
PAGE_POINTS = 64
# Qdrant's bound of a request
MAX_LINE_BYTES = 33_554_432
# The start of the last line
END = b'{"points":'
T = TypeVar("T")
Advance = Callable[[int], object]


class Header(Struct, frozen=True):
    """The first line."""

    hybridtei: str
    collection: str
    schema: CollectionSchema


class Line(Struct, frozen=True, forbid_unknown_fields=True):
    """A point."""

    id: int | str
    payload: dict[str, Any]
    vectors: dict[str, Any]


async def exported(schemas: CollectionSchemas, name: str) -> AsyncIterator[bytes]:
    """Yield the whole stream, some lines at a time. Raises UnknownCollection, StoreError."""
    schema, count = await schemas.of(name), 0
    yield _header(name, schema)
    async for lines in _pages(schemas, schema, None):
        count += len(lines)
        yield b"".join(lines)
    yield _line({"points": count})


async def export_to(schemas: CollectionSchemas, name: str, path: Path, advance: Advance) -> int:
    """Write the stream to a file, or complete a file that was cut off. Return the number of its
    points.

    Raises UnknownCollection, StoreError, OSError; InvalidInput for another kind of file, or for a
    complete one.
    """
    schema = await schemas.of(name)
    with path.open("a+b") as file:
        count, after = _resumed(file, path, _header(name, schema))
        advance(count)
        async for lines in _pages(schemas, schema, after):
            file.writelines(lines)
            count += len(lines)
            advance(len(lines))
        file.write(_line({"points": count}))
    return count


def _portable(schema: CollectionSchema) -> CollectionSchema:
    """Remove the keys that steer the store of a collection: no file of another place decides what
    this store reads or deletes."""
    metadata = {key: value for key, value in schema.metadata.items() if key not in OF_ONE_STORE}
    return replace(schema, metadata=metadata)


def _header(name: str, schema: CollectionSchema) -> bytes:
    schema = _portable(schema)
    return _line({"hybridtei": __version__, "collection": name, "schema": schema_to_dict(schema)})


def _line(content: Mapping[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _resumed(file: BinaryIO, path: Path, header: bytes) -> tuple[int, PointId | None]:
    """Cut a file after its last whole line, or begin it. Return the number of its points, and the
    last id."""
    file.seek(0)
    first = file.readline(len(header) + 1)
    if first != header:
        if not header.startswith(first):
            raise InvalidInput(
                f"{path} is not an export of this collection's current schema: delete it, or name "
                "another file"
            )
        # The file is empty, or was cut off within the header: begin it again
        file.truncate(0)
        file.write(header)
        return 0, None
    count, end, last = 0, len(header), b""
    for line in file:
        if line.endswith(b"\n"):
            count, end, last = count + 1, end + len(line), line
    # Removes a line that was cut off
    file.truncate(end)
    if last.startswith(END):
        raise InvalidInput(
            f"{path} is a whole export, of {count - 1} points: delete it, or name another file"
        )
    if not count:
        return 0, None
    return count, _read(last, Line, f"{path}, line {count + 1}").id


async def _pages(
    schemas: CollectionSchemas, schema: CollectionSchema, after: PointId | None
) -> AsyncIterator[list[bytes]]:
    """Yield the lines of the points after the id `after`. The store's pages begin with that
    point."""
    name = str(schema.stored_as)
    pages = pages_of(schemas.store, name, PAGE_POINTS, offset=after, with_vectors=True)
    async for records in pages:
        yield await asyncio.to_thread(
            lambda page: [_written(record) for record in page if record.id != after], records
        )


def _written(record: Stored) -> bytes:
    if "" in record.vector:
        raise InvalidInput(
            f"point {record.id} has a vector without a name: only named ones are exported"
        )
    vectors = {name: _plain(vector) for name, vector in sorted(record.vector.items())}
    return _line({"id": record.id, "payload": record.payload, "vectors": vectors})


def _plain(vector: Any) -> Any:
    if isinstance(vector, Mapping):
        return {"indices": vector["indices"], "values": np.asarray(vector["values"], np.float32)}
    return np.asarray(vector, np.float32)


async def import_from(
    schemas: CollectionSchemas,
    chunks: AsyncIterator[bytes],
    name: str | None = None,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    advance: Advance = lambda count: None,
) -> Imported:
    """Store the points of a stream in the header's collection or in `name`, created if missing.

    Existing points are not changed, so an import that was stopped can be repeated.
    Raises InvalidInput, naming line and field, CollectionMismatch, StoreError; points before a bad
    line may be stored.
    """
    schema: CollectionSchema | None = None
    created, number, written, end = False, 1, 0, b""
    async for lines in _whole_lines(chunks, max_line_bytes):
        if schema is None:
            header = _read(lines.pop(0), Header, "line 1")
            name = name or header.collection
            portable = _portable(header.schema)
            schema, created = await schemas.collection(name, portable)
            files = (schema.metadata.get(FINGERPRINT), portable.metadata.get(FINGERPRINT))
            # The check of a collection lets one without a fingerprint pass, for a proof by texts
            if not created and files[0] != files[1]:
                raise CollectionMismatch(
                    f"collection {name!r} and the export do not have the same fingerprint of a "
                    f"model ({files[0]}, {files[1]}): import it under another name"
                )
        if lines and lines[-1].startswith(END):
            end = lines.pop()
        written += await _store(schemas, str(name), schema, lines, number + 1)
        number += len(lines)
        advance(len(lines))
    assert schema is not None
    if end != END + b"%d}" % (number - 1):
        raise InvalidInput(
            f'line {number + 1}: should be {{"points":{number - 1}}} as the last one: the export '
            "was cut off"
        )
    if written:
        await schemas.store.optimize(str(schema.stored_as))
    return Imported(str(name), created, number - 1, written)


async def _whole_lines(chunks: AsyncIterator[bytes], most: int) -> AsyncIterator[list[bytes]]:
    """Yield the lines that end in each chunk, at least one list. Raises InvalidInput for a line
    above `most` bytes."""
    # The line that has begun but not ended, and its number
    unended, number = bytearray(), 1
    async for chunk in chunks:
        before, line_end, after = chunk.rpartition(b"\n")
        if line_end:
            lines = (bytes(unended) + before).split(b"\n")
            number += len(lines)
            yield lines
            unended.clear()
        unended += after
        if len(unended) > most:
            raise InvalidInput(f"line {number}: has more than {most} bytes")
    if unended or number == 1:
        yield [bytes(unended)]


async def _store(
    schemas: CollectionSchemas,
    name: str,
    schema: CollectionSchema,
    lines: Sequence[bytes],
    first: int,
) -> int:
    """Store new points and return their number. `first`: the number of the first line."""
    points = await asyncio.to_thread(
        lambda: [_point(line, schema, f"line {n}") for n, line in enumerate(lines, first)]
    )
    ids = [point.id for point in points]
    stored: list[Stored] = []
    if ids:
        stored = await schemas.store.retrieve(str(schema.stored_as), ids, with_payload=False)
    stored_ids = {record.id for record in stored}
    new = [point for point in points if point.id not in stored_ids]
    if new and not await schemas.upsert(name, schema, new):
        raise StoreUnavailable(f"collection {name!r} changes its model: import again when it has")
    return len(new)


def _point(text: bytes, schema: CollectionSchema, where: str) -> Stored:
    """Read and check the point of a line. Raises InvalidInput."""
    line = _read(text, Line, where)
    try:
        return check_points([Stored(line.id, line.payload, line.vectors)], schema)[0]
    except InvalidPoint as error:
        raise InvalidInput(f"{where}: {error}") from error


def _read(content: bytes, kind: type[T], where: str) -> T:
    """The content of a line. Raises InvalidInput with its place."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {explain(error, content, kind)}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"{where}: should be JSON: {error}") from None
