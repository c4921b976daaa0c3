"""`python -m gspo.cli.slurm.batch_watch JOB NODE`: requeues a job whose batch node was lost; runs on its other nodes.

With --no-kill, Slurm keeps a job of several nodes when one fails, also when that is the batch node (Slurm 22.05). It
takes the node out of the job. The rest would wait without a batch script until the time limit.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from gspo.cli.slurm.allocation import nodes_of, requeue, step
from gspo.common.host.module_command import module_command

_POLL_S = 20.0


@contextlib.contextmanager
def watching(job: str, nodes: Sequence[str]) -> Iterator[None]:
    """Have every node but the first, the batch node, watch that one while the block lasts."""
    if len(nodes) == 1:
        yield
        return
    batch_node, *others = nodes
    command = [*step(others, name="watch"), "--no-kill", *module_command("gspo.cli.slurm.batch_watch")]
    process = subprocess.Popen([*command, job, batch_node], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Look again and again; end once the job is requeued."""
    job, batch_node = sys.argv[1:]
    while True:
        time.sleep(_POLL_S)
        nodes = nodes_of(job)
        if nodes and batch_node not in nodes:
            print(f"Slurm has taken the batch node {batch_node} out of job {job}: requeueing the job", flush=True)
            if not (refusal := requeue(job)):
                return
            print(f"error: job {job} could not be requeued: {refusal}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
