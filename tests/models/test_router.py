"""A small model that reads queries and a large one that reads documents, against the Router of
sentence-transformers."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from conformance.families.oracle import open_engine
from conformance.small import tiny, vocabulary
from hybridtei.batch import Encoding, Head
from hybridtei.encoder import Encoder
from hybridtei.errors import (
    InvalidInput,
    LoadError,
    UnsupportedArchitecture,
    UnsupportedHead,
    WeightMismatch,
)
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.fingerprint import fingerprint
from tests.inference.backends.outputs import run
from tests.near import near

TEXTS = [*dict.fromkeys(vocabulary.texts(12, seed=7))]
TOLERANCE = 1e-5
WIDTH, NARROW = 20, 16


def route(folder, model_type, width=WIDTH, **settings):
    hidden = settings.get("hidden_size", tiny.HIDDEN)
    base = tiny.write_family(folder, model_type, **settings)
    dense = Dense(hidden, width, activation_function=torch.nn.Identity())
    torch.nn.init.normal_(dense.linear.weight, generator=torch.Generator().manual_seed(hidden))
    return [Transformer(str(base)), Pooling(hidden, "mean"), dense]


def saved(
    folder,
    *,
    query_width=WIDTH,
    after=(),
    **options,
):
    """As LEAF's models are built: RoBERTa's positions, which begin elsewhere, for documents, a
    narrower BERT for queries."""
    router = Router.for_query_document(
        query_modules=route(
            folder / "small",
            "distilbert",
            query_width,
            dim=NARROW,
            hidden_size=NARROW,
            hidden_dim=24,
        ),
        document_modules=route(folder / "large", "roberta"),
        **options,
    )
    prompts = {"query": "bake: ", "document": "lolo "}
    SentenceTransformer(modules=[router, *after], prompts=prompts, device="cpu").save_pretrained(
        str(folder / "saved")
    )
    return folder / "saved"


def dense(encoder, texts, **options):
    return encoder.encode(texts, normalize=False, **options).dense


def close(one, other):
    near(one, other, TOLERANCE)


@pytest.mark.parametrize("backend", ["ort", "openvino", "torch"])
def test_both_routes_are_theirs(tmp_path, backend):
    folder = saved(tmp_path)
    ours, theirs = (
        Encoder.load(folder, backend=backend),
        SentenceTransformer(str(folder), device="cpu"),
    )
    assert ours.spec.heads == {Head.DENSE}
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    assert np.abs(queries - documents).max() > 0.1
    close(dense(ours, TEXTS, input_type="query"), queries)
    close(dense(ours, TEXTS, input_type="document"), documents)
    close(dense(ours, TEXTS, prompt_name="query"), queries)
    with pytest.raises(UnsupportedHead, match="no `tokens` output"):
        ours.encode(TEXTS, ("tokens",))


@pytest.mark.parametrize("default", ["query", "document", None])
def test_a_text_of_no_kind_takes_the_default_route(tmp_path, default):
    folder = saved(tmp_path, default_route=default, after=(Normalize(),))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    ours = Encoder.load(folder).encode(TEXTS).dense
    close(ours, theirs)


def test_without_a_default_the_error_names_what_is_missing(tmp_path):
    folder = saved(tmp_path)
    tiny.edit_json(
        folder / "router_config.json", parameters={"default_route": None, "allow_empty_key": False}
    )
    encoder = Encoder.load(folder)
    with pytest.raises(InvalidInput, match=r"`input_type` is missing: .* no `default_route`"):
        encoder.encode(TEXTS)


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_one_batch_holds_queries_and_documents(tmp_path, backend):
    opened = open_engine(backend, read_spec(saved(tmp_path)))
    ids = [np.array([5 + place, 9, 7][: 1 + place % 3]) for place in range(7)]
    texts = [Encoding(one, route=place % 2) for place, one in enumerate(ids)]
    together = run(opened, texts).dense
    for place, text in enumerate(texts):
        close(together[place], run(opened, [text]).dense[0])
    assert texts[0].key != Encoding(ids[0], route=1).key


def test_both_models_are_in_the_fingerprint(tmp_path):
    folder = saved(tmp_path)
    before = fingerprint(read_spec(folder))["model"]
    (file,) = (folder / "query_0_Transformer").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    assert fingerprint(read_spec(folder))["model"] != before


def test_routes_of_two_widths_are_refused(tmp_path):
    with pytest.raises(WeightMismatch, match="queries have 21 numbers, those of documents 20"):
        read_spec(saved(tmp_path, query_width=21))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"parameters": {"default_route": "neither"}}, LoadError, "`default_route` is 'neither'"),
        (
            {"parameters": {"route_mappings": {"('query', 'text')": "query"}}},
            UnsupportedArchitecture,
            "`route_mappings`",
        ),
        (
            {
                "structure": {
                    "query": ["query_0_Transformer"],
                    "document": ["document_0_Transformer"],
                }
            },
            UnsupportedArchitecture,
            "route",
        ),
        ({"structure": {"query": [], "document": 5}}, LoadError, "`structure`"),
    ],
)
def test_other_routers_are_refused(tmp_path, changes, error, words):
    folder = saved(tmp_path)
    tiny.edit_json(folder / "router_config.json", **changes)
    with pytest.raises(error, match=words):
        read_spec(folder)
