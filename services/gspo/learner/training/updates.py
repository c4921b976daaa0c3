"""The optimizer steps of one training step: losses, gradients over all ranks, and updates that are not applied.

A mini-batch whose loss or gradient norm is not finite is not applied at all: weights and moments stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from gspo.common.config.schema import Config
from gspo.learner.model.batch import MicroBatch, StepBatch, rank_micro_batches
from gspo.learner.ranks.process_group import sum_over_ranks
from gspo.learner.training.mismatch_probe import SnapshotWeights, rollouts_to_probe
from gspo.learner.training.objective import StepTargets, has_gradient, micro_batch_loss, step_targets
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, SkippedUpdate
from gspo_core.figures import mismatch_stats
from gspo_core.staleness import drop_old_tokens
from gspo_core.stats import Stats, merge

# So many in a row are no accident: the policy has diverged.
MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class StepSums:
    """Results of the updates of one step: losses and norms of the applied ones, this rank's sums, the skipped ones.

    Attributes:
        targets: The values that the step's log-probs are compared with; None without a rollout to train on.
    """

    targets: StepTargets | None = None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    skipped_updates: list[SkippedUpdate] = field(default_factory=list)


class Updates:
    """Makes the optimizer steps of a step, on one rank among others.

    Args:
        engine: DeepSpeed's, over the policy model.
        reference: Frozen copy of the first policy; None if the algorithm does not need one.
        snapshot: Weights of an earlier version, to measure the mismatch with the generators.
        packing: Whether rollouts are packed one after another.
        seed: The run's.
    """

    def __init__(
        self,
        config: Config,
        engine: Any,
        reference: torch.nn.Module | None,
        device: torch.device,
        snapshot: SnapshotWeights,
        *,
        packing: bool,
        seed: int,
    ) -> None:
        self._config, self._algorithm, self._packing, self._seed = config, config.algorithm, packing, seed
        self._engine, self._reference, self._device, self._snapshot = engine, reference, device, snapshot
        self._rank, self._num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._not_finite_in_a_row = 0
        self._max_grad_norm = config.learner.max_grad_norm

    def set_hyperparameters(self, hyperparameters: Hyperparameters) -> None:
        """Make the next updates with these; a loaded checkpoint brought those of its own step."""
        for group in self._engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = hyperparameters.learning_rate, hyperparameters.weight_decay
        self._max_grad_norm = hyperparameters.max_grad_norm
        if self._config.learner.zero_stage:
            self._engine.optimizer.clip_grad = hyperparameters.max_grad_norm

    def run(self, step: int, batch: StepBatch, skip_updates: Collection[int]) -> StepSums:
        """All optimizer steps of a step, but those numbered in `skip_updates`, which an earlier run did not apply.

        Raises:
            NotFiniteError: MAX_SKIPPED_IN_A_ROW updates in a row, over steps, had no finite loss or gradient norm.
        """
        sums = StepSums()
        targets, mismatch = self._targets(step, batch)
        # Only forwards at the weights that sampled the newest tokens measure the mismatch with the generators.
        fresh_BT = None if mismatch else _fresh_tokens(step, batch)
        sums.targets = targets
        sums.stats += [mismatch, self._probe(step, batch)]
        mini_batches = sorted(set(batch.mini_batch_B.tolist()))
        cuts = {mini_batch: self._cut(batch, targets, mini_batch) for mini_batch in mini_batches}
        for update, mini_batch in enumerate(mini_batches * self._algorithm.ppo_epochs):
            if update in skip_updates:
                self._skip(sums, step, SkippedUpdate(update, mini_batch, "the log records it as not applied"))
                continue
            self._seed_random_numbers(step, update)
            reason = self._update(sums, batch, targets, cuts[mini_batch], mini_batch, fresh_BT)
            if reason:
                self._skip(sums, step, SkippedUpdate(update, mini_batch, reason))
                continue
            fresh_BT, self._not_finite_in_a_row = None, 0
        return sums

    def _skip(self, sums: StepSums, step: int, update: SkippedUpdate) -> None:
        sums.skipped_updates.append(update)
        self._not_finite_in_a_row += 1
        if self._not_finite_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"step {step}: {MAX_SKIPPED_IN_A_ROW} mini-batches in a row were not applied; of the last one "
                f"{update.reason}. Look at the rewards of that step in its log, or lower learner.learning_rate and "
                "resume"
            )

    def _update(
        self,
        sums: StepSums,
        batch: StepBatch,
        targets: StepTargets,
        cut: Sequence[MicroBatch],
        mini_batch: int,
        fresh_BT: Tensor | None,
    ) -> str:
        """One optimizer step; returns why it was not applied, empty if it was."""
        loss, stats = self._backward(batch.mini_batch_B == mini_batch, cut, targets, batch, fresh_BT)
        grad_norm = self._apply()
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        sums.losses.append(loss)
        sums.grad_norms.append(grad_norm)
        sums.stats.append(stats)
        return ""

    def _seed_random_numbers(self, step: int, update: int) -> None:
        """A model's dropout depends on seed, step, update and rank, so that a replay draws the same."""
        entropy = np.random.SeedSequence((self._seed, step, update, self._rank))
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))

    def _cut(self, batch: StepBatch, targets: StepTargets, mini_batch: int) -> list[MicroBatch]:
        """This rank's micro-batches of a mini-batch; those that need no backward pass come first."""
        rows = (batch.mini_batch_B == mini_batch).nonzero()[:, 0].tolist()
        moving_B = has_gradient(self._algorithm, targets)
        still = self._rank_cut(batch, [row for row in rows if not moving_B[row]])
        moving = [row for row in rows if moving_B[row]]
        if moving:
            return still + self._rank_cut(batch, moving, backward=True)
        # The moments decay and move the weights also under a gradient of zero.
        shortest = min(rows, key=lambda row: len(batch.sequences[row]))
        return still + self._rank_cut(batch, [shortest], backward=True, counted=False)

    def _rank_cut(
        self, batch: StepBatch, rows: Sequence[int], *, backward: bool = False, counted: bool = True
    ) -> list[MicroBatch]:
        cut = rank_micro_batches(
            batch,
            rows,
            self._config.micro_batch_tokens,
            rank=self._rank,
            num_ranks=self._num_ranks,
            packing=self._packing,
            backward=backward,
            counted=counted,
        )
        return [micro.to(self._device) for micro in cut]

    def _targets(self, step: int, batch: StepBatch) -> tuple[StepTargets, Stats]:
        """The step's targets; under `recompute` also the mismatch with the generators."""
        algorithm = self._algorithm
        recompute = algorithm.old_logprobs == "recompute"
        cut = self._rank_cut(batch, range(len(batch))) if recompute or self._reference is not None else []
        reference_BT = None if self._reference is None else self._score(self._reference, batch, cut)
        if not recompute:
            return step_targets(algorithm, batch, batch.behavior_BT, reference_BT), {}
        old_BT = self._score(self._engine, batch, cut)
        mismatch = mismatch_stats(old_BT, batch.behavior_BT, _fresh_tokens(step, batch))
        # Every rank has the whole batch here, and the sums are added up over the ranks.
        return step_targets(algorithm, batch, old_BT, reference_BT), mismatch if self._rank == 0 else _zeros(mismatch)

    def _probe(self, step: int, batch: StepBatch) -> Stats:
        """The mismatch at the snapshot's version, once its tokens have come; empty if a token is of the present one."""
        if bool(_fresh_tokens(step, batch).any()):
            return {}
        version, oldest = self._snapshot.version, int(batch.version_BT[batch.mask_BT].min())
        if version is None or version < oldest:
            self._snapshot.keep(step - 1)
            return {}
        rows, mask_BT = rollouts_to_probe(batch, version)
        if not rows:
            return {}
        with self._snapshot.in_place(present=step - 1):
            logp_BT = self._score(self._engine, batch, self._rank_cut(batch, rows))
        mismatch = mismatch_stats(logp_BT, batch.behavior_BT, mask_BT)
        return mismatch if self._rank == 0 else _zeros(mismatch)

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, batch: StepBatch, cut: Sequence[MicroBatch]) -> Tensor:
        """Log-probs [B, T] of the whole step at the model's present weights, on every rank."""
        logp_BT = torch.zeros_like(batch.behavior_BT)
        model.eval()
        for micro in cut:
            logp_N, _ = model(micro.input_RS, micro.line, micro.state_N, micro.target_N)
            logp_BT[micro.row_R, : micro.width] += micro.spread(logp_N).cpu()
        model.train()
        return sum_over_ranks(logp_BT, self._device)

    def _backward(
        self,
        of_update_B: Tensor,
        cut: Sequence[MicroBatch],
        targets: StepTargets,
        batch: StepBatch,
        fresh_BT: Tensor | None,
    ) -> tuple[float, Stats]:
        """Gradients of one optimizer step; returns its loss over all ranks and this rank's sums."""
        counted_BT = targets.mask_BT[of_update_B]
        num_sequences, num_tokens = int(counted_BT.any(-1).sum()), int(counted_BT.sum())
        losses, sums = [], []
        for micro in cut:
            self._engine.set_gradient_accumulation_boundary(micro is cut[-1])
            with torch.set_grad_enabled(micro.backward):
                logp_N, entropy_N = self._engine(micro.input_RS, micro.line, micro.state_N, micro.target_N)
                logp_RT, entropy_RT = micro.spread(logp_N), micro.spread(entropy_N.detach())
                part = micro_batch_loss(
                    self._algorithm,
                    micro,
                    logp_RT,
                    entropy_RT,
                    targets,
                    num_sequences=num_sequences,
                    num_tokens=num_tokens,
                )
            losses.append(part.loss.detach().double())
            sums.append(part.stats)
            if fresh_BT is not None:
                compared_RT = micro.take_mask(fresh_BT)
                sums.append(mismatch_stats(logp_RT.detach(), micro.take(batch.behavior_BT), compared_RT))
            if micro.backward:
                # DeepSpeed averages gradients over the ranks; N and M count all ranks, so the sum is needed. A loss
                # that is not finite may have finite gradients: it makes them NaN, on every rank, in every ZeRO stage.
                scale = self._num_ranks * torch.where(part.loss.detach().isfinite(), 1.0, math.nan)
                self._engine.backward(part.loss * scale)
        return float(sum_over_ranks(torch.stack(losses).sum(), self._device)), merge(sums)

    def _apply(self) -> float:
        """Clip and update; returns the gradient norm before the clip. A norm that is not finite updates nothing."""
        if self._config.learner.zero_stage:
            self._engine.step()
            return math.nan if self._engine.optimizer.overflow else float(self._engine.get_global_grad_norm())
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(norm):
            self._engine.optimizer.zero_grad()
            return float(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        self._engine.step()
        return float(norm)


def _fresh_tokens(step: int, batch: StepBatch) -> Tensor:
    """The counted tokens that the version before this step sampled. Bool [B, T]."""
    return drop_old_tokens(batch.version_BT, batch.mask_BT, step - 1, 0)


def _zeros(stats: Stats) -> Stats:
    return {key: torch.zeros_like(value) for key, value in stats.items()}


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return math.fsum(values) / max(1, len(values))
