"""Routers: a model that reads queries by one chain of modules and documents by another
(router_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.checkpoint import STATIC, TRANSFORMERS, Modules
from hybridtei.models.checkpoint.files import JsonObject, inside
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.modules import (
    ORDER,
    STEPS,
    check_order,
    class_names,
    with_effect,
)


@dataclass(frozen=True, slots=True)
class Routes:
    """Modules by route. `table`: the folder of the table that replaces the model for queries.
    `default`: the route of texts whose kind the request does not name, or None."""

    document: Modules
    query: Modules = ()
    table: Path | None = None
    default: str | None = None


def read_router(folder: Folder, modules: Modules) -> Routes:
    """Return the routes of a Router; modules after the Router end both. Without a Router, `modules`
    are the document route. Raises UnsupportedArchitecture unless there is one query route and one
    document route."""
    if not modules or modules[0][0] != "Router":
        return Routes(modules)
    prefix = modules[0][1]
    settings = folder.within(prefix).object("router_config.json")
    types, structure = _structure(settings)
    file, routes = settings.file, {}
    for name, paths in structure.items():
        classes = class_names(folder, [str(types.get(path)) for path in paths], file)
        places = [str(Path(prefix) / path) for path in paths]
        route = with_effect([*zip(classes, places, strict=True)])
        routes[name] = [*route, *modules[1:]]
    default = _default_route(settings.object("parameters"), [*structure])
    kinds = {name: [kind for kind, _ in route] for name, route in routes.items()}
    if kinds["query"] == ["SparseStaticEmbedding"] and kinds["document"] in [
        [kind, "SpladePooling"] for kind in TRANSFORMERS
    ]:
        table = inside(folder.path, routes["query"][0][1])
        return Routes(routes["document"], table=table, default=default)
    for name, names in kinds.items():
        if not {"Pooling", STATIC} & {*names} or not {*names} <= {
            *TRANSFORMERS,
            STATIC,
            "Pooling",
            *STEPS,
            "Normalize",
        }:
            raise UnsupportedArchitecture(
                f"{file}: the {name} route is {names}; supported: a model of dense vectors in "
                "each, or a SparseStaticEmbedding for queries and SPLADE for documents"
            )
        check_order(file, names, ORDER, orphans=False)
    return Routes(routes["document"], routes["query"], default=default)


def _structure(settings: JsonObject) -> tuple[Mapping[str, Any], Mapping[str, list[str]]]:
    """Return the type of each module by its path, and the paths of each route's modules."""
    file, types, structure = settings.file, settings.get("types"), settings.get("structure")
    if (
        not isinstance(types, dict)
        or not isinstance(structure, dict)
        or set(structure) != {"query", "document"}
    ):
        raise UnsupportedArchitecture(
            f"{file}: only routers with a query and a document route are supported"
        )
    if not all(
        isinstance(paths, list) and all(isinstance(path, str) for path in paths)
        for paths in structure.values()
    ):
        raise LoadError(f"{file}: `structure` should list the paths of each route's modules")
    return types, structure


def _default_route(parameters: JsonObject, names: list[str]) -> str | None:
    if parameters.get("route_mappings"):
        raise UnsupportedArchitecture(
            f"{parameters.file}: `route_mappings` are not supported; name the routes query and "
            "document"
        )
    default = parameters.get("default_route")
    if default is None:
        return names[0] if parameters.get("allow_empty_key", True) else None
    if default not in names:
        raise LoadError(
            f"{parameters.file}: `default_route` is {default!r}; the routes are {', '.join(names)}"
        )
    return str(default)
