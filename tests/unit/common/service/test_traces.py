"""Spans of a rollout: their ids, what a real OTLP call carries, which rollouts are sampled, and that off is off.

A run whose traces are whole is in tests/integration/run/test_observed_run.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo.common.errors import InputError
from gspo.common.service.traces import SHARE_VARIABLE, Traces, ids_of
from tests.conftest import free_port
from tests.support.monitoring.otlp_collector import collector

ROOT = Path(__file__).parents[4]


def traces(endpoint: str | None, service: str = "reward") -> Traces:
    return Traces(service, name=f"{service}-0", run="demo", endpoint=endpoint)


def test_spans_of_two_services_meet_in_one_trace() -> None:
    with collector() as found:
        coordinator, reward = traces(found.endpoint, "coordinator"), traces(found.endpoint)
        reward.add("score", 7, 3, 11.0, 12.5, reward=0.5)
        coordinator.add("rollout", 7, 3, 10.0, 14.0, is_root=True, settlement="trained")
        for one in (coordinator, reward):
            one.close()
    score, root = sorted(found.spans, key=lambda span: span.start_unix_s, reverse=True)
    assert (root.service, root.name, root.trace, root.span) == ("gspo-coordinator", "rollout", *ids_of("demo", "7-3"))
    assert (score.service, score.name, score.trace, score.parent) == ("gspo-reward", "score", root.trace, root.span)
    assert (root.parent, root.attributes["gspo.settlement"]) == (0, "trained")
    assert (score.start_unix_s, score.end_unix_s) == pytest.approx((11.0, 12.5))
    assert score.attributes == {"gspo.rollout": "7-3", "gspo.reward": 0.5}


def test_ids_follow_from_run_and_rollout_alone() -> None:
    assert ids_of("demo", "7-3") == ids_of("demo", "7-3")
    others = [ids_of("demo", "7-3"), ids_of("demo", "7-4"), ids_of("demo2", "7-3"), ids_of("dem", "o7-3")]
    assert len({trace for trace, _ in others}) == len({root for _, root in others}) == len(others)


def test_a_share_is_of_whole_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, "0.25")
    with collector() as found:
        coordinator, reward = traces(found.endpoint, "coordinator"), traces(found.endpoint)
        for group in range(400):
            reward.add("score", group, 0, 1.0, 2.0)
            coordinator.add("rollout", group, 0, 0.0, 3.0, is_root=True)
        for one in (coordinator, reward):
            one.close()
    seen = {name: {span.trace for span in found.spans if span.name == name} for name in ("rollout", "score")}
    assert seen["rollout"] == seen["score"]
    assert 60 < len(seen["score"]) < 140


def test_off_imports_nothing_and_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys\n"
        "from gspo.common.service.traces import Traces\n"
        "traces = Traces('reward', name='reward-0', run='demo', endpoint=None)\n"
        "traces.add('score', 1, 2, 3.0, 4.0, reward=1.0)\n"
        "traces.close()\n"
        "assert not traces.on\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'services'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_collector_that_is_not_there_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.common.service.traces._EXPORT_S", 0.2)
    lost = traces(f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    lost.add("score", 1, 0, 1.0, 2.0)
    lost.close()
    assert time.monotonic() - began < 30, "closing waits 0.4 s for a collector; an exporter by itself, minutes"


@pytest.mark.parametrize("text", ["half", "1.5", "-0.1", "nan"])
def test_a_share_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, text)
    with pytest.raises(InputError, match=rf"OTEL_TRACES_SAMPLER_ARG: '{text}' is not a share"):
        traces("http://127.0.0.1:4317")
