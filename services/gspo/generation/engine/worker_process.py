"""The process of vLLM's engine on a CPU: forked from the service's own once vLLM is imported, instead of spawned.

vLLM's CPU platform spawns: a new interpreter, which imports everything once more and takes all of it apart at its end.
That is 7 s of processor time before the model loads and 5 s at the end; a fork needs neither. On a GPU, where this was
not tried, vLLM spawns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine import utils as vllm_processes

from gspo.common.config.schema import ModelConfig
from gspo.generation.engine.forked_process import ForkedProcess


def import_engine(model: ModelConfig) -> bool:
    """Import what vLLM imports in the engine's process; whether that process is to be forked.

    The model's class is among it. vLLM asks an imported class for what it can do in this process. For another it starts
    one more process at the first start on a machine (8 s of processor time), lest a GPU be opened here.
    """
    if not current_platform.is_cpu():
        return False
    import vllm.v1.worker.cpu_worker  # noqa: F401 - here: it is for CPUs alone

    for name in _architectures(model):
        if (known := ModelRegistry.models.get(name)) is not None:
            with suppress(ImportError):  # of a package that is not there: vLLM says so when it looks for itself
                ModelRegistry.register_model(name, known.load_model_cls())
    return True


@contextmanager
def vllm_starts_in(process: ForkedProcess) -> Iterator[None]:
    """A block in which vLLM starts its engine in this process.

    vLLM offers no argument for it, so its own function is replaced: the one that says how processes are started.
    """
    original = vllm_processes.get_mp_context
    vllm_processes.get_mp_context = lambda: process
    try:
        yield
    finally:
        vllm_processes.get_mp_context = original


def _architectures(model: ModelConfig) -> list[str]:
    """Names of the classes in the model's config.json; none where it cannot be read, which is refused later."""
    try:
        facts = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        return [str(name) for name in facts.get("architectures") or []]
    except (OSError, ValueError, AttributeError):
        return []
