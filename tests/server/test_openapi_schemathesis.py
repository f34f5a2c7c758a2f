"""schemathesis over our own OpenAPI document, all its checks: what the schemas admit is taken, all
else refused."""

import pytest

from conformance.fuzz.schemas import command_of
from tests.ran import ran
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import serving

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
PATHS = {
    "embeds": (None, ()),
    "classifies": (labelled(*LABELS), ("/predict", "/classify", "/v1/classify")),
    "tags": (labelled(*TAGS, tags=True), ("/predict_tokens",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATHS)
def test_the_document_and_the_server_agree(kind, tmp_path):
    spec, paths = PATHS[kind]
    only = [word for path in paths for word in ("--include-path", path)]
    with serving(spec) as server:
        command = command_of(server.url, "--max-examples", "3", "--seed", "1", *only)
        done = ran(command, cwd=tmp_path)
        assert server.service.admission.free == server.service.config.max_concurrent_requests
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("path", ["/collections/notes/points", "/embed", "/docs/index.html"])
def test_405_says_which_methods_there_are(server, path):
    for method in ("TRACE", "PUT"):
        answer = server.client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (
            405,
            "GET,HEAD" if "docs" in path else "POST",
        )
