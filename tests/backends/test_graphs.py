"""Graph files: the same bytes for the same graph, named by architecture, whole or refused by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends import graphs
from hybridtei.backends.graphs import Graph, find_graph, graph_name, graphs_folder
from hybridtei.batch import Positions
from hybridtei.checkpoint.files import embedded_model
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.errors import LoadError
from tests import tiny

CONFIG = {"vocab_size": 90, "max_position_embeddings": 128}
GRAPH = Graph(b"onnx " * 200, {"embeddings.weight": (90, 32), "bias": (32,), "scale": ()}, {"embeddings.weight": "vocab_size"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def spec_of(bert: Path, tmp_path: Path) -> Callable[..., ModelSpec]:
    """A BERT whose config.json says some things otherwise."""

    def changed(**changes: Any) -> ModelSpec:
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_bytes((bert / name).read_bytes())
        tiny.edit_json(tmp_path / "config.json", **changes)
        return read_spec(tmp_path, pooling="mean")

    return changed


# --- files -------------------------------------------------------------------------------------------------------------


@given(
    onnx=st.binary(max_size=2000),
    weights=st.dictionaries(st.text(), st.lists(st.integers(0, 2**40), max_size=4).map(tuple), max_size=5),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, onnx: bytes, weights: dict[str, tuple[int, ...]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.zip"
    Graph(onnx, weights).write(path)
    assert Graph.read(path, {}) == Graph(onnx, weights)


def test_the_same_graph_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GRAPH.write(tmp_path / "one.zip")
    monkeypatch.setattr("time.time", lambda: 2e9)
    GRAPH.write(tmp_path / "deep" / "er" / "two.zip")
    GRAPH.write(tmp_path / "one.zip")  # over the old one
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "deep" / "er" / "two.zip").read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["one.zip", "two.zip"]  # no part is left


def write_zip(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_", "."), data)


@pytest.mark.parametrize("member", ["graph_onnx", "weights_json"])
def test_a_file_that_lacks_a_member_is_refused_by_name(tmp_path: Path, member: str) -> None:
    members = {"graph_onnx": b"onnx", "weights_json": b'{"weights": {}}'}
    del members[member]
    write_zip(tmp_path / "g.zip", **members)
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip.*{member.replace('_', '.')}"):
        Graph.read(tmp_path / "g.zip", CONFIG)


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"{}",
        b"\xff",
        *(b'{"weights": {"a": %s}}' % shape for shape in (b"3", b'"12"', b"[1.5]", b"null")),
        b'{"weights": {}, "held": 3}',
    ],
)
def test_weights_that_are_no_names_and_shapes_are_refused(tmp_path: Path, weights: bytes) -> None:
    write_zip(tmp_path / "g.zip", graph_onnx=b"onnx", weights_json=weights)
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip: not a readable graph"):
        Graph.read(tmp_path / "g.zip", CONFIG)


@pytest.mark.parametrize("config", [{}, {"vocab_size": None}, {"vocab_size": "90"}, {"vocab_size": True}])
def test_a_size_that_config_json_does_not_tell_is_an_error_that_names_it(tmp_path: Path, config: dict[str, Any]) -> None:
    GRAPH.write(tmp_path / "g.zip")
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip.*`vocab_size` of config\.json"):
        Graph.read(tmp_path / "g.zip", config)


def test_a_size_is_kept_by_name_and_read_from_config_json(tmp_path: Path) -> None:
    GRAPH.write(tmp_path / "g.zip")
    read = Graph.read(tmp_path / "g.zip", {"vocab_size": 1234})
    assert read.weights == {**GRAPH.weights, "embeddings.weight": (1234, 32)}
    read.write(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "g.zip").read_bytes()


def test_what_a_graph_holds_itself_is_kept(tmp_path: Path) -> None:
    graph = Graph(b"onnx", {"bias": (32,)}, held=("layer.weight",))
    graph.write(tmp_path / "g.zip")
    assert Graph.read(tmp_path / "g.zip", {}) == graph


def test_a_file_cut_short_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "g.zip"
    GRAPH.write(path)
    whole = path.read_bytes()
    for left in range(len(whole)):
        path.write_bytes(whole[:left])
        with pytest.raises(LoadError, match=r"g\.zip"):
            Graph.read(path, CONFIG)


def test_a_damaged_file_is_refused_or_unharmed(tmp_path: Path) -> None:
    """Whatever byte is wrong: some make zlib fail, some the archive's directory, some are not read."""
    path = tmp_path / "g.zip"
    GRAPH.write(path)
    whole = path.read_bytes()
    refused = list[str]()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert Graph.read(path, CONFIG) == GRAPH
        except LoadError as error:
            refused.append(str(error))
    assert len(refused) > len(whole) / 2
    assert all(str(path) in message for message in refused)


def test_a_file_that_is_not_there_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.zip", tmp_path):
        with pytest.raises(LoadError, match=str(path)):
            Graph.read(path, CONFIG)


