"""`ask`: a folder answers, as it is now; and `search` by a server."""

import json
import re
from pathlib import Path

import pytest

from hybridtei.cli import main
from hybridtei.retrieval.store.collection import CollectionSchemas
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_of, filled, spec_in
from tests.server.live import serving

KEYS = """# Operations

Ring the bell at noon.

## Keys

Rotate the signing keys every ninety days: write the new file,
then send SIGHUP to the server.
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder beside the store, which is the working folder's."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "keys.md").write_text(KEYS)
    (folder / "soup.txt").write_text("Boil the lentils.\nAdd salt.\n")
    return folder


@pytest.fixture
def asked(said):
    return lambda *words: json.loads(said("ask", *words, "--json").out)["passages"]


def test_passages_name_path_heading_and_lines(folder, said, asked):
    passages = asked(folder, "how often are signing keys rotated?")
    first = passages[0]
    assert first["path"] == str(folder / "deep" / "keys.md")
    begin, end = first["lines"]
    lines = Path(first["path"]).read_text().splitlines()
    between = " ".join(lines[begin - 1 : end])
    assert re.findall(r"\w+", between) == re.findall(r"\w+", first["text"])
    assert "heading" in first
    assert first["score"] > passages[-1]["score"]
    answer = said("ask", folder, "how are lentils cooked?", "--limit", "1").out
    assert answer.startswith(f"{folder / 'soup.txt'}:1-2")
    assert "Boil the lentils." in answer


def test_a_row_of_a_table_has_the_tables_path_and_its_own_id(folder, said, asked):
    (folder / "faults.csv").write_text("id,text\nE43,The motor is hot.\n")
    first = asked(folder, "why is the motor hot?")[0]
    assert (first["path"], first["document"]) == (str(folder / "faults.csv"), "E43")
    assert (
        f"{folder / 'faults.csv'}:2-2 [E43]"
        in said("ask", folder, "why is the motor hot?", "--limit", "1").out
    )


def test_what_changed_is_stored_first(folder, asked):
    asked(folder, "lentils")
    (folder / "soup.txt").unlink()
    (folder / "bread.txt").write_text("Bread rises for two hours.\n")
    passages = asked(folder, "how long does bread rise?")
    assert Path(passages[0]["path"]).name == "bread.txt"
    assert all(not passage["path"].endswith("soup.txt") for passage in passages)


def test_what_is_no_folder_is_told(tmp_path, refused):
    assert "should be a folder" in refused("ask", tmp_path / "none", "why?")


async def test_search_by_a_server(tmp_path, said):
    spec = spec_in(tmp_path)
    store = await filled(encoder_of(spec))
    server = {"api_key": "a-key"}
    with serving(spec, server=server, schemas=CollectionSchemas(store), model_id=MODEL) as running:
        flags = f"--url {running.url} --url-api-key a-key --json --limit 3".split()
        result = json.loads(said("search", "papers", TEXTS[2], *flags).out)
        body = {"collection": "papers", "query": TEXTS[2], "limit": 3}
        headers = {"authorization": "Bearer a-key", "content-type": "application/json"}
        expected = running.post("/search", body, headers=headers).json()
        assert [hit["id"] for hit in result["hits"]] == [hit["id"] for hit in expected["hits"]]
        assert main(["search", "papers", TEXTS[1], "--url", running.url]) == 1


def test_two_folders_of_one_name_are_told_what_ask_can_do(folder, refused, asked):
    asked(folder, "salt")
    other = folder.parent / "more" / "notes"
    other.mkdir(parents=True)
    (other / "cook.txt").write_text("The cook is ill.")
    told = refused("ask", other, "cook")
    assert "name a collection for these with --collection NAME" in told
    assert "--source-name" not in told
    assert asked(other, "cook", "--collection", "more")[0]["text"] == "The cook is ill."
