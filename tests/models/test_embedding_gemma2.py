"""EmbeddingGemma 2 as Google publishes it: settings nested under `text_config`, and towers for
images beside the text tower."""

import numpy as np
import pytest
import transformers

from conformance.families.oracle import ENGINES, alone, texts_of
from conformance.small import tiny
from conformance.small.vocabulary import tokenizer
from hybridtei import ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.backends.select import choices
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.settings import Settings
from tests.models.families.test_families import equals_transformers

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}


def write(folder):
    """A model with a vision tower, mean pooling and Normalize."""
    words = tokenizer("bytes")
    words.save_pretrained(folder)
    text = {"vocab_size": len(words), **tiny.GEMMA2}
    config = transformers.EmbeddingGemma2Config(
        text_config=text, vision_config=transformers.Gemma4VisionConfig(**VISION)
    )
    config.vocab_size = len(words)
    model = transformers.EmbeddingGemma2Model(config)
    tiny.randomise(model, 0)
    model.eval().save_pretrained(folder)
    return tiny.write_modules(folder, normalize=True)


def expected(folder):
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    return np.concatenate(alone(model, texts_of(read_spec(folder))))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_text_tower_computes_what_the_whole_model_does(tmp_path, engine):
    folder = write(tmp_path)
    names = Weights.open(folder).names()
    assert any("vision_tower.encoder.layers.0" in name for name in names)
    equals_transformers(folder, engine, expected(folder))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_float16_is_refused_before_weights_are_read(tmp_path, backend):
    spec = read_spec(write(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    why = "states of `embedding_gemma2_text` exceed float16's range; ask for bfloat16 or float32"
    with pytest.raises(LoadError, match=why):
        choices(ModelConfig(backend=backend, dtype="float16"), spec)


def test_a_text_config_of_another_form_is_refused(tmp_path):
    folder = tiny.configured(write(tmp_path), text_config="gemma")
    with pytest.raises(LoadError, match=r"config.json: `text_config` is 'gemma', should be an obj"):
        read_spec(folder)


def test_settings_of_a_part_are_named_with_it():
    part = Settings({}, "config.json").nested({"head_dim": 0}, "per_layer_config.5")
    with pytest.raises(LoadError, match=r"config.json: per_layer_config.5: `head_dim` is 0"):
        part.count("head_dim")
