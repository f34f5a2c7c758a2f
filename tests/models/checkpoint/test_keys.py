"""Keys of sentence-transformers' files: obeyed, or refused by name, in every kind of model."""

import pytest

from conformance.small import tiny
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.test_inference_free import routed
from tests.models.refused import chained, raised

EXPANSION = {"strategy": "fixed", "length": 12, "token": None, "attend": True}
TRANSFORMER = "sentence_bert_config.json"


def edited(file, **settings):
    if not file.exists():
        tiny.write_json(file, {})
    tiny.edit_json(file, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"query_length": 8},
        {"document_length": 16},
        {"query_expansion": EXPANSION},
        {"tokenizer_name_or_path": "elsewhere"},
        {"transformer_task": "text-generation"},
    ],
)
@pytest.mark.parametrize("kind", ["dense", "splade", "classifier", "route"])
def test_a_setting_that_another_kind_obeys_is_refused(
    bert, splade, copied, tmp_path, kind, settings
):
    file = TRANSFORMER
    if kind == "dense":
        folder = chained(copied(bert), "Pooling")
    elif kind == "splade":
        folder = chained(copied(splade), "SpladePooling")
    elif kind == "classifier":
        folder = chained(tiny.write_classifier(tmp_path, "bert"))
        if "transformer_task" in settings:
            settings = {"transformer_task": "fill-mask"}
    else:
        folder = routed(tmp_path)
        home = next(
            path.parent for path in folder.rglob("config.json") if "document_0" in str(path)
        )
        file = str((home / TRANSFORMER).relative_to(folder))
    read_spec(folder)
    edited(folder / file, **settings)
    (key,) = settings
    assert f"`{key}`" in raised(UnsupportedArchitecture, folder, file)


def test_empty_settings_and_those_of_training_have_no_effect(bert, copied, caplog):
    folder = chained(copied(bert), "Pooling")
    edited(folder / TRANSFORMER, query_length=None, query_expansion=None, unpad_inputs=True)
    edited(folder / "1_Pooling" / "config.json", embedding_dimension=32)
    read_spec(folder)
    assert not caplog.messages


@pytest.mark.parametrize(
    "name", [TRANSFORMER, "1_Pooling/config.json", "config_sentence_transformers.json"]
)
def test_a_key_that_nobody_reads_is_named_once(bert, copied, caplog, name):
    folder = chained(copied(bert), "Pooling")
    edited(folder / name, my_note=5)
    read_spec(folder)
    read_spec(folder)
    assert [
        message for message in caplog.messages if "`my_note`" in message and name in message
    ] == [f"{folder / name}: ignored, as by sentence-transformers: `my_note`"]


def test_a_module_that_a_flag_replaces_is_not_read(bert, copied):
    folder = chained(copied(bert), "Pooling")
    edited(folder / TRANSFORMER, transformer_task="fill-mask")
    raised(UnsupportedArchitecture, folder, TRANSFORMER)
    assert read_spec(folder, pooling="max").pooling == ("max",)


def test_a_note_of_late_interaction_makes_no_pooling_model_late(bert, copied, caplog):
    folder = chained(copied(bert), "Pooling")
    edited(folder / "config_sentence_transformers.json", query_prefix="[Q] ")
    assert read_spec(folder).pooling == ("mean",)
    assert any("`query_prefix`" in message for message in caplog.messages)


@pytest.mark.parametrize(("name", "lines"), [("OwnTokenizer", 1), ("BertTokenizer", 0)])
def test_code_of_a_tokenizer_is_named_if_no_class_of_its_name_is_known(folder, caplog, name, lines):
    own = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    edited(folder / "tokenizer_config.json", tokenizer_class=name, auto_map=own)
    read_spec(folder)
    assert len([message for message in caplog.messages if "is not run" in message]) == lines
