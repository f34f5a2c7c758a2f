"""Named prompts and their errors, in TEI's words."""

from __future__ import annotations

import pytest

from hybridtei.errors import InvalidInput, LoadError
from hybridtei.models.text.tokenizer import Prompts

TABLE = {"query": "search: ", "document": "", "größe": "x"}


def configure(table: dict[str, str] | None, prompt: str | None = None, name: str | None = None) -> Prompts:
    return Prompts.configure(table, default_prompt=prompt, default_prompt_name=name)


def test_a_name_finds_its_text() -> None:
    assert Prompts(TABLE).named("query") == "search: "
    assert Prompts(TABLE).named("document") == ""


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [(configure(None), None), (configure(TABLE, "x: "), "x: "), (configure(TABLE, None, "query"), "search: ")],
)
def test_no_name_is_the_default(prompts: Prompts, expected: str | None) -> None:
    assert prompts.named(None) == expected


def test_a_named_prompt_goes_before_the_default() -> None:
    assert configure(TABLE, "x: ").named("query") == "search: "


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(InvalidInput) as caught:
        Prompts(TABLE).named("title")
    assert str(caught.value) == (
        "`default-prompt-name` is set to `title` but it was not found in the Sentence Transformers prompts. "
        'Available prompts: ["query", "document", "größe"]'
    )


def test_a_name_without_any_table() -> None:
    with pytest.raises(InvalidInput) as caught:
        Prompts().named("query")
    assert str(caught.value) == (
        "`default-prompt-name` is set to `query` but no prompts were found in the Sentence Transformers configuration"
    )


@pytest.mark.parametrize(("table", "prompt", "name"), [(TABLE, "x", "query"), (TABLE, None, "title"), (None, None, "query")])
def test_a_default_that_cannot_be_is_found_at_start(table: dict[str, str] | None, prompt: str | None, name: str) -> None:
    with pytest.raises(LoadError):
        configure(table, prompt, name)


def test_a_prompt_named_as_an_adapter_chooses_it() -> None:
    table = {**TABLE, "separation": ""}
    prompts = Prompts.configure(table, default_prompt=None, default_prompt_name="separation", adapters=("query", "separation"))
    assert [prompts.adapter(name) for name in ("query", "separation", "document", None)] == [1, 2, 0, 2]
    plain = Prompts.configure(table, default_prompt="x: ", default_prompt_name=None, adapters=("query", "separation"))
    assert [plain.adapter(name) for name in ("separation", None)] == [2, 0]
