"""Runs every command under `strace` and reports look-ups, connections and files that nobody asked
for.

    python -m conformance.quiet [--seconds 20] [--requests 20] [--keep FOLDER]

Serves the embedded model, and a model folder on each backend that is installed, and sends each
server so many requests of each route of its own OpenAPI document; meanwhile runs `ingest`,
`search`, `eval`, `tune` and `mcp`. Each runs in an empty home and working folder, with nothing of
this environment but PATH and PYTHONPATH: ONNX Runtime reports nothing where `CI` is set. Files may
be made below the working folder, below TMPDIR and below `~/.cache/hybridtei`, and by `eval --chart`
in matplotlib's folders; so says notebooks/secure.md. Exit status: 0 if nothing else was found.

Wants Linux, `strace`, and the extras `qdrant`, `mcp` and `eval`.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx

from conformance.processes import free_port
from conformance.quiet_trace import CALLS, Finding, findings
from hybridtei.models.checkpoint.files import embedded_model

ROOT = Path(__file__).parents[1]
WORKSHOP = ROOT / "notebooks" / "workshop"
BACKENDS = {"ort": "onnxruntime", "openvino": "openvino", "torch": "torch"}
# Routes that the document leaves out
BESIDE = ("/", "/docs/", "/docs/swagger-ui-bundle.js", "/ping", "/api-doc/openapi.json")
START_SECONDS, END_SECONDS = 180, 240
COLLECTION = "notes"
# The collection that later requests search
FILL = {"points": [{"id": 1, "text": "the display shows E41"}], "create": True}


@dataclass
class Run:
    """A command with its own home folder, and its observed actions. `requests`: how many, by
    status."""

    name: str
    folder: Path
    words: Sequence[str]
    requests: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in ("home", "work", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def trace(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}.strace"

    def start(self) -> subprocess.Popen[bytes]:
        """Under `strace -D`, so that the process is the command itself and gets its signals."""
        watch = [
            "strace",
            "-D",
            "-f",
            "-q",
            "-y",
            "--seccomp-bpf",
            "-e",
            f"trace={CALLS}",
            "-o",
            str(self.trace),
        ]
        environment = {
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                [*watch, sys.executable, "-P", "-m", "hybridtei", *self.words],
                cwd=self.folder / "work",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Raises RuntimeError if it fails."""
        if status := process.wait(END_SECONDS):
            raise RuntimeError(
                f"{self.name}: exit status {status}: {(self.folder / 'output').read_text()[-2000:]}"
            )
        ended, limit = (
            re.compile(rf"^{process.pid} +\+\+\+ exited", re.MULTILINE),
            time.monotonic() + START_SECONDS,
        )
        while not ended.search(self.trace.read_text(errors="replace")) and time.monotonic() < limit:
            # Strace is a separate process, which still has lines to write
            time.sleep(0.05)

    def findings(self) -> list[Finding]:
        home = self.folder / "home"
        named = [self.folder / "work", self.folder / "tmp", home / ".cache" / "hybridtei"]
        if "--chart" in self.words:
            named += [home / ".cache" / "matplotlib", home / ".config" / "matplotlib"]
        with self.trace.open(errors="replace") as lines:
            return list(findings(lines, named, self.folder / "work"))


@contextmanager
def serving(run: Run, port: int) -> Iterator[httpx.Client]:
    """The server, from its first answer until it has stopped."""
    process = run.start()
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    try:
        _wait(client, run, process)
        yield client
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        run.end(process)


def _wait(client: httpx.Client, run: Run, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_SECONDS
    while True:
        try:
            client.get("/health")
            return
        except httpx.TransportError:
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(
                    f"{run.name} does not start: {(run.folder / 'output').read_text()[-2000:]}"
                ) from None
            time.sleep(0.1)


def ask_everything(client: httpx.Client, run: Run, times: int) -> None:
    """Requests of every route of the server's own document, with the bodies of its examples."""
    document = client.get("/api-doc/openapi.json").json()
    asked = [("get", path, None) for path in BESIDE]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            media = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = media.get("example")
            asked.append((method, path.replace("{name}", COLLECTION), body))
    client.post(f"/collections/{COLLECTION}/points", json=FILL)
    for method, path, body in asked:
        for _ in range(times):
            answer = (
                client.request(method, path, json=body)
                if body is not None
                else client.request(method, path)
            )
            run.requests[answer.status_code] += 1


def run_all(scratch: Path, seconds: float, times: int) -> Iterator[Run]:
    """Yield every command after its end. Servers run during the other commands, for at least
    `seconds`."""
    folder, _ = embedded_model()
    plans = {"serve embedded": ["--qdrant-path", "qdrant"]} | {
        f"serve folder {backend}": ["--model-id", str(folder), "--backend", backend]
        for backend, package in BACKENDS.items()
        if find_spec(package)
    }
    servers = []
    with ExitStack() as stack:
        for name, flags in plans.items():
            port = free_port()
            words = ["serve", "--hostname", "127.0.0.1", "--port", str(port), *flags]
            run = Run(name, scratch / name.replace(" ", "-"), words)
            servers.append((run, stack.enter_context(serving(run, port))))
        since = time.monotonic()
        for words in (
            ["ingest", str(WORKSHOP), "--collection", COLLECTION, "--quiet"],
            ["search", COLLECTION, "the display shows E41", "--rescore", "--explain"],
            [
                "eval",
                str(WORKSHOP),
                "--collection",
                "judged",
                "--quiet",
                "--chart",
                "modes.svg",
                "--output",
                "modes.json",
            ],
            ["tune", "--backend", "ort"],
            # Until its input ends, immediately
            ["mcp", COLLECTION, "--writable"],
        ):
            run = Run(words[0], scratch / "commands", words)
            run.end(run.start())
            yield run
        for run, client in servers:
            ask_everything(client, run, times)
        time.sleep(max(0.0, since + seconds - time.monotonic()))
    yield from (run for run, _ in servers)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 1 where something was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20,
        help="that servers run at least: a report comes after ten",
    )
    parser.add_argument("--requests", type=int, default=20, help="of each route")
    parser.add_argument(
        "--keep", type=Path, help="an empty folder for homes and traces, kept; else a temporary one"
    )
    arguments = parser.parse_args(argv)
    loud = 0
    with tempfile.TemporaryDirectory(prefix="quiet-") as scratch:
        print(f"{'command':24}{'requests':>9}{'findings':>9}  statuses")
        for run in run_all(
            (arguments.keep or Path(scratch)).resolve(), arguments.seconds, arguments.requests
        ):
            found = Counter(run.findings())
            loud += bool(found)
            told = ", ".join(f"{status}: {count}" for status, count in sorted(run.requests.items()))
            print(f"{run.name:24}{run.requests.total():>9}{len(found):>9}  {told}")
            for finding, count in found.items():
                print(f"    {finding.what}: {finding.where} ({count} times)")
            sys.stdout.flush()
    print(json.dumps({"commands_with_findings": loud}))
    return 1 if loud else 0


if __name__ == "__main__":
    sys.exit(main())
