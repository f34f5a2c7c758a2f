"""Valid bodies of every route, drawn: what mutations begin with. Texts are words of the tiny models, and everybody else's."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

WORDS = (
    *("baka", "bulo", "dati", "bemo", "hybrid", "search", "Zürich", "東京", "🙂", "naïve", "e\u0301", "ﷺ", "\u200b", "x" * 40),
)
LENGTHS = (1, 1, 2, 3, 3, 5, 8, 13, 40, 200)
SIDES = ("Left", "left", "Right", "right")
PRECISIONS = ("float", "int8", "uint8", "binary", "ubinary")
OUTPUTS = ("dense", "sparse", "multivector")
COLLECTIONS = ("docs", "docs", "nobody", "", "../docs", "a" * 300)
FILTERS: tuple[Any, ...] = (
    {"must": [{"key": "n", "match": {"value": 1}}]},
    {"should": [{"key": "metadata.m", "match": {"any": ["x"]}}], "must_not": [{"has_id": [1, 2]}]},
    {"must": [{"key": "n", "range": {"gte": 0, "lt": 5.5}}, {"is_empty": {"key": "z"}}]},
    {"must": {"nested": {"key": "n", "filter": {"must": []}}}},
)


class Draw(Random):
    """`longest`: words in a text, for models that take their time."""

    longest = LENGTHS[-1]


def text(draw: Random) -> str:
    """One to two hundred words."""
    return " ".join(draw.choices(WORDS, k=min(draw.choice(LENGTHS), getattr(draw, "longest", LENGTHS[-1]))))


def texts(draw: Random, most: int = 6) -> list[str]:
    return [text(draw) for _ in range(draw.randint(1, most))]


def ids(draw: Random) -> list[int]:
    return [draw.randrange(5, 60) for _ in range(draw.choice(LENGTHS))]


def inputs(draw: Random) -> Any:
    """A text, ids, or a list of either."""
    form = draw.randrange(5)
    if form == 0:
        return text(draw)
    if form == 1:
        return ids(draw)
    return [ids(draw) if draw.random() < 0.2 else text(draw) for _ in range(draw.randint(1, 6))]


def spanned(draw: Random) -> Any:
    """Inputs as they are, or texts with spans, most of which hold a token."""
    if draw.random() < 0.6:
        return inputs(draw)
    given = [{"text": one, "spans": [_span(draw, len(one)) for _ in range(draw.choice((1, 1, 3)))]} for one in texts(draw, 3)]
    return draw.choice((given, given[0]))


def _span(draw: Random, length: int) -> list[int]:
    begin = draw.choice((0, 0, draw.randrange(length)))
    return [begin, draw.choice((length, length, draw.randint(begin, length + 1)))]


def some(draw: Random, options: dict[str, Any]) -> dict[str, Any]:
    """A few of the optional fields."""
    return {name: value for name, value in options.items() if draw.random() < 0.25}


def _reading(draw: Random) -> dict[str, Any]:
    return {
        "truncate": draw.choice((True, False, None)),
        "truncation_direction": draw.choice(SIDES),
        "prompt_name": draw.choice((None, "query", "nobody")),
    }


def embed(draw: Random) -> Any:
    options = {**_reading(draw), "normalize": draw.random() < 0.5, "dimensions": draw.choice((1, 8, 32, None))}
    return {"inputs": inputs(draw), **some(draw, options)}


def embed_plainly(draw: Random) -> Any:
    return {"inputs": inputs(draw), **some(draw, _reading(draw))}


def embed_hybrid(draw: Random) -> Any:
    options = {
        **_reading(draw),
        "outputs": draw.sample(OUTPUTS, draw.randint(1, 3)),
        "normalize": draw.random() < 0.5,
        "dimensions": draw.choice((1, 8, 32)),
        "sparse_format": draw.choice(("tei", "qdrant", "tokens", "ids")),
        "output_dtype": draw.choice(PRECISIONS),
    }
    return {"inputs": spanned(draw), **some(draw, options)}


def embed_multivector(draw: Random) -> Any:
    options = {**_reading(draw), "dimensions": draw.choice((1, 8, 24)), "output_dtype": draw.choice(PRECISIONS)}
    return {"inputs": spanned(draw), **some(draw, options)}


def similarity(draw: Random) -> Any:
    given = {"inputs": {"source_sentence": text(draw), "sentences": texts(draw)}}
    return {**given, **some(draw, {"parameters": some(draw, _reading(draw))})}


def openai(draw: Random) -> Any:
    options = {
        "encoding_format": draw.choice(("float", "base64")),
        "dimensions": draw.choice((1, 8, 32)),
        "user": "somebody",
        "input_type": draw.choice(("query", "document")),
        "output_dtype": draw.choice(PRECISIONS),
        "task": "retrieval.query",
        "embedding_type": draw.choice(("float", "base64", "binary", ["ubinary"])),
        "normalized": draw.random() < 0.5,
        "late_chunking": draw.random() < 0.5,
        "truncation": draw.random() < 0.5,
        "outputs": draw.sample(OUTPUTS, draw.randint(1, 3)),
        "sparse_format": draw.choice(("tei", "qdrant", "tokens", "ids")),
    }
    wrapped = [{"text": text(draw)} for _ in range(2)]
    return {"input": draw.choice((inputs(draw), wrapped)), **some(draw, options)}


def contextualized(draw: Random) -> Any:
    options = {
        "input_type": draw.choice(("query", "document", None)),
        "output_dimension": draw.choice((1, 8, 32)),
        "output_dtype": draw.choice(PRECISIONS),
        "encoding_format": draw.choice(("float", "base64", None)),
        "enable_auto_chunking": draw.random() < 0.2,
    }
    return {"inputs": [texts(draw) for _ in range(draw.randint(1, 3))], "model": "any", **some(draw, options)}


def cohere(draw: Random) -> Any:
    options = {
        "input_type": draw.choice(("search_query", "search_document")),
        "embedding_types": draw.sample((*PRECISIONS, "base64"), draw.randint(1, 5)),
        "output_dimension": draw.choice((1, 8, 32)),
        "truncate": draw.choice(("NONE", "START", "END")),
    }
    parts = [{"content": [{"type": "text", "text": text(draw)}]} for _ in range(draw.randint(1, 3))]
    return {**draw.choice(({"texts": texts(draw)}, {"inputs": parts})), **some(draw, options)}


def ollama(draw: Random) -> Any:
    return {"input": draw.choice((text(draw), texts(draw))), **some(draw, {"truncate": True, "dimensions": 8})}


def ollama_prompt(draw: Random) -> Any:
    return {"prompt": draw.choice((text(draw), "")), **some(draw, {"model": "small"})}


def ollama_show(draw: Random) -> Any:
    return some(draw, {"model": "small", "verbose": True})


def rerank(draw: Random) -> Any:
    options = {
        "truncate": draw.random() < 0.5,
        "truncation_direction": draw.choice(SIDES),
        "raw_scores": draw.random() < 0.5,
        "return_text": draw.random() < 0.5,
        "instruction": text(draw),
        "weights": draw.choice(("m3", "m3-long", {"dense": 0.5, "sparse": draw.uniform(-1, 2)})),
    }
    return {"query": text(draw), "texts": texts(draw, 12), **some(draw, options)}


def rank_documents(draw: Random) -> Any:
    documents = draw.choice((texts(draw, 12), [{"text": one, "title": "t", "n": 1} for one in texts(draw)]))
    options = {
        "top_n": draw.choice((0, 1, 100)),
        "top_k": 2,
        "return_documents": draw.random() < 0.5,
        "rank_fields": draw.choice((["text"], ["title", "n"], [])),
        "max_tokens_per_doc": draw.choice((0, 1, 5, 4096)),
        "raw_scores": True,
        "truncation": draw.random() < 0.5,
        "property": "x",
    }
    return {"query": text(draw), "documents": documents, **some(draw, options)}


def score(draw: Random) -> Any:
    one, other = draw.choice((("text_1", "text_2"), ("queries", "documents")))
    return {one: text(draw), other: draw.choice((text(draw), texts(draw)))}


def predict(draw: Random) -> Any:
    pair = [text(draw), text(draw)]
    batch = [texts(draw, 2) for _ in range(draw.randint(1, 5))]
    options = {
        "truncate": draw.random() < 0.5,
        "truncation_direction": draw.choice(SIDES),
        "raw_scores": draw.random() < 0.5,
        "parameters": draw.choice(({"top_k": 2}, {"function_to_apply": draw.choice(("sigmoid", "softmax", "none"))}, {})),
    }
    return {"inputs": draw.choice((text(draw), [text(draw)], pair, batch)), **some(draw, options)}


def classify(draw: Random) -> Any:
    return {"input": draw.choice((text(draw), texts(draw))), **some(draw, {"raw_scores": True, "use_activation": False})}


def predict_tokens(draw: Random) -> Any:
    options = {
        "truncate": draw.random() < 0.5,
        "raw_scores": draw.random() < 0.5,
        "aggregation_strategy": draw.choice(("none", "simple", "first", "average", "max")),
        "include_special_tokens": draw.random() < 0.5,
    }
    return {"inputs": draw.choice((text(draw), texts(draw), [[one] for one in texts(draw)])), **some(draw, options)}


def entities(draw: Random) -> Any:
    parameters = {"aggregation_strategy": draw.choice(("none", "simple", "max")), "ignore_labels": ["O"]}
    return {"inputs": draw.choice((text(draw), texts(draw))), **some(draw, {"parameters": parameters})}


def tokenize(draw: Random) -> Any:
    options = {"add_special_tokens": False, "prompt_name": "query"}
    return {"inputs": draw.choice((text(draw), texts(draw))), **some(draw, options)}


def decode(draw: Random) -> Any:
    return {"ids": draw.choice((ids(draw), [ids(draw), ids(draw)])), **some(draw, {"skip_special_tokens": False})}


def vertex(draw: Random) -> Any:
    makers = (embed, predict, rerank, entities)
    return {"instances": [draw.choice(makers)(draw) for _ in range(draw.randint(1, 5))]}


def anything(draw: Random) -> Any:
    """What `/` may be asked."""
    return draw.choice((embed, predict, rerank, entities, similarity, rank_documents))(draw)


def search(draw: Random) -> Any:
    options = {
        "mode": draw.choice((*OUTPUTS, "zscore", "rrf", "weighted")),
        "limit": draw.choice((0, 1, 10, 1000)),
        "offset": draw.choice((0, 3, 1000)),
        "prefetch_limit": draw.choice((0, 1, 100)),
        "k": draw.choice((1, 2, 61)),
        "weights": draw.choice(("m3", {"dense": 1.0, "sparse": 0.5}, [1.0, 2.0])),
        "legs": draw.sample(OUTPUTS, draw.randint(1, 3)),
        "rescore": draw.choice((True, False, "multivector")),
        "query_encoder": draw.choice(("model", "table")),
        "group_by": draw.choice(("document", "metadata.m", "n", "")),
        "rerank": draw.choice((True, False, "reranker")),
        "filter": draw.choice(FILTERS),
        "score_threshold": draw.uniform(-1, 1),
        "with_payload": draw.choice((True, False, ["text"])),
        "highlights": draw.random() < 0.5,
        "relevant_spans": some(draw, {"mode": draw.choice(("enabled", "disabled")), "threshold": 0.2, "max_spans": 3}),
        "explain": draw.random() < 0.5,
    }
    return {"collection": draw.choice(COLLECTIONS), "query": text(draw), **some(draw, options)}


def points(draw: Random) -> Any:
    given = [
        {
            "text": text(draw),
            **some(draw, {"id": draw.choice((draw.randrange(50), "a")), "payload": {"n": 1}, "metadata": {"m": "x"}}),
        }
        for _ in range(draw.randint(1, 4))
    ]
    return {"points": given, **some(draw, {"create": True, "truncate": True})}


def inference(draw: Random) -> Any:
    options = {"vector": draw.choice(OUTPUTS), "dimensions": 8, "input_type": "query", "prompt_name": "query"}
    models = ("hybrid", "hybrid/dense", "hybrid/sparse", "hybrid/multivector", "")
    given = [{"data": text(draw), "data_type": "text", "model": draw.choice(models)} for _ in range(draw.randint(1, 4))]
    asked = [{**one, **some(draw, {"options": some(draw, options)})} for one in given]
    return {"inputs": asked, **some(draw, {"inference": draw.choice(("update", "search")), "token": "fuzz-key"})}


def unload(draw: Random) -> Any:
    return {"model": draw.choice(("nobody", "", "classifier "))}


def load(draw: Random) -> Any:
    """Of models that there are not."""
    return {
        "model_id": draw.choice(("/nowhere", "no/where", "")),
        **some(draw, {"alias": "a b", "dtype": "int3", "role": "cook"}),
    }


POSTS: dict[str, Callable[[Random], Any]] = {
    "/embed": embed,
    "/embed_all": embed_plainly,
    "/embed_sparse": embed_plainly,
    "/embed_hybrid": embed_hybrid,
    "/embed_multivector": embed_multivector,
    "/similarity": similarity,
    "/v1/embeddings": openai,
    "/embeddings": openai,
    "/v1/contextualizedembeddings": contextualized,
    "/v1/embed": cohere,
    "/v2/embed": cohere,
    "/api/embed": ollama,
    "/api/embeddings": ollama_prompt,
    "/api/show": ollama_show,
    "/rerank": rerank,
    "/v1/rerank": rank_documents,
    "/v2/rerank": rank_documents,
    "/score": score,
    "/v1/score": score,
    "/predict": predict,
    "/classify": classify,
    "/v1/classify": classify,
    "/predict_tokens": predict_tokens,
    "/tokenize": tokenize,
    "/decode": decode,
    "/vertex": vertex,
    "/invocations": anything,
    "/": anything,
    "/search": search,
    "/collections/docs/points": points,
    "/collections/%2e%2e%2fx/points": points,
    "/qdrant/inference": inference,
    "/models/load": load,
    "/models/unload": unload,
}
GETS = (
    *("/", "/health", "/ping", "/info", "/metrics", "/models", "/v1/models", "/api/tags", "/api/version", "/docs", "/docs/"),
    *("/docs/swagger-ui.css", "/api-doc/openapi.json", "/page", "/page/page.css"),
)
