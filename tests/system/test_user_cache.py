"""Where the cache is: where the user says, else below the user's cache folder, else nowhere, said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtei.errors import LoadError
from hybridtei.system.cache_folder import cache_folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HYBRIDTEI_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/a"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/a"}, "/xdg/hybridtei/kind"),
        ({"HOME": "/home/a"}, "/home/a/.cache/hybridtei/kind"),
        ({"HYBRIDTEI_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/a"}, "/home/a/.cache/hybridtei/kind"),
    ],
)
def test_it_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("HYBRIDTEI_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("kind") == Path(expected)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYBRIDTEI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(LoadError, match="HYBRIDTEI_CACHE"):
        cache_folder("kind")
