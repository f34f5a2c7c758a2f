"""What handlers refuse though the types of the wire structs admit it, for the OpenAPI document: empty texts, mixed lists.

These bounds are no types of the structs, because msgspec would refuse in words of its own, and TEI's clients know TEI's. What
JSON Schema cannot say is not here: that an id is in a vocabulary, that two lists are as long as each other.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _list_of(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, **bounds}


def _any_of(*kinds: Schema) -> Schema:
    return {"anyOf": [*kinds]}


NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}  # may be empty: part of a pair
TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS = _list_of(TEXT)
ONE_OR_MORE = _any_of(TEXT, TEXTS)
ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
IDS = _list_of(ID)
ONE = _list_of(TEXT, maxItems=1)
PAIR: Schema = {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2, "contains": TEXT}
SIDE = _any_of(STRING, _list_of(STRING), NULL)
FULL_SIDE = _any_of(TEXT, TEXTS)
INPUT_TYPE = _any_of(TEXT, IDS)
INPUT = _any_of(TEXT, IDS, _list_of(INPUT_TYPE))
DOCUMENT = _any_of(STRING, {"type": "object", "properties": {"text": STRING}, "required": ["text"]})
DIMENSIONS = _any_of({"type": "integer", "minimum": 1}, NULL)

# (field, structs that have it) -> what it may hold.
FIELDS: dict[tuple[str, ...], Schema] = {
    ("inputs", "EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest", "EmbedHybridRequest", "EmbedMultivectorRequest"): INPUT,
    ("input", "OpenAICompatRequest"): INPUT,
    ("inputs", "TokenizeRequest"): ONE_OR_MORE,
    ("inputs", "PredictRequest"): _any_of(TEXT, ONE, PAIR, _list_of(_any_of(ONE, PAIR))),
    ("inputs", "PredictTokensRequest"): _any_of(TEXT, _list_of(_any_of(TEXT, TEXTS))),
    ("input", "OllamaEmbedRequest", "ClassifyRequest", "VllmClassifyRequest"): ONE_OR_MORE,
    ("ids", "DecodeRequest"): _any_of(IDS, _list_of(IDS)),
    ("tokens", "DetokenizeRequest"): IDS,
    ("source_sentence", "SimilarityInput"): TEXT,
    ("sentences", "SimilarityInput"): TEXTS,
    ("texts", "RerankRequest"): _list_of(STRING),
    ("documents", "DocumentsRequest"): _list_of(DOCUMENT),
    ("text", "CohereText"): TEXT,
    ("type", "CohereText"): {"const": "text"},
    ("content", "CohereInput"): _list_of({"$ref": "#/components/schemas/CohereText"}),
    ("texts", "CohereEmbedRequest"): _any_of(TEXTS, NULL),
    ("inputs", "CohereEmbedRequest"): _any_of(_list_of({"$ref": "#/components/schemas/CohereInput"}), NULL),
    **{(field, "ScoreRequest"): SIDE for field in ("text_1", "text_2", "queries", "documents")},
    ("data", "InferenceInput"): TEXT,
    ("data_type", "InferenceInput"): {"type": "string", "enum": ["text"]},
    ("query", "SearchRequest"): _any_of(TEXT, NULL),
    ("queries", "SearchRequest"): _any_of(TEXTS, NULL),
    ("dimensions", "EmbedRequest", "EmbedHybridRequest", "EmbedMultivectorRequest", "OllamaEmbedRequest"): DIMENSIONS,
    ("output_dimension", "CohereEmbedRequest", "OpenAICompatRequest"): DIMENSIONS,
    ("late_chunking", "OpenAICompatRequest"): {"enum": [False, None]},
}
ALSO_REQUIRED = {"CohereText": ["text"]}


def _given(*names: str, **kinds: Schema) -> Schema:
    """These fields are there and not null, and of these kinds."""
    return {"required": [*names], "properties": {**{name: {"not": NULL} for name in names}, **kinds}}


def _pairs(first: str, second: str, first_full: Schema, second_full: Schema) -> list[Schema]:
    """Both fields are there, and a text on one side at least is not empty."""
    return [_given(first, second, **{first: first_full}), _given(first, second, **{second: second_full})]


FULL_DOCUMENT = _any_of(TEXT, {"type": "object", "properties": {"text": TEXT}, "required": ["text"]})
# Of each struct: forms of which a request has one at least.
ALTERNATIVES = {
    "CohereEmbedRequest": [_given("texts"), _given("inputs")],
    "RerankRequest": _pairs("query", "texts", TEXT, TEXTS),
    "DocumentsRequest": _pairs("query", "documents", TEXT, _list_of(FULL_DOCUMENT)),
    "ScoreRequest": [
        {**form, "not": _any_of(*(_given(name) for name in others))}
        for first, second, others in (
            ("text_1", "text_2", ("queries", "documents")),
            ("text_1", "documents", ("queries", "text_2")),
            ("queries", "text_2", ("documents", "text_1")),
            ("queries", "documents", ("text_1", "text_2")),
        )
        for form in _pairs(first, second, FULL_SIDE, FULL_SIDE)
    ],
    "SearchRequest": [
        {**_given("query"), "not": _given("queries")},
        {**_given("queries"), "not": _given("query")},
    ],
}


def narrow(components: dict[str, Any]) -> None:
    """Put the bounds into the structs' schemas; fields keep their descriptions and defaults."""
    for (field, *structs), bound in FIELDS.items():
        for name in structs:
            if name in components:
                fields = components[name]["properties"]
                fields[field] = {
                    **{key: fields[field][key] for key in ("description", "default") if key in fields[field]},
                    **bound,
                }
    for name, required in ALSO_REQUIRED.items():
        if name in components:
            components[name]["required"] = [*components[name].get("required", ()), *required]
    for name, alternatives in ALTERNATIVES.items():
        if name in components:
            components[name]["anyOf"] = alternatives
