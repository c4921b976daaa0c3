"""The mismatch between generators and learner at equal weights, also if a step has no token of the newest version.

With a lag, a step trains on samples of an earlier version. Against newer weights their log-probs differ by drift and
noise together. So now and then the learner keeps the weights of a version until its rollouts come, and scores a few of
them under these weights: the remaining difference is noise.
"""

import time

import torch
from torch import Tensor

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo.learner.objective.figures import compared_stats
from gspo.learner.training.passes import RankPasses
from gspo.learner.training.policy_engine import PolicyEngine
from gspo_core.staleness import drop_old_tokens
from gspo_core.stats import Stats, merge

# Few are enough: 16 answers of 100 tokens give the token's sigma to 2 % and the sequence's to a fifth.
_NUM_PROBED_ROLLOUTS = 16


class MismatchProbe:
    """Compares the log-probs of a step's newest tokens, or of a version that it keeps, with those of the generators.

    It keeps the trained weights of one version in host memory. Float32 ones: a rounded copy would bring back another
    policy. Ranks with parts of the weights keep these, and exchange nothing.

    It does so where `every` steps have passed without a measurement. Tokens of the present version are measured
    without it, by the first forward pass at these weights.

    Attributes:
        seconds: Time of this step's measurement at a kept version.
        is_fresh: Whether the newest version sampled every token of the step.

    Args:
        engine: Has the weights.
        passes: Score rollouts.
        every: Steps between two measurements; 0 for none.
    """

    def __init__(self, engine: PolicyEngine, passes: RankPasses, algorithm: AlgorithmConfig, every: int) -> None:
        self._engine, self._passes, self._algorithm, self._every = engine, passes, algorithm, every
        self._version: int | None = None
        self._kept: list[Tensor] = []
        self._due_step = 0
        self.seconds, self.is_fresh = 0.0, False

    def begin(self, step: int, batch: StepBatch) -> None:
        """Measure the mismatch at the kept version, once its tokens have come.

        During the measurement the model has the kept weights. After it the model has its own again, to the bit.
        """
        self._batch = batch
        # The counted tokens that the version before this step sampled.
        self._newest_BT = drop_old_tokens(batch.version_BT, batch.mask_BT, step - 1, 0)
        self.is_fresh, self._is_at_start = bool((self._newest_BT == batch.mask_BT).all()), True
        began = time.monotonic()
        self._stats = self._measure(step, batch)
        self.seconds = time.monotonic() - began

    def see_old(self, old_BT: Tensor) -> None:
        """The log-probs [B, T] at the step's first weights measure the mismatch; then no update has to."""
        self._stats = merge([self._stats, self._of_step(old_BT, self._newest_BT)])
        self._is_at_start = False

    def see(self, micro: MicroBatch, logp_RT: Tensor) -> Stats:
        """Only forwards at the weights that sampled the newest tokens measure the mismatch with the generators."""
        if not self._is_at_start:
            return {}
        take, batch = micro.take, self._batch
        branch_RT = None if batch.branch_BT is None else take(batch.branch_BT)
        masks = micro.take_mask(self._newest_BT), micro.take_mask(batch.mask_BT)
        return compared_stats(self._algorithm, logp_RT.detach(), take(batch.behavior_BT), *masks, branch_RT)

    def end_update(self, problem: str) -> None:
        """An applied update makes other weights."""
        self._is_at_start = self._is_at_start and bool(problem)

    def end(self) -> Stats:
        """Figures of the measurements over the whole step."""
        stats = self._stats
        del self._batch, self._newest_BT, self._stats
        return stats

    def _of_step(self, logp_BT: Tensor, mask_BT: Tensor) -> Stats:
        """The mismatch of the tokens in a mask, at log-probs that every rank has: counted by rank zero alone."""
        batch = self._batch
        compared = logp_BT, batch.behavior_BT, mask_BT, batch.mask_BT, batch.branch_BT
        stats = compared_stats(self._algorithm, *compared)
        return {key: value if self._engine.rank == 0 else torch.zeros_like(value) for key, value in stats.items()}

    def _measure(self, step: int, batch: StepBatch) -> Stats:
        if not self._every:
            return {}
        if bool(self._newest_BT.any()):
            self._note_measured(step)
            return {}
        if step < self._due_step:
            return {}
        if self._version is None or self._version < int(batch.version_BT[batch.mask_BT].min()):
            self._keep(step - 1)
            return {}
        rows, mask_BT = _rollouts_to_probe(batch, self._version)
        if not rows:
            return {}
        with self._engine.exchanged(self._kept):
            logp_BT = self._passes.score(self._engine.deepspeed, self._passes.cut(rows))
        self._note_measured(step)
        return self._of_step(logp_BT, mask_BT)

    def _note_measured(self, step: int) -> None:
        """The next measurement is due later; until then no weights are kept."""
        self._due_step, self._version, self._kept = step + self._every, None, []

    def _keep(self, version: int) -> None:
        self._kept = []  # before the next copies, so that there is one version at a time
        self._kept, self._version = self._engine.kept(), version


def _rollouts_to_probe(batch: StepBatch, version: int) -> tuple[list[int], Tensor]:
    """The rollouts with the most tokens of a version, and the mask of these tokens. Bool [B, T]."""
    of_version_BT = batch.mask_BT & (batch.version_BT == version)
    num_B = of_version_BT.sum(-1)
    most = sorted((row for row in range(len(batch)) if num_B[row]), key=lambda row: -int(num_B[row]))
    probed = sorted(most[:_NUM_PROBED_ROLLOUTS])
    chosen_B1 = torch.zeros(len(batch), 1, dtype=torch.bool)
    chosen_B1[probed] = True
    return probed, of_version_BT & chosen_B1
