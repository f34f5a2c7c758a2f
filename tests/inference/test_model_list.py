"""Lists of models: what a file may say, what is taken from the flags, and what is refused by
name."""

from pathlib import Path

import pytest

from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError
from hybridtei.inference.load import from_ids, read_models

FLAGS = ModelConfig(dtype="bfloat16", offline=True)


def written(folder, text):
    path = folder / "models.toml"
    path.write_text(text)
    return path


def test_a_table_a_model_over_the_flags(tmp_path):
    path = written(
        tmp_path,
        """
        [[model]]
        model_id = "minilm-hybrid"
        [[model]]
        model_id = "/models/ranker/"
        dtype = "int8"
        role = "rerank"
        [[model]]
        model_id = "org/tagger"
        alias = "ner"
        """,
    )
    first, second, third = read_models(path, FLAGS)
    assert (first.alias, first.dtype, first.offline) == ("minilm-hybrid", "bfloat16", True)
    assert (second.alias, second.dtype, second.role) == ("ranker", "int8", "rerank")
    assert third.alias == "ner"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[model]]\nmodel_id = 'a'\n[other]", "nothing but"),
        ("", "nothing but"),
        ("[[model", "cannot be read"),
        ("[[model]]\nalias = 'a'", "model 1: `model_id` should be a text"),
        (
            "[[model]]\nmodel_id = 'a'\n[[model]]\nmodel_id='b'\ncolour = 1",
            "model 2: unknown key `colour`; known: ",
        ),
        ("[[model]]\nmodel_id = 'a'\ndtype = 'int4'", r"dtype: got 'int4', expected one of"),
        ("[[model]]\nmodel_id = 'x/a'\n[[model]]\nmodel_id = 'y/a'", "two models are called 'a'"),
        ("[[model]]\nmodel_id = 'a'\nalias = 'no/slash'", "model 1: alias 'no/slash'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, why):
    with pytest.raises(LoadError, match=why):
        read_models(written(tmp_path, text), FLAGS)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LoadError, match=str(tmp_path / "none.toml")):
        read_models(tmp_path / "none.toml", FLAGS)


def test_repeated_flags_name_models_too():
    first, second = from_ids(["minilm-hybrid", "org/ranker"], FLAGS)
    assert (first.alias, second.alias, second.dtype) == ("minilm-hybrid", "ranker", "bfloat16")
    with pytest.raises(LoadError, match="two models are called 'a'"):
        from_ids(["x/a", "y/a"], FLAGS)
    with pytest.raises(LoadError, match="alias ''"):
        from_ids(["/"], FLAGS)


def test_a_list_without_an_end_is_refused():
    with pytest.raises(LoadError, match="/dev/zero: larger than 1000000 bytes"):
        read_models(Path("/dev/zero"), FLAGS)
