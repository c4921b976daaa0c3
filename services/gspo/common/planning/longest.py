"""The longest rollout that a generator can serve, the longest that a rank can train, and the micro-batch that fits.

With the micro-batch goes the choice whether the backward pass computes activations again.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import floor

from gspo.common.config.schema import Config
from gspo.common.host.machine import DEFAULT_SHARE, GIB, SHARE_ARGUMENT
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import CONTEXT_BYTES, generator_memory, kv_bytes, rank_memory, reserved_bytes
from gspo.common.planning.model_profile import ModelProfile

# No model reads more.
_MOST_TOKENS = 1 << 24
# A default micro-batch beyond these saves little.
_MOST_FILLED, _STEP_TOKENS = 65_536, 1024
# Assumed: a micro-batch that keeps a GPU busy. From here on a larger one saves less than activations that are kept.
_ENOUGH_TOKENS = 8192


def engine_share(config: Config) -> float:
    """The share of a GPU's memory that vLLM takes for one generator."""
    share = config.generation.engine.get(SHARE_ARGUMENT)
    return float(share) if isinstance(share, (int, float)) else DEFAULT_SHARE


def share_beside(used_bytes: float, gpu_bytes: float) -> float:
    """The share of a GPU's memory that one with a rank has left for vLLM, rounded down to hundredths.

    Args:
        used_bytes: By the tensors of the rank, and by other programs.
    """
    return floor(100 * (1 - (used_bytes + reserved_bytes(gpu_bytes)) / gpu_bytes)) / 100


def kept_by_generators(config: Config, gpu_bytes: float, num_generators: int) -> float:
    """Bytes of a GPU that a rank cannot have beside so many generators.

    In the learner's shift on shared GPUs these are their contexts alone.
    """
    a_generator = CONTEXT_BYTES if config.placement == "shared" else gpu_bytes * engine_share(config)
    return a_generator * num_generators


@dataclass(frozen=True)
class MemoryBound:
    """Tokens of the longest rollout that fits into memory.

    Attributes:
        planned: With all that the plan counts.
        most: Without its assumptions: an engine's working memory, a GPU's memory in pieces.
    """

    planned: int
    most: int


def servable_bound(
    config: Config, profile: ModelProfile, gpu_bytes: float, *, share: float, num_gpus: int
) -> MemoryBound:
    """The capacity of a generator's KV cache: vLLM does not start with a cache smaller than its longest sequence.

    Args:
        share: Share of each GPU, for vLLM.
        num_gpus: GPUs of one generator.
    """
    memory = generator_memory(config, profile, gpu_bytes, share=share, tensor_parallel=num_gpus)
    most = (memory.kv_cache + memory.working) / kv_bytes(config, profile, num_gpus)
    return MemoryBound(_within_positions(memory.tokens, profile), _within_positions(most, profile))


def servable_in_host_memory(config: Config, profile: ModelProfile) -> MemoryBound:
    """As `servable_bound`, for an engine on the CPU, whose cache has generation.kv_cache_gb."""
    tokens = _within_positions(config.generation.kv_cache_gb * GIB / kv_bytes(config, profile), profile)
    return MemoryBound(tokens, tokens)


def trainable_bound(
    config: Config, profile: ModelProfile, size: TrainedSize, ranks: int, free_bytes: float, reserve_bytes: float
) -> MemoryBound:
    """The capacity of a rank: a micro-batch of this rollout alone fits on its GPU.

    Args:
        free_bytes: Bytes of the GPU for the tensors of the rank.
        reserve_bytes: Bytes of the GPU that the plan leaves free beside them.
    """

    bound = micro_batch_bound(config, profile, size, ranks, free_bytes, reserve_bytes)
    if config.algorithm.rollout_length:  # each branch of a rollout has positions of its own
        return bound
    return MemoryBound(_within_positions(bound.planned, profile), _within_positions(bound.most, profile))


def micro_batch_bound(
    config: Config, profile: ModelProfile, size: TrainedSize, ranks: int, free_bytes: float, reserve_bytes: float
) -> MemoryBound:
    """The largest micro-batch of a rank; arguments as `trainable_bound`."""

    def most_within(num_bytes: float) -> int:
        return _largest(lambda tokens: _fits(config, profile, size, ranks, num_bytes, max(1, tokens)), _MOST_TOKENS)

    return MemoryBound(most_within(free_bytes), most_within(free_bytes + reserve_bytes))


def useful_tokens(config: Config, ranks: int) -> int:
    """Tokens of a mini-batch of the longest rollouts, divided over the ranks: no micro-batch has more."""
    algorithm, groups_of_ranks = config.algorithm, max(1, ranks // config.learner.sequence_ranks)
    return algorithm.longest_rollout * -(-algorithm.num_rollouts // (algorithm.num_mini_batches * groups_of_ranks))


def fitting_micro_batch(config: Config, profile: ModelProfile, size: TrainedSize, ranks: int, free_bytes: float) -> int:
    """Tokens of the largest useful micro-batch that fits on a GPU, and at least the longest rollout."""
    longest = config.algorithm.longest_rollout

    def fits(num_steps: int) -> bool:
        return _fits(config, profile, size, ranks, free_bytes, max(1, num_steps * _STEP_TOKENS))

    most = min(useful_tokens(config, ranks), max(_MOST_FILLED, longest))
    return max(longest, _STEP_TOKENS * _largest(fits, -(-most // _STEP_TOKENS)))


def enough_tokens(config: Config, ranks: int) -> int:
    """Tokens of a micro-batch that keeps a GPU busy: the longest rollout, and 8,192 where a mini-batch has as many."""
    return max(config.algorithm.longest_rollout, min(_ENOUGH_TOKENS, useful_tokens(config, ranks)))


def needs_checkpointing(
    config: Config, profile: ModelProfile, size: TrainedSize, ranks: int, free_bytes: float, tokens: int | None = None
) -> bool:
    """Whether the backward pass has to compute activations again on a GPU with so many bytes for a rank.

    Not if a micro-batch fits without that: the longest rollout, and 8,192 tokens where a mini-batch has as many.

    Args:
        tokens: The micro-batch that has to fit instead.
    """
    if tokens is None:
        tokens = enough_tokens(config, ranks)
    kept = config.with_keys(learner={"gradient_checkpointing": False})
    return not _fits(kept, profile, size, ranks, free_bytes, tokens)


def _fits(
    config: Config, profile: ModelProfile, size: TrainedSize, ranks: int, num_bytes: float, num_tokens: int
) -> bool:
    changed = config.with_keys(learner={"micro_batch_tokens": num_tokens})
    return rank_memory(changed, size, ranks, profile=profile).peak <= num_bytes


def _within_positions(num_tokens: float, profile: ModelProfile) -> int:
    return max(0, min(int(num_tokens), profile.max_positions or int(num_tokens)))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if every smaller one fits too; 0 if none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
