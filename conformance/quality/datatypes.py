"""Numbers of fewer bits in the embedded engine: bytes a document, nDCG@10 and milliseconds a
search.

    python conformance/quality/datatypes.py --data ../shared/data [--collections cranfield,xquad]

Each judged collection is embedded once, and stored with each `--datatype` and `--quantization`,
with multi-vectors of floats (64 vectors a document) and, last, as bits in the payload. Bytes are
those of the files on disk, by part. The difference to float32 has the 95 % interval of a paired
bootstrap over the queries. Searches are in the default mode, exact, and timed without the query's
embedding.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Run as a file, this package is not on the path
from conformance.quality.retrieval import gains, read_collection  # noqa: E402
from hybridtei.config import StoreConfig  # noqa: E402
from hybridtei.encoder import Encoder  # noqa: E402
from hybridtei.errors import HybridTeiError  # noqa: E402
from hybridtei.outputs import Embeddings  # noqa: E402
from hybridtei.retrieval.evaluate.measures import paired_bootstrap  # noqa: E402
from hybridtei.retrieval.search.options import SearchOptions  # noqa: E402
from hybridtei.retrieval.search.searcher import Searcher  # noqa: E402
from hybridtei.retrieval.store import open_store  # noqa: E402
from hybridtei.retrieval.store.plan import schema_for  # noqa: E402
from hybridtei.retrieval.store.points import to_points  # noqa: E402

KINDS = ("dense", "sparse", "multivector")
PLANS: dict[str, dict[str, object]] = {
    "float32": {},
    "float16": {"datatype": "float16"},
    "turbo8": {"datatype": "turbo8"},
    "turbo4": {"datatype": "turbo4"},
    "scalar beside float32": {"quantization": "scalar"},
    "turbo beside float32": {"quantization": "turbo"},
    "bits in the payload": {"multivector_dtype": "binary"},
}
TOKENS, BATCH, WARM = 64, 500, 10


def bytes_of(folder: Path, *parts: str) -> int:
    """Allocated bytes of the files whose path has one of the parts."""
    return sum(
        file.stat().st_blocks * 512
        for file in folder.rglob("*")
        if file.is_file() and any(part in str(file.relative_to(folder)) for part in parts)
    )


async def measured(
    plan: dict[str, object],
    documents: dict[str, Embeddings],
    queries: Embeddings,
    encoder: Encoder,
) -> tuple[list[list[int]], float, dict[str, int]]:
    """(the best documents of each query, the median milliseconds, bytes by part)."""
    dtype = str(plan.get("multivector_dtype", "float"))
    options = {"multivector_tokens": TOKENS, "multivector_dtype": dtype, **plan}
    schema = schema_for(encoder.spec, "embedded", **options)
    with tempfile.TemporaryDirectory() as name:
        store = open_store(StoreConfig(qdrant_path=name))
        try:
            await store.create("judged", schema)
            embedded = documents[dtype]
            for begin in range(0, len(embedded), BATCH):
                part = embedded.part(begin, min(begin + BATCH, len(embedded)))
                ids = list(range(begin, begin + len(part)))
                await store.upsert("judged", to_points(part, ids), schema)
            await store.optimize("judged")
            searcher = Searcher(store, encoder.named("embedded"))
            asked = SearchOptions(exact=True, group_by=None, with_payload=False)
            found, seconds = [], []
            for row in range(len(queries)):
                began = time.perf_counter()
                result = await searcher.find("judged", "", queries, row, asked)
                seconds.append(time.perf_counter() - began)
                found.append([int(hit.id) for hit in result.hits])
            folder = Path(name)
            sizes = {
                "dense": bytes_of(folder, "vector_storage-dense"),
                "multi": bytes_of(folder, "vector_storage-multivector"),
                "payload": bytes_of(folder, "payload_storage"),
                "all": bytes_of(folder, ""),
            }
        finally:
            await store.close()
    return found, float(np.median(seconds[WARM:])) * 1000, sizes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--collections", default="cranfield,xquad")
    options = parser.parse_args()
    for name in options.collections.split(","):
        judged = read_collection(options.data / name)
        with closing(Encoder.load()) as encoder:
            documents = {
                dtype: encoder.encode(
                    judged.documents,
                    KINDS,
                    input_type="document",
                    multivector={"max_tokens": TOKENS, "dtype": dtype},
                )
                for dtype in ("float", "binary")
            }
            queries = encoder.encode(judged.queries, KINDS, input_type="query")
            base = None
            print(f"\n{name}: {len(judged.documents)} documents")
            for label, plan in PLANS.items():
                try:
                    found, p50, sizes = asyncio.run(measured(plan, documents, queries, encoder))
                except HybridTeiError as error:
                    print(f"{label:24} {error}")
                    continue
                values = gains(np.array(found), judged.relevance)
                base = values if base is None else base
                lead, low, high = paired_bootstrap(values - base)
                told = ", ".join(
                    f"{part} {size / len(judged.documents):,.0f}" for part, size in sizes.items()
                )
                print(
                    f"{label:24} nDCG@10 {values.mean():.4f} {lead:+.4f} [{low:+.4f}, {high:+.4f}]"
                    f"  p50 {p50:.1f} ms  bytes: {told}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
