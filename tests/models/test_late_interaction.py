"""ColBERT in its three layouts against sentence-transformers' MultiVectorEncoder: vectors, scores,
order."""

import string

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import (
    HierarchicalTokenPooling,
    MultiVectorMask,
)

from conformance.small import tiny, tolerances, vocabulary
from conformance.small.saved import DIM, pylate, stanford, with_markers
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, UnsupportedHead
from tests.models.refused import chained, refuses
from tests.near import near, same
from tests.sampled import paired

QUERIES = ["baka", "baka? bulo, lolo.", *vocabulary.texts(4, seed=9), "bulo " * 60]
DOCUMENTS = [
    *dict.fromkeys(
        [*vocabulary.texts(20, seed=8), "baka, bake. bulo?", "mo " * 300, "naku. " * 100]
    )
]
TOLERANCE = tolerances.MULTIVECTOR["float32"] * 5
EXPANSIONS = {
    "none": None,
    "fixed": {"strategy": "fixed", "length": 24},
    "fixed, attended": {"strategy": "fixed", "length": 24, "attend": True},
    "min": {"strategy": "min", "length": 16},
    "min, attended": {"strategy": "min", "length": 16, "attend": True},
}


def saved(
    folder,
    model_type,
    expansion,
    *,
    pooling=None,
    **mask,
):
    """As sentence-transformers 6 saves a late-interaction model."""
    base = with_markers(tiny.write_family(folder / "base", model_type), "[Q] ", "[D] ")
    transformer = Transformer(str(base), document_length=40, query_expansion=expansion)
    torch.manual_seed(1)
    dense = Dense(
        tiny.HIDDEN,
        DIM,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [
        transformer,
        dense,
        MultiVectorMask(**mask),
        Normalize(module_input_name="token_embeddings"),
    ]
    modules += [] if pooling is None else [pooling]
    prompts = {"query": "[Q] ", "document": "[D] "}
    model = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    model.save(str(folder / "saved"))
    return folder / "saved"


def agree(folder):
    """Same vectors on both sides, same scores, same order."""
    ours, theirs = Encoder.load(folder), MultiVectorEncoder(str(folder), device="cpu")
    assert ours.spec.heads == {"multivector", "tokens"}
    asked = theirs.encode_query(QUERIES)
    given = theirs.encode_document(DOCUMENTS)
    for kind, texts, expected in (("query", QUERIES, asked), ("document", DOCUMENTS, given)):
        found = ours.encode(texts, ("multivector",), input_type=kind).multivector
        for text, one, other in zip(texts, found, expected, strict=True):
            assert one.shape == tuple(other.shape), text
            near(one, other, TOLERANCE)
    for place, query in enumerate(QUERIES):
        wanted = theirs.similarity([asked[place]], given)[0].numpy()
        ranked = ours.rerank(query, DOCUMENTS)
        in_order = wanted[[one.index for one in ranked]]
        near([one.score for one in ranked], in_order, 32 * TOLERANCE)
        assert (np.diff(in_order) <= 32 * TOLERANCE).all()


@pytest.mark.parametrize(
    ("expansion", "model_type"),
    paired([*EXPANSIONS], ["bert", "distilbert", "modernbert", "xlm-roberta"]),
)
def test_what_sentence_transformers_saves(tmp_path, model_type, expansion):
    agree(
        saved(tmp_path, model_type, EXPANSIONS[expansion], skiplist_words=list(string.punctuation))
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_factor": 2.0},
        {"pool_factor": 3.5, "num_protected_tokens": 0, "normalize_embeddings": False},
        {"pool_factor": 2, "num_protected_tokens": 3, "tasks": ["query", "document"]},
    ],
)
def test_declared_pooling_of_tokens(tmp_path, settings):
    agree(saved(tmp_path, "bert", None, pooling=HierarchicalTokenPooling(**settings)))


def test_pooling_that_cannot_be_read_is_refused(tmp_path):
    folder = saved(tmp_path, "bert", None, pooling=HierarchicalTokenPooling(2.0))
    tiny.edit_json(next(folder.glob("*_HierarchicalTokenPooling")) / "config.json", pool_factor=0.5)
    refuses(folder, LoadError, "pool_factor")


@pytest.mark.parametrize("tasks", [["query", "document"], ["query"], None])
def test_the_sides_that_skip(tmp_path, tasks):
    agree(
        saved(
            tmp_path,
            "bert",
            EXPANSIONS["fixed"],
            skiplist_words=["baka", ".", "none of these"],
            skiplist_tasks=tasks,
        )
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"skiplist_words": ["baka", ","]},
        {"query_length": 6, "document_length": 9},
    ],
)
def test_what_pylate_saves(tmp_path, settings):
    agree(pylate(tmp_path, **settings))


@pytest.mark.parametrize(
    "metadata",
    [
        {
            "query_token_id": "[unused0]",
            "doc_token_id": "[unused1]",
            "query_maxlen": 20,
            "doc_maxlen": 48,
            "mask_punctuation": True,
        },
        {"query_maxlen": 20, "doc_maxlen": 48, "mask_punctuation": False},
    ],
)
def test_what_stanford_saves(tmp_path, metadata):
    agree(stanford(tmp_path, **metadata))


def test_an_empty_document_ranks_last_and_an_input_without_a_type_is_a_document(
    tmp_path,
):
    encoder = Encoder.load(pylate(tmp_path))
    plain, document = (
        encoder.encode(["baka, bulo"], ("multivector",), input_type=kind).multivector
        for kind in (None, "document")
    )
    same(plain.values, document.values)
    assert len(encoder.rerank("baka", ["", "baka"])) == 2
    with pytest.raises(UnsupportedHead, match="no `dense` output"):
        encoder.encode("baka")


@pytest.mark.parametrize(("name", "value"), [("query_length", 0), ("document_length", "long")])
def test_settings_that_are_none(tmp_path, name, value):
    refuses(pylate(tmp_path, **{name: value}), LoadError, name)


def test_what_is_not_served_is_refused_by_name(tmp_path):
    folder = saved(tmp_path, "bert", None)
    tiny.edit_json(folder / "2_MultiVectorMask" / "config.json", keep_only_token_ids=[5])
    refuses(folder, UnsupportedArchitecture, "keep_only_token_ids")
    tiny.edit_json(folder / "2_MultiVectorMask" / "config.json", keep_only_token_ids=None)
    tiny.edit_json(folder / "1_Dense" / "config.json", use_residual=True)
    refuses(folder, UnsupportedArchitecture, "residual")
    chained(folder, "Dense", "MultiVectorMask", "LambdaTokenPooling")
    refuses(folder, UnsupportedArchitecture, "LambdaTokenPooling")


def test_a_projection_that_is_not_there(tmp_path):
    folder = tiny.without(stanford(tmp_path), "linear.weight")
    refuses(folder, MissingArtifact, r"linear\.weight")
