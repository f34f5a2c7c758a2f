"""The API key: who needs it, and when it is looked at."""

import pytest

from tests.server.live import serving

KEY = "s3cret-Kéy"
RIGHT = f"Bearer {KEY}".encode()
NO_KEY = "no API key or an unknown one: send the header `Authorization: Bearer KEY`"


@pytest.fixture(scope="module")
def locked():
    with serving(server={"api_key": KEY, "payload_limit": 1000}) as running:
        yield running


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"Bearer",
        RIGHT + b"x",
        f"Basic {KEY}".encode(),
        f"Bearer {KEY}".encode("latin-1"),
        b"Bearer \xff\xfe",
    ],
)
def test_anything_but_the_key_is_401_and_on_teis_routes_without_a_body(locked, given, caplog):
    headers = {} if given is None else {b"authorization": given}
    # No content type: the key comes first
    response = locked.client.post("/embed", content=b'{"inputs":"one"}', headers=headers)
    assert (response.status_code, response.content) == (401, b"")
    assert "content-type" not in response.headers
    assert NO_KEY in caplog.text
    caplog.clear()
    response = locked.client.post("/v1/embeddings", content=b"", headers=headers)
    assert (response.status_code, response.json()["error"]["message"]) == (401, NO_KEY)
    assert NO_KEY in caplog.text
    caplog.clear()
    response = locked.client.post("/embed_hybrid", content=b"x" * 2000, headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json() == {"error": NO_KEY, "error_type": "Unauthorized"}
    assert NO_KEY in caplog.text


@pytest.mark.parametrize("scheme", [b"bearer", b"BEARER", b"Bearer"])
def test_the_schemes_case_counts_on_teis_routes_alone(locked, scheme):
    headers = {b"authorization": scheme + b" " + KEY.encode(), b"content-type": b"application/json"}
    asked = locked.client.post("/v1/embeddings", content=b'{"input":"one"}', headers=headers)
    assert asked.status_code == 200
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    asked = locked.client.post("/embed", content=b'{"inputs":"one"}', headers=headers)
    assert asked.status_code == (200 if scheme == b"Bearer" else 401)


def test_a_missing_key_is_told_in_each_dialects_form(locked):
    cause = {"message": NO_KEY, "type": "Unauthorized", "code": "401", "param": None}
    said = {"message": NO_KEY, "code": 401, "type": "Unauthorized", "error": cause}
    detail = [{"loc": ["body"], "msg": NO_KEY, "type": "Unauthorized"}]
    told = {
        "/qdrant/inference": {"error": NO_KEY},
        "/v2/embed": {**said, "detail": NO_KEY},
        "/score": {**said, "detail": detail},
    }
    for path, form in told.items():
        response = locked.post(path, {})
        assert (response.status_code, response.json()) == (401, form)
        assert response.headers["link"].startswith("</page/errors.html#nokey>")
