"""A client of hybridtei's server with an `Encoder`'s verbs: `AsyncClient` is awaited, `Client` blocks, over one body.

Each verb is written once, as a coroutine. `Client` drives it over a transport that blocks, so that it ends at its first step.
Neither numpy nor a runtime is imported before vectors are there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import update_wrapper
from struct import Struct as Packing
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec
from msgspec import Struct

from hybridtei.asking import Asking, Blocking, finished, portions
from hybridtei.errors import BackendError, InvalidInput, NoAnswer

if TYPE_CHECKING:
    from hybridtei.inference.tasks.embed import InputType
    from hybridtei.inference.tasks.label import Aggregation, Prediction, Span
    from hybridtei.inference.tasks.pooling import MultivectorBudget
    from hybridtei.inference.tasks.rerank import Ranked, Weights
    from hybridtei.inference.tasks.spans import Spans
    from hybridtei.models.text.reader import Input
    from hybridtei.models.text.tokenizer import Direction, Text
    from hybridtei.outputs import Embeddings
    from hybridtei.retrieval.search.options import SearchResult

P = ParamSpec("P")
T = TypeVar("T")
REQUEST_ITEMS = 32
FLOAT32 = Packing("f")


class Upserted(Struct, frozen=True):
    """What became of points. `created`: the collection was made just now; `ids`: of those that are stored, in their order;
    `failed`: of each that is not, its `index` among those given, its `id` and the `error`."""

    created: bool
    ids: list[int | str]
    failed: list[dict[str, Any]]


class AsyncClient(Asking):
    """A server of hybridtei by its URL; with several models, that of one is `http://host:3000/m/ALIAS`.

    A verb is split into requests that the server takes, four of them at once. A request that the server is too busy for, that
    is cut off or not answered within `timeout_s` is sent again until `patience_s` have passed, with the pauses that the server
    asks for. Then, and where something else than hybridtei answers, NoAnswer is raised, which is a ConnectionError too; what
    the server itself refuses raises the error that an `Encoder` or `Searcher` raises.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 10.0,
        transport: Any = None,
    ) -> None:
        """`transport`: httpx's, such as one to an application in this process. Raises InvalidInput for what is no URL."""
        super().__init__(url, api_key=api_key, timeout_s=timeout_s, patience_s=patience_s, transport=transport)
        self._facts: dict[str, Any] | None = None

    async def encode(
        self,
        texts: str | Sequence[Input],
        outputs: Iterable[str] = ("dense",),
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        input_type: InputType | None = None,
        multivector: MultivectorBudget | Mapping[str, Any] | None = None,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
        spans: Sequence[Spans] | Spans | None = None,
    ) -> Embeddings:
        """Embed texts, or spans of them, as `Encoder.encode` does: "dense", "sparse" and "multivector" from one pass.

        `multivector`: by default the server's budget. `truncation_direction`: by default the right."""
        inputs: list[Any] = [texts] if isinstance(texts, str) else list(texts)
        if spans is not None:
            of_each = [spans] if isinstance(texts, str) else spans
            inputs = [{"text": text, "spans": some} for text, some in zip(inputs, of_each, strict=True)]
        names = [outputs] if isinstance(outputs, str) else [*outputs]
        body = {"outputs": names, "sparse_format": "qdrant", "normalize": normalize, "dimensions": dimensions}
        body |= {"prompt_name": prompt_name, "input_type": input_type, "multivector": msgspec.to_builtins(multivector)}
        body |= _cut(truncate, truncation_direction)
        rows = await self._in_portions("/embed_hybrid", "inputs", inputs, body)
        widths = (await self.info())["hybridtei"].get("dimensions") or {}
        return _embeddings(rows, names, None if spans is None else [len(item["spans"]) for item in inputs], widths, self.url)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        instruction: str | None = None,
        weights: Weights | str | None = None,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> list[Ranked]:
        """Return the documents, the best for the query first, as `Encoder.rerank` does."""
        body = {"query": query, "instruction": instruction, "weights": msgspec.to_builtins(weights), "raw_scores": raw_scores}
        body |= _cut(truncate, truncation_direction)
        scores: list[float] = []
        for part in await self._in_portions("/rerank", "texts", [*documents], body, joined=False):
            scores += [_float32(one["score"]) for one in sorted(part, key=lambda one: one["index"])]
        from hybridtei.inference.tasks.rerank import Ranked

        best = sorted(range(len(scores)), key=scores.__getitem__)[::-1]  # ties in TEI's order
        return [Ranked(place, scores[place], documents[place]) for place in best[:top_n]]

    async def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        raw_scores: bool = False,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> list[list[Prediction]]:
        """Return every label's score for each text, or pair of texts (a tuple), as `Encoder.classify` does."""
        items = [texts] if isinstance(texts, str | tuple) else texts
        inputs = [[item] if isinstance(item, str) else [*item] for item in items]
        body = {"raw_scores": raw_scores, **_cut(truncate, truncation_direction)}
        rows = await self._in_portions("/predict", "inputs", inputs, body)
        from hybridtei.inference.tasks.label import Prediction

        return [[Prediction(one["label"], _float32(one["score"])) for one in row] for row in rows]

    async def tag(
        self,
        texts: str | Sequence[str],
        *,
        aggregation_strategy: Aggregation = "simple",
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> list[list[Span]]:
        """Return labelled spans of each text, in code points, as `Encoder.tag` does."""
        body = {"aggregation_strategy": aggregation_strategy, **_cut(truncate, truncation_direction)}
        rows = await self._in_portions("/predict_tokens", "inputs", [texts] if isinstance(texts, str) else [*texts], body)
        from hybridtei.inference.tasks.label import Span

        def span(one: Any) -> Span:
            ((label, score),) = one["results"].items()
            return Span(one["start"], one["end"], label, _float32(score), one["token_id"])

        return [[span(one) for one in row] for row in rows]

    async def search(
        self,
        /,
        collection: str,
        query: str,
        *,
        filter: Mapping[str, Any] | None = None,
        rerank: bool | str = False,
        **options: Any,
    ) -> SearchResult:
        """Search a collection of the server's store. `options`: fields of `SearchOptions`, such as `limit=3` or `mode="dense"`;
        `filter`: in Qdrant's words; `rerank`: by the server's reranker, or the one of this alias."""
        body = {"collection": collection, "query": query, "rerank": rerank, "filter": filter, **options}
        found = await self.asked("/search", body)
        from hybridtei.retrieval.search.options import SearchResult

        return msgspec.convert(found, SearchResult)

    async def upsert(
        self, collection: str, points: Sequence[str | Mapping[str, Any]], *, create: bool = True, truncate: bool | None = None
    ) -> Upserted:
        """Embed texts and store them. A point is a text, or an object of `text` and, optionally, `id`, `payload`, `metadata`;
        one without an id replaces the same text. `create`: make the collection if it is not there."""
        objects = [{"text": point} if isinstance(point, str) else point for point in points]
        path, options = f"/collections/{collection}/points", {"create": create, "truncate": truncate}
        created, before = False, 0
        ids: list[int | str] = []
        failed: list[dict[str, Any]] = []
        for portion in portions(objects, 1000):
            answer = await self.asked(path, {"points": portion, **options})
            created |= answer["created"]
            ids += answer["ids"]
            failed += [{**one, "index": one["index"] + before} for one in answer["failed"]]
            before += len(portion)
        return Upserted(created, ids, failed)

    async def collections(self) -> list[str]:
        """Return the names of the store's collections, and their aliases, sorted."""
        return [*(await self.asked("/collections"))["collections"]]

    async def info(self) -> dict[str, Any]:
        """Return the server's facts, `/info`, read once. Raises InvalidInput if the server is no hybridtei."""
        if self._facts is None:
            found = await self.asked("/info")
            if not isinstance(found, dict) or not isinstance(found.get("hybridtei"), dict):
                raise InvalidInput(f"{self.url}: is no hybridtei; `/info` answers {found!r:.300}")
            self._facts = found
        return self._facts

    async def ask(self, path: str, body: Any = None) -> Any:
        """Return the decoded answer of any route: to a GET, or to a POST of `body`."""
        return await self.asked(path, body)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _in_portions(
        self, path: str, field: str, items: Sequence[Any], options: Mapping[str, Any], *, joined: bool = True
    ) -> list[Any]:
        """The answers, a list each, of requests that hold `items` in turn; `joined`: as one list of as many."""
        if not items:
            return []
        most = min(REQUEST_ITEMS, (await self.info()).get("max_client_batch_size", REQUEST_ITEMS)) if len(items) > 1 else 1
        parts = [*portions(items, most)]
        answers = await self.all_asked([(path, {field: portion, **options}) for portion in parts])
        for portion, answer in zip(parts, answers, strict=True):
            if not isinstance(answer, list) or len(answer) != len(portion):
                raise NoAnswer(f"{self.url}{path}: should answer a list of {len(portion)}, answered {answer!r:.300}")
        return [row for answer in answers for row in answer] if joined else answers


class _Blocking(Blocking, AsyncClient):
    """An `AsyncClient` none of whose verbs waits."""


def _blocking(verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    def blocking(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        return finished(verb(self._body, *arguments, **options))

    update_wrapper(blocking, verb)
    return blocking


class Client:
    """`AsyncClient`, but each verb blocks until its result is there. Thread-safe.

    >>> with Client("http://127.0.0.1:3000") as client:                # doctest: +SKIP
    ...     client.encode(["hybrid search"], outputs=("dense", "sparse")).dense.shape
    (1, 384)
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, patience_s: float = 10.0) -> None:
        """Raises InvalidInput for what is no URL. Nothing is sent yet."""
        self._body: AsyncClient = _Blocking(url, api_key=api_key, timeout_s=timeout_s, patience_s=patience_s)
        self.url = self._body.url

    encode = _blocking(AsyncClient.encode)
    rerank = _blocking(AsyncClient.rerank)
    classify = _blocking(AsyncClient.classify)
    tag = _blocking(AsyncClient.tag)
    search = _blocking(AsyncClient.search)
    upsert = _blocking(AsyncClient.upsert)
    collections = _blocking(AsyncClient.collections)
    info = _blocking(AsyncClient.info)
    ask = _blocking(AsyncClient.ask)

    def close(self) -> None:
        """Close the connections."""
        self._body._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(truncate: bool, direction: Direction | None) -> dict[str, Any]:
    return {"truncate": truncate, "truncation_direction": direction or "right"}


def _embeddings(
    rows: Sequence[Any], names: Sequence[str], counts: Sequence[int] | None, widths: Mapping[str, int | None], url: str
) -> Embeddings:
    """Arrays of the outputs `names` of `/embed_hybrid`. `counts`: the spans of each text, if it has spans, whose rows are then
    lists. Raises NoAnswer for rows that no hybridtei answers, BackendError for vectors that are none."""
    if counts is not None and [len(some) if isinstance(some, list) else 0 for some in rows] == list(counts):
        rows = [row for some in rows for row in some]
    if not all(isinstance(row, dict) and row.keys() >= {*names} for row in rows):
        raise NoAnswer(f"{url}: should answer {len(rows)} objects of {', '.join(names)}, answered {rows!r:.300}")
    import numpy as np

    from hybridtei.batch import Ragged, offsets_of
    from hybridtei.outputs import Embeddings, SparseVectors

    def dense(rows: Sequence[Any], width: int) -> Any:
        return np.array(rows, dtype=np.float32).reshape(len(rows), -1 if rows else width)

    def sparse(rows: Sequence[Any], width: int) -> Any:
        for row in rows:
            if len(row["indices"]) != len(row["values"]):
                raise ValueError(f"{len(row['indices'])} indices and {len(row['values'])} values in a sparse vector")
        indices = np.array([i for row in rows for i in row["indices"]], dtype=np.int64)
        values = np.array([value for row in rows for value in row["values"]], dtype=np.float32)
        offsets = offsets_of([len(row["indices"]) for row in rows])
        return SparseVectors(indices, values, offsets, width or int(indices.max(initial=-1)) + 1)

    def multivector(rows: Sequence[Any], width: int) -> Any:
        return Ragged.from_rows([vectors(row, width) for row in rows]) if rows else Ragged(dense([], width), offsets_of([]))

    def vectors(row: Any, width: int) -> Any:
        if isinstance(row, dict):  # a bit a number
            count, bits = row["shape"]
            return np.frombuffer(base64.b64decode(row["data"]), np.uint8).reshape(count, (bits + 7) // 8)
        return np.array(row, dtype=np.int8 if type(row[0][0]) is int else np.float32) if row else dense([], width)

    made = {"dense": dense, "sparse": sparse, "multivector": multivector}
    try:
        return Embeddings(**{name: made[name]([row[name] for row in rows], widths.get(name) or 0) for name in names})
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{url}: its answer is not what was asked for: {error}") from error


def _float32(score: float) -> float:
    """The float32 that JSON has written in fewer digits."""
    return float(FLOAT32.unpack(FLOAT32.pack(score))[0])
