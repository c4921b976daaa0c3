"""Prometheus' rules: they load, each fires in one test and is silent in another, and a page says what to do.

What it is not: a run that is watched (tests/integration/run/test_observed_run.py).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gspo.common.telemetry import metrics
from gspo.common.telemetry.advice import RULES as RULES_ON_LEARNING
from tests.conftest import free_port
from tests.support.monitoring.prometheus_names import unknown_names
from tests.support.monitoring.prometheus_server import Prometheus
from tests.support.repository.source_files import ROOT, fail_with, place, text_of

RULES = ROOT / "deploy/prometheus/rules"
OPERATIONS = (ROOT / "docs/operations.md").read_text()
GROUPS: list[dict[str, Any]] = [
    group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]
]
ALERTS: dict[str, dict[str, Any]] = {r["alert"]: r for group in GROUPS for r in group["rules"] if "alert" in r}
RECORDED = {r["record"] for group in GROUPS for r in group["rules"] if "record" in r}
TESTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/prometheus/alerts.yml").read_text())["tests"]


def where(rule: str) -> str:
    """Return `file:line` of the rule of a name."""
    text = re.compile(rf"(alert|record): {rule}$", re.MULTILINE)
    return next(place(path, found[0]) for path in sorted(RULES.glob("*.yml")) if (found := text.search(text_of(path))))


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration_and_every_rule() -> None:
    promtool("check", "config", "deploy/prometheus/prometheus.yml")


def test_alerts_are_sent_to_nobody_until_the_file_names_somebody(tmp_path: Path) -> None:
    """The example in the file, with its marks of a comment away, reaches a Prometheus that runs already."""
    text = (ROOT / "deploy/prometheus/alertmanagers.yml").read_text()
    assert yaml.safe_load(text) == []
    (example,) = re.findall(r"^#   (- targets: \[(.*)\])$", text, re.MULTILINE)
    prometheus = Prometheus(tmp_path / "prometheus", free_port())
    try:
        assert prometheus.alertmanagers() == []
        (tmp_path / "prometheus/alertmanagers.yml").write_text(example[0])
        deadline = time.monotonic() + 60
        while not (found := prometheus.alertmanagers()):
            assert time.monotonic() < deadline, "Prometheus did not read the file"
            time.sleep(0.2)
    finally:
        prometheus.close()
    assert found == [f"http://{example[1]}/api/v2/alerts"]


def test_the_rules_do_what_their_tests_say() -> None:
    promtool("test", "rules", "tests/prometheus/alerts.yml")


def bad_alerts(alert: str) -> Iterator[str]:
    """Yield what an alert lacks: tests as it fires and as it stays silent, and a section that says what to do."""
    cases = {
        bool(case["exp_alerts"])
        for test in TESTS
        if test["name"].startswith(f"{alert} ")
        for case in test["alert_rule_test"]
        if case["alertname"] == alert
    }
    texts = re.findall(rf"^### {alert}\n(.*?)(?=^### |\Z)", OPERATIONS, re.MULTILINE | re.DOTALL)
    rules = {
        "tests/prometheus/alerts.yml does not fire it: add a case": True in cases,
        "tests/prometheus/alerts.yml does not leave it silent: add a case": False in cases,
        "its runbook_url is not that of its section": ALERTS[alert]["annotations"]["runbook_url"]
        == f"docs/operations.md#{alert.lower()}",
        "its severity is neither page nor warning": ALERTS[alert]["labels"]["severity"] in ("page", "warning"),
        "docs/operations.md has not one section on it: write it": len(texts) == 1,
    } | {f"its section lacks **{part}:**": f"**{part}:** " in "".join(texts) for part in ("Means", "Cause", "Do")}
    yield from (rule for rule, holds in rules.items() if not holds)


def test_every_alert_is_tested_and_leads_to_what_to_do() -> None:
    fail_with(f"{where(alert)}: {alert}: {rule}" for alert in ALERTS for rule in bad_alerts(alert))


def test_no_page_is_left_of_an_alert_that_is_gone() -> None:
    assert set(re.findall(r"^### (\w+)$", OPERATIONS, re.MULTILINE)) == set(ALERTS)


def test_every_rule_asks_for_metrics_labels_and_figures_that_are_served() -> None:
    fail_with(
        f"{where(name)}: {name}: no service serves {unknown}: docs/metrics.md lists what is served"
        for group in GROUPS
        for rule in group["rules"]
        for name in [rule.get("alert") or rule["record"]]
        for text in [rule["expr"], *rule.get("annotations", {}).values()]
        for unknown in unknown_names(text, RECORDED)
    )


def test_every_recorded_series_has_its_line() -> None:
    listed = re.findall(r"^\| `(gspo:[\w:]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert set(listed) == RECORDED


def test_unknown_names_are_found() -> None:
    assert unknown_names("rate(gspo_steps[5m])", set()) == ["gspo_steps"]
    assert unknown_names('gspo_generators{stat="out"}', set()) == ['gspo_generators{stat="out"}: stat']
    assert unknown_names("gspo_rollout_seconds_bucket / gspo:x:y", {"gspo:x:y"}) == []


def test_the_page_lists_the_findings_that_the_alert_may_name() -> None:
    assert metrics.FINDING._name in ALERTS["GspoFinding"]["expr"]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*) \|", OPERATIONS, re.MULTILINE)))
    assert {rule.name for rule in RULES_ON_LEARNING} <= set(listed)
