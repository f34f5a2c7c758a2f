"""Every field that a request may lack is obeyed or refused: with it, the answer is another one."""

import msgspec
import pytest

from hybridtei.server.api.rerank import RerankRequest
from hybridtei.server.routing import ROUTES

LONG = "one two three four five " * 20 + "the hybrid search"
TEXTS = ["the hybrid search", "one two three", LONG]
# Values of a field. One of them has to change the answer.
BOTH = (True, False)
VALUES = {
    "activation": BOTH,
    "add_special_tokens": BOTH,
    "aggregation_strategy": ("first", "simple"),
    "budget_ms": (1, 0.5),
    "chunk_size": (8,),
    "dense_name": ("vector",),
    "dimensions": (4,),
    "embed_dtype": ("float16", "binary"),
    "embedding_type": ("binary",),
    "embedding_types": (["binary"],),
    "enable_auto_chunking": BOTH,
    "encoding_format": ("base64",),
    "encoding_type": ("binary",),
    "endianness": ("big", "little"),
    "explain": BOTH,
    "filter": ({"must": [{"has_id": [1]}]},),
    "group_by": (None, "metadata.place"),
    "highlights": BOTH,
    "images": (["data:image/png;base64,AAAA"],),
    "include_special_tokens": BOTH,
    "input_type": ("query", "search_query"),
    "instruction": ("judge by words",),
    "k": (1,),
    "late_chunking": BOTH,
    "legs": (["dense"],),
    "limit": (1,),
    "long_inputs": ("mean",),
    "max_chunks_per_doc": (5,),
    "max_tokens": (2,),
    "max_tokens_per_doc": (2,),
    "min_probability": (0.5,),
    "modality": ("image",),
    "mode": ("dense",),
    "model": ("any:query", "small:corpus"),
    "multivector": ({"max_tokens": 1}, {"dtype": "binary"}),
    "neighbours": ({"before": 1},),
    "normalize": BOTH,
    "normalized": BOTH,
    "offset": (1,),
    "output_dimension": (4,),
    "output_dtype": ("binary",),
    "outputs": (["dense"], ["sparse"]),
    "parameters": ({"truncate": False}, {"top_k": 1}),
    "prefetch_limit": (1,),
    "prompt_name": ("query",),
    "property": ("text",),
    "query_encoder": ("table",),
    "rank_fields": (["title"],),
    "raw_scores": BOTH,
    "relevant_spans": ({"mode": "enabled", "threshold": 0.0},),
    "rerank": BOTH,
    "rerank_limit": (2,),
    "rerank_threshold": (0.5,),
    "rescore": BOTH,
    "return_documents": BOTH,
    "return_embeddings": BOTH,
    "return_multivector": BOTH,
    "return_sparse": BOTH,
    "return_text": BOTH,
    "rrf_k": (1,),
    "score_threshold": (0.5,),
    "skip_special_tokens": BOTH,
    "softmax": BOTH,
    "sparse_format": ("qdrant", "ids"),
    "sparse_name": ("words",),
    "task": ("nothing", "retrieval.query"),
    "text_field": ("body",),
    "token": ("a",),
    "top_k": (1,),
    "top_n": (1,),
    "truncate": (False, True, "NONE", "START"),
    "truncate_prompt_tokens": (3,),
    "truncation": BOTH,
    "truncation_direction": ("Left",),
    "truncation_side": ("left",),
    "unlabelled": BOTH,
    "use_activation": BOTH,
    "weights": ([1.0, 0.0, 0.0], "nobody's", {"dense": 1.0}),
    "with_payload": (False,),
}
BASES = {
    "/tokenize": ("server", {"inputs": TEXTS}),
    "/decode": ("server", {"ids": [2, 5, 3]}),
    "/embed": ("server", {"inputs": TEXTS}),
    "/embed_all": ("server", {"inputs": TEXTS}),
    "/embed_sparse": ("server", {"inputs": TEXTS}),
    "/embed_multivector": ("server", {"inputs": TEXTS}),
    "/embed_hybrid": ("server", {"inputs": TEXTS}),
    "/similarity": ("server", {"inputs": {"source_sentence": LONG, "sentences": TEXTS}}),
    "/predict": ("classifier", {"inputs": LONG}),
    "/classify": ("classifier", {"input": TEXTS}),
    "/predict_tokens": ("tagger", {"inputs": TEXTS}),
    "/rerank": ("reranker", {"query": "one", "texts": TEXTS}),
    "/v1/rerank": (
        "server",
        {"query": "one", "documents": [{"text": text, "title": text[:3]} for text in TEXTS]},
    ),
    "/v1/embed": ("server", {"texts": TEXTS}),
    "/v2/embed": ("server", {"texts": TEXTS}),
    "/v1/embeddings": ("server", {"input": TEXTS}),
    "/embeddings": ("server", {"input": TEXTS}),
    "/v1/contextualizedembeddings": ("server", {"inputs": [TEXTS[:2], [LONG[:90]]]}),
    "/api/embed": ("server", {"input": TEXTS}),
    "/api/embeddings": ("server", {"prompt": LONG}),
    "/search": ("shelf", {"collection": "papers", "query": "the search engine"}),
    "/score": ("reranker", {"text_1": "one", "text_2": TEXTS}),
}
# Fields of `/rerank` are those of TEI: with `documents` it is another request
READ_BY = {"/rerank": RerankRequest}
# A field that is read beside another one
BESIDE = {
    "rrf_k": {"mode": "rrf"},
    "k": {"mode": "rrf"},
    "sparse_format": {"outputs": ["sparse"]},
    "chunk_size": {"enable_auto_chunking": True},
}
# Fields that change no answer, and why
INERT = {
    "exact": "the store in memory is always exact",
    "user": "OpenAI's mark of its own client",
    **dict.fromkeys(
        ("documents", "input", "inputs", "prompt", "queries"), "the texts' other names"
    ),
}
OF_TIME = ("id", "created", "total_duration", "load_duration", "created_at")


def fields_of(path):
    """The names of fields that a route's requests may lack."""
    kinds = [kind for route in ROUTES if path in route.paths for kind in route.requests]
    return {
        field.encode_name
        for kind in ([READ_BY[path]] if path in READ_BY else kinds)
        for field in msgspec.structs.fields(kind)
        if not field.required
    }


CASES = [
    (path, field)
    for path, (_, base) in BASES.items()
    for field in sorted(fields_of(path) - base.keys() - INERT.keys())
]


def answered(server, path, body):
    response = server.post(path, body)
    if response.status_code != 200:
        return response.status_code
    content = response.json()
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in OF_TIME}
    return content


@pytest.mark.parametrize(("path", "field"), CASES, ids="".join)
def test_a_field_changes_the_answer_or_is_refused(request, path, field):
    fixture, base = BASES[path]
    server = request.getfixturevalue(fixture)
    base = {**base, **BESIDE.get(field, {})}
    plain = answered(server, path, base)
    assert isinstance(plain, (list, dict)), plain
    assert any(answered(server, path, {**base, field: value}) != plain for value in VALUES[field])
