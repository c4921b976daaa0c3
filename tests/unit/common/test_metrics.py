"""Metric names: one family of names, base units, bounded labels; and docs/metrics.md lists exactly them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from services.common import metrics

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "metrics.md"
# Whatever grows with the run would make a time series for each of its values.
UNBOUNDED = {"group", "rollout", "prompt", "step", "run", "attempt", "entry"}
METRICS = sorted((m for m in vars(metrics).values() if isinstance(m, MetricWrapperBase)), key=lambda m: m._name)


def exposed_name(metric: MetricWrapperBase) -> str:
    """The name that Prometheus stores: a counter's ends in _total, a histogram's series begin with it."""
    return f"{metric._name}_total" if isinstance(metric, Counter) else metric._name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: str(metric._name))
def test_a_metric_follows_the_house_names(metric: MetricWrapperBase) -> None:
    assert re.fullmatch(r"gspo_[a-z_]+[a-z]", metric._name)
    assert not metric._name.endswith(("_ms", "_minutes", "_mb", "_percent"))
    assert not UNBOUNDED & set(metric._labelnames)
    assert metric._documentation[0].isupper() or metric._documentation[0].isdigit()
    assert not metric._documentation.endswith(".")


def test_every_metric_is_fed_by_some_service() -> None:
    source = "".join(path.read_text() for path in (ROOT / "services").rglob("*.py") if path.name != "metrics.py")
    declared = {name for name, metric in vars(metrics).items() if isinstance(metric, MetricWrapperBase)}
    assert declared - set(re.findall(r"metrics\.([A-Z_]+)\b", source)) == set()


def sections() -> dict[str, set[str]]:
    """Heading of the document -> the names listed below it."""
    parts = re.split(r"^## (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    return {
        heading.lower(): set(re.findall(r"^\| `(gspo_\w+)`", text, re.MULTILINE))
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_document_lists_each_metric_under_the_service_that_serves_it() -> None:
    owned = {
        service or "every service": {exposed_name(metric) for metric in found}
        for service, found in metrics.OF_SERVICE.items()
    }
    assert {heading: names for heading, names in sections().items() if names} == owned


@pytest.mark.parametrize("service", [service for service in metrics.OF_SERVICE if service])
def test_a_service_serves_what_is_its_own_and_nothing_of_the_others(service: str) -> None:
    registry = CollectorRegistry()
    registry.register(metrics.Served(service))
    text = generate_latest(registry).decode()
    served = set(re.findall(r"^# TYPE (gspo_\w+) ", text, re.MULTILINE))
    assert served == sections()["every service"] | sections()[service]
    assert "process_resident_memory_bytes" in text


def test_the_document_lists_every_metric_with_its_type_labels_and_help() -> None:
    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    expected = {
        f"| `{exposed_name(m)}` | {kinds[type(m)]} | {', '.join(m._labelnames)} | {m._documentation} |" for m in METRICS
    }
    listed = {line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `gspo_")}
    assert listed == expected
