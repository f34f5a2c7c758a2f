"""Requests to a store: queries for the best points by one vector, filters, and options of creating
or filling a collection.

A filter's JSON is Qdrant's own: a server gets it unchanged, and `embedded_conversions` converts it
for the embedded engine. Each refuses some filters that the other accepts, so this module checks the
rules of both. It does not import qdrant-client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta, Struct, field

from hybridtei.config import MultivectorDtype
from hybridtei.errors import InvalidInput
from hybridtei.system.shape import Mistake, explain, under

# Points that one query may ask for
MAX_LIMIT = 100_000
MAX_FILTER_BYTES, MAX_DEPTH = 100_000, 16
# The store compares each value with each point: 1,600 values took 5 s for 5,420 points
MAX_CONDITIONS, MAX_VALUES = (100, 1_000)
# Characters of a caller's values in an error
MAX_EXAMPLE = 100
GROUPS = ("must", "should", "must_not", "min_should")
CLAUSES, WORDS = frozenset({*GROUPS[:3], "conditions"}), frozenset({"text", "text_any", "phrase"})
# Thai, Lao, Myanmar, Khmer, Japanese, Chinese: a clause is one word to a store.
WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
OF_A_KEY = (
    "match",
    "range",
    "geo_bounding_box",
    "geo_radius",
    "geo_polygon",
    "values_count",
    "is_empty",
    "is_null",
)
ALONE = ("has_id", "has_vector", "nested", "is_empty", "is_null")
_PART = r'(?:[\w-]+|"[^"]*")(?:\[\d*\])*'
KEY, TIME = rf"^{_PART}(?:\.{_PART})*$", r"^\d{4}-\d\d-\d\d"
ID = r"^[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}$"
IN_WORDS = {
    KEY: (
        "should be names of letters, digits, _ and -, others in double quotes, with dots between "
        "them, [] or [0] behind lists"
    ),
    TIME: "should be a number, or a time such as 2024-12-31T23:59:59Z",
    ID: "should be an integer or a UUID",
}
Key = Annotated[str, Meta(pattern=KEY)]
Bound = Annotated[str, Meta(pattern=TIME)] | float | None
Count = Annotated[int, Meta(ge=0)] | None
Identity = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=ID)]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Values = list[Integer | str] | None


class _Part(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the parts of a filter's JSON."""


class Match(_Part, frozen=True):
    """Exactly one condition: equal to a value, words in a text, any value of a list, no value of a
    list."""

    value: bool | Integer | str | None = None
    text: str | None = None
    text_any: str | None = None
    phrase: str | None = None
    prefix: str | None = None
    substring: str | None = None
    any: Values = None
    except_: Values = field(default=None, name="except")

    def __post_init__(self) -> None:
        values = [
            getattr(self, name)
            for name in self.__struct_fields__
            if getattr(self, name) is not None
        ]
        if len(values) != 1:
            raise ValueError(f"should have one of {', '.join(self.__struct_encode_fields__)}")
        if WITHOUT_BLANKS.search(self.text or self.text_any or self.phrase or ""):
            raise ValueError(
                "finds whole words, and this script has no blanks between them: write `substring`"
            )
        if isinstance(values[0], list) and len({type(value) for value in values[0]}) > 1:
            raise ValueError("the values of a list should all be integers, or all be texts")


class Range(_Part, frozen=True):
    """A range of numbers, or of times as texts."""

    gt: Bound = None
    gte: Bound = None
    lt: Bound = None
    lte: Bound = None

    def __post_init__(self) -> None:
        bounds = [one for one in (self.gt, self.gte, self.lt, self.lte) if one is not None]
        for text in (one for one in bounds if isinstance(one, str)):
            datetime.fromisoformat(text)
        if len({type(one) for one in bounds}) > 1:
            raise ValueError("should have numbers as bounds, or times")


