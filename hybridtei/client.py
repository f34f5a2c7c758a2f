"""A client of hybridtei's server with an `Encoder`'s verbs: `AsyncClient` is awaited, `Client`
blocks.

Each verb is written once, as a coroutine; `Client` runs it in its own event loop. numpy is imported
when vectors arrive, and no runtime.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack
from urllib.parse import quote

import httpx
import msgspec
import orjson
from msgspec import Struct

from hybridtei.asking import embeddings_of, float32, portions, read, shown
from hybridtei.errors import InvalidInput, NoAnswer
from hybridtei.keywords import check_names, check_value, listed
from hybridtei.options import (
    Aggregation,
    EmbedKeywords,
    EmbedOptions,
    LabelKeywords,
    LabelOptions,
    Output,
    RankKeywords,
    RankOptions,
    Size,
)
from hybridtei.system.forks import OfOneProcess, leave_to_parent, renew_in_children
from hybridtei.system.own_loop import OwnLoop
from hybridtei.system.retries import Retries, retry_after_s
from hybridtei.system.terminal import without_passwords

if TYPE_CHECKING:
    from hybridtei.batch import Head
    from hybridtei.inference.tasks.label import Prediction, Span
    from hybridtei.inference.tasks.rerank import Ranked
    from hybridtei.inference.tasks.spans import Spans
    from hybridtei.models.text.reader import Input
    from hybridtei.models.text.tokenizer import Text
    from hybridtei.outputs import Embeddings
    from hybridtei.retrieval.search.options import SearchKeywords, SearchResult, StoredPoint

P = ParamSpec("P")
T = TypeVar("T")
REQUEST_ITEMS, REQUESTS_AT_ONCE = 32, 4
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
HEADERS = {"accept": "application/json", "content-type": "application/json"}
URL = re.compile(r"https?://([^/\s@]+@)?(\[[\da-fA-F:.]+\]|[^/\s:@\[\]]+)(:\d{1,5})?(/\S*)?")


class Upserted(Struct, frozen=True):
    """The outcome of an upsert. `created`: this call created the collection. `ids`: of the stored
    points, in their order.
    `failed`: for each other point its `index` among the given points, its `id` and the `error`."""

    created: bool
    ids: list[int | str]
    failed: list[dict[str, Any]]


class _Connections:
    """httpx's client, made at the first request. A forked process makes its own."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._client: httpx.AsyncClient | None = None
        renew_in_children(self)

    def renew(self) -> None:
        """Leave the connections to the parent process."""
        leave_to_parent(self._client)
        self._client = None

    @property
    def client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(**self._settings)
        return self._client


