"""`mcp` against the SDK's own client: both transports, what is refused, and clients that leave midway."""

import asyncio
import os
import socket
import sys
import threading
from contextlib import asynccontextmanager, suppress

import httpx
import httpx2
import orjson
import pytest
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from hybridtei.cli import main
from hybridtei.cli.mcp import application, check
from hybridtei.client import AsyncClient
from hybridtei.config import ServerConfig
from hybridtei.errors import UsageError
from hybridtei.retrieval.agents import MAX_CALLS, CollectionTools, _entry, mcp_server
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.server.http.connection import ConnectionLimits
from hybridtei.server.run import settings_of
from hybridtei.system.metrics import Registry
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_of, filled, spec_in
from tests.server.live import HANG, ROOT, serving

KEY = "a-key"
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


@asynccontextmanager
async def listening(tools, *, writable=False, key=None):
    """The URL of a server over HTTP."""
    server = mcp_server(tools, "papers", writable=writable)
    config = ServerConfig(drain_seconds=1)
    inner = application(server, "127.0.0.1", key, ["http://friend.example"])
    settings = settings_of(inner, config, ConnectionLimits(config, Registry()))
    settings.lifespan, settings.loop = "on", "asyncio"
    with socket.create_server(("127.0.0.1", 0)) as port:
        serving = uvicorn.Server(settings)
        task = asyncio.create_task(serving._serve([port]))
        try:
            yield f"http://127.0.0.1:{port.getsockname()[1]}/mcp"
        finally:
            serving.should_exit = True
            await task


def client_of(url, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return Client(
        streamable_http_client(
            url, http_client=httpx2.AsyncClient(headers=headers, trust_env=False)
        )
    )


@asynccontextmanager
async def tools_over(folder, **backend):
    """The tools, by a server of a filled store."""
    spec = spec_in(folder)
    store = await filled(encoder_of(spec))
    with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL, **backend) as server:
        async with AsyncClient(server.url) as client:
            yield CollectionTools(client, "papers"), store


async def test_find_and_store_over_http_with_a_key(tmp_path):
    async with (
        tools_over(tmp_path) as (tools, _),
        listening(tools, writable=True, key=KEY) as url,
        client_of(url, KEY) as client,
    ):
        listed = await client.list_tools()
        assert [tool.name for tool in listed.tools] == ["find", "read", "store"]
        found = await client.call_tool("find", {"query": TEXTS[2], "limit": 3})
        hits = found.structured_content["hits"]
        assert len(hits) == 3
        assert all(hit["payload"]["text"] in TEXTS for hit in hits)
        assert all("highlights" in hit for hit in hits)
        even = {"must": [{"key": "metadata.even", "match": {"value": True}}]}
        hits = (
            await client.call_tool("find", {"query": TEXTS[1], "filter": even})
        ).structured_content["hits"]
        assert {hit["payload"]["metadata"]["even"] for hit in hits} == {True}
        kept = await client.call_tool(
            "store", {"text": "one engine", "metadata": {"year": 1}, "id": "mine"}
        )
        assert not kept.is_error
        mine = {"must": [{"key": "document_id", "match": {"value": "mine"}}]}
        found = await client.call_tool("find", {"query": "one engine", "filter": mine})
        assert [hit["payload"]["metadata"] for hit in found.structured_content["hits"]] == [
            {"year": 1}
        ]
        for wrong in (
            {"query": ""},
            {"query": "x", "limit": 51},
            {"query": "x", "filter": {"must": 1}},
            {"query": "x", "filter": {"must": [{"has_id": [1]}] * 101}},
            {"query": "x" * 10_001},
        ):
            assert (await client.call_tool("find", wrong)).is_error
        assert (
            await client.call_tool("store", {"text": "x", "metadata": {"x": "y" * 100_000}})
        ).is_error


async def test_answers_are_small_and_lead_to_the_rest(tmp_path):
    """Ten hits of long chunks are at most 5 kB, a cursor continues, and `read` gives the chunks
    around one."""
    async with (
        tools_over(tmp_path) as (tools, store),
        listening(tools, key=KEY) as url,
        client_of(url, KEY) as client,
    ):
        records, _ = await store.scroll("papers", limit=12, with_vectors=True)
        points = [
            Stored(
                record.id,
                {
                    "text": f"{'much before the word ' * 50} one {'and behind it ' * 50}",
                    "document_id": "docs/a.md",
                    "source": "docs/a.md",
                    "chunk": number,
                    "chunks": 12,
                    "start": 0,
                    "digest": "AAECAwQFBgcICQoLDA0ODw",
                    "settings": "938d81cad1ee912b",
                    "file": [1, 2, 3],
                },
                record.vector,
            )
            for number, record in enumerate(records)
        ]
        await store.upsert("papers", points)
        chosen = {"must": [{"key": "document_id", "match": {"value": "docs/a.md"}}]}
        request = {"query": "one", "filter": chosen}
        answer = (await client.call_tool("find", request)).structured_content
        assert "cursor" not in answer
        entries = [await tools._client.search("papers", "one", group_by=None, limit=10)]
        hits = [_entry(hit) for hit in entries[0].hits if "chunk" in hit.payload]
        assert len(hits) > 5
        assert len(orjson.dumps(hits)) / len(hits) < 500
        for hit in hits:
            assert hit["payload"].keys() == {"text", "document_id", "chunk"}
        page = (await client.call_tool("find", {"query": "one", "limit": 1})).structured_content
        request = {"query": "one", "limit": 1, "cursor": page["cursor"]}
        after = (await client.call_tool("find", request)).structured_content
        assert after["hits"] != page["hits"]
        request = {"document_id": "docs/a.md", "chunk": 4}
        chunks = (await client.call_tool("read", request)).structured_content["chunks"]
        assert [chunk["chunk"] for chunk in chunks] == [3, 4, 5]
        assert all(chunk["text"] == points[0].payload["text"] for chunk in chunks)
        assert (await client.call_tool("read", {"document_id": "none"})).is_error


