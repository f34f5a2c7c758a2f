"""Searching a collection, and filling it with texts: our own requests, over whatever vector store the server was given.

They refuse fields that they do not know, as `hybrid` does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei.errors import InvalidInput

Mode = Literal["dense", "sparse", "multivector", "rrf", "dbsf", "weighted"]
Count = Annotated[int, Meta(ge=0, le=100_000)]
Text = Annotated[str, Meta(max_length=100_000)]


class SearchRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/search`: either `query` or `queries`."""

    collection: Annotated[str, Meta(description="Where to search.")]
    query: Annotated[Text | None, Meta(description="What to search for.")] = None
    queries: Annotated[list[Text] | None, Meta(description="The same for several; each is answered by itself.")] = None
    model: Annotated[
        str | None, Meta(description="Which of several models embeds the query [default: the one the collection is of].")
    ] = None
    mode: Annotated[
        Mode | None, Meta(description="How candidates are found [default: rrf of dense and sparse, or what there is].")
    ] = None
    limit: Annotated[Count, Meta(description="How many hits.")] = 10
    offset: Annotated[Count, Meta(description="How many to leave out before them.")] = 0
    prefetch_limit: Annotated[Count, Meta(description="Candidates of each kind of vector.")] = 100
    k: Annotated[int | None, Meta(description="Of rrf, as Qdrant counts: its 61 is the usual 60 [default: 2].")] = None
    weights: Annotated[
        dict[str, float] | list[float] | str | None,
        Meta(description="Of rrf or weighted: by name, in order, or a preset: m3, m3-long, m3-two."),
    ] = None
    legs: Annotated[list[str] | None, Meta(description="Which kinds of vectors are fused [default: dense and sparse].")] = None
    rescore: Annotated[bool, Meta(description="Rank the candidates anew by MaxSim of their multi-vectors.")] = False
    rerank: Annotated[
        bool | str, Meta(description="Rank the best anew by a loaded reranker: the first, or the one of this name.")
    ] = False
    rerank_limit: Annotated[Count, Meta(description="So many of the best are reranked.")] = 50
    filter: Annotated[dict[str, Any] | None, Meta(description="A filter in Qdrant's words.")] = None
    score_threshold: Annotated[float | None, Meta(description="Leave out what the store scores lower.")] = None
    exact: Annotated[bool, Meta(description="No approximate index.")] = False
    with_payload: Annotated[bool | list[str], Meta(description="Whether to give payloads, or which of their keys.")] = True
    highlights: Annotated[bool, Meta(description="Where the terms shared with the query stand in the text.")] = False
    explain: Annotated[bool, Meta(description="What each stage scored, and how long it took.")] = False

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


class StageScore(Struct, frozen=True):
    """What a stage gave a point; no rank where it did not find it by itself."""

    score: float
    rank: int | None


class Highlight(Struct, frozen=True):
    """A stretch of the text, in characters, that holds terms of the query."""

    start: int
    end: int
    text: str
    weight: float


class SearchHit(Struct, frozen=True, omit_defaults=True):
    """A point that was found."""

    id: int | str
    score: float
    payload: dict[str, Any]
    highlights: list[Highlight] | None = None
    scores: dict[str, StageScore] | None = None


class Stage(Struct, frozen=True):
    """Something that was done, its time, and how many points came out of it."""

    name: str
    milliseconds: float
    candidates: int


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
