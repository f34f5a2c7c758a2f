"""Collections that other software made are searched as they are: by its own names of vectors, texts
and ids."""

import json
import logging
import sys
from contextlib import asynccontextmanager, closing, contextmanager

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from conformance.small.tiny import write_bert
from hybridtei import SearchOptions, StoreConfig, StoreError
from hybridtei.cli import main
from hybridtei.client import Client
from hybridtei.encoder import Encoder
from hybridtei.errors import CollectionMismatch
from hybridtei.inference.backends.graph.onnx_export import export_model
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import open_store, opened
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.own import text_of
from tests.conformance.test_clients import environments
from tests.ran import ran
from tests.retrieval.search.rankers import ByLength
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_of, exact, spec_in
from tests.retrieval.store import collections_of_others
from tests.retrieval.store.speaking import speaking
from tests.server.live import serving

QUERY = "the search engine"
TEXT_FIELDS = {
    "langchain": "page_content",
    "llama_index": "_node_content.text",
    "llama_index_hybrid": "_node_content.text",
}
HYBRID = ("langchain", "llama_index_hybrid")


def given_by(encoder):
    embedded = encoder.encode(TEXTS, ("dense", "sparse"), input_type="document")
    rows = map(embedded.sparse.row, range(len(TEXTS)))
    sparse = [[indices.tolist(), values.tolist()] for indices, values in rows]
    return {"texts": TEXTS, "dense": embedded.dense.tolist(), "sparse": sparse}


def made(package, folder, given):
    """The folder of a collection that the package made, in its environment."""
    python = sys.executable
    if package != "langchain":
        home = environments.ready("llama_index")
        if home is None:
            pytest.skip("not made: python conformance/clients/environments.py llama_index")
        python = home / "bin" / "python"
    told = folder / "given.json"
    told.write_text(json.dumps(given))
    script = collections_of_others.__file__
    done = ran([str(python), script, package, str(folder / "qdrant"), str(told)])
    assert done.returncode == 0, done.stderr
    return folder / "qdrant"


@contextmanager
def served(folder):
    """A server of Qdrant that has the collections of a folder."""
    with speaking() as state:
        state.local.close()
        state.local = QdrantClient(path=str(folder), force_disable_check_same_thread=True)
        yield state


@pytest.fixture(scope="module", params=TEXT_FIELDS)
def own(request, encoder, tmp_path_factory):
    """What a package made of our vectors: its name, and a server with it."""
    folder = made(request.param, tmp_path_factory.mktemp("own"), given_by(encoder))
    with served(folder) as state:
        yield request.param, state


@asynccontextmanager
async def searching(state, encoder, kind="rest"):
    async with opened(StoreConfig(qdrant_url=state.url(kind))) as store:
        yield Searcher(store, encoder.named(MODEL))


@pytest.mark.parametrize("kind", ["rest", "grpc"])
async def test_each_kind_of_vector_that_is_there_scores_as_numpy_does(own, encoder, kind):
    package, state = own
    field = TEXT_FIELDS[package]
    options = {"unlabelled": True, "text_field": field, "limit": len(TEXTS), "explain": True}
    async with searching(state, encoder, kind) as searcher:
        both = await searcher.search("mine", QUERY, SearchOptions(**options))
        ranked = await searcher.search(
            "mine", QUERY, SearchOptions(**options, rerank_limit=5), ranker=ByLength()
        )
    names = ("dense", "sparse") if package in HYBRID else ("dense",)
    assert both.mode == ("zscore" if package in HYBRID else "dense")
    # Each point is a hit, with its own payload
    assert sorted(text_of(hit.payload, field) for hit in both.hits) == sorted(TEXTS)
    for name in names:
        scores = exact(encoder, QUERY)[name]
        for hit in both.hits:
            place = TEXTS.index(text_of(hit.payload, field))
            assert hit.scores[name].score == pytest.approx(scores[place], abs=1e-5)
    lengths = [len(text_of(hit.payload, field)) for hit in ranked.hits]
    assert lengths == sorted(lengths, reverse=True)


