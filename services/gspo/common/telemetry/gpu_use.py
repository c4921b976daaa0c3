"""How well a step uses the GPUs: MFU and tokens a second, of the learner alone and of the whole loop.

    MFU = model flops / (seconds * peak flop/s of the GPUs)

The learner's has the flops of training over `train_s` and the GPUs of its ranks. The loop's has the flops of training
and of sampling the trained tokens over `step_s` and every GPU of learner and generators, each once.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import structlog

from gspo.common.host.gpu_kinds import GPU_KINDS

log = structlog.get_logger()
# Figure -> the time that it is over.
_MEANS = {
    "mfu": "step_s",
    "tokens_per_s_per_gpu": "step_s",
    "learner_mfu": "train_s",
    "learner_tokens_per_s_per_gpu": "train_s",
    "learner_flops_per_s": "train_s",
}
_MFU = {"learner_mfu": "learner", "mfu": "whole loop"}


@cache
def peak_flops(product: str) -> float | None:
    """The dense bfloat16 flop/s of a kind of GPU, as nvidia-smi names it; None for an unknown one, logged once."""
    if gpu := GPU_KINDS.get(product):
        return gpu.flops
    log.warning("unknown_gpu", gpu=product or "not named", effect="no MFU with it; the flops a second stay")
    return None


def gpu_use(
    figures: Mapping[str, float], learner: Mapping[str, float | None], generators: Mapping[str, str]
) -> dict[str, float]:
    """Figures of the GPUs' use in a step; those that need an unknown peak, or flops that were not counted, are absent.

    Args:
        figures: The step's; `train_flops` and `generation_flops` if the trainer counts them.
        learner: GpuKind of each rank -> its peak in flop/s, or None where it is unknown.
        generators: GpuKind of a generator -> its kind. Generators on CPUs have none: they share the learner's cores.
    """
    peaks = {**{gpu: peak_flops(product) for gpu, product in generators.items()}, **learner}
    train_s, step_s = figures["train_s"], figures["step_s"]
    use = {
        "gpus": float(len(peaks)),
        "tokens_per_s_per_gpu": figures["tokens"] / step_s / len(peaks),
        "learner_tokens_per_s_per_gpu": figures["tokens"] / train_s / len(learner),
    }
    if "train_flops" not in figures:
        return use
    use["learner_flops_per_s"] = figures["train_flops"] / train_s
    if learner_peak := _sum_of_known(learner):
        use["learner_mfu"] = use["learner_flops_per_s"] / learner_peak
    if peak := _sum_of_known(peaks):
        use["mfu"] = (figures["train_flops"] + figures["generation_flops"]) / step_s / peak
    return use


def mean_gpu_use(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of these figures over the time of some steps, the learner's over that of training, as far as there are."""
    means = {}
    for name, seconds in _MEANS.items():
        measured = [step for step in steps if name in step]
        if total_s := math.fsum(step[seconds] for step in measured):
            means[name] = math.fsum(step[name] * step[seconds] for step in measured) / total_s
    return means


def gpu_use_line(steps: Sequence[Mapping[str, float]]) -> str:
    """How well some steps used the GPUs, in one line; empty before the first figure of it."""
    means = mean_gpu_use(steps)
    mfu = [f"{of} {means[name]:.1%}" for name, of in _MFU.items() if name in means]
    parts = [f"MFU: {', '.join(mfu)}"] if mfu else []
    if not mfu and "learner_flops_per_s" in means:
        parts.append(f"learner {means['learner_flops_per_s'] / 1e12:.3g} Tflop/s")
    if "tokens_per_s_per_gpu" in means:
        # A step that a resume trained from the log has no such figures.
        tokens_per_s, num_gpus = means["tokens_per_s_per_gpu"], [step["gpus"] for step in steps if "gpus" in step][-1]
        parts.append(f"trained tokens/s a GPU: {tokens_per_s:,.0f} (GPUs: {num_gpus:.0f})")
    return "; ".join(parts)


def _sum_of_known(peaks: Mapping[str, float | None]) -> float | None:
    known = [peak for peak in peaks.values() if peak is not None]
    return math.fsum(known) if len(known) == len(peaks) else None
