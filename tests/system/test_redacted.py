"""Settings in the log: TEI's masks, and no key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.config import EngineConfig, ModelConfig, ServerConfig, StoreConfig
from hybridtei.system.logs import described, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("BAAI/bge-large-en-v1.5", "BAA*/***-*****-**-v1.5"),
        ("/repository", "/rep****ory"),
        ("abcd", "****"),
        ("abcde", "a***e"),
        ("", ""),
        ("hf_abcdefghij", "hf_a******hij"),
    ],
)
def test_masks_are_teis(text, shown):
    assert masked(text) == shown


@given(st.text())
def test_a_mask_shows_at_most_three_letters_at_either_end(text):
    shown = masked(text)
    assert len(shown) == len(text)
    letters = sum(character.isalnum() for character in text)
    assert sum(character.isalnum() for character in shown) <= min(6, 2 * (letters // 3))
    assert all(new in (old, "*") for new, old in zip(shown, text, strict=True))


@given(
    st.text(min_size=1).filter(
        lambda key: "hidden" not in key and key not in repr((ServerConfig(), StoreConfig()))
    )
)
def test_a_key_is_never_shown(key):
    line, other = (
        described((ServerConfig(api_key=each), StoreConfig(qdrant_api_key=each)))
        for each in (key, "another")
    )
    assert line == other
    assert line.count('"[hidden]"') == 2


@pytest.mark.parametrize("url", ["http://user:hush@h", "user:hush@h", "http://a:hush@b,c:hush@h"])
def test_a_password_of_a_url_is_never_shown(url):
    line = described((ServerConfig(otlp_endpoint=url), StoreConfig(qdrant_url=url)))
    assert "hush" not in line
    assert line.count('"[hidden]@h"') == 2


def test_every_field_is_there_once_and_the_rest_as_given():
    settings = (
        ModelConfig(model_id="org/model-name", hf_token="hf_secrets"),
        EngineConfig(),
        ServerConfig(task='a"b'),
    )
    line = described(settings, models="models.toml")
    for one in settings:
        for name in type(one).__struct_fields__:
            assert line.count(f" {name}: ") == 1, name
    assert line.startswith('Args { model_id: "org/*****-*ame", ')
    assert line.endswith(', models: "models.toml" }')
    assert "secrets" not in line
    assert 'task: "a\\"b"' in line
    assert "auto_truncate: true" in line
    assert "revision: None" in line


def test_of_several_models_all_are_shown_masked():
    assert 'model_id: ["abc***ghi", "****"]' in described(
        (ModelConfig(),), model_id=["abcdefghi", "jklm"]
    )
