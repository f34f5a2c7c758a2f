"""A keyword is a field, and a field of a request that is read by its name is the option of that
name."""

from typing import get_type_hints

import pytest
from msgspec import UnsetType

from hybridtei import options
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.options import EmbedOptions, LabelOptions, LoadKeywords, RankOptions
from hybridtei.retrieval.ingest.options import IngestKeywords, IngestOptions
from hybridtei.retrieval.search.options import (
    LocalKeywords,
    SearchFields,
    SearchKeywords,
    SearchOptions,
)
from hybridtei.retrieval.store.query import CollectionPlan
from hybridtei.server.api import embed, predict, rerank, tei

KEYWORDS = {
    EmbedOptions: options.EmbedKeywords,
    RankOptions: options.RankKeywords,
    LabelOptions: options.LabelKeywords,
}
# Requests that are read by `options_of`, and the names under which they spell something else
READ = [
    (EmbedOptions, tei.EmbedRequest, {"truncation_direction"}),
    (EmbedOptions, tei.EmbedSparseRequest, {"truncation_direction"}),
    (EmbedOptions, embed.EmbedHybridRequest, {"truncation_direction"}),
    (EmbedOptions, tei.SimilarityParameters, {"truncation_direction"}),
    (RankOptions, rerank.RerankRequest, {"truncation_direction"}),
    (RankOptions, rerank.DocumentsRequest, {"truncation_direction", "raw_scores"}),
    (LabelOptions, tei.PredictRequest, {"truncation_direction"}),
    (LabelOptions, predict.PredictTokensRequest, {"truncation_direction"}),
]


@pytest.mark.parametrize("kind", KEYWORDS)
def test_a_keyword_is_a_field_and_other_fields_are_no_keywords(kind):
    assert kind.KEYWORDS.keys() == KEYWORDS[kind].__annotations__.keys()
    assert kind.KEYWORDS.keys() <= set(kind.__struct_fields__)
    for name in set(kind.__struct_fields__) - kind.KEYWORDS.keys():
        with pytest.raises(TypeError, match=f"call has no option `{name}`"):
            kind.given("call", {name: None})


@pytest.mark.parametrize(
    ("keywords", "kinds", "others"),
    [
        (LoadKeywords, (ModelConfig, EngineConfig), {"model_id"}),
        (SearchKeywords, (SearchFields,), {"limit"}),
        (LocalKeywords, (SearchOptions,), {"limit", "query_filter"}),
        (IngestKeywords, (IngestOptions, CollectionPlan), {"source", "collection"}),
    ],
)
def test_every_field_is_a_keyword(keywords, kinds, others):
    """`others`: parameters of their own."""
    names = {name for kind in kinds for name in kind.__struct_fields__}
    assert get_type_hints(keywords).keys() == names - others


@pytest.mark.parametrize(("kind", "request_kind", "spelled"), READ)
def test_a_field_that_is_read_by_its_name_has_the_options_type(kind, request_kind, spelled):
    ours, theirs = get_type_hints(kind), get_type_hints(request_kind)
    shared = {name for name in kind.__struct_fields__ if name in request_kind.__struct_fields__}
    assert shared
    for name in shared - spelled:
        assert theirs[name] == ours[name], name
    assert UnsetType not in {theirs[name] for name in shared - spelled}


# What each surface of a ranking has: its fields, or the reason why one is not there
SURFACES = {
    "Encoder.rerank, Client.rerank": set(options.RankKeywords.__annotations__),
    "/rerank, texts": set(rerank.RerankRequest.__struct_fields__),
    "/v1/rerank": set(rerank.DocumentsRequest.__struct_fields__),
    "Index.search": {"limit", *get_type_hints(LocalKeywords)},
    "Client.search": {"limit", *get_type_hints(SearchKeywords)},
    "/search, search --rerank": set(SearchFields.__struct_fields__),
}
ABSENT = {
    ("raw_scores", "search"): "a threshold and a curve are of probabilities",
    ("weights", "search"): "`weights` of a search are of its legs, and the field is there",
    ("truncate", "search"): "a hit's text is always cut",
    ("truncation_direction", "search"): "a hit's text is always cut at its end",
    ("max_tokens_per_doc", "search"): "a hit is a chunk",
    ("relevant_spans", "Encoder.rerank"): "a Ranked has no place for spans",
    ("relevant_spans", "/rerank, texts"): "TEI's answer has no place for spans",
    ("relevant_spans", "Index.search"): "a SearchHit has no place for spans",
    ("relevant_spans", "Client.search"): "a SearchHit has no place for spans",
    ("relevant_spans", "/search"): "of the embedding model, whose field is SearchRequest's",
    ("max_tokens", ""): "TEI's and vLLM's wires make it of fields of theirs",
    ("deadline_ns", ""): "the end of budget_ms",
}


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_of_a_ranking_has_every_option(surface):
    for name in RankOptions.__struct_fields__:
        reasons = [field for field, part in ABSENT if field == name and part in surface]
        assert (name in SURFACES[surface]) or reasons, f"{surface} lacks `{name}` without a reason"
