"""`ingest`, `search` and `eval` as commands, over the embedded engine, from nothing."""

import json
import subprocess
import sys

import pytest

from hybridtei.cli import main
from hybridtei.cli.collection import weights_of
from hybridtei.errors import InvalidInput

WORDS = [
    "the",
    "a",
    "on",
    "of",
    "and",
    "with",
    "flow",
    "wing",
    "plate",
    "layer",
    "heat",
    "shock",
    "wave",
    "supersonic",
    "boundary",
    "pressure",
]
DOCUMENTS = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 9)) for i in range(1, 21)]


def write_beir(folder, grades):
    """A BEIR folder: each query is a document, which alone may be relevant; the grade of each."""
    (folder / "qrels").mkdir(parents=True)
    rows = [
        {"_id": f"d{i}", "title": f"paper {i}", "text": text} for i, text in enumerate(DOCUMENTS)
    ]
    queries = [{"_id": f"q{i}", "text": DOCUMENTS[i]} for i in range(len(grades))]
    for name, records in (("corpus", rows), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    judged = "".join(f"q{i}\td{i}\t{grade}\n" for i, grade in enumerate(grades))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_beir(tmp_path_factory.mktemp("data") / "wings", [1] * 4)


@pytest.fixture(scope="module")
def evaluated(folder, hybrid, tmp_path_factory):
    """(where the vectors lie, what `eval` wrote), after `eval` alone."""
    place = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        flags = f"--model-id {hybrid} --quiet --output figures.json --chart chart.svg"
        assert main(f"eval {folder} {flags}".split()) == 0
    assert (place / "chart.svg").read_bytes().startswith(b"<?xml")
    return place, json.loads((place / "figures.json").read_bytes())


def test_eval_from_nothing_ingests_and_measures(evaluated):
    _, figures = evaluated
    assert (figures["collection"], figures["queries"]) == ("wings", 4)
    modes = {row["mode"]: row for row in figures["modes"]}
    assert {"dense", "sparse", "rrf k=2", "rrf k=61", "weighted"} <= modes.keys()
    assert all(
        0 < row["nDCG@10"] <= 1 and row["recall@100"] == 1
        for row in modes.values()
        if row["mode"] != "sparse"
    )


@pytest.fixture
def search(evaluated, hybrid, capsys, monkeypatch):
    """A function: what the command says."""
    monkeypatch.chdir(evaluated[0])

    def told(*words, status=0):
        assert main(["search", *words, "--model-id", str(hybrid)]) == status
        return "".join(capsys.readouterr())

    return told


def test_search_as_json(search):
    flags = "--json --limit 3 --explain --mode dense"
    found = json.loads(search("wings", DOCUMENTS[7], *flags.split()))
    assert found["mode"] == "dense"
    assert len(found["hits"]) == 3
    assert [hit["scores"]["dense"]["rank"] for hit in found["hits"]] == [1, 2, 3]
    assert found["hits"][0]["payload"]["document_id"].startswith("d")
    assert [stage["name"] for stage in found["stages"]] == ["embed", "dense", "search"]


def test_search_in_words(search):
    only = json.dumps({"must": [{"key": "document_id", "match": {"any": ["d3", "d4"]}}]})
    out = search("wings", DOCUMENTS[3], "--filter", only, "--explain", "--rescore")
    assert "[wings/corpus.jsonl d3]" in out
    assert "[wings/corpus.jsonl d4]" in out
    assert "[d5]" not in out
    assert "multivector" in out
    assert "stage" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("winks wing", "qdrant; did you mean `wings`? (wings)"),
        ('wings wing --filter {"must":3}', "`--filter"),
        ("wings wing --limit 0", "`limit` is 0"),
        ("wings wing --weights dense=much", "--weights"),
    ],
)
def test_what_is_wrong_is_told(search, words, message):
    assert message in search(*words.split(), status=1)


def test_a_filter_of_a_key_that_no_point_has_is_told_with_the_nearest_key(search, said):
    def said(key):
        condition = json.dumps({"must": [{"key": key, "match": {"value": "none"}}]})
        return search("wings", "wing", "--filter", condition)

    assert said("sorce") == "nothing was found: no point has `sorce`; did you mean `source`?\n"
    assert said("xyz") == "nothing was found: no point has `xyz`\n"
    assert said("source") == "nothing was found\n"


def test_weights_by_name_in_order_or_as_a_preset():
    assert weights_of("1, 0.3") == [1.0, 0.3]
    assert weights_of("dense=1,sparse=.5") == {"dense": 1.0, "sparse": 0.5}
    assert weights_of("m3-long") == "m3-long"
    assert weights_of(None) is None
    with pytest.raises(InvalidInput, match="--weights"):
        weights_of("1,much")


def test_eval_needs_judgements_before_it_does_anything(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text("")
    assert "no judgements" in said("eval", ".", status=1).err
    assert "a chart should end in" in said("eval", ".", "--chart", "chart.doc", status=1).err
    assert not (tmp_path / "qdrant").exists()


SEARCHING = """
import sys
import hybridtei.retrieval.search.explain, hybridtei.retrieval.search.searcher, hybridtei.retrieval.store.embedded
found = {"qdrant_client", "pydantic", "httpx", "grpc", "litestar"} & set(sys.modules)
assert not found, found
"""


def test_a_search_of_the_embedded_engine_imports_no_client_of_a_server():
    subprocess.run([sys.executable, "-c", SEARCHING], check=True)
