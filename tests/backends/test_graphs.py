"""Graph files: the same bytes for the same graph, named by architecture, whole or refused by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends import graphs
from hybridtei.backends.graphs import Graph, cache_folder, find_graph, graph_name
from hybridtei.checkpoint.embedded import embedded_model
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.errors import LoadError
from tests import tiny

GRAPH = Graph(b"onnx " * 200, {"embeddings.weight": (90, 32), "bias": (32,), "scale": ()})


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
    assert Graph.read(path) == Graph(onnx, weights)


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
    members = {"graph_onnx": b"onnx", "weights_json": b"{}"}
    del members[member]
    write_zip(tmp_path / "g.zip", **members)
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip.*{member.replace('_', '.')}"):
        Graph.read(tmp_path / "g.zip")


@pytest.mark.parametrize(
    "weights",
    [b"", b"not json", b"[]", b"null", b'{"a": 3}', b'{"a": "12"}', b'{"a": ["x"]}', b'{"a": [1.5]}', b'{"a": null}', b"\xff"],
)
def test_weights_that_are_no_names_and_shapes_are_refused(tmp_path: Path, weights: bytes) -> None:
    write_zip(tmp_path / "g.zip", graph_onnx=b"onnx", weights_json=weights)
    with pytest.raises(LoadError, match=rf"{tmp_path}/g\.zip: not a readable graph"):
        Graph.read(tmp_path / "g.zip")


def test_a_file_cut_short_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "g.zip"
    GRAPH.write(path)
    whole = path.read_bytes()
    for left in range(len(whole)):
        path.write_bytes(whole[:left])
        with pytest.raises(LoadError, match=r"g\.zip"):
            Graph.read(path)


def test_a_damaged_file_is_refused_or_unharmed(tmp_path: Path) -> None:
    """Whatever byte is wrong: some make zlib fail, some the archive's directory, some are not read."""
    path = tmp_path / "g.zip"
    GRAPH.write(path)
    whole = path.read_bytes()
    refused = list[str]()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert Graph.read(path) == GRAPH
        except LoadError as error:
            refused.append(str(error))
    assert len(refused) > len(whole) / 2
    assert all(str(path) in message for message in refused)


def test_a_file_that_is_not_there_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.zip", tmp_path):
        with pytest.raises(LoadError, match=str(path)):
            Graph.read(path)


# --- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 2},
        {"intermediate_size": 64},
        {"vocab_size": 1000},
        {"max_position_embeddings": 512},
        {"type_vocab_size": 1},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 1e-5},
        {"pad_token_id": 1},
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
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("HYBRIDTEI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "hybridtei" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "hybridtei" / "graphs"


def test_the_package_carries_the_graph_of_the_embedded_model(cache: Path) -> None:
    folder, heads = embedded_model()
    path = find_graph(read_spec(folder, heads_file=heads))
    assert path is not None
    assert path.parent == graphs.SHIPPED
    assert path.stat().st_size < 100_000
    assert Graph.read(path).weights["embeddings.word_embeddings.weight"] == (30522, 384)
