"""`hybridtei serve` with a probe inside and without forward passes: `python -m
conformance.amplify.launch DESCRIPTOR FLAGS…`.

Tokenizer, heads, engine, store and writers are the real ones. Forward passes only read rows of a
table, so that the measured cost is that of the rest of a request.
"""

import sys

import numpy as np

from conformance.amplify.probe import watch
from conformance.small import fake_backend as fake
from hybridtei import cli
from hybridtei.batch import PackedBatch, Padding
from hybridtei.inference import load
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import Floats
from hybridtei.system.machine import LaneKind

# About what is measured of the embedded model on a CPU
PASS_TOKENS = 256
TABLE: Floats = np.random.default_rng(0).normal(0.0, 0.1, (1024, 1024)).astype(np.float32)


def _backend(config: object, spec: ModelSpec, *, bulk_niceness: int) -> fake.FakeBackend:
    lanes = (LaneKind.EXPRESS,) * 2 + (LaneKind.BULK,) * 2
    return fake.FakeBackend(spec, lanes=lanes, padding=Padding.ATTENTION, busy_tokens=PASS_TOKENS)


def _rows(batch: PackedBatch, width: int) -> Floats:
    return TABLE[batch.position_ids % len(TABLE), :width]


def main() -> int:
    watch(int(sys.argv[1]))
    load.open_backend = _backend  # type: ignore[assignment]
    fake._states = _rows
    return cli.main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
