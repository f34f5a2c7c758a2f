"""Whole checkpoints against sentence-transformers and definitions of outputs; the embedded model
against its upstream."""

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from conformance.small import tiny, tolerances
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.models.checkpoint.files import EMBEDDED_HEADS
from tests.encoder.vectors import EVERYTHING, TEXTS, close, dense_of
from tests.models.upstream import upstream_folder
from tests.sampled import sampled

PROMPTS = {"query": "baka bake ", "document": ""}
CRANFIELD = Path(__file__).parents[3] / "shared" / "data" / "cranfield" / "corpus.jsonl"


@pytest.mark.parametrize(
    "settings", [{"default_prompt_name": "query"}, {"default_prompt": PROMPTS["query"]}]
)
def test_a_default_prompt_is_put_before_every_text(tmp_path, settings):
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), prompts=PROMPTS)
    ours = Encoder.load(str(folder), engine=EngineConfig(**settings))
    close(
        dense_of(ours),
        dense_of(ours, [PROMPTS["query"] + text for text in TEXTS], prompt_name="document"),
    )


def test_the_checkpoints_default_prompt_is_put_before_texts_that_name_no_other(
    tmp_path,
):
    folder = tiny.write_modules(
        tiny.write_family(tmp_path, "bert"), prompts=PROMPTS, default_prompt_name="query"
    )
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), Encoder.load(str(folder))
    close(dense_of(ours, normalize=False), theirs.encode(TEXTS))
    close(
        dense_of(ours, normalize=False, prompt_name="document"),
        theirs.encode(TEXTS, prompt_name="document"),
    )
    for side, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        close(dense_of(ours, normalize=False, input_type=side), encode(TEXTS))
    ours = Encoder.load(str(folder), default_prompt="")
    close(dense_of(ours, normalize=False), theirs.encode(TEXTS, prompt=""))


@pytest.mark.parametrize(
    ("default", "of_queries", "of_documents"),
    [("s2p", None, None), ("query", "query", None), ("passage", None, "passage")],
)
def test_a_default_prompt_is_for_inputs_of_a_type_without_a_prompt(
    tmp_path, default, of_queries, of_documents
):
    folder = tiny.write_modules(
        tiny.write_family(tmp_path, "bert"),
        prompts={default: "lolo mo"},
        default_prompt_name=default,
    )
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), Encoder.load(str(folder))
    for side, name in (("query", of_queries), ("document", of_documents)):
        expected = theirs.encode(TEXTS, prompt_name=name, prompt=None if name else "")
        close(dense_of(ours, normalize=False, input_type=side), expected)


@pytest.mark.parametrize(
    "names", [("document", "passage"), ("passage", "corpus"), ("corpus", "retrieval.passage")]
)
def test_documents_have_the_first_prompt_that_sentence_transformers_tries(tmp_path, names):
    prompts = {name: f"{'lolo ' * place}mo" for place, name in enumerate(reversed(names), 1)}
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), prompts=prompts)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, prompt_name=names[0])
    close(dense_of(Encoder.load(str(folder)), normalize=False, input_type="document"), expected)


@pytest.mark.parametrize("dimensions", [1, 7, tiny.HIDDEN])
def test_cut_vectors_are_cut_first_and_normalised_then(bert, dimensions):
    theirs = SentenceTransformer(str(bert), device="cpu", truncate_dim=dimensions).encode(
        TEXTS, normalize_embeddings=True
    )
    close(
        dense_of(Encoder.load(str(bert)), dimensions=dimensions),
        theirs,
        tolerances.UNIT["float32"] * 3,
    )


def test_a_pooling_without_the_prompt_is_served_where_there_is_none(tmp_path):
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), prompts=PROMPTS)
    tiny.edit_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), Encoder.load(str(folder))
    close(dense_of(ours, normalize=False), theirs.encode(TEXTS))
    close(dense_of(ours, normalize=False, input_type="document"), theirs.encode_document(TEXTS))
    with pytest.raises(InvalidInput, match="include_prompt"):
        ours.encode(TEXTS, input_type="query")
    with pytest.raises(LoadError, match="include_prompt"):
        Encoder.load(str(folder), default_prompt="baka ")
    tiny.edit_json(folder / "config_sentence_transformers.json", default_prompt_name="query")
    with pytest.raises(LoadError, match="--default-prompt"):
        Encoder.load(str(folder))


