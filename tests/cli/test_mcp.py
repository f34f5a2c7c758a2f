"""Agents against the SDK's own client: `/mcp` of a server, and `mcp` over standard input, what is
refused, and clients that leave midway."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import httpx
import httpx2
import orjson
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from hybridtei.cli import main
from hybridtei.client import AsyncClient
from hybridtei.limits import MAX_MCP_BYTES
from hybridtei.retrieval.agents import MAX_CALLS, _entry
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.collection import CollectionSchemas
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_of, filled, spec_in
from tests.server.live import HANG, ROOT, serving

KEY = "a-key"
KEYED = {"api_key": KEY}
# anyio imports it at its first use, and pytest parses it then: within a running loop, CPython 3.11
# once failed at that, with
# "AST constructor recursion depth mismatch".
OPEN_PROCESS = anyio.open_process
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


def client_of(url, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return Client(
        streamable_http_client(
            url, http_client=httpx2.AsyncClient(headers=headers, trust_env=False)
        )
    )


@asynccontextmanager
async def agents_of(folder, *, server=None, **backend):
    """Where a server of a filled store answers agents, and the store."""
    folder.mkdir(exist_ok=True)
    spec = spec_in(folder)
    store = await filled(encoder_of(spec))
    with serving(
        spec, server=server, schemas=CollectionSchemas(store), model_id=MODEL, **backend
    ) as running:
        yield f"{running.url}/collections/papers/mcp", store


@asynccontextmanager
async def agent_of(folder, query=""):
    """An agent with a key, the store that it asks, and the URL."""
    async with (
        agents_of(folder, server=KEYED) as (url, store),
        client_of(f"{url}{query}", KEY) as client,
    ):
        yield client, store, url


async def told(client, tool, **arguments):
    """The answer of a tool."""
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error
    return answer.structured_content


async def hits_of(client, **request):
    return (await told(client, "find", **request))["hits"]


async def refusal(client, tool, **arguments):
    """What a tool says that refuses."""
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    return answer.content[0].text


def only(key, value):
    return {"must": [{"key": key, "match": {"value": value}}]}


async def test_find_and_store_over_http_with_a_key(tmp_path):
    async with agent_of(tmp_path, "?writable=true") as (client, _, _):
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["collections", "find", "read", "store", "forget"]
        hits = await hits_of(client, query=TEXTS[2], limit=3)
        assert len(hits) == 3
        assert all(hit["payload"]["text"] in TEXTS and "highlights" in hit for hit in hits)
        even = only("metadata.even", True)
        hits = await hits_of(client, query=TEXTS[1], filter=even)
        assert {hit["payload"]["metadata"]["even"] for hit in hits} == {True}
        await told(client, "store", text="one engine", metadata={"year": 1}, id="mine")
        request = {"query": "one engine", "filter": only("document_id", "mine")}
        hits = await hits_of(client, **request)
        assert [hit["payload"]["metadata"] for hit in hits] == [{"year": 1}]
        # What is forgotten is found no more; a second time is no error
        for count in (1, 0):
            assert await told(client, "forget", document_id="mine") == {"deleted": count}
        assert await hits_of(client, **request) == []
        for wrong in (
            {"query": ""},
            {"query": "x", "limit": 51},
            {"query": "x", "filter": {"must": 1}},
            {"query": "x", "filter": {"must": [{"has_id": [1]}] * 101}},
            {"query": "x" * 10_001},
        ):
            await refusal(client, "find", **wrong)
        # An argument that the tool does not have, and its former name
        for name, hint in (("limi", "did you mean `limit`?"), ("k", "`limit` is the number")):
            assert hint in await refusal(client, "find", query="one", **{name: 3})
        await refusal(client, "store", text="x", metadata={"x": "y" * 100_000})


async def test_answers_are_small_and_lead_to_the_rest(tmp_path):
    """Ten hits of long chunks are at most 5 kB, a cursor continues, and `read` gives the chunks
    around one."""
    async with agent_of(tmp_path) as (client, store, url):
        points = await store.retrieve("papers", range(12), with_vectors=True)
        text = f"{'much before the word ' * 50} one {'and behind it ' * 50}"
        for number, point in enumerate(points):
            point.payload = {
                "text": text,
                "document_id": "docs/a.md",
                "source": "docs/a.md",
                "chunk": number,
                "chunks": 12,
                "start": 0,
                "digest": "AAECAwQFBgcICQoLDA0ODw",
                "settings": "938d81cad1ee912b",
                "file": [1, 2, 3],
            }
        await store.upsert("papers", points)
        chosen = only("document_id", "docs/a.md")
        answer = await told(client, "find", query="one", filter=chosen)
        # One document: its chunks are hits
        assert len(answer["hits"]) == answer["cursor"] == 10
        async with AsyncClient(url.partition("/collections")[0], api_key=KEY) as direct:
            found = await direct.search("papers", "one", group_by=None, limit=10)
        hits = [_entry(hit) for hit in found.hits if "chunk" in hit.payload]
        assert len(hits) > 5
        assert len(orjson.dumps(hits)) / len(hits) < 500
        for hit in hits:
            assert hit["payload"].keys() == {"text", "document_id", "chunk"}
        page = await told(client, "find", query="one", limit=1)
        after = await told(client, "find", query="one", limit=1, cursor=page["cursor"])
        assert after["hits"] != page["hits"]
        chunks = (await told(client, "read", document_id="docs/a.md", chunk=4))["chunks"]
        assert [(chunk["chunk"], chunk["text"]) for chunk in chunks] == [
            (number, text) for number in (3, 4, 5)
        ]
        await refusal(client, "read", document_id="none")


def chunk_of(source, document, number, chunks):
    payload = {"text": f"one {number}", "document_id": document, "source": source}
    return payload | {"chunk": number, "chunks": chunks}


async def add(store, payloads):
    """Points of these payloads, with the vectors of the first text."""
    (first,) = await store.retrieve("papers", [0], with_vectors=True)
    points = [Stored(1_000 + place, one, first.vector) for place, one in enumerate(payloads)]
    await store.upsert("papers", points)


async def test_a_document_is_read_in_order_page_by_page(tmp_path):
    async with agent_of(tmp_path) as (client, store, _):
        payloads = [chunk_of("book.md", "book.md", number, 120) for number in range(120)]
        payloads += [chunk_of(f"{name}.csv", "line-2", 0, 1) for name in ("north", "south")]
        # Texts without numbers
        payloads += [{"text": f"own {number}", "document_id": "own"} for number in range(60)]
        await add(store, payloads)

        async def pages(document_id):
            chunks, cursor = [], 0
            while cursor is not None:
                page = await told(client, "read", document_id=document_id, cursor=cursor)
                chunks += page["chunks"]
                cursor = page.get("cursor")
            return chunks

        assert [chunk["chunk"] for chunk in await pages("book.md")] == list(range(120))
        assert {chunk["text"] for chunk in await pages("own")} == {f"own {n}" for n in range(60)}
        page = await told(client, "read", document_id="line-2")
        assert [chunk["source"] for chunk in page["chunks"]] == ["north.csv"]
        assert page["sources"] == ["north.csv", "south.csv"]
        page = await told(client, "read", document_id="line-2", source="south.csv")
        assert [chunk["source"] for chunk in page["chunks"]] == ["south.csv"]
        assert "sources" not in page


async def test_find_gives_every_chunk_if_it_is_told_to(tmp_path):
    async with agent_of(tmp_path) as (client, store, _):
        await add(store, [chunk_of("book.md", "book.md", number, 9) for number in range(9)])

        async def documents(**request):
            hits = await hits_of(client, query=TEXTS[0], **request)
            return [(hit["payload"]["document_id"], hit.get("more")) for hit in hits]

        assert len(dict(await documents(limit=3))) == 3
        assert (await documents(limit=11)).count(("book.md", 8)) == 1
        assert len(dict(await documents(limit=9, every_chunk=True))) < 9


async def test_what_is_refused_before_it_is_read(tmp_path):
    keyed = {"authorization": f"Bearer {KEY}"}
    server = {**KEYED, "cors_allow_origin": ("http://friend.example",)}
    async with (
        agents_of(tmp_path, server=server) as (url, _),
        httpx.AsyncClient(trust_env=False) as client,
    ):

        async def status(body=LIST, query="", **headers):
            sent = {**HEADERS, **headers}
            return (await client.post(url + query, json=body, headers=sent)).status_code

        assert await status() == 401
        assert await status(authorization=f"Bearer {KEY}x") == 401
        assert await status(**keyed, origin="http://evil.example") == 403
        assert await status(origin="http://evil.example") == 401
        assert await status(**keyed, origin="http://friend.example") == 200
        assert await status(**{**keyed, "content-type": "text/plain"}) == 415
        assert await status("x" * MAX_MCP_BYTES, **keyed) == 413
        # A text to store may be larger
        assert await status("x" * MAX_MCP_BYTES, "?writable=true", **keyed) == 400
        assert await status("x" * 5_000_000, "?writable=true", **keyed) == 413
        assert (await client.get(url, headers={**HEADERS, **keyed})).status_code == 405
    async with (
        agents_of(tmp_path / "open") as (url, _),
        httpx.AsyncClient(trust_env=False) as client,
    ):
        # DNS rebinding
        evil = {**HEADERS, "host": "evil.example:80", "origin": "http://evil.example:80"}
        assert (await client.post(url, json=LIST, headers=evil)).status_code == 403
        assert (await client.post(url, json=LIST, headers=HEADERS)).status_code == 200


async def test_a_server_without_a_store_has_no_agents():
    with serving() as running:
        answer = running.post("/mcp", LIST, headers=HEADERS)
        assert (answer.status_code, "store" in answer.text) == (404, True)


async def test_a_client_that_comes_a_thousand_times_keeps_no_other_out(tmp_path):
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}}
    hello["clientInfo"] = {"name": "x", "version": "1"}
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    async with (
        agents_of(tmp_path) as (url, _),
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for _ in range(1_001):
            answer = await client.post(url, json=begin, headers=HEADERS)
            assert answer.status_code == 200
        assert "mcp-session-id" not in answer.headers


async def test_without_writable_nothing_is_stored_and_a_key_needs_the_role(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("reader roles=search:read-key\nwriter roles=search,write:write-key\n")
    async with agents_of(tmp_path / "papers", server={"api_key_file": str(keys)}) as (url, store):
        async with client_of(url, "write-key") as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == ["collections", "find", "read"]
            with suppress(MCPError):
                await refusal(client, "store", text="one")
        async with client_of(f"{url}?writable=true", "read-key") as client:
            assert "write" in await refusal(client, "store", text="one")
            await told(client, "find", query="one")
        assert await store.count("papers") == len(TEXTS)
        async with client_of(f"{url}?writable=true", "write-key") as client:
            await told(client, "store", text="one")
        assert await store.count("papers") == len(TEXTS) + 1


async def test_one_address_for_all_collections(tmp_path):
    async with agents_of(tmp_path) as (url, _):
        server = url.partition("/collections")[0]
        async with client_of(f"{server}/mcp") as client:
            assert await told(client, "collections") == {"collections": ["papers"]}
            assert "collections" in await refusal(client, "find", query="one")
            found = await told(client, "find", query=TEXTS[2], collection="papers")
            async with AsyncClient(server) as direct:
                expected = await direct.search("papers", TEXTS[2], limit=10)
            scores = [hit["score"] for hit in found["hits"]]
            assert scores == [round(hit.score, 3) for hit in expected.hits]
            await refusal(client, "find", query=TEXTS[2], collection="none")


async def test_a_client_that_leaves_midway_harms_nothing_and_one_call_too_many_is_refused(
    tmp_path, refused
):
    begun, go_on = threading.Event(), threading.Event()

    def gate(batch):
        begun.set()
        assert go_on.wait(HANG)

    async with agents_of(tmp_path, gate=gate) as (url, _):
        async with client_of(url) as client:
            leaving = asyncio.create_task(client.call_tool("find", {"query": "one"}))
            await asyncio.to_thread(begun.wait, HANG)
            leaving.cancel()
            await asyncio.wait([leaving])
        async with client_of(url) as client:
            calls = [
                asyncio.create_task(client.call_tool("find", {"query": "two"}))
                for _ in range(MAX_CALLS)
            ]
            (refused,), waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result().is_error
            assert "at work already" in refused.result().content[0].text
            go_on.set()
            answers = await asyncio.gather(*waiting)
            assert all(answer.structured_content["hits"] for answer in answers)
            await told(client, "find", query="three")


# Reads the memory of its process after the last message
MEASURED = """
import sys
from hybridtei.cli import main
status = main(sys.argv[1:])
heavy = {"numpy", "mcp", "httpx", "litestar", "pydantic"} & set(sys.modules)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(status, peak.split()[1], *heavy, file=sys.stderr)
"""


def relay_of(url, key, *flags):
    server = url.partition("/collections")[0]
    words = [*f"mcp papers --url {server} --url-api-key {key}".split(), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return StdioServerParameters(
        command=sys.executable, args=["-c", MEASURED, *words], env=environment
    )


async def test_ten_sessions_relay_to_one_server(tmp_path):
    """Five stdio relays and five clients of HTTP at once: the same answers, and small processes."""
    async with agents_of(tmp_path, server=KEYED) as (url, _):
        logs = [(tmp_path / f"log{number}").open("w+") for number in range(5)]
        async with AsyncExitStack() as stack:
            relays = [
                await stack.enter_async_context(
                    Client(stdio_client(relay_of(url, KEY, "--writable"), errlog=log))
                )
                for log in logs
            ]
            direct = [await stack.enter_async_context(client_of(url, KEY)) for _ in range(5)]
            calls = [told(one, "find", query=TEXTS[3], limit=5) for one in (*relays, *direct) * 3]
            first, *others = await asyncio.gather(*calls)
            assert len(first["hits"]) == 5
            assert all(answer == first for answer in others)
            await told(relays[0], "store", text="one engine", id="mine")
            read = await told(relays[1], "read", document_id="mine")
            assert read["chunks"][0]["text"] == "one engine"
        for log in logs:
            log.seek(0)
            status, kilobytes, *heavy = log.read().split()
            log.close()
            assert (status, heavy) == ("0", [])
            assert int(kilobytes) < 60_000


async def test_a_relay_tells_why_the_server_refuses(tmp_path, capsys):
    message = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/list"}).encode() + b"\n"
    notification = b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n'
    async with agents_of(tmp_path, server=KEYED) as (url, _):
        server = url.partition("/collections")[0]
        for address, key, words in (
            (server, "wrong", "no API key or an unknown one"),
            ("http://127.0.0.1:1", KEY, "http://127.0.0.1:1"),
        ):
            flags = f"mcp papers --url {address} --url-api-key {key}".split()
            ended = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "hybridtei", *flags],
                input=notification + message + b"no json\n",
                capture_output=True,
                cwd=ROOT,
                timeout=HANG,
            )
            (line,) = ended.stdout.splitlines()
            answer = json.loads(line)
            assert (answer["id"], answer["error"]["code"]) == (7, -32_000)
            assert words in answer["error"]["message"]
        flags = f"mcp nosuch --url {server} --url-api-key {KEY}".split()
        with pytest.raises(SystemExit):
            await asyncio.to_thread(main, flags)
        assert "no collection `nosuch`" in capsys.readouterr()[1]


async def test_over_standard_input_with_a_collection_that_is_made_by_the_first_text(
    shipped, tmp_path
):
    line = f"mcp notes --writable --model-id {shipped} --qdrant-path {tmp_path}/qdrant"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "hybridtei", *line.split()], env=environment
    )
    async with Client(command) as client:
        assert "no collection" in await refusal(client, "find", query="boka")
        await told(client, "store", text="boka lomi")
        hits = await hits_of(client, query="boka")
        assert [hit["payload"]["text"] for hit in hits] == ["boka lomi"]


def test_what_was_removed_and_what_is_no_url(refused):
    for flags, words in ((["--http"], "hybridtei serve"), (["--url", "host:3000"], "http://")):
        assert words in refused("mcp", "papers", *flags)


def test_an_unknown_collection_ends_the_command(tmp_path, bert, said):
    words = f"mcp nosuch --qdrant-path {tmp_path} --model-id {bert}".split()
    first, second = said(*words, status=1).err.splitlines()[-2:]
    assert "there is no collection `nosuch`" in first
    assert second.endswith("explain UnknownCollection")
