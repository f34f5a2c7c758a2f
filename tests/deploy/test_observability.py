"""Every metric that the dashboard, the alerts and the autoscaler name is one that a server tells; and their forms are right."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import render
from hybridtei.retrieval.store.collection import CollectionSchemas
from tests.deploy.command_line import DEPLOY
from tests.retrieval.store.memory_store import MemoryStore
from tests.server.live import HANG, VALID, serving

COMPOSE = DEPLOY / "compose"
DASHBOARD: dict[str, Any] = json.loads((COMPOSE / "grafana/dashboards/hybridtei.json").read_text())
GROUPS = yaml.safe_load((COMPOSE / "alerts.yaml").read_text())["groups"]
ALERTS = {rule["alert"]: rule["expr"] for group in GROUPS for rule in group["rules"]}
METRIC = re.compile(r"\b((?:te|hybridtei)_\w+)")
LABEL = re.compile(r'(\w+)(?:=~|!=|=)"')
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())),
    DASHBOARD["templating"]["list"][1]["query"]["query"],
    *ALERTS.values(),
    *(
        each["seriesQuery"]
        for each in yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())[
            "rules"
        ]["custom"]
    ),
    *(
        metric["pods"]["metric"]["name"]
        for folder in sorted((DEPLOY / "kubernetes/overlays").iterdir())
        for manifest in render(folder)
        if manifest["kind"] == "HorizontalPodAutoscaler"
        for metric in manifest["spec"]["metrics"]
    ),
]


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """Names of series -> their labels, as a server tells them that had an answer, a refusal, a cache and a store."""
    stored = CollectionSchemas(MemoryStore())
    with serving(
        engine={"embedding_cache_mb": 1}, server={"api_key": "a-key"}, schemas=stored
    ) as server:
        server.client.headers["authorization"] = "Bearer a-key"
        for _ in range(2):
            server.post("/embed_hybrid", VALID)
        server.post("/embed", {"inputs": ["a"] * 33})
        server.post("/embed", {"inputs": []})
        text = server.get("/metrics").text
    names: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            names[name + suffix] = set()
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        names[name] |= set(LABEL.findall(labels))
    return names


def test_every_metric_is_told(told: dict[str, set[str]]) -> None:
    named = {name for expression in EXPRESSIONS for name in METRIC.findall(expression)}
    assert named
    assert named <= set(told), named - set(told)


def test_every_label_is_one_that_the_series_has(told: dict[str, set[str]]) -> None:
    of_scrapes = {"instance", "job", "namespace", "pod", "le"}
    for expression in EXPRESSIONS:
        for name, labels in re.findall(r"((?:te|hybridtei)_\w+)\{([^}]*)\}", expression):
            assert set(LABEL.findall(labels)) <= told[name] | of_scrapes, expression
        series = set().union(*(told[name] for name in METRIC.findall(expression))) | of_scrapes
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in labels.split(",")} <= series, expression


def test_failures_have_the_words_that_alerts_look_for() -> None:
    from hybridtei.server.context import FAILURES

    words = {name for _, name in FAILURES} | {"inference", "dropped"}
    looked_for = {
        word for expression in EXPRESSIONS for word in re.findall(r'err="(\w+)"', expression)
    }
    assert looked_for
    assert looked_for <= words


def test_store_errors_have_the_kinds_that_alerts_look_for() -> None:
    from hybridtei.server.models import STORE_ERRORS

    looked_for = {
        kind
        for each in EXPRESSIONS
        for kinds in re.findall(r'kind=~"([\w|]+)"', each)
        for kind in kinds.split("|")
    }
    assert looked_for
    assert looked_for <= set(STORE_ERRORS.values())


def test_the_dashboard_asks_the_datasource_that_is_provisioned() -> None:
    sources = yaml.safe_load(
        (COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert [source["type"] for source in sources] == [DASHBOARD["templating"]["list"][0]["query"]]
    mounts = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["grafana"][
        "volumes"
    ]
    [provider] = yaml.safe_load(
        (COMPOSE / "grafana/provisioning/dashboards/hybridtei.yaml").read_text()
    )["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounts


@pytest.mark.parametrize(
    "check",
    [["check", "config", "--syntax-only", "prometheus.yaml"], ["check", "rules", "alerts.yaml"]],
)
def test_prometheus_reads_its_files(check: list[str]) -> None:
    assert said_well(promtool(), *check)


def test_prometheus_reads_the_dashboards_expressions(tmp_path: Path) -> None:
    filled = [
        each.replace("$__rate_interval", "1m").replace("$instance", ".*")
        for each in EXPRESSIONS
        if "(te_queue_size," not in each
    ]
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(filled)
    ]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    assert said_well(promtool(), "check", "rules", "--lint=none", str(tmp_path / "rules.yaml"))


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    return found


def said_well(command: str, *words: str) -> bool:
    said = subprocess.run(
        [command, *words], cwd=COMPOSE, capture_output=True, text=True, check=False, timeout=HANG
    )
    print(said.stdout, said.stderr)
    return said.returncode == 0
