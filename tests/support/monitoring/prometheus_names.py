"""Which metrics and labels a query asks for that no service declares."""

from __future__ import annotations

import re
from collections.abc import Set

from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from gspo.common.telemetry import metrics

# Of the scrape itself, and buckets of histograms.
_ALWAYS = {"job", "instance", "le"}
_SELECTOR = re.compile(r"\b(gspo[_:][a-zA-Z0-9_:]+)(\{[^}]*\})?")


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
