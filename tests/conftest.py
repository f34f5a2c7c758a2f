"""Checkpoints that several tests read, written once a process; and two processes for the whole.

One thread for torch: the models are tiny, and a team of threads on shared cores loses more time
than it saves. No deadline for hypothesis: the first example of a test may have to import a library.
And the same examples in every run, so that what fails is what was changed.
"""

import asyncio
import gc
import inspect
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

import hybridtei  # noqa: F401  (before onnxruntime, whose reports it turns off)
from tests import skips

# Until all is imported: what imports make stays, and looking through it again and again costs
# seconds
gc.disable()
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


# Before xdist's own, which reads the two options
@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """All tests run in two processes, those of a file in one of them, where `-n` does not say
    otherwise. Where a file or folder is named, this process runs it: starting two takes longer."""
    everything = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    if config.option.numprocesses is None and everything and cores > 1 and not config.option.usepdb:
        config.option.numprocesses = 2
    if config.option.numprocesses and config.option.dist == "no":
        config.option.dist = "loadfile"
        config.option.maxworkerrestart = (
            # A test that ends its process ends the run; xdist may wait for ever instead
            "0"
        )


# Before pytest's own, which knows no coroutines
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine has an event loop of its own, and five minutes, so that one that
    hangs ends."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def limited():
        async with asyncio.timeout(300):
            await test(
                **{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            )

    asyncio.run(limited())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """In CI a skip that `tests/skips.py` does not list is a failure."""
    report = yield
    return fail_if_unlisted(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    """As above, for a file that is skipped as a whole."""
    report = yield
    return fail_if_unlisted(report)


def fail_if_unlisted(report):
    if skips.IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = skips.reason_of(report.longrepr)
        if not skips.is_allowed(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped, and tests/skips.py does not list the reason: {reason}"
    return report


def pytest_sessionfinish(session):
    """In CI more skips than `tests/skips.py` allows fail the run. xdist's workers leave it to
    it."""
    if not skips.IN_CI or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", [])
    for line in skips.excess(skips.reason_of(report.longrepr) for report in reports):
        print(f"\nFAILED: {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish():
    """Garbage is collected from now on, of what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Imported here, so that the process that only hands out tests to others need not load
    torch."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def prompt_ends():
    """uvicorn sleeps a tenth of a second before it sees that it should end, and another for its
    connections; hundreds of servers end in these tests."""

    async def sleep(seconds):
        await asyncio.sleep(seconds / 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory):
    """Every HTTP client reads all authorities it may have to trust; hundreds are made here, and no
    test asks the network."""
    import certifi

    bundle, end = Path(certifi.where()).read_text(), "-----END CERTIFICATE-----\n"
    (first := tmp_path_factory.mktemp("authorities") / "first.pem").write_text(
        bundle[: bundle.index(end) + len(end)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(first))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Tests leave the user's cache alone, and are not helped by it."""
    with pytest.MonkeyPatch.context() as patch:
        caches = tmp_path_factory.mktemp("caches")
        patch.setenv("XDG_CACHE_HOME", str(caches))
        patch.delenv("HYBRIDTEI_CACHE", raising=False)
        yield
    left = [path.name for path in (caches / "hybridtei" / "graphs").glob("*")]
    assert not left, (
        f"a test left graphs where tests after it find them: {left}; it wants a HYBRIDTEI_CACHE of its own"
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own, which is made when something is kept."""
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A BERT with mean pooling; read only."""
    from conformance.small import tiny

    return tiny.write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def m3(tmp_path_factory):
    """An XLM-R with BGE-M3's heads, CLS pooling; read only."""
    from conformance.small import tiny

    return tiny.write_m3(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """A BERT with heads of our own and mean pooling: every kind of output; read only."""
    from conformance.small import tiny

    folder = tiny.write_bert(tmp_path_factory.mktemp("hybrid"))
    tiny.write_own_heads(folder)
    return folder


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """As `hybrid`, of a shape whose graph the package carries: a process that serves it does not
    load torch; read only."""
    from conformance.small import tiny

    folder = tiny.write_bert(tmp_path_factory.mktemp("shipped"), **tiny.SHIPPED)
    tiny.write_own_heads(folder, hidden=tiny.SHIPPED["hidden_size"])
    return folder


@pytest.fixture(scope="session")
def splade(tmp_path_factory):
    """A BERT with its masked-language-model head; read only."""
    from conformance.small import tiny

    return tiny.write_family(tmp_path_factory.mktemp("splade"), "bert", task="ForMaskedLM")


@pytest.fixture
def copied(tmp_path):
    """A function: folder -> a fresh copy of it, to be damaged."""
    return lambda folder: shutil.copytree(folder, tmp_path / "copy")


@pytest.fixture
def folder(bert, copied):
    """A copy of `bert`, to be damaged."""
    return copied(bert)
