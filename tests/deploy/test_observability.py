"""The words of labels that the dashboard and the alerts look for, and the forms of their files.
`tests/test_names.py` checks the names of metrics and labels."""

import json
import re
import shutil

import pytest
import yaml

from tests.deploy.command_line import DEPLOY
from tests.deploy.kustomize import render
from tests.ran import ran

COMPOSE = DEPLOY / "compose"
DASHBOARD = json.loads((COMPOSE / "grafana/dashboards/hybridtei.json").read_text())
GROUPS = yaml.safe_load((COMPOSE / "alerts.yaml").read_text())["groups"]
ALERTS = {rule["alert"]: rule["expr"] for group in GROUPS for rule in group["rules"]}
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


def test_failures_have_the_words_that_alerts_look_for():
    from hybridtei import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    words = {getattr(kind, "label", "inference") for kind in kinds} | {"dropped"}
    looked_for = {
        word for expression in EXPRESSIONS for word in re.findall(r'err="(\w+)"', expression)
    }
    assert looked_for
    assert looked_for <= words


def test_store_errors_have_the_kinds_that_alerts_look_for():
    from hybridtei.server.models import STORE_ERRORS

    looked_for = {
        kind
        for each in EXPRESSIONS
        for kinds in re.findall(r'kind=~"([\w|]+)"', each)
        for kind in kinds.split("|")
    }
    assert looked_for
    assert looked_for <= set(STORE_ERRORS.values())


def test_the_dashboard_asks_the_datasource_that_is_provisioned():
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
def test_prometheus_reads_its_files(check):
    assert said_well(promtool(), *check)


def test_prometheus_reads_the_dashboards_expressions(tmp_path):
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


def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    return found


def said_well(command, *words):
    said = ran([command, *words], cwd=COMPOSE)
    print(said.stdout, said.stderr)
    return said.returncode == 0
