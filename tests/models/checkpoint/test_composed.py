"""Settings that a checkpoint composes of several files."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from conformance.small import tiny
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.checkpoint import removed_ids
from hybridtei.models.checkpoint.contents import check_contents
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.sizes import (
    config_arguments,
    tokenizer_arguments,
    with_whole_sizes,
)
from hybridtei.models.checkpoint.tokenizer.settings import apply_settings, read_tokenizer_settings
from hybridtei.models.checkpoint.tokenizer.vocabularies import tokenizer_config

PIECES = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>", "a", "<mask>")]


def _unigram():
    raw = Tokenizer(models.Unigram(PIECES, unk_id=3))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    raw.add_special_tokens(["<mask>"])
    return raw


def test_a_class_of_byte_levels_leaves_a_metaspace(tmp_path):
    written = JsonObject({"tokenizer_class": "RobertaTokenizer"}, tmp_path)
    raw = _unigram()
    before = str(raw.pre_tokenizer)
    changed = apply_settings(raw, read_tokenizer_settings(written, "roberta", {}), tmp_path)
    assert changed == ["special tokens"]
    assert str(raw.pre_tokenizer) == before


def test_special_tokens_of_any_file_are_never_split(tmp_path):
    raw = _unigram()
    assert raw.encode("a</s>a").ids == [0, 3, 4, 2, 4, 2]
    written = JsonObject({"tokenizer_class": "Own", "eos_token": "</s>"}, tmp_path)
    apply_settings(raw, read_tokenizer_settings(written, "roberta", {}), tmp_path)
    assert raw.encode("a</s>a").ids == [0, 3, 4, 2, 3, 4, 2]


# tokenizer.json adds bos and eos. Expected: what transformers 4.57.6 and 5.23 give, if they agree.
@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, [0, 3, 4, 2]),
        (
            {"tokenizer_class": "LlamaTokenizer", "bos_token": None, "add_bos_token": True},
            [0, 3, 4, 2],
        ),
        ({"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<s>", "eos_token": "</s>"}, [3, 4]),
    ],
)
def test_flags_of_bos_and_eos(tmp_path, settings, ids):
    raw = _unigram()
    written = JsonObject(settings, tmp_path)
    apply_settings(raw, read_tokenizer_settings(written, "llama", {}), tmp_path)
    assert raw.encode("a").ids == ids


# Only transformers 4 applies the flags.
@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({"add_bos_token": None, "add_eos_token": None}, [3, 4]),
        ({"add_bos_token": False, "add_eos_token": True}, [3, 4, 5]),
    ],
)
def test_bos_and_eos_come_from_special_tokens_map_too(tmp_path, flags, ids):
    tiny.write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>", **flags})
    tiny.write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<mask>"})
    raw = _unigram()
    config = {"tokenizer_class": "LlamaTokenizer"}
    settings = read_tokenizer_settings(tokenizer_config(tmp_path), "llama", config)
    apply_settings(raw, settings, tmp_path)
    assert raw.encode("a").ids == ids


def test_special_tokens_are_known_by_the_class_and_the_post_processor(tmp_path):
    _unigram().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    assert removed_ids(Folder(tmp_path), {}) == {0, 1, 2, 3}


def test_arguments_of_the_loaders_replace_keys_or_are_refused(tmp_path):
    arguments = {"tokenizer_args": {"model_max_length": 16, "revision": "main"}}
    sentence = JsonObject({**arguments, "config_args": {"hidden_act": "relu"}}, tmp_path)
    assert tokenizer_arguments(sentence, JsonObject({}, tmp_path)) == {"model_max_length": 16}
    assert config_arguments(sentence) == {"hidden_act": "relu"}
    sentence = JsonObject({"processor_kwargs": {"bpe_dropout": 0.1}}, tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="bpe_dropout"):
        tokenizer_arguments(sentence, JsonObject({}, tmp_path))


def test_sizes_may_be_written_with_a_point(tmp_path):
    config = with_whole_sizes(JsonObject({"n_inner": 48.0, "rope_theta": 10.0}, tmp_path))
    assert (repr(config["n_inner"]), repr(config["rope_theta"])) == ("48", "10.0")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("gliner_config.json", "{}", "GLiNER"),
        ("config.json", '{"quantization": {"bits": 4}}', "`quantization`, 'of MLX'"),
    ],
)
def test_a_refusal_names_the_kind(tmp_path, name, text, named):
    (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match=named):
        check_contents(Folder(tmp_path))
