"""From a laptop to a billion documents, on paper: sizes, hours, machines and prices from a few
measured numbers.

    # tables for your own rates
    python deploy/scale.py --core-tokens-per-s 5423 --gpu-tokens-per-s 250000

Pure functions of what they are given; knows no model and no store. Sizes follow from the shapes of
vectors; rates are measured or they are not there (no default for a GPU); prices and machines are
assumptions, each a flag. All tokens' vectors weigh a hundred times what the dense vector does;
merged to 64 of a bit a number, less than twice.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path

PAGE = Path(__file__).parent / "scale.md"
COUNTS = (10**5, 10**6, 10**7, 10**8, 10**9)
# Bits a number
KINDS = {"float32": 32, "float16": 16, "int8": 8, "binary": 1}
# uint32 and float32
SPARSE_ENTRY_BYTES = 8
# Of Qdrant's graph: twice as many links in the lowest layer, about a LINKS-th of that above it
LINK_BYTES, LINKS = (4, 16)
# Id, its two maps, versions
POINT_BYTES = 64
# Of memory and disk; the rest is for merging segments, and for growth
FILL = 0.7
# That the embedded model's multi-vectors are trained to be cut to
WIDTHS = (256, 128, 64)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured (the first block and the rates), and what is assumed (the rest)."""

    # Of a document: mean of Cranfield's abstracts under the embedded model
    tokens: int = 187
    text_bytes: int = 1123
    sparse_entries: int = 83
    dense: int = 384
    multivector: int = 256
    multivector_rows: int = 186
    query_tokens: int = 12
    # notebooks/hardware.md: float32, passages over HTTP, 6,248 on two cores; bfloat16: 5,423
    core_tokens_per_s: float = 3124
    # notebooks/hardware.md: float32, queries over HTTP, 5,788 on two cores
    core_query_tokens_per_s: float = 2894
    # None was measured
    gpu_tokens_per_s: float = 0
    # Beside the text
    payload_bytes: int = 200
    replicas: int = 2
    # An ingest may take
    hours: float = 24
    # Of a Ray worker
    worker_cores: int = 4
    # Ranked again by MaxSim
    candidates: int = 50
    # Of Qdrant, dense and sparse lists together
    search_core_ms: float = 2
    # Of MaxSim
    core_multiply_adds_per_s: float = 1e10
    core_hour_price: float = 0.04
    gpu_hour_price: float = 2.5


@dataclass(frozen=True, slots=True)
class Layout:
    """How a collection keeps the three outputs: what lies in memory, and what on disk alone. A
    width of 0: no multi-vectors.

    `rows`: the vectors to which a document's multi-vector is merged. Other kinds than floats lie
    in the payload, as base64.
    """

    name: str
    dense_in_memory: str
    sparse_in_memory: bool
    width: int
    multivector_kind: str = "float32"
    rows: int | None = None


