"""Compares two embedding servers: can B's queries search the vectors of A?

The report has cosines, the neighbours that B's queries retain, the verdict, and the facts in which
the `/info` of both differ.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.client import Client
from hybridtei.errors import BackendError, InvalidInput, NoAnswer, NoKey, RequestError

Vectors = NDArray[np.float64]

SAMPLES = tuple(files(__package__).joinpath("samples.txt").read_text(encoding="utf-8").splitlines())
WORDS = tuple(sorted({word.strip(".,:?").lower() for text in SAMPLES for word in text.split()}))
# A text above the limits of most models: truncation shows in its vector.
LONG_TEXT = " ".join(random.Random(11).choices(WORDS, k=2048))
REQUEST_TEXTS = 32
TIMEOUT_S = 120.0
REFUSED = frozenset({400, 404, 413, 422, 424})
REPLAYED = ("/embed", "/v1/embeddings", "/embeddings")
NEIGHBOURS = 10
# The last different texts of a recording, among which neighbours are searched.
MAX_SEARCHED = 256
# An index stays usable if 1 - cosine is at most MAX_DISTANCE and the overlap at least MIN_OVERLAP.
MAX_DISTANCE = 1e-4
MIN_OVERLAP = 0.99
VERDICTS = {True: "keep the index", False: "embed again"}
FACT_CHARACTERS = 40


class Endpoint:
    """A server with TEI's API, or without `/info` with OpenAI's. Raises NoAnswer if it has
    neither."""

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        self._client = Client(url, api_key=api_key, timeout_s=TIMEOUT_S)
        self._model = model or "default"
        self.info: Mapping[str, Any] = {}
        answer = self._ask("/info", refused=range(200, 600))
        if isinstance(answer, dict) and "max_input_length" in answer:
            self.info = answer
        self.close = self._client.close

    def embed(self, texts: Sequence[str]) -> Vectors | None:
        """The server's vectors (texts, width); None if it refuses a text."""
        path = "/embed" if self.info else "/v1/embeddings"
        size = min(REQUEST_TEXTS, int(self.info.get("max_client_batch_size") or REQUEST_TEXTS))
        parts = []
        for start in range(0, len(texts), size):
            chunk = texts[start : start + size]
            body: Mapping[str, Any] = {"input": chunk, "model": self._model}
            if self.info:
                body = {"inputs": chunk, "truncate": True}
            vectors = self.replay(path, body)
            if vectors is None:
                return None
            parts.append(vectors)
        return np.concatenate(parts)

    def replay(self, path: str, body: Mapping[str, Any]) -> Vectors | None:
        """The vectors (texts, width) of a recorded request; None if the server refuses it."""
        plain = {name: value for name, value in body.items() if name != "encoding_format"}
        answer = self._ask(path, plain)
        if answer is None:
            return None
        try:
            return read_vectors(answer)
        except ValueError as error:
            raise NoAnswer(f"{self._client.url}{path}: answers no vectors: {error}") from None

    def _ask(self, path: str, body: Any = None, refused: Container[int] = REFUSED) -> Any:
        """Return the answer, or None if the server refuses the request."""
        try:
            return self._client.ask(path, body)
        except NoKey:
            raise
        except (RequestError, BackendError):
            return None
        except NoAnswer as error:
            if error.status is not None and error.status in refused:
                return None
            raise


def read_vectors(answer: Any) -> Vectors:
    """Read the vectors (texts, width) of TEI's or OpenAI's answer, with rows as lists or base64.
    Raises ValueError."""
    try:
        if isinstance(answer, dict):
            rows = [
                row["embedding"]
                for row in sorted(answer["data"], key=lambda row: row.get("index", 0))
            ]
            answer = [
                np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row
                for row in rows
            ]
        vectors = np.array(answer, dtype=np.float64)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
        raise ValueError("not one for each text, of one width and of finite numbers")
    return vectors


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cosines of the texts and of one above the limits, the overlap@10 of searches, and the
    verdict.

    A cosine is None if widths differ, or if the text was not sent. `info`: the facts of `/info`
    that differ, as (A's, B's).
    """

    texts: int
    widths: tuple[int, int]
    least_cosine: float | None = None
    median_cosine: float | None = None
    long_cosine: float | None = None
    overlap: float = 0.0
    keeps_index: bool = False
    info: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def as_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    def in_words(self) -> str:
        rows: list[tuple[str, object]] = [
            ("texts", self.texts),
            ("dimensions of A, B", f"{self.widths[0]}, {self.widths[1]}"),
        ]
        numbers = {
            "cosine, median": self.median_cosine,
            "cosine, least": self.least_cosine,
            "cosine, long text": self.long_cosine,
            f"overlap@{NEIGHBOURS}": self.overlap,
        }
        rows += [(name, f"{value:.7f}") for name, value in numbers.items() if value is not None]
        rows.append(("verdict", VERDICTS[self.keeps_index]))
        lines = [f"{name:<20}{value}" for name, value in rows]
        if self.info:
            lines += ["", _columns("/info", "A", "B")]
            lines += [_columns(name, *values) for name, values in self.info.items()]
        return "\n".join(lines)


def _columns(name: str, a: object, b: object) -> str:
    first, second = (str(value)[:FACT_CHARACTERS] for value in (a, b))
    return f"{name:<44}{first:<{FACT_CHARACTERS + 2}}{second}"


def compare(a: Endpoint, b: Endpoint) -> Comparison:
    """Compare an index's server with the server that would replace it. Raises HybridTeiError."""
    left = a.embed(SAMPLES)
    right = b.embed(SAMPLES)
    if left is None or right is None:
        raise InvalidInput(f"{'A' if left is None else 'B'} refuses to embed the sample texts")
    info = different_facts(a.info, b.info)
    if left.shape != right.shape:
        return Comparison(len(left), (left.shape[1], right.shape[1]), info=info)
    long_a = a.embed([LONG_TEXT])
    long_b = b.embed([LONG_TEXT])
    long_distance = None
    if long_a is not None and long_b is not None:
        long_distance = float(distances(long_a, long_b)[0])
    # Only one of the servers refuses the long text
    elif long_a is not long_b:
        long_distance = np.inf
    return judged(left, right, distances(left, right), long_distance, info)


