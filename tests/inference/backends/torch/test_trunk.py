"""Trunks of torch: padding ids that count as no position, weights that are left over, and rotary
embeddings that follow the length: no text depends on those beside it, before it, or in another
thread. Families: tests/models/families."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from conformance.families.oracle import alone, reference
from conformance.small import tiny
from hybridtei.batch import Encoding
from hybridtei.errors import WeightMismatch
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.trunk import forget_lengths
from hybridtei.inference.backends.weights import left_over
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import near as close
from tests.inference.backends.outputs import random_encodings, states


def hidden_of(backend, encodings):
    return [*states(backend, encodings)]


@pytest.mark.parametrize("model_type", ["xlm-roberta", "roberta", "camembert", "mpnet"])
def test_a_padding_id_inside_a_text_does_not_count_as_a_position(tmp_path, model_type):
    """The configuration's, or where it names none, transformers' own."""
    folder = tiny.write_family(tmp_path, model_type)
    padding = read_spec(folder, pooling="mean").config["pad_token_id"]
    encodings = [
        Encoding(np.array(ids))
        for ids in ([0, padding, 9, 10, padding, padding, 11, 2], [0, 9, 2], [padding, 9])
    ]
    for told in (padding, ...):
        tiny.configured(folder, pad_token_id=told)
        backend = TorchBackend(read_spec(folder, pooling="mean"))
        close(np.concatenate(hidden_of(backend, encodings)), reference(folder, encodings))


@pytest.mark.parametrize(
    ("model_type", "task", "changes", "left"),
    [
        ("bert", "Model", {"num_hidden_layers": 1}, r"encoder\.layer\.1\."),
        ("qwen3", "ForCausalLM", {"num_hidden_layers": 1, "layer_types": None}, r"layers\.1\."),
        ("distilbert", "ForMaskedLM", {"n_layers": 1}, r"transformer\.layer\.1\."),
    ],
)
def test_a_trunk_weight_that_is_left_over_is_an_error_that_names_it(
    tmp_path, model_type, task, changes, left
):
    folder = tiny.write_family(tmp_path, model_type, task=task)
    # Whatever else the task's head brings along may stay unused
    TorchBackend(read_spec(folder, pooling="mean"))
    tiny.configured(folder, **changes)
    with pytest.raises(WeightMismatch, match=rf"{folder}.*{left}"):
        TorchBackend(read_spec(folder, pooling="mean"))


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("embeddings.position_ids", True),
        ("encoder.layer.0.rotary_emb.inv_freq", True),
        ("cls.seq_relationship.weight", True),
        ("pooler.dense.weight", True),
        ("embeddings.segment_embeddings.weight", False),
        ("encoder.layer.0.attention.self.distance_embedding.weight", False),
        ("encoder.layer.1.attention.self.query.lora_A.weight", False),
    ],
)
def test_buffers_and_heads_may_be_left_over_a_table_or_an_adapter_may_not(name, may):
    assert left_over([name], Path()) == ([] if may else [name])


# Positions the model was trained with at first: longer texts take other frequencies
ORIGINAL = 32
LENGTHS_AROUND = (7, 200, ORIGINAL, ORIGINAL + 1, 60, 3)
HALF = tiny.HIDDEN // 4 // 2
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + 3 * i for i in range(HALF)],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MODELS = {
    "longrope": ("qwen2", {"rope_parameters": LONG, "max_position_embeddings": 256}),
    "dynamic": ("qwen2", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    "longrope of one kind of layer": (
        "modernbert",
        {
            "rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN},
            "max_position_embeddings": 256,
        },
    ),
    "dynamic, encoder": (
        "nomic_bert",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    model_type, settings = MODELS[request.param]
    return tiny.write_family(tmp_path_factory.mktemp("rope"), model_type, **settings)


def around(backend):
    """Without token types, which transformers takes for zeros."""
    return [Encoding(text.input_ids) for text in random_encodings(backend.spec, LENGTHS_AROUND)]


@pytest.fixture
def backend(folder):
    """Families refuse such embeddings, so transformers' own modules run them."""
    return TorchBackend(read_spec(folder, pooling="mean"))


def test_a_text_alone_equals_it_beside_a_long_one(folder, backend):
    texts = around(backend)
    together = hidden_of(backend, texts)
    for text, row in zip(texts, together, strict=True):
        fresh = AutoModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        close(row, alone(fresh, [text])[0])
        close(row, hidden_of(backend, [text])[0])
    for row, again in zip(together[::-1], hidden_of(backend, texts[::-1]), strict=True):
        close(row, again)


def test_threads_do_not_see_each_others_lengths(backend):
    texts = around(backend)
    expected = [hidden_of(backend, [text])[0] for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda place: hidden_of(backend, [texts[place % len(texts)]])[0], range(60))
        )
    for place, row in enumerate(found):
        close(row, expected[place % len(texts)])


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_other_models_go_together(tmp_path, model_type):
    model = AutoModel.from_pretrained(tiny.write_family(tmp_path, model_type))
    assert not forget_lengths(model)


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("crf.transitions", True),
        ("lstm.weight_ih_l0", True),
        ("latent_attention_model.latents", True),
        ("score.weight", False),
        ("lm_head.weight", False),
        ("classifier.weight", False),
    ],
)
def test_layers_of_no_known_name_are_named(tmp_path, caplog, name, is_named):
    assert left_over([name], tmp_path) == []
    assert any(name in message for message in caplog.messages) == is_named
