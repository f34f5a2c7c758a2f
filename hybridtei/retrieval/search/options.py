"""Options and results of a search: the same fields for `/search`, the command and the library.

Imports only msgspec, settings and errors, since the server's request structs and the command's
flags are made of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypedDict, get_type_hints

from msgspec import Meta, Struct, structs, to_builtins

from hybridtei.errors import InvalidInput
from hybridtei.keywords import check_names, check_value
from hybridtei.options import BudgetMs, Instruction, MaxChunks, RankOptions
from hybridtei.retrieval.store.query import MAX_LIMIT, Filter, filter_from

Mode = Literal["dense", "sparse", "multivector", "zscore", "rrf", "weighted"]
MAX_RERANKED = 1_000
# Keys of `with_payload`, and characters of one: each is looked up in each hit, and sent to the
# store for each hundred hits.
MAX_KEYS, MAX_KEY_CHARACTERS = 100, 1_000
# Entries of `legs` and of `weights`, for the errors of more than there are kinds of vectors.
MAX_LEGS = 10
Keys = Annotated[
    list[Annotated[str, Meta(max_length=MAX_KEY_CHARACTERS)]], Meta(max_length=MAX_KEYS)
]
# Qdrant's filters would read other keys differently from `candidates.group_of`
PLAIN_KEY = r"^[\w-]+(\.[\w-]+)*$(?!\n)"
Name = Annotated[str, Meta(max_length=MAX_KEY_CHARACTERS)]
Count = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]
Length = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


MAX_NEIGHBOURS = 10
Beside = Annotated[int, Meta(ge=0, le=MAX_NEIGHBOURS)]


class Neighbours(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chunks of a hit's passage: those before and after its own, or as many as `tokens` has
    room for."""

    before: Beside = 0
    after: Beside = 0
    tokens: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.tokens and self.before + self.after:
            raise ValueError("`tokens` takes the place of `before` and `after`")

    def around(self, number: int) -> range:
        """The numbers of the chunks that a passage around a chunk may have."""
        reach = MAX_NEIGHBOURS * bool(self.tokens)
        return range(number - (self.before or reach), number + (self.after or reach) + 1)


# A ranking without options of its own
CUT = RankOptions(truncate=True)
# Fields that mean nothing without a reranker
RANKER_FIELDS = ("budget_ms", "instruction", "max_chunks_per_doc", "rerank_threshold")


