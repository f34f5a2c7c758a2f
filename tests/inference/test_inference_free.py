"""SPLADE whose queries are looked up in a table, against sentence-transformers' SparseEncoder; and
its second logarithm."""

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.batch import Head
from hybridtei.encoder import Encoder
from hybridtei.errors import (
    EmptyInput,
    InvalidInput,
    LoadError,
    UnsupportedArchitecture,
    UnsupportedHead,
    WeightMismatch,
)
from hybridtei.inference.tasks.embed import Embed
from hybridtei.models.checkpoint.layers import query_table
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.options import EmbedOptions
from tests.near import near, same

QUERIES = [
    "baka",
    "baka bulo baka mo",
    "xyz baka",
    *vocabulary.texts(6, seed=2),
    "bulo baka " * 200,
]
DOCUMENTS = vocabulary.texts(16, seed=3)
TOLERANCE = tolerances.WEIGHTS["float32"]


def masked(folder, model_type="bert"):
    """A masked language model as sentence-transformers loads it."""
    base = tiny.write_family(folder / "base", model_type, task="ForMaskedLM")
    return Transformer(
        str(base), transformer_task="fill-mask", module_output_name="token_embeddings"
    )


def routed(folder, model_type="bert", *, activation="relu"):
    """As sentence-transformers 6 saves a table for queries and a model for documents."""
    documents = masked(folder, model_type)
    weights = torch.rand(len(documents.tokenizer), generator=torch.Generator().manual_seed(4))
    weights[7:20] = 0
    queries = SparseStaticEmbedding(tokenizer=documents.tokenizer, weight=weights)
    pooling = SpladePooling("max", activation_function=activation)
    router = Router.for_query_document(
        query_modules=[queries], document_modules=[documents, pooling]
    )
    SparseEncoder(modules=[router], device="cpu").save(str(folder / "saved"))
    return folder / "saved"


def sparse(encoder, texts, kind=None):
    found = encoder.encode(texts, ("sparse",), input_type=kind).sparse
    return found.to_dense()


def close(one, other):
    near(one, other, TOLERANCE)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_both_sides_are_those_of_sentence_transformers(tmp_path, model_type, activation):
    folder = routed(tmp_path, model_type, activation=activation)
    ours, theirs = Encoder.load(folder), SparseEncoder(str(folder), device="cpu")
    close(sparse(ours, QUERIES, "query"), theirs.encode_query(QUERIES).to_dense().numpy())
    documents = theirs.encode_document(DOCUMENTS).to_dense().numpy()
    # No query ever asks for them
    documents[:, sorted(ours.spec.removed_ids)] = 0
    close(sparse(ours, DOCUMENTS, "document"), documents)
    close(sparse(ours, DOCUMENTS), documents)


