"""A checkpoint's declarations of adapters, and their tensors as linear maps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conformance.small import tiny
from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.weights import graph_tensors
from hybridtei.models.checkpoint.hub_layouts import translate
from hybridtei.models.checkpoint.sizes import Adapters
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from tests import jina
from tests.models.refused import refuses_weights
from tests.near import same

COUNT = len(jina.ADAPTERS)


@pytest.fixture
def checkpoint(tmp_path):
    return jina.write(tmp_path)


def test_the_configuration_becomes_that_of_the_native_class(checkpoint):
    spec = read_spec(checkpoint)
    assert (spec.model_type, spec.positions.offset, spec.pooling) == (
        "jina_embeddings_v3",
        0,
        ("mean",),
    )
    assert spec.config["rope_theta"] == 20_000
    prompts = {name: jina.QUERY if name == "retrieval.query" else "" for name in jina.ADAPTERS}
    assert spec.adapters == Adapters(jina.ADAPTERS, jina.RANK, jina.ALPHA / jina.RANK, prompts)
    assert spec.prompts == prompts


def test_the_makers_default_of_the_base_is_not_the_native_one():
    written = {"model_type": "xlm-roberta-flash", "position_embedding_type": "rotary"}
    native = {"model_type": "jina_embeddings_v3", "rope_theta": 10_000.0, "pooling": None}
    assert translate(written, Path("x")) == native


def test_absolute_positions_are_left_to_the_family():
    written = {
        "model_type": "xlm-roberta",
        "position_embedding_type": "absolute",
        "rotary_emb_base": 3.0,
    }
    assert translate(written, Path("x")) == written


def test_prompts_of_sentence_transformers_go_first(checkpoint):
    tiny.write_modules(checkpoint, prompts={"retrieval.query": "find: ", "more": "x"})
    prompts = read_spec(checkpoint).prompts
    assert prompts == {**dict.fromkeys(jina.ADAPTERS, ""), "retrieval.query": "find: ", "more": "x"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lora_adaptations": "a"}, "`lora_adaptations` is 'a', should be a list of names"),
        ({"lora_adaptations": []}, "should be a list of names"),
        ({"lora_adaptations": ["a", "a"]}, "names an adapter twice"),
        ({"rotary_emb_base": "x"}, "`rotary_emb_base` is 'x', should be a positive number"),
        ({"lora_rank": 0}, "`lora_rank`"),
        ({"lora_rank": 1000}, "is 1000, and 5 adapters of it are more than 4096 ranks"),
        ({"lora_alpha": -1}, "`lora_alpha` is -1, should be a positive number"),
        ({"lora_alpha": float("inf")}, "`lora_alpha` is inf, should be a positive number"),
        ({"task_instructions": {"separation": 1}}, "should map names to texts"),
        ({"load_trained_adapters": False}, "`load_trained_adapters` is False"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(checkpoint, changes, why):
    tiny.configured(checkpoint, **changes)
    with pytest.raises(LoadError, match=f"{checkpoint}/config.json: .*{why}"):
        read_spec(checkpoint)


def test_what_the_makers_own_code_pools_and_cuts(checkpoint):
    """`emb_pooler` where no file of sentence-transformers says more; the whole width is no cut."""
    tiny.configured(checkpoint, emb_pooler="mean", truncate_dim=tiny.HIDDEN)
    for name in ("modules.json", "1_Pooling/config.json"):
        (checkpoint / name).unlink()
    spec = read_spec(checkpoint)
    assert spec.pooling == ("mean",)
    family_graph(spec)


@pytest.mark.parametrize("key", ["truncate_dim", "rotary_emb_fraction"])
def test_settings_that_could_matter_are_refused(checkpoint, key):
    tiny.configured(checkpoint, **{key: 8})
    with pytest.raises(UnsupportedArchitecture, match=f"`{key}` is 8"):
        family_graph(read_spec(checkpoint))


@pytest.mark.parametrize(
    ("dtype", "suffix"), [(torch.float32, ".safetensors"), (torch.bfloat16, ".bin")]
)
def test_factors_of_all_adapters_lie_side_by_side(checkpoint, dtype, suffix):
    tensors = {
        name: tensor.to(dtype)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    if suffix == ".bin":
        (checkpoint / "model.safetensors").unlink()
        torch.save(
            {name: _backwards(tensor) for name, tensor in tensors.items()},
            checkpoint / "pytorch_model.bin",
        )
    else:
        tiny.change(checkpoint, lambda _: tensors)
    weights = Weights.open(checkpoint)
    for name in ("embeddings.word_embeddings", "encoder.layers.1.mixer.Wqkv"):
        a, b = (
            tensors[f"roberta.{name}.parametrizations.weight.0.lora_{letter}"].float().numpy()
            for letter in "AB"
        )
        is_table = "embeddings" in name
        beside = np.concatenate(a, axis=1 if is_table else 0)
        after = np.concatenate([one.T for one in b] if is_table else b, axis=1)
        same(weights.float32(f"roberta.{name}.lora_A.weight"), beside)
        same(weights.float32(f"roberta.{name}.lora_B.weight"), after)
        assert after.shape[1] == COUNT * jina.RANK


def _backwards(tensor):
    """The same values, kept column after column."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def test_what_is_side_by_side_already_is_not_copied(checkpoint):
    weights = Weights.open(checkpoint)
    assert not weights.float32("roberta.encoder.layers.0.mlp.fc1.lora_A.weight").flags.owndata
    assert not weights.float32("roberta.encoder.layers.0.mlp.fc1.weight").flags.owndata


FC1 = "roberta.encoder.layers.0.mlp.fc1"


def test_a_lone_factor_is_refused_by_name(checkpoint):
    name = f"{FC1}.parametrizations.weight.0.lora_B"
    tiny.without(checkpoint, name)
    refuses_weights(
        checkpoint, f"model.safetensors: `{FC1}.parametrizations.weight.original` lacks `{name}`"
    )


def test_factors_that_do_not_fit_are_refused_by_name(checkpoint):
    name = f"{FC1}.parametrizations.weight.0.lora_B"
    tiny.change(checkpoint, lambda tensors: {**tensors, name: tensors[name][:, 1:].contiguous()})
    refuses_weights(checkpoint, f"`{name}` have shapes .* which fit no weights of shape")


def test_adapters_that_the_configuration_does_not_name_are_refused(checkpoint):
    tiny.configured(checkpoint, lora_adaptations=None)
    with pytest.raises(WeightMismatch, match=r"the weights hold what config.json does not"):
        graph_tensors(family_graph(read_spec(checkpoint)), Weights.open(checkpoint))
    tiny.configured(checkpoint, lora_adaptations=["one", "two"])
    with pytest.raises(WeightMismatch, match=r"lora_A.weight` has shape"):
        graph_tensors(family_graph(read_spec(checkpoint)), Weights.open(checkpoint))
