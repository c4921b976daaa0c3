"""The memory of a run's open groups, by service.

Each service's check refuses a batch that does not fit with the shortest answers, and warns of one that does not fit
with the longest.

The bytes of a group are the least that was measured over real entries on Python 3.11 and Redis 6.2.
tests/integration/common/test_batch_memory.py measures them again.
"""

from dataclasses import dataclass

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import GIB

# The coordinator: one open group in its tables, and one answer of an evaluation.
OPEN_GROUP, ANSWER = 220, 100
# Redis: a task with its field of `open`, a scored answer, and a token of one (id, log-prob, version, mask).
REDIS_GROUP, REDIS_ROLLOUT, REDIS_TOKEN = 250, 250, 9
# The learner: a scored answer with its entry, and a token of one.
LEARNER_ROLLOUT, LEARNER_TOKEN = 900, 12


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
        tasks + _open_rollouts(config) * (REDIS_ROLLOUT + REDIS_TOKEN * config.algorithm.longest_answer),
    )


def learner_bytes(config: Config) -> MemoryNeed:
    """The answers that wait for their group or their step."""
    return MemoryNeed(
        config.algorithm.num_rollouts * LEARNER_ROLLOUT,
        _open_rollouts(config) * (LEARNER_ROLLOUT + LEARNER_TOKEN * config.algorithm.longest_answer),
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
    key = "rollout_length" if algorithm.rollout_length else "response_length"
    return (
        f"algorithm.{key}: if every answer took all {algorithm.longest_answer} tokens, the {slots} open "
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
