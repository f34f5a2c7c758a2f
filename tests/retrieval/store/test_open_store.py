import sys

import pytest

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError
from hybridtei.retrieval.store import open_store
from tests.ran import ran


def test_the_default_store_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store(StoreConfig()).place == f"embedded Qdrant in {tmp_path / 'qdrant'}"


async def test_a_folder_is_the_embedded_engine_and_an_address_a_server(tmp_path):
    embedded = open_store(StoreConfig(qdrant_path=str(tmp_path)))
    server = open_store(StoreConfig(qdrant_url="http://localhost:6334", qdrant_api_key=None))
    assert (embedded.kind, server.kind) == ("embedded", "server")
    await embedded.close()
    await server.close()
    # Nothing is started before it is asked
    assert list(tmp_path.iterdir()) == []


def test_a_string_is_no_settings(tmp_path):
    with pytest.raises(
        StoreError, match=rf"the store is '{tmp_path}': should be `StoreConfig\(qdrant_path="
    ):
        open_store(str(tmp_path))


def test_what_is_no_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (
        "",
        "/dev/null",
        "/dev/null/store",
        str(tmp_path / "file"),
        str(tmp_path / "file/a/b"),
    ):
        with pytest.raises(StoreError, match=f"`qdrant_path` '{path}' should be a folder"):
            open_store(StoreConfig(qdrant_path=path))
    assert open_store(StoreConfig(qdrant_path=str(tmp_path / "new/store")))


def test_both_is_one_too_many(tmp_path):
    with pytest.raises(StoreError, match="both given"):
        open_store(StoreConfig(qdrant_path=str(tmp_path), qdrant_url="http://localhost:6334"))


def test_missing_software_is_named_with_its_extra():
    """In a process of its own, where the packages are as good as not installed."""
    story = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == sys.argv[1] else real(name, *a)\n"
        "from hybridtei.config import StoreConfig\n"
        "from hybridtei.errors import LoadError\n"
        "from hybridtei.retrieval.store import open_store\n"
        "assert not any(name.split('.')[0].startswith('qdrant_') for name in sys.modules)\n"
        "try: open_store(StoreConfig(qdrant_path='x'))\n"
        "except LoadError as error: print(error)\n"
    )
    for package in ("qdrant_client", "qdrant_edge"):
        told = ran([sys.executable, "-c", story, package], check=True)
        assert told.stdout.startswith(
            f"the package `{package}` is missing: pip install 'hybridtei[qdrant]'"
        )