class SearchFields(Struct, frozen=True, kw_only=True):
    """The fields that `/search`, the command and the library share. Types and bounds are the HTTP
    API's."""

    mode: Annotated[
        Mode | None,
        Meta(
            description=(
                "How points are found and scored [default: zscore of all kinds of vectors; rrf "
                "with `rrf_k`]."
            )
        ),
    ] = None
    limit: Annotated[Length, Meta(description="Number of hits.")] = 10
    offset: Annotated[Count, Meta(description="Number of hits to skip.")] = 0
    prefetch_limit: Annotated[Length, Meta(description="Candidates of each kind of vector.")] = 100
    rrf_k: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="Constant of rrf, counted as in Qdrant: 61 is the usual 60 [default: 2]."),
    ] = None
    weights: Annotated[
        Annotated[dict[str, float], Meta(max_length=MAX_LEGS)]
        | Annotated[list[float], Meta(max_length=MAX_LEGS)]
        | Annotated[str, Meta(max_length=100)]
        | None,
        Meta(
            description=(
                "Weights of zscore, rrf or weighted: by name, in order, or a preset: m3, m3-long, "
                "m3-two."
            )
        ),
    ] = None
    legs: Annotated[
        Annotated[list[str], Meta(max_length=MAX_LEGS)] | None,
        Meta(description="Kinds of vectors to fuse [default: dense and sparse; zscore: all]."),
    ] = None
    rescore: Annotated[
        bool,
        Meta(description="Rank the candidates again by MaxSim of their multi-vectors."),
    ] = False
    group_by: Annotated[
        Annotated[str, Meta(max_length=200, pattern=PLAIN_KEY)] | None,
        Meta(
            description=(
                "One hit for each value of this payload field; `more` counts its other matches; "
                "null: every chunk."
            )
        ),
    ] = "document"
    query_encoder: Annotated[
        Literal["model", "table"],
        Meta(
            description="`table` looks the query's sparse vector up by token, without the "
            "model; in mode sparse no forward pass is needed."
        ),
    ] = "model"
    rerank_limit: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_RERANKED)],
        Meta(description="Number of the best hits to rerank."),
    ] = 50
    budget_ms: BudgetMs = None
    instruction: Instruction = None
    max_chunks_per_doc: MaxChunks = None
    score_threshold: Annotated[
        float | None, Meta(description="Skip points with a lower score in the store.")
    ] = None
    rerank_threshold: Annotated[
        float | None, Meta(description="Drop hits with a lower score of the reranker.")
    ] = None
    min_probability: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Drop hits with a lower probability of relevance; `hybridtei eval "
            "--calibrate` fits it to the collection."
        ),
    ] = None
    exact: Annotated[bool, Meta(description="Search without the approximate index.")] = False
    with_payload: Annotated[
        bool | Keys, Meta(description="Return payloads, or only these keys.")
    ] = True
    highlights: Annotated[
        bool, Meta(description="Return the places of the query's terms in the text.")
    ] = False
    neighbours: Annotated[
        Neighbours | None,
        Meta(description="Return each hit's passage: its chunk with those beside it."),
    ] = None
    explain: Annotated[bool, Meta(description="Return the score and the time of each stage.")] = (
        False
    )
    text_field: Annotated[
        Name,
        Meta(
            description="Key of the payload that has the text; a dot leads into an object, or into "
            "JSON."
        ),
    ] = "text"
    unlabelled: Annotated[
        bool,
        Meta(
            description="Search also a collection that does not say which model made its vectors, "
            "such as a collection of other software."
        ),
    ] = False
    dense_name: Annotated[
        Name | None,
        Meta(
            description="The collection's name of its dense vector; empty: the vector without a "
            "name [default: dense; with `unlabelled` the only one that there is]."
        ),
    ] = None
    sparse_name: Annotated[
        Name | None,
        Meta(
            description="The collection's name of its sparse vector [default: sparse; with "
            "`unlabelled` the only one that there is]."
        ),
    ] = None

    def __post_init__(self) -> None:
        if not isinstance(self.with_payload, bool):
            structs.force_setattr(self, "with_payload", list(dict.fromkeys(self.with_payload)))

    @property
    def ranking(self) -> RankOptions:
        """The options of the reranker. A budget of time begins now."""
        return RankOptions(
            truncate=True,
            instruction=self.instruction,
            max_chunks_per_doc=self.max_chunks_per_doc,
            budget_ms=self.budget_ms,
        ).begun()

    def check_unranked(self) -> None:
        """Raises InvalidInput for a field that needs a reranker, in a search without one."""
        for name in RANKER_FIELDS:
            if getattr(self, name) is not None:
                raise InvalidInput(
                    f"`{name}` is for a reranker, and this search has none: give `rerank` too "
                    "(`Index`: `reranker`)"
                )

    def check_reranked(self) -> None:
        """Raises InvalidInput for more points than a reranker may get."""
        last = self.offset + self.limit
        if last > MAX_RERANKED:
            raise InvalidInput(
                f"`offset` and `limit` reach to place {last}; with a reranker {MAX_RERANKED} is "
                "the last"
            )


class SearchKeywords(TypedDict, total=False):
    """The fields of `SearchFields` without `limit`, for type checkers."""

    mode: Mode | None
    offset: int
    prefetch_limit: int
    rrf_k: int | None
    weights: dict[str, float] | list[float] | str | None
    legs: list[str] | None
    rescore: bool
    group_by: str | None
    query_encoder: Literal["model", "table"]
    rerank_limit: int
    budget_ms: int | None
    instruction: str | None
    max_chunks_per_doc: int | None
    score_threshold: float | None
    rerank_threshold: float | None
    min_probability: float | None
    exact: bool
    with_payload: bool | list[str]
    highlights: bool
    neighbours: dict[str, int] | None
    explain: bool
    text_field: str
    unlabelled: bool
    dense_name: str | None
    sparse_name: str | None


class LocalKeywords(SearchKeywords, total=False):
    """The fields of `SearchOptions` without `limit` and `query_filter`, for type checkers."""

    oversampling: float | None


class CheckedOptions(SearchFields, frozen=True, kw_only=True):
    """Options of a search whose values were checked: at the wire, or by `SearchOptions`."""

    query_filter: Filter | None = None
    oversampling: Annotated[float, Meta(ge=1, le=100)] | None = None

    @classmethod
    def of(cls, fields: SearchFields, **others: Any) -> Self:
        """Make options of the fields of a request, and fields that only the library has."""
        return cls(
            **{name: getattr(fields, name) for name in SearchFields.__struct_fields__}, **others
        )

    def settled(self, mode: Mode, weights: Any, group_by: str | None) -> CheckedOptions:
        """The options with a mode, its weights and a group."""
        changes = {"mode": mode, "weights": weights, "group_by": group_by}
        return CheckedOptions(**{**structs.asdict(self), **changes})


