"""What spans cost: the embedded model, in process, on the same texts with and without them.

    python -m conformance.load.spans [--texts 24] [--words 120] [--spans 6] [--outputs dense] [--rounds 15]

Texts are words of README.md, some 230 tokens each, and spans are equal parts of them. A round times both by the
processor's time, in turn the one or the other first; the last line is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from hybridtei import Encoder


def seconds(encoder: Encoder, texts: list[str], outputs: list[str], spans: list[list[tuple[int, int]]] | None) -> float:
    """Of the processor."""
    began = time.process_time()
    encoder.encode(texts, outputs, spans=spans)
    return time.process_time() - began


def main() -> None:
    """Print a line for each round, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("texts", 24), ("words", 120), ("spans", 6), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--outputs", nargs="+", default=["dense"])
    options = parser.parse_args()
    words, draw = (Path(__file__).parents[2] / "README.md").read_text().split(), random.Random(0)
    texts = [" ".join(draw.choices(words, k=options.words))[:700] for _ in range(options.texts)]
    parts = [
        [(i * len(text) // options.spans, (i + 1) * len(text) // options.spans) for i in range(options.spans)] for text in texts
    ]
    encoder, ratios = Encoder.load(), list[float]()
    lengths = encoder.encode(texts, ["tokens"]).tokens.lengths
    print(f"{len(texts)} texts of {lengths.mean():.0f} tokens, {options.spans} spans each, {', '.join(options.outputs)}")
    for number in range(options.rounds):
        order = (None, parts) if number % 2 else (parts, None)
        took = {spans is None: seconds(encoder, texts, options.outputs, spans) for spans in order}
        ratios.append(took[False] / took[True])
        print(f"plain {took[True]:.3f} s, with spans {took[False]:.3f} s: {ratios[-1]:.3f} x", flush=True)
    print(f"median {statistics.median(ratios):.3f} x")


if __name__ == "__main__":
    main()
