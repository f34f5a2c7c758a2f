"""Valid bodies of every route, drawn: what mutations begin with. Texts are words of the tiny
models, and everybody else's."""

from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

from msgspec import Struct, inspect
from msgspec.inspect import type_info

# The import adds every route to `ROUTES`
import hybridtei.server.app  # noqa: F401
from hybridtei.server.routing import ROUTES

WORDS = (
    "baka",
    "bulo",
    "dati",
    "bemo",
    "hybrid",
    "search",
    "Zürich",
    "東京",
    "🙂",
    "naïve",
    "e\u0301",
    "ﷺ",
    "\u200b",
    "x" * 40,
)
LENGTHS = (1, 1, 2, 3, 3, 5, 8, 13, 40, 200)
SIDES = ("Left", "left", "Right", "right")
PRECISIONS = ("float", "int8", "uint8", "binary", "ubinary")
OUTPUTS = ("dense", "sparse", "multivector")
LONG_INPUTS = ("cut", "mean", None)
COLLECTIONS = ("docs", "docs", "nobody", "", "../docs", "a" * 300)
FILTERS: tuple[Any, ...] = (
    {"must": [{"key": "n", "match": {"value": 1}}]},
    {"should": [{"key": "metadata.m", "match": {"any": ["x"]}}], "must_not": [{"has_id": [1, 2]}]},
    {"must": [{"key": "n", "range": {"gte": 0, "lt": 5.5}}, {"is_empty": {"key": "z"}}]},
    {"must": {"nested": {"key": "n", "filter": {"must": []}}}},
)
BOOL = (True, False)
Maker = Callable[[Random], Any]


class Draw(Random):
    """`longest`: words in a text, for models that take their time."""

    longest = LENGTHS[-1]


def made(draw: Random, form: Any) -> Any:
    """Draw a value: a member of a tuple, a function's result, an object of drawn fields; any other
    form is the value."""
    if callable(form):
        return form(draw)
    if isinstance(form, tuple):
        return made(draw, draw.choice(form))
    return {name: made(draw, one) for name, one in form.items()} if isinstance(form, dict) else form


def some(**options: Any) -> Maker:
    """A few of the optional fields."""
    return lambda draw: {
        name: made(draw, form) for name, form in options.items() if draw.random() < 0.25
    }


def body(required: Any, **options: Any) -> Maker:
    """An object with these fields, and a few of the options."""
    return lambda draw: {**made(draw, required), **some(**options)(draw)}


def listed(form: Any, most: int = 6) -> Maker:
    """A list of up to `most`."""
    return lambda draw: [made(draw, form) for _ in range(draw.randint(1, most))]


def sample(of: tuple[str, ...], most: int) -> Maker:
    """Some of a tuple, each once."""
    return lambda draw: draw.sample(of, draw.randint(1, most))


def text(draw: Random) -> str:
    """One to two hundred words."""
    return " ".join(
        draw.choices(WORDS, k=min(draw.choice(LENGTHS), getattr(draw, "longest", LENGTHS[-1])))
    )


def ids(draw: Random) -> list[int]:
    return [draw.randrange(5, 60) for _ in range(draw.choice(LENGTHS))]


def spans(draw: Random) -> Any:
    """A text with spans; most spans contain a token."""
    given = text(draw)
    length = len(given)
    begins = [draw.choice((0, 0, draw.randrange(length))) for _ in range(draw.choice((1, 1, 3)))]
    return {
        "text": given,
        "spans": [
            [begin, draw.choice((length, length, draw.randint(begin, length + 1)))]
            for begin in begins
        ],
    }


TEXTS, RANKED = listed(text), listed(text, 12)
INPUTS = (text, ids, *[listed((text, text, text, text, ids))] * 3)
SPANNED = (INPUTS, INPUTS, INPUTS, listed(spans, 3), spans)
TRUNCATED = {"truncate": BOOL, "truncation_direction": SIDES}
READING = {**TRUNCATED, "truncate": (True, False, None), "prompt_name": (None, "query", "nobody")}
MODES = {"outputs": sample(OUTPUTS, 3), "sparse_format": ("tei", "qdrant", "tokens", "ids")}
DOCUMENTS = (RANKED, listed({"text": text, "title": "t", "n": 1}))
MESSAGES = body(
    {"jsonrpc": "2.0", "method": ("tools/list", "tools/call", "initialize", "ping", "no")},
    id=(1, "x", None),
    params=some(name=("find", "read", "store", "collections"), arguments={"query": "x"}),
)


