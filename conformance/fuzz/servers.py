"""The servers that are fuzzed: processes of the command over seeded tiny checkpoints, their log,
and their memory."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import psutil

from conformance.processes import free_port, served, started
from hybridtei.server.http.body import DRAIN_FACTOR

ROOT = Path(__file__).parents[2]
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ALARM = re.compile(
    rb"Traceback \(most|CRITICAL|internal error:|unforeseen error|a batch of \d+ failed|never retrieved|never awaited"
    rb"|ended with status"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
KEY = "fuzz-key"


@dataclass(frozen=True)
class Plan:
    """A server: its models, its flags, and its share of all requests. `longest`: words in a text;
    `peers`: connections.

    Where large batches are split, a body of 2 MB holds 300,000 inputs: ten seconds of two idle
    cores, and four of these fit inside at once. Such work looks like a hang, so that server accepts
    bodies of only 200 kB: about ten thousand inputs, half a second.
    `unread`: bytes of a shot that is so far beyond that limit that its sender may not hear why it
    was refused.
    """

    name: str
    models: tuple[str, ...]
    share: int
    flags: tuple[str, ...] = ()
    key: str | None = None
    longest: int | None = None
    peers: int = 16
    unread: float = inf

    @property
    def remembers(self) -> bool:
        """True if the server caches answers: one computed in a batch may differ from others in the
        last digits."""
        return "--embedding-cache-mb" in self.flags


PLANS = (
    Plan("fleet", ("hybrid", "splade", "reranker", "classifier", "tagger"), 40),
    Plan("hybrid", ("hybrid",), 15, ("--embedding-cache-mb", "4")),
    Plan("splade", ("splade",), 8, ("--only-tei-routes", "true", "--pooling", "splade")),
    Plan(
        "reranker",
        ("reranker",),
        8,
        ("--split-large-batches", "true", "--payload-limit", "200000"),
        unread=DRAIN_FACTOR * 200_000,
    ),
    Plan("classifier", ("classifier",), 8, ("--api-key", KEY), KEY),
    Plan("tagger", ("tagger",), 8, ("--auto-truncate", "false", "--json-output", "true")),
    Plan("engine", ("hybrid",), 10, ("--engine-process", "true")),
    Plan("store", ("hybrid", "reranker"), 5, ("--qdrant-path", "{scratch}/store")),
    Plan("default", ("default",), 2, longest=8, peers=4),
)
# Model -> a request whose answer must never change. `{m}`: below which alias.
SENTINELS: Mapping[str, tuple[str, Any]] = {
    "hybrid": (
        "/embed_hybrid",
        {"inputs": ["baka bulo", "dati"], "outputs": ["dense", "sparse", "multivector"]},
    ),
    "default": (
        "/embed_hybrid",
        {"inputs": ["hybrid search", "one"], "outputs": ["dense", "sparse"]},
    ),
    "splade": ("/embed_sparse", {"inputs": ["baka bulo", "dati"]}),
    "reranker": (
        "/rerank",
        {"query": "baka", "texts": ["bulo dati", "bemo", "baka baka"], "raw_scores": True},
    ),
    "classifier": ("/predict", {"inputs": [["baka bulo"], ["dati", "bemo"]]}),
    "tagger": ("/predict_tokens", {"inputs": ["baka bulo dati"], "raw_scores": True}),
}


def write_model(name: str, folder: Path) -> str:
    """The checkpoint of a kind, written once below `folder`: its model id."""
    from conformance.small import tiny

    if name == "default":
        return "minilm-hybrid"
    home = folder / name
    if (home / "config.json").exists():
        return str(home)
    if name == "hybrid":
        tiny.write_m3(home)
        tiny.write_json(
            home / "config_sentence_transformers.json",
            {"prompts": {"query": "baka "}, "default_prompt_name": None},
        )
    elif name == "splade":
        tiny.write_family(home, "bert", task="ForMaskedLM")
    elif name == "tagger":
        numbered = dict(enumerate(TAGS))
        names = {
            "id2label": numbered,
            "label2id": {label: number for number, label in numbered.items()},
        }
        tiny.write_classifier(home, "bert", len(TAGS), task="TokenClassification", **names)
    else:
        tiny.write_classifier(home, "bert", 1 if name == "reranker" else 3)
    return str(home)


@dataclass
class Server:
    """A process, its log, and the measurements of its memory."""

    plan: Plan
    host: str
    port: int
    process: subprocess.Popen[bytes] | None
    log: Path | None
    megabytes: list[float] = field(default_factory=list)
    _read: int = 0

    @property
    def aliases(self) -> tuple[str, ...]:
        """Below which paths of the models' own can be asked."""
        return self.plan.models if len(self.plan.models) > 1 else ()

    def look(self) -> None:
        """Note the memory of the process and its children."""
        self.megabytes.append(sum(resident(process) for process in self.family()))

    def family(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            whole = psutil.Process(self.process.pid)
            return [whole, *whole.children(recursive=True)]
        return []

    def pids(self) -> set[int]:
        return {process.pid for process in self.family()}

    def files(self) -> int:
        """Open files and sockets."""
        return sum(process.num_fds() for process in self.family())

    def status(self) -> int | None:
        """Exit status, if it has ended."""
        return self.process.poll() if self.process is not None else None

    def alarms(self) -> list[str]:
        """Return the lines of the log since the last call that no defined answer leaves."""
        if self.log is None:
            return []
        with self.log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        found = [new[max(match.start() - 200, 0) :][:3000] for match in ALARM.finditer(new)]
        return [text.decode("utf-8", "replace") for text in found[:3]]


def resident(process: psutil.Process) -> float:
    """Megabytes."""
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


@contextmanager
def serving(plan: Plan, models: Callable[[str], str], scratch: Path) -> Iterator[Server]:
    """A server of a plan, until the block is left. `models`: alias -> model id. Raises RuntimeError
    if it does not start."""
    port = free_port()
    command = served(port)
    if len(plan.models) == 1:
        command += ["--model-id", models(plan.models[0])]
    else:
        listed = scratch / f"{plan.name}.toml"
        listed.write_text("\n".join(_table(name, models(name)) for name in plan.models))
        command += ["--models", str(listed)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MODEL_ID", "API_KEY", "PORT", "TASK")
    }
    command += [flag.format(scratch=scratch) for flag in plan.flags]
    log = scratch / f"{plan.name}.log"
    with started(command, port, log, cwd=ROOT, env={**environment, **ONE_THREAD}) as process:
        yield Server(plan, "127.0.0.1", port, process, log)


def _table(name: str, model_id: str) -> str:
    pooling = 'pooling = "splade"\n' if name == "splade" else ""
    return f"[[model]]\nmodel_id = {json.dumps(model_id)}\nalias = {json.dumps(name)}\n{pooling}"
