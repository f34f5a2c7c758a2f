"""The bytes of every route's answer are of the type that its handler is annotated with, which
OpenAPI tells."""

from contextlib import suppress

import msgspec
import pytest

from conformance.quiet import COLLECTION, FILL
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.server.app import framework
from hybridtei.server.openapi import EXAMPLES, TAGS, answers_of, documented
from tests.retrieval.search.small_search import MODEL, spec_in
from tests.server.live import serving

APP = framework()
# Whose body is no JSON, and which needs a key: see api/test_transfer
LINES = "/collections/{name}/import"
ROUTES = {
    path: handler for path, handler in documented(APP) if answers_of(handler) and path != LINES
}


@pytest.fixture(scope="module")
def searching(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searching")
    with serving(
        spec_in(folder), schemas=CollectionSchemas(MemoryStore()), model_id=MODEL
    ) as running:
        assert (
            running.post(f"/collections/{COLLECTION}/points", {**FILL, "create": True}).status_code
            == 200
        )
        yield running


@pytest.mark.parametrize("path", ROUTES)
def test_bytes_are_what_the_document_says(path, searching, server, reranker, classifier, tagger):
    body = EXAMPLES[TAGS[path]][path]
    url = path.replace("{name}", COLLECTION)
    url = url.replace("{identity}", str(FILL["points"][0].get("id", 1)))
    asked = (
        one.get(url) if body is None else one.post(url, body)
        for one in (searching, server, classifier, reranker, tagger)
    )
    response = next(response for response in asked if response.status_code == 200)
    assert any(_is_of(kind, response.content) for kind in answers_of(ROUTES[path])), response.text[
        :500
    ]


def _is_of(kind, content):
    with suppress(msgspec.ValidationError):
        msgspec.json.decode(content, type=kind)
        return True
    return False
