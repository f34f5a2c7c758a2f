"""The compose file: valid by the specification's schema, and of one mind with the image, the
command and its neighbours."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from deploy.dockerfile import parse
from hybridtei.cli.flags import from_flags
from hybridtei.config import StoreConfig
from tests.deploy.command_line import DEPLOY, ROOT, check_ingest, check_serve
from tests.server.live import HANG

FOLDER = DEPLOY / "compose"
FILE = FOLDER / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text())
SERVICES = COMPOSE["services"]
SERVERS = ("hybridtei", "hybridtei-cuda")


def filled(text):
    """`${NAME:-default}` -> default; `${NAME:?…}` and `${NAME}` -> something."""
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[1] or "something", text)


def variables(service):
    return {name: filled(value) for name, value in SERVICES[service]["environment"].items()}


PAGE = (ROOT / "notebooks/from-tei.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text", [FILE.read_text(encoding="utf-8"), PAGE.partition("```yaml\n")[2].partition("```")[0]]
)
def test_fits_the_specification(text, tmp_path):
    file = tmp_path / "compose.yaml"
    file.write_text(text, encoding="utf-8")
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(file),
    ]
    assert subprocess.run(command, capture_output=True, check=False, timeout=HANG).returncode == 0


@pytest.mark.parametrize("service", SERVERS)
def test_the_command_takes_the_variables_and_listens_where_others_look(service):
    settings = check_serve([], variables(service))
    [port] = SERVICES[service]["ports"]
    assert int(port.rpartition(":")[2]) == settings.port
    assert settings.api_key == "something"
    assert settings.drain_seconds < int(SERVICES[service]["stop_grace_period"].removesuffix("s"))
    [scraped] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"hybridtei:{settings.prometheus_port}"]}]


@pytest.mark.parametrize("service", [*SERVERS, "ingest"])
def test_servers_search_the_store_beside_them_that_ingest_fills(service):
    store = from_flags(StoreConfig, {}, variables(service))
    assert store.qdrant_url == "http://qdrant:6334"
    assert store.qdrant_api_key == filled(
        SERVICES["qdrant"]["environment"]["QDRANT__SERVICE__API_KEY"]
    )


@pytest.mark.parametrize("service", SERVERS)
def test_images_are_built_from_targets_that_exist_for_their_user(service):
    build = SERVICES[service]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    stage = parse((ROOT / "Dockerfile").read_text())[build["target"]]
    assert SERVICES[service]["image"] == f"hybridtei:{stage.name}"
    assert SERVICES[service]["user"] == stage.all("USER")[-1].arguments


def test_ingest_goes_to_the_neighbours():
    ingest = SERVICES["ingest"]
    assert ingest["entrypoint"] == ["hybridtei", "ingest"]
    check_ingest([filled(word) for word in ingest["command"]], variables("ingest"))
    url = next(word for word in ingest["command"] if word.startswith("--url="))
    assert url == f"--url=http://hybridtei:{check_serve([], variables('hybridtei')).port}"


def test_ports_are_open_to_this_machine_alone_and_told_apart():
    published = [
        port.rpartition(":")[0]
        for service in SERVICES.values()
        for port in service.get("ports", ())
    ]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len(published) == len(set(published))


def test_ingest_reads_the_documents_of_the_clone_and_docker_makes_no_folder():
    """Compose resolves a relative path beside the file, wherever the printed command is run."""
    [documents] = [volume for volume in SERVICES["ingest"]["volumes"] if isinstance(volume, dict)]
    assert (FOLDER / filled(documents["source"])).resolve() == ROOT / "documents"
    assert documents["bind"] == {"create_host_path": False}
    assert documents["read_only"]