EMBED = body({"inputs": INPUTS}, **READING, normalize=BOOL, dimensions=(1, 8, 32, None))
PLAIN = body({"inputs": INPUTS}, **READING)
SIMILARITY = body(
    {"inputs": {"source_sentence": text, "sentences": TEXTS}}, parameters=some(**READING)
)
OPENAI = body(
    {"input": (INPUTS, listed({"text": text}, 2))},
    **MODES,
    encoding_format=("float", "base64", None),
    dimensions=(1, 8, 32),
    truncate_prompt_tokens=(-1, 0, 1, 5, None),
    user=("somebody",),
    input_type=("query", "document", "passage"),
    output_dtype=PRECISIONS,
    task="retrieval.query",
    embedding_type=("float", "base64", "binary", ["ubinary"]),
    encoding_type=("float", "base64", "binary"),
    normalized=BOOL,
    normalize=BOOL,
    return_multivector=BOOL,
    return_sparse=BOOL,
    embed_dtype=("float32", "float16"),
    endianness=("native", "big"),
    modality=("text", ["text"], "image", 5),
    output_dimension=(1, 8, 32),
    late_chunking=BOOL,
    long_inputs=LONG_INPUTS,
    truncation=BOOL,
    truncate=(True, "NONE", "START", "END"),
    truncation_side=SIDES,
)
CONTEXTUALIZED = body(
    {"inputs": (listed(TEXTS, 3), TEXTS), "model": "any"},
    input_type=("query", "document", None),
    output_dimension=(1, 8, 32),
    output_dtype=PRECISIONS,
    encoding_format=("float", "base64", None),
    enable_auto_chunking=(True, False, False, False),
    chunk_size=(1, 8, 32_000),
)
COHERE = body(
    (
        {"texts": TEXTS},
        {"inputs": listed(lambda draw: {"content": [{"type": "text", "text": text(draw)}]}, 3)},
    ),
    input_type=("search_query", "search_document"),
    embedding_types=sample((*PRECISIONS, "base64"), 5),
    output_dimension=(1, 8, 32),
    max_tokens=(-1, 0, 1, 5, None),
    truncate=("NONE", "START", "END"),
    images=([], ["data:"]),
)
RERANK = body(
    {"query": text, "texts": RANKED},
    **TRUNCATED,
    raw_scores=BOOL,
    return_text=BOOL,
    instruction=text,
    weights=("m3", "m3-long", {"dense": 0.5, "sparse": (-0.5, 0.3, 2.0)}),
)
RANK_DOCUMENTS = body(
    {"query": text, "documents": DOCUMENTS},
    top_n=(0, 1, 100),
    top_k=2,
    return_documents=BOOL,
    rank_fields=(["text"], ["title", "n"], []),
    max_tokens_per_doc=(0, 1, 5, 4096),
    max_chunks_per_doc=(0, 1, 3, 10),
    budget_ms=(1, 50, 0, 600_000),
    truncate_prompt_tokens=(-1, 0, 1, 5, None),
    truncation_side=SIDES,
    raw_scores=True,
    use_activation=BOOL,
    activation=BOOL,
    return_embeddings=BOOL,
    truncation=BOOL,
    property="x",
)
SCORE = body(
    ({"text_1": text, "text_2": (text, TEXTS)}, {"queries": text, "documents": (text, TEXTS)}),
    truncation_side=SIDES,
    use_activation=BOOL,
    activation=BOOL,
)
PREDICT = body(
    {
        "inputs": (
            text,
            listed(text, 1),
            lambda draw: [text(draw), text(draw)],
            listed(listed(text, 2), 5),
        )
    },
    **TRUNCATED,
    raw_scores=BOOL,
    parameters=({"top_k": 2}, {"function_to_apply": ("sigmoid", "softmax", "none")}, {}),
)
CLASSIFY = body(
    {"input": (text, TEXTS)}, raw_scores=True, use_activation=False, activation=BOOL, softmax=BOOL
)
ENTITIES = body(
    {"inputs": (text, TEXTS)},
    parameters={"aggregation_strategy": ("none", "simple", "max"), "ignore_labels": ["O"]},
)
SEARCH = body(
    {"collection": COLLECTIONS, "query": text},
    mode=(*OUTPUTS, "zscore", "rrf", "weighted"),
    limit=(0, 1, 10, 1000),
    offset=(0, 3, 1000),
    prefetch_limit=(0, 1, 100),
    k=(1, 2, 61),
    weights=("m3", {"dense": 1.0, "sparse": 0.5}, [1.0, 2.0]),
    legs=sample(OUTPUTS, 3),
    rescore=(True, False),
    query_encoder=("model", "table"),
    group_by=("document", "metadata.m", "n", ""),
    rerank=(True, False, "reranker"),
    budget_ms=(1, 50, 0, 600_000),
    filter=FILTERS,
    score_threshold=(-0.5, 0.3, 0.9),
    rerank_threshold=(-0.5, 0.3, 2),
    min_probability=(0, 0.3, 1, 1.5),
    with_payload=(True, False, ["text"]),
    highlights=BOOL,
    relevant_spans=some(mode=("enabled", "disabled"), threshold=0.2, max_spans=3),
    explain=BOOL,
)
POINT = body({"text": text}, id=(*range(50), "a"), payload={"n": 1}, metadata={"m": "x"})
INFERENCE = body(
    {
        "data": text,
        "data_type": "text",
        "model": ("hybrid", "hybrid/dense", "hybrid/sparse", "hybrid/multivector", ""),
    },
    options=some(vector=OUTPUTS, dimensions=8, input_type="query", prompt_name="query"),
)
ANYTHING = (EMBED, PREDICT, RERANK, ENTITIES, SIMILARITY, RANK_DOCUMENTS)
FORMS: dict[str, Any] = {
    "/embed": EMBED,
    "/embed_all": PLAIN,
    "/embed_sparse": PLAIN,
    "/embed_hybrid": body(
        {"inputs": SPANNED},
        **READING,
        **MODES,
        normalize=BOOL,
        dimensions=(1, 8, 32),
        output_dtype=PRECISIONS,
        encoding_format=("float", "base64"),
        long_inputs=LONG_INPUTS,
    ),
    "/embed_multivector": body(
        {"inputs": SPANNED},
        **READING,
        dimensions=(1, 8, 24),
        output_dtype=PRECISIONS,
        encoding_format=("float", "base64"),
        long_inputs=LONG_INPUTS,
    ),
    "/similarity": SIMILARITY,
    "/v1/embeddings": OPENAI,
    "/embeddings": OPENAI,
    "/v1/contextualizedembeddings": CONTEXTUALIZED,
    "/v1/embed": COHERE,
    "/v2/embed": COHERE,
    "/api/embed": body(({"input": (text, TEXTS)}, {"prompt": text}), truncate=True, dimensions=8),
    "/api/embeddings": body(({"prompt": (text, "")}, {"input": text}), model="small"),
    "/api/show": some(model="small", name="small", verbose=True),
    "/api/pull": some(model="small", name=("small", ""), verbose=True),
    "/rerank": RERANK,
    "/v1/rerank": RANK_DOCUMENTS,
    "/v1/reranking": RANK_DOCUMENTS,
    "/reranking": RANK_DOCUMENTS,
    "/v2/rerank": RANK_DOCUMENTS,
    "/score": SCORE,
    "/v1/score": SCORE,
    "/predict": PREDICT,
    "/classify": CLASSIFY,
    "/v1/classify": CLASSIFY,
    "/predict_tokens": body(
        {"inputs": (text, TEXTS, listed(listed(text, 1)))},
        truncate=BOOL,
        raw_scores=BOOL,
        aggregation_strategy=("none", "simple", "first", "average", "max"),
        include_special_tokens=BOOL,
    ),
    "/tokenize": body({"inputs": (text, TEXTS)}, add_special_tokens=False, prompt_name="query"),
    "/decode": body({"ids": (ids, listed(ids, 2))}, skip_special_tokens=False),
    "/vertex": {"instances": listed((EMBED, PREDICT, RERANK, ENTITIES), 5)},
    "/invocations": ANYTHING,
    "/": ANYTHING,
    "/search": SEARCH,
    "/collections/docs/points": body({"points": listed(POINT, 4)}, create=True, truncate=True),
    "/collections/docs/points/delete": body(({"ids": [1, "a"]}, {"filter": FILTERS}), source="x"),
    "/collections/docs/points/payload": body(
        ({"ids": [1, "a"]}, {"filter": FILTERS}), set={"n": 2, "m": None, "text": "x"}
    ),
    "/mcp": MESSAGES,
    "/collections/docs/mcp": MESSAGES,
    "/collections/%2e%2e%2fx/points": body(
        {"points": listed(POINT, 4)}, create=True, truncate=True
    ),
    "/collections/docs/import": some(
        collection="docs",
        schema={},
        points=3,
        # The first line of an export, or nothing like it
    ),
    "/qdrant/inference": body(
        {"inputs": listed(INFERENCE, 4)}, inference=("update", "search"), token="fuzz-key"
    ),
    "/models/load": body(
        {"model_id": ("/nowhere", "no/where", "")},
        alias="a b",
        dtype="int3",
        role="cook",
        # No such model
    ),
    "/models/unload": {"model": ("nobody", "", "classifier ")},
}
# Share of the fields of a request's struct that no form names: what a new field needs to be fuzzed
FURTHER = 0.04


