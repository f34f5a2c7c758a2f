"""`eval --calibrate`, then searches with probabilities, over the embedded engine."""

import asyncio
import json

import pytest

from hybridtei import Encoder, Index, StoreConfig
from hybridtei.cli import main
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.plan import CALIBRATION
from hybridtei.server.start import in_process
from tests.cli.test_collection import DOCUMENTS, write_beir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The last query has no relevant document."""
    return write_beir(tmp_path_factory.mktemp("data") / "wings", [1, 1, 1, 1, 0])


@pytest.fixture(scope="module")
def place(folder, hybrid, tmp_path_factory):
    """Where the vectors lie, after `eval --calibrate` of two ways."""
    place = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        line = f"eval {folder} --model-id {hybrid} --quiet --output figures.json --calibrate"
        assert main([*line.split(), "dense"]) == 0
        assert main(line.split()) == 0
    return place


@pytest.fixture
def search(place, hybrid, capsys, monkeypatch):
    """A function: what the command says of the third document."""
    monkeypatch.chdir(place)

    def told(*flags, status=0):
        words = ["search", "wings", DOCUMENTS[2], "--model-id", str(hybrid)]
        assert main([*words, *flags]) == status
        return "".join(capsys.readouterr())

    return told


@pytest.fixture
def searched(search):
    """A function: the result of a search."""
    return lambda *flags: json.loads(search("--json", *flags))


def test_curves_of_both_ways_are_kept_and_the_figures_have_the_last(place):
    async def metadata():
        async with opened(StoreConfig(qdrant_path=str(place / "qdrant"))) as store:
            return (await store.describe("wings")).metadata

    figures = json.loads((place / "figures.json").read_bytes())["calibration"]
    curves = asyncio.run(metadata())[CALIBRATION]
    assert {*curves} == {"dense, dense=1, of 100", figures["way"]}
    assert figures["way"].startswith("zscore, dense=1, sparse=")
    assert curves[figures["way"]] == figures["curve"]
    assert figures["pairs"] == 5 * len(DOCUMENTS)
    assert figures["relevant"] == 4
    assert 0 <= figures["error"] <= 1


def test_without_a_hit_that_is_probable_the_query_is_not_answerable(search, searched):
    nothing = json.dumps({"must": [{"key": "document_id", "match": {"value": "d19"}}]})
    flags = ["--min-probability", "1", "--filter", nothing]
    found = searched(*flags)
    assert (found["hits"], found["answerable"]) == ([], False)
    assert "nothing was found that reaches the bound" in search(*flags)
    assert "%  " in search()


def test_the_library_and_a_server_read_the_same_curve(searched, hybrid):
    expected = [hit["probability"] for hit in searched()["hits"]]
    encoder = Encoder.load(str(hybrid))
    with Index.open("qdrant", "wings", encoder) as index:
        assert [hit.probability for hit in index.search(DOCUMENTS[2])] == expected
        with pytest.raises(InvalidInput, match="`min_probability` is 2"):
            index.search("wing", min_probability=2)
        with pytest.raises(InvalidInput, match="`rerank_threshold` is for a reranker"):
            index.search("wing", rerank_threshold=0.5)

    async def served():
        store = StoreConfig(qdrant_path="qdrant")
        config = ModelConfig(model_id=str(hybrid))
        async with in_process([config], EngineConfig(), store) as client:
            return await client.search("wings", DOCUMENTS[2])

    assert [hit.probability for hit in asyncio.run(served()).hits] == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--calibrate", "reranked"], "'reranked', should be one of: dense; sparse; multivector"),
        (
            ["--calibrate", "--url", "http://127.0.0.1:9"],
            "--qdrant-url or --qdrant-path, not --url",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_told_before_the_work(folder, flags, message, refused):
    assert message in refused("eval", folder, *flags)
