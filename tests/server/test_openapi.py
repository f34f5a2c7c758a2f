"""The document has TEI's names, holds together, and describes what the routes take."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from hybridtei.server.openapi import document
from hybridtei.server.operations import ANSWERS, FIELDS, TEI_PATHS


@pytest.fixture(params=[False, True])
def paper(request: pytest.FixtureRequest) -> Any:
    return document(only_tei=request.param)


def test_every_reference_leads_somewhere(paper):
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', orjson.dumps(paper).decode()))
    assert names <= paper["components"]["schemas"].keys()
    assert {*ANSWERS.values(), *FIELDS.values(), "InputType", "Info", "ModelType"} <= names


def test_teis_alone_has_teis_paths_and_no_more():
    assert set(document(only_tei=True)["paths"]) == TEI_PATHS < set(document()["paths"])


def test_fields_keep_their_defaults_and_descriptions(paper):
    fields = paper["components"]["schemas"]["EmbedRequest"]["properties"]
    assert fields["truncation_direction"]["default"] == "Right"
    assert fields["inputs"] == {
        "$ref": "#/components/schemas/Input",
        "description": "A text, a list of ids, or a list of texts and id lists.",
    }


def test_answers_are_named(paper):
    content = paper["paths"]["/embed"]["post"]["responses"]["200"]["content"]
    assert content == {"application/json": {"schema": {"$ref": "#/components/schemas/EmbedResponse"}}}
    assert paper["components"]["schemas"]["EmbedResponse"]["items"]["items"] == {"type": "number"}
