"""What all requests hold together is compared with its limit in `hybridtei/limits.py`. Each
comparison with a limit elsewhere in server, store and engine has a reason here."""

import ast
import re
import sys
from pathlib import Path

from tests.ran import ran

ROOT = Path(__file__).parents[1] / "hybridtei"
PACKAGES = ("server", "retrieval/store", "inference/engine")
# Names of limits, and of counts that many share
LIMIT = re.compile(r"(^|_)(MAX|LIMIT|MOST)(_|$)|^(max|limit|most|bound)(_|$)|_(limit|most)$")
SHARED = re.compile(r"^(free|units)$")
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

# Reason -> comparisons
REASONS = {
    "the size of one request, answer, value, name or file: nothing is held": """
retrieval/store/proof.py proof_of: (cosine := median(values)) >= bound
server/http/body.py _outside: total > limit
inference/engine/service.py EngineService.check_answer: size > limit
inference/engine/service.py EngineService.run: bounds.max_numbers < inf
retrieval/store/collection.py others: len(names) > MAX_LISTED
retrieval/store/collection.py check_name: len(name.encode(errors='replace')) > MAX_NAME_BYTES
retrieval/store/embedded.py _points: len(messages) > MAX_INLINE_POINTS
retrieval/store/embedded.py _receive: length <= MAX_INLINE_BYTES
retrieval/store/embedded_folder.py _bounded: size > MAX_ANSWER_BYTES
retrieval/store/embedded_process.py Service._request: length >= MAX_FRAME
retrieval/store/embedded_process.py socket_path: len(os.fsencode(home / _name(folder))) <= MAX_SOCKET_PATH
retrieval/store/points.py _check_packed: count * packed.width >= MAX_MULTIVECTOR_FLOATS
retrieval/store/points.py _dense: array.size >= MAX_MULTIVECTOR_FLOATS
retrieval/store/points.py _identity: 0 <= value <= MAX_ID
retrieval/store/points.py _plain: depth > MAX_PAYLOAD_DEPTH
retrieval/store/points.py _sparse: int(indices.max()) > MAX_INDEX
retrieval/store/points.py batches: total + size > max_bytes
retrieval/store/query.py _check_bytes: size > MAX_FILTER_BYTES
retrieval/store/query.py _check_size: conditions > MAX_CONDITIONS
retrieval/store/query.py _check_size: depth > 2 * MAX_DEPTH + 1
retrieval/store/query.py _check_size: values > MAX_VALUES
retrieval/store/query.py _example: len(str(pairs)) > MAX_EXAMPLE
retrieval/store/query.py _from_json: len(encoded) > MAX_FILTER_BYTES
retrieval/store/transfer.py _whole_lines: len(unended) > most
server/api/invocations.py vertex: len(request.instances) > limit
server/api/openai.py check_chunks: count > MAX_CHUNKS
server/api/rerank.py rerank_documents: len(raw) > limit
server/api/search.py _check_candidates: queries * reach[name] > most
server/api/search.py _check_candidates: queries * request.limit > hits
server/context.py Context.check_batch: inputs <= limit
server/context.py Context.check_batch: inputs > limit
server/context.py Context.splits: inputs > self.server.max_client_batch_size
server/context.py check_instruction: length * documents > MAX_INSTRUCTION_CHARACTERS
server/grpc/answers.py _read_all: len(messages) > max_texts
server/grpc/answers.py _read_all: size > max_bytes
server/http/body.py _joined: size <= limit
server/http/body.py _joined: size > limit * DRAIN_FACTOR
server/http/body.py _marks: total <= limit
server/http/body.py check_size: size > limit
server/http/body.py check_values: _marks(body, limit, 0, len(body)) <= limit
server/http/body.py check_values: _outside(plain, limit) <= limit
server/http/body.py check_values: escapes <= MAX_ESCAPES
server/http/body.py check_values: plain.count(b'"') <= 4 * limit
server/http/body.py read_body: size > limit * DRAIN_FACTOR
server/http/security.py read_keys: len(keys) > MAX_KEYS
server/routing.py preflight_headers: len(names) > MAX_ALLOWED_HEADERS_BYTES
server/serve.py decoded: len(body) > MAX_VALUES
""",
    "no count: time, health, likeness, disk": """
inference/engine/device.py Device.stuck: self.overdue >= len(self._threads)
retrieval/store/collection.py _is_held: 0 < until - time.time() <= MAX_HOLD_S
retrieval/store/embedded_folder.py Folder._check_room: free < MIN_FREE_BYTES
retrieval/store/embedded_folder.py _Collection.is_worn: self.written - (points - self.points) >= max(OPTIMIZE_AFTER, points)
server/grpc/calls.py heard: calls.bound.patience_s < inf
""",
    "one stream's calls and unread answers, which the stream awaits": """
server/grpc/calls.py Servicer._stream.is_full: count >= min(method.most, self._most)
server/grpc/calls.py Servicer._stream.is_full: held.units >= MAX_UNSENT_BYTES
""",
    "uvicorn keeps the set of connections, and the parser one connection's head": """
server/http/protocol.py BoundedHttpProtocol.connection_made: len(self.connections) <= self._bounds.max_connections
server/http/protocol.py BoundedHttpProtocol.connection_made: len(self.connections) > 2 * self._bounds.max_connections
server/http/protocol.py BoundedHttpProtocol.data_received: self._eventless_bytes > self._bounds.header_limit
server/http/protocol.py BoundedHttpProtocol.on_header: self._field_bytes > self._bounds.header_limit
server/http/protocol.py BoundedHttpProtocol.on_header: self._fields > HEADER_COUNT_LIMIT
server/http/protocol.py BoundedHttpProtocol.on_headers_complete: 0 < len(self.pipeline) < PIPELINE_LIMIT
server/http/protocol.py BoundedHttpProtocol.on_url: len(self.url) > min(URL_LIMIT_BYTES, self._bounds.header_limit)
""",
    "what is kept only to be faster": """
retrieval/store/collection.py CollectionSchemas.fit: len(self._fits) >= MAX_FITS
""",
    "the page of a query": """
retrieval/store/base.py best_points: best[-1].score < best[query.limit - 1].score
retrieval/store/base.py best_points: len(best) < query.limit + spare
retrieval/store/base.py best_points: query.limit + spare > MAX_LIMIT
retrieval/store/memory.py MemoryStore.query: len(best) > query.limit
retrieval/store/memory.py MemoryStore.scroll: len(page) > limit
""",
    "the calls' expected seconds, which change while they wait, and their number": """
retrieval/store/embedded.py EmbeddedStore._admit: waiting >= MAX_WAITING
""",
    "in the engine's own process, which ends when the set is empty": """
retrieval/store/embedded_process.py Service._serve: len(self._clients) >= MAX_CLIENTS
""",
    "tokens and sequences of a pass, turns of a queue: the scheduler's policy": """
inference/engine/core.py EngineCore.is_one_pass: share(lengths, bulk.tokens, self._lanes[LaneKind.BULK], self.max_tokens, idle=True) >= bulk.tokens
inference/engine/scheduler.py FairQueue.allowed: waiting.arrived <= limit
inference/engine/scheduler.py FairQueue.first_come: waiting.arrived > limit
inference/engine/scheduler.py choose: cost > max_tokens
inference/engine/scheduler.py choose: len(chosen) >= max_sequences
inference/engine/scheduler.py choose: tokens > max_tokens
inference/engine/scheduler.py choose: useful >= max_tokens
inference/engine/scheduler.py share: max(lengths, default=0) > part
inference/engine/scheduler.py share: waiting_tokens <= max_tokens
""",
}


def is_count_of_own(node):
    """True for `len(self.…)` and `sum(… self.…)`."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("len", "sum")
        and any(getattr(part, "id", "") == "self" for part in ast.walk(node))
    )


def is_limited(node):
    """True for a comparison with a limit, or of a count that the object keeps with a number."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ORDERS):
        return False
    names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}
    if any(LIMIT.search(name) or SHARED.search(name) for name in names):
        return True
    sides = [node.left, *node.comparators]
    return any(map(is_count_of_own, sides)) and not any(
        isinstance(side, ast.Constant) for side in sides
    )


def comparisons(node, name=""):
    """(function, comparison) of each comparison with a limit."""
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", "") if isinstance(child, ast.stmt) else ""
        if is_limited(child):
            yield name, ast.unparse(child)
        yield from comparisons(child, f"{name}.{inner}".strip(".") if inner else name)


def lines_of(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        for function, comparison in comparisons(ast.parse(path.read_text())):
            yield f"{path.relative_to(ROOT).as_posix()} {function}: {comparison}"


def test_a_comparison_with_a_limit_outside_of_its_owner_has_a_reason():
    listed = [line for lines in REASONS.values() for line in lines.strip().splitlines()]
    # In a process of its own: `ast.parse` of Python 3.11 can fail beside another thread
    told = ran([sys.executable, "-m", "tests.test_owner_of_limits"], check=True)
    there = set(told.stdout.splitlines())
    assert there - set(listed) == set(), "count it in a Bound, or give the reason"
    assert set(listed) - there == set(), "no such comparison is there any more"


def test_a_count_that_is_compared_is_found():
    """As the classes did that each counted for themselves."""
    source = """
class Calls:
    def enter(self):
        if self._open >= self._most: raise Full
        if len(self._waiting) > allowed: raise Full
        if bound.free < size: raise Full
        if len(names) > 3: pass
"""
    assert [name for name, _ in comparisons(ast.parse(source))] == ["Calls.enter"] * 3


if __name__ == "__main__":
    for package in PACKAGES:
        print(*lines_of(package), sep="\n")
