"""Writes prometheus-rule.yaml: `python deploy/kubernetes/make.py`, after a change of deploy/prometheus/rules.

A test compares what is there with what this makes.
"""

from __future__ import annotations

from pathlib import Path

import yaml

RULES = Path(__file__).parents[1] / "prometheus/rules"
WRITTEN = Path(__file__).parent / "prometheus-rule.yaml"
_HEAD = """\
# For the Prometheus operator: the rules of deploy/prometheus/rules. Made by
# deploy/kubernetes/make.py; change them there.
"""


def build() -> str:
    """The document, as YAML."""
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gspo"},
        "spec": {"groups": groups},
    }
    return _HEAD + yaml.safe_dump(rule, sort_keys=False, width=120)


if __name__ == "__main__":
    WRITTEN.write_text(build())
