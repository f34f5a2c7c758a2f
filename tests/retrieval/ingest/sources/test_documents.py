"""The changes that make a document a new version, and the contents of payloads."""

from hypothesis import given
from hypothesis import strategies as st

from hybridtei.retrieval.ingest.chunking import Chunk, Document, document_key, payload_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(TEXT, TEXT, TEXT, TEXT)
def test_keys_differ_where_documents_do(source, one, other_source, other):
    assert (document_key(source, one) == document_key(other_source, other)) == (
        (source, one) == (other_source, other)
    )


def test_a_digest_changes_with_all_that_is_stored():
    plain = Document("s", "d", "text", "title", {"a": 1, "b": 2})
    same = Document("s", "d", "text", "title", {"b": 2, "a": 1}, location="elsewhere")
    others = [
        Document("s", "d", "text!", "title", {"a": 1, "b": 2}),
        Document("s", "d", "text", None, {"a": 1, "b": 2}),
        Document("s", "d", "text", "title", {"a": 1}),
    ]
    assert same.digest() == plain.digest()
    assert (
        len(
            {
                plain.digest(),
                plain.digest(b"settings of 0.1"),
                *(other.digest() for other in others),
            }
        )
        == 5
    )


def test_payloads():
    chunk, digest = Chunk(1, "chunk", 6, 3), "AAECAwQFBgcICQoLDA0ODw"
    full = payload_of(
        Document("s", "d", "first chunk", "T", {"year": 1958}), chunk, 2, digest, "abc"
    )
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
    assert full == {**place, "title": "T", "metadata": {"year": 1958}}
    assert payload_of(Document("s", "d", "first chunk"), chunk, 2, digest, "abc") == place


def test_the_indexed_text():
    assert Document("s", "d", " text \n", "Title").indexed_text == "Title\n text"
    assert Document("s", "d", "", "Title").indexed_text == "Title"
    assert Document("s", "d", " text \n").indexed_text == "text"
