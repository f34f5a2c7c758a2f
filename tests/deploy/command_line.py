"""Checks the flags in deployment files by the command's own parser."""

import argparse
from pathlib import Path

from hybridtei.cli import collection, serve
from hybridtei.cli.flags import SETTINGS, from_flags
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig, StoreConfig, fields_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OURS = frozenset(field.name.upper() for kind in SETTINGS for field, _, _ in fields_of(kind))
# Of libraries, turned off
REPORTS = frozenset({"HF_HUB_DISABLE_TELEMETRY", "ORT_DISABLE_TELEMETRY"})
OTHERS = (
    frozenset(
        {
            "HYBRIDTEI_CACHE",
            "HYBRIDTEI_EMBEDDED_MODEL",
            "HF_HUB_OFFLINE",
            "PATH",
            "PYTHONUNBUFFERED",
        }
    )
    | REPORTS
)
DEVICE = frozenset(
    {
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
    }
)


def check_serve(words, environment):
    """The server's settings, as `text-embeddings-router` with these flags and variables would have
    them."""
    assert set(environment) <= OURS | OTHERS | DEVICE, set(environment) - OURS - OTHERS - DEVICE
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_serve_flags(parser)
    given = vars(parser.parse_args(list(words)))
    model_ids = given["model_id"] or []
    given["model_id"] = model_ids[0] if model_ids else None
    for kind in (ModelConfig, EngineConfig, StoreConfig):
        from_flags(kind, given, environment)
    server = from_flags(ServerConfig, given, environment)
    serve.check(server, given["models"], model_ids)
    return server


def check_ingest(words, environment):
    """The store, as `hybridtei ingest` with these words and variables would have it."""
    assert set(environment) <= OURS | OTHERS
    parser = argparse.ArgumentParser(allow_abbrev=False)
    collection.add_ingest(parser.add_subparsers())
    return from_flags(StoreConfig, vars(parser.parse_args(["ingest", *words])), environment)
