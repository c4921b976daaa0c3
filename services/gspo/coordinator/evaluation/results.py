"""The answers of one evaluation, the missing ones, and their figures: means with their errors, pass@k, lengths.

A failed score is counted and in no mean, never a number.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from gspo.common.config.evaluation import MOST_PARTS, EvaluationConfig
from gspo.common.score_numbers import reward_or_failure
from gspo_proto.rollout_pb2 import OUTCOME_EOS, OUTCOME_TRUNCATED, Scored, ScoredRollout

NEWEST_VERSION = "newest_version"


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer to a held-out prompt.

    Attributes:
        reward: None where it has no score.
        num_tokens: What the policy sampled; 0 where the answer never came.
        ended: By an end token.
        parts: Values of the reward functions by name, where there are several.
        num_turns, num_tool_calls: Counts of a conversation; 0 turns for a single answer.
    """

    reward: float | None
    num_tokens: int
    truncated: bool
    ended: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    num_turns: int = 0
    num_tool_calls: int = 0


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
        """Answers that a group has; 0 for one that is not in this evaluation."""
        if group >= 2 * self.num_prompts:
            return 0
        return int(self._config.greedy) if group % 2 else self._config.num_answers

    def expected(self) -> Iterator[tuple[int, int]]:
        """(group, number) of every expected answer."""
        for group in range(2 * self.num_prompts):
            for number in range(self.group_size(group)):
                yield group, number

    def add(self, scored: Scored) -> None:
        """Take one entry of eval_scored: an answer, or a group that was given up."""
        if scored.HasField("failure"):
            self.failure, group = scored.failure.reason, scored.failure.group
            for number in range(self.group_size(group)):
                self._answers.setdefault((group, number), HeldOutAnswer(None, 0, truncated=False))
            return
        rollout, score = scored.rollout.rollout, scored.rollout.score
        if rollout.evaluation != self.label or rollout.number >= self.group_size(rollout.group):
            return
        reward, failure = reward_or_failure(score)
        self.failure = failure or self.failure
        self._newest_version = max(self._newest_version, *rollout.version, self.version)
        self._answers.setdefault((rollout.group, rollout.number), _answer(scored.rollout, reward))

    def incomplete_groups(self, groups: Iterable[int]) -> list[int]:
        """Those of `groups` with an answer still missing."""
        return [
            group
            for group in groups
            if any((group, number) not in self._answers for number in range(self.group_size(group)))
        ]

    def figures(self, first: int | None = None) -> dict[str, float]:
        """The figures of EvaluationDone; of the `first` prompts alone where it is set.

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
        figures |= _sampled_figures(sampled, self._config.pass_ks, self._config.pass_reward) | _greedy_figures(greedy)
        if self._newest_version > self.version:
            figures[NEWEST_VERSION] = float(self._newest_version)
        return figures

    def _answers_of(self, group: int) -> list[HeldOutAnswer]:
        answers = (self._answers.get((group, number)) for number in range(self.group_size(group)))
        return [answer for answer in answers if answer is not None]


def _answer(scored: ScoredRollout, reward: float | None) -> HeldOutAnswer:
    rollout, score = scored.rollout, scored.score
    parts = {part.name: part.value for part in score.parts} if len(score.parts) > 1 else {}
    return HeldOutAnswer(
        reward=reward,
        num_tokens=sum(rollout.mask),
        truncated=rollout.outcome == OUTCOME_TRUNCATED,
        ended=rollout.outcome == OUTCOME_EOS,
        parts=parts,
        num_turns=rollout.num_turns if rollout.environment else 0,
        num_tool_calls=rollout.episode.num_tool_calls,
    )


def _sampled_figures(
    prompts: Sequence[Sequence[HeldOutAnswer]], pass_ks: Iterable[int], pass_reward: float
) -> dict[str, float]:
    """Figures of the sampled answers; one without a scored answer behind it is left out.

    The mean reward of all answers is sampled_mean: mean@k, k being their number. The chance that the best of K answers
    has at least `pass_reward` is pass_at_K. The expected reward of the best, for the largest K, is best_at_K. Both are
    over the prompts that have K scored answers. Standard errors are over prompts, for the answers to one prompt are
    not independent.

    Args:
        prompts: The answers to each prompt.
    """
    rewards = [[answer.reward for answer in answers if answer.reward is not None] for answers in prompts]
    received = [answer for answers in prompts for answer in answers if answer.num_tokens]
    figures = _mean("sampled_mean", [reward for of_prompt in rewards for reward in of_prompt])
    figures |= _error("sampled_stderr", [fmean(of_prompt) for of_prompt in rewards if of_prompt])
    passed = [[float(reward >= pass_reward) for reward in of_prompt] for of_prompt in rewards]
    for k in pass_ks:
        chances = [best_of(values, k) for values in passed if len(values) >= k]
        figures |= _mean(f"pass_at_{k}", chances) | _error(f"pass_at_{k}_stderr", chances)
    largest = max(pass_ks)
    figures |= _mean(f"best_at_{largest}", [best_of(values, largest) for values in rewards if len(values) >= largest])
    figures |= _mean("response_tokens_mean", [answer.num_tokens for answer in received])
    figures |= _mean("truncated_share", [float(answer.truncated) for answer in received])
    figures |= _mean("eos_share", [float(answer.ended) for answer in received])
    several = [of_prompt for of_prompt in rewards if len(of_prompt) > 1]
    figures |= _mean("zero_spread_groups", [float(len(set(of_prompt)) == 1) for of_prompt in several])
    figures |= _conversations("", received)
    names = dict.fromkeys(name for answer in received for name in answer.parts)
    for name in list(names)[:MOST_PARTS]:
        figures |= _mean(f"part_{name}_mean", [answer.parts[name] for answer in received if name in answer.parts])
    return figures


def _greedy_figures(answers: Sequence[HeldOutAnswer]) -> dict[str, float]:
    """Figures of the greedy answers, one a prompt."""
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    received = [answer for answer in answers if answer.num_tokens]
    figures = _mean("greedy_mean", rewards) | _error("greedy_stderr", rewards)
    figures |= _mean("greedy_response_tokens_mean", [answer.num_tokens for answer in received])
    figures |= _mean("greedy_truncated_share", [float(answer.truncated) for answer in received])
    return figures | _conversations("greedy_", received)


def _conversations(prefix: str, answers: Sequence[HeldOutAnswer]) -> dict[str, float]:
    conversations = [answer for answer in answers if answer.num_turns]
    turns = _mean(f"{prefix}turns_mean", [answer.num_turns for answer in conversations])
    return turns | _mean(f"{prefix}tool_calls_mean", [answer.num_tool_calls for answer in conversations])


def best_of(values: Sequence[float], k: int) -> float:
    """The expected maximum of k values drawn without replacement from n, unbiased for any k <= n.

    sum_i C(i - 1, k - 1) / C(n, k) * v_(i), the values in ascending order. Of values 0 and 1 with c ones it is
    1 - C(n - c, k) / C(n, k), the pass@k of Chen et al., arXiv 2107.03374.
    """
    ordered = sorted(values)
    all_draws = math.comb(len(ordered), k)
    return math.fsum(value * (math.comb(place - 1, k - 1) / all_draws) for place, value in enumerate(ordered, start=1))


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: fmean(values)} if values else {}


def _error(name: str, values: Sequence[float]) -> dict[str, float]:
    """Standard error of the mean; nothing from fewer than two values."""
    return {name: stdev(values) / math.sqrt(len(values))} if len(values) > 1 else {}
