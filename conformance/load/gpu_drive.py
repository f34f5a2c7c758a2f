"""Runs a model on a device, in process: with a full queue, in small passes, and for a single text.

Knows nothing of shapes, ways and tables; see `gpu`.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

LONE_PASSES = 15
SMALL_TOKENS = 1024


def product_rate(dtype: str, device: str, size: int) -> float:
    """FLOP/s of matrix products; the best of several, since whatever else runs only slows one down."""
    import torch

    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    best = 0.0
    for _ in range(12):
        synchronise(device)
        began = time.perf_counter()
        a @ b
        synchronise(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def synchronise(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Source:
    """Encodings without end, of lengths drawn from a mix; no two alike, or they would be computed once."""

    def __init__(self, mix: Any, longest: int, vocab_size: int) -> None:
        import numpy as np

        self._mix, self._longest, self._vocab_size = mix, longest, vocab_size
        self._draw = np.random.default_rng(0)

    def take(self, tokens: int) -> list[Any]:
        from hybridtei.batch import Encoding

        found, total = [], 0
        while total < tokens:
            share = self._draw.random()
            bounds = self._mix[0][1] if share < self._mix[0][0] else self._mix[-1][1]
            length = min(int(self._draw.integers(bounds[0], bounds[1] + 1)), self._longest)
            found.append(Encoding(self._draw.integers(5, self._vocab_size, length)))
            total += length
        return found


def drive(backend: Any, source: Source, budget: int, seconds: float) -> tuple[float, float, float]:
    """Return (tokens/s, texts/s, mean keys of a token) of a full queue."""
    from hybridtei.batch import Head
    from hybridtei.engine.core import EngineCore

    core = EngineCore(max_tokens=budget, positions=backend.spec.positions, padding=backend.padding)
    dense, lock = frozenset({Head.DENSE}), threading.Lock()
    counts = [0, 0, 0]
    until = time.perf_counter() + seconds
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not counts[0] or time.perf_counter() < until:  # a pass at least
                with lock:
                    if core.waiting_tokens < 2 * budget:
                        core.add(source.take(2 * budget), dense)
                    batch = core.take()
                assert batch is not None
                parts = batch.split(backend.forward(batch.packed))
                lengths = batch.packed.lengths
                with lock:
                    core.settle(batch, parts)
                    for i, count in enumerate((int(lengths.sum()), len(lengths), int((lengths**2).sum()))):
                        counts[i] += count
        except BaseException as error:
            failures.append(error)

    core.add(source.take(4 * budget), dense)
    began = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(1 + backend.ahead)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    took = time.perf_counter() - began
    return counts[0] / took, counts[1] / took, counts[2] / max(counts[0], 1)


def lone(backend: Any, source: Source) -> float:
    """Return the median milliseconds of a single text."""
    from hybridtei.batch import Head, pack

    took = []
    backend.forward(pack(source.take(1), frozenset({Head.DENSE}), backend.spec.positions))
    recorded(backend)
    for _ in range(LONE_PASSES):
        batch = pack(source.take(1), frozenset({Head.DENSE}), backend.spec.positions)
        began = time.perf_counter()
        backend.forward(batch)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def small(backend: Any, source: Source, options: Any) -> float:
    """Tokens/s where no pass takes more than a thousand tokens, or one text."""
    drive(backend, source, SMALL_TOKENS, 0.2 * options.seconds)  # finds its buckets
    recorded(backend)
    return drive(backend, source, SMALL_TOKENS, 0.3 * options.seconds)[0]


def recorded(backend: Any) -> None:
    """Wait until what was seen so far is recorded, where anything is."""
    if backend.faster.graphs is not None:
        backend.faster.graphs.settle()