# --- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 2},
        {"intermediate_size": 64},
        {"type_vocab_size": 1},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 1e-5},
        {"layer_norm_eps": 0.5},
        {"is_decoder": True},  # it looks back only
        {"add_cross_attention": True},
        {"an_option_nobody_knows_yet": 1},
    ],
)
def test_an_architecture_has_a_name_of_its_own(spec_of: Callable[..., ModelSpec], changes: dict[str, Any]) -> None:
    assert graph_name(spec_of(**changes)) != graph_name(spec_of())


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "somebody/else"},
        {"architectures": ["BertForMaskedLM"]},
        {"id2label": {"0": "yes"}, "label2id": {"yes": 0}},
        {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "classifier_dropout": 0.5},
        {"dtype": "float16"},
        {"torch_dtype": "bfloat16"},
        {"transformers_version": "3.0.0"},
        {"initializer_range": 0.5, "gradient_checkpointing": True, "use_cache": False},
        {"is_decoder": False, "add_cross_attention": False},
        {"is_decoder": ..., "add_cross_attention": ..., "position_embedding_type": ...},
        {"position_embedding_type": "absolute"},
        {"vocab_size": 1000},
        {"max_position_embeddings": 512},
        {"pad_token_id": 1, "sep_token_id": 2, "cls_token_id": 3},
        {"sentence_transformers": {"version": "6"}, "pooler_type": "first_token_transform", "directionality": "bidi"},
    ],
)
def test_what_is_no_architecture_changes_no_name(spec_of: Callable[..., ModelSpec], changes: dict[str, Any]) -> None:
    assert graph_name(spec_of(**changes)) == graph_name(spec_of())


def test_the_order_of_keys_changes_no_name(spec_of: Callable[..., ModelSpec], tmp_path: Path) -> None:
    before = graph_name(spec_of())
    config = json.loads((tmp_path / "config.json").read_text())
    tiny.write_json(tmp_path / "config.json", dict(reversed(config.items())))
    assert graph_name(read_spec(tmp_path, pooling="mean")) == before


def test_families_differ_in_name_and_show_it(tmp_path: Path) -> None:
    names = [
        graph_name(read_spec(tiny.write_family(tmp_path / family, family), pooling="mean")) for family in ("bert", "electra")
    ]
    assert [name.split("-")[0] for name in names] == ["bert", "electra"]


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "xlm-roberta": [{"pad_token_id": 0}, {"num_hidden_layers": 3}],
    "modernbert": [
        {"max_position_embeddings": 64},
        {"global_attn_every_n_layers": 2},
        {"local_attention": 64},
        {"global_rope_theta": 10000.0},
        {"norm_eps": 1e-12},
        {"hidden_activation": "relu"},
        {"norm_bias": True},
    ],
    "qwen3": [{"vocab_size": 1000}, {"pad_token_id": 5}, {"rope_theta": 5.0}],
    "mpnet": [{"relative_attention_num_buckets": 16}],
}
ALIKE: dict[str, list[dict[str, Any]]] = {
    "xlm-roberta": [{"vocab_size": 1000}, {"max_position_embeddings": 1026}, {"output_past": True}],
    "modernbert": [
        {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
        {"norm_eps": 1e-5, "layer_norm_eps": 1e-12, "norm_bias": False, "hidden_activation": "gelu"},
        {"classifier_pooling": "mean", "decoder_bias": False, "reference_compile": True},
    ],
    "distilbert": [{"sinusoidal_pos_embds": False, "tie_weights_": True, "pad_token_id": 7}],
}


def named(model_type: str, changes: dict[str, Any]) -> str:
    base = {"model_type": model_type, "num_hidden_layers": 2, "vocab_size": 9, "pad_token_id": 1, "max_position_embeddings": 8}
    return graph_name(replace(SPEC, model_type=model_type, config={**base, **changes}))


SPEC = ModelSpec(Path(), "", (), 1, 1, 1, Positions(), ())


@pytest.mark.parametrize(("model_type", "changes"), [(family, one) for family, all_ in DIFFERENT.items() for one in all_])
def test_what_shapes_a_family_changes_its_name(model_type: str, changes: dict[str, Any]) -> None:
    assert named(model_type, changes) != named(model_type, {})


@pytest.mark.parametrize(("model_type", "changes"), [(family, one) for family, all_ in ALIKE.items() for one in all_])
def test_what_shapes_no_graph_of_a_family_changes_no_name(model_type: str, changes: dict[str, Any]) -> None:
    assert named(model_type, changes) == named(model_type, {})


def test_what_else_a_graph_is_made_of_is_part_of_its_name() -> None:
    assert len({graph_name(SPEC), graph_name(SPEC, "int8 of one"), graph_name(SPEC, "int8 of another")}) == 3


# --- places ------------------------------------------------------------------------------------------------------------


def test_a_graph_is_found_in_the_package_or_in_the_cache(
    spec_of: Callable[..., ModelSpec], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, shipped = spec_of(), tmp_path / "shipped"
    monkeypatch.setattr(graphs, "SHIPPED", shipped)
    assert find_graph(spec) is None
    GRAPH.write(cache / graph_name(spec))
    assert find_graph(spec) == cache / graph_name(spec)
    assert find_graph(spec_of(hidden_act="relu")) is None
    GRAPH.write(shipped / graph_name(spec))
    assert find_graph(spec) == shipped / graph_name(spec)


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "own"))
    assert graphs_folder() == tmp_path / "own"
    monkeypatch.delenv("HYBRIDTEI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert graphs_folder() == tmp_path / "xdg" / "hybridtei" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert graphs_folder() == Path.home() / ".cache" / "hybridtei" / "graphs"


def test_the_package_carries_the_graph_of_the_embedded_model(cache: Path) -> None:
    folder, heads = embedded_model()
    path = find_graph(read_spec(folder, heads_file=heads))
    assert path is not None
    assert path.parent == graphs.SHIPPED
    assert path.stat().st_size < 100_000
    spec = read_spec(folder, heads_file=heads)
    assert Graph.read(path, spec.config).weights["embeddings.word_embeddings.weight"] == (30522, 384)
