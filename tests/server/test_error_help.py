"""Errors lead to their section of the page on errors: by a header on our own routes, in the log,
and below a message."""

import re

import pytest

from hybridtei import cli, errors
from notebooks.writing.reference import ERRORS
from tests.server.live import serving

SECTIONS = dict(
    re.findall(
        r"^## (\w+)\n\n(.*?)(?=\n## |\Z)",
        ERRORS.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
MANY = {"inputs": ["one"] * 33}


@pytest.mark.parametrize("name", KINDS)
def test_every_error_has_a_section_with_its_status(name):
    """Those that HTTP never answers with say where they come from."""
    section = SECTIONS[name]
    error = KINDS[name].__new__(KINDS[name])
    assert section.startswith((f"HTTP {error.http_status}.", "gRPC only.", "At start"))
    assert errors.anchor_of(error) == name.lower()


def test_there_is_no_section_without_an_error():
    assert {*SECTIONS} - {*KINDS} == {"BodyError"}


def test_our_routes_link_to_the_section_and_teis_do_not(server):
    refused = server.post("/embed_hybrid", {"inputs": ["one"] * 2049})
    assert refused.status_code == 422
    path, anchor = re.fullmatch(r'<(/\S+)#(\w+)>; rel="help"', refused.headers["link"]).groups()
    assert f'<h2 id="{anchor}">TooManyTexts</h2>' in server.get(path).text
    for body in (b"{", b"[]"):
        assert "#bodyerror>" in server.post("/embed_hybrid", body).headers["link"]
    for body in (MANY, b"{"):
        assert "link" not in server.post("/embed", body).headers


def test_refused_at_capacity_too(caplog):
    with (
        serving(engine={"max_concurrent_requests": 1}) as running,
        running.service.admission.inside(1),
    ):
        answer = running.post("/embed_hybrid", {"inputs": "one"})
        assert (answer.status_code, answer.headers["link"]) == (
            429,
            '</page/errors.html#overloaded>; rel="help"',
        )
        assert "link" not in running.post("/embed", {"inputs": "one"}).headers
    assert "Model is overloaded (errors.md#overloaded)" in caplog.messages


def failed(status, *arguments):
    assert cli.main(arguments) == status


def refused(*arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)


@pytest.mark.parametrize(
    "ending",
    [
        lambda: failed(1, "embed", "nothing.txt", "--model-id", "./none", "--output", "out.npz"),
        lambda: refused("serve", "--port", "70000"),
    ],
)
def test_a_command_says_where_cause_and_cure_are(ending, capsys):
    ending()
    (name,) = re.search(
        r"^Cause and cure: hybridtei explain (\w+)$", capsys.readouterr().err, re.MULTILINE
    ).groups()
    assert cli.main(["explain", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}\n")