def replay(a: Endpoint, b: Endpoint, lines: Iterable[str]) -> tuple[Comparison, int]:
    """Send recorded requests to both servers. Return the comparison, and the number of requests
    that one of them refused.

    A line is `{"path": "/embed", "body": {...}}`. The body may be JSON in a text, as nginx logs it.
    Requests to other paths are skipped. Raises InvalidInput, naming the line, or for too few texts,
    and HybridTeiError.
    """
    info = different_facts(a.info, b.info)
    parts: list[Vectors] = []
    last: dict[bytes, tuple[Vectors, Vectors]] = {}
    refused = 0
    for path, body in _requests(lines):
        left = a.replay(path, body)
        right = b.replay(path, body)
        if left is None or right is None:
            refused += 1
            continue
        if left.shape != right.shape:
            return Comparison(len(left), (left.shape[1], right.shape[1]), info=info), refused
        parts.append(distances(left, right))
        # A text's key is A's vector
        last |= {row.tobytes(): (row, other) for row, other in zip(left, right, strict=True)}
        last = dict([*last.items()][-MAX_SEARCHED:])
    if len(last) < len(SAMPLES):
        raise InvalidInput(
            f"{len(last)} different texts are too few for a verdict: give {len(SAMPLES)}"
        )
    rows = [np.stack(side) for side in zip(*last.values(), strict=True)]
    return judged(rows[0], rows[1], np.concatenate(parts), None, info), refused


def _requests(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and body of each recorded request that asks for vectors. Raises InvalidInput."""
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            entry = orjson.loads(line)
            path = entry["path"]
            body = entry["body"]
            if path not in REPLAYED:
                continue
            fields = dict(orjson.loads(body) if isinstance(body, str) else body)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f'line {number}: should be {{"path": "/embed", "body": {{…}}}}: {error}'
            ) from None
        yield path, fields


def judged(
    left: Vectors,
    right: Vectors,
    apart: Vectors,
    long_distance: float | None,
    info: Mapping[str, tuple[Any, Any]],
) -> Comparison:
    """`apart`: distances of all texts. `left`, `right`: vectors for searching neighbours."""
    worst = float(apart.max())
    shared = overlap(left, right)
    long_cosine = None
    if long_distance is not None and long_distance < np.inf:
        long_cosine = 1 - long_distance
    return Comparison(
        texts=len(apart),
        widths=(left.shape[1], right.shape[1]),
        least_cosine=1 - worst,
        median_cosine=1 - float(np.median(apart)),
        long_cosine=long_cosine,
        overlap=shared,
        keeps_index=max(worst, long_distance or 0.0) <= MAX_DISTANCE and shared >= MIN_OVERLAP,
        info=info,
    )


def overlap(left: Vectors, right: Vectors) -> float:
    """The mean share of a `left` row's nearest rows, without itself, that a query by the `right`
    row also finds."""
    stored = unit(left)
    nearest = []
    for queries in (stored, unit(right)):
        scores = queries @ stored.T
        # A row is not its own neighbour
        np.fill_diagonal(scores, -np.inf)
        nearest.append(np.argsort(-scores, axis=1)[:, :NEIGHBOURS].tolist())
    pairs = zip(*nearest, strict=True)
    return float(np.mean([len({*mine} & {*other}) / NEIGHBOURS for mine, other in pairs]))


def unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30))


def distances(left: Vectors, right: Vectors) -> Vectors:
    """1 - cosine of each pair of rows, from their difference, since `1 - cosine` itself loses its
    digits near 0."""
    difference = unit(left) - unit(right)
    return np.asarray((difference * difference).sum(axis=1) / 2)


def different_facts(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The facts that differ, as (A's, B's), under names such as `hybridtei.fingerprint.dtype`."""
    facts: dict[str, tuple[Any, Any]] = {}
    for name in {**a, **b}:
        value = a.get(name)
        other = b.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            facts |= different_facts(value, other, f"{prefix}{name}.")
        elif value != other:
            facts[prefix + name] = (value, other)
    return facts
