"""`hybridtei ingest --engine ray` on this machine: what a second worker gains.

    python -m conformance.load ray_scaling [--documents 6000] [--rounds 2] [--outputs dense,sparse]

1 and 2 workers, one thread each, alternating, over the same texts of 20 to 60 words: documents/s from the third batch of each
worker to the last, so neither the start of Ray nor the loading of models counts. Model and store are the embedded ones.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from conformance.load.report import paired, ratio, table
from conformance.load.traffic import WORDS
from hybridtei.retrieval.ingest.prepare import Batch
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.ingest.write import Writer
from hybridtei.retrieval.ray import join

OUTPUTS = {"type": lambda given: tuple(given.split(",")), "help": "default: all"}
FLAGS = {"ray_scaling": {"--documents": 6000, "--rounds": 2, "--outputs": OUTPUTS}}
BATCH = 256


def documents_per_s(source: Path, outputs: tuple[str, ...] | None, workers: int) -> float:
    """The rate of the command's own run, measured between embedding and writing."""
    original, seen, moments = Writer.write, 0, list[tuple[float, int]]()

    async def watched(self: Writer, batch: Batch, *given: Any) -> None:
        nonlocal seen
        seen += len(batch.pieces)
        if seen >= 3 * BATCH * workers and batch.pieces:
            moments.append((time.perf_counter(), seen))
        await original(self, batch, *given)

    Writer.write = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            bad, ray = (
                f"{folder}/bad.jsonl",
                {"engine": "ray", "ray_workers": workers, "outputs": outputs},
            )
            ingest(source, "ray", store=f"{folder}/qdrant", quarantine=bad, quiet=True, **ray)
    finally:
        Writer.write = original  # type: ignore[method-assign]
    if len(moments) < 2:
        sys.exit(f"--documents: found {seen}, expected at least {6 * BATCH * workers}")
    (began, before), (ended, after) = moments[0], moments[-1]
    return (after - before) / (ended - began)


def ray_scaling(options: argparse.Namespace) -> int:
    leave, draw = join("local", 2), random.Random(1)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for number in range(options.documents):
                text = " ".join(draw.choices(WORDS, k=draw.randint(20, 60)))
                file.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")
            file.flush()
            measured = partial(documents_per_s, Path(file.name), options.outputs)
            found = paired(
                options.rounds,
                {f"{number} workers": partial(measured, number) for number in (1, 2)},
            )
    finally:
        leave()
    speeds = {name: statistics.median(own) for name, own in found.items()}
    table(
        {
            name: {"documents/s": speeds[name], "x one": ratio(own, found["1 workers"])}
            for name, own in found.items()
        }
    )
    return 0
