"""The paper: sizes against points as they are really made, laws of growth, and the page against its script."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import scale
from deploy.scale import LAPTOP, LAYOUTS, PAGE, SERVER, Facts, Layout
from hybridtei.batch import Ragged
from hybridtei.inference.tasks.pooling import quantized
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
LAYOUT = st.sampled_from(LAYOUTS)


@given(FACTS)
def test_sizes_are_those_of_points(facts: Facts) -> None:
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


@given(FACTS, LAYOUT, st.integers(1, 10**9), st.integers(1, 100))
def test_more_documents_never_need_less(
    facts: Facts, layout: Layout, documents: int, times: int
) -> None:
    more = documents * times
    assert scale.shards(facts, layout, more, SERVER) >= scale.shards(
        facts, layout, documents, SERVER
    )
    assert scale.workers(facts, more) >= scale.workers(facts, documents)
    assert scale.hours(facts, more, 10.0) == pytest.approx(
        times * scale.hours(facts, documents, 10.0)
    )


@given(FACTS, LAYOUT)
def test_a_machine_reaches_so_far_and_no_further(facts: Facts, layout: Layout) -> None:
    most, bound = scale.reach(facts, layout, LAPTOP)
    if bound == "time":
        assert (
            scale.hours(facts, most, facts.core_tokens_per_s * LAPTOP.cores) <= facts.hours * 1.001
        )
        assert (
            scale.hours(facts, most + 1, facts.core_tokens_per_s * LAPTOP.cores)
            >= facts.hours * 0.999
        )
    else:
        assert scale.shards(facts, layout, max(most, 1), LAPTOP) == 1
        assert scale.shards(facts, layout, most + 2, LAPTOP) == 2


@given(FACTS)
def test_each_layout_is_smaller_than_the_one_before(facts: Facts) -> None:
    in_memory = [scale.memory_bytes(facts, layout) for layout in LAYOUTS]
    assert in_memory == sorted(in_memory, reverse=True)
    costs = [scale.query_cost(facts, layout).read_bytes for layout in LAYOUTS]
    assert costs == sorted(costs, reverse=True)


def test_no_rate_of_a_gpu_is_made_up() -> None:
    assert all(" – " in line for line in scale.growth_table(Facts(), LAYOUTS[0]).splitlines()[2:])
    assert " – " not in scale.growth_table(replace(Facts(), gpu_tokens_per_s=1e5), LAYOUTS[0])


@given(
    st.integers(1, 2000),
    st.sampled_from([("float16", "float16"), ("int8", "int8"), ("binary", "ubinary")]),
)
def test_widths_are_those_of_quantised_answers(numbers: int, kinds: tuple[str, str]) -> None:
    ranges = np.array([[-1.0], [1.0]], np.float32).repeat(numbers, 1)
    row = quantized(np.ones((1, numbers), np.float32), kinds[1], ranges)
    assert row.nbytes == scale.vector_bytes(numbers, kinds[0])


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- ([a-z-]+) -->", page)) == set(scale.TABLES)
    assert scale.updated(page, Facts()) == page, "run python deploy/scale.py --write"
