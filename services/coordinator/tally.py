"""The answers of one evaluation and the figures made of them.

Pure bookkeeping, no Redis. A failed score is left out and counted, never a number. Neighbour: evaluation.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

from gspo_proto.rollout_pb2 import OUTCOME_TRUNCATED, Scored


@dataclass(frozen=True)
class _Answer:
    reward: float | None
    num_tokens: int
    truncated: bool


class Tally:
    """Collects the scored answers of one evaluation; the first result of an id wins.

    Args:
        label: The evaluation's label; answers of another are passed over.
        num_prompts: Prompts asked.
        num_answers: Sampled answers to each (group 2 * i).
        greedy: Whether each prompt has a greedy answer too (group 2 * i + 1).
    """

    def __init__(self, label: str, *, num_prompts: int, num_answers: int, greedy: bool) -> None:
        self.label, self.num_prompts, self.num_answers, self._greedy = label, num_prompts, num_answers, greedy
        self.num_expected = num_prompts * (num_answers + int(greedy))
        self._answers: dict[tuple[int, int], _Answer] = {}
        self.failure = ""

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def complete(self) -> bool:
        """Whether every answer is in, scored or failed."""
        return len(self) == self.num_expected

    def group_size(self, group: int) -> int:
        """Answers that a group has."""
        return 1 if group % 2 else self.num_answers

    def expected(self) -> Iterator[tuple[int, int]]:
        """(group, number) of every answer asked for."""
        for group in range(0, 2 * self.num_prompts, 1 if self._greedy else 2):
            for number in range(self.group_size(group)):
                yield group, number

    def add(self, scored: Scored) -> None:
        """Take one entry of eval_scored: an answer, or a group that was given up."""
        if scored.HasField("failure"):
            self.failure = scored.failure.reason
            self._fail_rest_of(scored.failure.group)
            return
        rollout, score = scored.rollout.rollout, scored.rollout.score
        if rollout.evaluation != self.label or not self._expects(rollout.group, rollout.number):
            return
        if score.HasField("failure"):
            self.failure = score.failure
        reward = score.reward if score.HasField("reward") else None
        answer = _Answer(reward, sum(rollout.mask), rollout.outcome == OUTCOME_TRUNCATED)
        self._answers.setdefault((rollout.group, rollout.number), answer)

    def incomplete_groups(self, groups: Iterable[int]) -> list[int]:
        """Those of `groups` with an answer still missing."""
        return [
            group
            for group in groups
            if any((group, number) not in self._answers for number in range(self.group_size(group)))
        ]

    def figures(self) -> dict[str, float]:
        """The figures of EvaluationDone; one without a single scored answer behind it is left out.

        sampled_mean and greedy_mean are mean rewards, sampled_stderr and greedy_stderr their standard errors over
        prompts, since answers to one prompt are not independent; pass_at_k is the mean over prompts of the best
        reward among their sampled answers, which is pass@k where rewards are 0 or 1; num_failed counts answers
        without a score.
        """
        sampled = {id_: answer for id_, answer in self._answers.items() if id_[0] % 2 == 0}
        greedy = [answer for (group, _), answer in self._answers.items() if group % 2]
        by_prompt: dict[int, list[float]] = {}
        for (group, _), answer in self._answers.items():
            if answer.reward is not None:
                by_prompt.setdefault(group, []).append(answer.reward)
        best = [max(rewards) for group, rewards in by_prompt.items() if group % 2 == 0]
        came = [answer for answer in sampled.values() if answer.num_tokens]
        failed = sum(answer.reward is None for answer in self._answers.values())
        figures = {
            "num_prompts": float(self.num_prompts),
            "num_answers": float(self.num_answers),
            "num_failed": float(self.num_expected - len(self) + failed),
        }
        figures |= _mean("sampled_mean", [a.reward for a in sampled.values() if a.reward is not None])
        figures |= _mean("greedy_mean", [a.reward for a in greedy if a.reward is not None])
        figures |= _stderr("sampled_stderr", [fmean(rewards) for group, rewards in by_prompt.items() if group % 2 == 0])
        figures |= _stderr("greedy_stderr", [fmean(rewards) for group, rewards in by_prompt.items() if group % 2])
        figures |= _mean("pass_at_k", best)
        figures |= _mean("response_tokens_mean", [a.num_tokens for a in came])
        return figures | _mean("truncated_share", [float(a.truncated) for a in came])

    def _expects(self, group: int, number: int) -> bool:
        known = group < 2 * self.num_prompts and (self._greedy or group % 2 == 0)
        return known and number < self.group_size(group)

    def _fail_rest_of(self, group: int) -> None:
        for number in range(self.group_size(group)):
            if self._expects(group, number):
                self._answers.setdefault((group, number), _Answer(None, 0, False))


def _mean(name: str, values: list[float] | list[int]) -> dict[str, float]:
    return {name: fmean(values)} if values else {}


def _stderr(name: str, values: list[float]) -> dict[str, float]:
    """Standard error of the mean; nothing from fewer than two values."""
    return {name: stdev(values) / math.sqrt(len(values))} if len(values) > 1 else {}