@cache
def kinds_of(path: str) -> tuple[type[Struct], ...]:
    """The structs of a route's request."""
    for route in ROUTES:
        if path in route.paths and not route.only_tei:
            requests = (
                route.request.values() if isinstance(route.request, dict) else [route.request]
            )
            return tuple(
                kind for kind in requests if isinstance(kind, type) and issubclass(kind, Struct)
            )
    return ()


@cache
def fields_of(kind: type[Struct]) -> dict[str, Any]:
    """The type of each field of a struct, by its name on the wire."""
    info: Any = type_info(kind)
    return {field.encode_name: field.type for field in info.fields}


def value_of(draw: Random, kind: Any) -> Any:
    """A value of a type, or at its bounds, or one beyond."""
    value: Any = draw.choice((None, "x", 1, {}))
    if isinstance(kind, inspect.UnionType):
        value = value_of(draw, draw.choice(kind.types))
    elif isinstance(kind, inspect.LiteralType):
        value = draw.choice(kind.values)
    elif isinstance(kind, inspect.BoolType):
        value = draw.choice(BOOL)
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        low = 0 if kind.ge is None else kind.ge
        value = draw.choice((low, low + 1, low - 1, 3, 64 if kind.le is None else kind.le + 1))
    elif isinstance(kind, inspect.StrType):
        value = draw.choice(WORDS)
    elif isinstance(kind, inspect.ListType):
        value = [value_of(draw, kind.item_type) for _ in range(draw.choice((0, 1, 3)))]
    elif isinstance(kind, inspect.DictType):
        value = {value_of(draw, kind.key_type): value_of(draw, kind.value_type)}
    elif isinstance(kind, inspect.StructType):
        value = {
            field.encode_name: value_of(draw, field.type)
            for field in kind.fields
            if field.required or draw.random() < 0.5
        }
    return value


def drawn(path: str, form: Any, draw: Random) -> Any:
    """A body of the form, and sometimes further fields of the route's struct."""
    base = made(draw, form)
    kinds = [kind for kind in kinds_of(path) if fields_of(kind).keys() >= {*base}]
    if not kinds or not isinstance(base, dict):
        return base
    for name, kind in fields_of(draw.choice(kinds)).items():
        if name not in base and draw.random() < FURTHER:
            base[name] = value_of(draw, kind)
    return base


POSTS: dict[str, Maker] = {path: partial(drawn, path, form) for path, form in FORMS.items()}
GETS = (
    "/",
    "/health",
    "/ping",
    "/info",
    "/metrics",
    "/models",
    "/v1/models",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/docs",
    "/docs/",
    "/docs/swagger-ui.css",
    "/api-doc/openapi.json",
    "/page",
    "/page/page.css",
    "/collections",
    "/collections/docs/export",
    "/collections/docs/points/a",
)
