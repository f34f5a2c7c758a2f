"""Chains of sentence-transformers modules, in every dialect; and each way they can be wrong, by
class and file."""

import json

import pytest

from conformance.small import tiny
from hybridtei.batch import Head
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.modules import LEGACY_FLAGS, POOLINGS
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.test_inference_free import routed
from tests.models.refused import chained, listed, raised
from tests.sampled import paired


def with_dense(folder, *sizes, **settings):
    """A BERT with Dense modules of these sizes."""
    layers = [(*pair, "torch.nn.Tanh") for pair in sizes]
    return tiny.write_modules(tiny.write_family(folder, "bert"), dense=layers, **settings)


def in_its_own_folder(folder, kind="Transformer"):
    """The same checkpoint as sentence-transformers wrote it at first: the transformer in
    `0_Transformer`."""
    (folder / "0_Transformer").mkdir()
    (folder / "modules.json").unlink()
    for file in [file for file in folder.iterdir() if file.is_file()]:
        file.rename(folder / "0_Transformer" / file.name)
    tiny.write_json(folder / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 50})
    return listed(folder, (kind, "0_Transformer"), Pooling="1_Pooling")


# --- pooling


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("layout", ["old", "new"])
def test_every_pooling_is_read_in_both_layouts(tmp_path, mode, layout):
    folder = with_dense(tmp_path, pooling=mode, layout=layout)
    assert read_spec(folder).pooling == (mode,)


def test_old_flags_join_in_their_own_order_new_words_in_theirs(tmp_path):
    folder = tiny.write_family(tmp_path, "bert")
    tiny.write_modules(folder, pooling=["mean", "max", "cls"], layout="old")
    assert read_spec(folder).pooling == ("cls", "max", "mean")
    tiny.write_modules(folder, pooling=["mean", "max", "cls"], layout="new")
    assert read_spec(folder).pooling == ("mean", "max", "cls")
    assert read_spec(folder).dense_width == 3 * tiny.HIDDEN


def test_the_flags_word_wins_over_the_file(bert):
    assert read_spec(bert, pooling="cls").pooling == ("cls",)
    assert read_spec(bert, pooling="last-token").pooling == ("lasttoken",)
    assert "'median'" in raised(UnsupportedArchitecture, bert, "", pooling="median")
    assert "MaskedLM" in raised(UnsupportedArchitecture, bert, "", pooling="splade")


def test_a_bert_without_pooling_takes_the_first_token_and_says_so(tmp_path, caplog):
    assert read_spec(tiny.write_bert(tmp_path, pooling=None)).pooling == ("cls",)
    (warning,) = caplog.messages
    assert str(tmp_path / "1_Pooling" / "config.json") in warning
    assert "cls" in warning


@pytest.mark.parametrize("model_type", ["qwen3", "mpnet", "gemma3_text"])
def test_another_family_without_pooling_is_refused(tmp_path, model_type):
    message = raised(
        MissingArtifact, tiny.write_family(tmp_path, model_type), "1_Pooling/config.json"
    )
    assert "--pooling mean" in message
    assert "last-token" in message
    assert "hybridtei_rerank.json" not in message


def test_a_language_model_without_pooling_may_be_a_ranker_without_template(tmp_path):
    folder = tiny.write_family(tmp_path, "qwen3", task="ForCausalLM")
    assert "hybridtei_rerank.json" in raised(MissingArtifact, folder, "1_Pooling/config.json")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode": "attention"}, UnsupportedArchitecture),
        ({"pooling_mode": ["mean", "attention"]}, UnsupportedArchitecture),
        ({"pooling_mode": 5}, UnsupportedArchitecture),
        ({"pooling_mode": {"mean": True}}, UnsupportedArchitecture),
        (dict.fromkeys(LEGACY_FLAGS, False), LoadError),
        ({"word_embedding_dimension": tiny.HIDDEN}, LoadError),
        ({}, LoadError),
        ({"pooling_mode": []}, LoadError),
    ],
)
def test_a_pooling_we_do_not_know_is_refused(folder, settings, kind):
    tiny.write_json(folder / "1_Pooling" / "config.json", settings)
    raised(kind, folder, "1_Pooling/config.json")


# --- SPLADE


def test_splade_is_asked_for_or_declared_never_guessed(splade):
    assert not read_spec(splade, pooling="cls").is_splade
    assert not read_spec(splade).is_splade
    spec = read_spec(splade, pooling="splade")
    assert spec.is_splade
    assert spec.heads == {Head.SPARSE}
    assert spec.dense_width == spec.vocab_size
    assert spec.pooling == ()


@pytest.mark.parametrize("settings", [{"pooling_strategy": "sum"}, {"activation_function": "gelu"}])
def test_a_splade_of_another_formula_is_refused(splade, copied, settings):
    folder = chained(copied(splade), "SpladePooling")
    assert read_spec(folder).is_splade
    tiny.write_json(folder / "1_SpladePooling" / "config.json", settings)
    raised(UnsupportedArchitecture, folder, "1_SpladePooling")


# --- modules


def test_one_dense_module_can_be_replaced_two_cannot(tmp_path):
    folder = with_dense(tmp_path, (tiny.HIDDEN, 12))
    tiny.write_dense(folder / "other", tiny.HIDDEN, 5)
    assert read_spec(folder, dense_path="other").dense_width == 5
    with_dense(folder, (tiny.HIDDEN, 12), (12, 13))
    assert read_spec(folder, dense_path="other").dense_width == 13


