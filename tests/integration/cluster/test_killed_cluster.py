"""A run on a Ray cluster of three nodes with the real engines, struck by kills of every kind, and its log afterwards.

A process, an actor, a node, the head, and the driver die, in an order by a seed. The head comes back with its state.
After the driver's death the run is resumed. Between kills, generators come and go, and nodes are drained.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gspo.cli.run.scaling import scale
from gspo.common.errors import InputError
from tests.chaos import test_kill
from tests.chaos.test_kill import EndedRun, KilledRun, write_input
from tests.support.cluster.ray_cluster import RayNodesHere, actor_of, processes_with, ray_cluster, until

pytestmark = [pytest.mark.timeout(3400), pytest.mark.long]
NUM_KILLS = int(os.environ.get("GSPO_KILLS", "50"))
SEED = int(os.environ.get("GSPO_SEED", "0"))
KINDS = ("process", "actor", "node", "drain", "driver", "head", "scale")
TARGETS = ("generation-0", "generation-1", "reward-0", "learner-0")
# More steps than pass until the last kill; each has four groups.
EPOCHS = 10 * NUM_KILLS


class ClusterRun:
    """A run on a cluster, and the kills in it."""

    def __init__(self, folder: Path, cluster: RayNodesHere) -> None:
        services: dict[str, object] = {"lease_s": 5.0, "max_restarts": 1000}
        self.config = write_input(folder, EPOCHS, generation={"replicas": 2}, services=services)
        self.folder, self._cluster, self._random = folder, cluster, random.Random(SEED)  # noqa: S311
        self._num_nodes, self.struck, self.scaled = 3, list[str](), list[str]()
        self.running = self._start()

    def _start(self) -> KilledRun:
        words = ["run", str(self.config), "--plain", "--cluster", "ray", "--resume-if-begun"]
        with (self.folder / "printed").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "gspo.cli", *words],
                env={**os.environ, **self._cluster.environment},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return KilledRun(process, self.folder / "runs" / "chaos", self.folder / "printed")

    def step(self) -> int:
        """The last logged step."""
        return len(list((self.running.run_dir / "log").glob("step-*.parquet")))

    def strike(self) -> None:
        """Kill something at random, and wait for the step after."""
        kind = self._random.choice(KINDS)
        self.struck.append(kind)
        before = self.step()
        if kind == "driver":
            self.running.process.kill()
            self.running.process.wait(30)
            until(lambda: not processes_with("gspo.", self.running.run_dir), "the end of all that the driver started")
            self.running = self._start()
        elif kind in ("node", "drain"):
            node = self._random.choice([name for name in self._cluster.names if name != "head"])
            if kind == "drain":
                self._cluster.drain(node, 120)
                until(lambda: self._cluster.has_ended(node), f"the end of {node}, with its work handed over")
            self._cluster.lose(node)
            self._cluster.add(f"n{self._num_nodes}", num_cpus=4)
            self._num_nodes += 1
        elif kind == "head":
            self._cluster.lose_head()
            time.sleep(self._random.uniform(0.0, 10.0))
            self._cluster.find_head()
        elif kind == "scale":
            with suppress(InputError):  # it starts at this moment, or the cluster has not so much
                self.scaled.append(scale(self.running.run_dir, f"generation={self._random.randint(1, 3)}"))
        else:
            self._kill_process(self._random.choice(TARGETS), with_actor=kind == "actor")
        self.running.until(lambda: self.step() > before, f"a step after {before}: {self.struck}", 300.0)

    def _kill_process(self, name: str, *, with_actor: bool) -> None:
        with suppress(psutil.Error, StopIteration):  # it starts again at this moment
            for process in processes_with(f"--name {name}", self.running.run_dir):
                (actor_of(process) if with_actor else process).kill()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndedRun]:
    """The run after all kills."""
    folder = tmp_path_factory.mktemp("cluster")
    # On a busy machine, a head takes longer to come back.
    with ray_cluster(head_s=120, head={"num_cpus": 2}, n1={"num_cpus": 4}, n2={"num_cpus": 4}) as cluster:
        run = ClusterRun(folder, cluster)
        try:
            run.running.until(lambda: run.step() >= 1, "the first step", 400.0)
            while len(run.struck) < NUM_KILLS:
                run.strike()
            run.running.process.wait(900)
        finally:
            if run.running.process.poll() is None:
                os.killpg(run.running.process.pid, signal.SIGKILL)
                run.running.process.wait(30)
        until(lambda: not processes_with("gspo.", folder), "the end of all processes")
        printed = (folder / "printed").read_text()
        number = test_kill.NUM_PROMPTS * EPOCHS
        yield EndedRun(run.running.run_dir, printed, run.running.process.returncode, number)


def test_the_run_goes_on_to_its_end(ended: EndedRun) -> None:
    assert ended.exit_code == 0, ended.printed


# The invariants of tests/chaos hold here too.
test_every_group_is_settled_once = test_kill.test_every_group_is_settled_once_and_no_rollout_is_trained_twice
test_a_replayed_version_has_its_digest = test_kill.test_a_replayed_version_has_the_digest_that_was_recorded
test_no_token_is_older_than_the_lag = test_kill.test_no_token_is_older_than_the_lag
