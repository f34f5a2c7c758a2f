"""Calls are spans too, children of their callers'."""

import pytest

from tests.server.grpc.live import rpc_serving
from tests.system.test_otlp import PARENT, TIMES, TRACE, collecting

CALLS = [
    ("Embed", "embed"),
    ("EmbedAll", "embed_all"),
    ("EmbedSparse", "embed_sparse"),
    ("Tokenize", "tokenize"),
]


@pytest.mark.parametrize(("method", "name"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_one_span_of_the_callers_trace(method, name, stream):
    metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
    with collecting() as (address, collector):
        with rpc_serving(server={"otlp_endpoint": address}) as rpc:
            if stream:
                rpc.ask(
                    f"{method}Stream", [{"inputs": "one"}, {"inputs": "two"}], metadata=metadata
                )
            else:
                rpc.ask(method, {"inputs": "one"}, metadata=metadata)
        spans = collector.spans()
    assert [span.name for span in spans] == [name] * (2 if stream else 1)
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in spans} == {(TRACE, PARENT)}
    if name != "tokenize":
        assert all({attribute.key for attribute in span.attributes} == TIMES for span in spans)
