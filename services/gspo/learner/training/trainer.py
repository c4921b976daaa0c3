"""Trains a step's rows: for each update and each of its micro-batches forward, loss, backward; then the update.

rank_control.py calls Trainer on every rank, and its engine for weights, checkpoints and export.
A mini-batch whose loss or gradient norm is not finite is not applied at all: weights and moments stay as they were.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo.learner.model.flop_counts import count_flops, step_flops
from gspo.learner.model.routing_replay import RoutingReplay
from gspo.learner.objective.figures import AT_END, AT_START, at_weights
from gspo.learner.objective.objective import OLD, Objective, StepTargets
from gspo.learner.ranks.process_group import sum_stats
from gspo.learner.shares.share_server import ShareServer
from gspo.learner.training.mismatch_probe import MismatchProbe
from gspo.learner.training.passes import RankPasses, scorers_of
from gspo.learner.training.policy_engine import PolicyEngine
from gspo.learner.training.token_recorder import TokenRecorder
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, TrainResult, UpdateNotApplied
from gspo_core.stats import Stats, merge

# So many in a row are no accident: the policy has diverged.
_MAX_NOT_APPLIED_IN_A_ROW = 3


@dataclass
class _Updates:
    """The updates of one step: losses, gradient norms and this rank's sums of the applied ones, and the others.

    Attributes:
        passed: The mini-batches of those whose passes were made, applied or not.
        split_s: Seconds of the passes before the first and after the last one.
    """

    passed: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    not_applied: list[UpdateNotApplied] = field(default_factory=list)
    split_s: float = 0.0


class Trainer:
    """One rank of the learner. Every rank has the same rows and makes the same calls in the same order.

    The result of a step depends on the weights and moments before it, the rows, the step number and the seed alone.

    Attributes:
        engine: The policy's weights and optimizer.
    """

    def __init__(self, config: Config, model_folder: Path, server: ShareServer | None = None) -> None:
        self._config, self.engine = config, PolicyEngine(config, model_folder, server)
        self._passes = RankPasses(config, self.engine)
        # After the engine, which waits for rank zero: rank zero copies a user's loss into the run directory before.
        self._objective = Objective(config.algorithm, config.teacher)
        self._replay = RoutingReplay(self.engine.routers, self.engine.sequence_ranks, self.engine.device)
        self._flops = count_flops(self.engine.model.causal_lm)
        self._scorers = scorers_of(config, self.engine, self._flops, self._replay.recording)
        self._probe = MismatchProbe(self.engine, self._passes, config.algorithm, config.learner.mismatch_every)
        self._recorder = TokenRecorder(is_on=config.learner.token_records)
        self._num_not_applied_in_a_row = 0

    def train(
        self, step: int, rows: Sequence[Row], not_applied: Collection[int], hyperparameters: Hyperparameters
    ) -> TrainResult:
        """Train the policy of version step - 1 on rows in training order.

        Args:
            not_applied: Numbers of the step's updates that the log records as not applied.

        Raises:
            NotFiniteError: Several mini-batches in a row, over steps, had no finite loss or gradient norm. Others
                before them were applied, so go on from a checkpoint.
            StepOutOfMemoryError: This rank's memory was too small; go on in a new process.
        """
        # OpenMP counts threads anew for every thread that calls it.
        torch.set_num_threads(self.engine.threads)
        by_branch = self._config.algorithm.ratio_of == "branch"
        batch = StepBatch.from_rows(rows, by_branch=by_branch, own_temperatures=self._config.several_temperatures)
        metrics = {"learning_rate": hyperparameters.learning_rate}
        if not len(batch):
            return TrainResult(metrics | {"mini_batches_not_applied": 0.0})
        self.engine.set_hyperparameters(hyperparameters)
        with self._passes.over(step, batch, hyperparameters.micro_batch_tokens):
            self._replay.begin(batch)
            self._probe.begin(step, batch)
            self._recorder.begin(batch)
            targets = self._targets(batch)
            updates = self._update(step, batch, targets, not_applied, hyperparameters.max_grad_norm)
            tokens = self._recorder.records(self._passes.sum)
            metrics |= self._figures(batch, targets, updates)
        return TrainResult(metrics, tuple(updates.not_applied), self._probe.seconds, updates.split_s, tokens)

    def _targets(self, batch: StepBatch) -> StepTargets:
        columns = {scorer.column: scorer.make(self._passes, batch) for scorer in self._scorers}
        if OLD in columns:
            self._probe.see_old(columns[OLD])
        return self._objective.targets(batch, columns)

    def _update(
        self, step: int, batch: StepBatch, targets: StepTargets, not_applied: Collection[int], max_grad_norm: float
    ) -> _Updates:
        """Make the optimizer steps of a training step."""
        mini_batches = sorted(set(batch.mini_batch_B.tolist()))
        cuts = {mini_batch: self._passes.cut_mini_batch(mini_batch, targets.moving_B) for mini_batch in mini_batches}
        micros = [micro for cut in cuts.values() for micro in cut]
        self._replay.share(micros)
        updates, planned = _Updates(), mini_batches * self._config.algorithm.ppo_epochs
        splits = self._config.splits_clip(step)
        if splits:
            self._look(AT_START, micros, targets, updates)
        for update, mini_batch in enumerate(planned):
            if update in not_applied:
                problem = "the log records it as not applied"
            else:
                self._seed(step, update)
                sizes = targets.sizes(batch.mini_batch_B == mini_batch)
                with self.engine.policy_at_rest():
                    loss, stats = self._gradients(cuts[mini_batch], targets, sizes)
                grad_norm = self.engine.apply(max_grad_norm)
                problem = _problem(loss, grad_norm)
                updates.passed.append(mini_batch)
                self._replay.end_update(problem)
                self._probe.end_update(problem)
            if problem:
                self._leave_out(updates, step, UpdateNotApplied(update, mini_batch, problem))
                continue
            updates.stats.append(stats)
            updates.losses.append(loss)
            updates.grad_norms.append(grad_norm)
            self._num_not_applied_in_a_row = 0
        if splits:
            self._look(AT_END, micros, targets, updates)
        return updates

    @torch.no_grad()
    def _look(self, when: str, micros: Sequence[MicroBatch], targets: StepTargets, updates: _Updates) -> None:
        """Add the ratios of the whole step at the present weights: passes without gradient, and without dropout."""
        began = time.monotonic()
        with self.engine.policy_at_rest() as model:
            model.eval()
            for micro in micros:
                with self._replay.around(micro):
                    logp_N, _ = model(*micro.model_input)
                stats = at_weights(when, self._objective.ratios(micro, micro.spread(logp_N), targets))
                # To the host, so that a GPU's time counts here.
                updates.stats.append({name: self._passes.counted(value).cpu() for name, value in stats.items()})
            model.train()
        updates.split_s += time.monotonic() - began

    def _gradients(self, cut: Sequence[MicroBatch], targets: StepTargets, sizes: dict[str, Any]) -> tuple[float, Stats]:
        """Gradients of one optimizer step; returns its loss over all ranks and this rank's sums."""
        losses, sums = [], []
        for micro in cut:
            with self._replay.around(micro):
                logp_RT, entropy_RT = self.engine.forward(micro, is_last=micro is cut[-1])
                loss, stats = self._objective.loss(micro, logp_RT, entropy_RT, targets, sizes)
                sums += [stats, self._probe.see(micro, logp_RT)]
                self._recorder.see(micro, logp_RT, entropy_RT)
                losses.append(loss.detach().double())
                if micro.backward:
                    self.engine.backward(loss)
        counted = {name: self._passes.counted(value) for name, value in merge(sums).items()}
        return float(self._passes.sum(torch.stack(losses).sum())), counted

    def _seed(self, step: int, update: int) -> None:
        """A model's dropout depends on seed, step, update and rank, so that a replay draws the same."""
        entropy = np.random.SeedSequence((self._config.seed, step, update, self.engine.rank))
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))

    def _leave_out(self, updates: _Updates, step: int, update: UpdateNotApplied) -> None:
        updates.not_applied.append(update)
        self._num_not_applied_in_a_row += 1
        if self._num_not_applied_in_a_row >= _MAX_NOT_APPLIED_IN_A_ROW:
            raise NotFiniteError(
                f"step {step}: {_MAX_NOT_APPLIED_IN_A_ROW} mini-batches in a row were not applied; of the last one "
                f"{update.reason}. Look at the rewards of that step in its log, or lower learner.learning_rate and "
                "resume"
            )

    def _figures(self, batch: StepBatch, targets: StepTargets, updates: _Updates) -> dict[str, float]:
        scorings = [scorer.flops for scorer in self._scorers if scorer.flops is not None]
        figures = step_flops(self._flops, scorings, batch, targets.moving_B, updates.passed)
        figures["mini_batches_not_applied"] = float(len(updates.not_applied))
        sums = [*updates.stats, self._replay.end(), self._probe.end()]
        self._recorder.end()
        if not updates.losses:
            return figures
        # The first sums are of the first applied update, unless the step looked at its sequences before.
        stats = sum_stats(merge([at_weights(AT_START, updates.stats[0]), *sums]), self.engine.device)
        figures |= self._objective.figures(batch, targets, stats, is_fresh=self._probe.is_fresh)
        return figures | {"loss": fmean(updates.losses), "grad_norm": fmean(updates.grad_norms)}


def _problem(loss: float, grad_norm: float) -> str:
    """Why an update is not applied; empty if it is."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return "" if math.isfinite(grad_norm) else f"the gradient norm is {grad_norm}"
