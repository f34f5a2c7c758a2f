"""One request's part of a pass that other requests share: its options and its answer."""

from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import EMBEDDINGS, Head
from hybridtei.inference.tasks.embed import Embed
from tests.inference.engine import small
from tests.near import same

MODEL = small.model()
EVERY = EMBEDDINGS
COLUMNS = ("dense", "sparse", "multivector", "tokens")
texts = st.lists(
    st.lists(st.sampled_from(small.WORDS), min_size=1, max_size=9).map(" ".join),
    min_size=1,
    max_size=4,
)
heads = st.frozensets(st.sampled_from(sorted(EVERY)), min_size=1)


def answer(task, *, computed=None):
    return small.answered(task, MODEL, computed)[1]


@given(texts, heads)
def test_it_gets_what_it_asked_for_whatever_else_was_computed(inputs, wanted):
    task = Embed(inputs, wanted)
    alone, shared = answer(task), answer(task, computed=EVERY)
    for column in COLUMNS:
        assert (
            (getattr(shared, column) is not None)
            == (Head(column) in wanted)
            == (getattr(alone, column) is not None)
        )
    assert len(shared) == len(inputs)
    if Head.DENSE in wanted:
        same(alone.dense, shared.dense)
