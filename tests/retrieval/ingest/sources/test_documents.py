"""The changes that make a document a new version, and the contents of payloads."""

from hypothesis import given
from hypothesis import strategies as st

from hybridtei.retrieval.ingest.chunking import Chunk
from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.prepare import PendingDocument

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(TEXT, TEXT, TEXT, TEXT)
def test_ids_of_points_differ_where_documents_or_versions_do(source, one, other_source, other):
    ids = {pending(source, one).point_id(0), pending(other_source, other).point_id(0)}
    assert len(ids) == len({(source, one), (other_source, other)})
    changed = pending(source, one, digest="other")
    assert changed.point_id(0) not in ids
    assert pending(source, one).point_id(1) not in ids


def pending(source, document_id, digest="digest"):
    return PendingDocument(Document(source, document_id, "text"), digest, "settings", None)


def test_a_digest_changes_with_all_that_is_stored():
    plain = Document("s", "d", "text", "title", {"a": 1, "b": 2})
    same = Document("s", "d", "text", "title", {"b": 2, "a": 1}, location="elsewhere")
    others = [
        Document("s", "d", "text!", "title", {"a": 1, "b": 2}),
        Document("s", "d", "text", None, {"a": 1, "b": 2}),
        Document("s", "d", "text", "title", {"a": 1}),
    ]
    assert same.digest() == plain.digest()
    assert len({plain.digest(), *(other.digest() for other in others)}) == 4


def test_payloads():
    chunk, digest = Chunk(1, "chunk", 6, 3), "AAECAwQFBgcICQoLDA0ODw"
    document = Document("s", "d", "first chunk", "T", {"year": 1958})
    full = PendingDocument(document, digest, "abc", [11, 5, 6], chunks=2)
    short = PendingDocument(Document("s", "d", "first chunk"), digest, "abc", None, chunks=2)
    place = {
        "text": "chunk",
        "document_id": "d",
        "source": "s",
        "chunk": 1,
        "chunks": 2,
        "start": 6,
        "digest": "AAECAwQFBgcICQoLDA0ODw",
        "settings": "abc",
    }
    more = {"file": [11, 5, 6], "title": "T", "metadata": {"year": 1958}}
    assert full.payload_of(chunk) == place | more
    assert short.payload_of(chunk) == place


def test_the_indexed_text():
    assert Document("s", "d", " text \n", "Title").indexed_text == "Title\n text"
    assert Document("s", "d", "", "Title").indexed_text == "Title"
    assert Document("s", "d", " text \n").indexed_text == "text"
