"""Which outputs an ingest stores, a batch of which one text may fail, and a running server as an `Embedder`.

A text that an embedder refuses must not take others with it: `embed_each` halves a failing batch until it stands alone.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import httpx
import numpy as np
import orjson
from msgspec import structs
from numpy.typing import NDArray

from hybridtei.batch import Head, Ragged, offsets_of
from hybridtei.config import MultivectorDtype
from hybridtei.errors import BackendError, HybridTeiError, InvalidInput, RequestError
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.system.retries import Retries
from hybridtei.tasks.embed import InputType, prompt_of
from hybridtei.tasks.pooling import MultivectorBudget
from hybridtei.tasks.spans import Spans, SpanText

T = TypeVar("T")
VECTORS = (Head.DENSE, Head.SPARSE, Head.MULTIVECTOR)
REQUEST_TEXTS = 16
REQUEST_BYTES = 1_000_000  # half of what a server takes by default
REQUESTS_AT_ONCE = 4
REQUEST_TIMEOUT_S = 300.0
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
TEXT_REFUSED = frozenset({(400, "Empty"), (413, "Validation"), (422, "Validation"), (422, "Tokenizer")})  # TEI's names too
PASS_FAILED = (424, "Backend")
BODY_TOO_LARGE = "Failed to buffer the request body: length limit exceeded"  # the server's and TEI's, as plain text with 413
SHOWN_CHARACTERS = 300  # of a response, in an error


def vector_heads(available: frozenset[Head], names: Sequence[str] | None) -> frozenset[Head]:
    """The outputs to store: those of `names`, or all of the model's. Raises InvalidInput for one that the model lacks."""
    has = available & frozenset(VECTORS)
    if names is None:
        return has
    known = {head.value: head for head in VECTORS}
    for name in names:
        if known.get(name) not in has:
            raise InvalidInput(f"--outputs names {name!r}; the model has {', '.join(sorted(has))}")
    return frozenset(known[name] for name in names)


