"""Texts a second of a table of token vectors, beside the embedded model, in process.

    python -m conformance.load.static [--texts 6000] [--words 30] [--rounds 4]

The table is random, of 256 numbers a token, and has the embedded model's tokenizer; the texts are words of README.md. A round
times both, one after the other. The table's texts differ from each other; the embedded model reads a twentieth of them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from hybridtei import Encoder
from hybridtei.checkpoint.files import embedded_model

WIDTH = 256


def write(folder: Path) -> Path:
    """A StaticEmbedding in the form of the hub."""
    shutil.copyfile(embedded_model()[0] / "tokenizer.json", folder / "tokenizer.json")
    rows = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    table = np.random.default_rng(0).standard_normal((rows, WIDTH), dtype=np.float32)
    save_file({"embedding.weight": table}, folder / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}]))
    return folder


def rate(encoder: Encoder, texts: list[str]) -> float:
    """Texts a second."""
    began = time.perf_counter()
    encoder.encode(texts)
    return len(texts) / (time.perf_counter() - began)


def main() -> None:
    """Print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("texts", 6000), ("words", 30), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    words, draw = (Path(__file__).parents[2] / "README.md").read_text().split(), random.Random(0)
    texts = [" ".join(draw.choices(words, k=options.words)) for _ in range(options.texts)]
    with TemporaryDirectory() as folder:
        table, model = Encoder.load(str(write(Path(folder)))), Encoder.load()
        for _ in range(options.rounds):
            slow, fast = rate(model, texts[: len(texts) // 20]), rate(table, texts)
            print(f"embedded model {slow:.0f} texts/s, table {fast:.0f} texts/s: {fast / slow:.1f} x", flush=True)


if __name__ == "__main__":
    main()
