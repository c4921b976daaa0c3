"""How long simulated things take and how long answers are. It travels in an environment variable, as JSON.

It simulates nothing.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from statistics import NormalDist

VARIABLE = "GSPO_SIMULATION"


@dataclass(frozen=True)
class Settings:
    """Times are seconds at time_scale 1; everything is multiplied by it, and 0 takes no time at all.

    Attributes:
        decode_s: Seconds of one decode step, for any number of requests.
        decode_s_per_request: Seconds of one decode step, for each request that runs.
        prefill_s_per_token: Until a request's first token, for each token of its prompt.
        length_median: Tokens of an answer, the end-of-sequence token among them.
        length_sigma: That of the logarithm of the length (log-normal); 0 makes all answers equally long.
        length_longest: No answer is longer than so many medians.
        start_s: From the start of the process until the engine serves.
        load_s: That generation stands still for a load of weights.
        train_s: Seconds of one training step, for any number of tokens.
        train_s_per_token: Seconds of one training step, for each token that counts.
        changed_share: The share of the elements that a step changes.
    """

    time_scale: float = 1.0
    decode_s: float = 0.01
    decode_s_per_request: float = 1e-4
    prefill_s_per_token: float = 0.0
    length_median: int = 64
    length_sigma: float = 0.0
    length_longest: float = 20.0
    start_s: float = 0.0
    load_s: float = 0.05
    train_s: float = 0.5
    train_s_per_token: float = 0.0
    changed_share: float = 0.1
    seed: int = 0

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings in the variable; the defaults where it is not set."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def to_environment(self) -> dict[str, str]:
        """The variable, for a process that is started."""
        return {VARIABLE: json.dumps(asdict(self))}

    def decode_step_s(self, num_running: int) -> float:
        """Seconds of one decode step with so many requests."""
        return self.time_scale * (self.decode_s + self.decode_s_per_request * num_running)

    def length(self, name: str) -> int:
        """Tokens of the answer of this name: the same in every process, whenever it is asked."""
        if not self.length_sigma:
            return self.length_median
        drawn = int.from_bytes(blake2b(f"{self.seed}:{name}".encode(), digest_size=7).digest(), "big") + 0.5
        length = self.length_median * math.exp(self.length_sigma * NormalDist().inv_cdf(drawn / 256**7))
        return max(1, round(min(length, self.length_longest * self.length_median)))
