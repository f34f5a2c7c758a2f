"""`--idle-unload`: an idle model leaves the memory of a real server, and the next requests wait for
it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from conformance.small import tiny
from tests.server.live import HANG, process, until

SERVE = ["-m", "hybridtei", "serve", "--hostname", "127.0.0.1", "--port", "0", "--offline"]
WEB = httpx.Client(timeout=HANG, trust_env=False, headers={"Connection": "close"})
# Of the wider model's matrices
WEIGHTS_BYTES = 4 * 12 * 2 * 768**2
BODY = {"inputs": ["baka bulo", "dati"]}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of 57 MB."""
    return tiny.write_bert(
        tmp_path_factory.mktemp("wide"),
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=12,
    )


def memory_of(running, kind):
    """Bytes of the server and of each child: `Pss`, or `Anonymous`."""
    server = psutil.Process(running.process.pid)
    return [
        int(line.split()[1]) * 1024
        for each in (server, *server.children(recursive=True))
        for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        if line.startswith(f"{kind}:")
    ]


def loaded(url):
    lines = WEB.get(f"{url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("hybridtei_loaded_models ")]
    return int(line.split()[1])


def asked_at_once(url, path, count=16):
    def ask(_):
        answer = WEB.post(url + path, json=BODY)
        return answer.status_code, answer.content

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(ask, range(count))]


@pytest.mark.parametrize(
    "backend",
    ["ort", pytest.param("openvino", marks=pytest.mark.slow)],
)
def test_memory_falls_and_every_request_is_answered(wide, tmp_path, backend):
    flags = ["--model-id", str(wide), "--idle-unload", "1", "--backend", backend]
    with process([*SERVE, *flags], {"HYBRIDTEI_CACHE": str(tmp_path)}) as running:
        url, server = running.wait_ready(), psutil.Process(running.process.pid)
        expected = WEB.post(f"{url}/embed", json=BODY)
        assert expected.status_code == 200
        in_use = [memory_of(running, kind) for kind in ("Pss", "Anonymous")]
        for _ in range(2):
            until(lambda: loaded(url) == 0 and not server.children())
            at_rest = [memory_of(running, kind) for kind in ("Pss", "Anonymous")]
            assert sum(at_rest[0]) < sum(in_use[0]) - WEIGHTS_BYTES / 2
            assert sum(at_rest[1]) < 0.8 * sum(in_use[1])
            assert WEB.get(f"{url}/health").status_code == 200
            assert WEB.get(f"{url}/info").status_code == 200
            # Neither a probe nor facts wake it
            assert loaded(url) == 0
            answers = asked_at_once(url, "/embed")
            assert answers == [(200, expected.content)] * len(answers)
            assert loaded(url) == 1
        running.terminate()
        assert running.wait() == 0
        log = "".join(running.lines)
        assert log.count("ends until the next request: it is idle") == 2
        assert log.count("the engine's process is ") == 3
        assert "ERROR" not in log


def test_several_models_leave_together_and_return_together(hybrid, bert):
    models = ["--model-id", str(hybrid), "--model-id", str(bert)]
    with process([*SERVE, *models, "--idle-unload", "0.5"]) as running:
        url = running.wait_ready()
        paths = [f"/m/{folder.name}/embed" for folder in (hybrid, bert)]
        expected = [WEB.post(url + path, json=BODY).content for path in paths]
        until(lambda: loaded(url) == 0)
        for path, content in zip(paths, expected, strict=True):
            answers = asked_at_once(url, path, 4)
            assert answers == [(200, content)] * len(answers)
        assert loaded(url) in (0, 2)
        until(lambda: loaded(url) == 0)
        # A server at rest stops as any other
        running.terminate()
        assert running.wait() == 0


def test_without_the_engines_process_it_is_refused():
    with process([*SERVE, "--idle-unload", "5", "--engine-process", "false"]) as running:
        assert running.wait() != 0
        assert "--idle-unload needs the engine's process" in "".join(running.errors)
