"""Our own routes: several outputs of one forward pass; tags of tokens, which are Baseten's; texts of ids, which are vLLM's."""

from __future__ import annotations

from hybridtei.server import registry as jobs
from hybridtei.server.api import embed, tokens
from hybridtei.server.api import tagging as tag
from hybridtei.server.api.embed import EmbedHybridRequest, EmbedMultivectorRequest
from hybridtei.server.api.tagging import PredictTokensRequest
from hybridtei.server.api.tokens import DetokenizeRequest
from hybridtei.server.routing import posted

ROUTES = (
    posted("/embed_hybrid", EmbedHybridRequest, embed.embed_hybrid, job=jobs.EMBED_HYBRID),
    posted("/embed_multivector", EmbedMultivectorRequest, embed.embed_multivector, job=jobs.EMBED_MULTIVECTOR),
    posted("/detokenize", DetokenizeRequest, tokens.detokenize),
    posted("/predict_tokens", PredictTokensRequest, tag.predict_tokens, job=jobs.TAG),
)
