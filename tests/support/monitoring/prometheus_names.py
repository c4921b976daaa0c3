"""What the panels of the dashboards ask for, and the metrics and labels of a query that no service declares."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from functools import cache
from pathlib import Path

from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from gspo.common.telemetry import metrics

DASHBOARDS = Path(__file__).parents[3] / "deploy/grafana/dashboards"
# The row of figures that single answers do not have.
CONVERSATIONS = "How do conversations go?"

# Of the scrape itself, and buckets of histograms.
_ALWAYS = {"job", "instance", "le"}
_SELECTOR = re.compile(r"\b(gspo[_:][a-zA-Z0-9_:]+)(\{[^}]*\})?")


@cache
def _series() -> dict[str, set[str]]:
    """Series -> its labels."""
    found: dict[str, set[str]] = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            endings = [""]
            if isinstance(metric, Counter):
                endings = ["_total"]
            elif isinstance(metric, Histogram):
                endings = ["_bucket", "_sum", "_count"]
            found |= {f"{metric._name}{ending}": set(metric._labelnames) for ending in endings}
    return found


def unknown_names(query: str, recorded: Set[str]) -> list[str]:
    """Names in a query that are no series of ours and no recorded rule, and labels that a series does not have."""
    series, found = _series(), []
    for name, selector in _SELECTOR.findall(query):
        if name in recorded:
            continue
        if name not in series:
            found.append(name)
            continue
        labels = set(re.findall(r"(\w+)\s*[=!]~?\s*\"", selector))
        found += [f"{name}{selector}: {label}" for label in sorted(labels - series[name] - _ALWAYS)]
    return found


def panel_queries(of_conversations: bool) -> dict[str, str]:
    """'dashboard: question letter' -> query, of the row on conversations, or of all other rows."""
    queries: dict[str, str] = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        row = ""
        for panel in json.loads(path.read_text())["panels"]:
            row = panel["title"] if panel["type"] == "row" else row
            if (row == CONVERSATIONS) is of_conversations:
                queries |= {f"{path.stem}: {panel['title']} {t['refId']}": t["expr"] for t in panel.get("targets", ())}
    return queries
