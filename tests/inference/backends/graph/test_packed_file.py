"""Packed weights: the same numbers wherever they are kept, and whatever becomes of the file: cut
short, stale, half written, on a full disk, in a strangers' folder, removed while it is served."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
import torch

from conformance.small import tiny
from hybridtei import cli
from hybridtei.errors import BackendError, LoadError
from hybridtei.inference.backends import base
from hybridtei.inference.backends.base import made_up
from hybridtei.inference.backends.graph import packed_file as module
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.packed_file import (
    GRAPH,
    PART,
    TENSORS,
    packed_files,
    packed_folder,
    prune,
)
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from tests.inference.backends.outputs import random_encodings
from tests.inference.backends.outputs import states as hidden
from tests.near import same

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="files are kept where folders can be locked"
)


@pytest.fixture(autouse=True)
def packed(cache, monkeypatch):
    """Tiny models are packed too."""
    monkeypatch.setattr(module, "LEAST_BYTES", 0)


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """A model in bfloat16."""
    folder = tiny.write_family(
        tmp_path_factory.mktemp("halved"), "qwen3", hidden_size=128, intermediate_size=512
    )
    return tiny.change_each(folder, lambda tensor: tensor.to(torch.bfloat16))


@pytest.fixture(scope="module")
def widened(halved, tmp_path_factory):
    """The same numbers in float32, which nothing has to widen."""
    folder = shutil.copytree(halved, tmp_path_factory.mktemp("widened") / "copy")
    return tiny.change_each(folder, lambda tensor: tensor.float())


@pytest.fixture(scope="module")
def expected(widened):
    """By sessions that pack for themselves."""
    return states(widened)


def backend_of(folder, cache_gb=1):
    spec = read_spec(folder, pooling="mean")
    return OnnxBackend(spec, family_graph(spec), Weights.open(folder), cache_gb=cache_gb)


def states_by(backend):
    texts = random_encodings(backend.spec)
    return np.stack([hidden(backend, texts, use_all_cores=wide).values for wide in (False, True)])


def states(folder, cache_gb=1):
    return states_by(backend_of(folder, cache_gb))


def kept():
    """The one file that is kept."""
    (one,) = packed_files()
    return one.path


@pytest.mark.parametrize("cache_gb", [0, 1])
@pytest.mark.parametrize("name", ["halved", "widened"])
def test_states_are_those_of_sessions_that_pack_for_themselves(request, expected, name, cache_gb):
    folder = request.getfixturevalue(name)
    for _ in range(2):
        same(states(folder, cache_gb), expected)
    assert len(packed_files()) == cache_gb
    assert not [*packed_folder().rglob(module.WIDENED)]


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2"])
def test_matrices_behind_a_table_of_odd_size_are_aligned(family, tmp_path, monkeypatch):
    """Their tables of distances are int64[n]; a pass over the mapped matrices behind one ended the
    process."""
    folder = tiny.write_family(tmp_path, family)
    mapped = states(folder)
    assert kept().is_dir()
    monkeypatch.setattr(module, "LEAST_BYTES", 10**9)
    same(mapped, states(folder))


def test_small_models_are_kept_nowhere(widened, expected, cache, monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 10**9)
    same(states(widened), expected)
    assert not cache.exists()


def test_a_file_is_opened_again_and_its_use_noted(widened):
    states(widened)
    written = kept() / TENSORS
    before = written.stat().st_mtime_ns
    os.utime(kept(), (1, 1))
    states(widened)
    assert written.stat().st_mtime_ns == before
    assert packed_files()[0].used > 1


def cut(path):
    os.truncate(path / TENSORS, (path / TENSORS).stat().st_size - 4096)


def longer(path):
    with (path / TENSORS).open("ab") as file:
        file.write(b"\0")


def other_graph(path):
    (path / GRAPH).write_bytes(b"")


@pytest.mark.parametrize(
    "spoil", [cut, longer, other_graph, lambda path: (path / GRAPH).unlink(), shutil.rmtree]
)
def test_a_file_that_is_not_whole_is_written_again(widened, expected, spoil):
    states(widened)
    spoil(kept())
    same(states(widened), expected)
    same(states(widened), expected)
    assert module._is_whole(kept())


def test_weights_that_changed_at_equal_size_and_time_have_another_file(widened, tmp_path):
    folder = shutil.copytree(widened, tmp_path / "model")
    before, file = states(folder), folder / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    tiny.change_each(folder, lambda tensor: tensor * 2)
    os.utime(file, ns=times)
    assert not np.array_equal(states(folder), before)
    assert len(packed_files()) == 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(ort, "__version__", "1.99.0"), (module, "_processor", lambda: "another")],
)
def test_another_release_or_processor_has_another_file(
    widened, expected, monkeypatch, owner, name, value
):
    states(widened)
    monkeypatch.setattr(owner, name, value)
    same(states(widened), expected)
    assert len(packed_files()) == 2


def test_weights_that_are_not_numbers_are_refused(widened, tmp_path):
    folder = shutil.copytree(widened, tmp_path / "model")
    tiny.change_each(folder, lambda tensor: tensor * float("nan"))
    with pytest.raises(LoadError, match="NaN or infinity"):
        states(folder)
    assert not packed_files()


def read_only(cache):
    cache.write_text("a file where the folder should be")


def open_to_others(cache):
    (cache / "packed").mkdir(parents=True)
    (cache / "packed").chmod(0o777)


def elsewhere(cache):
    (cache / "real").mkdir(parents=True, mode=0o700)
    (cache / "packed").symlink_to(cache / "real")


@pytest.mark.parametrize("spoil", [read_only, open_to_others, elsewhere])
def test_a_folder_that_is_not_ours_is_not_used(widened, expected, cache, caplog, spoil):
    spoil(cache)
    same(states(widened), expected)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "packed weights cannot be stored" in line
    assert not [*cache.rglob(TENSORS)]


def test_a_bound_that_is_too_small_is_told_and_kept_to(widened, expected, caplog):
    same(states(widened, 1e-6), expected)
    assert "--packed-cache-gb" in caplog.text
    assert not packed_files()


@pytest.fixture
def full():
    """No file may be longer than 500 kB, which ends writing as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("name", ["halved", "widened"])
