"""Adapters as peft saves them, against transformers' model with `W + scale B A` as its weights."""

import re
from pathlib import Path
from shutil import copytree

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.families.oracle import ENGINES, reference, texts_of
from conformance.small import tiny
from hybridtei.config import ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture
from hybridtei.inference.load import find_model
from hybridtei.models.checkpoint import peft
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.fingerprint import fingerprint
from tests.models.families.test_families import equals_transformers
from tests.near import near

LORA = {
    "peft_type": "LORA",
    "base_model_name_or_path": "publisher/base",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "lora_dropout": 0.1,
    "modules_to_save": None,
    "target_modules": ["q_proj"],
    "use_dora": False,
}
# Of the factors: the changed weights are as large as the others, so float32's tolerance holds
SIZE = 0.2


def write(
    folder,
    shapes,
    *,
    seed=0,
    table=None,
    ranks=None,
    **changes,
):
    """Write an adapter of these modules' weights, and return `B A` of each, in the weight's
    shape."""
    folder.mkdir(exist_ok=True)
    draw, factors, products = torch.Generator().manual_seed(seed), {}, {}
    for module, (out, width) in shapes.items():
        rank = (ranks or {}).get(module, LORA["r"])
        if module == table:
            a = torch.randn(rank, out, generator=draw) * SIZE
            b = torch.randn(width, rank, generator=draw) * SIZE
            names, products[module] = ("lora_embedding_A", "lora_embedding_B"), (b @ a).T
        else:
            a = torch.randn(rank, width, generator=draw) * SIZE
            b = torch.randn(out, rank, generator=draw) * SIZE
            names, products[module] = ("lora_A.weight", "lora_B.weight"), b @ a
        for name, factor in zip(names, (a, b), strict=True):
            factors[f"base_model.model.{module}.{name}"] = factor
    save_file(factors, folder / "adapter_model.safetensors")
    tiny.write_json(folder / "adapter_config.json", {**LORA, **changes})
    return products


def shapes_of(folder, pattern):
    tensors = load_file(folder / "model.safetensors")
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if re.search(pattern, name) and name.endswith(".weight")
    }


def with_changes(base, folder, products, scale):
    """The base with merged weights, for transformers."""

    def merge(tensors):
        for module, product in products.items():
            tensors[f"{module}.weight"] += scale(module) * product
        return tensors

    return tiny.change(copytree(base, folder), merge)


def states(folder):
    return reference(folder, texts_of(read_spec(folder, pooling="mean")))


FAMILIES = {
    "bert": r"attention\.self\.(query|value)|embeddings\.word|output\.dense",
    "qwen3": r"(q|v|down)_proj|embed_tokens",
    "modernbert": r"Wqkv|Wi",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_beside_the_weights_is_merged(tmp_path, family, engine):
    base = tiny.write_family(tmp_path / "base", family)
    folder = copytree(base, tmp_path / "adapted")
    shapes = shapes_of(base, FAMILIES[family])
    table = next((name for name in shapes if "embed_tokens" in name or "word_emb" in name), None)
    products = write(folder, shapes, table=table)
    expected = states(with_changes(base, tmp_path / "merged", products, lambda _: 2.0))
    assert np.abs(expected - states(base)).max() > 0.1
    equals_transformers(folder, engine, expected)


def test_ranks_and_alphas_by_pattern_and_the_root_of_the_rank(tmp_path):
    base = tiny.write_family(tmp_path / "base", "qwen3")
    folder, shapes = copytree(base, tmp_path / "adapted"), shapes_of(base, "(q|v)_proj")
    ranks = {name: 2 for name in shapes if "v_proj" in name}
    products = write(
        folder,
        shapes,
        ranks=ranks,
        rank_pattern={"v_proj": 2},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 3},
        use_rslora=True,
    )

    def scale(module):
        alpha = 3 if module == "layers.1.self_attn.q_proj" else 8
        return alpha / ranks.get(module, 4) ** 0.5

    equals_transformers(
        folder, "ort", states(with_changes(base, tmp_path / "merged", products, scale))
    )


