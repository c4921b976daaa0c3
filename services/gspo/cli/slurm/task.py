"""`python -m gspo.cli.slurm.task FOLDER PROCESS COMMAND...`: a task of a step, which becomes a process of the run.

It sets the variables of the process on this node. Ranks of a learner also agree on an address. The first one picks a
free port on its node, and writes it into the job's folder. The name of the file has the number of the step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LAYOUT_NAME = "layout.json"
_ADDRESS_S, _POLL_S = 120.0, 0.1
_ANY = ""


def main() -> None:
    """Set the environment, then become the command."""
    folder, process, *command = sys.argv[1:]
    layout = json.loads((Path(folder) / LAYOUT_NAME).read_text())
    os.environ.update(layout[process][os.environ["SLURMD_NODENAME"]])
    # The check of the learner is one task; it needs the numbers of ranks, and no address.
    if os.environ.get("WORLD_SIZE") == os.environ["SLURM_NTASKS"]:
        os.environ.update(rank_variables(Path(folder), os.environ))
    os.execvp(command[0], command)  # noqa: S606 - a command of ours


def rank_variables(folder: Path, slurm: Mapping[str, str]) -> dict[str, str]:
    """The variables of one rank, as torchrun sets them.

    Args:
        slurm: The variables that Slurm sets for a task.

    Raises:
        TimeoutError: The first rank has not written its address in time.
    """
    file = folder / f"address-{slurm.get('SLURM_RESTART_COUNT', '0')}-{slurm['SLURM_STEP_ID']}"
    if slurm["SLURM_PROCID"] == "0":
        with socket.socket() as probe:
            probe.bind((_ANY, 0))
            address = f"{socket.gethostname()}:{probe.getsockname()[1]}"
        scratch = file.with_suffix(".part")
        scratch.write_text(address)
        scratch.replace(file)
    deadline = time.monotonic() + _ADDRESS_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not written its address to {file} within {_ADDRESS_S:g} s")
        time.sleep(_POLL_S)
        list(folder.iterdir())  # over NFS, this renews what the node knows of the folder
    host, _, port = file.read_text().rpartition(":")
    ranks = {"RANK": slurm["SLURM_PROCID"], "LOCAL_RANK": slurm["SLURM_LOCALID"]}
    return {**ranks, "MASTER_ADDR": host, "MASTER_PORT": port}


if __name__ == "__main__":
    main()
