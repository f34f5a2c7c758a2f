"""Text is read once, for every kind of file: its encoding, its characters, its words at line
ends."""

import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest import tables, whole
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.text import KEPT, normalised
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store.memory import MemoryStore
from tests.inference.engine import small
from tests.retrieval.ingest.small_ingest import Ingest, points
from tests.retrieval.ingest.sources.reading import all_of, one_of, text_of

QUOTED = "The “flag” – it costs 5 €."
RUSSIAN = "Привет, мир. Это простой текст на русском языке о погоде."
POLISH = "Zażółć gęślą jaźń. To jest prosty tekst w języku polskim o pogodzie."
JAPANESE = "これは日本語のテキストです。エンジンの修理方法について説明します。"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, name, encoding):
    assert text_of(tmp_path / name, RUSSIAN.encode(encoding)) == RUSSIAN


@pytest.mark.parametrize("mark", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark(tmp_path, mark):
    assert text_of(tmp_path / "a.txt", QUOTED.encode(mark)) == QUOTED


@pytest.mark.parametrize(
    ("label", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", QUOTED),
        ("ascii", "cp1252", QUOTED),
        ("gb2312", "gbk", "這是 镕 engine"),
        ("x-sjis", "cp932", "①と～ エンジン"),
        ("ks_c_5601-1987", "cp949", "똠방각하 엔진"),
        ("Windows-1251", "cp1251", RUSSIAN),
        ("koi8-r", "koi8-r", RUSSIAN),
        ("iso-8859-1", "utf-8", QUOTED),
    ],
)
def test_a_page_in_the_encoding_it_declares_as_browsers_read_it(tmp_path, label, encoding, text):
    page = f'<meta http-equiv="Content-Type" content="text/html; charset={label}"><p>{text}</p>'
    expected = normalised(text)
    assert text_of(tmp_path / "a.html", page.encode(encoding)) == expected


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", QUOTED),
        ("cp1252", "café"),
        ("cp1251", RUSSIAN),
        ("koi8-r", RUSSIAN),
        ("cp866", RUSSIAN),
        ("iso8859-2", POLISH),
        ("cp1250", POLISH),
        ("cp932", JAPANESE),
        ("euc-jp", JAPANESE),
        ("cp949", "이것은 한국어 텍스트입니다. 엔진 수리 방법을 설명합니다."),
        ("big5", "這是一個中文文本。我們討論引擎的維修方法。"),
        ("gb18030", "这是一个中文文本。我们讨论发动机的维修方法。"),
    ],
)
def test_an_encoding_that_nothing_declares_is_guessed_and_told(tmp_path, encoding, text):
    document = one_of(tmp_path / "a.txt", text.encode(encoding))
    assert document.text == unicodedata.normalize("NFKC", text)
    assert "by a guess" in document.notes[0]


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.txt", b"abc\xffdef", "abc\ufffddef"),
        ("a.txt", b"\xef\xbb\xbfabc\xff", "abc\ufffd"),
        ("a.md", "grün und ü".encode() + b" \xe4", "grün und ü \ufffd"),
        ("a.html", b"<p>one \xfe two", "one \ufffd two"),
        ("a.jsonl", b'{"text": "a\xffb"}', "a\ufffdb"),
        ("a.csv", b"text\na\xffb\n", "a\ufffdb"),
    ],
)
def test_one_bad_byte_refuses_no_file(tmp_path, name, data, text):
    document = one_of(tmp_path / name, data)
    assert document.text == text
    assert list(document.notes) == ["bytes that are no text were replaced by U+FFFD"]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8-sig"])
