"""The answers of a cluster's nodes, as the driver judges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.cli.cluster import node_survey
from gspo.cli.cluster.layout import Node
from gspo.cli.cluster.node_survey import check_gpus, gpus_of, judge, look
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu

NONCE = "0123456789abcdef"
VERSIONS = {"gspo": "0.1.0", "torch": "2.13.0+cpu", "vllm": "", "deepspeed": "0.19.8"}


def answer(**changed: Any) -> dict[str, Any]:
    return {"nonce": NONCE, "python": "3.11.2", "versions": VERSIONS, "gpus": [], "problem": "", **changed}


@pytest.mark.parametrize(
    ("second", "where", "words"),
    [
        (None, "n2", "does not answer. Look at `ray status`"),
        (answer(nonce=""), "run.directory", "n2 does not see what n1 writes in /runs/r/services/cluster. Set it to"),
        (answer(python="3.12.1"), "n2", "has Python 3.12.1, and n1 has 3.11.2"),
        (answer(versions=VERSIONS | {"gspo": "0.0.9"}), "n2", "has gspo 0.0.9, and n1 has 0.1.0. Install one version"),
        (answer(versions=VERSIONS | {"gspo": ""}), "n2", "has no gspo under the Python of Ray's workers (3.11.2)"),
        (answer(versions=VERSIONS | {"vllm": "0.32.0"}), "n2", "has vllm 0.32.0, and n1 has none"),
        (answer(problem="CUDA_VISIBLE_DEVICES: '9' names no GPU"), "n2", "names no GPU"),
    ],
)
def test_a_cluster_node_that_is_not_fit(second: dict[str, Any] | None, where: str, words: str) -> None:
    answers = {"n1": answer(), **({"n2": second} if second else {})}
    with pytest.raises(InputError) as refusal:
        judge(("n1", "n2"), "n1", Path("/runs/r/services/cluster"), NONCE, answers)
    assert refusal.value.where == where
    assert words in str(refusal.value)


def test_nodes_that_are_alike_are_fit() -> None:
    judge(("n1", "n2"), "n1", Path("/runs"), NONCE, {"n1": answer(), "n2": answer()})


def test_a_node_reads_the_file_and_its_versions(tmp_path: Path) -> None:
    (tmp_path / "nonce").write_text(NONCE)
    facts = look(str(tmp_path / "nonce"), 0.0)
    assert facts["nonce"] == NONCE
    assert facts["versions"].keys() == set(node_survey.PACKAGES)
    assert look(str(tmp_path / "elsewhere"), 0.0)["nonce"] == ""


def test_engines_for_gpus_need_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_survey, "vllm_for_gpus", lambda: "0.32.0")
    check_gpus([Node("n1"), Node("n2", (Gpu("0"),))])
    with pytest.raises(InputError, match=r"made for GPUs \(vllm 0\.32\.0\), and Ray counts none on n1, n2\. Start"):
        check_gpus([Node("n1"), Node("n2")])


def test_gpus_are_known_by_index_and_by_uuid() -> None:
    cards = [{"name": "0", "uuid": "GPU-a", "total_bytes": 80 << 30}, {"name": "1", "uuid": "GPU-b"}]
    assert gpus_of(answer(gpus=cards), ["GPU-b", "0", "7"]) == (
        Gpu("1", "GPU-b"),
        Gpu("0", "GPU-a", 80 << 30),
        Gpu("7"),
    )
