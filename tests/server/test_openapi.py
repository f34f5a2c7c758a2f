"""The document has TEI's names, holds together, and describes what the routes take."""

import re

import orjson
import pytest
from jsonschema import Draft202012Validator

from hybridtei.config import ServerConfig
from hybridtei.server.app import framework
from hybridtei.server.openapi import EXAMPLES, FIELDS, TEI_RESPONSES, document

WHOLE, OF_TEI = document(framework()), document(framework(ServerConfig(only_tei_routes=True)))
TEI_PATHS = {
    "/decode",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/health",
    "/info",
    "/metrics",
    "/predict",
    "/rerank",
    "/similarity",
    "/tokenize",
    "/v1/embeddings",
}


@pytest.fixture(params=[False, True])
def paper(request):
    return OF_TEI if request.param else WHOLE


def test_every_reference_leads_somewhere(paper):
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', orjson.dumps(paper).decode()))
    assert names <= paper["components"]["schemas"].keys()
    assert {*TEI_RESPONSES.values(), *FIELDS.values(), "InputType", "Info", "ModelType"} <= names


def test_teis_alone_has_teis_paths_and_no_more():
    assert set(OF_TEI["paths"]) == TEI_PATHS < set(WHOLE["paths"])


def test_fields_keep_their_defaults_and_descriptions(paper):
    fields = paper["components"]["schemas"]["EmbedRequest"]["properties"]
    assert fields["truncation_direction"]["default"] == "Right"
    assert fields["inputs"] == {
        "$ref": "#/components/schemas/Input",
        "description": "A text, a list of ids, or a list of texts and id lists.",
    }


def test_every_operation_has_one_tag_and_an_example_that_its_schema_allows(paper):
    expected = "Text Embeddings Inference" if paper is OF_TEI else "hybridtei"
    assert paper["info"]["title"] == expected
    tags = {tag["name"] for tag in paper["tags"]}
    operations = {
        path: operation
        for path, methods in paper["paths"].items()
        for operation in methods.values()
    }
    assert tags == {tag for operation in operations.values() for tag in operation["tags"]}
    for path, operation in operations.items():
        assert len(operation["tags"]) == 1
        assert all("example" in parameter for parameter in operation["parameters"])
        for media in operation.get("requestBody", {}).get("content", {}).values():
            schema = {**media["schema"], "components": paper["components"]}
            assert media["example"] is not None, path
            Draft202012Validator(schema).validate(media["example"])


def test_every_example_is_of_an_operation():
    assert {path for bodies in EXAMPLES.values() for path in bodies} == set(WHOLE["paths"])


def test_answers_are_named(paper):
    content = paper["paths"]["/embed"]["post"]["responses"]["200"]["content"]
    assert content == {
        "application/json": {"schema": {"$ref": "#/components/schemas/EmbedResponse"}}
    }
    assert paper["components"]["schemas"]["EmbedResponse"]["items"]["items"] == {"type": "number"}


def test_every_part_of_a_path_is_a_parameter():
    for path, methods in WHOLE["paths"].items():
        for described in methods.values():
            names = [
                one["name"]
                for one in described.get("parameters", ())
                if one["in"] == "path" and one["required"]
            ]
            assert names == re.findall(r"\{(\w+)\}", path)


def test_refusals_are_of_the_types_that_are_told(server):
    asked = {"400": b"{", "415": b"{}", "422": b"{}"}
    for path, methods in WHOLE["paths"].items():
        for status, body in asked.items() if "post" in methods else ():
            headers = {"content-type": "text/plain" if status == "415" else "application/json"}
            response = server.client.post(
                path.replace("{name}", "x"), content=body, headers=headers
            )
            told = (
                methods["post"]["responses"][str(response.status_code)]
                if response.status_code != 404
                else None
            )
            assert (
                told is None
                or response.headers["content-type"].partition(";")[0] in told["content"]
            ), path


def test_what_a_qdrant_server_is_told_is_an_error_alone(server):
    response = server.client.post("/qdrant/inference", content=b"{}")
    told = WHOLE["paths"]["/qdrant/inference"]["post"]["responses"][str(response.status_code)][
        "content"
    ]
    name = told["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert response.json().keys() == WHOLE["components"]["schemas"][name]["properties"].keys()


def admits_null(schema):
    return {"type": "null"} in schema.get("anyOf", ())


def test_a_field_that_may_be_missing_may_be_null_where_tei_does_not_read_it():
    def fields_of(paper, path):
        body = paper["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rpartition("/")[2]
        schema = paper["components"]["schemas"][name]
        required = schema.get("required", ())
        return {key: field for key, field in schema["properties"].items() if key not in required}

    for path in ("/v2/embed", "/api/embed", "/embed_hybrid"):
        assert all(map(admits_null, fields_of(WHOLE, path).values())), path
    for paper in (WHOLE, OF_TEI):
        assert not admits_null(fields_of(paper, "/embed")["truncation_direction"])
