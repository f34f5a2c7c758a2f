"""Our own routes: several outputs of one forward pass; tags of tokens, which are Baseten's; texts of ids, which are vLLM's."""

from __future__ import annotations

from hybridtei.server import jobs
from hybridtei.server.answers import embed, tag, tokens
from hybridtei.server.serve import posted
from hybridtei.server.wire.hybrid import EmbedHybridRequest, EmbedMultivectorRequest
from hybridtei.server.wire.tag import PredictTokensRequest
from hybridtei.server.wire.tokens import DetokenizeRequest

ROUTES = (
    posted("/embed_hybrid", EmbedHybridRequest, embed.embed_hybrid, job=jobs.EMBED_HYBRID),
    posted("/embed_multivector", EmbedMultivectorRequest, embed.embed_multivector, job=jobs.EMBED_MULTIVECTOR),
    posted("/detokenize", DetokenizeRequest, tokens.detokenize),
    posted("/predict_tokens", PredictTokensRequest, tag.predict_tokens, job=jobs.TAG),
)
