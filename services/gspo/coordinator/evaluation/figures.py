"""The figures of an evaluation, from its answers: means with their errors, pass@k, lengths, parts of the reward.

Pure arithmetic, no Redis and no protobuf. An answer without a score is in no mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

# Their names come from the user's functions: a figure each, and no more of them than a page shows.
_MOST_PARTS = 32


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer to a held-out prompt.

    Attributes:
        reward: None where it has no score.
        num_tokens: What the policy sampled; 0 where the answer never came.
        parts: Values of the reward functions by name, where there are several.
        num_turns, num_tool_calls: Of a conversation; 0 turns where it is one answer.
    """

    reward: float | None
    num_tokens: int
    truncated: bool
    parts: dict[str, float] = field(default_factory=dict)
    num_turns: int = 0
    num_tool_calls: int = 0


def sampled_figures(
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
    figures |= _conversations("", received)
    names = dict.fromkeys(name for answer in received for name in answer.parts)
    for name in list(names)[:_MOST_PARTS]:
        figures |= _mean(f"part_{name}_mean", [answer.parts[name] for answer in received if name in answer.parts])
    return figures


def greedy_figures(answers: Sequence[HeldOutAnswer]) -> dict[str, float]:
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
