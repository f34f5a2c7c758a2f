"""A small server that speaks Qdrant's protocol, REST and gRPC, on free ports: what arrives is read
by the client's own models, kept in its local mode, and answered in its own words. It can be told to
be slow, full, limited, or to lose an answer.
"""

import asyncio
import json
import socket
import threading
from concurrent import futures
from contextlib import contextmanager
from functools import partial

import grpc
import uvicorn
from pydantic import ValidationError
from qdrant_client import QdrantClient, models
from qdrant_client import grpc as messages
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc
from qdrant_client.grpc.collections_service_pb2_grpc import (
    CollectionsServicer,
    add_CollectionsServicer_to_server,
)
from qdrant_client.grpc.points_service_pb2_grpc import PointsServicer, add_PointsServicer_to_server

from tests.retrieval.store.qdrant_state import MAX_BODY, Failure, Qdrant

CODE = grpc.StatusCode
CODE_OF = {
    400: CODE.INVALID_ARGUMENT,
    401: CODE.UNAUTHENTICATED,
    404: CODE.NOT_FOUND,
    409: CODE.ALREADY_EXISTS,
}
CODE_OF |= {
    429: CODE.RESOURCE_EXHAUSTED,
    500: CODE.INTERNAL,
    503: CODE.UNAVAILABLE,
    507: CODE.INTERNAL,
}


@contextmanager
def speaking(key=None):
    """A running one, by both protocols."""
    state = Qdrant(key)
    with serving_grpc(state) as state.grpc_port, serving_rest(state) as state.rest_port:
        yield state
    state.local.close()


