"""Whether training fits on the learner's GPUs, beside the generators that share them; without torch."""

from collections.abc import Sequence

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, SHARE_ARGUMENT, VISIBLE, Gpu, describe_use
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.longest import engine_share, kept_by_generators
from gspo.common.planning.memory import CONTEXT_BYTES, rank_memory

_LEAST_FRACTION = 0.01
# From cheap to slow.
_STAGES = ((1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "all"))
_LESS = "Less is needed with zero_stage: 3 on more learner.ranks, with learner.offload, or learner.lora.rank"


def check_gpu_memory(
    config: Config, size: TrainedSize, ranks: int, gpus: Sequence[Gpu], num_generators: Sequence[int]
) -> None:
    """Compare a rank's memory, without activations, with its GPU, less other programs and what generators keep.

    Args:
        ranks: Those of the whole learner.
        gpus: One for each rank on this machine.
        num_generators: On each of these GPUs.

    Raises:
        InputError: It does not fit; names the share that would.
    """
    needed = rank_memory(config, size, ranks).peak
    for gpu, sharing in zip(gpus, num_generators, strict=True):
        total = gpu.total_bytes
        if total is None:
            continue
        free = total - kept_by_generators(config, total, sharing)
        if needed > free:
            less = nearest_stage(config, size, ranks, free - gpu.used_bytes) or _LESS
            raise _does_not_fit(config, needed, gpu.name, total, sharing, less)
        # On shared GPUs these are the run's own generators, which sleep while the learner has the GPUs.
        if config.placement == "split" and needed > free - gpu.used_bytes:
            raise _is_filled(needed, gpu, total)


def nearest_stage(config: Config, size: TrainedSize, ranks: int, free_bytes: float) -> str:
    """The first ZeRO stage and offload, from cheap to slow, under which a rank fits; empty if none does."""
    for stage, offload in _STAGES:
        changed = config.with_keys(learner={"zero_stage": stage, "offload": offload})
        needed = rank_memory(changed, size, ranks).peak
        if needed <= free_bytes:
            keys = f"learner.zero_stage: {stage}" + (f" with offload: {offload}" if offload != "none" else "")
            return f"Nearest on {ranks} rank(s): {keys} takes {needed / GIB:.1f} GiB"
    return ""


def own_fraction(config: Config, gpu: Gpu, num_generators: int) -> float | None:
    """The part of its GPU that a rank may allocate, so that a generator that starts again finds its share free.

    None if the rank has the GPU alone, or the size of the GPU is unknown.
    """
    if not num_generators or gpu.total_bytes is None:
        return None
    kept = kept_by_generators(config, gpu.total_bytes, num_generators) + CONTEXT_BYTES
    return max(_LEAST_FRACTION, 1 - kept / gpu.total_bytes)


def _is_filled(needed: float, gpu: Gpu, total: int) -> InputError:
    return InputError(
        VISIBLE,
        f"training takes {needed / GIB:.1f} GiB on each GPU, and GPU {gpu.name} has {total / GIB:.1f} GiB"
        f"{describe_use(gpu)}",
        "End these programs, or choose other GPUs",
    )


def _does_not_fit(config: Config, needed: float, name: str, total: int, sharing: int, less: str) -> InputError:
    share, in_shifts = engine_share(config), config.placement == "shared"
    training = f"training, or loading the model for it, takes {needed / GIB:.1f} GiB on each GPU"
    has = f"GPU {name} has {total / GIB:.1f} GiB"
    if not sharing or in_shifts or needed >= total:
        kept = kept_by_generators(config, total, sharing) / GIB
        rule = f"{training}, and {has}{f', of which sleeping generators keep {kept:.1f}' if in_shifts else ''}"
        return InputError("learner.zero_stage", rule, f"{less}. Or take a smaller model or a larger GPU")
    share_text = f"{share:g}" if SHARE_ARGUMENT in config.generation.engine else f"{share:g} (vLLM's default)"
    each = f" for each of {sharing} generators" if sharing > 1 else ""
    rest = max(0.0, 1 - share * sharing) * total
    return InputError(
        f"generation.engine.{SHARE_ARGUMENT}",
        f"{has}, and the learner shares it: {share_text}{each} leaves {rest / GIB:.1f} GiB, and {training}",
        f"Set it below {(1 - needed / total) / sharing:.2f}, with memory for the activations, or give the learner a "
        f"GPU of its own. {less}",
    )