async def test_what_is_refused_before_it_is_read():
    tools = CollectionTools(AsyncClient("http://127.0.0.1:1"), "papers")
    async with listening(tools, key=KEY) as url, httpx.AsyncClient(trust_env=False) as client:

        async def status(**headers):
            return (await client.post(url, json=LIST, headers={**HEADERS, **headers})).status_code

        keyed = {"authorization": f"Bearer {KEY}"}
        assert await status() == 401
        assert await status(authorization=f"Bearer {KEY}x") == 401
        assert await status(**keyed, origin="http://evil.example") == 403
        assert await status(origin="http://evil.example") == 403
        assert await status(**keyed, host="evil.example:80", origin="http://evil.example:80") in (
            403,
            421,
        )  # DNS rebinding
        assert await status(**keyed, origin="http://friend.example") not in (401, 403)
        assert (
            await client.post(url, content=b"x" * 5_000_000, headers={**HEADERS, **keyed})
        ).status_code == 413


async def test_a_client_that_comes_a_thousand_times_keeps_no_other_out():
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}}
    hello["clientInfo"] = {"name": "x", "version": "1"}
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    tools = CollectionTools(AsyncClient("http://127.0.0.1:1"), "papers")
    async with listening(tools) as url, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(1_001):
            answer = await client.post(url, json=begin, headers=HEADERS)
            assert answer.status_code == 200
        assert "mcp-session-id" not in answer.headers


async def test_without_writable_nothing_is_stored(tmp_path):
    async with (
        tools_over(tmp_path) as (tools, store),
        listening(tools) as url,
        client_of(url) as client,
    ):
        assert [tool.name for tool in (await client.list_tools()).tools] == ["find", "read"]
        with suppress(MCPError):
            assert (await client.call_tool("store", {"text": "one"})).is_error
        assert await store.count("papers") == len(TEXTS)


async def test_a_client_that_leaves_midway_harms_nothing_and_one_call_too_many_is_refused(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def gate(batch):
        begun.set()
        assert go_on.wait(HANG)

    async with tools_over(tmp_path, gate=gate) as (tools, _), listening(tools) as url:
        async with client_of(url) as client:
            leaving = asyncio.create_task(client.call_tool("find", {"query": "one"}))
            await asyncio.to_thread(begun.wait, HANG)
            leaving.cancel()
            await asyncio.wait([leaving])
        waiting = [asyncio.create_task(tools.find("two")) for _ in range(MAX_CALLS - 1)]
        await asyncio.sleep(0)
        async with client_of(url) as client:
            refused = await client.call_tool("find", {"query": "three"})
            assert refused.is_error
            assert "at work already" in refused.content[0].text
            go_on.set()
            assert all(answer["hits"] for answer in await asyncio.gather(*waiting))
            assert not (await client.call_tool("find", {"query": "three"})).is_error


async def test_over_standard_input_with_a_collection_that_is_made_by_the_first_text(
    shipped, tmp_path
):
    words = [
        "mcp",
        "notes",
        "--writable",
        "--model-id",
        str(shipped),
        "--qdrant-path",
        str(tmp_path / "qdrant"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "hybridtei", *words], env=environment
    )
    async with Client(command) as client:
        missing = await client.call_tool("find", {"query": "boka"})
        assert missing.is_error
        assert "no collection" in missing.content[0].text
        assert not (await client.call_tool("store", {"text": "boka lomi"})).is_error
        found = await client.call_tool("find", {"query": "boka"})
        assert [hit["payload"]["text"] for hit in found.structured_content["hits"]] == ["boka lomi"]


def test_addresses(capsys):
    check("127.0.0.1", None)
    check("0.0.0.0", KEY)
    for hostname, key in (("0.0.0.0", None), ("example", KEY), ("127.0.0.1", " ")):
        with pytest.raises(UsageError):
            check(hostname, key)
    with pytest.raises(SystemExit) as ended:
        main(["mcp", "papers", "--http", "--hostname", "0.0.0.0"])
    assert ended.value.code == 2
    assert "--api-key" in capsys.readouterr().err
