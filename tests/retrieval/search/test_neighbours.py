"""Passages: texts around hits, by a law over chunks that overlap, and with a document that was
ingested, on every surface."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client as Agent
from mcp.client.streamable_http import streamable_http_client

from hybridtei import Client, Index, StoreConfig, ingest
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.search.neighbours import KEYS, filter_beside, keys_of, passages
from hybridtei.retrieval.search.options import MAX_NEIGHBOURS, Neighbours
from hybridtei.retrieval.store import open_store
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.conditions import matches
from tests.retrieval.search.small_search import MODEL, encoder_in, spec_in
from tests.server.live import serving

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "hybrid",
    "search",
    "engine",
    "words",
    "meaning",
]


def chunks_of(name, text, cuts, overlap, source):
    """The payloads of a text that is cut at places; each chunk repeats the end of the one
    before."""
    edges = [0, *sorted(cuts), len(text)]
    return [
        {
            "source": source,
            "document_id": name,
            "digest": "x",
            "settings": "y",
            "chunk": number,
            "start": max(begin - overlap, 0),
            "text": text[max(begin - overlap, 0) : end],
        }
        for number, (begin, end) in enumerate(pairwise(edges))
    ]


@st.composite
def cases(draw):
    text = draw(st.text("abc ", min_size=30, max_size=80))
    cuts = st.sets(st.integers(6, len(text) - 1), min_size=1, max_size=12)
    overlap = draw(st.integers(0, 5))
    # Two files have a document of one id
    payloads = [
        payload
        for name, source in (("a", "x.csv"), ("a", "y.csv"), ("b", "x.csv"))
        for payload in chunks_of(name, text, draw(cuts), overlap, source)
    ]
    hits = draw(st.lists(st.sampled_from(payloads), min_size=1, max_size=8, unique_by=id))
    hits.insert(draw(st.integers(0, len(hits))), {"text": "whole", "chunk": {"a": 1}})
    sides = st.integers(0, MAX_NEIGHBOURS)
    wanted = draw(
        st.builds(Neighbours, before=sides, after=sides)
        | st.builds(Neighbours, tokens=st.integers(1, 40))
    )
    return text, payloads, hits, wanted


@given(cases())
def test_passages_are_whole_stretches_of_one_document_each_text_once(case):
    text, payloads, hits, wanted = case
    keys = keys_of(hits)
    points = [Stored(place, payload, {}) for place, payload in enumerate(payloads)]
    where = filter_beside(keys.values(), wanted)
    read = [point for point in points if matches(where, point)]
    found = passages(keys, read, wanted, "text", list)
    assert found.keys() == {place for place, hit in enumerate(hits) if "source" in hit}
    of_documents = {}
    for place, passage in found.items():
        hit = hits[place]
        of_documents.setdefault((hit["source"], hit["document_id"]), []).append((place, passage))
    for document, of_document in of_documents.items():
        chunks = [
            payload
            for payload in payloads
            if (payload["source"], payload["document_id"]) == document
        ]
        texts = [passage for _, passage in of_document if passage]
        # What is said by the definition: the union of ranges, in order
        near = {
            place: set(range_of(chunks, hits[place]["chunk"], wanted)) for place, _ in of_document
        }
        groups = []
        for place, numbers in near.items():
            touching = [group for group in groups if group[1] & numbers]
            groups = [group for group in groups if group not in touching]
            places, reaches = zip((place, numbers), *touching, strict=True)
            groups.append((min(places), set().union(*reaches)))
        assert len(texts) == len(groups)
        for best, numbers in groups:
            begin, last = chunks[min(numbers)]["start"], chunks[max(numbers)]
            assert found[best] == text[begin : last["start"] + len(last["text"])]


def range_of(chunks, number, wanted):
    """By its definition: chunks from the hit on, the nearest first, the earlier of two first."""
    if wanted.tokens is None:
        low, high = number - wanted.before, number + wanted.after
        return range(max(low, 0), min(high + 1, len(chunks)))
    first = last = number
    left = wanted.tokens - len(chunks[number]["text"])
    for step in range(1, MAX_NEIGHBOURS + 1):
        for place in (number - step, number + step):
            if place in range(len(chunks)) and place in (first - 1, last + 1):
                size = len(chunks[place]["text"])
                if size <= left:
                    left, first, last = left - size, min(first, place), max(last, place)
    return range(first, last + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with a document of 30 lines in chunks of a few, and another of the same words."""
    home = tmp_path_factory.mktemp("neighbours")
    encoder = encoder_in(home)
    (home / "docs").mkdir()
    for name, shift in (("a.txt", 0), ("b.txt", 5)):
        lines = [" ".join(WORDS[(place * shift + n) % 12] for n in range(4)) for place in range(30)]
        (home / "docs" / name).write_text("\n".join(lines))
    ingest(
        home / "docs",
        "notes",
        encoder,
        home / "qdrant",
        chunk_tokens=12,
        quarantine=str(home / "q.jsonl"),
        quiet=True,
    )
    return home


