"""A small Dockerfile's steps performed, and servers that do not behave. The real one: `python
deploy/build_steps.py`."""

import os
import subprocess
import sys

import pytest

from deploy import build_steps
from deploy.build_steps import Builder, start
from deploy.dockerfile import parse

SMALL = """
ARG BASE=x
FROM ${BASE} AS made
ARG WORD=hello
WORKDIR /src
COPY pyproject.toml README.md ./
COPY deploy ./deploy
RUN mkdir -p /wheels && echo "${WORD}" > /wheels/word && ls /src > /wheels/list
FROM ${BASE} AS runtime
ENV PATH=/opt/own/bin:${PATH} WHERE=/data
RUN groupadd --gid 1 somebody
FROM runtime AS final
COPY --from=made /wheels /opt/wheels
RUN echo "${WHERE}" > /opt/where
"""
CHECK = [sys.executable, "-c", "import os, sys; sys.exit(not os.path.exists(os.environ['READY']))"]


@pytest.fixture
def builder(tmp_path, monkeypatch):
    monkeypatch.setattr(build_steps.subprocess, "run", without_environments(subprocess.run))
    return Builder(tmp_path / "built", sys.executable)


def without_environments(run):
    """`subprocess.run`, but a base image of its own is not worth the seconds."""

    def instead(command, **settings):
        return None if command[1:3] == ["-m", "venv"] else run(command, **settings)

    return instead


def test_a_stage_holds_what_its_copies_name_and_nothing_else(builder):
    environment = builder.build(parse(SMALL), "final")
    place = builder.place
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()) == [
        "opt/wheels/list",
        "opt/wheels/word",
        "opt/where",
    ]
    assert (place / "opt/wheels/word").read_text() == "hello\n"
    assert (place / "opt/wheels/list").read_text().split() == [
        "README.md",
        "deploy",
        "pyproject.toml",
    ]
    assert (place / "opt/where").read_text() == f"{place}/data\n"
    assert environment["PATH"].startswith(f"{place}/opt/own/bin:")
    assert not list((builder.done / "made/src").rglob("__pycache__"))


def served(body):
    """A server's program: `ready()` makes the check content."""
    program = "import os, signal, sys\nready = lambda: open(os.environ['READY'], 'w').close()\n"
    return [sys.executable, "-c", program + body]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); signal.pause()", None),
        ("ready(); signal.pause()", "SIGTERM ended it with -15"),
        ("sys.exit(3)", "the server ended with 3"),
    ],
)
def test_a_server_must_become_healthy_and_end_with_0(body, fault, tmp_path):
    environment = {"PATH": os.environ["PATH"], "READY": str(tmp_path / "ready")}
    if fault is None:
        start(served(body), environment, CHECK, tmp_path / "log")
        return
    with pytest.raises(SystemExit, match=fault):
        start(served(body), environment, CHECK, tmp_path / "log")
