"""Scores the first answers of a process a second time, in the reverse order: a score should follow from the answer.

It counts no calls, and changes no score. consumer.py calls it once.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gspo.common.reward_uses import EPISODE_PARTS
from gspo.reward.functions.library import Library, UnknownFunctionError
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import Value
from gspo.reward.scoring.scorer import parts_of
from gspo_proto.rollout_pb2 import RewardUse, Rollout, Score, ScoresDiffer

# Answers that are scored twice, and the seconds of a function's first scores above which it is left alone.
NUM_REPEATED, MOST_S = 16, 10.0
# Of the largest value: batches of a reward model are rounded otherwise in another order.
_ROUNDING = 0.01

ScoredAnswer = tuple[Rollout, Score]


async def repeat_scores(library: Library, scored: Sequence[ScoredAnswer], *, batch_size: int) -> list[ScoresDiffer]:
    """The functions that give some of the answers another value now."""
    by_use: defaultdict[tuple[str, str], list[tuple[RewardUse, ScoredAnswer]]] = defaultdict(list)
    for rollout, score in scored:
        for use in rollout.rewards:
            if use.name not in EPISODE_PARTS and score.seconds[use.name] <= MOST_S:
                by_use[use.name, use.version].append((use, (rollout, score)))
    repeated = [await _repeat(library, own, batch_size) for own in by_use.values()]
    return [differing for differing in repeated if differing is not None]


async def _repeat(
    library: Library, scored: Sequence[tuple[RewardUse, ScoredAnswer]], batch_size: int
) -> ScoresDiffer | None:
    reverse, differing, num_answers = list(reversed(scored)), list[tuple[float, float]](), 0
    for start in range(0, len(reverse), batch_size):
        batch = reverse[start : start + batch_size]
        try:
            function = await library.find(batch[0][0].name, batch[0][0].version)
            values, _ = await function.score([rollout for _, (rollout, _) in batch], session="")
        except (CallError, UnknownFunctionError):
            return None
        for (use, (_, score)), value in zip(batch, values, strict=True):
            if not isinstance(value, Value):
                continue
            first = {part.name: part.value for part in score.parts}
            again = {part.name: part.value for part in parts_of(use, value, "")}
            num_answers += bool(again.keys() & first.keys())
            if (pair := _other_value(first, again)) is not None:
                differing.append(pair)
    if not differing:
        return None
    name, (first_value, again_value) = scored[0][0].name, differing[0]
    return ScoresDiffer(
        function=name,
        num_differing=len(differing),
        num_answers=num_answers,
        first=first_value,
        again=again_value,
    )


def _other_value(first: Mapping[str, float], again: Mapping[str, float]) -> tuple[float, float] | None:
    """The first part of both whose values differ by more than rounding."""
    for name in first.keys() & again.keys():
        if abs(first[name] - again[name]) > _ROUNDING * max(abs(first[name]), abs(again[name])):
            return first[name], again[name]
    return None
