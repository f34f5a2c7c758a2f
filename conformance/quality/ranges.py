"""Makes the ranges of the embedded model's dimensions, which int8 and uint8 outputs need.

    python -m conformance.quality.ranges Translation-en [--output
    hybridtei/models/heads/minilm_ranges.npz]

Reads Debian's package descriptions, as `apt-get update` fetches them (see data.md;
`/usr/lib/apt/apt-helper cat-file` unpacks them). Chosen are those of the smallest
`Description-md5`: of 2,000 packages the paragraphs after the title, 700 characters each at most,
and of another 400 the title, which is as short as a query. Cut vectors have their own ranges.
"""

import argparse
import re
from pathlib import Path

import numpy as np

from hybridtei import Encoder
from hybridtei.outputs import Floats, cut, unit

MAX_CHARACTERS = 700
DOCUMENTS, QUERIES = 2000, 400
WIDTHS = (64, 128, 192, 256)
RECORD = re.compile(r"^Description-md5: (\w+)\nDescription-en: (.+)\n((?: .*\n)+)", re.MULTILINE)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("descriptions", type=Path)
    parser.add_argument(
        "--output", type=Path, default=Path("hybridtei/models/heads/minilm_ranges.npz")
    )
    options = parser.parse_args()
    vectors = Encoder.load(measures=False).encode(
        chosen(options.descriptions.read_text("utf-8")), ("dense", "multivector")
    )
    assert vectors.dense is not None
    narrower = {f"dense_{width}": ranges_of(unit(cut(vectors.dense, width))) for width in WIDTHS}
    dense, multivector = ranges_of(vectors.dense), ranges_of(vectors.multivector.values)
    np.savez_compressed(options.output, dense=dense, multivector=multivector, **narrower)  # type: ignore[arg-type,unused-ignore]


def ranges_of(rows: Floats) -> Floats:
    """Return the least and the greatest value of each dimension: float32[n, d] -> float32[2, d]."""
    return np.stack([rows.min(axis=0), rows.max(axis=0)])


def chosen(descriptions: str) -> list[str]:
    """Return the paragraphs of some records and the titles of other records, in the order of their
    digests."""
    records = sorted(set(RECORD.findall(descriptions)))
    bodies = [
        " ".join(body.replace("\n .\n", "\n").split())[:MAX_CHARACTERS]
        for _, _, body in records[:DOCUMENTS]
    ]
    return bodies + [title for _, title, _ in records[DOCUMENTS : DOCUMENTS + QUERIES]]


if __name__ == "__main__":
    main()
