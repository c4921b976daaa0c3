"""deploy/kubernetes: every overlay is rendered by kubectl, held against Kubernetes' own schemas, and against the code.

What it is not: a cluster. kubectl is Debian's (kubernetes-client, which deploy/setup.sh installs) or any newer one.
Neighbour: test_compose.py for the same on one machine.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gspo.common.config.schema import RunConfig
from gspo.common.errors import EXIT_BAD_INPUT
from gspo.common.host.module_command import module_command
from gspo.common.service import options as options_module
from gspo.common.service.options import parse_options
from gspo.common.streams.keys import AGENTS, GATEWAY
from gspo.common.streams.keys import SERVICES as ALWAYS
from gspo.common.telemetry import metrics
from tests.support.service_process import make_run

KUBERNETES = Path(__file__).parents[3] / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu")
VERSION = "1.31"
SERVICES = (*ALWAYS, GATEWAY, AGENTS)
PODS = (*SERVICES, "redis", "prepare")
Documents = dict[tuple[str, str], dict[str, Any]]


def for_old_kubectl(folder: Path) -> None:
    """Kustomize before 3 (Debian 12's kubectl 1.20) knows the same things by other names."""
    for file in folder.rglob("kustomization.yaml"):
        given = yaml.safe_load(file.read_text())
        resources = given.pop("resources")
        given["bases"] = [name for name in resources if (file.parent / name).is_dir()]
        given["resources"] = [name for name in resources if name not in given["bases"]]
        given["patchesStrategicMerge"] = [patch["path"] for patch in given.pop("patches", [])]
        given["commonLabels"] = {key: value for one in given.pop("labels", []) for key, value in one["pairs"].items()}
        file.write_text(yaml.safe_dump(given))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Documents]:
    """What each overlay comes to, by kind and name."""
    assert shutil.which("kubectl"), "kubectl is missing: as root make setup installs it (Debian: kubernetes-client)"
    folder = tmp_path_factory.mktemp("manifests") / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    told = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True, check=False).stdout
    if re.search(r'v1\.(1\d|20)\.|Minor:"(1\d|20)"', told):
        for_old_kubectl(folder)
    found = {}
    for overlay in OVERLAYS:
        command = ["kubectl", "kustomize", str(folder / "overlays" / overlay)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        documents = [one for one in yaml.safe_load_all(done.stdout) if one]
        found[overlay] = {(one["kind"], one["metadata"]["name"]): one for one in documents}
        assert len(found[overlay]) == len(documents), "two of one name"
    return found


def pod(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    return dict(documents[kind, name]["spec"]["template"]["spec"])


def pods(documents: Documents) -> dict[str, dict[str, Any]]:
    kinds = ("Deployment", "Job", "StatefulSet")
    return {name.removeprefix("gspo-"): pod(documents, kind, name) for kind, name in documents if kind in kinds}


def workload(service: str) -> str:
    return "Job" if service == "learner" else "Deployment"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_document_is_what_kubernetes_takes(rendered: dict[str, Documents], overlay: str) -> None:
    assert len(rendered[overlay]) >= 28
    for (kind, name), document in rendered[overlay].items():
        if kind not in ("ServiceMonitor", "PrometheusRule"):  # the operator's own kinds; below
            kubernetes_validate.validate(document, VERSION, strict=True)
        if kind != "ConfigMap":  # made by Kustomize
            assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "gspo", name


def test_a_document_that_is_wrong_is_noticed(rendered: dict[str, Documents]) -> None:
    wrong = {**rendered["cpu"]["Service", "gspo-redis"], "spec": {"ports": [{"port": "six"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_understands_its_arguments(
    rendered: dict[str, Documents],
    overlay: str,
    service: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (container,) = pod(rendered[overlay], workload(service), f"gspo-{service}")["containers"]
    (tmp_path / "token").write_text("a-secret-of-many-characters")
    (tmp_path / "redis_password").write_text("another-secret-of-many-characters")
    secrets = {"token_file": str(tmp_path / "token"), "redis_password_file": str(tmp_path / "redis_password")}
    config = make_run(tmp_path, tmp_path, services=secrets)
    assert container["command"][1:] == [*module_command(f"gspo.{service}")[1:]]
    assert f"gspo.{service}" in container["command"]
    words = [word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]]
    words[words.index("--run-dir") + 1] = str(config.run_dir)
    monkeypatch.setattr(sys, "argv", [service, *words])
    monkeypatch.setattr(options_module, "set_up_logs", lambda *_, **__: None)
    options = parse_options(service, lambda _: None, meaning="")
    # A pod's host name is in no DNS, so it is its address that others are told.
    assert (options.host, options.http_port) == ("10.1.2.3", 8000)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports.get("grpc", 0) == options.grpc_port
    assert options.stay


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_shut_in(rendered: dict[str, Documents], overlay: str) -> None:
    for name, spec in pods(rendered[overlay]).items():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        unconfined = [
            key
            for one in spec["containers"]
            for key in ("seccompProfile", "procMount", "appArmorProfile")
            if key in one["securityContext"]
        ]
        assert not unconfined or (name == AGENTS and spec["hostUsers"] is False), name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert not container["securityContext"]["allowPrivilegeEscalation"], name
            assert container["resources"]["limits"]["memory"], name
            assert not [one for one in container.get("env", []) if re.search("TOKEN|PASSWORD", one["name"])], name


@pytest.mark.parametrize("service", SERVICES)
def test_ready_means_ready(rendered: dict[str, Documents], service: str) -> None:
    (container,) = pod(rendered["cpu"], workload(service), f"gspo-{service}")["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}


def allowed(documents: Documents, direction: str, name: str) -> list[tuple[str, tuple[int, ...]]]:
    """To whom (or from whom) the policies let a pod talk: names or other selectors, and ports."""
    found = []
    for (kind, _), document in documents.items():
        selector = document["spec"].get("podSelector", {})
        labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "gspo"}
        if kind != "NetworkPolicy" or not matches(selector, labels):
            continue
        for rule in document["spec"].get(direction, []):
            ports = tuple(port["port"] for port in rule.get("ports", []))
            for peer in rule["to" if direction == "egress" else "from"]:
                found += [(one, ports) for one in named(peer) or ["outside"]]
    return sorted(set(found))


def named(peer: dict[str, Any]) -> list[str]:
    """Our pods that a peer of a rule stands for; none where it is somebody else's."""
    pods = {name: {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "gspo"} for name in PODS}
    return [name for name in PODS if "podSelector" in peer and matches(peer["podSelector"], pods[name])]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def test_reward_functions_reach_redis_and_nothing_else(rendered: dict[str, Documents]) -> None:
    # Beside it names: DNS in kube-system.
    assert allowed(rendered["cpu"], "egress", "reward") == [("outside", (53, 53)), ("redis", (6379,))]


def test_agents_reach_gateways_and_redis_and_nothing_else(rendered: dict[str, Documents]) -> None:
    documents = rendered["cpu"]
    expected = [("gateway", (8000,)), ("outside", (53, 53)), ("redis", (6379,))]
    assert allowed(documents, "egress", "agents") == expected
    assert ("agents", (8000,)) in allowed(documents, "ingress", "gateway")


def test_redis_is_reached_by_the_services_alone(rendered: dict[str, Documents]) -> None:
    assert allowed(rendered["cpu"], "ingress", "redis") == [(one, (6379,)) for one in sorted((*SERVICES, "prepare"))]
    assert allowed(rendered["cpu"], "egress", "redis") == [("outside", (53, 53))]


def test_calls_between_services_are_let_through(rendered: dict[str, Documents]) -> None:
    documents = rendered["cpu"]
    for caller, called in (
        ("learner", "generation"),
        ("coordinator", "learner"),
        ("generation", "reward"),
        ("gateway", "generation"),
    ):
        assert (called, (8001,)) in allowed(documents, "egress", caller)
        assert (caller, (8001,)) in allowed(documents, "ingress", called)


def test_gateways_and_agents_are_started_by_who_wants_them(rendered: dict[str, Documents]) -> None:
    documents = rendered["gpu"]
    for service in (GATEWAY, AGENTS):
        assert documents["Deployment", f"gspo-{service}"]["spec"]["replicas"] == 0
    assert pod(documents, "Deployment", "gspo-agents")["terminationGracePeriodSeconds"] > RunConfig().drain_timeout_s
    (container,) = pod(documents, "Deployment", "gspo-gateway")["containers"]
    # The build for CPUs: it starts without a GPU.
    assert container["image"].startswith("gspo-gateway:")
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_everything_else_is_refused(rendered: dict[str, Documents]) -> None:
    closed = rendered["cpu"]["NetworkPolicy", "gspo-nothing-else"]["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in closed
    assert "egress" not in closed


def test_generators_are_scaled_and_drained_one_at_a_time(rendered: dict[str, Documents]) -> None:
    documents = rendered["gpu"]
    scaler = documents["HorizontalPodAutoscaler", "gspo-generation"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "gspo-generation"
    # A number in the Deployment would undo the autoscaler's at every apply.
    assert "replicas" not in documents["Deployment", "gspo-generation"]["spec"]
    (metric,) = scaler["metrics"]
    # Tasks under work are entries too, and would keep a generator for each of them.
    assert metric["external"]["metric"]["name"] == metrics.STREAM_UNTAKEN._name
    assert documents["PodDisruptionBudget", "gspo-generation"]["spec"]["maxUnavailable"] == 1


def test_redis_keeps_what_is_in_flight(rendered: dict[str, Documents]) -> None:
    spec = rendered["cpu"]["StatefulSet", "gspo-redis"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"][container["args"].index("--appendonly") + 1] == "yes"
    assert spec["volumeClaimTemplates"][0]["metadata"]["name"] == "data"


def test_bad_input_ends_the_learners_job_at_once(rendered: dict[str, Documents]) -> None:
    for overlay in OVERLAYS:
        job = rendered[overlay]["Job", "gspo-learner"]["spec"]
        assert job["completionMode"] == "Indexed"
        (rule,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        assert rule["onExitCodes"]["values"] == [EXIT_BAD_INPUT]
        assert job["template"]["spec"]["terminationGracePeriodSeconds"] > RunConfig().drain_timeout_s


def test_gpus_are_asked_for_with_the_cuda_build(rendered: dict[str, Documents]) -> None:
    for service in ("generation", "learner"):
        spec = pod(rendered["gpu"], workload(service), f"gspo-{service}")
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1
        assert container["image"].startswith("gspo-engine-cuda:")
        (shared,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shared["emptyDir"]["medium"] == "Memory"


def test_prometheus_finds_every_service_by_name(rendered: dict[str, Documents]) -> None:
    documents = rendered["cpu"]
    monitor = documents["ServiceMonitor", "gspo"]["spec"]
    assert monitor["jobLabel"] == "app.kubernetes.io/name"
    for service in SERVICES:
        document = documents["Service", f"gspo-{service}"]
        assert matches(monitor["selector"], document["metadata"]["labels"])
        (port,) = [port for port in document["spec"]["ports"] if port["name"] == monitor["endpoints"][0]["port"]]
        assert port["port"] == 8000


def scraped(monitor: dict[str, Any], folder: Path, pods: dict[str, dict[str, str]]) -> set[str]:
    """Which pods are left by the monitor's relabelling, by promtool; the operator writes the same in snake case."""
    (endpoint,) = monitor["endpoints"]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    rules = [{names.get(key, key): value for key, value in rule.items()} for rule in endpoint["relabelings"]]
    targets = [{"targets": [f"{name}:8000"], "labels": labels} for name, labels in pods.items()]
    job = {"job_name": "gspo", "relabel_configs": rules, "static_configs": targets}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    command = ["promtool", "check", "service-discovery", "prometheus.yml", "gspo", "--timeout=3s"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("[") :])
    return {one["labels"]["__address__"].removesuffix(":8000") for one in found if one.get("labels")}


def test_only_the_learner_pod_of_rank_zero_is_scraped(rendered: dict[str, Documents], tmp_path: Path) -> None:
    index = "__meta_kubernetes_pod_annotation_batch_kubernetes_io_job_completion_index"
    pods = {"learner-0": {index: "0"}, "learner-1": {index: "1"}, "learner-10": {index: "10"}, "reward": {}}
    first, *others = (rendered[overlay]["ServiceMonitor", "gspo"]["spec"] for overlay in OVERLAYS)
    assert all(monitor == first for monitor in others)
    assert scraped(first, tmp_path, pods) == {"learner-0", "reward"}


def test_the_operator_is_given_the_rules_that_are_tested(rendered: dict[str, Documents], tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gspo_kubernetes", KUBERNETES / "make.py")
    assert spec
    assert spec.loader
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.WRITTEN.read_text() == make.build(), "python deploy/kubernetes/make.py writes it"
    for overlay in OVERLAYS:
        document = rendered[overlay]["PrometheusRule", "gspo"]
        assert document["apiVersion"] == "monitoring.coreos.com/v1"
        alerts = {rule["alert"] for group in document["spec"]["groups"] for rule in group["rules"] if "alert" in rule}
        deployed = "".join(path.read_text() for path in (KUBERNETES.parent / "prometheus/rules").glob("*.yml"))
        assert alerts == set(re.findall(r"- alert: (\w+)", deployed))
        (tmp_path / f"{overlay}.yml").write_text(yaml.safe_dump(document["spec"]))
        command = ["promtool", "check", "rules", str(tmp_path / f"{overlay}.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