@pytest.mark.parametrize("backend", ENGINES)
def test_adapters_in_folders_of_their_own_are_chosen_by_name(tmp_path, backend):
    """One of another rank and of other modules; a text without a name gets none."""
    base = tiny.write_modules(tiny.write_family(tmp_path / "base", "qwen3"))
    folder, texts = copytree(base, tmp_path / "adapted"), ["baka mo", "lolo"]
    expected = {None: base}
    for seed, (name, pattern, rank) in enumerate(
        (("code", "(q|v)_proj|embed_tokens", 4), ("law", "down_proj", 2))
    ):
        shapes = shapes_of(base, pattern)
        products = write(
            folder / name,
            shapes,
            seed=seed,
            table="embed_tokens",
            r=rank,
            ranks=dict.fromkeys(shapes, rank),
        )
        scale = 8 / rank
        expected[name] = with_changes(base, tmp_path / name, products, lambda _, s=scale: s)
    encoder = Encoder.load(folder, backend=backend)
    for name, merged in expected.items():
        other = Encoder.load(merged, backend=backend)
        ours, theirs = encoder.encode(texts, prompt_name=name).dense, other.encode(texts).dense
        near(ours, theirs, 1e-5)
        other.close()
    encoder.close()
    assert encoder.spec.adapters.names == ("code", "law")


UNSUPPORTED = {
    r"`modules_to_save` is \"\['classifier'\]\"": {"modules_to_save": ["classifier"]},
    "`use_dora` is 'True'; supported: False": {"use_dora": True},
    "`bias` is 'all'; supported: 'none'": {"bias": "all"},
    "`init_lora_weights` is 'pissa'": {"init_lora_weights": "pissa"},
    "`peft_type` is 'IA3'; supported: 'LORA'": {"peft_type": "IA3"},
    "`an_option_nobody_knows_yet` is '3'": {"an_option_nobody_knows_yet": 3},
}
IMPOSSIBLE = {
    "`r` is 0": {"r": 0},
    "`lora_alpha` is 0": {"lora_alpha": 0},
    r"`alpha_pattern` holds '\(', which is no name": {"alpha_pattern": {"(": 2}},
    "`base_model_name_or_path` is 3": {"base_model_name_or_path": 3},
}
# More than names and alternatives of names
EXPRESSIONS = ["(aa|a)*c", "(a+)+b", "(a|b){2}", "[ab]c", "((a)|b)", "", "a||b"]


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        *(
            (UnsupportedArchitecture, changes, f"{why}.*merge_and_unl")
            for why, changes in UNSUPPORTED.items()
        ),
        *((LoadError, changes, why) for why, changes in IMPOSSIBLE.items()),
        *(
            (LoadError, {"rank_pattern": {name: 2}}, "`rank_pattern` holds .*which is no name")
            for name in EXPRESSIONS
        ),
    ],
)
def test_what_changes_vectors_otherwise_or_cannot_be_is_refused_before_weights_are_read(
    tmp_path, kind, changes, why
):
    folder = tiny.write_family(tmp_path, "bert")
    tiny.write_json(folder / "adapter_config.json", {**LORA, **changes})
    with pytest.raises(kind, match=f"adapter_config.json: {why}"):
        read_spec(folder, pooling="mean")


def test_the_adapter_of_another_base_is_refused(tmp_path):
    folder = tiny.write_family(tmp_path, "bert")
    write(folder, {"encoder.layer.0.attention.self.query": (8, 8)})
    with pytest.raises(LoadError, match="do not fit rank 4 and the base's weight"):
        equals_transformers(folder, "ort", np.empty(0))
    write(folder, {"layers.7.q_proj": (8, 8)})
    with pytest.raises(LoadError, match="weight of shape None"):
        equals_transformers(folder, "ort", np.empty(0))


