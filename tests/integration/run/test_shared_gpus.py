"""A whole run on shared GPUs with real engines and two ranks, whose generator and learner are killed while it learns.

They are killed in the learner's shift, and in a second run in both.
A CPU has no GPUs: vLLM records its sleep and keeps its memory, and the learner's states move within the memory. The
protocol is that of GPUs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from gspo.common.streams.keys import Keys
from tests.support.gspo_run import WholeRun, whole_run
from tests.support.service_process import log_events
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
GROUPS, SIZE, MEASURED = 4, 4, 4
# Of the run whose services are killed in the learner's shift, and of the one with kills in both.
STEPS, STEPS_OF_BOTH = 8, 12
KEYS = Keys("whole")


class StruckRun:
    """A run in flight, and the kills of its processes.

    Attributes:
        seen: Observations between them, by name.
    """

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self._process, self._run_dir = process, run_dir
        self.seen: dict[str, Any] = {}

    def strike(self, *, in_both: bool) -> None:
        """One kill of each service in a shift or both; each when the run has recovered from the one before."""
        self.until(lambda: self._step() >= 1, "a first step")
        with Redis.from_url(self._redis_url()) as self._redis:
            self._kill_generator_while_learning()
            self._recover("generation")
            self._kill_learner_while_learning()
            self._recover("learner")
            for service in ("learner", "generation") if in_both else ():
                self.until(lambda: self._side() == "generation", "the generators' shift")
                self._process_of(service).kill()
                self._recover(service)

    def _kill_generator_while_learning(self) -> None:
        learner = self._stopped_in_its_shift()
        try:
            victim = self._process_of("generation")
            before = self._instances("generation")
            victim.kill()
            self.until(lambda: self._instances("generation").keys() - before.keys(), "another generator")
            self.until(lambda: self._newest("generation")["activity"]["what"] == "gpus", "its wait for the GPUs")
            self.seen["while waiting"] = self._newest("generation")
        finally:
            learner.send_signal(signal.SIGCONT)

    def _kill_learner_while_learning(self) -> None:
        victim = self._stopped_in_its_shift()
        victim.kill()
        self.until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, "the learner's end")
        # Its successor is still importing.
        time.sleep(1.0)
        self.seen["after the learner"] = self._side()

    def _stopped_in_its_shift(self) -> psutil.Process:
        """The learner, which stands still while it has the GPUs."""
        while True:
            self.until(lambda: self._side() == "learning", "the learner's shift")
            learner = self._process_of("learner")
            learner.send_signal(signal.SIGSTOP)
            if self._side() == "learning":
                return learner
            learner.send_signal(signal.SIGCONT)  # it ended between the two lines

    def _recover(self, service: str) -> None:
        """Two more steps, made with the successor of a killed process."""
        step = self._step() + 2
        self.until(lambda: self._step() >= step, f"step {step}, after the {service} was killed")

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, f"the run ended before {what}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            time.sleep(0.002)

    def _step(self) -> int:
        return max((int(path.stem[5:]) for path in (self._run_dir / "log").glob("step-*.parquet")), default=0)

    def _redis_url(self) -> str:
        return str(json.loads((self._run_dir / "services" / "supervisor.json").read_text())["redis_url"])

    def _side(self) -> str:
        return (self._redis.hget(KEYS.shift, "side") or b"").decode()

    def _instances(self, service: str) -> dict[str, dict[str, Any]]:
        uids = [entry.decode().partition(":")[2] for entry in self._redis.smembers(KEYS.instances)]
        texts = {uid: self._redis.get(KEYS.instance(service, uid)) for uid in uids}
        return {uid: json.loads(text) for uid, text in texts.items() if text}

    def _newest(self, service: str) -> dict[str, Any]:
        return max(self._instances(service).values(), key=lambda instance: instance["beat_unix_s"])

    def _process_of(self, service: str) -> psutil.Process:
        """The process that has registered: of the learner rank zero."""
        return psutil.Process(self._newest(service)["pid"])


@dataclass(frozen=True)
class Struck:
    """A finished run.

    Attributes:
        seen: Observations between its kills.
        starts: Those of its learner.
    """

    run: WholeRun
    seen: dict[str, Any]
    steps: int
    starts: int


@pytest.fixture(scope="module", params=[False, True], ids=["learning", "both"])
def struck(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Struck:
    folder, seen, in_both = tmp_path_factory.mktemp("shared"), dict[str, Any](), bool(request.param)
    steps = STEPS_OF_BOTH if in_both else STEPS

    def strike(process: subprocess.Popen[bytes], run_dir: Path) -> None:
        running = StruckRun(process, run_dir)
        running.strike(in_both=in_both)
        seen.update(running.seen)

    run = whole_run(
        folder,
        make_tiny_model(folder / "model", seed=3, scale=3.0),
        strike,
        placement="shared",
        algorithm={
            "preset": "grpo",
            "objective": "dppo_tv",
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": SIZE,
        },
        learner={"learning_rate": 1e-3, "ranks": 2, "zero_stage": 3},
        evaluation={"prompts": "eval.jsonl", "num_answers": 2, "every": MEASURED, "keep_best": "sampled_mean"},
        run={"total_steps": steps, "checkpoint_every": 5},
    )
    return Struck(run, seen, steps, starts=3 if in_both else 2)


def test_the_run_is_whole(struck: Struck) -> None:
    run, steps = struck.run, struck.steps
    trained = [group for step in range(1, steps + 1) for group in sorted({row["group"] for row in run.rows(step)})]
    otherwise = [line["group"] for line in run.lines("settled.jsonl")]
    assert max(Counter(trained + otherwise).values()) == 1
    assert len(trained) == steps * GROUPS
    assert [line["version"] for line in run.lines("policy.jsonl")] == list(range(steps + 1)), "a replay made other bits"


def test_after_every_wake_the_engine_serves_the_newest_policy_to_the_bit(struck: Struck) -> None:
    run, steps = struck.run, struck.steps
    figures = {line["step"]: line["figures"] for line in run.lines("metrics.jsonl")}
    for step in range(1, steps + 1):
        assert {version for row in run.rows(step) for version in row["version"]} == {step - 1}
        assert figures[step]["sigma_token"] < 1e-5, "the engine's log-probs are not the learner's"


def test_evaluations_between_steps_have_the_gpus_to_themselves(struck: Struck) -> None:
    measured = struck.run.lines("evaluations.jsonl")
    assert [line["version"] for line in measured] == [*range(0, struck.steps + 1, MEASURED)]
    assert not [line for line in measured if "newest_version" in line["figures"]]


def test_a_generator_that_starts_in_the_learners_shift_leaves_the_gpus_alone(struck: Struck) -> None:
    instance = struck.seen["while waiting"]
    assert instance["activity"]["detail"].startswith("the learner has them (step ")
    assert not instance["grpc"]


def test_a_learner_that_starts_again_puts_the_generators_to_sleep_before_it_loads_the_model(struck: Struck) -> None:
    assert struck.seen["after the learner"] == "learning", "its shift ended with it"
    events = log_events(struck.run.run_dir / "services" / "learner-0.log")
    starts = [event for event in events if event["event"] == "gpus_taken" and event["purpose"] == "loading the model"]
    # At the start of the run the generators wait for the learner.
    assert [start["num_asleep"] for start in starts] == [0, *[1] * (struck.starts - 1)]


def test_every_step_says_how_long_the_gpus_took_to_change_hands(struck: Struck) -> None:
    run, steps = struck.run, struck.steps
    measured = [line["figures"] for line in run.lines("metrics.jsonl") if "step_s" in line["figures"]]
    assert len(measured) >= steps - 2, "only a step that a successor replays has no times"
    assert all(0.0 < figures["shift_s"] < figures["step_s"] for figures in measured)
    assert "handing shared GPUs over" in (run.run_dir / "report.html").read_text()
