"""`hybridtei collections`: what a folder or a server holds, deleted and moved."""

import asyncio
import json

import psutil
import pytest

from hybridtei import cli
from hybridtei.retrieval.store.base import LAYOUT
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.points import to_points
from tests.retrieval.store.speaking import speaking
from tests.retrieval.store.stores import embeddings, plan
from tests.server.live import HANG

COUNT = 5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """`docs`, an alias of `docs.1`, and `notes`, in the default store of the working folder."""
    monkeypatch.chdir(tmp_path)

    payloads = [{"text": f"{i}"} for i in range(COUNT)]
    points = to_points(embeddings(COUNT), list(range(COUNT)), payloads)

    async def fill():
        store = EmbeddedStore("qdrant")
        for name in ("docs.1", "notes"):
            await store.create(name, plan(model_id="tiny"))
            await store.upsert(name, points)
        await store.index("docs.1", {"text": "text"})
        await store.alias("docs", "docs.1")
        await store.close()

    asyncio.run(fill())
    return tmp_path


def pid(folder):
    """Of the engine, which goes on for a while after its last client."""

    async def ask():
        store = EmbeddedStore(str(folder / "qdrant"))
        await store.collections()
        await store.close()
        return store.pid

    return asyncio.run(ask())


@pytest.fixture
def ran(capsys):
    """A function: the command's status, and what it writes. Words of a line, and others."""
    return lambda line="", *words: (
        cli.main(["collections", *line.split(), *words]),
        *capsys.readouterr(),
    )


def test_the_list_is_the_default(folder, ran):
    wanted = (
        "docs.1             5 points  tiny\nnotes              5 points  tiny\ndocs    is docs.1\n"
    )
    for line in (
        "",
        "list",
        "--qdrant-path qdrant",
        "--qdrant-path qdrant list",
        "list --qdrant-path=qdrant",
    ):
        assert ran(line) == (0, wanted, "")


def test_describe_is_json(folder, ran):
    told = json.loads(ran("describe docs")[1])
    expected = {
        "collection": "docs.1",
        "aliases": ["docs"],
        "points": 5,
        "metadata": {"model_id": "tiny"},
        "indexes": {"text": "text"},
    }
    assert told | expected == told
    assert told["vectors"]["dense"]["size"] == 16


def test_delete_asks(folder, capsys, monkeypatch, ran):
    with pytest.raises(SystemExit):
        ran("delete docs")
    assert "delete docs.1, also known as docs, with 5 points? --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, left in (("", 3), ("no", 3), ("Y", 1)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert ran("delete docs")[0] == 0
        status, listed, error = ran()
        assert (status, len(listed.splitlines()), error) == (0, left, "")
    assert ran("delete notes --yes") == (0, "", "deleted notes with 5 points\n")
    assert ran() == (0, "", f"no collections: embedded Qdrant in {folder / 'qdrant'}\n")


@pytest.mark.parametrize("part", ["layout.json", "shard"])
def test_a_damaged_collection_is_listed_and_deleted_beside_whole_ones(folder, part, ran):
    """Its points are gone already; the others are not in its way."""
    home = folder / "qdrant" / "notes"
    process = psutil.Process(pid(folder))
    process.terminate()
    process.wait(HANG)
    if part == "shard":
        for file in (home / "shard").rglob("*.json"):
            file.write_text("{")
    else:
        (home / LAYOUT).write_text("{")
    status, listed, _ = ran()
    assert (status, "docs.1             5 points  tiny\n" in listed) == (0, True)
    assert ("damaged points" in listed) == (part == "shard")
    status, _, told = ran("delete notes --yes")
    assert (status, "deleted notes with damaged points\n" in told) == (0, True), told
    assert not home.exists()
    assert ran("describe docs")[0] == 0


def test_points_are_deleted_by_ids_and_by_a_filter(folder, capsys, ran):
    with pytest.raises(SystemExit):
        ran("delete-points docs 1")
    assert "delete 1 documents of docs? --yes" in capsys.readouterr().err
    assert ran("delete-points docs 1 nobody --yes") == (
        0,
        "",
        "deleted 1 points of docs\n",
    )
    where = '{"must": [{"key": "text", "match": {"value": "3"}}]}'
    assert ran("delete-points docs --filter", where, "--yes")[2].startswith("deleted 1 points")
    for words in (["docs"], ["docs", "--filter", "{}"]):
        status, _, error = ran("delete-points", *words, "--yes")
        assert (status, "`filter`" in error) == (1, True)
    assert json.loads(ran("describe docs")[1])["points"] == 3


def test_an_alias_of_a_collection_that_is_gone_can_be_deleted(folder, ran):
    """As after a command that was killed between its two writes."""
    alias = folder / "qdrant" / "lost"
    alias.mkdir()
    (alias / "layout.json").write_text('{"alias_of": "gone"}')
    assert ran("delete lost --yes") == (0, "", "deleted the alias lost\n")
    assert "lost" not in ran()[1]


def test_from_a_folder_to_a_server_and_back(folder, ran):
    assert ran("export -o docs.jsonl docs --quiet") == (
        0,
        "",
        "docs.jsonl: 5 points of docs\n",
    )
    assert ran("export docs")[1] == (folder / "docs.jsonl").read_text()
    with speaking() as qdrant:
        server = ("--qdrant-url", qdrant.url("grpc"))
        assert (
            ran("import docs.jsonl --quiet", *server)[1]
            == "docs: made, 5 points stored, 0 were there\n"
        )
        assert (
            ran("import docs.jsonl --quiet", *server)[1] == "docs: 0 points stored, 5 were there\n"
        )
        assert ran("", *server, "list")[1] == "docs             5 points  tiny\n"
        assert ran("export docs -o back.jsonl --quiet", *server)[0] == 0
    assert ran("import back.jsonl again")[1] == "again: made, 5 points stored, 0 were there\n"
    (folder / "docs.jsonl").write_text((folder / "docs.jsonl").read_text()[:-3])
    status, _, error = ran("import docs.jsonl third")
    assert (status, 'Error: line 7: should be {"points":5} as the last one' in error) == (1, True)


def test_what_is_missing_is_named(folder, capsys, ran):
    assert "No such file" in ran("import nowhere.jsonl")[2]
    with pytest.raises(SystemExit):
        ran("list docs")
    with pytest.raises(SystemExit):
        ran("exprt docs")
    assert "invalid choice: 'exprt'" in capsys.readouterr().err
