"""TEI's routes. What they compute lies in `answers`."""

from __future__ import annotations

import msgspec

from hybridtei.server import registry as jobs
from hybridtei.server.api import classify as predict
from hybridtei.server.api import embed, tei, tokens
from hybridtei.server.api import invocations as kind
from hybridtei.server.routing import posted

ROUTES = (
    posted("/embed", tei.EmbedRequest, embed.embed, job=jobs.EMBED),
    posted("/embed_all", tei.EmbedAllRequest, embed.embed_all, job=jobs.EMBED),
    posted("/embed_sparse", tei.EmbedSparseRequest, embed.embed_sparse, job=jobs.EMBED_SPARSE),
    posted("/similarity", tei.SimilarityRequest, embed.similarity, job=jobs.EMBED),
    posted("/predict", tei.PredictRequest, predict.predict, job=jobs.CLASSIFY),
    posted("/rerank", msgspec.Raw, kind.by_keys, job=jobs.RANK),
    posted("/tokenize", msgspec.Raw, tokens.by_keys),
    posted("/decode", tei.DecodeRequest, tokens.decode_ids),
    posted("/invocations", msgspec.Raw, kind.by_model),
    posted("/vertex", tei.VertexRequest, kind.vertex),
)
