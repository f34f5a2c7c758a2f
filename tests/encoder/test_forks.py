"""What works in a forked process answers there as in its parent, and the rest fails at once and
names spawn."""

import os
import subprocess
import sys
import textwrap
import time

import httpx
import pytest

from hybridtei import Encoder, Index
from tests.ran import ROOT, ran
from tests.server.live import serving

HANG_S = 120
PROCESSES = """
    import multiprocessing
    from tests.encoder import forked

    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(forked.is_same, range(4)).get(100) == [True] * 4
    # The parent's own calls still work
    assert forked.answers() == forked.EXPECTED
"""
LOADER = """
    from torch.utils.data import DataLoader, Dataset
    from tests.encoder import forked

    class Rows(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, place):
            return forked.is_same()

    loader = DataLoader(Rows(), num_workers=2, multiprocessing_context="fork", timeout=100)
    assert [bool(row) for row in loader] == [True] * 4
"""
OTHERS = """
    import multiprocessing, sys, torch
    from hybridtei import Encoder

    backend, folder = sys.argv[1:]
    torch.set_num_threads(2)
    encoder = Encoder.load(folder, backend=backend)
    texts = [f"baka {i}" for i in range(300)]
    encoder.encode(texts)

    def work(told):
        try:
            told.put(f"{len(encoder.encode(texts).dense)} rows")
        except Exception as error:
            told.put(f"{type(error).__name__}: {error}")
        encoder.close()

    context = multiprocessing.get_context("fork")
    told = context.Queue()
    process = context.Process(target=work, args=(told,))
    process.start()
    print(told.get(timeout=100))
    process.join(100)
    assert process.exitcode == 0
"""


@pytest.fixture(scope="module")
def environment(hybrid, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with Index(["baka bulo", "duna bero"], Encoder.load(str(hybrid))) as index:
        index.save(folder)
    with serving() as server:
        yield {**os.environ, "MODEL": str(hybrid), "FOLDER": str(folder), "URL": server.url}


@pytest.mark.parametrize("script", [PROCESSES, LOADER], ids=["multiprocessing", "DataLoader"])
def test_python_processes(environment, script):
    done = ran([sys.executable, "-c", textwrap.dedent(script)], env=environment, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_gunicorn_preloads(environment, tmp_path):
    pytest.importorskip("gunicorn")
    place = tmp_path / "socket"
    command = ["-m", "gunicorn", "--preload", "--workers", "2", "--bind", f"unix:{place}"]
    with subprocess.Popen(
        [sys.executable, *command, "tests.encoder.forked:application"],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
    ) as process:
        while not place.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        transport = httpx.HTTPTransport(uds=str(place))
        with httpx.Client(transport=transport, base_url="http://unix", timeout=HANG_S) as asking:
            assert [asking.get("/").json()[0] for _ in range(4)] == [True] * 4
        process.terminate()
        # A worker that hangs at its end is killed, and the log says so
        assert b"SIGKILL" not in process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 0


def test_celery_forks(environment, tmp_path):
    pytest.importorskip("celery")
    command = ["-A", "tests.encoder.forked_tasks", "worker", "--pool", "prefork", "-c", "2"]
    environment = {**environment, "MESSAGES": str(tmp_path)}
    ask = """
        from celery import Celery
        from tests.encoder.forked_tasks import is_same

        print([task.get(timeout=100) for task in [is_same.delay() for _ in range(3)]])
    """
    with subprocess.Popen(
        [sys.executable, "-m", "celery", *command, "--without-mingle", "--without-gossip"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            done = ran([sys.executable, "-c", textwrap.dedent(ask)], env=environment)
            assert done.stdout.strip() == "[True, True, True]", done.stderr
        finally:
            process.terminate()
            process.wait(HANG_S)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("torch", "300 rows"), ("openvino", "BackendError: the model was loaded in another process")],
)
def test_other_engines(hybrid, backend, expected):
    pytest.importorskip(backend)
    done = ran(
        [sys.executable, "-c", textwrap.dedent(OTHERS), backend, str(hybrid)], timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)
    assert ("spawn" in done.stdout) is (backend == "openvino")


def test_a_fork_waits_for_sessions_that_are_being_opened(hybrid):
    script = """
        import os, sys
        from hybridtei import Encoder

        encoder = Encoder.load(sys.argv[1])
        child = os.fork()
        if not child:
            encoder.encode(["baka", "bulo"])
            encoder.close()
            sys.exit()
        print(os.waitpid(child, 0)[1])
    """
    done = ran([sys.executable, "-c", textwrap.dedent(script), str(hybrid)], timeout=HANG_S)
    assert done.stdout.strip() == "0", done.stderr
