"""How many permits a server has; what the chunks of a request are together."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Encoding, Head, Positions
from hybridtei.inference.engine.chunks import Answered, joined, permits_for, run_in_chunks
from hybridtei.inference.engine.core import EngineCore
from hybridtei.limits import Bounds
from hybridtei.outputs import Cut, Timings
from tests.inference.engine import small


@pytest.mark.parametrize(
    ("budget", "length"),
    [(16384, 16), (16384, 512), (4096, 16), (512, 333)],
)
def test_on_a_gpu_permits_of_short_texts_fill_every_pass_under_way(budget, length):
    """And the core, asked for one pass after the other, finds that many in what waits."""
    backend = FakeBackend(small.model_spec())
    backend.ahead = 1
    permits = permits_for(512, backend, budget)
    core = EngineCore(max_tokens=budget, positions=Positions())
    core.add(
        [Encoding(np.full(length, number)) for number in range(permits)], frozenset({Head.DENSE})
    )
    passes = [core.take(device_idle=False) for _ in range(len(backend.lanes) + backend.ahead)]
    assert all(batch is not None and budget - length < batch.tokens <= budget for batch in passes)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_on_a_cpu_permits_do_not_follow_the_budget(permits, budget):
    assert permits_for(permits, FakeBackend(small.model_spec()), budget) == permits


CHUNKS = st.lists(
    st.tuples(st.integers(1, 9), st.tuples(*[st.integers(0, 10**12)] * 3)), min_size=1, max_size=9
)


@given(CHUNKS)
def test_times_are_means_over_inputs_and_cuts_name_the_input_of_the_whole(chunks):
    sizes = [size for size, _ in chunks]
    # The last input of each chunk was cut
    done = [
        Answered(size, size, [number] * size, Timings(*times), [Cut(size - 1, (0, number))])
        for number, (size, times) in enumerate(chunks)
    ]

    class Whole:
        size = sum(sizes)
        join = sum

    whole = joined(Whole, done)
    assert (whole.answer, whole.size) == (sum(sizes), sum(sizes))
    assert whole.lengths == np.repeat(np.arange(len(sizes)), sizes).tolist()
    means = np.average([times for _, times in chunks], axis=0, weights=sizes)
    found = whole.timings
    assert [found.tokenization_ns, found.queue_ns, found.inference_ns] == pytest.approx(
        means, abs=1, rel=1e-12
    )
    ends = np.cumsum(sizes) - 1
    assert whole.cuts == [Cut(end, (0, number)) for number, end in enumerate(ends)]
    same = joined(Whole, done, same_inputs=True)
    assert [cut.index for cut in same.cuts] == [size - 1 for size in sizes]


@dataclass
class Part:
    """Some inputs of a request, and the answer of the first part if they need it."""

    size: int
    needs_first: bool
    first: int | None = None

    def knowing(self, first):
        return replace(self, first=first)

    def numbers(self, answer):
        return 0

    def join(self, answers):
        return answers


@pytest.mark.parametrize("needs_first", [False, True])
async def test_chunks_know_the_first_answer_if_they_need_it(needs_first):
    begun, parts = [], [Part(size, needs_first) for size in (1, 2, 3)]

    async def run_chunk(part, permits):
        begun.append(permits)
        return Answered((part.size, part.first), part.size, [], Timings())

    whole = await run_in_chunks(Part(6, needs_first), parts, Bounds.whole(6), run_chunk)
    first = (1, None) if needs_first else None
    assert whole.answer == [(1, None), (2, first), (3, first)]
    assert begun == [1, 2, 3]
