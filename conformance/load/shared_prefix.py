"""Reranking by a language model whose texts share an instruction and a query, with and without computing these once.

    python -m conformance.load.shared_prefix [--backend ort] [--documents 32] [--words 12] [--layers 4] [--rounds 4]

The model is random, as wide as Qwen3-Reranker-0.6B, of fewer layers, with the embedded model's tokenizer. An instruction of
some 400 tokens, and texts of so many `words`, are made of those of README.md. A round reranks twice in process, one after the
other, and takes the processor's time; it also says how far the raw scores of both are from each other.
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
from hybridtei.tasks.rerank import INSTRUCTION_CHARACTERS_MAX

HIDDEN, WIDE, HEADS, KEY_HEADS, DIM = 1024, 3072, 16, 8, 128
COUNTS = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS}
TEMPLATE = {"prefix": "judge.", "body": "{instruction} query: {query} document: {document}", "suffix": "answer:"}
INSTRUCTION_WORDS = 165  # some 400 tokens


def write(folder: Path, layers: int) -> Path:
    """A Qwen3 without weights of anybody."""
    shutil.copyfile(embedded_model()[0] / "tokenizer.json", folder / "tokenizer.json")
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "silu", "max_position_embeddings": 8192}))
    (folder / "hybridtei_rerank.json").write_text(json.dumps(TEMPLATE))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        shapes |= {f"{attention}.{name}_proj": (count * DIM, HIDDEN) for name, count in COUNTS.items()}
        shapes |= {f"{attention}.o_proj": (HIDDEN, HEADS * DIM), f"{attention}.q_norm": (DIM,), f"{attention}.k_norm": (DIM,)}
        shapes |= {f"{mlp}.{name}_proj": (WIDE, HIDDEN) for name in ("gate", "up")} | {f"{mlp}.down_proj": (HIDDEN, WIDE)}
        shapes |= {f"layers.{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    draw = np.random.default_rng(0)
    tensors = {
        f"model.{name}.weight": draw.standard_normal(shape, dtype=np.float32) * np.float32(0.04 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def ranked(encoder: Encoder, documents: list[str], instruction: str, *, shares: bool) -> tuple[np.ndarray, float]:
    """Raw scores by document, and seconds."""
    encoder._backend.shares_prefixes = shares
    began = time.process_time()
    found = encoder.rerank("a search engine of vectors", documents, instruction=instruction, raw_scores=True)
    took = time.process_time() - began
    return np.array([one.score for one in sorted(found, key=lambda one: one.index)]), took


def main() -> None:
    """Print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("documents", 32), ("words", 12), ("layers", 4), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    words, draw = (Path(__file__).parents[2] / "README.md").read_text().split(), random.Random(0)
    documents = [" ".join(draw.choices(words, k=options.words)) for _ in range(options.documents)]
    instruction = " ".join(draw.choices(words, k=INSTRUCTION_WORDS))[:INSTRUCTION_CHARACTERS_MAX]
    with TemporaryDirectory() as folder:
        encoder = Encoder.load(str(write(Path(folder), options.layers)), backend=options.backend)
        encoder.rerank("a search", documents[:2], instruction=instruction)
        print(f"{encoder.backend_name}: {options.documents} texts of {options.words} words", flush=True)
        for _ in range(options.rounds):
            whole, slow = ranked(encoder, documents, instruction, shares=False)
            once, fast = ranked(encoder, documents, instruction, shares=True)
            apart = float(np.abs(whole - once).max())
            print(
                f"whole {slow:.2f} s, prefix once {fast:.2f} s: {slow / fast:.1f} x; scores differ by {apart:.1g}", flush=True
            )


if __name__ == "__main__":
    main()