class SearchOptions(CheckedOptions, frozen=True, kw_only=True):
    """Options of a search, for the library.

    `mode`: default: zscore if the collection has several kinds of vectors, rrf if `rrf_k` is given,
    else the only kind. `legs`: the kinds of vectors in zscore, rrf or weighted, in this order.
    Default: those of dense and sparse that the query has, and also multivector in zscore, or if
    `weighted` has a weight for it. Each leg finds `prefetch_limit` candidates, or more if the page
    needs them; in zscore a multivector only scores the others' candidates. `weights`: of the legs,
    by name, in order, or a preset's name (`tasks.rerank.PRESETS`); 0 removes a leg. `rrf_k`:
    Qdrant's RRF constant. `oversampling`: with quantised vectors, this many times the candidates
    are scored by the full vectors. `score_threshold`: of the score before a reranker; in zscore 0
    is the candidates' mean. `group_by`: a dotted key of the payload, or "document"; points without
    a text or a whole number there are their own groups, and so are all points of an `Index` and of
    a collection without a label.
    """

    @classmethod
    def given(cls, call: str, values: Mapping[str, Any], **others: Any) -> Self:
        """Make options of the keywords of a Python caller's `call`. Raises TypeError for an unknown
        one, InvalidInput for a wrong value."""
        check_names(call, values, LocalKeywords.__annotations__)
        return cls(**values, **others)

    def __post_init__(self) -> None:
        """Raises InvalidInput for a value of the wrong type, which `/search` checks when decoding,
        but Python does not; and for one out of bounds."""
        super().__post_init__()
        structs.force_setattr(self, "query_filter", filter_from(self.query_filter, "query_filter"))
        for name, hint in TYPED.items():
            structs.force_setattr(self, name, check_value(name, getattr(self, name), hint))


# The type and bounds of each field, except those that have their own checks
TYPED = get_type_hints(SearchOptions, include_extras=True)
del TYPED["weights"], TYPED["query_filter"]


class StageScore(Struct, frozen=True):
    """A stage's score of a point. `rank`: its place from 1; None if the stage did not find the
    point."""

    score: float
    rank: int | None


class Highlight(Struct, frozen=True):
    """A stretch of the text, in characters, with terms of the query, and their weight."""

    start: int
    end: int
    text: str
    weight: float


class StoredPoint(Struct, frozen=True):
    """A stored point: a text, or a chunk of a document, with its payload."""

    id: int | str
    payload: dict[str, Any]


# A text of digits, or one in quotes, stands in quotes
QUOTED = re.compile(r'"(\d+|".*")"', re.DOTALL | re.ASCII)


def identity_of(text: str) -> int | str:
    """The id that a path or a command names: 1 is a number, and "1", in quotes, a text."""
    if text.isascii() and text.isdigit():
        return int(text)
    return text[1:-1] if QUOTED.fullmatch(text) else text


def written(identity: int | str) -> str:
    """The id as `identity_of` reads it."""
    if isinstance(identity, str) and identity_of(identity) != identity:
        return f'"{identity}"'
    return str(identity)


class SearchHit(Struct, frozen=True, omit_defaults=True):
    """A matching point. `score`: of the last stage. `scores`: of each stage, if `explain` is set.
    `more`: with groups, the number of the group's other points among the candidates.
    `probability`: of relevance, if the collection has a curve of this way of searching. `passage`:
    with `neighbours`, the text around the hit; "" if it is in a better hit's."""

    id: int | str
    score: float
    payload: dict[str, Any]
    highlights: list[Highlight] | None = None
    scores: dict[str, StageScore] | None = None
    more: int | None = None
    probability: float | None = None
    passage: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The hit as JSON types, without optional fields that are None."""
        return dict(to_builtins(self))


class Stage(Struct, frozen=True):
    """A step of a search, its time, and its number of points."""

    name: str
    milliseconds: float
    candidates: int


class Budget(Struct, frozen=True):
    """How many of the candidates a reranker has scored within `budget_ms`, and whether the time
    ended before the last one."""

    scored: int
    of: int
    cut: bool

    @classmethod
    def spent(cls, documents: int, unscored: int) -> Budget:
        return cls(documents - unscored, documents, unscored > 0)


class SearchResult(Struct, frozen=True, omit_defaults=True):
    """The hits, the best first. `stages`: the steps in order; steps of an explanation only if
    `explain` is set. `answerable`: with `min_probability` or `rerank_threshold`, false if they drop
    every hit, or none was found. `way`: the way of searching to which a curve belongs, if the
    collection has curves or `explain` is set. `note`: why a filter found nothing, if no point has
    its key."""

    mode: Mode
    hits: list[SearchHit]
    stages: list[Stage]
    budget: Budget | None = None
    answerable: bool | None = None
    way: str | None = None
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON types, without optional fields that are None."""
        return dict(to_builtins(self))
