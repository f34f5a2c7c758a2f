"""How near the engine comes to what the processor can do: the embedded model in each precision.

    python -m conformance.load limit [--dtypes float32,bfloat16,int8] [--rounds 5] [--texts 600]
    [--seconds 8]

For each precision: the model's matrix products alone, by OpenVINO's kernels on all cores
(`products`, GFLOP/s; int8 has no such row); texts of 128 tokens in one process (`uniform`,
tokens/s), and their share of the products' speed; texts of mixed lengths (`mixed`), of `uniform`;
such texts from 32 clients over HTTP, one a request (`http`), of `mixed`. Without OpenVINO the
products are left out.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from conformance.load.report import paired, ratio, table
from conformance.load.servers import served, started
from conformance.load.traffic import MIXED, MIXED_TOKENS, Mix, Texts, measure
from hybridtei.config import ModelConfig
from hybridtei.encoder import Encoder

FLAGS = {
    "limit": {"--dtypes": "float32,bfloat16,int8", "--rounds": 5, "--texts": 600, "--seconds": 8.0}
}
# Of the embedded model
WIDTH, INNER, LAYERS = 384, 1536, 6
# Of a token, in products
FLOP = 2 * LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
# Rows of a product; passes a core in a measurement
TOKENS, PASSES = 512, 10
HINTS = {"float32": "f32", "bfloat16": "bf16"}


def products(dtype: str) -> Callable[[], float] | None:
    """A measurement of the model's products alone in GFLOP/s; None where nothing here computes
    them."""
    with suppress(ImportError, KeyError):
        import openvino as ov
        from openvino import opset13 as ops

        hint, draw = HINTS[dtype], np.random.default_rng(0)
        rows = state = ops.parameter([TOKENS, WIDTH], ov.Type.f32)
        for _ in range(LAYERS):
            for shape in (*[(WIDTH, WIDTH)] * 4, (WIDTH, INNER), (INNER, WIDTH)):
                matrix = ops.constant(
                    draw.standard_normal(shape, dtype=np.float32) / np.float32(shape[0]) ** 0.5
                )
                state = ops.matmul(state, matrix, transpose_a=False, transpose_b=False)
        cores = os.cpu_count() or 1
        settings = {
            "INFERENCE_PRECISION_HINT": hint,
            "NUM_STREAMS": cores,
            "INFERENCE_NUM_THREADS": cores,
        }
        compiled = ov.Core().compile_model(ov.Model([ops.result(state)], [rows]), "CPU", settings)
        queue, feed = (
            ov.AsyncInferQueue(compiled, cores),
            {0: np.full((TOKENS, WIDTH), 0.01, np.float32)},
        )

        def rate() -> float:
            began = time.perf_counter()
            for _ in range(PASSES * cores):
                queue.start_async(feed)
            queue.wait_all()
            return PASSES * cores * TOKENS * FLOP / 1e9 / (time.perf_counter() - began)

        # Kernels are made
        rate()
        return rate
    return None


def in_process(encoder: Encoder, source: Texts, mix: Mix, number: int) -> float:
    """Tokens a second."""
    texts = [source.draw(mix) for _ in range(number)]
    began = time.perf_counter()
    encoder.encode([text for text, _ in texts])
    return sum(tokens for _, tokens in texts) / (time.perf_counter() - began)


def over_http(dtype: str, seconds: float) -> float:
    """Tokens a second of a server's own process."""
    with started(served("--dtype", dtype)) as server:
        return measure(server, "mixed", seconds)["tokens/s"]


def limit(options: argparse.Namespace) -> int:
    rows, source = {}, Texts()
    for dtype in options.dtypes.split(","):
        encoder, peak = Encoder.load(config=ModelConfig(dtype=dtype)), products(dtype)
        uniform = ((1.0, (128, 128)),)
        found = paired(
            options.rounds,
            {
                **({} if peak is None else {"products": peak}),
                "uniform": partial(
                    in_process, encoder, source, uniform, options.texts * MIXED_TOKENS // 128
                ),
                "mixed": partial(in_process, encoder, source, MIXED, options.texts),
                "http": partial(over_http, dtype, options.seconds),
            },
        )
        encoder.close()
        at_peak = (
            [rate * 1e9 / FLOP for rate in found["products"]]
            if "products" in found
            else found["uniform"]
        )
        bases = {
            "products": found.get("products", []),
            "uniform": at_peak,
            "mixed": found["uniform"],
            "http": found["mixed"],
        }
        for name, own in found.items():
            unit = "GFLOP/s" if name == "products" else "tokens/s"
            rows[f"{dtype}, {name}, {unit}"] = {
                "median": statistics.median(own),
                "of the row above": ratio(own, bases[name]),
            }
    table(rows)
    return 0