def test_a_full_disk_leaves_nothing_behind_and_each_session_packs(request, expected, name, caplog):
    same(states(request.getfixturevalue(name)), expected)
    assert not packed_files()
    # Here, and in memory
    assert sum("packed weights" in message for message in caplog.messages) == 2


def test_a_cache_folder_that_is_deleted_while_it_is_served(widened, expected, cache):
    backend = backend_of(widened)
    shutil.rmtree(cache)
    same(states_by(backend), expected)
    same(states(widened), expected)
    assert module._is_whole(kept())


def test_several_that_start_at_once_write_one_file(widened, expected, monkeypatch):
    times, write = [], module._written
    monkeypatch.setattr(module, "_written", lambda *given: times.append(1) or write(*given))
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(states, [widened] * 4):
            same(found, expected)
    assert len(times) == len(packed_files()) == 1


OPEN = """
import sys
from pathlib import Path
from hybridtei.inference.backends.graph import packed_file
from tests.inference.backends.graph.test_packed_file import backend_of
packed_file.LEAST_BYTES = 0
print("begins", flush=True)
backend_of(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_moment_leaves_nothing_wrong(halved, expected):
    """Ten times; what one leaves is in nobody's way."""
    for number in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", OPEN, halved], stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            time.sleep(number * 0.025)
            process.kill()
        if number % 5 == 4:
            same(states(halved), expected)
            assert [each.path.suffix for each in packed_files()] == [""]
            shutil.rmtree(kept())


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_one_damaged_bit_discards_the_file(widened, expected, caplog, at):
    states(widened)
    path = kept()
    assert not module.discard_damaged(path)
    spoiled(path, at)
    assert module.discard_damaged(path)
    assert "is damaged" in caplog.text
    same(states(widened), expected)


