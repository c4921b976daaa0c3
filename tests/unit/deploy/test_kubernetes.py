"""deploy/kubernetes and the RayJob: documents against Kubernetes' own schemas, selectors against the pods' labels.

No cluster is asked. test_compose.py has the same for one machine.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
VERSION = "1.31"
Document = dict[str, Any]
POLICIES: dict[str, Document] = {
    document["metadata"]["name"]: document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes/network-policies.yaml").read_text())
}
MONITOR: Document = yaml.safe_load((DEPLOY / "kubernetes/pod-monitor.yaml").read_text())
RULE: Document = yaml.safe_load((DEPLOY / "kubernetes/prometheus-rule.yaml").read_text())
CLUSTER: Document = yaml.safe_load((DEPLOY / "ray/rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
# KubeRay adds these labels to a pod (controllers/ray/common/pod.go).
HEAD, WORKER = (
    {**group["template"]["metadata"]["labels"], "ray.io/node-type": kind, "app.kubernetes.io/name": "kuberay"}
    for kind, group in (("head", CLUSTER["headGroupSpec"]), ("worker", CLUSTER["workerGroupSpecs"][0]))
)


def matches(selector: Document, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def templates() -> list[Document]:
    return [group["template"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]


def pods() -> list[Document]:
    """The pods of the RayJob, as a Kubernetes document each."""
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gspo", **it["metadata"]}, "spec": it["spec"]}
        for it in templates()
    ]


@pytest.mark.parametrize("document", [*POLICIES.values(), *pods()])
def test_every_document_is_what_kubernetes_takes(document: Document) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_document_that_is_wrong_is_noticed() -> None:
    wrong = {**POLICIES["gspo-rest"], "spec": {"podSelektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_every_pod_is_shut_in() -> None:
    for template in templates():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("labels", [HEAD, WORKER])
def test_pods_of_the_run_reach_each_other_and_names(labels: dict[str, str]) -> None:
    inside = POLICIES["gspo-inside"]["spec"]
    assert inside["policyTypes"] == ["Ingress", "Egress"]
    assert matches(inside["podSelector"], labels)
    (rule,) = inside["ingress"]
    to_pods, to_names = inside["egress"]
    assert [matches(peer["podSelector"], labels) for peer in (*rule["from"], *to_pods["to"])] == [True, True]
    assert {port["port"] for port in to_names["ports"]} == {53}
    # No other policy opens a way out.
    assert [name for name, policy in POLICIES.items() if "egress" in policy["spec"]] == ["gspo-inside"]


def test_others_reach_the_dashboard_of_the_head_alone() -> None:
    (rule,) = POLICIES["gspo-dashboard"]["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [8265]
    selector = POLICIES["gspo-dashboard"]["spec"]["podSelector"]
    assert [matches(selector, labels) for labels in (HEAD, WORKER)] == [True, False]


def test_prometheus_reaches_the_coordinator_on_the_head() -> None:
    assert [matches(MONITOR["spec"]["selector"], labels) for labels in (HEAD, WORKER)] == [True, False]
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    rest = POLICIES["gspo-rest"]["spec"]
    assert matches(rest["podSelector"], HEAD)
    assert endpoint["portNumber"] in {port["port"] for port in rest["ingress"][0]["ports"]}
    # Alerts name services by this label.
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "coordinator"}]
    page = (DEPLOY.parent / "docs/cluster.md").read_text()
    assert f"coordinator_port: {endpoint['portNumber']}" in page


def test_the_operator_is_given_the_rules_that_are_tested(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gspo_kubernetes", DEPLOY / "kubernetes/make.py")
    assert spec
    assert spec.loader
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.WRITTEN.read_text() == make.build(), "python deploy/kubernetes/make.py writes it"
    assert (RULE["apiVersion"], RULE["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    alerts = {rule["alert"] for group in RULE["spec"]["groups"] for rule in group["rules"] if "alert" in rule}
    deployed = "".join(path.read_text() for path in (DEPLOY / "prometheus/rules").glob("*.yml"))
    assert alerts == set(re.findall(r"- alert: (\w+)", deployed))
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(RULE["spec"]))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
