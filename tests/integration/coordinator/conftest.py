"""A run directory, the coordinator as a process that has no torch, and the learner's side of the contract."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from redis.asyncio import Redis

from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from tests.integration.coordinator.peers import GeneratorPeer, LearnerPeer
from tests.support.tiny_model import make_tokenizer

ROOT = Path(__file__).parents[3]
# Of a run that `configure` writes: two batches of two groups.
NUM_SLOTS = 4
# Makes an interpreter without torch: no import finds that one module.
NO_TORCH = """
import importlib.machinery, sys
class WithoutTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, context=None):
        return [] if context and context.name == "torch" else super().find_distributions(context)
sys.meta_path[:] = [WithoutTorch if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer alone: the coordinator needs no more."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@pytest.fixture(scope="session")
def no_torch_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a Python that has no torch."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "sitecustomize.py").write_text(NO_TORCH)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "proto"), str(ROOT / "services")])
    }


@pytest.fixture
def configure(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """Writes a run directory: batches of two groups of two, max_lag 1, so four slots; returns it."""

    def write(prompts: list[dict[str, Any]] | None = None, held_out: int = 0, **changes: dict[str, Any]) -> Path:
        rows = prompts or [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(10)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "reward.py").write_text("def reward(prompts, completions, **columns):\n    return [0.0]\n")
        config: dict[str, dict[str, Any]] = {
            "model": {"path": str(model_folder)},
            "data": {"prompts": "train.jsonl"},
            "reward": {"functions": [{"path": "reward.py"}]},
            "algorithm": {
                "rollout_batch_size": 2,
                "num_return_sequences_in_group": 2,
                "num_mini_batches": 1,
                "prompt_length": 32,
                "response_length": 8,
            },
            "run": {"total_steps": 100, "start_timeout_s": 60.0},
        }
        if held_out:
            rows_held_out = [{"prompt": f"{number}+2="} for number in range(held_out)]
            (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_held_out))
            config["evaluation"] = {"prompts": "held_out.jsonl", "every": 2, "num_answers": 2}
        for section, keys in changes.items():
            config.setdefault(section, {}).update(keys)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "test", **config}))
        return tmp_path

    return write


class CoordinatorProcess:
    """Starts the process, and ends it by its pid."""

    def __init__(self, redis_url: str, env: dict[str, str]) -> None:
        self._redis_url, self._env = redis_url, env
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, run_dir: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gspo.coordinator", "--run-dir", str(run_dir)]
        command += ["--redis-url", self._redis_url, *options]
        with (run_dir / "coordinator.log").open("ab") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=out, stderr=out)
        return self.process

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)

    async def exit_code(self, timeout_s: float = 20.0) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, timeout_s)


async def http_address(redis: Redis, keys: Keys) -> str:
    """The newest coordinator's address; a killed one is still registered for a while."""
    newest, *_ = await list_instances(redis, keys, "coordinator")
    return f"http://{newest.http}"


def has_open(redis: Redis, keys: Keys, count: int = NUM_SLOTS) -> Callable[[], Awaitable[bool]]:
    """Whether so many groups are open; by default every slot's."""

    async def condition() -> bool:
        return bool(await redis.hlen(keys.open) == count)

    return condition


def waits_for_a_learner(redis: Redis, keys: Keys) -> Callable[[], Awaitable[bool]]:
    """Whether a coordinator is registered that waits for the learner."""

    async def condition() -> bool:
        coordinators = await list_instances(redis, keys, "coordinator")
        return bool(coordinators) and coordinators[0].activity["what"] == "learner"

    return condition


@pytest.fixture
def coordinator(redis_url: str, no_torch_env: dict[str, str]) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(redis_url, no_torch_env)
    yield process
    process.kill()


@pytest_asyncio.fixture(loop_scope="function")
async def learner(redis: Redis) -> AsyncIterator[LearnerPeer]:
    """A learner that answers Progress and sends the events that the test asks for."""
    peer = LearnerPeer(redis, Keys("test"))
    await peer.start()
    yield peer
    await peer.stop()


@pytest_asyncio.fixture(loop_scope="function")
async def generator(redis: Redis) -> AsyncIterator[GeneratorPeer]:
    """A registered generator that the test drives."""
    peer = GeneratorPeer(redis, Keys("test"))
    await peer.start()
    yield peer
    await peer.stop()


Until = Callable[..., Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """Waits until a condition holds, and fails with the description of the condition."""

    async def wait(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not await condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            await asyncio.sleep(0.02)

    return wait
