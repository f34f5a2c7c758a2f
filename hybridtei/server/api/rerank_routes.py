"""Reranking, scoring and classification under the paths of Cohere, Jina, Voyage, vLLM and infinity."""

from __future__ import annotations

import msgspec

from hybridtei.errors import HybridTeiError
from hybridtei.server.api import classify as predict
from hybridtei.server.api import rerank
from hybridtei.server.api import scoring as score
from hybridtei.server.api.classify import VllmClassifyRequest
from hybridtei.server.api.rerank import DocumentsRequest
from hybridtei.server.api.scoring import ScoreRequest
from hybridtei.server.http.errors import listed_error
from hybridtei.server.registry import CLASSIFY, RANK
from hybridtei.server.routing import posted

ERRORS = {HybridTeiError: listed_error}

ROUTES = (
    # A missing content type passes below /v1 and /v2: some clients send none.
    posted("/v1/rerank", DocumentsRequest, rerank.rerank_documents, job=RANK, type_required=False, errors=ERRORS),
    posted("/v2/rerank", DocumentsRequest, rerank.rerank_documents, job=RANK, type_required=False, errors=ERRORS),
    posted("/v1/score", ScoreRequest, score.score, job=RANK, type_required=False, errors=ERRORS),
    posted("/score", ScoreRequest, score.score, job=RANK, errors=ERRORS),
    posted("/v1/classify", VllmClassifyRequest, predict.vllm_classify, job=CLASSIFY, type_required=False, errors=ERRORS),
    posted("/classify", msgspec.Raw, predict.classify, job=CLASSIFY, errors=ERRORS),
)
