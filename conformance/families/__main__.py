"""Every family of models against transformers, on every engine: `python -m conformance.families
[FAMILY ...] [--dtype DTYPE]`

For each family and each setting of it in `variants`, a tiny checkpoint with seeded weights is
written, read and computed by ONNX Runtime, OpenVINO and torch, as far as they have that precision:
five texts in one batch, and each alone. Printed are the largest differences from transformers'
eager attention: of hidden states relative to the largest, and of mean-pooled unit vectors; and that
of the engines' vectors. Exit status 1 if one is beyond its tolerance.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openvino as ov
from transformers.utils import logging

from conformance.families import lfm2
from conformance.families.oracle import (
    ENGINES_OF,
    TOLERANCES,
    difference,
    max_difference,
    open_engine,
    reference,
    states_of,
    texts_of,
    unit_means,
)
from conformance.families.variants import VARIANTS
from conformance.small import tiny
from hybridtei.models.checkpoint.spec import read_spec

# Written in its publisher's form, since transformers has no class of it
LFM2 = "lfm2_bidirectional"
FAMILIES = (*tiny.FAMILIES, LFM2)
CAPABILITIES = "OPTIMIZATION_CAPABILITIES"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help=f"of {', '.join(FAMILIES)}; all if none is given",
    )
    parser.add_argument(
        "--dtype",
        choices=list(TOLERANCES),
        default="float32",
        help="of the engines; transformers has float32",
    )
    options = parser.parse_args(argv)
    wanted, tolerance = options.families, TOLERANCES[options.dtype]
    engines = engines_of(options.dtype)
    unknown = sorted(set(wanted) - set(FAMILIES))
    if unknown:
        parser.error(f"no family {unknown[0]!r}")
    logging.disable_progress_bar()
    print(f"{'family':20}{'settings':44}" + "".join(f"{name:>18}" for name in columns(engines)))
    beyond, apart, count = 0, set(), 0
    for family, settings in (*VARIANTS, (LFM2, {}), (LFM2, lfm2.ADJUSTED)):
        if wanted and family not in wanted:
            continue
        row, within, agree = compare(family, settings, options.dtype, engines)
        count += 1
        beyond += not within
        if not agree:
            apart.add(family)
        marks = "" if within and agree else "  BEYOND"
        shown = ", ".join(settings) or "-"
        print(
            f"{family:20}{shown[:42]:44}" + "".join(f"{figure:18.1e}" for figure in row) + marks,
            flush=True,
        )
    print(
        f"{count} checkpoints, {beyond} beyond {tolerance.hidden:g} (hidden) or "
        f"{tolerance.vectors:g} (vectors); {len(apart)} families in which engines disagree"
    )
    return 1 if beyond or apart else 0


def engines_of(dtype: str) -> list[str]:
    """The engines that compute in this precision on this processor."""
    engines = list(ENGINES_OF[dtype])
    if dtype == "bfloat16" and "BF16" not in ov.Core().get_property("CPU", CAPABILITIES):
        engines.remove("openvino")
        print("OpenVINO does not compute in bfloat16 on this processor: it is left out")
    return engines


def columns(engines: Sequence[str]) -> list[str]:
    """Names of the figures of a row."""
    figures = [f"{engine} {what}" for engine in engines for what in ("hidden", "vectors")]
    return [*figures, "engines apart"]


def compare(
    family: str, settings: Mapping[str, Any], dtype: str, engines: Sequence[str]
) -> tuple[list[float], bool, bool]:
    """(figures under `columns`, whether each engine is near transformers, whether the engines
    agree)."""
    with TemporaryDirectory() as name:
        if family == LFM2:
            folder, expected = lfm2.write(Path(name), **settings)
            spec = read_spec(folder, pooling="mean")
            texts = texts_of(spec)
        else:
            folder = tiny.write_family(Path(name), family, **settings)
            spec = read_spec(folder, pooling="mean")
            texts = texts_of(spec)
            expected = reference(folder, texts)
        states = [states_of(open_engine(engine, spec, dtype), texts) for engine in engines]
    differences = [difference(one, expected, texts) for one in states]
    tolerance = TOLERANCES[dtype]
    vectors = [unit_means(form, texts) for one in states for form in (one.together, one.alone)]
    apart = max(max_difference(one, other) for one, other in combinations(vectors, 2))
    figures = [figure for one in differences for figure in (one.hidden, one.vectors)]
    return (
        [*figures, apart],
        all(one.within(tolerance) for one in differences),
        apart <= tolerance.vectors,
    )


if __name__ == "__main__":
    sys.exit(main())
