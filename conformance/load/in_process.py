"""What padding and HTTP cost: one engine on uniform texts, on mixed lengths, and behind a server.

    python conformance/load/in_process.py [--rounds 3] [--texts 600] [--dtype bfloat16] [--backend ort] [--http]

`Encoder` embeds texts of 128 tokens each, and as many tokens in texts of mixed lengths (70 % of 5–30 tokens, 30 % of 100–250);
with `--http`, 32 clients send the mixed ones to a server of the same settings. Alternating; prints medians of useful tokens/s
and ratios: mixed to uniform (target 0.95), HTTP to in process (target 0.85).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from http_load import MIXED, Texts, measure, started

from hybridtei.config import ModelConfig
from hybridtei.encoder import Encoder

UNIFORM = ((1.0, (128, 128)),)


def rate(encoder: Encoder, texts: list[tuple[str, int]]) -> float:
    """Useful tokens a second."""
    began = time.perf_counter()
    encoder.encode([text for text, _ in texts])
    return sum(tokens for _, tokens in texts) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--dtype")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--http", action="store_true")
    options = parser.parse_args()
    encoder = Encoder.load(config=ModelConfig(dtype=options.dtype, backend=options.backend))
    source = Texts()
    found: dict[str, list[float]] = {"uniform": [], "mixed": [], "http": []}
    flags = f"--backend {options.backend}" + (f" --dtype {options.dtype}" if options.dtype else "")
    for _ in range(options.rounds):
        mixed = [source.draw(MIXED) for _ in range(options.texts)]
        uniform = [source.draw(UNIFORM) for _ in range(sum(tokens for _, tokens in mixed) // 128)]
        found["uniform"].append(rate(encoder, uniform))
        found["mixed"].append(rate(encoder, mixed))
        if options.http:
            with started(f"hybridtei serve --hostname 127.0.0.1 --port {{port}} {flags}") as (url, process):
                found["http"].append(measure(url, "mixed", 8.0, process)["tokens_per_s"])
    medians = {name: statistics.median(rates) for name, rates in found.items() if rates}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, value in medians.items():
        print(f"{name:10}{value:10.0f} tokens/s")
    print(f"mixed / uniform {medians['mixed'] / medians['uniform']:.2f}")
    if options.http:
        print(f"http / mixed    {medians['http'] / medians['mixed']:.2f}")
    print(json.dumps({name: round(value, 1) for name, value in medians.items()}))


if __name__ == "__main__":
    main()
