"""A real run as people watch it: dashboards, traces, status, and the commands of the pages, all while it went.

test_whole_run.py checks the training itself.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from itertools import pairwise

import pytest

from gspo.common.service.traces import ids_of
from gspo.common.telemetry.step_time import seconds_by_cause
from tests.integration.run.conftest import STEPS
from tests.support.gspo_run import WholeRun
from tests.support.monitoring.otlp_collector import Span
from tests.support.monitoring.prometheus_names import panel_queries
from tests.support.monitoring.run_observer import RunObservations, documented_commands

pytestmark = pytest.mark.timeout(600)
# Grafana puts four scrapes there; the run is short.
RATE_INTERVAL = "15s"


PANELS = panel_queries(of_conversations=False)


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_data_of_a_real_run(panel: str, run: WholeRun, watched: RunObservations) -> None:
    asked = PANELS[panel].replace("$__rate_interval", RATE_INTERVAL)
    result = watched.prometheus.query_range(asked, watched.began_unix_s, watched.ended_unix_s)
    values = [float(value) for series in result for _, value in series["values"]]
    assert any(math.isfinite(value) for value in values), result


def test_the_rules_are_evaluated_on_a_real_run(run: WholeRun, watched: RunObservations) -> None:
    result = watched.prometheus.query_range("gspo:step_time_share:rate5m", watched.began_unix_s, watched.ended_unix_s)
    last = {series["metric"]["cause"]: float(series["values"][-1][1]) for series in result}
    assert last["training"] > 0
    assert sum(last.values()) == pytest.approx(1)


def test_no_process_serves_what_is_another_service_s(run: WholeRun, watched: RunObservations) -> None:
    for metric, job in (
        ("gspo_step", "learner"),
        ("gspo_slots", "coordinator"),
        ("gspo_rollouts_running", "generation"),
    ):
        result = watched.prometheus.query_range(metric, watched.began_unix_s, watched.ended_unix_s)
        assert {series["metric"]["job"] for series in result} == {job}


STATIONS = [
    ("coordinator", "prompt", ""), ("generation", "queue", "generate"), ("generation", "generate", ""),
    ("reward", "queue", "score"), ("reward", "score", ""), ("learner", "wait", ""), ("learner", "train", ""),
    ("learner", "push", ""),
]  # fmt: skip


def stations(spans: list[Span]) -> dict[tuple[str, str, str], Span]:
    """(service, name, what it is the queue of) -> the span below the root; fails where two are the same."""
    below = [span for span in spans if span.parent]
    result = {(s.service.removeprefix("gspo-"), s.name, s.attributes.get("gspo.before", "")): s for s in below}
    assert len(result) == len(below)
    return result


def test_every_rollout_that_was_trained_has_its_whole_way_in_one_trace(run: WholeRun, watched: RunObservations) -> None:
    traces: dict[int, list[Span]] = defaultdict(list)
    for span in watched.collector.spans:
        traces[span.trace].append(span)
    rows = [row for step in range(1, STEPS + 1) for row in run.rows(step)]
    for row in rows:
        trace, root_id = ids_of("whole", f"{row['group']}-{row['number']}")
        spans = traces[trace]
        (root,) = [span for span in spans if not span.parent]
        assert (root.span, root.name, root.service) == (root_id, "rollout", "gspo-coordinator")
        assert {span.parent for span in spans if span is not root} == {root_id}
        result = stations(spans)
        assert set(result) == set(STATIONS)
        way = [result[station] for station in STATIONS[1:]]
        for before, after in pairwise(way):
            # Each station begins where the one before ended; a version waits until the previous one is measured.
            assert after.start_unix_s == pytest.approx(before.end_unix_s, abs=1e-3) or after.name == "push"
            assert before.start_unix_s <= before.end_unix_s <= after.end_unix_s
        assert root.start_unix_s <= result[STATIONS[0]].start_unix_s + 1e-3
        generate, score = result[STATIONS[2]], result[STATIONS[4]]
        assert generate.attributes["gspo.tokens"] == len(row["token_ids"])
        assert generate.end_unix_s == pytest.approx(row["finished_unix_s"], abs=1e-3)
        assert score.attributes["gspo.reward"] == row["reward"]


def test_all_was_seen(run: WholeRun, watched: RunObservations) -> None:
    assert watched.trouble == ""


@pytest.mark.parametrize("command", documented_commands())
def test_the_pages_commands_work_while_a_run_goes(command: str, run: WholeRun, watched: RunObservations) -> None:
    (result,) = [(code, printed) for ran, code, printed in watched.commands if ran == command]
    assert result[0] == 0, result[1]
    assert result[1].strip()


def test_status_says_what_everybody_waits_for_while_the_run_is_paused(run: WholeRun, watched: RunObservations) -> None:
    doing = {service["service"]: service for service in watched.status["services"]}
    assert set(doing) == {"coordinator", "generation", "reward", "learner"}
    assert (doing["coordinator"]["kind"], doing["coordinator"]["what"]) == ("waiting", "resume")
    assert (doing["generation"]["kind"], doing["learner"]["what"]) == ("waiting", "rollouts")
    assert 0 < doing["coordinator"]["for_s"] < 60
    last, bound = watched.status["last_step"], watched.status["bound"]
    assert sum(cause["share"] for cause in last["by_cause"]) == pytest.approx(1)
    assert bound["stage"]
    assert bound["because"]


def test_the_live_page_shows_what_each_process_uses_and_where_the_time_goes(
    run: WholeRun, watched: RunObservations
) -> None:
    *_, learner = [line for line in watched.page.splitlines() if "learner-0 " in line and " cores" in line]
    assert re.search(r"learner-0 +\d+ \w+ +[\d.]+ cores +[\d,]+ MiB +(waiting for )?[a-z]+", learner), learner
    cores, memory = learner.split(" cores")[0].split()[-1], learner.split(" MiB")[0].split()[-1]
    assert 0 <= float(cores) < 64
    assert float(memory.replace(",", "")) > 100
    assert "bound by " in watched.page
    use = r"MFU: learner [\d.]+%, whole loop [\d.]+%; trained tokens/s a GPU: [\d,]+ \(GPUs: 1\)"
    assert re.search(use, watched.page)
    assert "%" in watched.page


def test_every_second_of_a_step_has_its_cause(run: WholeRun, watched: RunObservations) -> None:
    for line in run.lines("metrics.jsonl"):
        figures = line["figures"]
        whole = figures["step_s"] + figures["checkpoint_s"] + figures["record_s"]
        assert sum(seconds_by_cause(figures).values()) == pytest.approx(whole, abs=1e-6)
    paused = [line["figures"]["wait_issue_s"] for line in run.lines("metrics.jsonl")]
    assert max(paused) > 1, "while the run was paused, the next groups were not issued"


def test_the_use_of_the_gpus_is_measured_in_every_step(run: WholeRun, watched: RunObservations) -> None:
    """On a CPU beside a matrix product: training is slower than it, and the loop slower than training."""
    steps = [line["figures"] for line in run.lines("metrics.jsonl")]
    for figures in steps:
        assert 0 < figures["mfu"] < 1
        assert figures["mfu"] < 2 * figures["learner_mfu"] < 4
        assert figures["learner_flops_per_s"] * figures["train_s"] == pytest.approx(figures["train_flops"])
        assert figures["train_flops"] > figures["generation_flops"] > 0
    assert "MFU of the whole loop" in (run.run_dir / "report.html").read_text()


def test_the_report_says_what_bounded_the_run(run: WholeRun, watched: RunObservations) -> None:
    bound = json.loads((run.run_dir / "summary.json").read_text())["bound"]
    page = (run.run_dir / "report.html").read_text()
    assert f"bound by <b>{bound['stage']}</b>" in page
    assert "waiting for groups to be issued" in page
