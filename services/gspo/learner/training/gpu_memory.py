"""Whether training fits on the learner's GPUs, beside the generators that share them; without torch."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import DEFAULT_SHARE, GIB, SHARE_ARGUMENT, Gpu

# CUDA's own memory in a process, beside the allocated tensors.
_CONTEXT_BYTES = GIB
_LEAST_FRACTION = 0.01
_LESS = "Less is needed with zero_stage: 3 on more learner.ranks, with learner.offload, or learner.lora.rank"


def check_gpu_memory(config: Config, training_bytes: int, gpus: Sequence[Gpu], num_generators: Sequence[int]) -> None:
    """Compare a rank's memory with its GPU, less the share of the whole that vLLM takes for each generator.

    Args:
        training_bytes: The most that one rank holds at a time, without activations.
        gpus: One for each rank on this machine.
        num_generators: On each of these GPUs.

    Raises:
        InputError: It does not fit; names the share that would.
    """
    share = _share(config)
    for gpu, sharing in zip(gpus, num_generators, strict=True):
        total = gpu.total_bytes
        if total is not None and training_bytes > total * (1 - share * sharing):
            raise _does_not_fit(config, training_bytes, gpu.name, total, share, sharing)


def own_fraction(config: Config, gpu: Gpu, num_generators: int) -> float | None:
    """The part of its GPU that a rank may allocate, so that a generator that starts again finds its share free.

    None if the rank has the GPU alone, or the size of the GPU is unknown.
    """
    if not num_generators or gpu.total_bytes is None:
        return None
    return max(_LEAST_FRACTION, 1 - _share(config) * num_generators - _CONTEXT_BYTES / gpu.total_bytes)


def _share(config: Config) -> float:
    share = config.generation.engine.get(SHARE_ARGUMENT)
    return float(share) if isinstance(share, (int, float)) else DEFAULT_SHARE


def _does_not_fit(config: Config, needed: int, name: str, total: int, share: float, sharing: int) -> InputError:
    training = f"training, or loading the model for it, takes {needed / GIB:.1f} GiB on each GPU"
    has = f"GPU {name} has {total / GIB:.1f} GiB"
    if not sharing or needed >= total:
        rule = f"{training}, and {has}"
        return InputError("learner.zero_stage", rule, f"{_LESS}, a smaller model or a larger GPU")
    share_text = f"{share:g}" if SHARE_ARGUMENT in config.generation.engine else f"{share:g} (vLLM's default)"
    each = f" for each of {sharing} generators" if sharing > 1 else ""
    rest = max(0.0, 1 - share * sharing) * total
    return InputError(
        f"generation.engine.{SHARE_ARGUMENT}",
        f"{has}, and the learner shares it: {share_text}{each} leaves {rest / GIB:.1f} GiB, and {training}",
        f"Set it below {(1 - needed / total) / sharing:.2f}, with memory for the activations, or give the learner a "
        f"GPU of its own. {_LESS}",
    )
