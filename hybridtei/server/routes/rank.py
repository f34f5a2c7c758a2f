"""Reranking, scoring and classification under the paths of Cohere, Jina, Voyage, vLLM and infinity."""

from __future__ import annotations

import msgspec

from hybridtei.errors import HybridTeiError
from hybridtei.server.answers import predict, rerank, score
from hybridtei.server.errors import listed_error
from hybridtei.server.jobs import CLASSIFY, RANK
from hybridtei.server.serve import posted
from hybridtei.server.wire.classify import VllmClassifyRequest
from hybridtei.server.wire.rerank import DocumentsRequest
from hybridtei.server.wire.score import ScoreRequest

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