@contextmanager
def serving_grpc(state, port=0):
    server = grpc.server(
        futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", MAX_BODY)]
    )
    add_PointsServicer_to_server(Points(state), server)
    add_CollectionsServicer_to_server(Collections(state), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()


class Servicer:
    """The methods of both services."""

    def __init__(self, state):
        self.state = state

    def ask(self, call, request, context, work, *arguments, write=False, checked=None, **options):
        """`work`: of a client, with the collection's name and the arguments. `checked`: the call's
        filter."""
        name = getattr(request, "collection_name", None)
        if name is not None:
            arguments = (name, *arguments)
        key = dict(context.invocation_metadata()).get("api-key")
        try:
            if checked is not None:
                self.state.filtered(name, checked)
            work = partial(work, **options)
            return self.state.do(
                call, key, request.ByteSize(), lambda local: work(local, *arguments), write=write
            )
        except Failure as failure:
            if failure.retry_after is not None:
                context.set_trailing_metadata([("retry-after", failure.retry_after)])
            context.abort(CODE_OF[failure.status], failure.message)


class Collections(Servicer, CollectionsServicer):
    def List(self, request, context):
        found = self.ask("list", request, context, QdrantClient.get_collections)
        names = [messages.CollectionDescription(name=each.name) for each in found.collections]
        return messages.ListCollectionsResponse(collections=names)

    def CollectionExists(self, request, context):
        exists = self.ask("exists", request, context, QdrantClient.collection_exists)
        return messages.CollectionExistsResponse(result=messages.CollectionExists(exists=exists))

    def Get(self, request, context):
        info = self.ask("describe", request, context, self.state.describe)
        return messages.GetCollectionInfoResponse(result=RestToGrpc.convert_collection_info(info))

    def Create(self, request, context):
        vectors = GrpcToRest.convert_vectors_config(request.vectors_config)
        sparse = GrpcToRest.convert_sparse_vector_config(request.sparse_vectors_config)
        made = {
            "shard_number": request.shard_number,
            "replication_factor": request.replication_factor,
        }
        self.ask(
            "create",
            request,
            context,
            self.state.create,
            made,
            write=True,
            vectors_config=vectors,
            sparse_vectors_config=sparse,
            metadata=GrpcToRest.convert_payload(request.metadata),
        )
        return messages.CollectionOperationResponse(result=True)

    def Update(self, request, context):
        metadata, diff = GrpcToRest.convert_payload(request.metadata), None
        if request.HasField("optimizers_config"):
            diff = GrpcToRest.convert_optimizers_config_diff(request.optimizers_config)
        self.ask("update", request, context, self.state.update, metadata, diff, write=True)
        return messages.CollectionOperationResponse(result=True)

    def UpdateAliases(self, request, context):
        actions = [GrpcToRest.convert_alias_operations(action) for action in request.actions]
        work = partial(QdrantClient.update_collection_aliases, change_aliases_operations=actions)
        self.ask("alias", request, context, work, write=True)
        return messages.CollectionOperationResponse(result=True)

    def ListAliases(self, request, context):
        found = self.ask("aliases", request, context, QdrantClient.get_aliases)
        return messages.ListAliasesResponse(
            aliases=[RestToGrpc.convert_alias_description(each) for each in found.aliases]
        )

    def Delete(self, request, context):
        self.ask("drop", request, context, QdrantClient.delete_collection, write=True)
        return messages.CollectionOperationResponse(result=True)


def merged(local, name, payload, selector):
    """A null removes its key, as in a server."""
    nulls = [key for key, value in payload.items() if value is None]
    local.set_payload(name, payload, selector)
    return local.delete_payload(name, nulls, selector)


class Points(Servicer, PointsServicer):
    def filter_of(self, request):
        return GrpcToRest.convert_filter(request.filter) if request.HasField("filter") else None

    def Upsert(self, request, context):
        points = [GrpcToRest.convert_point_struct(point) for point in request.points]
        work = self.state.upsert
        return operated(
            self.ask("upsert", request, context, work, points, request.wait, write=True)
        )

    def CreateFieldIndex(self, request, context):
        kind = messages.FieldType.Name(request.field_type).removeprefix("FieldType").lower()
        if request.HasField("field_index_params"):
            params = request.field_index_params
            kind = params.WhichOneof("index_params").removesuffix("_index_params")
            assert (
                params.text_index_params.phrase_matching
                or getattr(params, f"{kind}_index_params").is_tenant
            )
            kind += "" if kind == "text" else "!"
        return operated(
            self.ask("index", request, context, self.state.index, request.field_name, kind)
        )

    def Delete(self, request, context):
        selector = GrpcToRest.convert_points_selector(request.points)
        return operated(
            self.ask("delete", request, context, QdrantClient.delete, selector, request.wait)
        )

    def SetPayload(self, request, context):
        payload = GrpcToRest.convert_payload(request.payload)
        selector = GrpcToRest.convert_points_selector(request.points_selector)
        return operated(self.ask("payload", request, context, merged, payload, selector))

    def Query(self, request, context):
        arguments = {
            "query": GrpcToRest.convert_query(request.query) if request.HasField("query") else None,
            "prefetch": [
                GrpcToRest.convert_prefetch_query(prefetch) for prefetch in request.prefetch
            ]
            or None,
            "using": request.using or None,
            "query_filter": self.filter_of(request),
            "limit": request.limit,
            "offset": request.offset or None,
            **selectors(request),
        }
        found = self.ask(
            "query",
            request,
            context,
            QdrantClient.query_points,
            checked=arguments["query_filter"],
            **arguments,
        )
        return messages.QueryResponse(
            result=[RestToGrpc.convert_scored_point(point) for point in found.points]
        )

    def Get(self, request, context):
        ids = [GrpcToRest.convert_point_id(given) for given in request.ids]
        found = self.ask(
            "retrieve",
            request,
            context,
            QdrantClient.retrieve,
            ids,
            **selectors(request),
        )
        return messages.GetResponse(result=records_of(found))

    def Scroll(self, request, context):
        arguments = {
            "scroll_filter": self.filter_of(request),
            "offset": GrpcToRest.convert_point_id(request.offset)
            if request.HasField("offset")
            else None,
            "limit": request.limit,
            **selectors(request),
        }
        records, following = self.ask(
            "scroll",
            request,
            context,
            QdrantClient.scroll,
            checked=arguments["scroll_filter"],
            **arguments,
        )
        if following is not None:
            following = RestToGrpc.convert_extended_point_id(following)
        return messages.ScrollResponse(result=records_of(records), next_page_offset=following)

    def Count(self, request, context):
        given = self.filter_of(request)
        found = self.ask(
            "count", request, context, QdrantClient.count, given, request.exact, checked=given
        )
        return messages.CountResponse(result=messages.CountResult(count=found.count))


def records_of(found):
    return [
        RestToGrpc.convert_record(record.model_copy(update={"payload": record.payload or {}}))
        for record in found
    ]


def operated(result):
    return messages.PointsOperationResponse(
        result=messages.UpdateResult(
            operation_id=result.operation_id, status=messages.UpdateStatus.Completed
        )
    )


def selectors(request):
    return {
        "with_payload": GrpcToRest.convert_with_payload_selector(request.with_payload),
        "with_vectors": GrpcToRest.convert_with_vectors_selector(request.with_vectors),
    }


@contextmanager
def serving_rest(state, port=0):
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(Rest(state), log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    listening.listen()
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


class Rest:
    """The same by HTTP, as a bare ASGI application: `{"result": …, "status": "ok", "time": 0}`."""

    def __init__(self, state):
        self.state = state

    async def __call__(
        self,
        scope,
        receive,
        send,
    ):
        assert scope["type"] == "http"
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        status, retry_after = 200, None
        content = {"result": None, "status": "ok", "time": 0.0}
        try:
            content["result"] = await asyncio.to_thread(
                self.handle, scope["method"], scope["path"], headers, scope["query_string"], body
            )
        except Failure as failure:
            status, retry_after = failure.status, failure.retry_after
            content["status"] = {"error": failure.message}
        except ValidationError as error:
            status = 400
            content["status"] = {"error": f"Format error in JSON body: {error}"}
        out = [(b"content-type", b"application/json")]
        if retry_after is not None:
            out.append((b"retry-after", retry_after.encode()))
        await send({"type": "http.response.start", "status": status, "headers": out})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    def handle(self, method, path, headers, query, body):
        if len(body) > MAX_BODY:
            raise Failure(413, "payload too large")
        parts = [part for part in path.split("/") if part]
        name = parts[1] if len(parts) > 1 else ""
        if parts == ["cluster"]:
            return self.state.do(
                "cluster", headers.get("api-key"), 0, lambda local: self.state.cluster()
            )
        call = "aliases", QdrantClient.get_aliases, False
        if parts != ["aliases"]:
            call = self.call_of(method, parts[2:], name, body, b"wait=true" in query)
        if call is None:
            raise Failure(404, f"no such route: {method} {path}")
        word, work, write = call
        result = self.state.do(word, headers.get("api-key"), len(body), work, write=write)
        return plain(result)

    def call_of(self, method, rest, name, body, wait):
        route = (method, "/".join(rest))
        if (method, name, rest) == ("POST", "aliases", []):
            actions = models.ChangeAliasesOperation.model_validate_json(body).actions
            return (
                "alias",
                partial(QdrantClient.update_collection_aliases, change_aliases_operations=actions),
                True,
            )
        if not name:
            return "list", QdrantClient.get_collections, False
        if route == ("GET", "exists"):
            return "exists", lambda local: {"exists": local.collection_exists(name)}, False
        if route == ("GET", ""):
            return "describe", lambda local: self.state.describe(local, name), False
        if route == ("DELETE", ""):
            return "drop", lambda local: local.delete_collection(name), True
        if route == ("PUT", ""):
            made = models.CreateCollection.model_validate_json(body)
            given = {
                "vectors_config": made.vectors,
                "sparse_vectors_config": made.sparse_vectors,
                "metadata": made.metadata,
            }
            fields = made.model_dump(include={"shard_number", "replication_factor"})
            return "create", lambda local: self.state.create(local, name, fields, **given), True
        if route == ("PATCH", ""):
            changed = models.UpdateCollection.model_validate_json(body)
            diff = changed.optimizers_config
            return (
                "update",
                lambda local: self.state.update(local, name, changed.metadata, diff),
                True,
            )
        if route == ("PUT", "index"):
            index = models.CreateFieldIndex.model_validate_json(body)
            kind = index.field_schema
            if isinstance(kind, models.TextIndexParams):
                assert kind.phrase_matching
                kind = kind.type
            value = getattr(kind, "value", None) or f"{kind.type.value}!"
            return (
                "index",
                lambda local: self.state.index(local, name, index.field_name, value),
                False,
            )
        if route == ("PUT", "points"):
            points = models.PointsList.model_validate_json(body).points
            return "upsert", lambda local: self.state.upsert(local, name, points, wait), True
        if route == ("POST", "points/query"):
            asked = models.QueryRequest.model_validate_json(body)
            self.state.filtered(name, asked.filter)
            return "query", lambda local: local.query_points(name, **query_of(asked)), False
        if route == ("POST", "points/scroll"):
            page = models.ScrollRequest.model_validate_json(body)
            self.state.filtered(name, page.filter)
            return "scroll", lambda local: scrolled(local, name, page), False
        if route == ("POST", "points/count"):
            counted = models.CountRequest.model_validate_json(body)
            self.state.filtered(name, counted.filter)
            return "count", lambda local: local.count(name, counted.filter, exact=True), False
        if route == ("POST", "points/delete"):
            selector = models.PointIdsList.model_validate_json(body)
            return "delete", lambda local: local.delete(name, selector), True
        if route == ("POST", "points/payload"):
            given = models.SetPayload.model_validate_json(body)
            chosen = models.PointIdsList(points=given.points)
            return "payload", lambda local: merged(local, name, given.payload, chosen), True
        if route == ("POST", "points"):
            wanted = models.PointRequest.model_validate_json(body)
            return (
                "retrieve",
                lambda local: local.retrieve(
                    name,
                    wanted.ids,
                    with_payload=wanted.with_payload,
                    with_vectors=wanted.with_vector or False,
                ),
                False,
            )
        return None


def query_of(asked):
    names = {"filter": "query_filter", "with_vector": "with_vectors"}
    fields = (
        "query",
        "using",
        "prefetch",
        "filter",
        "limit",
        "offset",
        "with_payload",
        "with_vector",
        "score_threshold",
    )
    given = {names.get(name, name): getattr(asked, name) for name in fields}
    return {name: value for name, value in given.items() if value is not None}


def scrolled(local, name, page):
    records, following = local.scroll(
        name,
        scroll_filter=page.filter,
        limit=page.limit or 10,
        offset=page.offset,
        with_payload=page.with_payload if page.with_payload is not None else True,
        with_vectors=page.with_vector or False,
    )
    return {"points": plain(records), "next_page_offset": following}


def plain(result):
    if isinstance(result, list):
        return [plain(each) for each in result]
    return (
        result.model_dump(mode="json", by_alias=True) if hasattr(result, "model_dump") else result
    )
