"""`conformance/clients`: the clients of the extra `dev`, and how calls are compared and
environments kept."""

import importlib.util
import json
import os
import sys

import pytest

from hybridtei import Encoder
from hybridtei.config import EMBEDDED_MODEL
from tests.near import near
from tests.ran import ran
from tests.server.live import ROOT, commanded, serving

CLIENTS = ROOT / "conformance" / "clients"


def module(path):
    found = importlib.util.spec_from_file_location(f"conformance_{path.stem}", path)
    loaded = importlib.util.module_from_spec(found)
    # Dataclasses look for their module there
    sys.modules[found.name] = loaded
    found.loader.exec_module(loaded)
    return loaded


harness = module(CLIENTS / "harness.py")
models = module(CLIENTS / "models.py")
sys.path.insert(0, str(CLIENTS))
try:
    runner = module(CLIENTS / "run.py")
finally:
    sys.path.remove(str(CLIENTS))
environments = sys.modules["environments"]
SEPARATE = [client for client in runner.CLIENTS if client.group in environments.SEPARATE]


def run(*flags):
    """Status, table, and what the last line tells of each client."""
    command = [sys.executable, str(CLIENTS / "run.py"), "--only", "plain_http", "--no-grpc", *flags]
    done = ran(command)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])["clients"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """What scripts are told of a server with the four tiny models."""
    folder = tmp_path_factory.mktemp("clients")
    listed, told = folder / "models.toml", folder / "server.json"
    roles = {"embed": "hybrid", "rerank": "reranker", "classify": "classifier", "tag": "tagger"}
    listed.write_text(
        "\n".join(models.table(alias, str(models.tiny(folder, alias))) for alias in roles.values())
    )
    with commanded("--models", str(listed), "--offline") as url:
        told.write_text(json.dumps({"url": url, **roles, "grpc": {}}))
        yield told


@pytest.mark.parametrize(
    "script",
    [
        "baseten",
        "cohere_sdk",
        "hugging_face",
        "ollama_sdk",
        "openai_sdk",
        "voyage",
        "plain_http",
    ],
)
def test_every_call_of_a_client_that_is_installed_here(script, fleet):
    command = [sys.executable, "-W", "ignore", str(CLIENTS / "calls" / f"{script}.py"), str(fleet)]
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS)}
    done = ran(command, env=environment)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    told = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, told["failed"], told["skipped"]) == (0, {}, {})
    assert told["passed"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """What scripts are told of a server with the embedded model."""
    told = tmp_path_factory.mktemp("embedded") / "server.json"
    roles = dict.fromkeys(("embed", "rerank", "classify", "tag"), EMBEDDED_MODEL)
    with commanded("--offline") as url:
        told.write_text(json.dumps({"url": url, **roles, "grpc": {}}))
        yield told


@pytest.mark.slow
@pytest.mark.parametrize("client", SEPARATE, ids=lambda client: client.script)
def test_every_call_of_a_client_with_an_environment_of_its_own(client, request):
    home = environments.ready(client.group)
    if home is None:
        pytest.skip(f"not made: python conformance/clients/environments.py {client.group}")
    is_node = client.group == environments.NODE
    told = request.getfixturevalue("embedded" if is_node else "fleet")
    outcome = runner.run_client(client, home, told, environments.FOLDER)
    assert outcome["failed"] == {}
    # Calls over gRPC need a server a model: `conformance/clients/run.py` starts these
    assert all("no gRPC server" in reason for reason in outcome["skipped"].values())
    assert outcome["passed"]
    if is_node:
        encoder = Encoder.load()
        vectors = encoder.encode(harness.TEXTS).dense
        near(outcome["vectors"], vectors, 1e-5)
        encoder.close()


def test_a_server_that_answers_wrongly_is_found_out():
    # Knows no such models, and another vocabulary
    with serving() as running:
        status, table, (told,) = run("--base-url", running.url, "--embedder", "small")
    assert "dify_tei_rerank" in told["failed"]
    assert "FAILED dify_tei_rerank" in table
    assert status == 1


def test_every_client_has_a_script_and_a_list():
    clients = runner.CLIENTS
    calls = CLIENTS / "calls"
    assert {client.script for client in clients} == {
        path.stem for suffix in ("py", "mjs") for path in calls.glob(f"*.{suffix}")
    }
    lists = {path.name.split(".")[0] for path in (CLIENTS / "requirements").iterdir()}
    assert {client.group for client in clients if client.group} == lists


def test_both_harnesses_have_the_same_texts():
    script = (CLIENTS / "harness.mjs").read_text()
    assert f"TEXTS = {json.dumps(harness.TEXTS)}" in script
    assert f"QUERY = {json.dumps(harness.QUERY)}" in script
