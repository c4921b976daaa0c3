"""deploy/ray/gspo.sbatch on a real Slurm of two nodes: a run that loses a node, then meets a time limit.

The nightly tests run it by its name. It needs root and Debian's slurmctld, slurmd, slurm-client, munge and iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import test_kill
from tests.chaos.test_kill import EndedRun, write_input
from tests.slurm.slurm_nodes import SlurmNodes
from tests.support.cluster.ray_cluster import until

pytestmark = pytest.mark.timeout(1500)
SBATCH = Path(__file__).parents[2] / "deploy/ray/gspo.sbatch"
# The nodes have no GPUs. They have the cores of one machine.
EDITED = ("--gpus-per-node=0", "--cpus-per-task=4", "--time=60")
EPOCHS, STEPS = 64, 80


@pytest.fixture
def folder() -> Iterator[Path]:
    """On the disk that the nodes share; each has a /tmp of its own."""
    assert os.geteuid() == 0, "only root can make namespaces"
    path = Path(tempfile.mkdtemp(prefix="gspo-slurm-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_run_outlives_a_lost_node_and_a_time_limit(folder: Path) -> None:
    config, output = write_input(folder, EPOCHS, generation={"replicas": 2}), folder / "job.out"
    log = folder / "runs/chaos/log"
    with SlurmNodes(folder, ("n1", "n2"), cpus=4) as nodes:

        def submit() -> str:
            path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
            words = ("sbatch", "--parsable", f"--chdir={folder}", f"--output={output}", *EDITED)
            return nodes.login("env", path, *words, str(SBATCH), str(config))

        def is_now(job: str, state: str) -> bool:
            return f"JobState={state} " in nodes.login("scontrol", "show", "job", job)

        def last_step() -> int:
            return len(list(log.glob("step-*.parquet")))

        def await_step(step: int) -> None:
            until(lambda: last_step() >= step, f"step {step}", 400.0)
            assert last_step() < STEPS

        job = submit()
        await_step(2)
        nodes.lose("n2")
        until(lambda: is_now(job, "PENDING"), "the requeue", 120.0)
        nodes.start("n2")
        before = last_step()
        nodes.login("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets it wait for two minutes
        await_step(before + 2)
        nodes.login("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        until(lambda: is_now(job, "TIMEOUT"), "the time limit", 180.0)
        job = submit()
        until(lambda: is_now(job, "COMPLETED"), "the end", 600.0)
    printed = output.read_text()
    # By address, in the table of processes.
    assert len(set(re.findall(r"^generation-\d +(\S+)", printed, re.MULTILINE))) == 2, printed
    ended = EndedRun(log.parent, printed, 0, test_kill.NUM_PROMPTS * EPOCHS)
    assert [line["step"] for line in ended.lines("metrics.jsonl")] == list(range(1, STEPS + 1))
    test_kill.test_every_group_is_settled_once_and_no_rollout_is_trained_twice(ended)