@pytest.mark.parametrize(
    ("pooling", "dense", "numbers", "at"),
    [
        ("mean", [(48, 12)], (48, tiny.HIDDEN), "2_Dense"),
        (["mean", "max"], [(tiny.HIDDEN, 12)], (tiny.HIDDEN, 2 * tiny.HIDDEN), "2_Dense"),
        ("mean", [(tiny.HIDDEN, 12), (tiny.HIDDEN, 5)], (tiny.HIDDEN, 12), "3_Dense"),
    ],
)
def test_a_dense_module_is_as_wide_as_what_comes_before_it(tmp_path, pooling, dense, numbers, at):
    folder = with_dense(tmp_path, *dense, pooling=pooling)
    message = raised(WeightMismatch, folder, f"{at}/config.json")
    assert all(f" {number}" in message for number in numbers)


SIZE = [..., "32", "x", 0, -5, 1.5, True]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        *(
            ({key: value}, LoadError, key)
            for key, value in paired(["in_features", "out_features"], SIZE)
        ),
        ({"use_residual": True}, UnsupportedArchitecture, ""),
        (None, MissingArtifact, ""),
    ],
)
def test_a_dense_module_that_is_not_served_is_refused_by_its_file(tmp_path, changes, kind, words):
    folder = with_dense(tmp_path, (tiny.HIDDEN, tiny.HIDDEN))
    if changes is None:
        (folder / "2_Dense" / "config.json").unlink()
    else:
        tiny.edit_json(folder / "2_Dense" / "config.json", **changes)
    assert words in raised(kind, folder, "2_Dense/config.json")


@pytest.mark.parametrize("key", ["module_input_name", "module_output_name"])
def test_a_dense_module_works_on_the_pooled_vector_only(tmp_path, key):
    folder = with_dense(tmp_path, (tiny.HIDDEN, 12))
    for name in (None, "sentence_embedding"):
        tiny.edit_json(folder / "2_Dense" / "config.json", **{key: name})
        assert read_spec(folder).dense_width == 12
    tiny.edit_json(folder / "2_Dense" / "config.json", **{key: "token_embeddings"})
    assert "token_embeddings" in raised(UnsupportedArchitecture, folder, "2_Dense/config.json")


@pytest.mark.parametrize("name", ["Router", "StaticEmbedding", "LSTM", "LayerNorm"])
def test_a_module_we_do_not_run_is_refused_by_name(bert, copied, name):
    folder = chained(copied(bert), name)
    assert name in raised(UnsupportedArchitecture, folder, "modules.json")


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"type": "sentence_transformers.models.Transformer"},
        [{"type": "sentence_transformers.models.Transformer"}],
        [{"type": "sentence_transformers.models.Transformer", "path": None}],
        [{"type": 5, "path": ""}],
        ["Transformer"],
        3,
        "Transformer",
    ],
)
def test_modules_of_another_shape_are_refused(folder, modules):
    tiny.write_json(folder / "modules.json", modules)
    raised(LoadError, folder, "modules.json")


def test_an_empty_list_of_modules_is_as_good_as_none(folder):
    tiny.write_json(folder / "modules.json", [])
    assert read_spec(folder).pooling == ("mean",)


@pytest.mark.parametrize(
    "order",
    [
        ("Transformer", "Dense", "Pooling"),
        ("Dense", "Transformer", "Pooling"),
        ("Transformer", "Dense"),
        ("Transformer", "Dense", "SpladePooling"),
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Pooling", "Transformer"),
        ("Transformer", "Transformer", "Pooling"),
        ("Transformer", "Pooling", "Pooling"),
    ],
)
def test_an_order_that_is_not_run_is_refused(bert, copied, order):
    folder = listed(copied(bert), *((name, "") for name in order))
    assert "order" in raised(UnsupportedArchitecture, folder, "modules.json")


@pytest.mark.parametrize(
    ("path", "name"),
    paired(
        ["../elsewhere", "1_Pooling/../../x", "/etc"],
        ["Pooling", "Dense", "SpladePooling", "Transformer"],
    ),
)
def test_a_module_path_does_not_lead_out_of_the_folder(splade, copied, name, path):
    chain = {"Transformer": "", "Pooling": "1_Pooling", name: path}
    if name == "SpladePooling":
        del chain["Pooling"]
    folder = listed(copied(splade), **chain)
    assert path in raised(LoadError, folder, "", pooling="mean" if name == "Dense" else None)


@pytest.mark.parametrize("kind", ["Transformer", "MLMTransformer"])
def test_the_transformer_may_lie_in_a_folder_of_its_own(bert, copied, kind):
    folder = in_its_own_folder(copied(bert), kind)
    spec = read_spec(folder)
    assert spec.folder == folder / "0_Transformer"
    assert (spec.pooling, spec.max_input_length) == (("mean",), 50)
    (folder / "0_Transformer" / "config.json").unlink()
    raised(MissingArtifact, folder, "0_Transformer/config.json")


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "custom_st.Transformer",
        "my_layers.Dense",
        "sentence_transformers_own.models.Pooling",
        "Pooling",
        "my_router.Router",
    ],
)
def test_a_class_of_the_repositorys_own_code_is_refused_whatever_its_name(folder, name, trusted):
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    listed.append({"type": name, "path": "1_Pooling"})
    tiny.write_json(folder / "modules.json", listed)
    assert name in raised(UnsupportedArchitecture, folder, "modules.json", trusted=trusted)


def test_a_route_of_own_code_is_refused(tmp_path):
    folder = routed(tmp_path)
    file = folder / "router_config.json"
    settings = json.loads(file.read_text())
    settings["types"] = dict.fromkeys(settings["types"], "own.SpladePooling")
    tiny.write_json(file, settings)
    assert "own.SpladePooling" in raised(UnsupportedArchitecture, folder, "router_config.json")
