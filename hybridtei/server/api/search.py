"""Searching a collection, and filling it with texts: our own requests, over whatever vector store the server was given.

They refuse fields that they do not know, as `hybrid` does.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from hybridtei.errors import InvalidInput
from hybridtei.search.options import SearchFields, SearchHit, Stage

Text = Annotated[str, Meta(max_length=100_000)]


class SearchRequest(SearchFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/search`: either `query` or `queries`."""

    collection: Annotated[str, Meta(description="Where to search.")]
    query: Annotated[Text | None, Meta(description="What to search for.")] = None
    queries: Annotated[list[Text] | None, Meta(description="The same for several; each is answered by itself.")] = None
    model: Annotated[
        str | None, Meta(description="Which of several models embeds the query [default: the one the collection is of].")
    ] = None
    rerank: Annotated[
        bool | str, Meta(description="Rank the best anew by a loaded reranker: the first, or the one of this name.")
    ] = False
    filter: Annotated[dict[str, Any] | None, Meta(description="A filter in Qdrant's words.")] = None

    @property
    def texts(self) -> list[str]:
        """Raises InvalidInput unless exactly one of `query` and `queries` is there."""
        if (self.query is None) == (self.queries is None):
            raise InvalidInput("give either `query` or `queries`")
        texts = [self.query] if self.query is not None else self.queries or []
        for place, text in enumerate(texts):
            if not text.strip():
                raise InvalidInput(f"`{'query' if self.query is not None else f'queries[{place}]'}` is empty")
        return texts


class SearchResponse(Struct, frozen=True):
    """Of one query."""

    model: str
    mode: str
    hits: list[SearchHit]
    stages: list[Stage]


class SearchesResponse(Struct, frozen=True):
    """Of several."""

    results: list[SearchResponse]


class PointsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/collections/{name}/points`: texts to embed and store."""

    points: Annotated[
        list[Any], Meta(min_length=1, max_length=1000, description="Objects of `id`, `text`, `payload`, `metadata`.")
    ]
    create: Annotated[bool, Meta(description="Make the collection if it is not there.")] = False
    model: Annotated[str | None, Meta(description="Which of several models embeds [default: the collection's].")] = None
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")] = None


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text to store. An id that is neither a number nor a UUID is made into one, and kept as `document_id`."""

    text: Annotated[str, Meta(min_length=1)]
    id: int | str | None = None
    payload: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


class FailedPoint(Struct, frozen=True):
    """A point that was not stored: its place in the request, its id if it has one, and why."""

    index: int
    id: int | str | None
    error: str


class PointsResponse(Struct, frozen=True):
    """What became of the points. `ids`: of those that are stored, in their order."""

    collection: str
    created: bool
    upserted: int
    ids: list[int | str]
    failed: list[FailedPoint]
