"""Checkpoints of true sizes, served without torch: `python -m conformance.families.shapes [NAME ...] [--backend
NAME]`

For each row of checkpoints.toml a folder with the files, tensor names, shapes and dtypes of that
checkpoint is written, with random weights, and served twice by a process that cannot import torch,
transformers or onnx: the second finds what the first has kept in its cache folder. Printed are
seconds from the command to the first answer of /health, the peak of resident memory by then, and
the proportional set size and the memory of no file at rest after requests of short, long and many
texts, and the tokens a second of passages in requests of 32. Exit status 1 if a server does not
come up, an answer is not finite or of another shape, or a bound is exceeded: 1.25 times the weights
at the served dtype and 150 MB at rest. Linux only; needs room for three times the largest folder.
"""

import argparse
import math
import random
import sys
import tempfile
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path

from conformance.families.shapes.checkpoint import Checkpoint, read_checkpoints, write_checkpoint
from conformance.families.shapes.serving import Server, serving

FACTOR, MORE_BYTES = 1.25, 150_000_000
# The server looks every 10 seconds whether memory can be given back
REST_SECONDS = 12.0
SERVED_BYTES = {"float32": 4, "bfloat16": 2}
SHORT = "a wing in a slipstream"
LONG = "the boundary layer on a flat plate in a slipstream " * 20
RATE_SECONDS = 8.0
MANY = [f"{SHORT} of kind {place}" for place in range(32)]
HEAD = f"{'checkpoint':38}{'engine':24}{'ready s':>9}{'peak MB':>9}{'rest MB':>9}{'own MB':>9}{'tokens/s':>9}{'bound MB':>9}{'weights MB':>11}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    checkpoints = read_checkpoints()
    parser = argparse.ArgumentParser(
        prog="python -m conformance.families.shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(checkpoints)}; all if none is given",
    )
    parser.add_argument(
        "--backend",
        action="append",
        help="as `hybridtei serve` knows them; repeatable; auto if not given",
    )
    parser.add_argument(
        "--dtype", choices=[*SERVED_BYTES], default="float32", help="that is served"
    )
    parser.add_argument("--folder", type=Path, help="where the folders are written for a while")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(checkpoints))
    if unknown:
        parser.error(f"no checkpoint {unknown[0]!r}")
    print(HEAD)
    faults = 0
    for name in arguments.names or checkpoints:
        with tempfile.TemporaryDirectory(prefix="shapes-", dir=arguments.folder) as scratch:
            folder = Path(scratch) / name
            write_checkpoint(folder, checkpoints[name])
            for backend in arguments.backend or ["auto"]:
                for start in ("first", "again"):
                    faults += len(
                        measure(folder, checkpoints[name], backend, arguments.dtype, start)
                    )
    return 1 if faults else 0


def measure(
    folder: Path, checkpoint: Checkpoint, backend: str, dtype: str, start: str
) -> list[str]:
    """Serve a folder, print its row, return its faults. `start`: which one it is."""
    weights = checkpoint.numbers * SERVED_BYTES[dtype]
    bound = FACTOR * weights + MORE_BYTES
    flags = ["--backend", backend, "--dtype", dtype, "--auto-truncate", "true"]
    cache = folder.parent / "cache"
    cache.mkdir(exist_ok=True)
    title = f"{folder.name:38}{f'{backend} {dtype} {start}':24}"
    try:
        with serving(folder, cache, flags, folder.parent / "log") as server:
            peak = server.peak_bytes()
            faults = ask(server, checkpoint)
            time.sleep(REST_SECONDS)
            rest, own = server.resting_bytes("Pss"), server.resting_bytes("Anonymous")
            rate = tokens_a_second(server, checkpoint)
    except (RuntimeError, urllib.error.URLError) as error:
        print(f"{title} FAULT: {error}", flush=True)
        return [str(error)]
    if rest > bound:
        faults.append(f"{(rest - bound) / 1e6:.0f} MB beyond the bound")
    memory = "".join(f"{each / 1e6:9.0f}" for each in (peak, rest, own))
    figures = f"{server.ready_seconds:9.1f}{memory}{rate:9.0f}{bound / 1e6:9.0f}"
    print(
        f"{title}{figures}{weights / 1e6:11.0f}{'  FAULT: ' + '; '.join(faults) if faults else ''}",
        flush=True,
    )
    return faults


def ask(server: Server, checkpoint: Checkpoint) -> list[str]:
    """Check the answers to a short text, a long one, and many texts. Return the fault."""
    faults = []
    for texts in ([SHORT], [LONG], MANY):
        if checkpoint.route == "rerank":
            answer = server.post("/rerank", {"query": SHORT, "texts": texts, "truncate": True})
            good = len(answer) == len(texts) and all(0 <= each["score"] <= 1 for each in answer)
        elif checkpoint.route == "embed_hybrid":
            answer = server.post("/embed_hybrid", {"inputs": texts, "truncate": True})
            good = len(answer) == len(texts) and all(
                _is_hybrid(each, checkpoint.width) for each in answer
            )
        else:
            answer = server.post("/embed", {"inputs": texts, "truncate": True})
            width = (checkpoint.width, *checkpoint.dense)[-1]
            good = len(answer) == len(texts) and all(is_unit(each, width) for each in answer)
        if not good:
            faults.append(f"the answer to {len(texts)} texts is not right")
    return faults


def tokens_a_second(server: Server, checkpoint: Checkpoint) -> float:
    """Tokens a second of one client that sends 32 different passages at a time, special tokens
    included; 0 for a checkpoint that gives no dense vectors."""
    if checkpoint.route == "rerank":
        return 0.0
    draw, words, tokens, begin = random.Random(0), LONG.split(), 0, time.perf_counter()
    while time.perf_counter() - begin < RATE_SECONDS:
        passages = [" ".join(draw.sample(words, 70)) for _ in MANY]
        tokens += server.post("/v1/embeddings", {"input": passages})["usage"]["prompt_tokens"]
    return tokens / (time.perf_counter() - begin)


def is_unit(vector: Sequence[float], width: int) -> bool:
    """True if a vector has this width and length 1."""
    return len(vector) == width and abs(math.hypot(*vector) - 1) < 1e-4


def _is_hybrid(answer: dict[str, object], width: int) -> bool:
    dense, rows, sparse = answer["dense"], answer["multivector"], answer["sparse"]
    assert isinstance(dense, list)
    assert isinstance(rows, list)
    return (
        is_unit(dense, width)
        and bool(rows)
        and all(is_unit(row, width) for row in rows)
        and sparse is not None
    )


if __name__ == "__main__":
    sys.exit(main())
