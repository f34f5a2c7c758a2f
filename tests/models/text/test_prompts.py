"""Named prompts and their errors, in TEI's words."""

import pytest

from hybridtei.errors import LoadError
from hybridtei.models.text.tokenizer import Prompts

TABLE = {"query": "search: ", "document": "", "größe": "x"}


def configure(table, prompt=None, name=None):
    return Prompts.configure(table, default_prompt=prompt, default_prompt_name=name)


@pytest.mark.parametrize(
    ("table", "prompt", "name"),
    [(TABLE, "x", "query"), (TABLE, None, "title"), (None, None, "query")],
)
def test_a_default_that_cannot_be_is_found_at_start(table, prompt, name):
    with pytest.raises(LoadError):
        configure(table, prompt, name)


def test_a_prompt_named_as_an_adapter_chooses_it():
    table = {**TABLE, "separation": ""}
    prompts = Prompts.configure(
        table,
        default_prompt=None,
        default_prompt_name="separation",
        adapters=("query", "separation"),
    )
    assert [prompts.adapter(name) for name in ("query", "separation", "document", None)] == [
        1,
        2,
        0,
        2,
    ]
    plain = Prompts.configure(
        table, default_prompt="x: ", default_prompt_name=None, adapters=("query", "separation")
    )
    assert [plain.adapter(name) for name in ("separation", None)] == [2, 0]
