"""Runs a model on a device, in process: with a full queue, in small passes, and for a single text.

Knows nothing of shapes, ways and tables; see `gpu`.
"""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LONE_PASSES = 15
SMALL_TOKENS = 1024
POOL_PASSES = 16


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
    """Encodings of lengths drawn from a mix, made before any clock runs; no two that wait at once are alike, or they would be
    computed once."""

    def __init__(self, mix: Any, longest: int, vocab_size: int, budget: int) -> None:
        import numpy as np

        from hybridtei.batch import Encoding

        draw, self._next, self._made = np.random.default_rng(0), 0, []
        total = 0
        while total < POOL_PASSES * budget or len(self._made) < LONE_PASSES:
            share = draw.random()
            low, high = mix[0][1] if share < mix[0][0] else mix[-1][1]
            length = min(int(draw.integers(low, high + 1)), longest)
            self._made.append(Encoding(draw.integers(5, vocab_size, length)))
            total += length

    def take(self, tokens: int) -> list[Any]:
        found, total = [], 0
        while total < tokens:
            found.append(self._made[self._next])
            total += len(found[-1].input_ids)
            self._next = (self._next + 1) % len(self._made)
        return found


def drive(backend: Any, source: Source, budget: int, seconds: float, heads: Any) -> tuple[float, float, float]:
    """Return (tokens/s, texts/s, mean keys of a token) of a full queue."""
    from hybridtei.engine.core import EngineCore

    core = EngineCore(max_tokens=budget, positions=backend.spec.positions, padding=backend.padding)
    lock = threading.Lock()
    counts = [0, 0, 0]
    until = time.perf_counter() + seconds
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not counts[0] or time.perf_counter() < until:  # a pass at least
                with lock:
                    if core.waiting_tokens < 2 * budget:
                        core.add(source.take(2 * budget), heads)
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

    core.add(source.take(4 * budget), heads)
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


def passes(backend: Any, source: Source, budget: int, seconds: float, heads: Any) -> float:
    """Tokens/s of batches that are packed before the clock runs, two under way at once where the backend takes two."""
    from hybridtei.batch import pack

    made = [pack(source.take(budget)[:-1] or source.take(1), heads, backend.spec.positions) for _ in range(POOL_PASSES // 2)]
    until, began = time.perf_counter() + seconds, time.perf_counter()

    def work(first: int) -> int:
        tokens, number = 0, first
        while not tokens or time.perf_counter() < until:
            batch = made[number % len(made)]
            backend.forward(batch)
            tokens, number = tokens + len(batch.input_ids), number + 1
        return tokens

    with ThreadPoolExecutor(1 + backend.ahead) as pool:
        total = sum(pool.map(work, range(1 + backend.ahead)))
    return total / (time.perf_counter() - began)


def lone(backend: Any, source: Source, heads: Any) -> float:
    """Return the median milliseconds of a single text."""
    from hybridtei.batch import pack

    took = []
    backend.forward(pack(source.take(1), heads, backend.spec.positions))
    for _ in range(LONE_PASSES):
        batch = pack(source.take(1), heads, backend.spec.positions)
        began = time.perf_counter()
        backend.forward(batch)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)