def opened(folder):
    return Index.open(folder / "qdrant", "notes", encoder_in(folder))


@pytest.mark.parametrize("wanted", [{}, {"before": 3, "after": 3}, {"tokens": 40}])
def test_a_passage_is_a_stretch_of_the_document(folder, wanted):
    with opened(folder) as index:
        plain = index.search("hybrid search", 8, group_by=None)
        hits = index.search("hybrid search", 8, group_by=None, neighbours=wanted, with_payload=[])
        for before, hit in zip(plain, hits, strict=True):
            assert (hit.id, hit.score) == (before.id, before.score)
            assert hit.payload == {}
            assert before.passage is None
            words = hit.passage.split()
            document = (folder / before.payload["document_id"]).read_text().split()
            assert " ".join(words) in " ".join(document)
            assert not words or before.payload["text"].split()[0] in words


def test_one_fetch_for_all_hits(folder):
    with opened(folder) as index:
        calls = []
        scroll = index._store.scroll

        async def counted(*arguments, **options):
            calls.append(options)
            return await scroll(*arguments, **options)

        index._store.scroll = counted
        index.search("hybrid search", 8, group_by=None, neighbours={"before": 2, "after": 2})
        index.search("hybrid search", 8)
        (call,) = calls
        assert {*call["with_payload"]} == {*KEYS, "text"}


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ({"befor": 1}, "befor"),
        ({"tokens": 0}, "1"),
        ({"before": 1, "tokens": 9}, "takes the place"),
    ],
)
def test_what_is_refused(folder, wanted, word):
    with (
        opened(folder) as index,
        pytest.raises(InvalidInput, match=word),
    ):
        index.search("one", neighbours=wanted)


@pytest.mark.parametrize("most", [64_000_000, 400])
async def test_over_http_by_client_and_by_an_agent(folder, most):
    store = open_store(StoreConfig(qdrant_path=str(folder / "qdrant")))
    flags = {"max_search_bytes": most}
    spec = spec_in(folder)
    with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL, server=flags) as running:
        body = {"collection": "notes", "query": "hybrid search", "limit": 2, "with_payload": False}
        wanted = {"before": 2, "after": 2}
        answer = running.post("/search", {**body, "neighbours": wanted})
        if most == 400:
            assert (answer.status_code, "max-search-bytes" in answer.text) == (422, True)
            return
        passages = [hit["passage"] for hit in answer.json()["hits"]]
        assert all(len(passage.split()) > 12 for passage in passages)
        answer = running.post("/search", {**body, "neighbours": {"before": 11}})
        assert (answer.status_code, "neighbours.before" in answer.text) == (422, True), answer.text
        answer = running.post("/search", {**body, "limit": 101, "neighbours": wanted})
        assert "100 hits are the most" in answer.text
        with Client(running.url) as client:
            found = client.search("notes", "hybrid search", limit=2, neighbours=wanted)
            assert [hit.passage for hit in found.hits] == passages
        async with Agent(streamable_http_client(f"{running.url}/collections/notes/mcp")) as agent:
            words = {"query": "hybrid search", "limit": 2, "neighbours": wanted}
            told = await agent.call_tool("find", words)
            assert [hit["passage"] for hit in told.structured_content["hits"]] == passages
