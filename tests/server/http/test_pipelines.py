"""Requests that follow each other on a connection, in one piece or in many, and clients that leave
in the middle."""

import json
import socket
import threading

import pytest

from hybridtei.server.http.protocol import PIPELINE_LIMIT
from tests.server.http.raw import (
    CLOSE,
    GET,
    LAST,
    POST,
    WHOLE,
    connected,
    fields,
    heard,
    statuses,
    told,
)
from tests.server.live import HANG, Hold, serving, until


def send_without_end(client, part):
    while True:
        client.sendall(part)


@pytest.mark.parametrize("count", [2, PIPELINE_LIMIT + 1, 5 * PIPELINE_LIMIT])
@pytest.mark.parametrize("at_once", [True, False])
def test_pipelined_requests_are_answered_in_order(server, count, at_once):
    texts = [" ".join(["one"] * (1 + i % 30)) for i in range(count)]
    bodies = [json.dumps({"inputs": text}).encode() for text in texts]
    requests = [POST + b"content-length: %d\r\n\r\n" % len(body) + body for body in bodies] + [
        GET + CLOSE
    ]
    answers = told(server, *([b"".join(requests)] if at_once else requests))
    assert statuses(answers) == [200] * (count + 1)
    assert [int(headers[b"x-compute-characters"]) for _, headers, _ in answers[:-1]] == [
        len(text) for text in texts
    ]


@pytest.mark.parametrize(("bad", "status"), [(b"nonsense\r\n\r\n", 400), (GET + fields(200), 431)])
def test_a_refusal_waits_for_the_answers_before_it(bad, status):
    hold = Hold()
    with serving(gate=hold) as running, connected(running) as client:
        client.sendall(WHOLE * 2)
        assert hold.entered.wait(HANG)
        client.sendall(bad)
        assert running.get("/health").status_code == 200
        hold.let_go()
        assert statuses(heard(client)) == [200, 200, status]


def test_requests_behind_the_last_answer_of_a_connection_do_not_keep_it_open():
    hold = Hold()
    with serving(gate=hold) as running, connected(running) as client:
        client.sendall(LAST)
        assert hold.entered.wait(HANG)
        client.sendall(WHOLE + WHOLE[:-5])
        assert running.get("/health").status_code == 200
        hold.let_go()
        assert statuses(heard(client)) == [200]


def test_a_refused_client_that_goes_on_sending_hears_the_answer_and_is_cut_off(server):
    with connected(server) as client:
        client.sendall(GET + fields(200))
        assert client.recv(12) == b"HTTP/1.1 431"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_without_end(client, fields(10_000))
    server.is_well()


@pytest.mark.parametrize(
    "head", [b"POST /nowhere HTTP/1.0\r\n", b"POST /nowhere HTTP/1.1\r\nconnection: close\r\n"]
)
def test_a_client_that_is_answered_before_its_body_was_read_hears_the_answer(server, head):
    body = b"x" * 500_000
    with connected(server) as client:
        client.sendall(head + b"host: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    server.is_well()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("abrupt", [True, False])
def test_pipelining_clients_that_leave_cost_no_pass_and_leave_no_trace(caplog, apart, abrupt):
    hold = Hold()
    with serving(gate=hold) as running:
        permits = running.service.config.max_concurrent_requests
        first = threading.Thread(target=running.post, args=("/embed", {"inputs": "one"}))
        first.start()
        assert hold.entered.wait(HANG)
        clients = [
            socket.create_connection(("127.0.0.1", running.port), timeout=HANG) for _ in range(5)
        ]
        for client in clients:
            client.sendall(WHOLE if apart else WHOLE * 6)
        # Equal texts share a place in the queue
        until(lambda: running.service.admission.free == permits - 6)
        for client in clients:
            if apart:
                client.sendall(WHOLE * 3)
                client.sendall(WHOLE * 2)
        assert running.get("/health").status_code == 200
        for client in clients:
            if abrupt:
                client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
                )
            client.close()
        until(lambda: running.service.admission.free == permits - 1)
        assert running.service.engine.metrics.dropped.value() == 5
        hold.let_go()
        first.join(HANG)
        until(lambda: running.service.engine.metrics.queued.value() == 0)
        assert running.backend.forwards == 1
        running.is_well()
        assert "te_request_count" in running.get("/metrics").text
    assert [
        record.getMessage()
        for record in caplog.records
        if record.levelname in ("ERROR", "CRITICAL")
    ] == []


@pytest.mark.parametrize("stage", range(0, len(WHOLE) * 2, 23))
def test_a_client_may_leave_anywhere(server, caplog, stage):
    for abrupt in (True, False):
        with connected(server) as client:
            client.sendall((WHOLE * 2)[:stage])
            if abrupt:
                client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
                )
    server.is_well()
    assert [record for record in caplog.records if record.exc_info] == []
