"""Configuration files in every dialect, and each way in which they can be wrong, by class and
file."""

import pytest
import transformers
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

from conformance.small import tiny, vocabulary
from hybridtei.batch import Head, Positions
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.families import FAMILIES
from tests.models.refused import raised
from tests.sampled import paired

SENTENCE = "config_sentence_transformers.json"
OFFSETS = {"xlm-roberta", "roberta", "camembert", "mpnet"}


@pytest.mark.parametrize("model_type", tiny.FAMILIES)
def test_a_family_tells_its_size_positions_and_length(tmp_path, model_type):
    spec = tiny.family_spec(tmp_path, model_type)
    assert spec.model_type == model_type
    width = tiny.FAMILIES[model_type].settings.get("embedding_dim", tiny.HIDDEN)
    assert (spec.hidden_size, spec.max_input_length) == (width, vocabulary.LONGEST)
    assert spec.positions == (Positions(2, 1) if model_type in OFFSETS else Positions())
    assert spec.pooling == ("mean",)
    assert spec.has_token_types is (model_type in ("bert", "electra", "nomic_bert"))
    assert spec.heads == {Head.DENSE, Head.TOKENS}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_must_be_there(folder, name):
    (folder / name).unlink()
    raised(MissingArtifact, folder, name)


@pytest.mark.parametrize(
    "name",
    ["GPT2", "Bart", "Gemma3", "UMT5"],
)
def test_a_family_that_keeps_its_width_elsewhere_is_not_served(bert, copied, name):
    folder, config = copied(bert), getattr(transformers, f"{name}Config")()
    config.save_pretrained(folder)
    message = raised(UnsupportedArchitecture, folder, "config.json")
    assert f"the family '{config.model_type}' is not supported" in message
    assert "supported: bert, " in message


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [..., None])
def test_a_fact_that_config_must_tell(bert, copied, key, value):
    folder = tiny.configured(copied(bert), **{key: value})
    assert key in raised(LoadError, folder, "config.json")


def lengths(folder, *, table=..., tokenizer=..., sentence=...):
    tiny.configured(folder, max_position_embeddings=table)
    tiny.edit_json(folder / "tokenizer_config.json", model_max_length=tokenizer)
    if sentence is not ...:
        tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": sentence})
    return folder


@pytest.mark.parametrize(
    ("told", "length"),
    [
        ({"table": 128}, 128),
        ({"table": 128, "tokenizer": 100}, 100),
        ({"table": 128, "tokenizer": 200}, 128),
        ({"table": 128, "tokenizer": 1e30}, 128),
        ({"table": 128, "tokenizer": 100, "sentence": 50}, 50),
        ({"table": 128, "tokenizer": 100, "sentence": 110}, 110),
        ({"table": 128, "tokenizer": 1e30, "sentence": 2e6}, 128),
        ({"table": 128, "tokenizer": 100, "sentence": None}, 100),
        ({"table": None, "tokenizer": 100}, 100),
        ({"sentence": 60}, 60),
    ],
)
def test_the_length_is_that_of_sentence_transformers_else_the_smallest(bert, copied, told, length):
    assert read_spec(lengths(copied(bert), **told)).max_input_length == length


# Positions: 128
LENGTHS = [("modernbert", 300), ("qwen3", 300), ("gte", 300), ("bert", 128)]


@pytest.mark.parametrize(("model_type", "length"), LENGTHS)
def test_a_family_without_a_table_of_positions_reads_what_is_declared(tmp_path, model_type, length):
    folder = lengths(tiny.write_family(tmp_path, model_type), table=128, tokenizer=100)
    tiny.write_modules(folder, layout="old", max_seq_length=300)
    assert read_spec(folder).max_input_length == length
    # Even above a table
    assert SentenceTransformer(str(folder), device="cpu").max_seq_length == 300


@pytest.mark.parametrize(
    "told", [{}, {"table": None, "tokenizer": None}, {"tokenizer": 1e30}, {"sentence": None}]
)
def test_no_length_anywhere_is_an_error(bert, copied, told):
    raised(LoadError, lengths(copied(bert), **told), "config.json")


@pytest.mark.parametrize(
    ("sentence", "prompts", "default"),
    [
        ({}, None, None),
        ({"prompts": {}}, {}, None),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "query"}, {"query": "q: "}, "query"),
        (
            {"prompts": {"s2p": "s: "}, "default_prompt_name": "document"},
            {"s2p": "s: "},
            None,
            # An empty one of the library's
        ),
        ({"default_prompt_name": "query"}, None, None),
    ],
)
def test_prompts_are_read(folder, sentence, prompts, default):
    tiny.write_json(folder / SENTENCE, sentence)
    spec = read_spec(folder)
    assert (spec.prompts, spec.default_prompt_name) == (prompts, default)


