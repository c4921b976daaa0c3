"""The whole run of several tests, with the observations during it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo.cli.reward.api_client import find_reward_service
from gspo.reward.registry.records import Content, Origin, RegisteredName, version_of
from gspo.reward.registry.sync import DiskCopy
from tests.conftest import free_port
from tests.support.gspo_run import REWARD, WholeRun, whole_run
from tests.support.monitoring.otlp_collector import collector
from tests.support.monitoring.prometheus_server import Prometheus
from tests.support.monitoring.run_observer import RunObservations
from tests.support.tiny_model import make_tiny_model

STEPS, GROUPS, SIZE = 3, 4, 4
CLIP_LOW, CLIP_HIGH, LEARNING_RATE = 0.02, 0.02, 1e-3
# Bounds of an answer's probability over that at sampling, which some of the second mini-batches leave.
BEHAVIOR_LOW, BEHAVIOR_HIGH = 0.9, 1.1


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="session")
def versions(folder: Path) -> list[str]:
    return keep_versions(folder / "runs" / ".rewards", REWARD, REWARD.replace("float(", "2.0 * float("))


@pytest.fixture(scope="session")
def watched(folder: Path) -> Iterator[RunObservations]:
    prometheus = Prometheus(folder / "prometheus", free_port())
    try:
        with collector() as spans:
            yield RunObservations(prometheus, spans)
    finally:
        prometheus.close()


@pytest.fixture(scope="session")
def run(folder: Path, versions: list[str], watched: RunObservations) -> WholeRun:
    """Three synchronous steps, watched; in the middle another version of the function becomes active."""

    def meanwhile(process: subprocess.Popen[bytes], run_dir: Path) -> None:
        def look(coordinator: str) -> None:
            find_reward_service(run_dir, None).call("POST", "/half/activate", json={"version": versions[1]})
            watched.look(folder, run_dir, coordinator)

        watched.at_rest(process, run_dir, GROUPS, look)

    with watched.scraped(folder / "runs" / "whole"):
        return whole_run(
            folder,
            make_tiny_model(folder / "model", seed=3, scale=3.0),
            meanwhile,
            reward={"functions": [{"name": "half"}]},
            algorithm={
                "rollout_batch_size": GROUPS,
                "num_return_sequences_in_group": SIZE,
                "pg_clip_low": CLIP_LOW,
                "pg_clip_high": CLIP_HIGH,
                "behavior_correction": "mask",
                "behavior_level": "product",
                "behavior_low": BEHAVIOR_LOW,
                "behavior_high": BEHAVIOR_HIGH,
            },
            learner={"learning_rate": LEARNING_RATE, "clip_split_every": 1},
            evaluation={"prompts": "eval.jsonl", "num_answers": 2, "every": 1, "keep_best": "sampled_mean"},
            tracking={"tensorboard": True},
            services={"otlp_endpoint": watched.collector.endpoint},
            run={"total_steps": STEPS},
        )


def keep_versions(folder: Path, *sources: str) -> list[str]:
    """Versions of the function `half` as they were submitted before the run, the first one active."""
    disk, versions = DiskCopy(folder), [version_of(source.encode()) for source in sources]
    for version, source in zip(versions, sources, strict=True):
        content = Content(version=version, kind="reward", source=source, entry="")
        disk.write_content(version, content.model_dump_json())
    origins = {version: Origin(by="ann", unix_s=number) for number, version in enumerate(versions)}
    half = RegisteredName(name="half", kind="reward", active=versions[0], retired=False, revision=2, versions=origins)
    disk.write_name(half)
    return versions
