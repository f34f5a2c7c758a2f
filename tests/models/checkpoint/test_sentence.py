"""Settings of sentence-transformers' own files that change vectors: served as it serves them, or
refused by name."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer, SparseEncoder

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidDimensions, LoadError, MissingArtifact, UnsupportedArchitecture
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.fingerprint import fingerprint
from tests.inference.test_inference_free import routed
from tests.models.refused import chained, listed, raised
from tests.near import near

TEXTS = vocabulary.texts(12, seed=5)
MODEL, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"


def close(ours, theirs, tolerance=tolerances.WEIGHTS["float32"]):
    near(ours, theirs, tolerance)


def dense_of(folder, **options):
    dense = Encoder.load(folder, **options).encode(TEXTS, normalize=False).dense
    return dense


def agrees(folder):
    close(dense_of(folder), SentenceTransformer(str(folder), device="cpu").encode(TEXTS))


def with_settings(folder, **settings):
    tiny.write_json(
        folder / TRANSFORMER,
        {"max_seq_length": vocabulary.LONGEST, "do_lower_case": False, **settings},
    )
    return folder


@pytest.mark.parametrize("size", [7, 1000])
def test_dense_vectors_are_cut_as_the_checkpoint_says(folder, size):
    tiny.write_json(folder / MODEL, {"truncate_dim": size})
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), Encoder.load(folder)
    width = min(size, tiny.HIDDEN)
    assert ours.spec.dense_width == width
    close(dense_of(folder), theirs.encode(TEXTS))
    dense = ours.encode(TEXTS).dense
    close(dense, theirs.encode(TEXTS, normalize_embeddings=True), 3 * tolerances.UNIT["float32"])
    cut = ours.encode(TEXTS, normalize=False, dimensions=3).dense
    close(cut, theirs.encode(TEXTS, truncate_dim=3))
    with pytest.raises(InvalidDimensions):
        ours.encode(TEXTS, dimensions=width + 1)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
@pytest.mark.parametrize("key", ["truncate_dim", "max_active_dims"])
def test_a_size_that_is_none_is_refused(bert, splade, copied, key, size):
    folder = copied(bert if key == "truncate_dim" else splade)
    tiny.write_json(folder / MODEL, {key: size})
    options = {} if key == "truncate_dim" else {"pooling": "splade"}
    assert key in raised(LoadError, folder, MODEL, **options)


@pytest.mark.parametrize("most", [1, 9, 10_000])
def test_sparse_vectors_keep_as_many_weights_as_the_checkpoint_says(splade, tmp_path, most):
    SparseEncoder(str(splade), device="cpu", max_active_dims=most).save_pretrained(str(tmp_path))
    theirs = SparseEncoder(str(tmp_path), device="cpu").encode(TEXTS).to_dense().numpy()
    ours = Encoder.load(tmp_path).encode(TEXTS, ("sparse",)).sparse
    close(ours.to_dense(), theirs)
    assert np.diff(ours.indptr).max() <= most


def test_looked_up_queries_keep_as_many_too(tmp_path):
    folder = routed(tmp_path)
    tiny.edit_json(folder / MODEL, max_active_dims=3)
    theirs = SparseEncoder(str(folder), device="cpu").encode_query(TEXTS).to_dense().numpy()
    ours = Encoder.load(folder).encode(TEXTS, ("sparse",), input_type="query").sparse
    close(ours.to_dense(), theirs)


@pytest.mark.parametrize("part", ["text", "common"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "qwen3"])
def test_texts_without_special_tokens(tmp_path, model_type, part):
    folder = tiny.write_modules(tiny.write_family(tmp_path, model_type), pooling="mean")
    plain = dense_of(folder)
    with_settings(
        folder,
        processing_kwargs={
            part: {"add_special_tokens": False, "padding": "longest", "truncation": True}
        },
    )
    agrees(folder)
    assert model_type == "qwen3" or np.abs(dense_of(folder) - plain).max() > 0.01


def gives(output, method="forward", kind="text"):
    """What a method of the model gives for inputs of a kind."""
    return {"modality_config": {kind: {"method": method, "method_output_name": output}}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processing_kwargs": {"text": {"max_length": 9}}}, "text.max_length is 9"),
        ({"processing_kwargs": {"common": {"truncation": False}}}, "common.truncation is False"),
        (
            {"processing_kwargs": {"text": {"return_token_type_ids": False}}},
            "text.return_token_type_ids",
        ),
        (gives("last_hidden_state", method="encode"), "`encode`"),
        (gives("pooler_output"), "pooler_output"),
        (gives(["hidden_states", 1]), "hidden_states"),
        (gives("logits", kind="message"), "logits"),
    ],
)
def test_a_setting_that_is_not_served_is_named(bert, copied, settings, words):
    assert words in raised(
        UnsupportedArchitecture, with_settings(copied(bert), **settings), TRANSFORMER
    )


@pytest.mark.parametrize(
    "settings",
    [{"processing_kwargs": 5}, {"processing_kwargs": {"text": []}}, {"modality_config": [1]}],
)
def test_a_setting_of_another_shape_is_refused(bert, copied, settings):
    raised(LoadError, with_settings(copied(bert), **settings), TRANSFORMER)


def test_a_prompt_without_end_is_refused(folder):
    """It goes before each text of a request."""
    tiny.write_json(folder / MODEL, {"prompts": {"query": "x" * 20_000}})
    assert "at most 16384 characters" in raised(LoadError, folder, MODEL)


@pytest.mark.parametrize("output", ["last_hidden_state", ["hidden_states", -1]])
def test_the_last_states_are_served_by_either_name(bert, copied, output):
    settings = {**gives(output), "module_output_name": "token_embeddings"}
    folder = with_settings(copied(bert), **settings)
    agrees(folder)


def test_a_default_prompt_of_a_model_that_scores_is_left_out_and_named(tmp_path, caplog):
    folder = tiny.write_classifier(tmp_path, "bert")
    for prompt, lines in (("", 0), ("lolo mo ", 1)):
        tiny.write_json(folder / MODEL, {"prompts": {"web": prompt}, "default_prompt_name": "web"})
        assert read_spec(folder).default_prompt_name is None
        assert len([line for line in caplog.messages if "'web'" in line]) == lines


@pytest.mark.parametrize(
    ("name", "settings", "is_new"),
    [
        (MODEL, {"prompts": {"passage": "p: "}}, True),
        (MODEL, {"prompts": {"s2p": "s: "}, "default_prompt_name": "s2p"}, False),
        (MODEL, {"prompts": {"query": "s: "}, "default_prompt_name": "query"}, True),
        (MODEL, {"prompts": {"document": "d: ", "passage": "p: "}}, False),
        (TRANSFORMER, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, True),
    ],
)
def test_what_is_newly_used_is_in_the_fingerprint(folder, name, settings, is_new):
    tiny.write_json(folder / name, settings)
    assert ("reading" in fingerprint(read_spec(folder))) is is_new


def test_numbers_of_weights_are_in_the_fingerprint(splade, copied):
    folder, found = copied(splade), []
    for settings in ({}, {"max_active_dims": 9}):
        tiny.write_json(folder / MODEL, settings)
        found.append(fingerprint(read_spec(folder, pooling="splade"))["pooling"])
    assert found == ["splade", "splade of 9"]


def test_a_folder_that_modules_do_not_list_is_not_read(folder):
    tiny.write_dense(folder / "2_Dense", tiny.HIDDEN, 12)
    assert read_spec(folder).dense_width == tiny.HIDDEN
    listed(folder, Transformer="")
    assert (folder / "1_Pooling" / "config.json").exists()
    assert "--pooling" in raised(MissingArtifact, folder, "modules.json")
    assert read_spec(folder, pooling="max").pooling == ("max",)


MESSAGE = {
    kind: {"method": "forward", "method_output_name": "last_hidden_state"}
    for kind in ("text", "message")
}


@pytest.mark.parametrize("name", ["bert", "splade", "reranker"])
def test_texts_that_are_rendered_as_messages_are_refused(request, copied, tmp_path, name):
    """sentence-transformers 6 renders every text by the chat template, if the base had one."""
    if name == "reranker":
        folder = tiny.write_classifier(tmp_path, "bert")
    else:
        folder = copied(request.getfixturevalue(name))
    chain = {"bert": ["Pooling"], "splade": ["SpladePooling"], "reranker": []}[name]
    read_spec(chained(folder, *chain))
    with_settings(folder, modality_config=MESSAGE)
    assert "`message`" in raised(UnsupportedArchitecture, folder, TRANSFORMER)