LAYOUTS = (
    Layout("all tokens in float32, in Qdrant", "float32", True, 256),
    Layout("as `hybridtei ingest` makes it", "float32", True, 256, "binary", 64),
    Layout("dense scalar-quantised, 32 vectors of bits", "int8", True, 256, "binary", 32),
    Layout("dense binary, sparse on disk, 32 vectors of bits", "binary", False, 256, "binary", 32),
    Layout("the same without multi-vectors", "binary", False, 0),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step has."""

    name: str
    cores: int
    memory_gb: float
    disk_gb: float


LAPTOP = Machine("one process, embedded Qdrant", 4, 16, 500)
SERVER = Machine("one machine, Qdrant's server", 16, 128, 4000)


def vector_bytes(numbers: int, kind: str) -> int:
    """Of a vector, or of the rows of one kind."""
    return ceil(numbers * KINDS[kind] / 8)


def sparse_bytes(entries: int) -> int:
    """Of indices and weights."""
    return SPARSE_ENTRY_BYTES * entries


def graph_bytes() -> int:
    """Links of a point in the graph of the dense vector."""
    return LINK_BYTES * 2 * LINKS * (LINKS + 1) // LINKS


def memory_bytes(facts: Facts, layout: Layout) -> int:
    """Of a document, where a search should not wait for a disk."""
    dense = vector_bytes(facts.dense, layout.dense_in_memory)
    sparse = sparse_bytes(facts.sparse_entries) if layout.sparse_in_memory else 0
    return dense + sparse + graph_bytes() + POINT_BYTES


def multivector_bytes(facts: Facts, layout: Layout) -> int:
    """Of a document."""
    rows = min(facts.multivector_rows, layout.rows or facts.multivector_rows)
    size = rows * vector_bytes(layout.width, layout.multivector_kind)
    return size if layout.multivector_kind.startswith("float") else 4 * ceil(size / 3)


def disk_bytes(facts: Facts, layout: Layout) -> int:
    """Of a document, all components."""
    return sum(components(facts, layout).values())


def components(facts: Facts, layout: Layout) -> dict[str, int]:
    """Bytes on disk of a document: memory's part too, a full dense vector beside a quantised one,
    sparse vectors by document and by entry."""
    full = vector_bytes(facts.dense, "float32") if layout.dense_in_memory != "float32" else 0
    return {
        "dense": full + vector_bytes(facts.dense, layout.dense_in_memory),
        "sparse": 2 * sparse_bytes(facts.sparse_entries),
        "multi-vectors": multivector_bytes(facts, layout),
        "graph, ids": graph_bytes() + POINT_BYTES,
        "text, metadata": facts.text_bytes + facts.payload_bytes,
    }


def shards(facts: Facts, layout: Layout, documents: int, machine: Machine) -> int:
    """The machines that hold one copy, and so the least number of shards."""
    memory = documents * memory_bytes(facts, layout) / (machine.memory_gb * 1e9 * FILL)
    disk = documents * disk_bytes(facts, layout) / (machine.disk_gb * 1e9 * FILL)
    return max(1, ceil(memory), ceil(disk))


def hours(facts: Facts, documents: int, tokens_per_s: float) -> float:
    """The hours to embed the documents at that rate."""
    return documents * facts.tokens / tokens_per_s / 3600


def workers(facts: Facts, documents: int) -> int:
    """The Ray workers that embed the documents in `facts.hours`."""
    rate = facts.core_tokens_per_s * facts.worker_cores
    return max(1, ceil(hours(facts, documents, rate) / facts.hours))


def reach(facts: Facts, layout: Layout, machine: Machine) -> tuple[int, str]:
    """(how many documents a machine is good for, what ends it: `time`, `memory` or `disk`)."""
    limits = {
        "time": facts.hours * 3600 * facts.core_tokens_per_s * machine.cores / facts.tokens,
        "memory": machine.memory_gb * 1e9 * FILL / memory_bytes(facts, layout),
        "disk": machine.disk_gb * 1e9 * FILL / disk_bytes(facts, layout),
    }
    bound = min(limits, key=lambda name: limits[name])
    return int(limits[bound]), bound


@dataclass(frozen=True, slots=True)
class QueryCost:
    """Core-milliseconds by stage, bytes read from disk, and the price of a million such queries."""

    encode_ms: float
    search_ms: float
    rank_ms: float
    read_bytes: int
    price_per_million: float


def query_cost(facts: Facts, layout: Layout) -> QueryCost:
    """Of one query on one shard that is asked; each further shard costs another search."""
    encode = 1000 * facts.query_tokens / facts.core_query_tokens_per_s
    rows = min(facts.multivector_rows, layout.rows or facts.multivector_rows)
    products = facts.candidates * rows * (facts.query_tokens - 1) * layout.width
    rank = 1000 * products / facts.core_multiply_adds_per_s
    core_hours = (encode + facts.search_core_ms + rank) * 1e6 / 1000 / 3600
    read = facts.candidates * multivector_bytes(facts, layout)
    return QueryCost(encode, facts.search_core_ms, rank, read, core_hours * facts.core_hour_price)


def bytes_table(facts: Facts) -> str:
    """Bytes of a document by output and precision."""
    rows = [
        ("dense", f"{facts.dense}", *(f"{vector_bytes(facts.dense, kind):,}" for kind in KINDS))
    ]
    rows.append(
        (
            "sparse",
            f"{facts.sparse_entries} entries",
            f"{sparse_bytes(facts.sparse_entries):,}",
            "",
            "",
            "",
        )
    )
    for count, width in (
        *((facts.multivector_rows, width) for width in WIDTHS),
        (64, WIDTHS[0]),
        (32, WIDTHS[0]),
    ):
        sizes = (count * vector_bytes(width, kind) for kind in KINDS)
        rows.append(("multi-vector", f"{count} × {width}", *(f"{size:,}" for size in sizes)))
    return table(("output", "numbers", *KINDS), rows)


def layouts_table(facts: Facts) -> str:
    """Memory and disk of a document by layout, and disk by component."""
    rows = []
    for each in LAYOUTS:
        sizes = (
            memory_bytes(facts, each),
            disk_bytes(facts, each),
            *components(facts, each).values(),
        )
        rows.append((each.name, *(f"{size:,}" for size in sizes)))
    return table(("collection", "in memory", "on disk", *components(facts, LAYOUTS[0])), rows)


def growth_table(facts: Facts, layout: Layout) -> str:
    """Hours, workers, memory, disk and shards by the number of documents."""
    rows = []
    for count in COUNTS:
        core_hours = hours(facts, count, facts.core_tokens_per_s)
        gpu = (
            f"{hours(facts, count, facts.gpu_tokens_per_s):,.1f}" if facts.gpu_tokens_per_s else "–"
        )
        split = shards(facts, layout, count, SERVER)
        size = (
            size_of(count * memory_bytes(facts, layout)),
            size_of(count * disk_bytes(facts, layout)),
        )
        rows.append(
            (
                f"{count:,}",
                f"{core_hours:,.1f}",
                gpu,
                f"{workers(facts, count):,}",
                *size,
                f"{split:,}",
                f"{split * facts.replicas:,}",
            )
        )
    titles = (
        "documents",
        "core-hours",
        "GPU-hours",
        "Ray workers",
        "memory",
        "disk",
        "shards",
        "Qdrant nodes",
    )
    return table(titles, rows)


def query_table(facts: Facts) -> str:
    """Cost of a query by layout."""
    rows = []
    for layout in LAYOUTS:
        cost = query_cost(facts, layout)
        stages = (f"{value:.1f}" for value in (cost.encode_ms, cost.search_ms, cost.rank_ms))
        rows.append(
            (layout.name, *stages, size_of(cost.read_bytes), f"{cost.price_per_million:.2f}")
        )
    return table(
        (
            "collection",
            "encode, core-ms",
            "search",
            "MaxSim",
            "read from disk",
            "price of a million",
        ),
        rows,
    )


def steps_table(facts: Facts) -> str:
    """How far each step reaches; beyond the last one lies the cluster."""
    rows = []
    for machine in (LAPTOP, SERVER):
        for layout in LAYOUTS:
            count, bound = reach(facts, layout, machine)
            rows.append((machine.name, layout.name, f"{rounded(count):,}", bound))
    return table(("step", "collection", "documents", "ends by"), rows)


def rounded(count: int) -> int:
    """Down to two digits: the inputs are no better."""
    unit: int = 10 ** max(len(str(count)) - 2, 0)
    return count // unit * unit


def size_of(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[Facts], str]] = {
    "bytes": bytes_table,
    "layouts": layouts_table,
    "growth-full": lambda facts: growth_table(facts, LAYOUTS[1]),
    "growth-lean": lambda facts: growth_table(facts, LAYOUTS[3]),
    "queries": query_table,
    "steps": steps_table,
}


def updated(page: str, facts: Facts) -> str:
    """The page with its tables made anew; each between `<!-- NAME -->` and `<!-- / -->`. Raises
    KeyError for another name."""
    return re.sub(
        r"(<!-- ([a-z-]+) -->\n).*?(<!-- / -->)",
        lambda match: f"{match[1]}{TABLES[match[2]](facts)}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in fields(Facts):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            metavar="N",
            help=f"[default: {field.default}]",
        )
    arguments = vars(parser.parse_args())
    facts = replace(
        Facts(), **{name: value for name, value in arguments.items() if value is not None}
    )
    wrong = [name for name, value in arguments.items() if value is not None and value <= 0]
    if wrong:
        parser.error(f"--{wrong[0].replace('_', '-')}: should be above 0")
    print("\n\n".join(f"{name}\n\n{make(facts)}" for name, make in TABLES.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
