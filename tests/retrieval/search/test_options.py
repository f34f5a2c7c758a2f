"""What the options of a search read and write."""

from hypothesis import example, given
from hypothesis import strategies as st

from hybridtei.retrieval.search.options import identity_of, written


@given(st.integers(0, 2**64 - 1) | st.text(min_size=1))
@example("1")
@example('"1"')
@example('""1""')
def test_an_id_in_a_path_is_the_number_or_the_text(identity):
    read = identity_of(written(identity))
    assert (read, type(read)) == (identity, type(identity))
