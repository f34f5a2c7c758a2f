"""The whole command on a tiny seeded BERT."""

import json
import random

import pytest
import torch
from safetensors import safe_open

from conformance.small import tiny
from conformance.small.vocabulary import WORDS
from hybridtei import cli
from hybridtei.cli import command_parsers
from hybridtei.cli.model import ACTIVATIONS, DROPS
from hybridtei.models.heads import models as heads
from hybridtei.models.heads.models import load_trunk
from hybridtei.models.heads.run import train
from tests.near import near


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint folder: BERT of 2 layers, hidden size 32, one word a token."""
    return tiny.write_bert(tmp_path_factory.mktemp("tiny-bert"), pooling=None)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs whose query is three of the text's words."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for _ in range(160):
            words = draw.sample(WORDS, 12)
            lines.write(json.dumps({"query": " ".join(words[3:6]), "text": " ".join(words)}) + "\n")
    return path


def options(model, pairs, folder, *more):
    fixed = (
        "--date 2000-01-01 --group-size 8 --min-words 3 --max-tokens 32 --sparse-width 16 --dim 16 "
        "--prefixes 8 --groups 2 --epochs 4 --learning-rate 0.01"
    )
    paths = {"model": model, "pairs": pairs, "cache": folder / "cache"}
    paths["output"] = folder / "head.safetensors"
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    return [*words, *fixed.split(), *more]


def parsed(words):
    return command_parsers()["train"].parse_args(words)


def main(words):
    return cli.main(["train", *words])


def test_the_loss_falls_and_the_file_repeats(model, pairs, tmp_path):
    history = train(parsed(options(model, pairs, tmp_path)))
    assert set(history[0]) == {"sparse", "maxsim8", "maxsim16"}
    assert all(history[-1][name] < 0.95 * history[0][name] for name in history[0]), history
    first = (tmp_path / "head.safetensors").read_bytes()
    train(parsed(options(model, pairs, tmp_path)))
    assert (tmp_path / "head.safetensors").read_bytes() == first
    train(parsed(options(model, pairs, tmp_path, "--seed", "1")))
    assert (tmp_path / "head.safetensors").read_bytes() != first


def test_the_head_file(model, pairs, tmp_path):
    assert main(options(model, pairs, tmp_path, "--epochs", "1", "--licence", "CC0-1.0")) == 0
    with safe_open(tmp_path / "head.safetensors", "pt") as file:
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["hybridtei_heads"])
        assert file.get_tensor("multivector.weight").dtype == torch.float16
    assert shapes == {
        "sparse.hidden.weight": (16, 64),
        "sparse.hidden.bias": (16,),
        "sparse.out.weight": (1, 16),
        "sparse.out.bias": (1,),
        "multivector.weight": (16, 32),
    }
    assert described["base"] == {"name": model.name, "sha256": load_trunk(model).sha256}
    assert described["sparse"] == {
        "inputs": ["hidden", "embedding"],
        "activation": "gelu",
        "idf": True,
    }
    assert described["multivector"] == {"dim": 16, "drop": "first", "prefixes": [8, 16]}
    assert described["training"]["licence"] == "CC0-1.0"
    assert str(tmp_path) not in described["training"]["command"]


def test_the_linear_form(model, pairs, tmp_path):
    more = ["--epochs", "1", "--sparse-width", "0", "--sparse-inputs", "hidden", "--bias"]
    assert main(options(model, pairs, tmp_path, *more)) == 0
    with safe_open(tmp_path / "head.safetensors", "pt") as file:
        names = sorted(file.keys())
        assert file.get_tensor("sparse.out.weight").shape == (1, 32)
        assert json.loads(file.metadata()["hybridtei_heads"])["sparse"] == {
            "inputs": ["hidden"],
            "idf": True,
        }
    assert names == [
        "multivector.bias",
        "multivector.weight",
        "sparse.out.bias",
        "sparse.out.weight",
    ]


def test_a_cache_of_other_texts_is_not_reused(model, pairs, tmp_path):
    main(options(model, pairs, tmp_path, "--epochs", "1"))
    before = (tmp_path / "cache" / "input_ids.i32").read_bytes()
    main(options(model, pairs, tmp_path, "--epochs", "1", "--max-tokens", "8"))
    assert len((tmp_path / "cache" / "input_ids.i32").read_bytes()) < len(before)


def test_padding_does_not_change_token_states(model):
    trunk = load_trunk(model)
    sequences = trunk.tokenize(["baka bake", "balo balu bami bamo bana"], 32)
    for together, sequence in zip(trunk.encode(sequences), sequences, strict=True):
        near(together, trunk.encode([sequence])[0], 1e-5)
    assert trunk.special_ids == (0, 1, 2, 3, 4)


def test_errors_are_said_in_one_line(model, pairs, tmp_path, capsys):
    assert main(options(model, pairs, tmp_path, "--min-words", "1000")) == 1
    assert "no training pairs" in capsys.readouterr().err
    assert main(options(model, pairs, tmp_path, "--prefixes", "17")) == 1
    assert "--prefixes" in capsys.readouterr().err


def test_the_command_offers_what_the_heads_know():
    assert set(ACTIVATIONS) == set(heads.ACTIVATIONS)
    assert DROPS == heads.DROPS