def test_the_server_its_client_and_the_command_search_it(own, encoder, capsys):
    package, state = own
    options = {"unlabelled": True, "text_field": TEXT_FIELDS[package], "limit": 3}
    # The other one is found by itself
    if package != "llama_index_hybrid":
        options["dense_name"] = ""
    if package == "langchain":
        options["sparse_name"] = "langchain-sparse"
    store = open_store(StoreConfig(qdrant_url=state.url("rest")))
    with serving(encoder.spec, schemas=CollectionSchemas(store), model_id=MODEL) as server:
        with Client(server.url) as client:
            found = client.search("mine", QUERY, highlights=True, **options)
            with pytest.raises(
                CollectionMismatch, match="`unlabelled` \\(--unlabelled\\) searches it"
            ):
                client.search("mine", QUERY)
            with pytest.raises(CollectionMismatch, match="`dense_name` is 'none'"):
                client.search("mine", QUERY, unlabelled=True, dense_name="none")
        spans = {"relevant_spans": {"mode": "enabled", "threshold": 0.0}, "with_payload": False}
        answer = server.post("/search", {"collection": "mine", "query": QUERY} | options | spans)
        flags = ["--unlabelled", "--text-field", options["text_field"], "--limit", "3"]
        flags += [f"--dense-name={options['dense_name']}"] if "dense_name" in options else []
        assert main(["search", "mine", QUERY, "--url", server.url, *flags]) == 0
    texts = [text_of(hit.payload, TEXT_FIELDS[package]) for hit in found.hits]
    assert all(bool(hit.highlights) == (package in HYBRID) for hit in found.hits[:1])
    assert all(hit["relevant_spans"] and not hit["payload"] for hit in answer.json()["hits"])
    plain = capsys.readouterr().out.replace("*", "")
    assert all(text in plain for text in texts)


async def test_vectors_of_other_weights_are_refused(own, tmp_path):
    package, state = own
    # With this prompt no text has a cosine above .34: the package draws ids, so any five are asked
    prompts = {"passage": "six seven six seven six seven: ", "query": "query: "}
    other = encoder_of(spec_in(tmp_path, prompts=prompts))
    asked = SearchOptions(unlabelled=True, text_field=TEXT_FIELDS[package])
    async with searching(state, other) as searcher:
        with pytest.raises(CollectionMismatch, match="embedded 5 of its texts again"):
            await searcher.search("mine", QUERY, asked)


async def test_sparse_vectors_of_another_model_are_left_out_unless_named(encoder, tmp_path, caplog):
    given = given_by(encoder)
    given["sparse"] = [[[2**31 + place], [1.0]] for place in range(len(TEXTS))]
    asked = {"unlabelled": True, "text_field": "page_content"}
    named = SearchOptions(**asked, sparse_name="langchain-sparse")
    with served(made("langchain", tmp_path, given)) as state:
        async with searching(state, encoder) as searcher:
            with caplog.at_level(logging.WARNING):
                found = await searcher.search("mine", QUERY, SearchOptions(**asked))
            with pytest.raises(CollectionMismatch, match="`sparse` vectors"):
                await searcher.search("mine", QUERY, named)
    assert (found.mode, len(found.hits)) == ("dense", len(TEXTS))
    assert "its sparse vectors are not those of small" in caplog.text


async def test_what_fastembed_made_is_searched_by_its_name(tmp_path):
    source = write_bert(tmp_path / "source")
    with closing(Encoder.load(str(source), measures=False)) as encoder:
        export_model(encoder.spec, tmp_path / "model")
        (tmp_path / "model" / "special_tokens_map.json").write_text("{}")
        (tmp_path / "model" / "tokenizer_config.json").write_text(
            '{"model_max_length": 64, "pad_token": "[PAD]"}'
        )
        width = encoder.spec.dense_width
        given = {"texts": TEXTS, "model": str(tmp_path / "model"), "width": width}
        asked = SearchOptions(unlabelled=True, text_field="document")
        with served(made("fastembed", tmp_path, given)) as state:
            async with opened(StoreConfig(qdrant_url=state.url("grpc"))) as store:
                found = await Searcher(store, encoder).search("mine", TEXTS[3], asked)
        assert (found.mode, found.hits[0].payload) == ("dense", {"document": TEXTS[3]})
        scores = np.sort(encoder.encode(TEXTS).dense @ encoder.encode([TEXTS[3]]).dense[0])[::-1]
        assert [hit.score for hit in found.hits] == pytest.approx(scores, abs=1e-3)


def test_a_folder_of_qdrant_clients_own_format_is_named(tmp_path):
    client = QdrantClient(path=str(tmp_path))
    client.create_collection("mine", models.VectorParams(size=2, distance="Cosine"))
    client.close()
    with pytest.raises(StoreError, match="local mode"):
        open_store(StoreConfig(qdrant_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("payload", "field", "text"),
    [
        ({"a.b": "flat", "a": {"b": "deep"}}, "a.b", "flat"),
        ({"a": {"b": "deep"}}, "a.b", "deep"),
        ({"a": '{"b": {"c": "json"}}'}, "a.b.c", "json"),
        ({"a": "{broken"}, "a.b", ""),
        ({"a": "[" * 100_000}, "a.b", ""),
        ({"a": ["b"]}, "a.b", ""),
        ({"a": None}, "a", ""),
    ],
)
def test_texts_are_read_where_they_are(payload, field, text):
    assert text_of(payload, field) == text
