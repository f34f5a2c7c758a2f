"""The paper: sizes against points as they are really made, laws of growth, and the page against its
script."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deploy import scale
from deploy.scale import PAGE, Facts, Layout
from hybridtei.batch import Ragged
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.store.points import POINT_OVERHEAD, size_of, to_points

FACTS = st.builds(
    Facts,
    tokens=st.integers(1, 8192),
    sparse_entries=st.integers(1, 300),
    dense=st.integers(1, 1024),
    multivector=st.integers(1, 256),
    multivector_rows=st.integers(1, 300),
)


@given(FACTS)
def test_sizes_are_those_of_points(facts):
    rows = facts.multivector_rows
    embeddings = Embeddings(
        dense=np.ones((1, facts.dense), np.float32),
        sparse=SparseVectors(
            np.arange(facts.sparse_entries),
            np.ones(facts.sparse_entries, np.float32),
            np.array([0, facts.sparse_entries]),
            1000,
        ),
        multivector=Ragged(np.ones((rows, facts.multivector), np.float32), np.array([0, rows])),
    )
    [point] = to_points(embeddings, [1])
    layout = Layout("", "float32", True, facts.multivector)
    numbers = scale.vector_bytes(facts.dense, "float32") + scale.multivector_bytes(facts, layout)
    assert size_of(point) - POINT_OVERHEAD - len(b"{}") == numbers + scale.sparse_bytes(
        facts.sparse_entries
    )


def test_the_page_is_up_to_date():
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- ([a-z-]+) -->", page)) == set(scale.TABLES)
    assert scale.updated(page, Facts()) == page, "run python -m notebooks.writing"
