"""Compares the longest rollout of a configuration with the memory of its generators and of its ranks."""

from dataclasses import dataclass
from typing import Any

from gspo.cli.processes.placement import Placement
from gspo.cli.processes.planned_memory import PlannedModel, free_for_ranks
from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu
from gspo.common.planning.longest import (
    MemoryBound,
    engine_share,
    micro_batch_bound,
    servable_bound,
    servable_in_host_memory,
    trainable_bound,
    useful_tokens,
)
from gspo.common.planning.model_profile import ModelProfile
from gspo.common.streams.keys import GENERATION

_MOST_GPUS = 64


@dataclass(frozen=True)
class LongestRollout:
    """Tokens of prompt and answer together.

    Attributes:
        configured: The most of all branches of a rollout.
        branch: The most of one branch, algorithm.prompt_length + response_length: what a generator reads at once.
        servable: As many as the KV cache of the smallest generator holds; None if it is not known.
        trainable: As many as fit on the fullest GPU of the learner; None if it is not known.
    """

    configured: int
    branch: int
    servable: MemoryBound | None = None
    trainable: MemoryBound | None = None

    def line(self) -> str:
        """One line for people; empty if neither bound is known."""
        bounds = [f"the KV cache of a generator holds {self.servable.planned:,}"] if self.servable else []
        bounds += [f"a rank trains {self.trainable.planned:,}"] if self.trainable else []
        tokens = f"{self.configured:,} tokens"
        if self.branch != self.configured:
            tokens += f" in branches of up to {self.branch:,}"
        return f"longest rollout: {tokens}; by the plan {', '.join(bounds)}" if bounds else ""


def longest_rollout(config: Config, placement: Placement, model: PlannedModel) -> LongestRollout:
    """The longest rollout of a run, and what its processes can hold."""
    configured = config.algorithm.longest_rollout, config.algorithm.longest_branch
    if model.profile is None:
        return LongestRollout(*configured)
    return LongestRollout(
        *configured, _servable(config, placement, model.profile), _trainable(config, placement, model, model.profile)
    )


def check_longest(config: Config, placement: Placement, model: PlannedModel) -> list[str]:
    """Warnings of a longest rollout that the plan has no memory for.

    Raises:
        InputError: There is no memory for it even without all that the plan assumes beside weights, states and cache.
    """
    longest = longest_rollout(config, placement, model)
    warnings = []
    for configured, bound, holder, fix in (
        (longest.branch, longest.servable, "the KV cache of a generator holds", _more_cache),
        (longest.configured, longest.trainable, "a rank has memory to train", _less_training),
    ):
        if bound is None or configured <= bound.planned:
            continue
        is_certain = configured > bound.most
        capacity = f"{holder} at most {bound.most:,}" if is_certain else f"{holder} {bound.planned:,} by the plan"
        most = bound.most if is_certain else bound.planned
        problem = _too_long(config.algorithm, configured, most, capacity, fix(config, placement, model, longest))
        if is_certain:
            raise problem
        warnings.append(str(problem))
    return warnings or _check_micro_batch(config, placement, model)


def _check_micro_batch(config: Config, placement: Placement, model: PlannedModel) -> list[str]:
    """A warning of a larger micro-batch than the plan has memory for; InputError as `check_longest`."""
    free, tokens = free_for_ranks(config, placement), config.micro_batch_tokens
    if free is None or model.profile is None or tokens <= config.algorithm.longest_rollout:
        return []
    bound = micro_batch_bound(config, model.profile, model.size, config.learner.ranks, *free)
    used = min(tokens, useful_tokens(config, config.learner.ranks))
    if used <= bound.planned:
        return []
    is_certain = used > bound.most
    most = bound.most if is_certain else bound.planned
    fixes = [f"Set it to at most {max(most, config.algorithm.longest_rollout)}", "leave it out"]
    if not config.learner.gradient_checkpointing:
        fixes.append("set learner.gradient_checkpointing: true")
    problem = InputError(
        "learner.micro_batch_tokens",
        f"{tokens:,} tokens, and a rank has memory for {most:,}{'' if is_certain else ' by the plan'}",
        ", or ".join(fixes),
    )
    if is_certain:
        raise problem
    return [str(problem)]


def _too_long(algorithm: AlgorithmConfig, configured: int, most: int, capacity: str, fixes: list[str]) -> InputError:
    """The error of a branch, or of a rollout of several, with more tokens than a process has memory for."""
    key, what, value = "response_length", ", prompt_length + response_length,", most - algorithm.prompt_length
    if configured != algorithm.longest_branch:
        key, what, value = "rollout_length", " of several branches", most if most >= algorithm.longest_branch else 0
    nearest = [f"Set it to {value} or less"] if value > 0 else []
    return InputError(
        f"algorithm.{key}",
        f"the longest rollout{what} has {configured:,} tokens, and {capacity}",
        ", or ".join([*nearest, *fixes]) or "Use a smaller model or larger GPUs",
    )


def _more_cache(config: Config, placement: Placement, model: PlannedModel, longest: LongestRollout) -> list[str]:
    """The nearest change that gives a generator enough cache."""
    if not placement.gpus:
        return ["raise generation.kv_cache_gb"]
    gpus = next((gpus for name, gpus in placement.gpus.items() if name.startswith(GENERATION)), ())
    total = _smallest(gpus)
    num_gpus = 2 * len(gpus)
    while model.profile and total and num_gpus <= _MOST_GPUS:
        bound = servable_bound(config, model.profile, total, share=engine_share(config), num_gpus=num_gpus)
        if bound.planned >= longest.branch:
            return [f"set generation.engine.tensor_parallel_size to {num_gpus}"]
        num_gpus *= 2
    return []


def _less_training(config: Config, placement: Placement, model: PlannedModel, longest: LongestRollout) -> list[str]:
    """The nearest change under which a rank has enough memory; the first of a list that goes from cheap to slow."""
    profile, ranks = model.profile, config.learner.ranks
    if profile is None:
        return []
    changes: list[dict[str, Any]] = [{"gradient_checkpointing": True}]
    changes += [{"sequence_ranks": share} for share in (2, 4, 8, 16) if not ranks % share and profile.can_share(share)]
    changes += [{"zero_stage": 3}, {"zero_stage": 3, "offload": "all"}]
    for change in changes:
        changed = config.with_keys(learner=change)
        bound = _trainable(changed, placement, model, profile)
        if bound and changed != config and bound.planned >= longest.configured:
            return [f"set {' and '.join(f'learner.{key}: {value}' for key, value in change.items())}".lower()]
    return []


def _servable(config: Config, placement: Placement, profile: ModelProfile) -> MemoryBound | None:
    if not placement.gpus:
        return servable_in_host_memory(config, profile)
    bounds = [
        servable_bound(config, profile, total, share=engine_share(config), num_gpus=len(gpus))
        for name, gpus in placement.gpus.items()
        if name.startswith(GENERATION) and (total := _smallest(gpus)) is not None
    ]
    return min(bounds, key=lambda bound: bound.planned, default=None)


def _trainable(
    config: Config, placement: Placement, model: PlannedModel, profile: ModelProfile | None
) -> MemoryBound | None:
    free = free_for_ranks(config, placement)
    if free is None or profile is None:
        return None
    return trainable_bound(config, profile, model.size, config.learner.ranks, *free)


def _smallest(gpus: tuple[Gpu, ...]) -> int | None:
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    return min(sizes, default=None) if len(sizes) == len(gpus) else None
