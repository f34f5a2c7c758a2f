"""The models that the clients ask: given ones, or seeded tiny checkpoints; and the servers in front
of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Run as a file, this package is not on the path
from conformance.processes import DIRECT, free_port, served, started  # noqa: E402

# Of a tiny model's folder: what int8 is measured by
RANGES = "ranges.npz"
PROMPTS = {"query": "boka ", "passage": "duna "}


def tiny(folder: Path, alias: str) -> Path:
    """A seeded checkpoint with the capability of its alias."""
    from conformance.fuzz.servers import write_model
    from conformance.small import tiny as write

    home = Path(write_model(alias, folder))
    if alias == "hybrid":
        # Which chunks of a document need
        write.write_modules(home, pooling="mean", normalize=True)
        write.write_json(
            home / "config_sentence_transformers.json",
            {"prompts": PROMPTS, "default_prompt_name": None},
        )
        np.savez(
            home / RANGES, dense=np.outer([-0.5, 0.5], np.ones(write.HIDDEN)).astype(np.float32)
        )
    return home


def table(alias: str, model: str) -> str:
    """A model of `--models`."""
    ranges = Path(model) / RANGES
    more = f"quantization_ranges = {json.dumps(str(ranges))}\n" if ranges.exists() else ""
    return f"[[model]]\nmodel_id = {json.dumps(model)}\nalias = {json.dumps(alias)}\n{more}"


@contextmanager
def serving(
    models: Mapping[str, str], scratch: Path, *, grpc: bool
) -> Iterator[tuple[str, str | None]]:
    """One process in front of alias -> model: its URL and, where asked for, its gRPC address.
    Raises RuntimeError."""
    listed = scratch / f"{'-'.join(models)}.toml"
    listed.write_text("\n".join(table(alias, model) for alias, model in models.items()))
    port, grpc_port = free_port(), free_port()
    more = ["--grpc-port", str(grpc_port)] if grpc else []
    command = served(port, "--models", str(listed), *more)
    log, url = listed.with_suffix(".log"), f"http://127.0.0.1:{port}"
    with started(command, port, log, cwd=ROOT, env=_environment()):
        missing = models.keys() - {item["id"] for item in _get(f"{url}/v1/models")["data"]}
        if missing:
            raise RuntimeError(f"{', '.join(missing)} not served:\n{log.read_text()[-2000:]}")
        yield url, f"127.0.0.1:{grpc_port}" if grpc else None


@contextmanager
def single_grpc_servers(models: Mapping[str, str], scratch: Path) -> Iterator[dict[str, str]]:
    """alias -> gRPC address, of a process for each: some clients cannot say which of several models
    they want."""
    with ExitStack() as stack:
        found = {}
        for alias, model in models.items():
            _, address = stack.enter_context(serving({alias: model}, scratch, grpc=True))
            found[alias] = str(address)
        yield found


def _environment() -> dict[str, str]:
    # The user's own, not this script's
    flags = {"MODEL_ID", "PORT", "API_KEY", "HOSTNAME", "GRPC_PORT", "TASK"}
    return {
        **{name: value for name, value in os.environ.items() if name not in flags},
        "HF_HUB_OFFLINE": "1",
    }


def _get(url: str) -> Any:
    with DIRECT.open(url, timeout=30) as response:
        return json.loads(response.read())