def test_alpha_is_part_of_the_fingerprint(tmp_path):
    folder = tiny.write_family(tmp_path, "bert")
    shapes = shapes_of(folder, "query")
    found = set()
    for place in (folder, folder / "code"):
        for alpha in (8, 16):
            write(place, shapes, lora_alpha=alpha)
            found.add(fingerprint(read_spec(folder, pooling="mean"))["id"])
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (place / name).unlink()
    assert len(found) == 4


def test_an_adapter_alone_is_joined_with_its_base(tmp_path, monkeypatch):
    """As peft's and sentence-transformers' `save_pretrained` write it."""
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    base = tiny.write_modules(tiny.write_family(tmp_path / "base", "qwen3"), pooling="cls")
    folder = tmp_path / "adapter"
    products = write(folder, shapes_of(base, "v_proj"), base_model_name_or_path="../base")
    merged = with_changes(base, tmp_path / "merged", products, lambda _: 2.0)
    # The adapter's own pooling comes first
    for place in (folder, merged):
        tiny.write_modules(place, pooling="mean")
    vectors = [Encoder.load(place).encode(["baka mo"]).dense for place in (folder, merged)]
    near(*vectors, 1e-6)
    assert sorted(path.name for path in folder.iterdir()) == [
        "1_Pooling",
        "adapter_config.json",
        "adapter_model.safetensors",
        "modules.json",
    ]


def test_a_base_that_is_not_here_is_named_with_a_cure(tmp_path):
    write(tmp_path, {"q_proj": (8, 8)}, base_model_name_or_path="elsewhere-base")
    why = "`base_model_name_or_path` is 'elsewhere-base', which is not here: download it by `hf download`, or put"
    with pytest.raises(MissingArtifact, match=why):
        Encoder.load(tmp_path)


@pytest.mark.parametrize(
    "where", ["{}/elsewhere/base", "../elsewhere/base", "../../x", "~/x", ".."]
)
def test_a_base_lies_in_the_adapters_folder_or_directly_beside_it(tmp_path, monkeypatch, where):
    """A name in a stranger's file reads no folder of the machine, and asks no hub."""
    tiny.write_family(tmp_path / "elsewhere" / "base", "bert")
    folder = tmp_path / "adapter"
    write(folder, {"q_proj": (8, 8)}, base_model_name_or_path=where.format(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(LoadError, match="no folder in the adapter's or directly beside it"):
        find_model(ModelConfig(model_id=str(folder)))


def test_a_base_of_the_hub_is_fetched_only_if_the_adapter_was(tmp_path, monkeypatch):
    asked = []

    def download(name, *, local_files_only, **_):
        asked.append((name, local_files_only))
        raise huggingface_hub.errors.LocalEntryNotFoundError("none")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    write(tmp_path, {"q_proj": (8, 8)}, base_model_name_or_path="stranger/repository")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger").mkdir()
    with pytest.raises(MissingArtifact, match="stranger/repository"):
        find_model(ModelConfig(model_id=str(tmp_path)))
    assert asked == [("stranger/repository", True)]


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("q_proj", ["q_proj", "a.q_proj"], ["aq_proj", "q_proj.a"]),
        (r"^.*\.layers\.1\.(?:q|v)_proj$", ["a.layers.1.v_proj"], ["layers.11.q_proj"]),
        ("layers.0.(self_attn|mlp).(a|ab)c|z", ["x.layers.0.mlp.abc", "y.z"], ["layers.0.c"]),
        ("(a|a)" * 90 + "c", ["a" * 90 + "c"], ["a" * 90 + "d", "a" * 3000]),
    ],
)
def test_patterns_are_names_and_alternatives_of_names(pattern, names, others):
    places = peft._names(Path("x"), "rank_pattern", pattern)
    for name in names:
        assert any(peft._ends_with(name, each) for each in places), name
    for name in others:
        assert not any(peft._ends_with(name, each) for each in places), name
