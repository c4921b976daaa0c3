"""Metric names: one family of names, base units, bounded labels; and docs/metrics.md lists exactly them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from gspo.common.service.traces import Traces
from gspo.common.telemetry import metrics
from gspo.common.telemetry.step_time import CAUSES
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.intake import UntrainedGroups
from gspo.learner.step_report import StepClock, StepPhase, export_figures
from tests.support.repository.source_files import ROOT, fail_with, place, text_of

DOCUMENT = ROOT / "docs" / "metrics.md"
# Labels that grow with the run would make a time series for each of their values.
UNBOUNDED = {"group", "rollout", "prompt", "step", "run", "attempt", "entry"}
METRICS = sorted((m for m in vars(metrics).values() if isinstance(m, MetricWrapperBase)), key=lambda m: m._name)


def exposed_name(metric: MetricWrapperBase) -> str:
    """The name that Prometheus stores: a counter's ends in _total, a histogram's series begin with it."""
    return f"{metric._name}_total" if isinstance(metric, Counter) else metric._name


def bad_metrics(metric: MetricWrapperBase) -> Iterator[str]:
    """Yield what in a metric's name, labels or help is not as in the others."""
    name, meaning = metric._name, metric._documentation
    if not re.fullmatch(r"gspo_[a-z_]+[a-z]", name):
        yield "its name is not gspo_ and words in lower case"
    if name.endswith(("_ms", "_minutes", "_mb", "_percent")):
        yield "its unit is no base unit: use seconds, bytes or a ratio"
    if unbounded := UNBOUNDED & set(metric._labelnames):
        yield f"the labels {unbounded} grow with the run: take them out"
    if not (meaning[0].isupper() or meaning[0].isdigit()) or meaning.endswith("."):
        yield f"its help begins with a capital and has no full stop: {meaning}"


def test_every_metric_follows_the_house_names() -> None:
    page = "services/gspo/common/telemetry/metrics.py"
    fail_with(
        f"{place(page, metric._name.removeprefix('gspo_'))}: {metric._name}: {problem}"
        for metric in METRICS
        for problem in bad_metrics(metric)
    )


def test_a_metric_of_another_kind_is_found() -> None:
    registry = CollectorRegistry()
    assert len([*bad_metrics(Gauge("gspo_Step_ms", "the step.", ["rollout"], registry=registry))]) == 4


def test_every_metric_is_fed_by_some_service() -> None:
    source = "".join(text_of(path) for path in (ROOT / "services").rglob("*.py") if path.name != "metrics.py")
    declared = {name for name, metric in vars(metrics).items() if isinstance(metric, MetricWrapperBase)}
    assert declared - set(re.findall(r"metrics\.([A-Z_]+)\b", source)) == set()


def sections() -> dict[str, set[str]]:
    """Heading of the document -> the names listed below it."""
    parts = re.split(r"^## (.+)$", text_of(DOCUMENT), flags=re.MULTILINE)[1:]
    return {
        heading.lower(): set(re.findall(r"^\| `(gspo_\w+)`", text, re.MULTILINE))
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def served_names(registry: CollectorRegistry) -> set[str]:
    """The exposed names of our metrics in a registry."""
    return set(re.findall(r"^# TYPE (gspo_\w+) ", generate_latest(registry).decode(), re.MULTILINE))


def test_the_document_lists_each_metric_under_the_service_that_serves_it() -> None:
    registries = {"every service": metrics.SHARED, **metrics.BY_SERVICE}
    owned = {heading: served_names(registry) for heading, registry in registries.items()}
    assert {heading: names for heading, names in sections().items() if names} == owned


def test_a_service_serves_what_is_its_own_and_nothing_of_the_others() -> None:
    for service in metrics.BY_SERVICE:
        registry = metrics.served_by(service)
        assert served_names(registry) == sections()["every service"] | sections()[service], service
        assert "process_resident_memory_bytes" in generate_latest(registry).decode(), service


def test_the_document_lists_every_metric_with_its_type_labels_and_help() -> None:
    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    expected = {
        f"| `{exposed_name(m)}` | {kinds[type(m)]} | {', '.join(m._labelnames)} | {m._documentation} |" for m in METRICS
    }
    listed = {line for line in text_of(DOCUMENT).splitlines() if line.startswith("| `gspo_")}
    assert listed == expected


def explained_figures() -> tuple[set[str], tuple[str, ...]]:
    """Figures of a step with a meaning in the documents: whole names, and beginnings of names that end in _."""
    names: set[str] = set()
    for table in re.findall(r"^\| figure \| meaning \|\n.*?\n\n", text_of(DOCUMENT), re.MULTILINE | re.DOTALL):
        for line in table.strip().splitlines()[2:]:
            words = re.findall(r"`(\w+)`", line.split("|")[1])
            whole = {word for word in words if not word.startswith("_")}
            # `reward_mean`, `_std`; `clipped_sequences`, also with `_low`
            endings = [word for word in words if word.startswith("_")]
            names |= whole | {
                f"{base}{end}" for one in whole for base in (one, one.rpartition("_")[0]) for end in endings
            }
    return names, tuple(name for name in names if name.endswith("_"))


def test_every_figure_of_a_step_has_a_meaning() -> None:
    clock = StepClock(Traces("learner", name="learner-0", run="r", endpoint=None))
    clock.begin([], waited_since_s=0.0, live_unix_s=0.0, evaluated_unix_s=0.0)
    for phase in StepPhase:
        clock.end_phase(phase)
    used = {
        *clock.end_step(1),
        *UntrainedGroups().take_metrics(),
        *(name for names, _ in CAUSES.values() for name in names),
    }
    for path in [*ROOT.glob("deploy/prometheus/rules/*.yml"), ROOT / "deploy/grafana/dashboards/learning.json"]:
        used |= set(re.findall(r'figure=\\?"(\w+)\\?"', text_of(path)))
    used |= set(row_metrics([], 1))
    names, beginnings = explained_figures()
    assert {name for name in used if name not in names and not name.startswith(beginnings)} == set()


def test_figures_of_sources_have_the_source_as_a_label() -> None:
    figures = {"tokens": 7.0, "sequences": 2.0, "source_a_b/reward_mean": 0.25, "source_c/groups": 3.0}
    export_figures(figures, ["a_b", "c", "d"])
    served = generate_latest(metrics.served_by("learner")).decode()
    assert 'gspo_source_figure{figure="reward_mean",source="a_b"} 0.25' in served
    assert 'gspo_source_figure{figure="groups",source="c"} 3.0' in served
    assert 'gspo_step_figure{figure="tokens"} 7.0' in served
    assert 'source="d"' not in served and 'figure="source_' not in served
