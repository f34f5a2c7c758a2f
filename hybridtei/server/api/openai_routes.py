"""Embeddings under the paths of OpenAI, Cohere and Ollama."""

from __future__ import annotations

from hybridtei.errors import HybridTeiError
from hybridtei.server.api import cohere, ollama
from hybridtei.server.api.cohere import CohereEmbedRequest
from hybridtei.server.api.ollama import OllamaEmbedRequest
from hybridtei.server.api.openai import OpenAICompatRequest, openai_embed
from hybridtei.server.http.errors import openai_error
from hybridtei.server.registry import EMBED
from hybridtei.server.routing import posted

ERRORS = {HybridTeiError: openai_error}

ROUTES = (
    # A missing content type passes here: some clients of this route send none.
    posted("/v1/embeddings", OpenAICompatRequest, openai_embed, job=EMBED, type_required=False, errors=ERRORS),
    posted("/embeddings", OpenAICompatRequest, openai_embed, job=EMBED, errors=ERRORS),
)
OURS = (
    posted("/v1/embed", CohereEmbedRequest, cohere.embed_v1, job=EMBED, type_required=False, errors=ERRORS),
    posted("/v2/embed", CohereEmbedRequest, cohere.embed, job=EMBED, type_required=False, errors=ERRORS),
    posted("/api/embed", OllamaEmbedRequest, ollama.ollama_embed, job=EMBED, type_required=False),  # Ollama's errors are TEI's
)
