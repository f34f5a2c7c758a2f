"""`collections`: lists, describes and deletes a store's collections, and moves them between stores
as JSON lines."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from msgspec import json

from hybridtei.cli.flags import Commands, add_flags, new_parser, read_settings
from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError, StoreUnavailable, UnknownCollection, UsageError
from hybridtei.retrieval.store import opened, place_of
from hybridtei.system.machine import require_extra

if TYPE_CHECKING:
    from hybridtei.retrieval.store.base import Store
    from hybridtei.retrieval.store.collection import CollectionSchemas

log = logging.getLogger(__name__)
Act = Callable[["CollectionSchemas", argparse.Namespace], Awaitable[None]]
# Bytes per read of a file
CHUNK_BYTES = 1_000_000


def add(commands: Commands) -> None:
    parser = new_parser(commands, "collections", run)
    add_flags(parser, (StoreConfig,))
    parser.set_defaults(act=_list)
    actions = parser.add_subparsers(metavar="ACTION", help="[default: list]")
    _add(actions, "list", _list)
    describe = _add(actions, "describe", _describe)
    delete = _add(actions, "delete", _delete)
    delete.add_argument("--yes", action="store_true", help="do not ask")
    points = _add(actions, "delete-points", _delete_points)
    points.add_argument("--yes", action="store_true", help="do not ask")
    points.add_argument("--filter", metavar="JSON", help="instead of ids: a filter, as in /search")
    points.add_argument(
        "--source",
        metavar="FILE",
        help="file of the document, if several files have one with the id",
    )
    export = _add(actions, "export", _export)
    export.add_argument(
        "--output", "-o", metavar="FILE", help="write there [default: standard output]"
    )
    for action in (describe, delete, points, export):
        action.add_argument("name", metavar="NAME", help="name or alias of the collection")
    points.add_argument(
        "ids", metavar="ID", nargs="*", default=[], help="of documents, or of points"
    )
    imported = _add(actions, "import", _import)
    imported.add_argument("file", metavar="FILE", help="an export; - reads standard input")
    imported.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="collection, created if missing [default: the export's]",
    )
    for action in (export, imported):
        action.add_argument("--quiet", action="store_true", help="no progress")


def _add(actions: Commands, name: str, act: Act) -> argparse.ArgumentParser:
    parser = new_parser(actions, name, act)
    add_flags(parser, (StoreConfig,))
    # Flags before the action's name count too
    for flag in parser._actions:
        flag.default = argparse.SUPPRESS
    parser.set_defaults(run=run, act=act)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """List, describe and delete collections, and move them between stores; without an action, list
    them."""
    require_extra("qdrant", "qdrant_client")
    from hybridtei.retrieval.store.collection import CollectionSchemas

    async def act() -> None:
        async with opened(read_settings(arguments, StoreConfig)) as store:
            await arguments.act(CollectionSchemas(store), arguments)

    asyncio.run(act())


async def _list(schemas: CollectionSchemas, arguments: argparse.Namespace) -> None:
    """List collections with their points, model and aliases."""
    from hybridtei.retrieval.store.plan import MODEL_ID

    names, aliases = await schemas.store.collections(), await schemas.store.aliases()
    width = max(map(len, (*names, *aliases)), default=0)
    for name in names:
        schema, points = await schemas.of(name), await _points(schemas.store, name)
        print(
            f"{name:{width}}  {points:>19}  {schema.metadata.get(MODEL_ID, 'of an unnamed model')}",
            flush=True,
        )
    for alias, collection in sorted(aliases.items()):
        print(f"{alias:{width}}  is {collection}", flush=True)
    if not names:
        print(
            f"no collections: {place_of(read_settings(arguments, StoreConfig))}",
            file=sys.stderr,
        )


async def _describe(schemas: CollectionSchemas, arguments: argparse.Namespace) -> None:
    """Print a collection's schema, metadata and number of points as JSON."""
    from hybridtei.retrieval.store.collection import schema_to_dict

    schema = await schemas.of(arguments.name)
    name = str(schema.stored_as)
    facts = {
        "collection": name,
        "aliases": await _aliases(schemas, name),
        "points": await schemas.store.count(name),
    }
    print(json.format(json.encode({**facts, **schema_to_dict(schema)})).decode(), flush=True)


