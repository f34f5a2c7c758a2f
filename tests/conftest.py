"""Checkpoints that several tests read, written once.

One thread for torch: the models are tiny, and a team of threads on shared cores loses more time than it saves. No deadline
for hypothesis: the first example of a test may have to import a library. And the same examples in every run, so that what
fails is what was changed.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers.utils import logging

from tests import tiny

gc.disable()  # until all is imported: what imports make stays, and looking through it again and again costs seconds
torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()
settings.register_profile(
    "tests", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Garbage is collected from now on, of what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's cache alone, and are not helped by it."""
    with pytest.MonkeyPatch.context() as patch:
        caches = tmp_path_factory.mktemp("caches")
        patch.setenv("XDG_CACHE_HOME", str(caches))
        patch.delenv("HYBRIDTEI_CACHE", raising=False)
        yield
    left = [path.name for path in (caches / "hybridtei" / "graphs").glob("*")]
    assert not left, f"a test left graphs where tests after it find them: {left}; it wants a HYBRIDTEI_CACHE of its own"


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with mean pooling; read only."""
    return tiny.write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An XLM-R with BGE-M3's heads, CLS pooling; read only."""
    return tiny.write_m3(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with heads of our own and mean pooling: every kind of output; read only."""
    folder = tiny.write_bert(tmp_path_factory.mktemp("hybrid"))
    tiny.write_own_heads(folder)
    return folder


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `hybrid`, of a shape whose graph the package carries: a process that serves it does not load torch; read only."""
    folder = tiny.write_bert(tmp_path_factory.mktemp("shipped"), **tiny.SHIPPED)
    tiny.write_own_heads(folder, hidden=tiny.SHIPPED["hidden_size"])
    return folder


@pytest.fixture(scope="session")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with its masked-language-model head; read only."""
    return tiny.write_family(tmp_path_factory.mktemp("splade"), "bert", task="ForMaskedLM")


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A function: folder -> a fresh copy of it, to be damaged."""
    return lambda folder: shutil.copytree(folder, tmp_path / "copy")
