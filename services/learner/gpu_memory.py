"""Whether learner and generators fit on one GPU: vLLM takes its share of the whole, training needs what is left.

It starts no engine. Neighbours: check.py calls it, services/common/machine.py sees the GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.config import Config
from services.common.errors import InputError

# vLLM's own default.
_SHARE_KEY, _DEFAULT_SHARE = "gpu_memory_utilization", 0.92
_GIB = 1 << 30


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