def test_m3_outputs_equal_the_definition(m3):
    encoder = Encoder.load(str(m3))
    raw = encoder.encode(TEXTS, outputs=("tokens", "sparse", "multivector", "dense"))
    from hybridtei.models.checkpoint.weights import Weights

    opened = (Weights.of_file(m3 / f"{name}_linear.pt") for name in ("sparse", "colbert"))
    sparse, colbert = ({name: one.float32(name) for name in ("weight", "bias")} for one in opened)
    ids = AutoTokenizer.from_pretrained(m3)(TEXTS)["input_ids"]
    assert raw.sparse.width == encoder.spec.vocab_size
    for i, (row, hidden) in enumerate(zip(ids, raw.tokens, strict=True)):
        weights = np.maximum(hidden @ sparse["weight"][0] + sparse["bias"], 0)
        lexical = {}
        for token, weight in zip(row, weights.tolist(), strict=True):
            if token not in (0, 1, 2, 3) and weight > 0:
                lexical[token] = max(lexical.get(token, 0.0), weight)
        indices, values = raw.sparse.row(i)
        assert indices.tolist() == sorted(lexical)
        close(values, np.array([lexical[token] for token in sorted(lexical)], dtype=np.float32))
        vectors = hidden[1:] @ colbert["weight"].T + colbert["bias"]
        close(raw.multivector.row(i), vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
        assert len(raw.multivector.row(i)) == len(row) - 1
        close(
            raw.dense[i] if raw.dense is not None else np.empty(0),
            hidden[0] / np.linalg.norm(hidden[0]),
        )


@pytest.mark.parametrize("name", ["m3", "hybrid"])
def test_a_text_of_unknown_tokens_has_an_empty_sparse_vector(request, name):
    encoder = Encoder.load(str(request.getfixturevalue(name)))
    found = encoder.encode(["漢字", "baka bulo"], outputs=EVERYTHING)
    assert len(found.sparse.row(0)[0]) == 0
    assert len(found.sparse) == 2


def test_one_token_has_no_vector_in_m3_and_is_fine_between_others(m3):
    found = Encoder.load(str(m3)).encode([[5], "baka", [6]], outputs=EVERYTHING)
    assert found.multivector.lengths.tolist() == [0, 2, 0]
    assert Encoder.load(str(m3)).encode(
        [[5]], outputs=["multivector"]
    ).multivector.lengths.tolist() == [0]


@pytest.fixture(scope="module")
def embedded():
    if not EMBEDDED_HEADS.exists():
        pytest.skip(
            "hybridtei/models/heads/minilm_hybrid.safetensors is not there: its heads have not been trained"
        )
    return Encoder.load()


@pytest.fixture(scope="module")
def abstracts():
    if not CRANFIELD.exists():
        pytest.skip("the collection of abstracts lies in ../shared/data, which this checkout lacks")
    return [json.loads(line) for line in CRANFIELD.read_text(encoding="utf-8").splitlines()[:180]]


@pytest.mark.parametrize(("texts", "titles"), sampled([(2, 30), (20, 180)], {(2, 30)}))
def test_the_embedded_models_dense_vectors_are_the_upstream_ones(
    embedded, abstracts, texts, titles
):
    theirs = SentenceTransformer(str(upstream_folder()), device="cpu")
    inputs = [
        *(one["text"] for one in abstracts[:texts]),
        *(one["title"] for one in abstracts[:titles]),
    ]
    expected = theirs.encode(inputs, batch_size=16, normalize_embeddings=True)
    cosines = (dense_of(embedded, inputs) * expected).sum(1)
    assert len(cosines) == texts + titles
    assert cosines.min() > tolerances.COSINE


def test_tokens_spells_sparse_vectors(m3):
    encoder = Encoder.load(str(m3))
    vectors = encoder.encode(TEXTS, outputs=["sparse"]).sparse
    for row, spelled in enumerate(encoder.tokens(vectors)):
        assert [weight for _, weight in spelled] == sorted(vectors.row(row)[1], reverse=True)
        words = {piece.removeprefix("▁") for piece, _ in spelled}
        assert all(word in TEXTS[row] or word == "<unk>" for word in words)
