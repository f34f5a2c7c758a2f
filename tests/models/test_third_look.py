"""Orders that roundings hide, numbers that are no probabilities, and folders that hold only graphs."""

import logging

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError
from hybridtei.models.checkpoint.spec import read_spec
from tests import tiny, vocabulary
from tests.near import near

QUERY, *DOCUMENTS = dict.fromkeys(vocabulary.texts(18, seed=11))


@pytest.mark.parametrize("lift", [15.0, 40.0])
def test_documents_are_in_the_order_of_their_logits(tmp_path, lift):
    folder = tiny.write_classifier(tmp_path, "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.bias"] += lift
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    encoder = Encoder.load(str(folder))
    served = encoder.rerank(QUERY, DOCUMENTS)
    raw = encoder.rerank(QUERY, DOCUMENTS, raw_scores=True)
    assert len({row.score for row in served}) < len({row.score for row in raw})
    assert [row.index for row in served] == [row.index for row in raw]


def test_equal_logits_are_in_reverse_order(tmp_path):
    encoder = Encoder.load(str(tiny.write_classifier(tmp_path, "bert")))
    assert [row.index for row in encoder.rerank(QUERY, ["baka"] * 4)] == [3, 2, 1, 0]


@pytest.mark.parametrize("labels", [1, 3])
def test_a_regression_gives_its_numbers(tmp_path, labels):
    folder = tiny.write_classifier(tmp_path, "bert", labels, problem_type="regression")
    encoder = Encoder.load(str(folder))
    raw = encoder.classify(DOCUMENTS, raw_scores=True)
    assert encoder.classify(DOCUMENTS) == raw
    assert np.abs([row.score for rows in raw for row in rows]).max() > 0


def test_numbers_may_name_labels(tmp_path):
    folder = tiny.write_classifier(tmp_path, "bert", 2)
    tiny.edit_json(folder / "config.json", id2label={"0": 0, "1": 7})
    assert read_spec(folder).labels == ("0", "7")


def test_a_prompt_that_is_null_is_none(tmp_path):
    folder = tiny.write_bert(tmp_path)
    prompts = {"query": None, "document": "title: "}
    tiny.write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    assert read_spec(folder).prompts == {"query": "", "document": "title: "}


def test_another_similarity_than_the_cosine_is_told(tmp_path, caplog):
    folder = tiny.write_bert(tmp_path)
    file = folder / "config_sentence_transformers.json"
    for name, count in (("cosine", 0), ("dot", 1)):
        tiny.write_json(file, {"similarity_fn_name": name})
        with caplog.at_level(logging.WARNING):
            read_spec(folder)
        assert caplog.text.count("use the cosine") == count


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("onnx/model_quantized", "--dtype int8"),
        ("onnx/model_qint8_avx512_vnni", "--dtype int8"),
        ("model_uint8", "--dtype int8"),
        ("onnx/model_fp16", "not a graph in float32 or int8"),
        ("onnx/model_O4", "not a graph in float32 or int8"),
    ],
)
def test_a_graph_that_does_not_run_as_asked_is_named(tmp_path, name, text):
    folder = tiny.write_bert(tmp_path)
    (folder / "model.safetensors").unlink()
    graph = folder / f"{name}.onnx"
    graph.parent.mkdir(exist_ok=True)
    graph.write_bytes(b"graph")
    with pytest.raises(LoadError, match=text) as refused:
        Encoder.load(str(folder), backend="auto")
    assert graph.name in str(refused.value)


@pytest.mark.parametrize("trusted", [False, True])
def test_an_activation_that_is_not_torchs_is_tanh_unless_trusted(tmp_path, trusted):
    activation = "transformers.activations.GELUActivation"
    folder = tiny.write_bert(tmp_path, pooling=None)
    tiny.write_modules(folder, dense=[(tiny.HIDDEN, 8, activation)])
    encoder = Encoder.load(str(folder), trust_remote_code=trusted, measures=False)
    theirs = SentenceTransformer(str(folder), device="cpu", trust_remote_code=trusted)
    ours = encoder.encode(DOCUMENTS, normalize=False).dense
    near(ours, theirs.encode(DOCUMENTS), 1e-5)