def test_records_in_other_encodings(tmp_path, encoding):
    for name, data in (
        ("a.csv", f"id,text\n1,{QUOTED}\n2,{QUOTED}\n"),
        ("a.jsonl", f'{{"id": 1, "text": "{QUOTED}"}}\n' * 2),
    ):
        rows = all_of(tmp_path / name, data.encode(encoding))
        assert [row.text for row in rows] == [QUOTED] * 2


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_what_is_no_text(tmp_path, name):
    found = one_of(tmp_path / name, bytes(range(256)) * 40)
    assert isinstance(found, Rejection)
    assert "binary data" in found.reason


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("the ﬂag is ﬁxed to the sta\ufb00", "the flag is fixed to the staff"),
        ("ＡＢＣ１２３", "ABC123"),
        ("ｶﾞｽ", "ガス"),
        ("cafe\u0301", "café"),
        ("a\u00a0b", "a b"),
        ("10² ½ it´s ™", "10² ½ it´s ™"),
        ("infor-\nmation", "information"),
        ("infor\u2010\n   mation", "information"),
        ("a long-term plan; long-\nterm", "a long-term plan; long-term"),
        ("state-of-the-\nart", "state-of-the-art"),
        ("EU-\nstates", "EU-states"),
        ("soft\u00adware soft\u00ad\nware", "software software"),
        ("a\0b\x07c\x1b[31mred\x1b[0m", "abcred"),
        ("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
        ("- one-\n- two", "- one-\n- two"),
        ("pages 3-\n5", "pages 3-\n5"),
        ("left\u200eright\u202e", "leftright"),
    ],
)
def test_characters_and_words(tmp_path, written, read):
    assert text_of(tmp_path / "a.txt", written) == read


@given(st.text(max_size=200))
def test_a_text_that_is_read_stays_as_it_is(text):
    once = normalised(text)
    assert not set(once) & set("\0\r\x0c\u00ad\ufb01\uff21")
    foreign = "".join(character for character in once if character not in KEPT)
    assert normalised(foreign) == foreign or "-\n" in foreign


async def test_what_an_earlier_reading_stored_stays_unless_it_is_reread(tmp_path, monkeypatch):
    """The points and their ids stay, and the summary tells of them."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("the ﬂag")
    (tmp_path / "docs" / "b.jsonl").write_text('{"text": "the ﬂag"}\n{"text": "plain"}\n')
    store = MemoryStore()
    with monkeypatch.context() as first_reading:
        first_reading.setattr(tables, "normalised", str)
        first_reading.setattr(whole, "normalised", lambda text, compounds=None: text)
        await Ingest(tmp_path / "one", settings="first").run(tmp_path / "docs", store)
    stored = await points(store)
    now = Ingest(tmp_path / "two", settings="second", earlier=["first"])

    async def counts(*, reread=False):
        now.options = replace(now.options, reread=reread)
        stats = await now.run(tmp_path / "docs", store)
        return stats.documents, stats.unchanged, stats.of_earlier_reading

    assert await counts() == (0, 3, 3)
    assert await points(store) == stored
    assert await counts(reread=True) == (3, 0, 0)
    texts = sorted(point.payload["text"] for point in await points(store))
    assert texts == ["plain", "the flag", "the flag"]
    assert await counts() == (0, 3, 0)


async def test_queries_are_read_as_documents_are():
    """A query with a ligature is the query without it."""
    asked = []

    class Asked:
        spec = small.model_spec()

        async def embed(self, queries, heads, options):
            asked.extend(queries)
            return Embeddings()

    searcher = Searcher.__new__(Searcher)
    searcher.model = Asked()
    fit = SimpleNamespace(heads=frozenset(), fitted=lambda embeddings: embeddings)
    await searcher.embed("notes", ["the ﬂag", "\u00ad"], fit=fit)
    assert asked == ["the flag", "\u00ad"]


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        (
            "a.txt",
            "Der Haupt-\nund Nebenkran, pre-\nand postwar.",
            "Der Haupt- und Nebenkran, pre- and postwar.",
        ),
        ("a.txt", "the bound-\nary layer", "the boundary layer"),
        ("a.txt", "A well-\nknown and a well-known one.", "A well-known and a well-known one."),
        (
            "a.txt",
            "This is wellknown, or well-known, but well-\nknown.",
            "This is wellknown, or well-known, but wellknown.",
        ),
        ("a.c", "int rest = total-\n    offset;", "int rest = total-\n    offset;"),
        ("a.md", "bound-\nary\n\n```\ntotal-\noffset\n```", "boundary\n\n```\ntotal-\noffset\n```"),
        ("a.html", "<pre>total-\noffset</pre>", "total-\noffset"),
    ],
)
def test_a_hyphen_at_a_line_end(tmp_path, name, text, read):
    assert text_of(tmp_path / name, text) == read
