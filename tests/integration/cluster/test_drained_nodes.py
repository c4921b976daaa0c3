"""Nodes of a real Ray cluster that are drained under `gspo run --cluster ray`, with the services in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.cli.test_run import Gspo
from tests.integration.cluster.test_ray_run import SERVICES
from tests.support.cluster.ray_cluster import processes_with, ray_cluster, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
NAMES = ("generation-0", "generation-1", "generation-2", "reward-0", "learner-0")


def test_a_drained_node_is_left_and_a_drained_head_ends_the_run(tmp_path: Path) -> None:
    gspo = Gspo(tmp_path.resolve())
    gspo.configure(generation={"replicas": 3})
    with ray_cluster(head={"num_cpus": 0}, n1={"num_cpus": 5}) as cluster:
        try:
            gspo.environment = cluster.environment
            process = gspo.start("config.yaml", "--cluster", "ray", "--plain", fake="learner:child", services=SERVICES)
            until(lambda: all(gspo.starts(name) for name in NAMES), "the first start of all")
            cluster.add("n2", num_cpus=5)
            cluster.drain("n1", 100)
            until(lambda: all(len(gspo.starts(name)) == 2 for name in NAMES), "the second start of all, on n2")
            assert all(len(processes_with(f"--name {name}", gspo.folder)) == 1 for name in NAMES)
            until(lambda: cluster.has_ended("n1"), "the end of n1, on which nothing is left")
            cluster.drain("head", 100)
            printed, _ = process.communicate(timeout=60)
            until(lambda: not gspo.remaining(), "the end of all processes")
        finally:
            gspo.close()
    line = r"node n1 is drained and ends in (\d+) s: (.*) hand over their work, and start again elsewhere\n"
    assert (match := re.search(line, printed)), printed
    assert sorted(match[2].split(", ")) == sorted(NAMES)
    for name in NAMES:
        assert f"{name} starts again: its node n1 is drained\n" in printed
    assert "died (its actor on n1" not in printed
    assert process.returncode == 1
    command = f"Continue it:\n  gspo run --resume {gspo.run_dir} --cluster ray\n"
    words = "the node of this command is drained or has left the cluster, so the run ends"
    assert f"error: {words}. {command}" in printed
