"""The page's scripts and the files in deploy/ name only what a server has; a name that is changed
in one of them is found."""

import argparse
import re

import pytest
import yaml

from hybridtei.cli import COMMANDS, add_command
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.server.routing import ROUTES
from tests import names
from tests.deploy.command_line import DEPLOY, DEVICE, OTHERS, OURS, ROOT
from tests.names import Names
from tests.retrieval.search.small_search import MODEL, TEXTS, spec_in
from tests.server.live import VALID, serving

PAGE = ROOT / "hybridtei/server/page"
DASHBOARD = DEPLOY / "compose/grafana/dashboards/hybridtei.json"
NGINX = DEPLOY / "nginx/hybridtei.conf"
SUFFIXES = (".yaml", ".conf", ".service", ".env")
SETTINGS = sorted(path.relative_to(DEPLOY) for path in DEPLOY.rglob("*") if path.suffix in SUFFIXES)
SCRIPTS = sorted(path.name for path in PAGE.glob("*.js"))
# Keys of YAML and of Grafana's JSON whose text is an expression
EXPRESSION_KEYS = ("expr", "seriesQuery", "query")
KEY = "s3cret"
PACKAGES = {"tei.v1", "grpc.health.v1", "grpc.reflection.v1"}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Of a server that had an answer, a refusal, a cache, a search and a key."""
    with serving(
        spec_in(tmp_path_factory.mktemp("model")),
        model_id=MODEL,
        engine={"embedding_cache_mb": 1},
        server={"api_key": KEY},
        schemas=CollectionSchemas(MemoryStore()),
    ) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        # The second is answered by the cache, the others are refused
        server.post("/embed_hybrid", VALID)
        server.post("/embed_hybrid", VALID)
        server.post("/embed", {"inputs": []})
        server.post("/embed", {"inputs": ["one"] * 33})
        points = [{"id": text, "text": text} for text in TEXTS]
        server.post("/collections/papers/points", {"points": points, "create": True})
        question = {"collection": "papers", "query": "search", "explain": True, "highlights": True}
        search = server.post("/search", question).json()
        info = server.get("/info").json()
        metrics = server.get("/metrics").text
    paths = {re.sub(r"{[\w:]+}", "x", path) for route in ROUTES for path in route.paths}
    return Names(
        info=info,
        search=search,
        series=series_of(metrics),
        routes=paths | {f"/m/x{path}" for path in paths},
        packages=PACKAGES,
        flags=flags_of_commands(),
        variables=OURS | OTHERS | DEVICE | {"HUGGINGFACE_HUB_CACHE"},
    )


def series_of(metrics):
    """Series -> their labels."""
    series = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", metrics, re.MULTILINE):
        series[name] = set()
        if kind == "histogram":
            for suffix in ("_bucket", "_sum", "_count"):
                series[name + suffix] = set()
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", metrics, re.MULTILINE):
        series[name] |= set(re.findall(r'(\w+)="', labels))
    return series


def flags_of_commands():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for name in COMMANDS:
        add_command(commands, name)
    return {
        flag
        for command in commands.choices.values()
        for action in command._actions
        for flag in action.option_strings
    }


def expressions(text):
    """Of a file of YAML or JSON, which is YAML."""
    stack = [*yaml.safe_load_all(text)]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            for key, each in value.items():
                if key in EXPRESSION_KEYS and isinstance(each, str) and each != "prometheus":
                    yield each
            if "metric" in value:
                yield value["metric"]["name"]
            if "legendFormat" in value:
                for label in re.findall(r"{{(\w+)}}", value["legendFormat"]):
                    yield f'{{{label}=""}} {value["expr"]}'
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def lacking_in_expressions(text, known):
    return set().union(*(names.lacking_in_expression(each, known) for each in expressions(text)))


def lacking_in_deployment(text, known):
    return names.lacking_in_settings(text, known) | lacking_in_expressions(text, known)


def lacking_in_conf(text, known):
    return names.lacking_in_settings(text, known) | names.lacking_in_nginx(text, known)


def reader_of(path):
    """What checks a file."""
    if path.name == "search.js":
        return names.lacking_in_search
    if path.suffix == ".js":
        return names.lacking_in_script
    if path.suffix == ".conf":
        return lacking_in_conf
    if path.suffix in (".service", ".env"):
        return names.lacking_in_settings
    return lacking_in_deployment


FILES = [*(PAGE / name for name in SCRIPTS), *(DEPLOY / path for path in SETTINGS), DASHBOARD]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_names_what_a_server_has(known, path):
    assert reader_of(path)(path.read_text(encoding="utf-8"), known) == set()


ALERTS = DEPLOY / "compose/alerts.yaml"
COMPOSE = DEPLOY / "compose/compose.yaml"
DEPLOYMENT = DEPLOY / "kubernetes/base/deployment.yaml"
ADAPTER = DEPLOY / "kubernetes/prometheus-adapter.yaml"
AUTOSCALER = DEPLOY / "kubernetes/base/autoscaler.yaml"
UNIT = DEPLOY / "systemd/hybridtei@.service"
# A file, a name in it, what it is renamed to, and what the checker says of it
RENAMES = [
    (PAGE / "page.js", "hybridtei.store", "hybridtei.retrieval.store"),
    (PAGE / "page.js", "model_dtype: dtype", "dtype: dtype"),
    (PAGE / "page.js", "info().max_input_length", "info().max_length"),
    (PAGE / "live.js", '"hybridtei_batch_fill"', '"hybridtei_fill"'),
    (PAGE / "search.js", "{ mode, hits, stages }", "{ mode, results, stages }"),
    (PAGE / "search.js", "payload.text", "payload.content"),
    (DASHBOARD, "sum(te_queue_size{", "sum(queue_size{"),
    (DASHBOARD, "te_queue_size, instance", "te_queued, instance"),
    (DASHBOARD, "{{limit}}", "{{bound}}"),
    (ALERTS, '{err="overloaded"}', '{error="overloaded"}'),
    (ADAPTER, "'hybridtei_queue_tokens", "'hybridtei_queued_tokens"),
    (AUTOSCALER, "name: hybridtei_queue_tokens", "name: queue_tokens"),
    (COMPOSE, "DRAIN_SECONDS:", "DRAIN_S:"),
    (COMPOSE, "--url-api-key=", "--url-key="),
    (DEPLOYMENT, "path: /health", "path: /healthy"),
    (DEPLOYMENT, "name: PORT", "name: LISTEN"),
    (UNIT, "--reuse-port", "--share-port"),
    (NGINX, "= /metrics", "= /metric"),
    (NGINX, "(load|unload)", "(load|remove)"),
    (NGINX, "tei\\.v1", "tei\\.v2"),
]


@pytest.mark.parametrize(
    ("path", "name", "renamed"), RENAMES, ids=[f"{path.name}-{new}" for path, _, new in RENAMES]
)
def test_a_planted_rename_is_found(known, path, name, renamed):
    text = path.read_text(encoding="utf-8")
    assert name in text
    assert reader_of(path)(text.replace(name, renamed), known) != set()
