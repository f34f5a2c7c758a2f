"""Twenty commands over one folder of the embedded engine: `python -m conformance.one_folder
[--rounds N]`

A server, an ingest, ten searches, three MCP sessions and an eval run at once, four times: one
search is killed, then the engine, then the server. Prints the killed process and each command's
output. Exit status 1 if an answer is wrong, an error is not one clear line, a document is lost, or
a process is left 20 seconds after the last.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from hybridtei.system.machine import child_environment, python_command

DOCUMENTS, SEARCHES, SESSIONS = 40, 10, 3
# In the midst of the searches on two cores
KILLED_AFTER_S, LIMIT_S = 5, 300
RIGHT = "right"
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "one_folder", "version": "0"},
}


def command(*words: str) -> list[str]:
    return python_command("-m", "hybridtei", *words)


def started(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=folder, env=child_environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def said(process: subprocess.Popen[str], is_right: Callable[[str], bool], given: str = "") -> str:
    """`right`, or how the command ended."""
    try:
        out, err = process.communicate(given, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "HANGS"
    if process.returncode < 0:
        return f"killed by signal {-process.returncode}"
    if process.returncode == 0 and is_right(out):
        return RIGHT
    errors = [line for line in err.splitlines() if line.startswith("Error: ")]
    return (
        f"one error: {errors[0][:90]}"
        if len(errors) == 1 and "Traceback" not in err
        else f"WRONG: {out[-200:]} {err[-400:]}"
    )


def texts(folder: Path) -> None:
    (folder / "docs").mkdir()
    for place in range(DOCUMENTS):
        (folder / "docs" / f"{place}.txt").write_text(
            f"Report {place} is about the word{place} of machine number {place}."
        )
    beir = folder / "beir"
    (beir / "qrels").mkdir(parents=True)
    (beir / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"_id": str(one), "text": f"word{one}"}) for one in range(9))
    )
    (beir / "queries.jsonl").write_text(
        "\n".join(json.dumps({"_id": str(one), "text": f"word{one}"}) for one in range(9))
    )
    (beir / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{one}\t{one}\t1\n" for one in range(9))
    )


def mcp_lines() -> str:
    call = {"name": "find", "arguments": {"query": "word7 of machine number 7"}}
    messages = [
        {"id": 1, "method": "initialize", "params": INITIALIZE},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": call},
    ]
    return "".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)


def engines(folder: Path) -> list[psutil.Process]:
    """The engine's processes of the folder; two for a moment where one has just begun."""
    store = str((folder / "qdrant").resolve())
    return [
        one for one in psutil.process_iter(["cmdline"]) if store in (one.info["cmdline"] or [])[-1:]
    ]


def round_of(folder: Path, killed: str) -> Counter[str]:
    """Start all commands, kill one process, and count their outputs."""
    finds = re.compile(r"(?s)7\.txt.*").search
    first = started(command("serve", "--qdrant-path", "qdrant", "--port", "0"), folder)
    searches = [
        started(command("search", "notes", "word7 of machine number 7"), folder)
        for _ in range(SEARCHES)
    ]
    ingest = started(
        command("ingest", "docs", "--collection", "notes", "--reread", "--quiet"), folder
    )
    sessions = [started(command("mcp", "notes"), folder) for _ in range(SESSIONS)]
    evaluation = started(command("eval", "beir", "--qdrant-path", "qdrant", "--quiet"), folder)
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(20) as pool:
        waiting = [
            ("search", pool.submit(said, one, lambda out: bool(finds(out)))) for one in searches
        ]
        waiting += [("ingest", pool.submit(said, ingest, lambda out: True))]
        waiting += [("eval", pool.submit(said, evaluation, lambda out: "1.00" in out))]
        for one in sessions:
            one.stdin.write(mcp_lines())
            one.stdin.flush()
        time.sleep(KILLED_AFTER_S)
        if killed == "a search":
            searches[0].kill()
        elif killed == "the engine":
            for engine in engines(folder):
                engine.kill()
        elif killed == "the server":
            first.kill()
        for name, future in waiting:
            seen[f"{name}: {future.result()}"] += 1
        for one in sessions:
            seen["mcp: " + answered(one)] += 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=LIMIT_S)
    seen[f"serve: exit {first.returncode}"] += 1
    return seen


def answered(session: subprocess.Popen[str]) -> str:
    """The answer of an MCP session to its search. The session ends with its input."""
    for line in session.stdout:
        answer = json.loads(line)
        if answer.get("id") == 2:
            session.communicate(timeout=LIMIT_S)
            text = json.dumps(answer)
            return (
                RIGHT
                if "7.txt" in text
                else f"one error: {text[:90]}"
                if "rror" in text
                else f"WRONG: {text[:300]}"
            )
    return f"WRONG: {session.communicate(timeout=LIMIT_S)[1][-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    bad = False
    with tempfile.TemporaryDirectory(prefix="one-folder-") as scratch:
        folder = Path(scratch)
        texts(folder)
        ingest = ["ingest", "docs", "--collection", "notes", "--quiet"]
        subprocess.run(command(*ingest), cwd=folder, env=child_environment(), check=True)
        for killed in ["nothing", "a search", "the engine", "the server"] * rounds:
            for line, count in sorted(round_of(folder, killed).items()):
                print(f"{killed:11} {count:3} × {line}", flush=True)
                bad = bad or "WRONG" in line or "HANGS" in line
            found = started(
                command("collections", "describe", "notes", "--qdrant-path", "qdrant"), folder
            ).communicate()[0]
            bad = bad or str(DOCUMENTS) not in found
            print(
                f"{killed:11} "
                f"{'documents are all there' if str(DOCUMENTS) in found else 'LOST: ' + found}",
                flush=True,
            )
        deadline = time.monotonic() + 20
        while (left := engines(folder)) and time.monotonic() < deadline:
            time.sleep(0.2)
        print(f"processes left: {len(left)}; processors: {os.cpu_count()}")
    return int(bad or bool(left))


if __name__ == "__main__":
    sys.exit(main())
