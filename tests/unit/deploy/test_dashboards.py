"""Grafana's files: made by their script, valid to Grafana's own SDK, every panel a question with unit and legends.

Their queries run against a real Prometheus in tests/integration/run/test_observed_run.py.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.monitoring.prometheus_names import unknown_names

ROOT = Path(__file__).parents[3]
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


def panels() -> list[Any]:
    """Every panel but the rows."""
    return [
        pytest.param(panel, id=f"{path.stem}: {panel['title']}")
        for path in FILES
        for panel in json.loads(path.read_text())["panels"]
        if panel["type"] != "row"
    ]


def through_the_schema(found: dict[str, Any]) -> dict[str, Any]:
    """What the SDK's types keep of a dashboard: a key that they do not know is lost, a wrong type raises."""
    register_default_plugins()
    kept: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(found), cls=JSONEncoder))
    return kept


def test_the_committed_dashboards_are_what_the_script_makes(make: ModuleType) -> None:
    assert {path.stem for path in FILES} == set(make.DASHBOARDS)
    for path in FILES:
        assert path.read_text() == make.build(path.stem), f"python deploy/grafana/make.py writes {path.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_a_dashboard_is_valid_to_grafanas_own_schema(path: Path) -> None:
    found = json.loads(path.read_text())
    assert through_the_schema(found) == found
    assert found["uid"] == f"gspo-{path.stem}"


def test_the_schema_loses_a_key_that_grafana_does_not_know() -> None:
    found = json.loads(FILES[0].read_text())
    found["panels"][1]["quetsion"] = "?"
    assert through_the_schema(found) != found


@pytest.mark.parametrize("panel", panels())
def test_a_panel_asks_a_question_with_unit_and_legends(panel: dict[str, Any]) -> None:
    assert panel["title"].endswith("?")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert all(target["legendFormat"] for target in panel["targets"])
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)


@pytest.mark.parametrize("panel", panels())
def test_a_panel_asks_for_what_is_served_at_the_source_that_is_provisioned(panel: dict[str, Any]) -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    for target in panel["targets"]:
        assert target["datasource"] == {"type": source["type"], "uid": source["uid"]}
        assert unknown_names(target["expr"], set()) == []


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
