"""Loads that never end, as of a folder on a disk that does not answer: others are served meanwhile,
and the process may end."""

import os
import threading
from contextlib import suppress

import httpx

from tests.server.live import HANG, process

KEY = "the-key"
LOADS = 8
# 380,000 numbers, which are written beside the event loop
LARGE = {"inputs": ["word " * 250] * 4}


def test_loads_that_hang_leave_large_answers_and_the_end_alone(tmp_path):
    folder, listed = tmp_path / "stuck", tmp_path / "models.toml"
    folder.mkdir()
    # To read it waits until somebody writes
    os.mkfifo(folder / "config.json")
    listed.write_text('[[model]]\nmodel_id = "minilm-hybrid"\nalias = "ready"\n')
    flags = [
        "--port",
        "0",
        "--hostname",
        "127.0.0.1",
        "--drain-seconds",
        "1",
        "--api-key",
        KEY,
        "--models",
        str(listed),
    ]
    with process(
        ["-m", "hybridtei", "serve", *flags], {"HYBRIDTEI_CACHE": str(tmp_path / "cache")}
    ) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(
            base_url=server.wait_ready(), headers=headers, timeout=HANG, trust_env=False
        ) as client:

            def load(number):
                # The end cuts it off
                with suppress(httpx.HTTPError):
                    client.post(
                        "/models/load", json={"model_id": str(folder), "alias": f"stuck-{number}"}
                    )

            loads = [threading.Thread(target=load, args=(number,)) for number in range(LOADS)]
            for thread in loads:
                thread.start()
            for number in range(LOADS):
                while (
                    "is loading"
                    not in client.post(
                        "/embed", json={"inputs": "a", "model": f"stuck-{number}"}
                    ).text
                ):
                    pass
            answer = client.post("/embed_all", json=LARGE, timeout=20)
            assert [len(vectors) for vectors in answer.json()] == [252] * 4
            server.terminate()
            assert server.wait() == 0
            for thread in loads:
                thread.join()
