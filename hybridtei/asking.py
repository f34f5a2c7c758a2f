"""One request to a server: its contents, and the decoding of its answer. Functions that decode
vectors import numpy."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct as Packing
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from hybridtei import errors
from hybridtei.errors import BackendError, HybridTeiError, InvalidInput, NoAnswer

if TYPE_CHECKING:
    from hybridtei.outputs import Embeddings

# Half of the server's default limit
REQUEST_BYTES = 1_000_000
# With 413; TEI's too
BODY_TOO_LARGE = b"Failed to buffer the request body: length limit exceeded"
# The address of a server in the same process, which errors do not show
IN_PROCESS = "http://in-process"
# Characters of a response in an error
SHOWN_CHARACTERS = 300
# In the `link` header of errors, except on TEI's routes
HELP = re.compile(r"/errors\.html#(\w+)>")
NAMED = {
    name.lower(): kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HybridTeiError)
}
KINDS = {
    (400, "Empty"): errors.EmptyInput,
    (413, "Validation"): InvalidInput,
    (422, "Validation"): InvalidInput,
    (422, "Tokenizer"): errors.TokenizerError,
    (424, "Backend"): BackendError,
    (401, None): errors.NoKey,
}
FLOAT32 = Packing("f")


def portions(items: Sequence[Any], limit: int) -> Iterator[list[Any]]:
    """Split items into lists of at most `limit` items or spans and REQUEST_BYTES. A larger item is
    alone in its list."""
    portion: list[Any] = []
    size = rows = 0
    for place, item in enumerate(items):
        try:
            bytes_here = len(orjson.dumps(item))
        except TypeError as error:
            raise InvalidInput(f"item {place} is not valid JSON: {error}") from None
        rows_here = len(item.get("spans", ".")) if isinstance(item, Mapping) else 1
        if portion and (size + bytes_here > REQUEST_BYTES or rows + rows_here > limit):
            yield portion
            portion, size, rows = [], 0, 0
        portion.append(item)
        size, rows = size + bytes_here, rows + rows_here
    if portion:
        yield portion


def read(answer: httpx.Response, where: str) -> Any:
    """Decode the body. Raises the error that the server named, or NoAnswer if the response is not
    from hybridtei."""
    try:
        decoded = orjson.loads(answer.content)
    except ValueError:
        decoded = None
    if answer.status_code == 200 and decoded is not None:
        return decoded
    fields = decoded if isinstance(decoded, dict) else {}
    named = HELP.search(answer.headers.get("link", ""))
    kind = KINDS.get((answer.status_code, fields.get("error_type")))
    if named:
        kind = NAMED.get(named[1], InvalidInput)
    if answer.status_code == 413 and answer.content.startswith(BODY_TOO_LARGE):
        kind = InvalidInput
    reason = fields.get("error") or fields.get("message") or shown(answer) or answer.reason_phrase
    message = reason
    if not where.startswith(IN_PROCESS):
        message = f"{where}: status {answer.status_code}: {reason}"
    if kind is None:
        raise NoAnswer(message, answer.status_code)
    # Some classes make their message themselves
    raise kind.__new__(kind, message)


def shown(answer: httpx.Response) -> str:
    """Return the start of a response's text for an error message. A redirect's target comes
    first."""
    words = answer.content.decode(errors="replace").split()
    if "location" in answer.headers:
        words.insert(0, f"to {answer.headers['location']}:")
    return " ".join(words)[:SHOWN_CHARACTERS]


def embeddings_of(
    rows: Sequence[Any],
    names: Sequence[str],
    counts: Sequence[int] | None,
    widths: Mapping[str, int | None],
    url: str,
) -> Embeddings:
    """The outputs `names` of `/embed_hybrid` as arrays. `counts`: the number of spans of each text,
    if it has spans; its rows are then lists. Raises NoAnswer if hybridtei cannot have sent the
    rows, BackendError if the vectors are invalid."""
    if counts is not None:
        is_listed = all(isinstance(item, list) for item in rows)
        if is_listed and list(map(len, rows)) == list(counts):
            rows = [row for item in rows for row in item]
    if not all(isinstance(row, dict) and row.keys() >= {*names} for row in rows):
        raise NoAnswer(
            f"{url}: should answer {len(rows)} objects of {', '.join(names)}, answered "
            f"{rows!r:.300}"
        )
    import numpy as np

    from hybridtei.batch import Ragged, offsets_of
    from hybridtei.outputs import Embeddings, SparseVectors

    def numbers(texts: Iterable[str], dtype: str) -> Any:
        return np.frombuffer(bytearray().join(map(base64.b64decode, texts)), dtype)

    def dense(rows: Sequence[Any], width: int) -> Any:
        if rows and isinstance(rows[0], str):
            return numbers(rows, "<f4").reshape(len(rows), -1)
        return np.array(rows, dtype=np.float32).reshape(len(rows), -1 if rows else width)

    def sparse(rows: Sequence[Any], width: int) -> Any:
        for row in rows:
            if len(row["indices"]) != len(row["values"]):
                raise ValueError(
                    f"{len(row['indices'])} indices and {len(row['values'])} values in a sparse "
                    "vector"
                )
        indices = np.array([i for row in rows for i in row["indices"]], dtype=np.int64)
        values = np.array([value for row in rows for value in row["values"]], dtype=np.float32)
        offsets = offsets_of([len(row["indices"]) for row in rows])
        return SparseVectors(indices, values, offsets, width or int(indices.max(initial=-1)) + 1)

    def multivector(rows: Sequence[Any], width: int) -> Any:
        if not rows:
            return Ragged(dense([], width), offsets_of([]))
        if not isinstance(rows[0], dict):
            return Ragged.from_rows([vectors(row, width) for row in rows])
        counts = [row["shape"][0] for row in rows]
        width = rows[0]["shape"][1]
        packed = numbers([row["data"] for row in rows], "u1")
        packed = packed.reshape(sum(counts), -1 if any(counts) else width)
        # Of floats, of int8, else one bit per number
        dtype = {4 * width: "<f4", width: "i1"}.get(packed.shape[1], "u1")
        return Ragged(packed.view(dtype), offsets_of(counts))

    def vectors(row: Any, width: int) -> Any:
        if not row:
            return dense([], width)
        return np.array(row, dtype=np.int8 if type(row[0][0]) is int else np.float32)

    readers = {"dense": dense, "sparse": sparse, "multivector": multivector}
    try:
        return Embeddings(
            **{
                name: readers[name]([row[name] for row in rows], widths.get(name) or 0)
                for name in names
            }
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{url}: its answer is not what was asked for: {error}") from error


def float32(score: float) -> float:
    """The float32 of JSON's shortened decimal."""
    return float(FLOAT32.unpack(FLOAT32.pack(score))[0])