def spoiled(path, at=0.5):
    """Flips one bit there."""
    with (path / TENSORS).open("r+b") as file:
        place = int(at * (path / TENSORS).stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))


def test_a_read_only_cache_is_used_unless_its_file_is_damaged(
    widened, expected, caplog, monkeypatch
):
    """Root may write everywhere, so the system's refusal is pretended."""
    states(widened)
    path = kept()

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module.os, "utime", refuse)
    caplog.clear()
    same(states(widened), expected)
    assert "packs them in memory" not in caplog.text
    spoiled(path)
    monkeypatch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
    same(states(widened), expected)
    assert "is damaged, and cannot be removed" in caplog.text


def test_a_damaged_file_is_made_again_at_the_start(widened, expected, caplog):
    states(widened)
    spoiled(kept())
    same(states(widened), expected)
    assert "is damaged, and was removed" in caplog.text
    assert not module.discard_damaged(kept())


def test_passes_fail_once_a_large_file_is_found_damaged(widened, caplog, monkeypatch):
    monkeypatch.setattr(base, "DAMAGED", damaged := [])
    monkeypatch.setattr(module, "DAMAGED", damaged)
    monkeypatch.setattr(module, "CHECKED_AT_ONCE_BYTES", 0)
    backend = backend_of(widened)
    spoiled(kept())
    module._check_mapped(kept())
    assert "start again" in caplog.text
    batch = made_up(backend.spec, [3])
    with pytest.raises(BackendError, match=r"were damaged.*start again"):
        backend.forward(batch)


def aged(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_folders_of_killed_starts_are_removed_and_no_others(widened, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_roomy", lambda needed: str(tmp_path))
    left, foreign, young = (tmp_path / f"hybridtei-{name}" for name in ("a", "b", "c"))
    for folder in (left, foreign, young):
        folder.mkdir()
        (folder / TENSORS).write_bytes(b"x")
    (foreign / "notes.txt").write_bytes(b"x")
    aged(left, 100)
    aged(foreign, 100)
    with module._temporary(str(tmp_path)) as held:
        (held / TENSORS).write_bytes(b"x")
        aged(held, 100)
        states(widened, 0)
        assert held.exists()
    assert [folder.exists() for folder in (left, foreign, young)] == [False, True, True]


def test_what_is_old_or_left_or_beyond_the_bound_is_removed_once_nobody_writes():
    def made(name, size, days):
        path = packed_folder() / name
        path.mkdir()
        (path / TENSORS).write_bytes(b"\0" * size)
        aged(path, days * 86400)
        return path

    old, beyond, third, last = (
        made(*each)
        for each in (("old", 1, 31), ("beyond", 60, 3), ("third", 40, 2), ("last", 50, 1))
    )
    left = made("left" + PART, 1, 0)
    with ThreadPoolExecutor(1) as thread:
        # By another start
        with module._writing(packed_folder()):
            pruned = thread.submit(prune, 100)
            assert len(packed_files()) == 5
        assert {each.path for each in pruned.result()} == {old, beyond, left}
    assert {each.path for each in packed_files()} == {third, last}


def test_the_command_packs_lists_and_prunes_what_has_no_folder(widened, tmp_path, capsys):
    folder = shutil.copytree(widened, tmp_path / "copy")
    assert cli.main(["pack", str(folder), "--pooling", "mean"]) == 0
    told = capsys.readouterr().out
    assert str(kept()) in told
    assert cli.main(["pack", "--list"]) == 0
    assert capsys.readouterr().out == told
    assert cli.main(["pack", "--prune"]) == 0
    assert packed_files()
    shutil.rmtree(folder)
    assert cli.main(["pack", "--prune"]) == 0
    assert not packed_files()


def test_the_command_says_where_nothing_is_kept(widened, capsys):
    assert cli.main(["pack", str(widened), "--pooling", "mean", "--packed-cache-gb", "0"]) == 1
    assert "no weights are kept" in capsys.readouterr().err
