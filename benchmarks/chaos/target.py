"""The run under test: its Redis, its processes in their namespaces, its small disk, and whether it is well.

It injects no fault and checks no invariant.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.chaos.faulty_service import VARIABLE
from benchmarks.chaos.invariants import FinishedRun
from benchmarks.chaos.network import Network, call
from benchmarks.chaos.schedule import GENERATORS, SERVICES, Fault
from benchmarks.harness.workload import write_merged
from benchmarks.simulated.settings import Settings
from gspo.cli.processes.redis_server import free_port, redis_command, write_password
from gspo.cli.processes.supervisor import ProcessSupervisor, Program
from gspo.common.config.loading import read_config
from gspo.common.streams.entries import entry_kinds, read_entry
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys, consumer_groups
from tests.support.tiny_model import make_tiny_model

NAME = "chaos"
GROUPS, SIZE, MAX_LAG, MAX_ATTEMPTS = 6, 4, 1, 5
_SECRET = "a-secret-of-the-chaos"  # noqa: S105 - of a Redis for minutes
# A signal stops the run long before this.
_ENDLESS = 1_000_000
_STEPS_AFTERWARDS = 3
_DISK_MB = 256
_START_S, _END_S = 150.0, 120.0
# Steps after a fault until the run counts as well again: the first may have been in flight.
_STEPS_UNTIL_WELL = 2
SIMULATED = Settings(
    decode_s=0.01, decode_s_per_request=1e-4, length_median=16, length_sigma=0.6, train_s=0.15, load_s=0.02
)
# It hangs while a file is there: `reads` lets the sandbox see it.
_REWARD = """
import os, time
def reward(prompts, completions, **columns):
    if os.path.exists({file!r}):
        time.sleep(3600)
    return [float(c[0]["content"][:1] < "P") for c in completions]