async def _points(store: Store, name: str) -> str:
    """The number of points; the engine cannot count those of a damaged collection."""
    try:
        return f"{await store.count(name):,} points"
    except StoreUnavailable:
        raise
    except StoreError as error:
        log.warning("%s", error)
        return "damaged points"


async def _aliases(schemas: CollectionSchemas, name: str) -> list[str]:
    return sorted(
        alias for alias, collection in (await schemas.store.aliases()).items() if collection == name
    )


async def _delete(schemas: CollectionSchemas, arguments: argparse.Namespace) -> None:
    """Delete a collection, its points and its aliases."""
    store = schemas.store
    try:
        name = str((await schemas.of(arguments.name)).stored_as)
    except UnknownCollection:
        if arguments.name not in await store.aliases():
            raise
        # The name is an alias of a collection that is gone
        await store.drop(arguments.name)
        print(f"deleted the alias {arguments.name}", file=sys.stderr)
        return
    except StoreUnavailable:
        raise
    except StoreError:
        # Its layout is damaged
        name = arguments.name
    aliases = await _aliases(schemas, name)
    alias_note = f", also known as {', '.join(aliases)}," if aliases else ""
    what = f"{name}{alias_note} with {await _points(store, name)}"
    if not _is_confirmed(arguments, what):
        return
    await store.drop(name)
    # A server deletes aliases with the collection
    for alias in set(aliases) & (await store.aliases()).keys():
        await store.drop(alias)
    print(f"deleted {what}", file=sys.stderr)


def _is_confirmed(arguments: argparse.Namespace, what: str) -> bool:
    """True if --yes, or the user at the terminal, says so. Raises UsageError without both."""
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"delete {what}? --yes confirms it where there is no terminal to ask on")
    return input(f"Delete {what}? [y/N] ").strip().lower() in ("y", "yes")


async def _delete_points(schemas: CollectionSchemas, arguments: argparse.Namespace) -> None:
    """Delete documents with all their chunks, by ids or by a filter."""
    from hybridtei.retrieval.documents import Selection, deleted, whole
    from hybridtei.retrieval.search.options import identity_of

    ids = list(map(identity_of, arguments.ids))
    selection = Selection(ids or None, arguments.filter, arguments.source)
    if not _is_confirmed(arguments, f"{len(ids) or 'matching'} documents of {arguments.name}"):
        return
    count = await whole(schemas, arguments.name, partial(deleted, selection=selection))
    print(f"deleted {count:,} points of {arguments.name}", file=sys.stderr)


async def _export(schemas: CollectionSchemas, arguments: argparse.Namespace) -> None:
    """Write a collection as JSON lines, with its vectors. Run it again to continue a stopped
    export."""
    from tqdm.auto import tqdm

    from hybridtei.retrieval.store.transfer import export_to, exported

    name, output = arguments.name, arguments.output
    if output is None:
        async for lines in exported(schemas, name):
            sys.stdout.buffer.write(lines)
        sys.stdout.buffer.flush()
        return
    total = await schemas.store.count(str((await schemas.of(name)).stored_as))
    with tqdm(total=total, unit="point", disable=arguments.quiet, file=sys.stderr) as bar:
        count = await export_to(schemas, name, Path(output), bar.update)
    print(f"{output}: {count:,} points of {name}", file=sys.stderr)


async def _import(schemas: CollectionSchemas, arguments: argparse.Namespace) -> None:
    """Store the points of an export that the collection lacks. Run it again to continue a stopped
    import."""
    from tqdm.auto import tqdm

    from hybridtei.retrieval.store.transfer import import_from

    path = "/dev/stdin" if arguments.file == "-" else arguments.file
    with (
        Path(path).open("rb") as file,
        tqdm(unit="point", disable=arguments.quiet, file=sys.stderr) as bar,
    ):
        result = await import_from(schemas, _chunks(file), arguments.name, advance=bar.update)
    note = "made, " if result.created else ""
    existing = result.points - result.written
    print(
        f"{result.collection}: {note}{result.written:,} points stored, {existing:,} were there",
        flush=True,
    )


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk
