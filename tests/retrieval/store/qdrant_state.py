"""What the stand-in for a Qdrant server keeps, and how it can be told to fail: the same for both of
its protocols."""

import threading
from dataclasses import dataclass, field
from typing import Any

from qdrant_client import QdrantClient, models

MAX_BODY = 32 * 1024 * 1024
MAX_MULTIVECTOR_FLOATS = 1_048_576


class Failure(Exception):
    """An answer that is an error."""

    def __init__(self, status, message, retry_after=None):
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


@dataclass
class Qdrant:
    """The state behind both protocols. `failures`: what the next calls get, one each; `lost`: how
    many writes are done, and answered with a failure all the same; `held`: calls wait until it is
    set. `peers`: of the cluster that it is in, if any; `status`: of collections, the last one for
    ever; `made` and `optimizers`: by collection, what local mode does not keep."""

    key: str | None = None
    failures: list[Failure] = field(default_factory=list)
    lost: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    calls: list[str] = field(default_factory=list)
    largest: int = 0
    rest_port: int = 0
    grpc_port: int = 0
    peers: int = 0
    status: list[str] = field(default_factory=lambda: ["green"])
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By collection, the type of each key's payload index. `strict`: a filter on a key without one
    # is refused, as in Qdrant
    # Cloud's strict mode
    indexes: dict[str, dict[str, str]] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self):
        self.local = QdrantClient(":memory:")
        self.lock = threading.Lock()
        self.held.set()

    def url(self, protocol):
        if protocol == "grpc":
            return f"grpc://127.0.0.1:{self.grpc_port}"
        return f"http://127.0.0.1:{self.rest_port}"

    def do(self, call, key, size, work, *, write=False):
        """One call, whichever protocol it came by."""
        self.calls.append(call)
        self.largest = max(self.largest, size)
        if self.key is not None and key != self.key:
            raise Failure(401, "Must provide an API key or an Authorization bearer token")
        if self.failures:
            raise self.failures.pop(0)
        assert self.held.wait(60)
        with self.lock:
            try:
                result = work(self.local)
            except ValueError as error:
                missing = "not found" in str(error) and "ollection" in str(error)
                raise Failure(
                    404 if missing else 409 if "already exists" in str(error) else 400, str(error)
                ) from error
        if write and self.lost:
            self.lost -= 1
            raise Failure(503, "the answer was lost on its way")
        return result

    def describe(self, local, name):
        info = local.get_collection(name)
        params = info.config.params.model_copy(update=self.made.get(name, {}))
        optimizers = info.config.optimizer_config.model_copy(update=self.optimizers.get(name, {}))
        config = info.config.model_copy(update={"params": params, "optimizer_config": optimizers})
        status = self.status.pop(0) if len(self.status) > 1 else self.status[0]
        indexes = {
            key: models.PayloadIndexInfo(
                data_type=kind.rstrip("!"),
                params=models.KeywordIndexParams(type="keyword", is_tenant=True)
                if "!" in kind
                else None,
                points=0,
            )
            for key, kind in self.indexes.get(name, {}).items()
        }
        changes = {"config": config, "status": models.CollectionStatus(status)}
        return info.model_copy(update=changes | {"payload_schema": indexes})

    def create(self, local, name, made, **arguments):
        created = local.create_collection(name, **arguments)
        self.made[name] = {field: value for field, value in made.items() if value}
        self.optimizers.pop(name, None)
        self.indexes.pop(name, None)
        return created

    def index(self, local, name, key, kind):
        """Note an index: local mode makes none, and reads words without them."""
        self.indexes.setdefault(name, {})[key] = kind
        return models.UpdateResult(operation_id=0, status=models.UpdateStatus.ACKNOWLEDGED)

    def filtered(self, name, condition):
        """A filter, unless Qdrant's strict mode refuses it."""
        if self.strict and condition is not None:
            for key, kind in _conditions(condition.model_dump(exclude_none=True)):
                if self.indexes.get(name, {}).get(key, "").rstrip("!") != kind:
                    raise Failure(
                        400,
                        f'Bad request: Index required but not found for "{key}" of one of the '
                        f"following types: [{kind}]. Help: Create an index for this key or use a "
                        "different filter.",
                    )
        return condition

    def update(self, local, name, metadata, diff):
        local.update_collection(name, metadata=metadata or {})
        self.optimizers.setdefault(name, {}).update(
            {} if diff is None else diff.model_dump(exclude_none=True)
        )
        return True

    def cluster(self):
        if not self.peers:
            return {"status": "disabled"}
        return {
            "status": "enabled",
            "peer_id": 1,
            "peers": {
                str(peer): {"uri": f"http://node-{peer}:6335/"} for peer in range(1, self.peers + 1)
            },
            "raft_info": {
                "term": 1,
                "commit": 9,
                "pending_operations": 0,
                "leader": 1,
                "role": "Leader",
                "is_voter": True,
            },
            "consensus_thread_status": {
                "consensus_thread_status": "working",
                "last_update": "2026-01-01T00:00:00Z",
            },
            "message_send_failures": {},
        }

    def upsert(self, local, name, points, wait):
        assert wait, "an acknowledgement without wait says nothing"
        for point in points:
            for vector in point.vector.values():
                if isinstance(vector, list) and isinstance(vector[0], list):
                    assert sum(len(row) for row in vector) < MAX_MULTIVECTOR_FLOATS
        return local.upsert(name, points, wait=True)


def _conditions(part):
    """(key, type of index) of each condition of a filter that needs one."""
    if isinstance(part, list):
        for each in part:
            yield from _conditions(each)
        return
    if not isinstance(part, dict):
        return
    for match in [part["match"]] if "match" in part else []:
        if {"text", "text_any", "phrase"} & match.keys():
            yield part["key"], "text"
            continue
        values = [match.get("value"), *match.get("any", []), *match.get("except", [])]
        values = [each for each in values if each is not None]
        yield part["key"], "integer" if isinstance(values[0], int) else "keyword"
    if "range" in part:
        yield part["key"], "integer"
    for clause in ("must", "should", "must_not", "min_should", "conditions", "filter"):
        yield from _conditions(part.get(clause))
