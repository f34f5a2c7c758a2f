"""Wheels of what a server needs and a bare CUDA machine with torch, transformers and numpy lacks, for `gpu.py --wheels`.

    python conformance/load/gpu_wheels.py [--python 3.12] [--into wheels]

Of that machine's Python, for Linux on x86-64, by pip, at the versions of constraints.txt. The folder is ignored by git and
stays below 60 MiB: some machines take no more with a command.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_MIB = 60
NEEDED = (
    "anyio",
    "annotated-types",
    "backports.zstd",
    "click",
    "faker",
    "h11",
    "httptools",
    "litestar",
    "litestar-htmx",
    "markdown-it-py",
    "mdurl",
    "ml-dtypes",
    "msgspec",
    "multidict",
    "multipart",
    "orjson",
    "polyfactory",
    "psutil",
    "pygments",
    "python-multipart",
    "rich",
    "rich-click",
    "sniffio",
    "swagger-ui-bundle",
    "threadpoolctl",
    "typing-extensions",
    "tzdata",
    "uvicorn",
    "uvloop",
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_5_x86_64")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), help="of the machine with the GPU")
    parser.add_argument("--into", default=str(ROOT / "wheels"))
    options = parser.parse_args()
    folder = Path(options.into)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["-c", str(ROOT / "constraints.txt"), "--python-version", options.python]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, *NEEDED], check=True)
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20
    print(f"{len([*folder.glob('*.whl')])} wheels, {total:.1f} MiB, in {folder}")
    if total > MAX_MIB:
        sys.exit(f"more than {MAX_MIB} MiB")


if __name__ == "__main__":
    main()
