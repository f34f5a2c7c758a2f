"""Lines come whole or cut short, numbered, and with their places in bytes."""

from io import BytesIO

from hypothesis import given
from hypothesis import strategies as st

from hybridtei.retrieval.ingest import tables as lines
from hybridtei.retrieval.ingest.tables import bounded_lines


@given(
    st.lists(
        st.binary(max_size=40).filter(lambda data: b"\n" not in data and not data.endswith(b"\r"))
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.integers(1, 30),
    st.booleans(),
)
def test_every_line_is_there_once_at_its_place(rows, end, most, ends):
    data = end.join(rows) + (end if ends and rows else b"")
    found = list(bounded_lines(BytesIO(data), most))
    expected = data.split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    for line, row in zip(found, expected, strict=True):
        text = row.removesuffix(b"\r")
        assert line.is_whole == (len(text) <= most)
        assert data[line.offset :].startswith(line.data)
        assert text.startswith(line.data)
        assert not line.is_whole or line.data == text


def test_a_line_of_megabytes_is_never_held():
    class Counting(BytesIO):
        largest = 0

        def readline(self, size=-1):
            data = super().readline(size)
            Counting.largest = max(Counting.largest, len(data))
            return data

    found = list(bounded_lines(Counting(b"x" * 10_000_000 + b"\nnext\n"), 100))
    assert [(line.number, line.is_whole, line.offset) for line in found] == [
        (1, False, 0),
        (2, True, 10_000_001),
    ]
    assert len(found[0].data) <= lines.KEPT_BYTES
    assert Counting.largest <= lines.SKIP_BYTES
