"""The memory of a run, by service: its open groups, from the configuration, and its training, from the model's files.

Each service's check refuses a batch that does not fit with the shortest answers, and warns of one that does not fit
with the longest. Training is counted without activations: they depend on learner.micro_batch_tokens and on the model's
code.

The bytes of a group are the least that was measured over real entries on Python 3.11 and Redis 6.2.
tests/integration/common/test_batch_memory.py measures them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.common.config.engines import LoraConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB
from gspo.common.model.files import ALL_LINEAR, ModelFiles, is_fused, is_stacked

# The coordinator: one open group in its tables, and one answer of an evaluation.
OPEN_GROUP, ANSWER = 230, 100
# Redis: a task with its field of `open`, a scored answer, and a token of one (id, log-prob, version, mask).
REDIS_GROUP, REDIS_ROLLOUT, REDIS_TOKEN = 250, 250, 9
# The learner: a scored answer with its entry, and a token of one.
LEARNER_ROLLOUT, LEARNER_TOKEN = 900, 12
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one process needs for the groups of a run.

    Attributes:
        least: With a whole batch of answers of one token each.
        most: With every slot full of answers as long as they may be.
    """

    least: int
    most: int


def coordinator_bytes(config: Config) -> MemoryNeed:
    """The tables of open groups."""
    tables = config.num_slots * OPEN_GROUP
    return MemoryNeed(tables, tables)


def redis_bytes(config: Config) -> MemoryNeed:
    """The tasks of open groups, and the answers that no step has taken yet."""
    tasks = config.num_slots * REDIS_GROUP
    return MemoryNeed(
        tasks + config.algorithm.num_rollouts * REDIS_ROLLOUT,
        tasks + _open_rollouts(config) * (REDIS_ROLLOUT + REDIS_TOKEN * config.algorithm.response_length),
    )


def learner_bytes(config: Config) -> MemoryNeed:
    """The answers that wait for their group or their step."""
    return MemoryNeed(
        config.algorithm.num_rollouts * LEARNER_ROLLOUT,
        _open_rollouts(config) * (LEARNER_ROLLOUT + LEARNER_TOKEN * config.algorithm.response_length),
    )


def _open_rollouts(config: Config) -> int:
    return config.num_slots * config.algorithm.num_return_sequences_in_group


def check_fits(config: Config, needed: MemoryNeed, available: float, whose: str) -> str:
    """A warning if the longest answers would not fit; empty if they do.

    Args:
        available: Bytes.
        whose: Whose memory it is, for the message.

    Raises:
        InputError: Not even the shortest ones fit.
    """
    algorithm, slots = config.algorithm, config.num_slots
    if needed.least > available:
        largest = max(1, int(algorithm.rollout_batch_size * available / needed.least))
        raise InputError(
            "algorithm.rollout_batch_size",
            f"{algorithm.rollout_batch_size} groups of {algorithm.num_return_sequences_in_group} answers, with "
            f"{slots} open at a time (staleness.max_lag {config.staleness.max_lag}), take at least "
            f"{needed.least / GIB:,.1f} GiB of {whose}, and {available / GIB:.1f} GiB are free",
            f"Lower it below {largest}, or lower num_return_sequences_in_group or staleness.max_lag",
        )
    if needed.most <= available:
        return ""
    return (
        f"algorithm.response_length: if every answer took all {algorithm.response_length} tokens, the {slots} open "
        f"groups would take {needed.most / GIB:,.1f} GiB of {whose}, and {available / GIB:.1f} GiB are free"
    )


def check_answers_fit(config: Config, num_prompts: int, available: float, whose: str) -> None:
    """Refuse evaluations whose answers cannot be counted in memory.

    Args:
        num_prompts: Held-out prompts of the largest file.
        available: Bytes.

    Raises:
        InputError: Names evaluation.num_answers.
    """
    num_answers = config.evaluation.num_answers
    needed = num_prompts * num_answers * ANSWER
    if needed > available:
        raise InputError(
            "evaluation.num_answers",
            f"{num_answers} answers to each of {num_prompts} held-out prompts take at least {needed / GIB:,.1f} GiB "
            f"of {whose}, and {available / GIB:.1f} GiB are free",
            "Lower it, or evaluation.limit",
        )


def training_bytes(config: Config, files: ModelFiles, ranks: int) -> tuple[float, float]:
    """Bytes that one of so many ranks holds: on its device, and offloaded to the host.

    Under LoRA only adapters have gradients and moments, and the base is its own reference.
    """
    learner, stage = config.learner, config.learner.zero_stage
    trained = num_trained(learner.lora, files)
    num_weights = files.num_parameters + (trained if learner.lora.rank else 0)
    weights = FLOAT32_BYTES * num_weights / (ranks if stage == 3 else 1)
    gradients = FLOAT32_BYTES * trained / (ranks if stage >= 2 else 1)
    # AdamW's two moments; under ZeRO also a copy of its own of the weights that a rank updates.
    states = FLOAT32_BYTES * trained * (3 / ranks if stage else 2)
    offloaded = {"none": 0.0, "optimizer": states, "all": states + weights}[learner.offload]
    has_copy = config.algorithm.needs_reference and not learner.lora.rank
    reference = FLOAT32_BYTES * files.num_parameters / (ranks if stage == 3 else 1) if has_copy else 0
    return weights + gradients + states + reference - offloaded, offloaded


def host_bytes(files: ModelFiles, training: tuple[float, float], *, on_gpu: bool) -> float:
    """Bytes of the machine's own memory for a rank, from the result of `training_bytes`.

    On a GPU these are the offloaded bytes, and at the start the whole policy, which is loaded there before it moves.
    """
    on_device, on_host = training
    return max(on_host, FLOAT32_BYTES * files.num_parameters) if on_gpu else on_device + on_host


def snapshot_bytes(config: Config, files: ModelFiles) -> int:
    """Bytes of the first rank's snapshot in host memory: with a lag, one earlier version of the trained weights."""
    return FLOAT32_BYTES * num_trained(config.learner.lora, files) if config.staleness.max_lag else 0


def num_trained(lora: LoraConfig, files: ModelFiles) -> int:
    """Parameters that the optimizer updates; all of a pickle's, which is not looked into."""
    if not lora.rank or not files.linear:
        return files.num_parameters
    layers = files.linear if lora.target_modules == (ALL_LINEAR,) else layers_of(lora.target_modules, files)
    return sum(_num_of_adapter(layer, files.linear[layer], lora.rank) for layer in layers)


def _num_of_adapter(layer: str, shape: Sequence[int], rank: int) -> int:
    num_out, num_in = shape
    # Two matrices of an expert that a loaded model holds as one: an adapter of twice the rank is over both.
    return rank * (num_in + (2 if is_stacked(layer) and is_fused(layer) else 1) * num_out)


def layers_of(names: Sequence[str], files: ModelFiles) -> list[str]:
    """The layers that these names choose, by whole parts from the end as peft does."""
    return [layer for layer in files.linear if any(f".{layer}".endswith(f".{name}") for name in names)]