def embed_each(embed: Callable[[Sequence[T]], Embeddings], texts: Sequence[T]) -> tuple[Embeddings, list[str | None]]:
    """(rows of the texts, or texts with spans, that could be embedded, for each the error's message or None).

    Raises BackendError where none of several texts could be embedded: then the engine is at fault.
    """
    parts: list[Embeddings] = []
    errors: list[HybridTeiError | None] = []

    def halve(texts: Sequence[T]) -> None:
        try:
            parts.append(embed(texts))
            errors.extend([None] * len(texts))
        except (RequestError, BackendError) as error:
            if len(texts) == 1:
                errors.append(error)
                return
            middle = len(texts) // 2
            halve(texts[:middle])
            halve(texts[middle:])

    halve(texts)
    if len(texts) > 1 and isinstance(errors[0], BackendError) and None not in errors:
        raise errors[0]
    return Embeddings.concat(parts), [None if error is None else str(error) for error in errors]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's model, by its /info."""

    model_id: str
    outputs: frozenset[Head]
    prompts: tuple[str, ...]
    max_texts: int
    dtype: str

    @classmethod
    def read(cls, client: _RetryingClient) -> Self:
        """Reads the facts off the server's /info. Raises InvalidInput if it is no hybridtei that embeds."""
        info = client.ask("GET", "/info")
        ours = info.get("hybridtei") if isinstance(info, dict) else None
        if not isinstance(ours, dict) or ours.get("role") != "embedding":
            raise InvalidInput(f"{client.url}: is no hybridtei that serves an embedding model")
        known = {head.value: head for head in VECTORS}
        try:
            outputs = frozenset(known[name] for name in ours.get("outputs", ()) if name in known)
            prompts = tuple(ours.get("prompts") or ())
            return cls(str(info["model_id"]), outputs, prompts, int(info["max_client_batch_size"]), str(info["model_dtype"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{client.url}: /info is not that of a hybridtei: {type(error).__name__}: {error}") from error


class RemoteEmbedder:
    """A running hybridtei as an `Embedder`: concurrent requests, each retried for `patience_s` while the server is overloaded.

    A text is at fault only where the server's own error says so: InvalidInput for a refused text, BackendError for one whose
    pass failed or whose vectors are broken. Any other response is about the server, or a proxy's, and raises ConnectionError
    with its text, as does the end of patience. The constructor raises InvalidInput for another server.
    """

    def __init__(self, url: str, *, api_key: str | None = None, patience_s: float = 60.0) -> None:
        self._client = _RetryingClient(url, api_key, patience_s)
        self.facts = ServerFacts.read(self._client)
        self.name = f"{url}, {self.facts.dtype}"
        self.budget = MultivectorBudget()  # of documents' multi-vectors
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="embed")

    def encode(
        self,
        texts: Sequence[str],
        outputs: Iterable[str],
        *,
        input_type: InputType,
        spans: Sequence[Spans] | None = None,
    ) -> Embeddings:
        """Rows in the order of `texts` and their `spans`, by the server's prompt for that type of inputs, if it has one."""
        heads = frozenset(Head(name) for name in outputs)
        body: dict[str, Any] = {"outputs": sorted(heads), "sparse_format": "qdrant", "truncate": True}
        if Head.MULTIVECTOR in heads:  # a full one too: the server may have another of its own
            body["multivector"] = structs.asdict(self.budget)
        if (prompt_name := prompt_of(input_type, self.facts.prompts)) is not None:
            body["prompt_name"] = prompt_name
        request = partial(self._request, heads=heads, body=body)
        inputs = texts if spans is None else [SpanText(*one) for one in zip(texts, spans, strict=True)]
        return Embeddings.concat(list(self._threads.map(request, list(self._requests(inputs)))))

    def close(self) -> None:
        """Closes the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _requests(self, inputs: Sequence[str | SpanText]) -> Iterator[list[str | SpanText]]:
        request: list[str | SpanText] = []
        size = rows = 0
        for item in inputs:
            text, rows_here = (item, 1) if isinstance(item, str) else (item.text, len(item.spans))
            bytes_here = len(text.encode())
            if request and (
                size + bytes_here > REQUEST_BYTES
                or rows + rows_here > REQUEST_TEXTS
                or len(request) == min(REQUEST_TEXTS, self.facts.max_texts)
            ):
                yield request
                request, size, rows = [], 0, 0
            request.append(item)
            size, rows = size + bytes_here, rows + rows_here
        if request:
            yield request

    def _request(self, inputs: list[str | SpanText], heads: frozenset[Head], body: dict[str, Any]) -> Embeddings:
        url, asked = self._client.url, {"inputs": inputs, **body}
        rows = self._client.ask("POST", "/embed_hybrid", asked)
        counts = [len(item.spans) for item in inputs if isinstance(item, SpanText)]
        rows = _flat(rows, counts) if counts else rows
        _check_rows(rows, sum(counts) or len(inputs), heads, url)
        return _read_rows(rows, heads, url, self.budget.dtype)


def _flat(rows: Any, counts: Sequence[int]) -> Any:
    """The rows of spans, text after text; the answer itself where it is no such lists."""
    is_nested = isinstance(rows, list) and [len(some) if isinstance(some, list) else 0 for some in rows] == counts
    return [row for some in rows for row in some] if is_nested else rows


def _check_rows(rows: Any, count: int, heads: frozenset[Head], url: str) -> None:
    """Raises ConnectionError for JSON that no hybridtei responds with, whatever the texts are."""
    if isinstance(rows, list) and len(rows) == count and all(isinstance(row, dict) and heads <= row.keys() for row in rows):
        return
    shown = orjson.dumps(rows)[:SHOWN_CHARACTERS].decode(errors="replace")
    raise ConnectionError(f"{url}: should answer {count} objects of {', '.join(sorted(heads))}, answered {shown}")


def _read_rows(rows: Any, heads: frozenset[Head], url: str, dtype: MultivectorDtype) -> Embeddings:
    try:
        dense = np.array([row["dense"] for row in rows], dtype=np.float32) if Head.DENSE in heads else None
        sparse = _read_sparse([row["sparse"] for row in rows]) if Head.SPARSE in heads else None
        many = [_read_multivector(row["multivector"], dtype) for row in rows] if Head.MULTIVECTOR in heads else None
        return Embeddings(dense=dense, sparse=sparse, multivector=None if many is None else Ragged.from_rows(many))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{url}: its answer is not what was asked for: {error}") from error


def _read_multivector(value: Any, dtype: MultivectorDtype) -> NDArray[Any]:
    if dtype != "binary":
        return np.array(value, dtype=np.int8 if dtype == "int8" else np.float32)
    count, bits = value["shape"]
    return np.frombuffer(base64.b64decode(value["data"]), np.uint8).reshape(count, (bits + 7) // 8)


def _read_sparse(rows: Sequence[Any]) -> SparseVectors:
    for row in rows:
        if len(row["indices"]) != len(row["values"]):
            raise ValueError(f"{len(row['indices'])} indices and {len(row['values'])} values in a sparse vector")
    indices = np.array([i for row in rows for i in row["indices"]], dtype=np.int64)
    values = np.array([value for row in rows for value in row["values"]], dtype=np.float32)
    return SparseVectors(indices, values, offsets_of([len(row["indices"]) for row in rows]), int(indices.max(initial=0)) + 1)


class _RetryingClient:
    """An HTTP client with retries. Thread-safe."""

    def __init__(self, url: str, api_key: str | None, patience_s: float) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._client = httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_S)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The response's JSON. Raises InvalidInput if the server refused the input, BackendError if its pass failed, and
        ConnectionError when patience ends or the response is none of the server's."""
        content = None if body is None else orjson.dumps(body)
        retries = Retries(self._patience_s)
        while True:
            retry_after_s: float | None = None
            try:
                answer = self._client.request(method, self.url + path, content=content)
                if answer.status_code not in RETRIED_STATUSES:
                    return self._read(answer)
                failure = f"status {answer.status_code}: {answer.text[:200]}"
                retry_after_s = _seconds(answer.headers.get("retry-after"))
            except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                failure = f"{type(error).__name__}: {error}"
            pause_s = retries.pause_s(retry_after_s)
            if pause_s is None:
                raise ConnectionError(f"{self.url}: no answer within {self._patience_s:g} s, {retries.tries} tries: {failure}")
            time.sleep(pause_s)

    def _read(self, answer: httpx.Response) -> Any:
        try:
            content = orjson.loads(answer.content)
        except ValueError:
            content = None
        if answer.status_code == 200 and content is not None:
            return content
        kind = content.get("error_type") if isinstance(content, dict) else None
        message = f"{self.url}: status {answer.status_code}: {_shown(answer)}"
        if (answer.status_code, kind) == PASS_FAILED:
            raise BackendError(message)
        if (answer.status_code, kind) in TEXT_REFUSED or _is_too_large(answer):
            raise InvalidInput(message)
        raise ConnectionError(message)

    def close(self) -> None:
        self._client.close()


def _is_too_large(answer: httpx.Response) -> bool:
    """Whether a text is longer than the server's --payload-limit; a proxy's 413 has another body."""
    return answer.status_code == 413 and answer.text.startswith(BODY_TOO_LARGE)


def _shown(answer: httpx.Response) -> str:
    """The text of a response in an error, after the target of a redirection."""
    target = f"to {answer.headers['location']}: " if "location" in answer.headers else ""
    return (target + " ".join(answer.text.split()))[:SHOWN_CHARACTERS]


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None
