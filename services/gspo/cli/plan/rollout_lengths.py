"""Lengths of rollouts that a plan assumes: prompts of one length, and answers with a long tail.

Answers are log-normal, cut at `algorithm.response_length`, as those of the simulated runs in benchmarks/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gspo.common.config.schema import Config

# Assumed without the user's word: an answer's mean as a share of the longest, and the spread of its logarithm.
MEAN_SHARE, SIGMA = 0.25, 1.0
_SAMPLES, _SEED = 1024, 0


@dataclass(frozen=True)
class RolloutLengths:
    """Tokens of rollouts.

    Attributes:
        prompt: Tokens of every prompt.
        median, sigma: Median and spread of the answers before the cut; sigma is of the logarithm.
        longest: The cut.
        group_size: Rollouts of one prompt.
    """

    prompt: float
    median: float
    sigma: float
    longest: int
    group_size: int

    @classmethod
    def of(
        cls, config: Config, *, prompt: float | None = None, mean: float | None = None, sigma: float = SIGMA
    ) -> RolloutLengths:
        """Lengths under a configuration; the arguments that are left out are assumed.

        Args:
            prompt: Tokens of a prompt; half of the longest by default.
            mean: Mean tokens of an answer before the cut; a quarter of the longest by default.
        """
        algorithm = config.algorithm
        mean = MEAN_SHARE * algorithm.response_length if mean is None else mean
        return cls(
            prompt=algorithm.prompt_length / 2 if prompt is None else prompt,
            median=mean / math.exp(sigma**2 / 2),
            sigma=sigma,
            longest=algorithm.response_length,
            group_size=algorithm.num_return_sequences_in_group,
        )

    def groups(self) -> NDArray[np.float64]:
        """Answers of many groups, [groups, group size]: each value as likely as the others, always the same ones."""
        normal = np.random.default_rng(_SEED).standard_normal((_SAMPLES, self.group_size))
        return np.clip(self.median * np.exp(self.sigma * normal), 1, self.longest)

    def mean(self) -> float:
        """Mean tokens of an answer."""
        return float(self.groups().mean())

    def longest_of(self, num: int) -> float:
        """Median tokens of the longest of so many answers: the quantile 2 ** (-1 / num)."""
        exponent = self.sigma * NormalDist().inv_cdf(0.5 ** (1 / num)) if self.sigma else 0.0
        return min(self.longest, self.median * math.exp(exponent))
