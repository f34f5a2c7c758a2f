"""A server with a store."""

import pytest

from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from tests.retrieval.search.small_search import MODEL, TEXTS, spec_in
from tests.server.live import serving

POINTS = [{"id": i, "text": text, "metadata": {"place": i}} for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return spec_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shelf(spec):
    """A server with a store, and ten texts in it."""
    with serving(spec, schemas=CollectionSchemas(MemoryStore()), model_id=MODEL) as running:
        answer = running.post("/collections/papers/points", {"points": POINTS, "create": True})
        assert answer.json() == {
            "collection": "papers",
            "created": True,
            "upserted": 10,
            "ids": list(range(10)),
            "failed": [],
        }
        yield running
