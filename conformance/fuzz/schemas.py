"""schemathesis against our own OpenAPI document: what it draws from the schemas of every route, valid and not.

    pip install schemathesis        (best in an environment of its own: its pins are many)
    python conformance/fuzz/schemas.py [--schemathesis PATH] [--max-examples 100] [--seed N] [-- MORE FLAGS]

Starts the fleet of `run.py`. Checks are that there is no 5xx, and that statuses, content types and bodies are those that the
document tells. Its exit status is schemathesis'.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from conformance.fuzz.servers import PLANS, serving, write_model  # noqa: E402 (run as a file, this package is not on the path)

CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="its command")
    parser.add_argument("--max-examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("more", nargs="*", help="flags of schemathesis'")
    arguments = parser.parse_args(argv)
    command = shutil.which(arguments.schemathesis)
    if command is None:
        parser.error("schemathesis is not installed: pip install schemathesis, or name its command with --schemathesis")
    flags = ["--checks", CHECKS, "--max-examples", str(arguments.max_examples), "--seed", str(arguments.seed)]
    with tempfile.TemporaryDirectory(prefix="schemas-") as folder:
        scratch = Path(folder)
        os.environ.setdefault("HYBRIDTEI_CACHE", str(scratch / "cache"))
        with serving(PLANS[0], partial(write_model, folder=scratch / "models"), scratch) as server:
            url = f"http://{server.host}:{server.port}/api-doc/openapi.json"
            return subprocess.run([command, "run", url, *flags, *arguments.more], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
