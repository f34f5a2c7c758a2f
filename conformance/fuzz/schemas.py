"""schemathesis against our own OpenAPI document: what it draws from the schemas of every route,
valid and not.

    python conformance/fuzz/schemas.py [--max-examples 100] [--seed N] [-- MORE FLAGS]

Starts the fleet of `run.py`, and runs all of schemathesis' checks (extra `dev`);
`schemathesis.toml` has rules that a schema cannot express. Its exit status is schemathesis'.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Run as a file, this package is not on the path
from conformance.fuzz.servers import PLANS, serving, write_model  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("more", nargs="*", help="flags of schemathesis'")
    arguments = parser.parse_args(argv)
    if find_spec("schemathesis") is None:
        parser.error("schemathesis is not installed: pip install schemathesis")
    flags = [
        "--max-examples",
        str(arguments.max_examples),
        "--seed",
        str(arguments.seed),
        *arguments.more,
    ]
    with tempfile.TemporaryDirectory(prefix="schemas-") as folder:
        scratch = Path(folder)
        os.environ.setdefault("HYBRIDTEI_CACHE", str(scratch / "cache"))
        with serving(PLANS[0], partial(write_model, folder=scratch / "models"), scratch) as server:
            command = command_of(f"http://{server.host}:{server.port}", *flags)
            return subprocess.run(command, cwd=scratch, check=False).returncode


def command_of(url: str, *flags: str) -> list[str]:
    """All checks against the server at `url`."""
    words = ["-m", "schemathesis.cli", "--config-file", str(ROOT / "schemathesis.toml"), "run"]
    return [sys.executable, *words, f"{url}/api-doc/openapi.json", "--checks", "all", *flags]


if __name__ == "__main__":
    raise SystemExit(main())
