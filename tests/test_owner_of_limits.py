"""What all requests hold together is compared with its limit in `hybridtei/limits.py`; a comparison elsewhere has a reason here."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hybridtei"
PACKAGES = ("server", "retrieval/store", "inference/engine")
# Names of limits
LIMIT = re.compile(r"(^|_)(MAX|LIMIT)(_|$)|^(max|limit|most)(_|$)|_(limit|max)$|^_most$")
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
OWN = "the size of one request, value, name or file: nothing is held"
PASS = "tokens and sequences of one pass: the scheduler's policy"
SHARED = "holders that `Bound` does not count yet"
REASONS = {
    "server/answers.py": f"{SHARED}: bytes of answers, which wait for room",
    "server/api/invocations.py": OWN,
    "server/api/openai.py": OWN,
    "server/api/rerank.py": OWN,
    "server/api/search.py": OWN,
    "server/context.py": OWN,
    "server/grpc/answers.py": OWN,
    "server/grpc/calls.py": f"{SHARED}: open calls and unread answers of a stream",
    "server/http/body.py": OWN,
    "server/http/protocol.py": f"{SHARED}: connections; heads of one connection",
    "server/http/security.py": f"{SHARED}: TLS handshakes; keys of a file",
    "server/models.py": f"{SHARED}: models that load",
    "server/routing.py": OWN,
    "server/serve.py": OWN,
    "retrieval/store/base.py": OWN,
    "retrieval/store/collection.py": OWN,
    "retrieval/store/embedded.py": f"{SHARED}: calls that wait for the engine's process",
    "retrieval/store/embedded_folder.py": OWN,
    "retrieval/store/embedded_process.py": f"{SHARED}: clients of the engine's process",
    "retrieval/store/memory.py": "the page of a query",
    "retrieval/store/points.py": OWN,
    "retrieval/store/query.py": OWN,
    "retrieval/store/transfer.py": OWN,
    "inference/engine/admission.py": "numbers of one answer",
    "inference/engine/core.py": PASS,
    "inference/engine/scheduler.py": PASS,
    "inference/engine/service.py": "bytes of one answer",
}


def compared():
    """The files that compare something with a limit."""
    files = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS):
                    names = {
                        getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)
                    }
                    if any(map(LIMIT.search, names)):
                        files.add(path.relative_to(ROOT).as_posix())
    return files


def test_a_comparison_with_a_limit_outside_of_its_owner_has_a_reason():
    assert compared() == REASONS.keys()