class ValuesCount(_Part, frozen=True):
    """A range of the number of a key's values."""

    gt: Count = None
    gte: Count = None
    lt: Count = None
    lte: Count = None


class GeoPoint(_Part, frozen=True):
    """A place in degrees."""

    lon: Annotated[float, Meta(ge=-180, le=180)]
    lat: Annotated[float, Meta(ge=-90, le=90)]


class GeoBox(_Part, frozen=True):
    """A rectangle."""

    top_left: GeoPoint
    bottom_right: GeoPoint


class GeoCircle(_Part, frozen=True):
    """A circle with its radius in metres."""

    center: GeoPoint
    radius: Annotated[float, Meta(ge=0)]


class GeoLine(_Part, frozen=True):
    """A ring."""

    points: list[GeoPoint]

    def __post_init__(self) -> None:
        if len(self.points) < 4 or self.points[0] != self.points[-1]:
            raise ValueError("`points` should be four or more, the last equal to the first")


class GeoPolygon(_Part, frozen=True):
    """A ring without inner rings."""

    exterior: GeoLine
    interiors: list[GeoLine] = []


class PayloadKey(_Part, frozen=True):
    """The key of a condition without other fields."""

    key: Key


class MinShould(_Part, frozen=True):
    """At least `min_count` of the conditions."""

    conditions: list[Filter]
    min_count: Annotated[int, Meta(ge=1)]


class Nested(_Part, frozen=True):
    """A filter of the objects in a list."""

    key: Key
    filter: Filter


class Filter(_Part, frozen=True):
    """A group of conditions, or one condition on a key or on the point. A single condition may
    replace a list of one."""

    must: Filter | list[Filter] | None = None
    should: Filter | list[Filter] | None = None
    must_not: Filter | list[Filter] | None = None
    min_should: MinShould | None = None
    key: Key | None = None
    match: Match | None = None
    range: Range | None = None
    geo_bounding_box: GeoBox | None = None
    geo_radius: GeoCircle | None = None
    geo_polygon: GeoPolygon | None = None
    values_count: ValuesCount | None = None
    is_empty: PayloadKey | bool | None = None
    is_null: PayloadKey | bool | None = None
    has_id: list[Identity] | None = None
    has_vector: str | None = None
    nested: Nested | None = None

    def __post_init__(self) -> None:
        given = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        if self.key is not None:
            if len(given) != 2 or not given <= {"key", *OF_A_KEY}:
                raise ValueError(f"beside `key` should be one of {', '.join(OF_A_KEY)}")
        elif not self.is_group and (len(given) != 1 or not given <= set(ALONE)):
            raise ValueError(
                "a condition should have a `key`, or be one of " + ", ".join((*ALONE, *GROUPS))
            )
        for name in ("is_empty", "is_null"):
            if (value := getattr(self, name)) is not None and isinstance(value, bool) is (
                self.key is None
            ):
                raise ValueError(
                    f'`{name}` should be {{"key": NAME}}, or true or false beside a `key`'
                )

    @property
    def is_group(self) -> bool:
        """True if it has no condition of its own."""
        return all(
            getattr(self, name) is None for name in self.__struct_fields__ if name not in GROUPS
        )


