"""The layouts of an embedded engine's collections, a file in the folder of each; an alias names another collection."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hybridtei.retrieval.store.embedded_conversions import Plain
from hybridtei.retrieval.store.embedded_socket import LAYOUT, FolderError

ALIAS_OF = "alias_of"  # key of a layout that is an alias


class Layouts:
    """The layouts below a path. Each is replaced whole: a crash leaves the old one or the new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._behind: dict[str, str] = {}

    def collections(self) -> list[str]:
        """The names of all collections but aliases, sorted."""
        return sorted(set(self._names()) - self.aliases().keys())

    def aliases(self) -> dict[str, str]:
        """{alias: collection}."""
        layouts = ((name, self.read(name)) for name in self._names())
        return {name: layout[ALIAS_OF] for name, layout in layouts if layout and ALIAS_OF in layout}

    def read(self, name: str) -> Any:
        """The layout in a folder; None if there is none."""
        file = self._path / name / LAYOUT
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def behind(self, name: str) -> str:
        """The collection of a name, which may be an alias."""
        if name not in self._behind:
            layout = self.read(name)
            if layout is None:
                return name
            self._behind[name] = layout.get(ALIAS_OF, name)
        return self._behind[name]

    def forget(self, name: str) -> None:
        """Of a collection that is dropped."""
        self._behind.pop(name, None)

    def annotate(self, name: str, metadata: Plain) -> None:
        """Replaces keys of a collection's metadata; a None removes its key."""
        name = self.behind(name)
        layout = self.read(name)
        if layout is None:
            raise FolderError(f"there is no collection {name!r} in {self._path}")
        merged = {**layout.get("metadata", {}), **metadata}
        self._write(name, {**layout, "metadata": {key: value for key, value in merged.items() if value is not None}})

    def alias(self, name: str, collection: str) -> None:
        """Makes `name` an alias of a collection."""
        self._write(name, {ALIAS_OF: collection})

    def _names(self) -> list[str]:
        return [file.parent.name for file in self._path.glob(f"[!.]*/{LAYOUT}")]

    def _write(self, name: str, layout: Plain) -> None:
        home = self._path / name
        home.mkdir(exist_ok=True)
        aside = home / f"{LAYOUT}.new"
        with aside.open("w", encoding="utf-8") as file:
            json.dump(layout, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, home / LAYOUT)
        self._behind.clear()