"""


class RunUnderTest:
    """One run, from its start to its end by itself.

    Args:
        folder: Everything is in it; the run directory is on a disk of its own where there is a network.
        with_network: False leaves all processes on loopback, as `gspo run` does, and the disk as it is.
        lasts_s: Seconds of training after which the run ends by itself; None ends it by Ctrl-C, a resume, and the last
            of a few steps.
        sections: Of the configuration, whose keys go over those here.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        with_network: bool,
        lasts_s: float | None = None,
        sections: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self._lasts_s, self._sections = lasts_s, sections or {}
        self.folder, self.faults, self._seed = folder, folder / "faults", seed
        self.network = Network(SERVICES) if with_network else None
        self.disk = folder / "disk"
        self.run_dir, self.keys = self.disk / NAME, Keys(NAME)
        self.longest: Counter[str] = Counter()
        self._cli: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> RunUnderTest:
        for folder in (self.faults, self.disk):
            folder.mkdir(parents=True, exist_ok=True)
        if self.network:
            self._resources.enter_context(self.network.up())
            call("mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(self.disk))
            self._resources.callback(call, "umount", "-l", str(self.disk))
        await self._start_redis()
        self._write_config(
            {"total_steps": _ENDLESS} if self._lasts_s is None else {"total_hours": self._lasts_s / 3600}
        )
        self._resources.push_async_callback(self._end_by_force)
        await self._start_run()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._resources.aclose()

    @property
    def step(self) -> int:
        """Steps recorded so far."""
        with suppress(FileNotFoundError):
            return (self.run_dir / "log" / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def fault_file(self, fault: Fault) -> Path:
        """The file that makes a service of faulty_service.py, or the reward function, have a fault."""
        return self.faults / "-".join((fault.verb, *fault.targets))

    def pid(self, name: str) -> int | None:
        """The process of this name that runs; None while there is none."""
        if name == "redis":
            return self._supervisor.children["redis"].pid
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "--name" in words and words[words.index("--name") + 1] == name and str(self.run_dir) in words:
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        return int(process.pid)
        return None

    async def wait_until_well(self, since_step: int, timeout_s: float) -> str:
        """Empty once every process runs, every generator has the newest weights and steps follow; else the problem."""
        deadline = time.monotonic() + timeout_s
        while problem := await self._problem(since_step):
            if self._cli is not None and self._cli.returncode is not None:
                return f"`gspo run` ended with exit code {self._cli.returncode}"
            if time.monotonic() > deadline:
                return problem
            await asyncio.sleep(0.2)
        return ""

    async def finish(self) -> FinishedRun:
        """Wait until the run ends by itself, or end it; its remains."""
        exit_code = await self._end()
        if self._watching is not None and self._watching.done():
            self._watching.result()  # raises the error that ended it
        in_redis = {
            "open": await self.redis.hlen(self.keys.open),
            "partial": await self.redis.hlen(self.keys.partial),
            "dead": await self.redis.xlen(self.keys.dead),
        }
        on_their_way = set()
        for stream, kind in entry_kinds(self.keys).items():
            entries: Any = await self.redis.xrange(stream)
            for _, fields in entries:
                message = read_entry(kind, fields[b"d"])
                if hasattr(message, "failure"):
                    is_rollout = message.WhichOneof("what") == "rollout"
                    message = message.rollout.rollout if is_rollout else message.failure
                on_their_way.add(int(message.group))
        config = read_config(self.folder / "config.yaml")
        return FinishedRun(self.run_dir, config, exit_code, in_redis, dict(self.longest), frozenset(on_their_way))

    async def _end(self) -> int:
        assert self._cli is not None
        if self._lasts_s is not None:
            return await asyncio.wait_for(self._cli.wait(), self._lasts_s + _END_S)
        self._cli.send_signal(signal.SIGINT)
        stopped = await asyncio.wait_for(self._cli.wait(), _END_S)
        self._write_config({"total_steps": self.step + _STEPS_AFTERWARDS})
        await self._start_run("--resume")
        ended = await asyncio.wait_for(self._cli.wait(), _START_S + _END_S)
        # The first was stopped by the user, which has a code of its own.
        return ended or (0 if stopped in (0, 130) else stopped)

    async def _problem(self, since_step: int) -> str:
        if self.step < since_step + _STEPS_UNTIL_WELL:
            return f"{self.step - since_step} steps since"
        try:
            instances = {instance.name: instance for instance in await list_instances(self.redis, self.keys)}
        except (RedisError, OSError) as error:
            return f"Redis: {error}"
        for name in SERVICES:
            is_open = name in instances and (instances[name].grpc or name.startswith("coordinator"))
            if not is_open or instances[name].pid != self.pid(name):
                return f"{name} does not run"
        known = instances["learner-0"].facts["generators"]
        behind = [replica["name"] for replica in known if replica["state"] == "out" or replica["num_failures"]]
        return f"generators: {behind or known}" if len(known) < len(GENERATORS) or behind else ""

    async def _start_redis(self) -> None:
        port, address = free_port(), self.network.outside if self.network else "127.0.0.1"
        data = self.disk / "redis"
        data.mkdir()
        command = redis_command(address, port, data, write_password(data, _SECRET))
        self._supervisor = await self._resources.enter_async_context(
            ProcessSupervisor(self.folder / "logs", 1000, print)
        )
        self._supervisor.start([Program("redis", tuple(command))])
        self.redis_url = f"redis://{address}:{port}/0"
        self.redis = Redis.from_url(
            self.redis_url, protocol=2, password=_SECRET, socket_timeout=2, socket_connect_timeout=2
        )
        self._resources.push_async_callback(self.redis.aclose)
        self._watching = asyncio.create_task(self._watch_streams())
        self._resources.callback(self._watching.cancel)
        async with asyncio.timeout(20):
            while True:
                with suppress(RedisError, OSError):
                    await self.redis.ping()
                    return
                await asyncio.sleep(0.05)

    async def _watch_streams(self) -> None:
        """Remember the largest length of each stream."""
        while True:
            with suppress(RedisError, OSError):
                for stream in consumer_groups(self.keys):
                    name = stream.rpartition(":")[2]
                    self.longest[name] = max(self.longest[name], await self.redis.xlen(stream))
            await asyncio.sleep(0.5)

    async def _start_run(self, *options: str) -> None:
        config = str(self.folder / "config.yaml")
        words = [sys.executable, "-m", "benchmarks.chaos.launcher", config, "--plain", *options]
        network = self.network
        places = {name: (network.address(name), network.inside(name, ())) for name in SERVICES} if network else {}
        environment = {
            **os.environ,
            **SIMULATED.to_environment(),
            VARIABLE: str(self.faults),
            "GSPO_CHAOS_PLACES": json.dumps(places),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "run.log").open("ab") as log:
            self._cli = await asyncio.create_subprocess_exec(
                *words, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def _end_by_force(self) -> None:
        if self._cli is not None and self._cli.returncode is None:
            with suppress(ProcessLookupError):
                self._cli.kill()  # its guard ends the services
            await self._cli.wait()
            await asyncio.sleep(1.0)

    def _write_config(self, length: dict[str, float]) -> None:
        if not (self.folder / "model").exists():
            make_tiny_model(self.folder / "model", seed=3)
            records = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}]} for n in range(40)]
            (self.folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            (self.folder / "reward.py").write_text(_REWARD.format(file=str(self.faults / "hang")))
            (self.folder / "token").write_text(f"{_SECRET}\n")
        config: dict[str, Any] = {
            "name": NAME,
            "seed": self._seed,
            "model": {"path": "model"},
            "data": {"prompts": "prompts.jsonl"},
            "reward": {
                "functions": [{"path": "reward.py", "reads": ["faults"], "timeout_s": 1.0}],
                "replicas": 2,
                "batch_size": 8,
                "max_failure_share": 1.0,
            },
            "algorithm": {
                "rollout_batch_size": GROUPS,
                "num_return_sequences_in_group": SIZE,
                "prompt_length": 64,
                "response_length": 64,
                "num_mini_batches": 1,
                "max_refill": 1000,
            },
            "staleness": {"max_lag": MAX_LAG, "group_deadline_s": 30.0, "max_attempts": MAX_ATTEMPTS},
            "generation": {"max_rollouts": 32, "replicas": 2, "push_timeout_s": 5.0, "kv_cache_gb": 0.01},
            "run": {
                "directory": "disk",
                **length,
                "checkpoint_every": 10,
                "start_timeout_s": _START_S,
                "drain_timeout_s": 30.0,
            },
            "services": {
                "redis_url": self.redis_url,
                "token_file": "token",
                "redis_password_file": "token",
                "lease_s": 3.0,
                "max_restarts": 1000,
            },
        }
        write_merged(self.folder, config, self._sections)