class Query(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A query for the `limit` best points by one of their vectors.

    `vector`: float32[d], float32[n, d], or a map of `indices` and `values`. `oversampling`: with
    quantised vectors, this many times the points are scored by the full vectors. `with_payload`:
    keys.
    """

    using: str
    vector: Any
    limit: int
    filter: Filter | None = None
    exact: bool = False
    oversampling: float | None = None
    with_payload: Sequence[str] = ()


def of_ids(ids: Sequence[int | str]) -> Filter:
    """The filter for these points."""
    return Filter(must=[Filter(has_id=list(ids))])


def filter_from(value: Any, field: str = "filter") -> Filter | None:
    """Read a filter from an object, JSON, or qdrant-client's filter. None stays None. Raises
    InvalidInput, naming the place."""
    if value is None or isinstance(value, Filter | msgspec.UnsetType):
        return value or None
    if isinstance(value, str | bytes | msgspec.Raw):
        plain = _from_json(value, field)
    elif hasattr(value, "model_dump"):
        plain = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    else:
        plain = value
    if plain is None:
        return None
    if not isinstance(plain, dict):
        raise InvalidInput(
            f"`{field}` should be an object with `must`, `should` or `must_not`, "
            f"not {type(plain).__name__}{_example({})}"
        )
    _check_bytes(plain, field)
    _check_size(plain, field)
    try:
        parsed = msgspec.convert(plain, Filter)
    except msgspec.ValidationError as error:
        mistake = explain(error, plain, Filter)
        raise InvalidInput(_message(mistake, field) + _example(plain)) from None
    if not parsed.is_group:
        raise InvalidInput(
            f"`{field}` should be an object with {', '.join(GROUPS)}; put conditions into one of "
            f"these{_example({})}"
        )
    return parsed


def _from_json(text: str | bytes | msgspec.Raw, field: str) -> Any:
    """Decode JSON of at most `MAX_FILTER_BYTES`. Raises InvalidInput."""
    encoded = text.encode(errors="surrogatepass") if isinstance(text, str) else bytes(text)
    if len(encoded) > MAX_FILTER_BYTES:
        raise _too_large(field)
    try:
        return msgspec.json.decode(encoded)
    except RecursionError:
        raise _too_deep(field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"`{field}` is not JSON: {error}{_example({})}") from error


def _check_bytes(plain: Mapping[str, Any], field: str) -> None:
    """Raises InvalidInput for too many bytes of JSON, without a step of Python for each item."""
    try:
        size = len(orjson.dumps(plain))
    except TypeError as error:
        # orjson refuses more levels than it can write, and a number above 64 bits.
        if "ecursion" in str(error):
            raise _too_deep(field) from None
        raise InvalidInput(f"`{field}` cannot be read: {error}") from None
    if size > MAX_FILTER_BYTES:
        raise _too_large(field)


def _too_large(field: str) -> InvalidInput:
    return InvalidInput(f"`{field}` has more than {MAX_FILTER_BYTES} bytes")


def _too_deep(field: str) -> InvalidInput:
    return InvalidInput(f"`{field}` is nested deeper than {MAX_DEPTH} levels")


def _check_size(plain: Mapping[str, Any], field: str) -> None:
    """Raises InvalidInput for too many levels or conditions, or too many list values and words in
    total.

    All conditions count: groups and those inside them, in `nested` and in `min_should`.
    """
    conditions, values = 0, 0
    # Without recursion, since it may be deeper than Python allows.
    level: list[tuple[Any, int]] = [(plain, 1)]
    while level:
        part, depth = level.pop()
        # An object and its list count as one level
        if depth > 2 * MAX_DEPTH + 1:
            raise _too_deep(field)
        items = part.items() if isinstance(part, Mapping) else [("", item) for item in part]
        for name, item in items:
            if name in CLAUSES and item is not None:
                conditions += len(item) if isinstance(item, list) else 1
            elif isinstance(item, list):
                values += len(item)
            elif name in WORDS and isinstance(item, str):
                values += len(re.findall(r"\w+", item))
            if isinstance(item, Mapping | list):
                level.append((item, depth + 1))
        if conditions > MAX_CONDITIONS:
            raise InvalidInput(
                f"`{field}` holds more than {MAX_CONDITIONS} conditions, groups and those in them "
                "included"
            )
        if values > MAX_VALUES:
            raise InvalidInput(
                f"`{field}` holds more than {MAX_VALUES} values, those of all its lists and the "
                "words of its texts"
            )


_NAMES = tuple({name for part in _Part.__subclasses__() for name in part.__struct_encode_fields__})


def _example(plain: Mapping[str, Any]) -> str:
    """How a filter looks; for a caller who gave keys with their values, a filter of these."""
    pairs = {key: value for key, value in plain.items() if isinstance(value, str | int)}
    if not pairs or len(str(pairs)) > MAX_EXAMPLE or pairs.keys() & {*_NAMES}:
        pairs = {"lang": "en"}
    conditions = [{"key": key, "match": {"value": value}} for key, value in pairs.items()]
    return f"; a filter looks like {json.dumps({'must': conditions})}"


def _message(mistake: Mistake, field: str) -> str:
    """The message after the place, with a suggestion for an unknown name."""
    place, message = under(field, mistake.path), mistake.text
    if unknown := re.search(r"unknown field `(.*?)`, expected one of", message, re.DOTALL):
        near = get_close_matches(unknown[1], {*_NAMES} - {unknown[1]}, n=1, cutoff=0.7)
        return f"`{place}.{unknown[1]}`: there is no such field" + (
            f"; `{near[0]}` was probably meant" if near else ""
        )
    for pattern, words in IN_WORDS.items():
        if pattern in message or repr(pattern)[1:-1] in message:
            return f"`{place}`: {words}"
    return f"`{place}`: {mistake._replace(path='')}"


Quantization = Literal["scalar", "binary", "binary-2bit", "product", "turbo"]
Datatype = Literal["float32", "float16", "turbo8", "turbo4"]


Indexes = Annotated[
    tuple[str, ...],
    Meta(
        max_length=100,
        description="payload indexes for filters, such as year:integer, or tenant:keyword! with ! "
        "for tenants; also of an existing collection",
    ),
]


class CollectionPlan(Struct, frozen=True, kw_only=True):
    """Options of a new collection; None: the default, from `plan.settled`."""

    dense_dim: Annotated[
        int | None, Meta(description="dimensions to keep of dense vectors [default: all]")
    ] = None
    multivector_dim: Annotated[
        int | None,
        Meta(description="dimensions to keep of each vector of a multi-vector [default: all]"),
    ] = None
    # These two are settings of the model: 0 for all tokens
    multivector_tokens: int | None = None
    multivector_dtype: MultivectorDtype | None = None
    datatype: Annotated[
        Datatype | None,
        Meta(
            description=(
                "type of numbers in Qdrant's vectors; sparse vectors take float16 or float32 "
                "[default: float32]"
            )
        ),
    ] = None
    quantization: Annotated[
        Quantization | None,
        Meta(
            description=(
                "keep a compressed copy of dense vectors in memory, in addition to the originals"
            )
        ),
    ] = None
    on_disk: Annotated[
        bool, Meta(description="keep dense and sparse vectors on disk instead of in memory")
    ] = False
    on_disk_payload: Annotated[
        bool,
        Meta(
            description=(
                "keep texts on disk instead of in memory; default: the Qdrant server's setting"
            )
        ),
    ] = False
    shards: Annotated[
        int | None,
        Meta(description="of a collection on a Qdrant cluster [default: one for each node]"),
    ] = None
    replicas: Annotated[
        int | None, Meta(description="copies of each shard [default: 2 on a cluster]")
    ] = None
    index: Indexes = ()


INDEX = re.compile(rf"{KEY[:-1]}:((keyword|uuid)!?|integer|float|bool|datetime|geo|text)", re.ASCII)


def indexes_of(texts: Sequence[str]) -> dict[str, str]:
    """{key: kind} of payload indexes. Raises InvalidInput."""
    for text in texts:
        if not isinstance(text, str) or INDEX.fullmatch(text) is None:
            raise InvalidInput(
                f"`index` {text!r:.100} should look like lang:keyword, of the kinds keyword, uuid, "
                "integer, float, bool, datetime, geo and text, and keyword! or uuid! for tenants"
            )
    return dict(text.rsplit(":", 1) for text in texts)


class Imported(Struct, frozen=True):
    """The result of an import. `points`: in the stream. `written`: those with new ids."""

    collection: str
    created: bool
    points: int
    written: int
