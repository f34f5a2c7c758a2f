"""Clients of other embedding servers, unmodified, against a running hybridtei: each call is checked
by the values it returns.

    python conformance/clients/run.py [--only NAME …] [--venv DIR] [--no-grpc]
    python conformance/clients/run.py --base-url http://127.0.0.1:3000 [--embedder ALIAS] …
    [--grpc-address HOST:PORT]

Makes an environment for each group of clients (`requirements/`), kept in DIR for the next time;
starts one server with four models, which are seeded tiny checkpoints or those named by flags; runs
each client's script in its environment. Prints a table, then one line of JSON; ends with 1 if a
call failed or a client could not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import FOLDER, NODE, InstallError, command, environment
from models import serving, single_grpc_servers, tiny

CLIENT_SECONDS = 300


@dataclass(frozen=True)
class Client:
    """A script of `calls/` and its environment, by default this command's."""

    script: str
    group: str | None


CLIENTS = (
    Client("openai_sdk", "sdks"),
    Client("hugging_face", "sdks"),
    Client("cohere_sdk", "sdks"),
    Client("voyage", "sdks"),
    Client("voyage", "voyage_0_4"),
    Client("voyage", "voyage_0_3"),
    Client("ollama_sdk", "sdks"),
    Client("infinity", "sdks"),
    Client("baseten", "sdks"),
    Client("tei_client_http", "sdks"),
    Client("tei_client_grpc", "sdks"),
    Client("langchain_embeddings", "langchain"),
    Client("llama_index_tei", "llama_index"),
    Client("llama_index_jina", "llama_index"),
    Client("llm_plugin", "llm"),
    Client("haystack_tei", "haystack"),
    Client("litellm_providers", "litellm"),
    Client("chroma", "chroma"),
    Client("openai_node", NODE),
    Client("cohere_node", NODE),
    Client("voyage_node", NODE),
    Client("ollama_node", NODE),
    Client("ai_sdk", NODE),
    Client("plain_http", None),
)
ROLES = {"embed": "hybrid", "rerank": "reranker", "classify": "classifier", "tag": "tagger"}


def main() -> int:
    """Exit status: 0 if all went well."""
    arguments = _arguments()
    chosen = [client for client in CLIENTS if not arguments.only or client.script in arguments.only]
    groups = sorted({client.group for client in chosen if client.group})
    homes = {group: _made(group, arguments.venv) for group in groups}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with _server(arguments, Path(scratch)) as told:
                path = Path(scratch) / "server.json"
                path.write_text(json.dumps(told))
                results = [
                    run_client(client, homes.get(client.group or ""), path, arguments.venv)
                    for client in chosen
                ]
        except RuntimeError as error:
            print(f"Error: {error}", file=sys.stderr)
            return 1
    # Only tests compare them with the encoder's
    for result in results:
        result.pop("vectors", None)
    _print(results)
    print(json.dumps({"clients": results}))
    return 1 if any(one["failed"] for one in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--venv", type=Path, default=FOLDER, help=f"folder of the environments [default: {FOLDER}]"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[client.script for client in CLIENTS], help="these clients"
    )
    parser.add_argument(
        "--base-url", help="a server that runs already; then the next four are aliases there"
    )
    for name, alias in zip(
        ("embedder", "reranker", "classifier", "tagger"), ROLES.values(), strict=True
    ):
        parser.add_argument(
            f"--{name}", help=f"folder or id of a model [default: a tiny one, called {alias}]"
        )
    parser.add_argument(
        "--grpc-address", help="HOST:PORT of that server's gRPC, which embeds by default"
    )
    parser.add_argument(
        "--no-grpc", action="store_true", help="start no servers for gRPC; its calls are skipped"
    )
    arguments = parser.parse_args()
    arguments.venv = arguments.venv.absolute()
    return arguments


def _made(group: str, folder: Path) -> Path | str:
    """A group's environment, or the reason why it is missing."""
    print(f"{group}: environment in {folder / group}", file=sys.stderr, flush=True)
    try:
        return environment(group, folder)
    except InstallError as error:
        return str(error)


@contextmanager
def _server(arguments: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """The fields of `harness.Server`."""
    given = [arguments.embedder, arguments.reranker, arguments.classifier, arguments.tagger]
    if arguments.base_url:
        aliases = {
            role: name or alias for (role, alias), name in zip(ROLES.items(), given, strict=True)
        }
        grpc = {aliases["embed"]: arguments.grpc_address} if arguments.grpc_address else {}
        yield {"url": arguments.base_url.rstrip("/"), **aliases, "grpc": grpc}
        return
    models = {
        alias: name or str(tiny(scratch, alias))
        for alias, name in zip(ROLES.values(), given, strict=True)
    }
    with ExitStack() as stack:
        url, _ = stack.enter_context(serving(models, scratch, grpc=False))
        alone: Mapping[str, str] = (
            {} if arguments.no_grpc else {name: models[name] for name in models if name != "tagger"}
        )
        yield {
            "url": url,
            **ROLES,
            "grpc": stack.enter_context(single_grpc_servers(alone, scratch)),
        }


def _vocabulary(folder: Path) -> str | None:
    """Where OpenAI's vocabulary lies: LiteLLM carries it, for all who cannot download it."""
    found = sorted(
        (folder / "litellm").glob("lib/python*/site-packages/litellm/litellm_core_utils/tokenizers")
    )
    return str(found[0]) if found else None


def run_client(
    client: Client, home: Path | str | None, server: Path, folder: Path
) -> dict[str, Any]:
    """Run the client's script, and return what its last line says. `home`: its environment, or the
    reason why it is missing. `server`: the file about the server. `folder`: of all environments."""
    if isinstance(home, str):
        return _broken(client, f"not installed: {home}")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "HF_", "CO_API"))
    }
    settings = {
        **kept,
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    vocabulary = _vocabulary(folder)
    if vocabulary is not None:
        settings["TIKTOKEN_CACHE_DIR"] = vocabulary
    try:
        done = subprocess.run(
            [*command(client.script, client.group, home), str(server)],
            env=settings,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _broken(client, f"no end within {CLIENT_SECONDS} s")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        return _broken(client, (done.stderr.strip().splitlines() or ["said nothing"])[-1])
    told: dict[str, Any] = json.loads(last)
    return told


def _broken(client: Client, reason: str) -> dict[str, Any]:
    return {
        "client": client.script,
        "version": "?",
        "passed": [],
        "failed": {"*": reason},
        "skipped": {},
    }


def _print(results: Sequence[dict[str, Any]]) -> None:
    print(f"{'client':40} {'version':20} {'passed':>6} {'failed':>6} {'skipped':>7}")
    for one in results:
        counts = f"{len(one['passed']):6} {len(one['failed']):6} {len(one['skipped']):7}"
        print(f"{one['client']:40} {one['version']:20} {counts}")
        for name, reason in one["failed"].items():
            print(f"    FAILED {name}: {reason}")
        for name, reason in one["skipped"].items():
            print(f"    skipped {name}: {reason}")
    total = [sum(len(one[kind]) for one in results) for kind in ("passed", "failed", "skipped")]
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")


if __name__ == "__main__":
    sys.exit(main())
