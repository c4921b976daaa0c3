"""Ray's head is killed for ever while `gspo run --cluster ray` starts, with the services in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.cli.test_run import Gspo, line_of
from tests.integration.cluster.test_ray_run import SERVICES
from tests.support.cluster.ray_cluster import ray_cluster, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.mark.parametrize("moment", ["survey", "checks"])
def test_a_head_that_is_lost_in_the_start_ends_it_with_one_message(tmp_path: Path, moment: str) -> None:
    gspo = Gspo(tmp_path.resolve())
    with ray_cluster(head={"num_cpus": 1}, n1={"num_cpus": 4}) as cluster:
        try:
            gspo.environment = cluster.environment
            process = gspo.start("config.yaml", "--cluster", "ray", "--plain", fake="", services=SERVICES)
            if moment == "survey":  # the file that every node is asked for
                until((gspo.run_dir / "services" / "cluster" / "nonce").exists, "the survey")
            else:
                until(lambda: "checking" in line_of(process), "the line of the checks")
            cluster.lose_head()
            printed, _ = process.communicate(timeout=90)
            until(lambda: not gspo.remaining(), "the end of all processes")
        finally:
            gspo.close()
    assert process.returncode == 1
    words = r"error: the head of the Ray cluster \(127\.0\.0\.10:\d+\) has not answered for 2\d s: .* Start the cluster"
    assert re.search(words + r" again, on any nodes that see the run directory\n\Z", printed), printed
    assert "GCS may have been killed" not in printed, "Ray's own end comes first"
