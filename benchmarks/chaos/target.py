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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.chaos.harness.disk import small_disk
from benchmarks.chaos.harness.faulty_service import VARIABLE
from benchmarks.chaos.harness.launcher import IS_SIMULATED, PLACES, Place
from benchmarks.chaos.harness.network import Network
from benchmarks.chaos.harness.redis_proxy import REDIS_HOST, Route, command
from benchmarks.chaos.invariants import FinishedRun
from benchmarks.chaos.schedule import ALL, REDIS, Fault, services
from benchmarks.chaos.workloads import SIMULATED, Workload
from benchmarks.harness.child_process import process_tree
from benchmarks.harness.workload import write_merged
from benchmarks.simulated.settings import Settings
from gspo.cli.processes.child import Program
from gspo.cli.processes.redis_server import free_port, redis_command, write_password
from gspo.cli.processes.supervisor import ProcessSupervisor
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
_DISK_MB = 512
_START_S, _END_S = 600.0, 300.0
_LOOK_EVERY_S = 0.5
# Steps after a fault until the run counts as well again: the first may have been in flight.
_STEPS_UNTIL_WELL = 2
SIMULATION = Settings(
    decode_s=0.01, decode_s_per_request=1e-4, length_median=16, length_sigma=0.6, train_s=0.15, load_s=0.02
)
_PROXY, _PROXY_SOURCES = "redis-proxy", "127.0.0.{}"
# Of the services, those without a gRPC server.
_WITHOUT_GRPC = ("coordinator", "gateway", "agents")


class RunUnderTest:
    """One run, from its start to its end.

    Args:
        folder: Everything is in it.
        with_network: Puts each process into a network of its own; else all are on loopback, as in `gspo run`.
        with_disk: Puts the run directory on a small disk of its own; by default where there is a network.
        sections: Those of the configuration, whose keys go over those of the workload.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        with_network: bool,
        with_disk: bool | None = None,
        workload: Workload = SIMULATED,
        sections: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.workload, self._sections = workload, {**workload.sections, **(sections or {})}
        self.services = services(workload.processes)
        self.folder, self.faults, self._seed = folder, folder / "faults", seed
        self.network = Network(self.services) if with_network else None
        self._has_disk = with_network if with_disk is None else with_disk
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
        if self._has_disk:
            self._resources.enter_context(small_disk(self.disk, _DISK_MB))
        self._write_files()
        await self._start_redis()
        self._write_config(_ENDLESS)
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
        return self._supervisor.children[REDIS].pid if name == REDIS else self._running().get(name)

    def pids(self, name: str) -> list[int] | None:
        """The process of this name with its children, or all processes of the run; None while there is none."""
        parents = [self._cli.pid if self._cli else None, self.pid(REDIS)] if name == ALL else [self.pid(name)]
        running = [pid for pid in parents if pid is not None]
        return [process.pid for pid in running for process in process_tree(pid)] or None

    def redis_source(self, name: str) -> str:
        """The address from which Redis sees a service."""
        return _PROXY_SOURCES.format(10 + self.services.index(name))

    def _running(self) -> dict[str, int]:
        """The processes of this run by name."""
        running: dict[str, int] = {}
        with suppress(psutil.Error):
            # Not deeper: a fork has the command line of its parent.
            for process in psutil.Process(self._cli.pid).children() if self._cli else ():
                with suppress(psutil.Error):
                    words = process.cmdline()
                    if "--name" in words and str(self.run_dir) in words:
                        running[words[words.index("--name") + 1]] = process.pid
        return running

    async def wait_until_well(self, since_step: int, timeout_s: float) -> str:
        """Empty once every process runs, every generator has the newest weights and steps follow; else the problem."""
        deadline = time.monotonic() + timeout_s
        while problem := await self._problem(since_step):
            if self._cli is not None and self._cli.returncode is not None:
                return f"`gspo run` ended with exit code {self._cli.returncode}"
            if time.monotonic() > deadline:
                return problem
            await asyncio.sleep(_LOOK_EVERY_S)
        return ""

    async def finish(self) -> FinishedRun:
        """End the run by Ctrl-C, resume it, and wait for the last of a few steps; its remains."""
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
        keys: Any = await self.redis.hkeys(self.keys.partial)
        rollouts = tuple(sorted(key.decode() for key in keys))
        lengths, groups = dict(self.longest), frozenset(on_their_way)
        return FinishedRun(self.run_dir, config, exit_code, in_redis, lengths, groups, rollouts)

    async def _end(self) -> int:
        assert self._cli is not None
        self._cli.send_signal(signal.SIGINT)
        stopped = await asyncio.wait_for(self._cli.wait(), _END_S)
        self._write_config(self.step + _STEPS_AFTERWARDS)
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
        running = self._running()
        for name in self.services:
            is_open = name in instances and (instances[name].grpc or name.startswith(_WITHOUT_GRPC))
            if not is_open or instances[name].pid != running.get(name):
                return f"{name} does not run"
        known = instances["learner-0"].facts["generators"]
        num_generators = len(self.workload.processes["generation"])
        behind = [replica["name"] for replica in known if replica["state"] == "out" or replica["num_failures"]]
        return f"generators: {behind or known}" if len(known) < num_generators or behind else ""

    async def _start_redis(self) -> None:
        port = free_port()
        data = self.disk / "redis"
        data.mkdir()
        started = redis_command(REDIS_HOST, port, data, write_password(data, _SECRET))
        self._supervisor = await self._resources.enter_async_context(
            ProcessSupervisor(self.folder / "logs", 1000, print)
        )
        outside = self.network.outside if self.network else REDIS_HOST
        self._routes = [Route(name, outside, free_port(), self.redis_source(name)) for name in self.services]
        proxy = Program(_PROXY, command(self.faults, self._routes, port))
        self._supervisor.start([Program(REDIS, tuple(started)), proxy])
        self.redis_url = f"redis://{REDIS_HOST}:{port}/0"
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
        words = [sys.executable, "-m", "benchmarks.chaos.harness.launcher", config, "--plain", *options]
        network = self.network
        places = {
            route.name: Place(
                network.address(route.name) if network else "",
                network.inside(route.name, ()) if network else (),
                f"redis://{route.host}:{route.port}/0",
            )
            for route in self._routes
        }
        environment = {
            **os.environ,
            **SIMULATION.to_environment(),
            VARIABLE: str(self.faults),
            PLACES: json.dumps({name: asdict(place) for name, place in places.items()}),
            IS_SIMULATED: "1" if self.workload.is_simulated else "",
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

    def _write_files(self) -> None:
        make_tiny_model(self.folder / "model", seed=3, scale=1.0 if self.workload.is_simulated else 3.0)
        records = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}]} for n in range(40)]
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for name, content in self.workload.files.items():
            (self.folder / name).write_text(content.format(file=str(self.faults / "hang")))
        (self.folder / "token").write_text(f"{_SECRET}\n")

    def _write_config(self, total_steps: int) -> None:
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
            "generation": {
                "max_rollouts": 32,
                "replicas": 2,
                "push_timeout_s": 5.0,
                "kv_cache_gb": 0.01,
                "checksums_every": 1,
            },
            "run": {
                "directory": "disk",
                "total_steps": total_steps,
                "checkpoint_every": 10,
                "start_timeout_s": _START_S,
                "drain_timeout_s": 60.0,
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
