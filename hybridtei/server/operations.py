"""What each route takes and gives, for the OpenAPI document. Handlers read bodies themselves, so nothing else knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridtei.server.api import classify, cohere, ollama, openai, rerank, search, tei, tokens
from hybridtei.server.api import embed as hybrid
from hybridtei.server.api import qdrant_inference as inference
from hybridtei.server.api import scoring as score
from hybridtei.server.api import tagging as tag

Vector = list[float]
REQUESTS_WITH_DIRECTION = ("EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest", "PredictRequest", "RerankRequest")
FLAT, LISTED = openai.OpenAICompatErrorResponse, openai.ListedErrorResponse


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: what it takes and gives. A tuple of types means one of these, which a union of msgspec's cannot say."""

    method: str
    path: str
    summary: str
    takes: Any = None
    gives: Any = None
    error: Any = tei.ErrorResponse
    is_refused_in_text: bool = True  # a body that is not what it should be; else as all other errors

    @property
    def is_tei(self) -> bool:
        return self.path in TEI_PATHS


TEI_PATHS = frozenset(
    [
        *("/decode", "/embed", "/embed_all", "/embed_sparse", "/health", "/info", "/metrics", "/predict", "/rerank"),
        *("/similarity", "/tokenize", "/v1/embeddings"),
    ]
)
# TEI's names for what has none in `wire`: answers, and the fields of requests that several share.
ANSWERS = {
    **{"/decode": "DecodeResponse", "/embed": "EmbedResponse", "/embed_all": "EmbedAllResponse"},
    **{"/embed_sparse": "EmbedSparseResponse", "/predict": "PredictResponse", "/rerank": "RerankResponse"},
    **{"/similarity": "SimilarityResponse", "/tokenize": "TokenizeResponse"},
}
FIELDS = {
    ("inputs", "EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest"): "Input",
    ("input", "OpenAICompatRequest"): "Input",
    ("inputs", "PredictRequest"): "PredictInput",
    ("inputs", "TokenizeRequest"): "TokenizeInput",
    ("ids", "DecodeRequest"): "InputIds",
    ("encoding_format", "OpenAICompatRequest"): "EncodingFormat",
    ("embedding", "OpenAICompatEmbedding"): "Embedding",
    ("error_type", "ErrorResponse"): "ErrorType",
    ("truncation_direction", *REQUESTS_WITH_DIRECTION): "TruncationDirection",
}


def _get(path: str, summary: str, gives: Any = None) -> Operation:
    return Operation("get", path, summary, gives=gives)


def _post(path: str, summary: str, takes: Any, gives: Any, error: Any = tei.ErrorResponse) -> Operation:
    return Operation("post", path, summary, takes, gives, error)


RERANK, DOCUMENTS, RANKED = "Reranking of documents", rerank.DocumentsRequest, rerank.DocumentsResponse
CLASSIFIED = (classify.ClassifyResponse, classify.VllmClassifyResponse)

OPERATIONS = (
    _get("/health", "Health check"),
    _get("/info", "The model and the limits", tei.Info),
    _get("/metrics", "Prometheus metrics"),
    _get("/models", "The models, with what infinity's clients look for", openai.ModelList),
    _get("/v1/models", "The models", openai.ModelList),
    _post("/embed", "Dense vectors", tei.EmbedRequest, list[Vector]),
    _post("/embed_all", "A raw vector for each token", tei.EmbedAllRequest, list[list[Vector]]),
    _post("/embed_sparse", "Sparse vectors", tei.EmbedSparseRequest, list[list[tei.SparseValue]]),
    _post("/embed_multivector", "A unit vector for each token", hybrid.EmbedMultivectorRequest, list[list[Vector]]),
    _post("/embed_hybrid", "Several outputs of one forward pass", hybrid.EmbedHybridRequest, list[hybrid.HybridEmbedding]),
    _post("/v1/embeddings", "OpenAI embeddings", openai.OpenAICompatRequest, openai.OpenAICompatResponse, FLAT),
    _post("/v1/embed", "Cohere embeddings, version 1", cohere.CohereEmbedRequest, cohere.CohereEmbedV1Response, FLAT),
    _post("/v2/embed", "Cohere embeddings", cohere.CohereEmbedRequest, cohere.CohereEmbedResponse, FLAT),
    _post("/api/embed", "Ollama embeddings", ollama.OllamaEmbedRequest, ollama.OllamaEmbedResponse),
    _post("/similarity", "Cosine of one sentence to many", tei.SimilarityRequest, Vector),
    _post("/predict", "Classification", tei.PredictRequest, (list[tei.Prediction], list[list[tei.Prediction]])),
    _post("/predict_tokens", "Labels of tokens, or entities", tag.PredictTokensRequest, list[list[tag.TokenPrediction]]),
    _post("/rerank", f"{RERANK}; `texts` or `documents`", (rerank.RerankRequest, DOCUMENTS), (list[rerank.Rank], RANKED)),
    _post("/v1/rerank", RERANK, DOCUMENTS, RANKED, LISTED),
    _post("/v2/rerank", RERANK, DOCUMENTS, RANKED, LISTED),
    _post("/score", "Scores of pairs", score.ScoreRequest, score.ScoreResponse, LISTED),
    _post("/v1/score", "Scores of pairs", score.ScoreRequest, score.ScoreResponse, LISTED),
    _post("/classify", "Classification for infinity's clients", classify.ClassifyRequest, CLASSIFIED, LISTED),
    _post(
        "/v1/classify",
        "Classification for vLLM's clients",
        classify.VllmClassifyRequest,
        classify.VllmClassifyResponse,
        LISTED,
    ),
    _post(
        "/search",
        "Search a collection of the vector store",
        search.SearchRequest,
        (search.SearchResponse, search.SearchesResponse),
    ),
    _post("/collections/{name}/points", "Embed texts and store them", search.PointsRequest, search.PointsResponse),
    Operation(
        "post",
        "/qdrant/inference",
        "Embeddings for a Qdrant server",
        inference.InferenceRequest,
        inference.InferenceResponse,
        inference.InferenceError,
        is_refused_in_text=False,
    ),
    _post("/tokenize", "Tokens with their places", tei.TokenizeRequest, list[list[tei.SimpleToken]]),
    _post("/decode", "Ids back to text", tei.DecodeRequest, list[str]),
    _post("/detokenize", "Ids back to text", tokens.DetokenizeRequest, tokens.DetokenizeResponse),
)