def test_queries_need_no_pass(tmp_path):
    encoder = Encoder.load(routed(tmp_path))
    before = encoder.forwards
    sparse(encoder, QUERIES * 300, "query")
    assert encoder.forwards == before
    sparse(encoder, DOCUMENTS)
    assert encoder.forwards > before
    with pytest.raises(EmptyInput):
        sparse(encoder, ["baka", ""], "query")


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_a_splade_without_a_table_and_its_logarithms(tmp_path, activation):
    modules = [masked(tmp_path), SpladePooling("max", activation_function=activation)]
    theirs = SparseEncoder(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    ours = Encoder.load(tmp_path / "saved")
    for kind in ("query", "document", None):
        close(sparse(ours, DOCUMENTS, kind), theirs.encode(DOCUMENTS).to_dense().numpy())


@pytest.mark.parametrize(
    ("name", "logarithms"), [("model", 1), ("opensearch-neural-sparse-encoding-doc-v3-distill", 2)]
)
def test_idf_beside_the_model(tmp_path, name, logarithms):
    folder = tiny.write_family(tmp_path / name, "bert", task="ForMaskedLM")
    tiny.write_json(folder / "idf.json", {"baka": 2.5, "bulo": 1, "no such word": 9, "##a": 0.5})
    encoder = Encoder.load(folder)
    assert encoder.spec.sparse.double_log is (logarithms == 2)
    found = encoder.encode(["baka baka bulo lobe"], ("sparse",), input_type="query").sparse
    assert encoder.tokens(found) == [[("baka", 2.5), ("bulo", 1)]]
    assert read_spec(folder, pooling="cls").role == "embedding"


def test_heads_that_count_on_idf_look_queries_up_on_request(hybrid):
    encoder = Encoder.load(hybrid)
    outputs = ("dense", "sparse")
    before = encoder.forwards
    looked_up = encoder.encode(QUERIES, ("sparse",), query_encoder="table").sparse
    assert encoder.forwards == before
    for spelled, text in zip(encoder.tokens(looked_up), QUERIES, strict=True):
        assert {weight for _, weight in spelled} <= {1}
        assert all(piece.removeprefix("##") in text for piece, _ in spelled)
    both, model = (
        encoder.encode(QUERIES, outputs, query_encoder=kind) for kind in ("table", "model")
    )
    same(both.sparse.to_dense(), looked_up.to_dense())
    close(both.dense, model.dense)
    with pytest.raises(InvalidInput, match="sparse vectors of queries and nothing else"):
        encoder.encode(QUERIES, ("sparse",), input_type="document", query_encoder="table")


def test_a_model_without_a_table_says_so(splade):
    model = Encoder.load(splade, pooling="splade")
    with pytest.raises(UnsupportedHead, match="no table"):
        model.encode(QUERIES, ("sparse",), query_encoder="table")


def test_an_embedding_model_with_such_a_file_embeds(tmp_path):
    folder = tiny.write_bert(tmp_path, pooling=None)
    tiny.write_json(folder / "idf.json", {"baka": 2.5})
    assert not read_spec(folder).is_splade


@pytest.mark.parametrize(
    "structure",
    [
        {"query": ["query_0_SparseStaticEmbedding"]},
        {"query": ["document_1_SpladePooling"], "document": ["query_0_SparseStaticEmbedding"]},
        "none",
    ],
)
def test_other_routes_are_refused(tmp_path, structure):
    folder = routed(tmp_path)
    tiny.edit_json(folder / "router_config.json", structure=structure)
    with pytest.raises(UnsupportedArchitecture, match=r"router_config\.json"):
        read_spec(folder)


def test_a_table_that_is_none(tmp_path):
    folder = routed(tmp_path)
    spec = read_spec(folder)
    place = folder / "query_0_SparseStaticEmbedding"
    save_file({"weight": torch.rand(1000)}, place / "model.safetensors")
    with pytest.raises(WeightMismatch, match="weighs 1000 ids"):
        query_table(spec)
    save_file({"weights": torch.rand(99)}, place / "model.safetensors")
    with pytest.raises(LoadError, match="called `weight`"):
        query_table(spec)
    tiny.write_json(place / "config.json", {"path": "idf.json"})
    tiny.write_json(folder / "idf.json", {"baka": "much"})
    with pytest.raises(LoadError, match="should be a number"):
        query_table(spec)
    tiny.write_json(folder / "idf.json", {"baka": 2})
    table = query_table(spec)
    assert table.sum() == 2


def test_queries_are_read_by_the_tables_own_tokenizer_with_its_prompt(tmp_path):
    folder = routed(tmp_path)
    table = next(file.parent for file in folder.rglob("tokenizer.json") if "query" in str(file))
    tiny.edit_json(table / "tokenizer_config.json", model_max_length=4)
    tiny.edit_json(folder / "config_sentence_transformers.json", prompts={"query": "bulo "})
    ours, theirs = Encoder.load(folder), SparseEncoder(str(folder), device="cpu")
    expected = theirs.encode_query(QUERIES).to_dense().numpy()
    assert (expected != 0).sum(axis=1).max() <= 4
    close(sparse(ours, QUERIES, "query"), expected)


@pytest.mark.parametrize("default", ["query", "document", None])
def test_the_default_route_reads_texts_of_no_type(tmp_path, default):
    folder = routed(tmp_path)
    parameters = {"default_route": default, "allow_empty_key": True}
    tiny.edit_json(folder / "router_config.json", parameters=parameters)
    ours, theirs = Encoder.load(folder), SparseEncoder(str(folder), device="cpu")
    expected = theirs.encode(DOCUMENTS).to_dense().numpy()
    if default == "document":
        expected[:, sorted(ours.spec.removed_ids)] = 0
    close(sparse(ours, DOCUMENTS), expected)


def test_queries_of_the_table_are_cut_as_the_request_says(tmp_path):
    encoder = Encoder.load(routed(tmp_path))
    options = EmbedOptions(input_type="query", max_tokens=1)
    task = Embed(["baka bulo mo"], frozenset({Head.SPARSE}), options)
    (row,) = encoder._run(task, False).sparse.to_dense()
    (whole,) = sparse(encoder, ["baka"], "query")
    assert (row == whole).all()
