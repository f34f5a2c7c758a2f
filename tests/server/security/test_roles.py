"""What a key may be used for: each route asks for one role, and says so in the words of its
dialect."""

import pytest

from hybridtei.errors import LoadError
from hybridtei.server.http.security import Keyring, read_keys
from tests.server.grpc.live import rpc_serving
from tests.server.live import JSON, POSTS

ROLES = ("infer", "search", "write", "manage")
EVERYTHING = "everything"
FILE = (
    "".join(f"{role} roles={role}:key-{role}\n" for role in ROLES)
    + f"{EVERYTHING}:key-{EVERYTHING}\n"
)
INFER = [
    *POSTS,
    "/predict_tokens",
    "/score",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/classify",
    "/v1/classify",
    "/v1/embed",
    "/v2/embed",
    "/api/embed",
    "/qdrant/inference",
    "/",
    "/m/small/embed",
]
ROUTES = [
    *((path, "infer") for path in INFER),
    *((path, "search") for path in ("/search", "/m/small/search")),
    *((path, "write") for path in ("/collections/c/points", "/m/small/collections/c/points")),
    *((path, "manage") for path in ("/models/load", "/models/unload", "/collections/c/import")),
]
CALLS = [
    "Embed",
    "EmbedSparse",
    "EmbedAll",
    "Predict",
    "PredictPair",
    "Rerank",
    "Tokenize",
    "Decode",
]
STREAMS = [
    "EmbedStream",
    "EmbedSparseStream",
    "RerankStream",
    "TokenizeStream",
    "PredictPairStream",
]


@pytest.fixture(scope="module")
def rpc(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(FILE)
    with rpc_serving(server={"api_key_file": str(path), "api_key": "key-flag"}) as running:
        yield running


def bearing(name):
    return {**JSON, "authorization": f"Bearer key-{name}"}


@pytest.mark.parametrize(("path", "role"), ROUTES)
def test_a_route_asks_for_its_role_before_the_body(rpc, path, role):
    for name in ROLES:
        answer = rpc.running.post(path, b"nonsense", headers=bearing(name))
        if name == role:
            assert answer.status_code not in (401, 403)
        else:
            assert answer.status_code == 403
            assert (
                f"this needs a key with the role `{role}`; the key `{name}` has {name}"
                in answer.text
            )
    for name in (EVERYTHING, "flag"):
        assert rpc.running.post(path, b"nonsense", headers=bearing(name)).status_code not in (
            401,
            403,
        )
    refused = rpc.running.post(path, b"nonsense")
    assert refused.status_code == 401
    assert not refused.content or "no API key" in refused.text


@pytest.mark.parametrize(
    ("path", "role"), [("/collections", "search"), ("/collections/c/export", "manage")]
)
def test_what_a_collection_holds_needs_a_role(rpc, path, role):
    def status(name):
        return rpc.running.get(path, headers=bearing(name)).status_code

    # 404: it has no store
    assert [status(name) for name in ROLES] == [404 if name == role else 403 for name in ROLES]
    assert (status("flag"), status("unknown")) == (404, 401)


def test_it_is_told_in_each_dialects_shape(rpc):
    def refused(path):
        return rpc.running.post(path, {}, headers=bearing("manage")).json()

    told = "this needs a key with the role `infer`; the key `manage` has manage"
    assert refused("/embed") == {"error": told, "error_type": "Forbidden"}
    assert refused("/v1/embeddings") == {
        "message": told,
        "code": 403,
        "type": "Forbidden",
        "error": {"message": told, "type": "Forbidden", "code": "403", "param": None},
        "detail": told,
    }
    assert refused("/v2/rerank")["detail"] == told
    assert refused("/qdrant/inference") == {"error": told}


def test_any_key_may_ask_what_is_served(rpc):
    for name in (*ROLES, EVERYTHING):
        for path in ("/info", "/models", "/v1/models"):
            assert rpc.running.get(path, headers=bearing(name)).status_code == 200


def test_qdrants_token_has_its_roles_too(rpc):
    body = {"inputs": [{"data": "one", "model": "small"}]}
    for name, status in (("infer", 200), ("search", 403), ("nobody", 401)):
        assert (
            rpc.running.post("/qdrant/inference", {**body, "token": f"key-{name}"}).status_code
            == status
        )


@pytest.mark.parametrize("name", [*CALLS, *STREAMS])
def test_calls_ask_for_infer(rpc, name):
    message = [{}] if name in STREAMS else {}
    for role in ROLES:
        code, details = rpc.refusal(
            name, message, metadata=[("authorization", f"Bearer key-{role}")]
        )
        assert (code == "PERMISSION_DENIED") == (role != "infer")
        if role != "infer":
            assert details == f"this needs a key with the role `infer`; the key `{role}` has {role}"


def test_any_key_may_ask_for_info(rpc):
    for role in ROLES:
        assert (
            rpc.ask("Info", {}, metadata=[("authorization", f"Bearer key-{role}")]).model_id
            == "small"
        )


@pytest.mark.parametrize(
    ("line", "roles"),
    [
        ("a:k", ROLES),
        ("a roles=write,search:k:e y", ("search", "write")),
        ("a roles=infer,search,write,manage:k", ROLES),
    ],
)
def test_how_roles_are_written(tmp_path, line, roles):
    (tmp_path / "keys").write_text(line)
    (key,) = read_keys(tmp_path / "keys")
    assert (key.name, key.roles) == ("a", roles)
    found = Keyring(file=tmp_path / "keys").find(line.partition(":")[2].encode())
    assert found.roles == roles


@pytest.mark.parametrize(
    "owner",
    [
        "a roles=",
        "a roles=hush",
        "a roles=infer,hush",
        "a roles=infer,infer",
        "a roles=infer ,search",
        "a  roles=infer",
    ],
)
def test_roles_that_are_none_are_refused_by_their_line_without_its_words(tmp_path, owner):
    (tmp_path / "keys").write_text(f"b:x\n{owner}:hush")
    with pytest.raises(LoadError, match="line 2: ") as refused:
        read_keys(tmp_path / "keys")
    assert "hush" not in str(refused.value)
    assert "roles=ROLE" in str(refused.value) or "infer, search, write, manage" in str(
        refused.value
    )
