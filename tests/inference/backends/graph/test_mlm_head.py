"""SPLADE on the host against torch; heads that are incomplete or another model's are refused."""

import pytest
import torch

from conformance.families.oracle import open_engine
from conformance.small import tiny, tolerances
from conformance.small.tiny import change
from hybridtei.errors import WeightMismatch
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import random_encodings, run
from tests.near import near

BIAS = "cls.predictions.bias"
DECODER = "cls.predictions.decoder.weight"


def spec_of(folder):
    return read_spec(folder, pooling="splade")


def onnx(folder):
    return open_engine("ort", spec_of(folder))


def rows(backend, **how):
    outputs = run(backend, random_encodings(backend.spec), **how)
    assert outputs.token_weights is None
    return outputs.splade.to_dense()


def agree(folder):
    found, expected = rows(onnx(folder)), rows(TorchBackend(spec_of(folder)))
    assert 0.05 < (expected > 0).mean() < 0.95
    near(found, expected, tolerances.WEIGHTS["float32"])


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("xlm-roberta", {}),
        ("bert", {"hidden_act": "relu", "layer_norm_eps": 0.1}),
        (
            "modernbert",
            {"classifier_bias": True, "decoder_bias": False, "classifier_activation": "relu"},
        ),
    ],
)
def test_families_agree_with_torch(tmp_path, model_type, settings):
    """Torch's are held to transformers, family by family."""
    agree(tiny.write_family(tmp_path, model_type, task="ForMaskedLM", seed=3, **settings))


def test_a_pass_over_all_cores_changes_nothing(splade):
    backend = onnx(splade)
    near(rows(backend, use_all_cores=True), rows(backend), tolerances.WEIGHTS["float32"])


def test_an_untied_decoder_of_its_own_counts_whatever_the_configuration_says(splade, copied):
    own = 0.6 * torch.randn(99, tiny.HIDDEN, generator=torch.Generator().manual_seed(7))
    folder = change(copied(splade), lambda tensors: {**tensors, DECODER: own})
    agree(folder)


def test_names_of_old_checkpoints_are_understood(splade, copied):
    def old(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    agree(
        change(
            copied(splade), lambda tensors: {old(name): tensor for name, tensor in tensors.items()}
        )
    )


@pytest.mark.parametrize(
    "name",
    [BIAS, "cls.predictions.transform.dense.weight", "cls.predictions.transform.LayerNorm.weight"],
)
def test_a_head_that_lacks_a_tensor_is_refused_by_name(splade, copied, name):
    folder = tiny.without(copied(splade), name)
    with pytest.raises(WeightMismatch, match=rf"{folder}.*lack `{name}`"):
        onnx(folder)


def test_a_misshapen_head_is_refused_with_both_shapes(splade, copied):
    folder = change(copied(splade), lambda tensors: {**tensors, BIAS: torch.zeros(5)})
    with pytest.raises(WeightMismatch, match=rf"`{BIAS}` has shape \[5\], the model needs \[99\]"):
        onnx(folder)


def test_an_untied_decoder_that_is_missing_is_refused(splade, copied):
    folder = tiny.configured(copied(splade), tie_word_embeddings=False)
    with pytest.raises(WeightMismatch, match=DECODER):
        onnx(folder)
