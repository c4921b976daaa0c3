"""A service in small for tests of the supervisor: it registers, answers probes, and does what the test says.

It has no engine, scorer or trainer. The variable `FAKE` holds words:

- `learner:die` dies at once, `learner:refuse` refuses its input, `learner:hang` ignores SIGTERM.
- `learner:steps=3` trains so many steps, `learner:child` leaves a grandchild in a session of its own.
- `coordinator:deaf` takes no stop, `coordinator:late` misses the events of the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gspo.common.errors import InputError
from gspo.common.network.http_server import Receive, Scope, Send
from gspo.common.service.app import App, Service, run_app, run_process
from gspo.common.service.options import await_start, parse_options
from gspo.common.streams.events import Events
from gspo_proto.rollout_pb2 import (
    RUN_END_COMPLETED,
    RUN_END_FAILED,
    RUN_END_STOPPED,
    Event,
    Finished,
    StepDone,
    TrainingDone,
    VersionLive,
)

STEP_S = 0.05


def behaviours(service: str) -> list[str]:
    """The words for this service."""
    pairs = [pair.split(":", 1) for pair in os.environ.get("FAKE", "").split()]
    return [word for addressee, word in pairs if addressee == service]


def main() -> None:
    """`fake_service.py SERVICE <the command line of a service>`."""
    name = sys.argv.pop(1)
    words = behaviours(name)
    options = await_start(parse_options(name, lambda _config: _refuse(name), meaning="a service for tests"))
    (options.run_dir / f"{options.name}.starts").open("a").write(f"{os.getpid()} {' '.join(sys.argv[1:])}\n")
    (options.run_dir / f"{options.name}.gpus").open("a").write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    if "die" in words:
        sys.stderr.write(json.dumps({"level": "error", "reason": f"{name} was asked to die"}) + "\n")
        sys.exit(1)
    if "die-once" in words and "--resume" not in sys.argv:
        sys.stderr.write("Segmentation fault\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if "child" in words:
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (options.run_dir / "grandchild").write_text(str(sleeper.pid))
    run_process(options, lambda service: run_fake(service, words))


def _refuse(service: str) -> None:
    if "refuse-check" in behaviours(service):
        raise InputError("model.path", "is not a model", "Give one")
    if "warn-check" in behaviours(service):
        sys.stderr.write("what a library prints\nwarning: 3 of 8 prompts are skipped\n")


async def run_fake(service: Service, words: list[str]) -> None:
    """Play the part until the run ends or a signal comes."""
    if "refuse" in words:
        raise InputError("learner.deepspeed", "is refused", "Leave it out")
    if "hang" in words:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    if "late" in words:
        await asyncio.sleep(4)
    await run_app(service, lambda service: startup(service, words), ends_with_run=True)


@asynccontextmanager
async def startup(service: Service, words: list[str]) -> AsyncIterator[App]:
    """Offer the stop, and train in the background where it is the learner."""
    events = Events(service.redis, service.keys, service.options.name)
    service.http_api = StopEndpoint(events, deaf="deaf" in words)
    service.activity.set("waiting", "rewards", "of 3 groups")
    background = {"train": lambda: train(service, events, words)} if service.options.service == "learner" else {}
    yield App(lambda: wait_for_stop(service), background, sets_ready="never-ready" in words)


async def wait_for_stop(service: Service) -> None:
    """Until the service is asked to end."""
    await service.stopping.wait()


async def train(service: Service, events: Events, words: list[str]) -> None:
    """Pretend so many steps; an end, or none."""
    total = next((int(word.removeprefix("steps=")) for word in words if word.startswith("steps=")), 0)
    log = service.options.run_dir / "log"
    log.mkdir(exist_ok=True)
    (log / "step-000001.parquet").touch()
    for step in range(1, total + 1):
        await asyncio.sleep(STEP_S)
        figures = {"reward_mean": step / 10, "clipped_sequences": 0.25, "tokens_per_s": 1234.0, "step_s": STEP_S}
        await events.send(Event(step_done=StepDone(step=step, version=step, groups=[step], figures=figures)))
        await events.send(Event(version_live=VersionLive(version=step)))
    if total:
        end, reason = (RUN_END_FAILED, "every reward failed") if "fail" in words else (RUN_END_COMPLETED, "done")
        await events.send(Event(training_done=TrainingDone(step=total, version=total, reason="all steps")))
        await events.send(Event(finished=Finished(reason=reason, end=end)))
    await asyncio.sleep(3600)


class StopEndpoint:
    """Takes a stop as the coordinator does."""

    def __init__(self, events: Events, *, deaf: bool) -> None:
        self._events, self._deaf = events, deaf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/stop" and not self._deaf:
            await self._events.send(Event(finished=Finished(reason="stopped: Ctrl-C", end=RUN_END_STOPPED)))
        await _answer(send)


async def _answer(send: Send) -> None:
    head: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}
    await send(head)
    await send({"type": "http.response.body", "body": b"{}"})


if __name__ == "__main__":
    main()
