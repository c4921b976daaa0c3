"""The answers of all nodes, as the batch node judges them."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.slurm.survey import judge
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu

NONCE = "0123456789abcdef"


def answer(node: str, **changed: Any) -> str:
    facts = {"node": node, "nonce": NONCE, "version": version("gspo"), "gpus": [], "problem": "", **changed}
    return json.dumps(facts)


def judged(*answers: str, words: str = "") -> list[Any]:
    return judge(
        ("n1", "n2"), Path("/runs/r/services/slurm-1"), NONCE, "\n".join(["a library's line", *answers]), words
    )


def test_nodes_in_the_order_of_the_job_with_their_gpus() -> None:
    gpus = [{"name": "0", "uuid": "GPU-a", "total_bytes": 80 << 30, "used_bytes": 0}]
    first, second = judged(answer("n2", gpus=gpus), answer("n1"))
    assert (first.name, first.gpus) == ("n1", ())
    assert (second.name, second.gpus) == ("n2", (Gpu("0", "GPU-a", 80 << 30),))


@pytest.mark.parametrize(
    ("second", "where", "words"),
    [
        ("", "n2", "execve(): No such file or directory"),
        (answer("n2", nonce=""), "run.directory", "n2 does not see what n1 writes in /runs/r/services/slurm-1"),
        (answer("n2", version="0.0.1"), "n2", "has gspo 0.0.1, and n1 has"),
        (answer("n2", problem="CUDA_VISIBLE_DEVICES: '9' names no GPU"), "n2", "names no GPU"),
    ],
)
def test_a_node_that_is_not_fit(second: str, where: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        judged(answer("n1"), second, words="slurmstepd-n2: error: execve(): No such file or directory\n\n")
    assert refusal.value.where == where
    assert words in str(refusal.value)
