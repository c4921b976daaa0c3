"""Grafana's files: made by their script, valid to Grafana's own SDK, every panel a question with unit and legends.

Their queries run against a real Prometheus in tests/integration/run/test_observed_run.py.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.monitoring.prometheus_names import unknown_names
from tests.support.repository.source_files import ROOT, fail_with, place, text_of

GRAFANA = ROOT / "deploy/grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("gspo_dashboards", GRAFANA / "make.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for themselves there
    spec.loader.exec_module(module)
    return module


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Place of every panel but the rows, and the panel."""
    for path in FILES:
        for panel in json.loads(text_of(path))["panels"]:
            if panel["type"] != "row":
                title = json.dumps(panel["title"])
                yield f"{place(path, f': {title}')}: {title}", panel


def through_the_schema(found: dict[str, Any]) -> dict[str, Any]:
    """What the SDK's types keep of a dashboard: a key that they do not know is lost, a wrong type raises."""
    register_default_plugins()
    kept: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(found), cls=JSONEncoder))
    return kept


def test_the_committed_dashboards_are_what_the_script_makes(make: ModuleType) -> None:
    assert {path.stem for path in FILES} == set(make.DASHBOARDS)
    for path in FILES:
        assert path.read_text() == make.build(path.stem), f"python deploy/grafana/make.py writes {path.name}"


def test_every_dashboard_is_valid_to_grafanas_own_schema() -> None:
    for path in FILES:
        found = json.loads(text_of(path))
        assert through_the_schema(found) == found, path.name
        assert found["uid"] == f"gspo-{path.stem}"


def test_the_schema_loses_a_key_that_grafana_does_not_know() -> None:
    found = json.loads(FILES[0].read_text())
    found["panels"][1]["quetsion"] = "?"
    assert through_the_schema(found) != found


def bad_panels(panel: dict[str, Any], source: dict[str, str]) -> Iterator[str]:
    """Yield what a panel lacks, or asks for that is not served."""
    legends = [target["legendFormat"] for target in panel["targets"]]
    rules = {
        "its title is no question: end it with ?": panel["title"].endswith("?"),
        "it has no unit: give one": panel["fieldConfig"]["defaults"]["unit"],
        "it asks for nothing: give it a query": panel["targets"],
        "a query has no legend, or that of another: name what it draws": all(legends)
        and len(set(legends)) == len(legends),
    }
    yield from (rule for rule, holds in rules.items() if not holds)
    for target in panel["targets"]:
        if target["datasource"] != source:
            yield f"its source is {target['datasource']}: {source} is provisioned"
        for name in unknown_names(target["expr"], set()):
            yield f"no service serves {name}: docs/metrics.md lists what is served"


def test_every_panel_asks_a_question_of_what_is_served_with_unit_and_legends() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    provisioned = {"type": source["type"], "uid": source["uid"]}
    fail_with(f"{where}: {rule}" for where, panel in panels() for rule in bad_panels(panel, provisioned))


@pytest.mark.parametrize(("timestamp", "ago_s"), [("0x60", 1200), ("3000x60", 600)], ids=["not ready", "ready"])
def test_a_learner_that_reads_its_model_ended_no_step_in_1970(timestamp: str, ago_s: int, tmp_path: Path) -> None:
    (query,) = [
        target["expr"]
        for panel in json.loads((GRAFANA / "dashboards/overview.json").read_text())["panels"]
        if panel["title"] == "How long ago did the last step end?"
        for target in panel["targets"]
    ]
    series = {
        'gspo_step_timestamp_seconds{instance="l:8000"}': timestamp,
        'process_start_time_seconds{instance="l:8000"}': "2400x60",
        'process_start_time_seconds{instance="r:8000"}': "3500x60",
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "60m", "exp_samples": [{"labels": "{}", "value": ago_s}]},
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_of_the_overview_follow_a_rollout() -> None:
    rows = [p["title"] for p in json.loads((GRAFANA / "dashboards/overview.json").read_text())["panels"]
            if p["type"] == "row"]  # fmt: skip
    words = ("going", "Prompts", "Generators", "Rewards", "learner", "Weights")
    assert [word for row, word in zip(rows, words, strict=True) if word in row] == list(words)


def test_the_dashboards_are_loaded_into_a_folder_of_their_own() -> None:
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/gspo.yml").read_text())["providers"]
    assert (provider["folder"], provider["type"]) == ("gspo", "file")