@pytest.mark.parametrize("name", ["nope", 5, ["query"]])
def test_a_default_prompt_that_is_not_there_is_refused(folder, name):
    settings = {"prompts": {"query": "q"}, "default_prompt_name": name}
    tiny.write_json(folder / SENTENCE, settings)
    assert "one of `prompts`: query" in raised(LoadError, folder, SENTENCE)
    for prompts in (["query"], {"query": 5}, "query"):
        tiny.write_json(folder / SENTENCE, {"prompts": prompts})
        raised(LoadError, folder, SENTENCE)


@pytest.mark.parametrize(
    ("model_type", "removed"),
    [
        ("bert", {0, 1, 2, 3}),
        ("xlm-roberta", {0, 1, 2, 3}),
        ("qwen3", {0}),
        ("roberta", {0, 1, 2, 3}),
    ],
)
def test_lexical_weights_leave_special_ids_out_but_not_the_mask(tmp_path, model_type, removed):
    assert tiny.family_spec(tmp_path, model_type).removed_ids == removed


# --- values that are none

NOT_POSITIVE = ("x", "12", -5, 0, 1.5, True, [3], {})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("config.json", "hidden_size"),
        ("config.json", "vocab_size"),
        ("config.json", "max_position_embeddings"),
        ("config.json", "type_vocab_size"),
        ("tokenizer_config.json", "model_max_length"),
        ("sentence_bert_config.json", "max_seq_length"),
    ],
)
def test_a_size_that_is_no_whole_number_above_zero(folder, name, key):
    tiny.write_json(folder / "sentence_bert_config.json", {})
    for value in NOT_POSITIVE:
        # As good as absent: there is no table
        if value or key not in (
            "max_position_embeddings",
            "type_vocab_size",
        ):
            tiny.edit_json(folder / name, **{key: value})
            assert f"`{key}` is {value!r}" in raised(LoadError, folder, name)


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("config.json", "pad_token_id", ["x", -1, -7, 1.0, True, [1]]),
        ("config.json", "architectures", ["BertModel", 5, [5], {"a": 1}]),
        (
            "tokenizer.json",
            "added_tokens",
            [5, ["<pad>"], [{"content": "<pad>"}], [{"content": "<pad>", "id": "x"}]],
        ),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path, name, key, values):
    folder = tiny.write_family(tmp_path, "roberta")
    for value in values:
        tiny.edit_json(folder / name, **{key: value})
        assert key in raised(LoadError, folder, name)


def test_a_table_that_leaves_no_position(tmp_path):
    folder = lengths(tiny.write_family(tmp_path, "roberta"), table=2)
    assert "positions begin at 2" in raised(LoadError, folder, "config.json", pooling="mean")


# --- padding and positions


@pytest.mark.parametrize("value", [..., None])
@pytest.mark.parametrize(
    "model_type",
    sorted(
        {name for name, known in FAMILIES.items() if known.after_padding} - {"xlm-roberta-flash"}
    ),
    # Which transformers lacks
)
def test_an_offset_family_that_is_silent_pads_as_transformers_does(tmp_path, model_type, value):
    folder = tiny.configured(
        tiny.write_family(tmp_path, "roberta"), model_type=model_type, pad_token_id=value
    )
    default = AutoConfig.for_model(model_type).pad_token_id
    spec = read_spec(folder, pooling="mean")
    assert (spec.padding_id, spec.positions) == (default, Positions(default + 1, default))


@pytest.mark.parametrize(("value", "padding_id"), [(..., 0), (None, 0), (-1, 0), (0, 0), (7, 7)])
def test_another_family_pads_with_what_it_names(bert, copied, value, padding_id):
    folder = tiny.configured(copied(bert), pad_token_id=value)
    spec = read_spec(folder)
    assert (spec.padding_id, spec.positions) == (padding_id, Positions())


@pytest.mark.parametrize(
    ("model_type", "form"),
    paired(["bert", "roberta", "electra"], ["relative_key", "relative_key_query", "alibi"]),
)
def test_positions_that_transformers_would_take_for_absolute(tmp_path, model_type, form):
    folder = tiny.configured(tiny.write_family(tmp_path, model_type), position_embedding_type=form)
    assert form in raised(UnsupportedArchitecture, folder, "config.json", pooling="mean")
    tiny.configured(folder, position_embedding_type="absolute")
    assert read_spec(folder, pooling="mean").model_type == model_type
