"""Whether learner and generators fit on one GPU: vLLM takes its share of the whole, training needs what is left.

It asks NVIDIA's own tool and starts no engine. Where there is no GPU it says nothing. Neighbour: check.py calls it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from services.common.config import Config
from services.common.errors import InputError

# vLLM's own default.
_SHARE_KEY, _DEFAULT_SHARE = "gpu_memory_utilization", 0.92
_GIB = 1 << 30
_TOOL_S = 15.0


def visible_gpus() -> list[int]:
    """Bytes of memory of every GPU that a process here sees, in its order; empty where there is none."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [int(line) << 20 for line in printed.split() if line.isdigit()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if all(name.isdigit() for name in names):
        return [gpus[int(name)] for name in names if int(name) < len(gpus)]
    return gpus[: len(names)]  # given by UUID: as many, and rarely of unlike size


def check_gpu_share(config: Config, training_bytes: int, gpus: Sequence[int]) -> None:
    """Hold the generators' share of the first GPU against the learner's need: each starts on the first that it sees.

    Raises:
        InputError: They do not fit together; names the share that would.
    """
    generation, key = config.generation, f"generation.engine.{_SHARE_KEY}"
    share, total = float(generation.engine.get(_SHARE_KEY, _DEFAULT_SHARE)), gpus[0]
    taken = share * generation.replicas
    if taken * total + training_bytes <= total:
        return
    most = (1 - training_bytes / total) / generation.replicas
    given = f"{share:g}" if _SHARE_KEY in generation.engine else f"{share:g} (vLLM's default)"
    each = f" for each of {generation.replicas} generators" if generation.replicas > 1 else ""
    rule = (
        f"{given}{each} leaves {max(0.0, 1 - taken) * total / _GIB:.1f} of {total / _GIB:.1f} GiB of the GPU that the "
        f"learner shares, and training takes {training_bytes / _GIB:.1f} GiB before its activations"
    )
    if most <= 0:
        raise InputError(key, rule, "Take a smaller model or a larger GPU: training alone does not fit")
    raise InputError(key, rule, f"Set it below {most:.2f}, with room for the activations, or take a larger GPU")
