"""Ctrl-C, a cancelled coroutine, and an error end a call: no further pass begins, and the next call
works."""

import asyncio
import json
import sys
import textwrap

import pytest

from conformance.small import vocabulary
from conformance.small.fake_backend import FakeBackend
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import BackendError
from tests.inference.engine import small
from tests.ran import ran

# One text a pass
ALONE = EngineConfig(max_batch_requests=1)
INTERRUPTED = """
    import json, os, signal, sys, threading, time
    from hybridtei import EngineConfig, Encoder, Index
    from conformance.small import vocabulary

    encoder = Encoder.load(sys.argv[1], engine=EngineConfig(max_batch_requests=1))
    words = vocabulary.WORDS
    texts = [f"{a} {b} {c}" for a in words for b in words for c in words][:6000]
    index = Index(texts[:3], encoder)
    calls = {
        "encode": lambda: encoder.encode(texts, ("dense", "sparse")),
        "progress": lambda: encoder.encode(texts, show_progress=True),
        "rerank": lambda: encoder.rerank("baka", texts, weights="m3"),
        "Index": lambda: Index(texts, encoder),
        "add": lambda: index.add(texts),
    }
    for name, call in calls.items():
        begun, seen = encoder.forwards, []

        def interrupt():
            while encoder.forwards < begun + 5:
                time.sleep(0.001)
            seen.append(encoder.forwards)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            call()
        except KeyboardInterrupt:
            thread.join()
            after = encoder.forwards - seen[0]
            next_call = encoder.encode("baka").dense.shape
            loops = sum(thread.name == "own-loop" for thread in threading.enumerate())
            print(json.dumps([name, len(texts), after, next_call, len(index) % 1024, loops]))
"""


def test_an_interrupt_ends_every_verb_and_the_next_call_works(hybrid):
    done = ran([sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(hybrid)], check=True)
    rows = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == {"encode", "progress", "rerank", "Index", "add"}
    for count, after, shape, records, loops in rows.values():
        assert after < count / 10
        assert len(shape) == 2
        # Whole chunks are stored, and an index that was not made leaves no thread
        assert records == 3
        assert loops == 1


class Gated(FakeBackend):
    """Tells the loop of each pass, and lets it end when the loop says so."""

    def __init__(self, spec):
        super().__init__(spec, lanes=2, gate=self._wait)
        self.begun, self.loop = asyncio.Queue(), asyncio.get_running_loop()

    def _wait(self, batch):
        may_end = asyncio.run_coroutine_threadsafe(self._tell(), self.loop)
        may_end.result(120)

    async def _tell(self):
        may_end = asyncio.Event()
        await self.begun.put(may_end)
        await may_end.wait()


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_coroutine_that_is_left_begins_no_further_pass(how):
    backend = Gated(small.model_spec())
    encoder = Encoder(small.model(), backend, 8, ALONE)
    texts = [f"{a} {b}" for a in vocabulary.WORDS[:9] for b in vocabulary.WORDS[:9]]
    first = asyncio.create_task(encoder.aencode(texts))
    waiting = asyncio.create_task(encoder.aencode(texts))
    running = [await backend.begun.get() for _ in range(2)]
    if how == "cancelled":
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    else:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0)
    waiting.cancel()
    following = asyncio.create_task(encoder.aencode("five"))
    for may_end in running:
        may_end.set()
    # The next pass is that of the following call
    (await backend.begun.get()).set()
    assert (await following).dense.shape[0] == 1
    assert backend.forwards == 3


async def test_an_error_of_one_lane_ends_the_others():
    class Failing(FakeBackend):
        def forward(self, batch, *, use_all_cores=False):
            if self.forwards == 4:
                raise BackendError("no memory")
            return super().forward(batch)

    backend = Failing(small.model_spec(), lanes=2)
    encoder = Encoder(small.model(), backend, 8, ALONE)
    texts = [f"{a} {b}" for a in vocabulary.WORDS[:9] for b in vocabulary.WORDS[:9]]
    with pytest.raises(BackendError, match="no memory"):
        encoder.encode(texts)
    assert backend.forwards < 8