class AsyncClient(OfOneProcess):
    """A hybridtei server by its URL. For one of several models use `http://host:3000/m/ALIAS`.

    The client splits a call into requests within the server's limits, four at a time. If the server
    is too busy, the connection breaks, or no answer comes within `timeout_s`, the client waits as
    long as the server asks, and sends the request again. It raises NoAnswer, a ConnectionError,
    after `patience_s` or if another program answers, and `Encoder`'s errors if the server refuses.
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
        """`transport`: httpx's, such as one to an application in this process. Raises InvalidInput
        for an invalid URL."""
        url = url.rstrip("/")
        # The URL as messages show it
        self.url = without_passwords(url)
        if URL.fullmatch(url) is None:
            raise InvalidInput(
                f"{self.url!r} is not the URL of a server; it should look like "
                "http://127.0.0.1:3000"
            )
        self._timeout_s, self._patience_s = timeout_s, patience_s
        headers = dict(HEADERS)
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._connections = _Connections(
            base_url=url,
            headers=headers,
            timeout=timeout_s,
            transport=transport,
        )
        self._facts: dict[str, Any] | None = None

    async def encode(
        self,
        texts: str | Sequence[Input],
        outputs: Output | Iterable[Output | Head] = ("dense",),
        *,
        spans: Sequence[Spans] | Spans | None = None,
        **options: Unpack[EmbedKeywords],
    ) -> Embeddings:
        """Embed texts, or spans of them, like `Encoder.encode`: "dense", "sparse" and "multivector"
        from one pass. `options`: fields of `EmbedOptions`; those left out are the server's, but
        long texts are cut."""
        inputs, counts = listed("texts", texts), None
        if spans is not None:
            lists: list[Any] = [spans] if isinstance(texts, str) else list(spans)
            counts = list(map(len, lists))
            inputs = [
                {"text": text, "spans": text_spans}
                for text, text_spans in zip(inputs, lists, strict=True)
            ]
        names = listed("outputs", outputs)
        fields = EmbedOptions.given("encode()", options, truncate=True).as_fields()
        body = {"outputs": names, "sparse_format": "qdrant", **fields}
        facts = (await self.info())["hybridtei"]
        if "base64" in facts.get("encoding_formats", ()):
            body["encoding_format"] = "base64"
        rows = await self._in_portions("/embed_hybrid", "inputs", inputs, body)
        widths = facts.get("dimensions") or {}
        return embeddings_of(rows, names, counts, widths, self.url)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        limit: int | None = None,
        **options: Unpack[RankKeywords],
    ) -> list[Ranked]:
        """Return the documents, the best for the query first, like `Encoder.rerank`."""
        documents = listed("documents", documents)
        if limit is not None:
            check_value("limit", limit, Size)
        chosen = RankOptions.given("rerank()", options, truncate=True)
        body = {"query": query, **chosen.as_fields()}
        if chosen.budget_ms is not None and documents:
            ranked = await self._rank_within(body, documents)
            return ranked[:limit]
        scores: list[float] = []
        for part in await self._in_portions("/rerank", "texts", documents, body, joined=False):
            scores += [
                float32(entry["score"]) for entry in sorted(part, key=lambda entry: entry["index"])
            ]
        from hybridtei.inference.tasks.rerank import Ranked

        # Ties in TEI's order
        best = sorted(range(len(scores)), key=scores.__getitem__)[::-1]
        return [Ranked(place, scores[place], documents[place]) for place in best[:limit]]

    async def _rank_within(self, body: dict[str, Any], documents: Sequence[str]) -> list[Ranked]:
        """The order of one request, since portions would each have the whole budget."""
        # `/rerank` gives similarities as they are, `/v1/rerank` only on request
        if "reranker" not in (await self.info()).get("model_type", {}):
            body["raw_scores"] = True
        request = {**body, "documents": documents, "return_documents": False}
        answer = await self.ask("/v1/rerank", request)
        from hybridtei.inference.tasks.rerank import Ranked

        return [
            Ranked(
                entry["index"],
                float32(entry["relevance_score"]),
                documents[entry["index"]],
            )
            for entry in answer["results"]
        ]

    async def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        raw_scores: bool = False,
        **options: Unpack[LabelKeywords],
    ) -> list[list[Prediction]]:
        """Return every label's score for each text, or pair of texts (a tuple), like
        `Encoder.classify`."""
        items = [texts] if isinstance(texts, tuple) else listed("texts", texts)
        inputs = [[item] if isinstance(item, str) else [*item] for item in items]
        body = LabelOptions.given(
            "classify()",
            options,
            truncate=True,
            raw_scores=raw_scores,
        ).as_fields()
        rows = await self._in_portions("/predict", "inputs", inputs, body)
        from hybridtei.inference.tasks.label import Prediction

        return [
            [Prediction(entry["label"], float32(entry["score"])) for entry in row] for row in rows
        ]

    async def tag(
        self,
        texts: str | Sequence[str],
        *,
        aggregation_strategy: Aggregation = "simple",
        **options: Unpack[LabelKeywords],
    ) -> list[list[Span]]:
        """Return labelled spans of each text, in code points, like `Encoder.tag`."""
        body = LabelOptions.given(
            "tag()",
            options,
            truncate=True,
            aggregation_strategy=aggregation_strategy,
        ).as_fields()
        rows = await self._in_portions("/predict_tokens", "inputs", listed("texts", texts), body)
        from hybridtei.inference.tasks.label import Span

        def span(entry: Any) -> Span:
            ((label, score),) = entry["results"].items()
            return Span(entry["start"], entry["end"], label, float32(score), entry["token_id"])

        return [[span(entry) for entry in row] for row in rows]

    async def search(
        self,
        /,
        collection: str,
        query: str,
        *,
        limit: int = 10,
        filter: Mapping[str, Any] | None = None,
        rerank: bool | str = False,
        **options: Unpack[SearchKeywords],
    ) -> SearchResult:
        """Search a collection of the server's store. `options`: fields of `SearchOptions`, such as
        `mode="dense"`; `filter`: in Qdrant's format. `rerank`: True: by the server's reranker; or
        the alias of one."""
        from hybridtei.retrieval.search.options import SearchKeywords, SearchResult

        check_names("search()", options, SearchKeywords.__annotations__)
        body = {
            "collection": collection,
            "query": query,
            "limit": limit,
            "rerank": rerank,
            "filter": filter,
            **options,
        }
        answer = await self.ask("/search", body)
        return msgspec.convert(answer, SearchResult)

    async def upsert(
        self,
        collection: str,
        points: Sequence[str | Mapping[str, Any]],
        *,
        create: bool = True,
        truncate: bool | None = None,
        index: Sequence[str] = (),
    ) -> Upserted:
        """Embed texts and store them. A point is a text, or an object of `text` and, optionally,
        `id`, `payload`, `metadata`. A point without an id replaces a stored point with the same
        text, payload and metadata. `create`: create the collection if it does not exist. `index`:
        payload indexes to make, as "lang:keyword"; also without points. Raises InvalidInput if two
        points have one id."""
        objects = [{"text": point} if isinstance(point, str) else point for point in points]
        places: dict[tuple[str, str], int] = {}
        for place, point in enumerate(objects):
            if not isinstance(point, Mapping) or point.get("id") is None:
                continue
            # 1 is not "1"
            identity = point["id"]
            first = places.setdefault((type(identity).__name__, str(identity)), place)
            if first != place:
                raise InvalidInput(
                    f"`points[{first}]` and `points[{place}]` have one id, {identity!r:.100}: give "
                    "each its own"
                )
        options: dict[str, Any] = {"create": create, "truncate": truncate}
        # Servers of 0.3 refuse the field
        if index:
            options["index"] = [*index]
        # `before`: the points of earlier requests
        created, before = False, 0
        ids: list[int | str] = []
        failed: list[dict[str, Any]] = []
        # Without points there may be an index to make
        for portion in [*portions(objects, 1000)] or [[]] * bool(index):
            answer = await self.ask(_points_of(collection), {"points": portion, **options})
            created |= answer["created"]
            ids += answer["ids"]
            failed += [
                {**failure, "index": failure["index"] + before} for failure in answer["failed"]
            ]
            before += len(portion)
        return Upserted(created, ids, failed)

    async def delete(
        self,
        collection: str,
        ids: Sequence[int | str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> int:
        """Delete documents with all their chunks, by ids of points or documents, or by a filter.
        Return the number of points. Unknown ids are no error. `source`: the file of the
        documents, if several files have documents with one id."""
        body = {"ids": ids, "filter": filter, "source": source}
        return int((await self.ask(_points_of(collection, "/delete"), body))["points"])

    async def get(
        self, collection: str, id: int | str, *, source: str | None = None
    ) -> list[StoredPoint]:
        """Return the point with this id, or the chunks of the document with it, in order. Raises
        UnknownDocument."""
        from hybridtei.retrieval.search.options import StoredPoint, written

        path = _points_of(collection, f"/{quote(written(id))}")
        if source is not None:
            path += f"?source={quote(source)}"
        return msgspec.convert((await self.ask(path))["points"], list[StoredPoint])

    async def set_payload(
        self,
        collection: str,
        values: Mapping[str, Any],
        ids: Sequence[int | str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> int:
        """Set keys of the payloads of documents, in all their chunks; None removes a key. Return
        the number of points. `ids`, `filter`, `source`: as for `delete`."""
        body = {"set": values, "ids": ids, "filter": filter, "source": source}
        return int((await self.ask(_points_of(collection, "/payload"), body))["points"])

    async def collections(self) -> list[str]:
        """Return the names of the store's collections, and their aliases, sorted."""
        return [*(await self.ask("/collections"))["collections"]]

    async def info(self) -> dict[str, Any]:
        """Return the server's facts (`/info`), read once. Raises InvalidInput if the server is not
        hybridtei."""
        if self._facts is None:
            facts = await self.ask("/info")
            if not isinstance(facts, dict) or not isinstance(facts.get("hybridtei"), dict):
                raise InvalidInput(f"{self.url}: is not hybridtei; `/info` answers {facts!r:.300}")
            self._facts = facts
        return self._facts

    async def ask(self, path: str, body: Any = None) -> Any:
        """Send a GET, or a POST of `body`, to any route. Return the decoded answer."""
        where = self.url + path
        retries = Retries(self._patience_s)
        try:
            content = None if body is None else orjson.dumps(body)
        except TypeError as error:
            raise InvalidInput(f"{where}: the request is not valid JSON: {error}") from None
        while True:
            asked_s = None
            try:
                # httpx's own timeout is for each read, not for the whole answer
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._connections.client.request(
                        "GET" if content is None else "POST", path, content=content
                    )
                if answer.status_code not in RETRIED:
                    return read(answer, where)
                failure = f"status {answer.status_code}: {shown(answer)}"
                asked_s = retry_after_s(answer.headers)
            except (httpx.RequestError, TimeoutError) as error:
                failure = f"{type(error).__name__}: {error}"
                if not str(error):
                    failure = f"nothing came for {self._timeout_s:g} s"
            if (pause_s := retries.pause_s(asked_s)) is None:
                tries = "1 try" if retries.tries == 1 else f"{retries.tries} tries"
                raise NoAnswer(
                    f"{where}: no answer within {self._patience_s:g} s (patience_s), {tries}; the "
                    f"last: {failure}"
                )
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.client.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _in_portions(
        self,
        path: str,
        field: str,
        items: Sequence[Any],
        options: Mapping[str, Any],
        *,
        joined: bool = True,
    ) -> list[Any]:
        """Send `items` in several requests, and return their answers. `joined`: as one list with an
        entry an item."""
        if not items:
            return []
        limit = 1
        if len(items) > 1:
            largest = (await self.info()).get("max_client_batch_size", REQUEST_ITEMS)
            limit = min(REQUEST_ITEMS, largest)
        parts = [*portions(items, limit)]
        slots = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def entries_of(portion: list[Any]) -> list[Any]:
            async with slots:
                answer = await self.ask(path, {field: portion, **options})
            if not isinstance(answer, list) or len(answer) != len(portion):
                raise NoAnswer(
                    f"{self.url}{path}: should answer a list of {len(portion)}, answered "
                    f"{answer!r:.300}"
                )
            return answer

        tasks = [asyncio.create_task(entries_of(portion)) for portion in parts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            # After an error the other requests are stopped
            for task in tasks:
                task.cancel()
        if not joined:
            return answers
        return [row for answer in answers for row in answer]


def _points_of(collection: str, rest: str = "") -> str:
    if not collection or "/" in collection:
        raise InvalidInput(f"collection {collection!r}: a name should have no / and not be empty")
    return f"/collections/{quote(collection, safe='')}/points{rest}"


def _blocking(
    verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    def blocking(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        answer: T = self._loop.run(verb(self._body, *arguments, **options))
        return answer

    update_wrapper(blocking, verb)
    return blocking


class Client(OfOneProcess):
    """The methods of `AsyncClient`, which block here until the result is there. Thread-safe.

    >>> with Client("http://127.0.0.1:3000") as client:                # doctest: +SKIP
    ...     client.encode(["hybrid search"], outputs=("dense", "sparse")).dense.shape
    (1, 384)
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 10.0,
    ) -> None:
        """Raises InvalidInput for an invalid URL. Sends nothing yet."""
        self._body = AsyncClient(url, api_key=api_key, timeout_s=timeout_s, patience_s=patience_s)
        self._loop, self.url = OwnLoop(), self._body.url

    encode = _blocking(AsyncClient.encode)
    rerank = _blocking(AsyncClient.rerank)
    classify = _blocking(AsyncClient.classify)
    tag = _blocking(AsyncClient.tag)
    search = _blocking(AsyncClient.search)
    upsert = _blocking(AsyncClient.upsert)
    get = _blocking(AsyncClient.get)
    delete = _blocking(AsyncClient.delete)
    set_payload = _blocking(AsyncClient.set_payload)
    collections = _blocking(AsyncClient.collections)
    info = _blocking(AsyncClient.info)
    ask = _blocking(AsyncClient.ask)

    def close(self) -> None:
        """Close the connections."""
        self._loop.run(self._body.close())
        self._loop.close()

    def __repr__(self) -> str:
        return f"Client({self.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
