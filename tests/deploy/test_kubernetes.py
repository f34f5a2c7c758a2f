"""The overlays, rendered by kubectl: valid by Kubernetes' schemas, and of one mind with the image
and the command."""

import pytest
import yaml

from deploy.dockerfile import parse
from hybridtei.config import ModelConfig
from hybridtei.inference.load import read_models
from tests.deploy.command_line import DEPLOY, ROOT, check_serve
from tests.deploy.kustomize import render

OVERLAYS = sorted((DEPLOY / "kubernetes/overlays").iterdir())
IDS = [folder.name for folder in OVERLAYS]
KINDS = {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
MORE_KINDS = {"cpu-models": {"ConfigMap", "PersistentVolumeClaim"}}
VERSIONS = ("1.30", "1.33", "1.37")


def rendered(folder):
    return {manifest["kind"]: manifest for manifest in render(folder)}


def container(manifests):
    [only] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def variables(manifests):
    return {each["name"]: each.get("value", "a-secret") for each in container(manifests)["env"]}


@pytest.mark.parametrize("folder", OVERLAYS, ids=IDS)
def test_every_manifest_fits_its_schema(folder):
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate"
    )
    manifests = render(folder)
    assert {manifest["kind"] for manifest in manifests} == KINDS | MORE_KINDS.get(
        folder.name, set()
    )
    for manifest in manifests:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("folder", OVERLAYS, ids=IDS)
def test_the_command_takes_the_variables_and_listens_where_the_pod_says(folder):
    manifests = rendered(folder)
    pod = container(manifests)
    settings = check_serve(pod.get("args", []), variables(manifests))
    ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
    assert ports == {"http": settings.port, "metrics": settings.prometheus_port}
    annotations = manifests["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == settings.prometheus_port
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod[probe]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("folder", OVERLAYS, ids=IDS)
def test_a_pod_has_the_time_to_drain(folder):
    manifests = rendered(folder)
    spec, pod = manifests["Deployment"]["spec"]["template"]["spec"], container(manifests)
    sleep, seconds = pod["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    drain = check_serve([], variables(manifests)).drain_seconds
    assert int(seconds) + drain < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("folder", OVERLAYS, ids=IDS)
def test_selectors_find_the_pods(folder):
    manifests = rendered(folder)
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert manifests["Service"]["spec"]["selector"].items() <= labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifests[kind]["spec"]["selector"]["matchLabels"].items() <= labels
    scaled = manifests["HorizontalPodAutoscaler"]["spec"]
    target = manifests["Deployment"]
    assert scaled["scaleTargetRef"] == {
        "apiVersion": target["apiVersion"],
        "kind": "Deployment",
        "name": target["metadata"]["name"],
    }
    assert "replicas" not in target["spec"]
    assert 2 <= scaled["minReplicas"] <= scaled["maxReplicas"]


@pytest.mark.parametrize("folder", OVERLAYS, ids=IDS)
def test_pods_run_as_the_images_user_and_write_only_where_a_volume_is(folder):
    manifests = rendered(folder)
    spec, pod = manifests["Deployment"]["spec"]["template"]["spec"], container(manifests)
    stages = parse((ROOT / "Dockerfile").read_text())
    tag = pod["image"].partition(":")[2]
    [user] = stages[tag].all("USER")
    assert (
        user.arguments
        == f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    )
    assert pod["securityContext"]["readOnlyRootFilesystem"]
    assert {mount["name"] for mount in pod["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }


def test_the_pod_of_several_models_reads_their_file_and_keeps_packed_weights(tmp_path):
    manifests = rendered(DEPLOY / "kubernetes/overlays/cpu-models")
    pod = container(manifests)
    file = tmp_path / "models.toml"
    file.write_text(manifests["ConfigMap"]["data"]["models.toml"])
    assert [config.model_id for config in read_models(file, ModelConfig())] == [
        "minilm-hybrid",
        "BAAI/bge-reranker-v2-m3",
    ]
    volumes = {
        volume["name"]: volume
        for volume in manifests["Deployment"]["spec"]["template"]["spec"]["volumes"]
    }
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["volumeMounts"]}
    assert (
        mounts["/etc/hybridtei"]["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"]
    )
    assert pod["args"] == ["--models", "/etc/hybridtei/models.toml"]
    [cache] = [
        word.partition("=")[2]
        for step in parse((ROOT / "Dockerfile").read_text())["runtime"].all("ENV")
        for word in step.arguments.split()
        if word.startswith("HYBRIDTEI_CACHE=")
    ]
    claim = manifests["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts[cache]["persistentVolumeClaim"]["claimName"] == claim


def test_the_adapter_serves_the_metric_that_scales():
    rules = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())["rules"][
        "custom"
    ]
    served = {rule["name"]["as"] for rule in rules}
    for folder in OVERLAYS:
        [metric] = rendered(folder)["HorizontalPodAutoscaler"]["spec"]["metrics"]
        assert {metric["pods"]["metric"]["name"]} == served
