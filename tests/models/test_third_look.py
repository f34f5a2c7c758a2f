"""Orders that roundings hide, numbers that are no probabilities, and folders that hold only
graphs."""

import pytest

from conformance.small import tiny, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError
from hybridtei.models.checkpoint.spec import read_spec

QUERY, *DOCUMENTS = dict.fromkeys(vocabulary.texts(18, seed=11))


@pytest.mark.parametrize("lift", [15.0, 40.0])
def test_documents_are_in_the_order_of_their_logits(tmp_path, lift):
    name = "classifier.bias"
    folder = tiny.change(
        tiny.write_classifier(tmp_path, "bert"),
        lambda tensors: {**tensors, name: tensors[name] + lift},
    )
    encoder = Encoder.load(folder)
    served = encoder.rerank(QUERY, DOCUMENTS)
    raw = encoder.rerank(QUERY, DOCUMENTS, raw_scores=True)
    assert len({row.score for row in served}) < len({row.score for row in raw})
    assert [row.index for row in served] == [row.index for row in raw]


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
        read_spec(folder)
        assert caplog.text.count("use the cosine") == count


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("onnx/model_quantized", "--dtype int8"),
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
        Encoder.load(folder, backend="auto")
    assert graph.name in str(refused.value)
