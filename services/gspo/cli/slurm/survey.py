"""Looks at every node before a run starts: whether it has this installation and the shared disk, and its GPUs.

`python -m gspo.cli.slurm.survey FILE` is what each node runs; it prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gspo.cli.cluster.layout import Node
from gspo.cli.slurm.allocation import step
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu, visible_gpus
from gspo.common.host.module_command import module_command

_NONCE_NAME = "nonce"
# Until a new file is seen on another node: NFS keeps what it knows of a folder for up to a minute, 3 s by default.
_SEEN_S, _ANSWER_S = 20.0, 180.0
# While Slurm makes no step on all nodes.
_STEP_S, _PAUSE_S, _NO_STEP = 60.0, 3.0, "Unable to create step"
_TAIL_LINES = 5


def survey(nodes: Sequence[str], folder: Path) -> list[Node]:
    """The nodes with their GPUs.

    Args:
        folder: In the run directory; every node must see a file that is written here now.

    Raises:
        InputError: A node does not answer, lacks this installation or another version has it, or sees another disk.
    """
    nonce = uuid.uuid4().hex
    file = folder / _NONCE_NAME
    file.write_text(nonce)
    command = [*step(nodes, name="survey", ends_together=False), *module_command("gspo.cli.slurm.survey")]
    command.append(str(file))
    deadline = time.monotonic() + _STEP_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        # A node that has just come back may refuse steps for a moment.
        while _NO_STEP in done.stderr and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        answers, words = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        answers, words = _text(late.stdout), f"no answer within {_ANSWER_S:g} s"
    finally:
        file.unlink()
    return judge(nodes, folder, nonce, answers, words)


def judge(nodes: Sequence[str], folder: Path, nonce: str, answers: str, words: str) -> list[Node]:
    """Check the answers of the nodes, a line of JSON each.

    Args:
        words: What srun and the nodes wrote to standard error.

    Raises:
        InputError: As for `survey`.
    """
    facts: dict[str, Mapping[str, Any]] = {}
    for line in answers.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            facts[answer["node"]] = answer
    for node in nodes:
        if node not in facts:
            tail = "\n".join([line for line in words.splitlines() if line.strip()][-_TAIL_LINES:])
            raise InputError(
                node,
                f"does not run {sys.executable} -m gspo.cli.slurm.survey",
                f"Install gspo on a disk that every node has at the same path. Slurm said:\n{tail}",
            )
        if facts[node]["nonce"] != nonce:
            raise InputError(
                "run.directory",
                f"{node} does not see what {nodes[0]} writes in {folder}",
                "Set it to a folder on a disk that all nodes have at the same path",
            )
        if facts[node]["version"] != version("gspo"):
            raise InputError(
                node, f"has gspo {facts[node]['version']}, and {nodes[0]} has {version('gspo')}", "Install one version"
            )
        if facts[node]["problem"]:
            raise InputError(node, facts[node]["problem"], "Correct it, or leave the node out: sbatch --exclude")
    return [Node(node, tuple(Gpu(**gpu) for gpu in facts[node]["gpus"])) for node in nodes]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def main() -> None:
    """Print the facts of this node."""
    file = Path(sys.argv[1])
    deadline = time.monotonic() + _SEEN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    gpus: list[Gpu] = []
    problem = ""
    try:
        gpus = visible_gpus()
    except InputError as error:
        problem = str(error)
    facts = {
        "node": os.environ["SLURMD_NODENAME"],
        "nonce": file.read_text() if file.exists() else "",
        "version": version("gspo"),
        "gpus": [asdict(gpu) for gpu in gpus],
        "problem": problem,
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
