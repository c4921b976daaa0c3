"""The answers of one evaluation, the missing ones, and their figures.

A failed score is counted and in no mean, never a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gspo.common.config.evaluation import EvaluationConfig
from gspo.coordinator.evaluation.figures import HeldOutAnswer, greedy_figures, sampled_figures
from gspo_proto.rollout_pb2 import OUTCOME_TRUNCATED, Scored, ScoredRollout

NEWEST_VERSION = "newest_version"


class EvaluationResults:
    """Collects the scored answers of one evaluation; the first result of an id wins.

    Args:
        label: The evaluation's label; answers of another are ignored.
        version: The measured version.
        num_prompts: Prompts of the evaluation. Group 2 * i holds the sampled answers to prompt i, group 2 * i + 1 the
            greedy one.
        config: The number of answers, greedy or not, and the reward that passes.
    """

    def __init__(self, label: str, version: int, num_prompts: int, config: EvaluationConfig) -> None:
        self.label, self.version, self.num_prompts, self._config = label, version, num_prompts, config
        self.num_expected = num_prompts * (config.num_answers + int(config.greedy))
        self._answers: dict[tuple[int, int], HeldOutAnswer] = {}
        self._newest_version = version
        self.failure = ""

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def complete(self) -> bool:
        """Whether every answer has come, scored or failed."""
        return len(self) == self.num_expected

    def group_size(self, group: int) -> int:
        """Answers that a group has."""
        return 1 if group % 2 else self._config.num_answers

    def expected(self) -> Iterator[tuple[int, int]]:
        """(group, number) of every expected answer."""
        for group in range(0, 2 * self.num_prompts, 1 if self._config.greedy else 2):
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
        self._newest_version = max(self._newest_version, *rollout.version, self.version)
        self._answers.setdefault((rollout.group, rollout.number), _answer(scored.rollout))

    def incomplete_groups(self, groups: Iterable[int]) -> list[int]:
        """Those of `groups` with an answer still missing."""
        return [
            group
            for group in groups
            if any((group, number) not in self._answers for number in range(self.group_size(group)))
        ]

    def figures(self, first: int | None = None) -> dict[str, float]:
        """The figures of EvaluationDone, as figures.py explains them; of the `first` prompts alone where it is set.

        num_failed counts answers without a score. newest_version appears where newer weights than the measured ones
        sampled some of the answers.
        """
        num_prompts = min(first or self.num_prompts, self.num_prompts)
        prompts = range(num_prompts)
        sampled = [self._answers_of(2 * prompt) for prompt in prompts]
        greedy = [answer for prompt in prompts for answer in self._answers_of(2 * prompt + 1)]
        scored = sum(answer.reward is not None for answers in (*sampled, greedy) for answer in answers)
        num_expected = num_prompts * (self._config.num_answers + int(self._config.greedy))
        figures = {
            "num_prompts": float(num_prompts),
            "num_answers": float(self._config.num_answers),
            "num_failed": float(num_expected - scored),
        }
        figures |= sampled_figures(sampled, self._config.pass_ks, self._config.pass_reward) | greedy_figures(greedy)
        if self._newest_version > self.version:
            figures[NEWEST_VERSION] = float(self._newest_version)
        return figures

    def _answers_of(self, group: int) -> list[HeldOutAnswer]:
        answers = (self._answers.get((group, number)) for number in range(self.group_size(group)))
        return [answer for answer in answers if answer is not None]

    def _expects(self, group: int, number: int) -> bool:
        known = group < 2 * self.num_prompts and (self._config.greedy or group % 2 == 0)
        return known and number < self.group_size(group)

    def _fail_rest_of(self, group: int) -> None:
        for number in range(self.group_size(group)):
            if self._expects(group, number):
                self._answers.setdefault((group, number), HeldOutAnswer(None, 0, truncated=False))


def _answer(scored: ScoredRollout) -> HeldOutAnswer:
    rollout, score = scored.rollout, scored.score
    parts = {part.name: part.value for part in score.parts} if len(score.parts) > 1 else {}
    return HeldOutAnswer(
        reward=score.reward if score.HasField("reward") else None,
        num_tokens=sum(rollout.mask),
        truncated=rollout.outcome == OUTCOME_TRUNCATED,
        parts=parts,
        num_turns=rollout.num_turns if rollout.environment else 0,
        num_tool_calls=rollout.episode.num_tool_calls,
    )
