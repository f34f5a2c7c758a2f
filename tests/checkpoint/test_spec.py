"""What configuration files say, in every dialect; and each way they can be wrong, by class and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridtei.batch import Head, Positions
from hybridtei.checkpoint.spec import LEGACY_FLAGS, POOLINGS, read_spec
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture
from tests import tiny, vocabulary

Copied = Callable[[Path], Path]
OFFSETS = {"xlm-roberta", "roberta", "camembert", "mpnet"}


def raised(kind: type[LoadError], folder: Path, name: str, **options: Any) -> str:
    """The message of the error, which must be of just this class and name the file."""
    with pytest.raises(LoadError) as caught:
        read_spec(folder, **options)
    assert type(caught.value) is kind
    assert str(folder / name) in str(caught.value)
    return str(caught.value)


def with_pooling(tmp_path: Path, settings: dict[str, Any]) -> Path:
    folder = tiny.write_bert(tmp_path, pooling="mean")
    tiny.write_json(folder / "1_Pooling" / "config.json", settings)
    return folder


@pytest.mark.parametrize("model_type", tiny.FAMILIES)
def test_a_family_tells_its_size_positions_and_length(tmp_path: Path, model_type: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    assert spec.model_type == model_type
    assert (spec.hidden_size, spec.max_input_length) == (tiny.HIDDEN, vocabulary.LONGEST)
    assert spec.positions == (Positions(2, 1) if model_type in OFFSETS else Positions())
    assert spec.pooling == ("mean",)
    assert spec.has_token_types is (model_type in ("bert", "electra", "nomic_bert"))
    assert spec.heads == {Head.DENSE, Head.TOKENS}


# --- pooling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("layout", ["old", "new"])
def test_every_pooling_is_read_in_both_layouts(tmp_path: Path, mode: str, layout: str) -> None:
    folder = tiny.write_family(tmp_path, "bert")
    tiny.write_modules(folder, pooling=mode, layout=layout)  # type: ignore[arg-type]
    assert read_spec(folder).pooling == (mode,)


def test_old_flags_join_in_their_own_order_new_words_in_theirs(tmp_path: Path) -> None:
    folder = tiny.write_family(tmp_path, "bert")
    tiny.write_modules(folder, pooling=["mean", "max", "cls"], layout="old")
    assert read_spec(folder).pooling == ("cls", "max", "mean")
    tiny.write_modules(folder, pooling=["mean", "max", "cls"], layout="new")
    assert read_spec(folder).pooling == ("mean", "max", "cls")
    assert read_spec(folder).dense_width == 3 * tiny.HIDDEN


def test_the_flags_word_wins_over_the_file(bert: Path) -> None:
    assert read_spec(bert, pooling="cls").pooling == ("cls",)
    assert read_spec(bert, pooling="last-token").pooling == ("lasttoken",)


def test_a_bert_without_pooling_takes_the_first_token(tmp_path: Path) -> None:
    assert read_spec(tiny.write_bert(tmp_path, pooling=None)).pooling == ("cls",)


@pytest.mark.parametrize("model_type", ["qwen3", "mpnet", "gemma3_text"])
def test_another_family_without_pooling_is_refused(tmp_path: Path, model_type: str) -> None:
    assert "--pooling" in raised(MissingArtifact, tiny.write_family(tmp_path, model_type), "1_Pooling/config.json")


def test_a_pooling_that_modules_name_but_is_not_there(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    (folder / "1_Pooling" / "config.json").unlink()
    raised(MissingArtifact, folder, "1_Pooling/config.json")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode": "attention"}, UnsupportedArchitecture),
        ({"pooling_mode": ["mean", "attention"]}, UnsupportedArchitecture),
        (dict.fromkeys(LEGACY_FLAGS, False), LoadError),
        ({"word_embedding_dimension": tiny.HIDDEN}, LoadError),
    ],
)
def test_a_pooling_we_do_not_know_is_refused(tmp_path: Path, settings: dict[str, Any], kind: type[LoadError]) -> None:
    raised(kind, with_pooling(tmp_path, settings), "1_Pooling/config.json")


def test_an_unknown_pooling_word_of_the_caller_is_refused(bert: Path) -> None:
    assert "'median'" in raised(UnsupportedArchitecture, bert, "", pooling="median")


# --- SPLADE ------------------------------------------------------------------------------------------------------------


def test_splade_is_asked_for_or_declared_never_guessed(splade: Path) -> None:
    assert not read_spec(splade, pooling="cls").is_splade
    assert not read_spec(splade).is_splade
    spec = read_spec(splade, pooling="splade")
    assert spec.is_splade
    assert spec.heads == {Head.SPARSE}
    assert spec.dense_width == spec.vocab_size
    assert spec.pooling == ()


def test_splade_needs_a_masked_language_model(bert: Path) -> None:
    assert "MaskedLM" in raised(UnsupportedArchitecture, bert, "", pooling="splade")


@pytest.mark.parametrize("settings", [{"pooling_strategy": "sum"}, {"activation_function": "log1p_relu"}])
def test_a_splade_of_another_formula_is_refused(splade: Path, copied: Copied, settings: dict[str, str]) -> None:
    folder = copied(splade)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.SpladePooling", "path": "1_SpladePooling"}]
    tiny.write_json(folder / "modules.json", modules)
    tiny.write_json(folder / "1_SpladePooling" / "config.json", {})
    assert read_spec(folder).is_splade
    tiny.write_json(folder / "1_SpladePooling" / "config.json", settings)
    raised(UnsupportedArchitecture, folder, "1_SpladePooling")


# --- modules -----------------------------------------------------------------------------------------------------------


def test_dense_modules_come_in_order_with_the_last_ones_width(tmp_path: Path) -> None:
    folder = tiny.write_family(tmp_path, "bert")
    identity = "torch.nn.modules.linear.Identity"
    tiny.write_modules(folder, dense=[(tiny.HIDDEN, 64, identity), (64, 12, "torch.nn.Tanh")])
    spec = read_spec(folder)
    assert [(dense.in_features, dense.out_features, dense.activation) for dense in spec.dense_modules] == [
        (tiny.HIDDEN, 64, identity),
        (64, 12, "torch.nn.Tanh"),
    ]
    assert spec.dense_width == 12


def test_one_dense_module_can_be_replaced_two_cannot(tmp_path: Path) -> None:
    folder = tiny.write_family(tmp_path, "bert")
    tiny.write_dense(folder / "other", tiny.HIDDEN, 5)
    tiny.write_modules(folder, dense=[(tiny.HIDDEN, 12, "torch.nn.Tanh")])
    assert read_spec(folder, dense_path="other").dense_width == 5
    tiny.write_modules(folder, dense=[(tiny.HIDDEN, 12, "torch.nn.Tanh"), (12, 13, "torch.nn.Tanh")])
    assert read_spec(folder, dense_path="other").dense_width == 13


@pytest.mark.parametrize("lost", ["in_features", "out_features"])
def test_a_dense_module_without_its_sizes_is_refused(tmp_path: Path, lost: str) -> None:
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), dense=[(tiny.HIDDEN, 12, "torch.nn.Tanh")])
    tiny.edit_json(folder / "2_Dense" / "config.json", **{lost: ...})
    assert lost in raised(LoadError, folder, "2_Dense/config.json")


def test_a_dense_module_with_a_residual_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), dense=[(tiny.HIDDEN, tiny.HIDDEN, "torch.nn.Tanh")])
    tiny.edit_json(folder / "2_Dense" / "config.json", use_residual=True)
    raised(UnsupportedArchitecture, folder, "2_Dense/config.json")


def test_a_dense_module_that_is_not_there(tmp_path: Path) -> None:
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), dense=[(tiny.HIDDEN, 12, "torch.nn.Tanh")])
    (folder / "2_Dense" / "config.json").unlink()
    raised(MissingArtifact, folder, "2_Dense/config.json")


@pytest.mark.parametrize("name", ["Router", "StaticEmbedding", "LSTM", "WordWeights", "LayerNorm"])
def test_a_module_we_do_not_run_is_refused_by_name(bert: Path, copied: Copied, name: str) -> None:
    folder = copied(bert)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": f"sentence_transformers.models.{name}", "path": "1_X"}]
    tiny.write_json(folder / "modules.json", modules)
    assert name in raised(UnsupportedArchitecture, folder, "modules.json")


@pytest.mark.parametrize("modules", [{}, {"type": "x.Transformer"}, [{"type": "x.Transformer"}], ["Transformer"], 3])
def test_modules_of_another_shape_are_refused(bert: Path, copied: Copied, modules: Any) -> None:
    folder = copied(bert)
    tiny.write_json(folder / "modules.json", modules)
    if modules == {}:  # lists no module at all: as good as absent
        assert read_spec(folder).pooling == ("mean",)
    else:
        raised(LoadError, folder, "modules.json")


@pytest.mark.parametrize("path", ["../elsewhere", "1_Pooling/../../x", "/etc"])
@pytest.mark.parametrize("name", ["Pooling", "Dense", "SpladePooling"])
def test_a_module_path_does_not_lead_out_of_the_folder(splade: Path, copied: Copied, name: str, path: str) -> None:
    folder = copied(splade)
    tiny.write_json(folder / "modules.json", [{"type": "x.Transformer", "path": ""}, {"type": f"x.{name}", "path": path}])
    assert path in raised(LoadError, folder, "", pooling="mean" if name == "Dense" else None)


# --- config.json, tokenizer, length ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_must_be_there(bert: Path, copied: Copied, name: str) -> None:
    folder = copied(bert)
    (folder / name).unlink()
    raised(MissingArtifact, folder, name)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"bert"', "null", "\xff"])
def test_a_config_that_is_no_object_is_refused(bert: Path, copied: Copied, content: str) -> None:
    folder = copied(bert)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    raised(LoadError, folder, "config.json")


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [..., None])
def test_a_fact_that_config_must_tell(bert: Path, copied: Copied, key: str, value: Any) -> None:
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", **{key: value})
    assert key in raised(LoadError, folder, "config.json")


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "BertForTokenClassification", "XLMRobertaForSequenceClassification"]
)
def test_classifiers_are_refused(bert: Path, copied: Copied, architecture: str) -> None:
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", architectures=[architecture])
    assert architecture in raised(UnsupportedArchitecture, folder, "")


def lengths(folder: Path, *, table: Any = ..., tokenizer: Any = ..., sentence: Any = ...) -> Path:
    tiny.edit_json(folder / "config.json", max_position_embeddings=table)
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
        ({"table": 128, "tokenizer": 100, "sentence": None}, 100),
        ({"table": 128, "sentence": None}, 128),
        ({"table": None, "tokenizer": 100}, 100),
        ({"sentence": 60}, 60),
    ],
)
def test_the_length_is_the_smallest_that_is_told(bert: Path, copied: Copied, told: dict[str, Any], length: int) -> None:
    assert read_spec(lengths(copied(bert), **told)).max_input_length == length


@pytest.mark.parametrize("told", [{}, {"table": None, "tokenizer": None}, {"tokenizer": 1e30}, {"sentence": None}])
def test_no_length_anywhere_is_an_error(bert: Path, copied: Copied, told: dict[str, Any]) -> None:
    raised(LoadError, lengths(copied(bert), **told), "config.json")


@pytest.mark.parametrize("model_type", sorted(OFFSETS))
def test_families_that_count_from_two_take_two_tokens_less(tmp_path: Path, model_type: str) -> None:
    folder = lengths(tiny.write_family(tmp_path, model_type), table=50)
    assert read_spec(folder, pooling="mean").max_input_length == 48


@pytest.mark.parametrize(
    ("sentence", "prompts"),
    [
        ({}, None),
        ({"prompts": {}}, {}),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "query"}, {"query": "q: "}),
    ],
)
def test_prompts_are_read(bert: Path, copied: Copied, sentence: dict[str, Any], prompts: Any) -> None:
    folder = copied(bert)
    tiny.write_json(folder / "config_sentence_transformers.json", sentence)
    assert read_spec(folder).prompts == prompts


@pytest.mark.parametrize("prompts", [["query"], {"query": 5}, "query"])
def test_prompts_of_another_shape_are_refused(bert: Path, copied: Copied, prompts: Any) -> None:
    folder = copied(bert)
    tiny.write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    raised(LoadError, folder, "config_sentence_transformers.json")


@pytest.mark.parametrize(
    ("model_type", "removed"),
    [("bert", {0, 1, 2, 3}), ("xlm-roberta", {0, 1, 2, 3}), ("qwen3", {0}), ("roberta", {0, 1, 2, 3})],
)
def test_lexical_weights_leave_special_ids_out_but_not_the_mask(tmp_path: Path, model_type: str, removed: set[int]) -> None:
    assert read_spec(tiny.write_family(tmp_path, model_type), pooling="mean").removed_ids == removed


def test_heads_beside_the_model_are_outputs(m3: Path, hybrid: Path) -> None:
    everything = {Head.DENSE, Head.SPARSE, Head.MULTIVECTOR, Head.TOKENS}
    assert read_spec(m3).heads == read_spec(hybrid).heads == everything
