"""`ray job submit` of a run with real engines to a cluster, beside a job of others, as docs/cluster.md has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.test_kill import write_input
from tests.support.cluster.ray_cluster import RayNodesHere, processes_with, ray_cluster, until

pytestmark = [pytest.mark.timeout(1500), pytest.mark.long]
# An actor of theirs has a CPU, and is asked again and again until a file is there.
FOREIGN = """
import pathlib, sys, time
import ray

ray.init()
counter = ray.remote(num_cpus=1)(type("Counter", (), {"count": lambda self: 1})).remote()
begun, stop = map(pathlib.Path, sys.argv[1:])
while not stop.exists():
    ray.get(counter.count.remote(), timeout=60)
    begun.touch()
    time.sleep(0.2)
"""


def submit(cluster: RayNodesHere, *words: str) -> subprocess.Popen[str]:
    """`ray job submit -- WORDS`, which follows the job to its end."""
    command = [
        str(Path(sys.executable).with_name("ray")),
        "job",
        "submit",
        "--address",
        cluster.dashboard,
        "--",
        *words,
    ]
    return subprocess.Popen(
        command,
        env={**os.environ, **cluster.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_submitted_run_trains_beside_a_job_of_others(tmp_path: Path) -> None:
    config = write_input(tmp_path, 2)
    foreign, begun, stop = (tmp_path / name for name in ("foreign.py", "begun", "stop"))
    foreign.write_text(FOREIGN)
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": 0}
    with ray_cluster(head=head, n1={"num_cpus": 4}, n2={"num_cpus": 4}) as cluster:
        theirs = submit(cluster, sys.executable, str(foreign), str(begun), str(stop))
        until(begun.exists, "the job of others", 300.0)
        words = ("run", str(config), "--plain", "--cluster", "ray", "--resume-if-begun")
        ours = submit(cluster, sys.executable, "-m", "gspo.cli", *words)
        printed, _ = ours.communicate(timeout=900)
        assert ours.returncode == 0, printed
        assert "finished: " in printed
        until(lambda: not processes_with("gspo.", tmp_path), "the end of all processes of the run")
        assert theirs.poll() is None
        stop.touch()
        assert theirs.wait(120) == 0
