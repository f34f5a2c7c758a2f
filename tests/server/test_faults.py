"""Faults on purpose, through the seams that are there: what fails harms its own requests, is told
as what it is, and passes."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridtei.models.checkpoint.files import assembled_model
from tests.inference.engine import small
from tests.server.live import HANG, ROOT, Hold, serving, until

POISON = small.IDS["poison"]
GOOD, BAD = {"inputs": "one two"}, {"inputs": "one poison"}


def on_poison(act):
    def gate(batch):
        if POISON in batch.input_ids:
            act()

    return gate


def take_too_much_memory():
    bytearray(1 << 62)


def divide():
    _ = 1 // 0


@pytest.mark.parametrize(
    ("act", "told"),
    [(take_too_much_memory, "MemoryError"), (divide, "ZeroDivisionError: integer division")],
)
def test_whatever_a_backend_raises_is_its_batchs_misfortune(act, told):
    with serving(gate=on_poison(act)) as running:
        failed = running.post("/embed", BAD)
        assert (failed.status_code, failed.json()["error_type"]) == (424, "Backend")
        assert told in failed.json()["error"]
        # A probe went well
        assert running.get("/health").status_code == 200
        running.is_well()


def test_a_lane_that_dies_fails_who_waits_and_health_with_it():
    def die():
        raise SystemExit

    hold = Hold()
    with (
        serving(gate=lambda batch: (hold(batch), on_poison(die)(batch))) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        first = pool.submit(running.post, "/embed", BAD)
        assert hold.entered.wait(HANG)
        waiting = [pool.submit(running.post, "/embed", {"inputs": f"one {i}"}) for i in range(5)]
        until(lambda: running.service.engine.metrics.queued.value() == 5)
        hold.let_go()
        assert [one.result().status_code for one in (first, *waiting)] == [424] * 6
        assert running.get("/health").status_code == 503
        assert running.post("/embed", GOOD).status_code == 503
        assert running.service.admission.free == running.service.config.max_concurrent_requests


class PanicException(BaseException):
    """Named as what Rust raises when it gives up."""


@pytest.mark.parametrize("text", ["one", "one " * 100])
@pytest.mark.parametrize(
    ("path", "more"),
    [("/embed", {}), ("/embed_sparse", {"query_encoder": "table"}), ("/tokenize", {})],
)
def test_a_tokenizer_that_panics_fails_its_own_request(server, text, path, more):
    tokenizer = server.service.model.reader.tokenizer
    real = tokenizer._raw

    class Panicking:
        def __getattr__(self, name):
            if name.startswith("encode"):
                raise PanicException("called `Option::unwrap()` on a `None` value")
            return getattr(real, name)

    tokenizer._raw = Panicking()
    try:
        failed = server.post(path, {"inputs": text, **more})
    finally:
        tokenizer._raw = real
    assert (failed.status_code, failed.json()["error_type"]) == (422, "Tokenizer")
    assert "gave up" in failed.json()["error"]
    server.is_well()


def test_a_stuck_pass_takes_health_with_it_until_it_returns():
    hold = Hold()
    with serving(engine={"pass_timeout": 0.1}, gate=hold) as running:
        failed = running.post("/embed", GOOD)
        assert (failed.status_code, failed.json()["error_type"]) == (424, "Backend")
        assert "a pass of 1 inputs, 4 tokens" in failed.json()["error"]
        assert "pass-timeout" in failed.json()["error"]
        assert running.get("/health").status_code == 503
        # The only lane is kept
        assert running.post("/embed", {"inputs": "three"}).status_code == 503
        assert 'hybridtei_refusals_total{limit="pass_timeout"} 1' in running.get("/metrics").text
        # From now on no pass is late
        running.service._own_device._watchdog._seconds = HANG
        hold.let_go()
        until(lambda: running.get("/health").status_code == 200)
        running.is_well()


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from hybridtei import Encoder
print(len(Encoder.load(*sys.argv[1:]).encode(["baka bulo"]).dense[0]))
"""


@pytest.mark.parametrize(
    ("model", "width"), [(None, 384), pytest.param("bert", 32, marks=pytest.mark.slow)]
)
def test_a_full_disk_keeps_no_model_from_loading(model, width, request, tmp_path):
    """The embedded model has been put together before; graphs and hashes cannot be written."""
    given = [] if model is None else [str(request.getfixturevalue(model))]
    if model is None:
        folder = assembled_model()
        (tmp_path / "hybridtei" / "models").mkdir(parents=True)
        (tmp_path / "hybridtei" / "models" / folder.name).symlink_to(folder)
    settings = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", FULL_DISK, *given]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        timeout=HANG * 2,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == width


def test_a_clock_that_jumps_changes_no_answer(monkeypatch):
    with serving() as running:
        before = running.post("/embed", GOOD).content
        for jump in (-(10**9), 10**9):
            real = time.time
            monkeypatch.setattr(time, "time", lambda real=real, jump=jump: real() + jump)
            response = running.post("/embed", GOOD)
            assert (response.status_code, response.content) == (200, before)
            assert int(response.headers["x-total-time"]) >= 0
            running.is_well()
