"""Trains a step's rows: losses, gradients over all ranks, optimizer steps, and the steps that are not applied.

rank_control.py calls Trainer on every rank; weights, checkpoints and export are those of its base, PolicyEngine.
A mini-batch whose loss or gradient norm is not finite is not applied at all: weights and moments stay as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import MicroBatch, StepBatch, positions_of, rank_micro_batches
from gspo.learner.model.flop_counts import count_flops
from gspo.learner.model.routing_replay import RoutingReplay
from gspo.learner.objective.figures import (
    at_start,
    clip_metrics,
    correction_metrics,
    mismatch_metrics,
    objective_metrics,
)
from gspo.learner.objective.own_loss import OwnLoss
from gspo.learner.objective.step_loss import StepTargets, has_gradient, micro_batch_loss, step_targets
from gspo.learner.objective.teacher_kl import TeacherKl
from gspo.learner.ranks.out_of_memory import StepOutOfMemoryError
from gspo.learner.ranks.process_group import sum_over_ranks, sum_stats
from gspo.learner.training.mismatch_probe import (
    MismatchProbe,
    fresh_tokens,
    mismatch_of_micro_batch,
    mismatch_of_step,
)
from gspo.learner.training.policy_engine import PolicyEngine
from gspo.learner.training.step_flops import step_flops
from gspo.learner.training.step_metrics import batch_metrics, row_metrics
from gspo.learner.training.token_recorder import TokenRecorder
from gspo.learner.training.trainer_api import (
    Hyperparameters,
    NotFiniteError,
    TrainResult,
    UpdateNotApplied,
    memory_keys,
)
from gspo.runlog.memory_shortages import MemoryShortage
from gspo_core.branches import lengths_of_sequences
from gspo_core.stats import Stats, merge

# So many in a row are no accident: the policy has diverged.
_MAX_NOT_APPLIED_IN_A_ROW = 3
# Characters of torch's reason that are put on record.
_LONGEST_REASON = 200


@dataclass
class _StepSums:
    """Results of the updates of one step: losses and norms of the applied ones, this rank's sums, the others.

    `routing` are the sums of the last applied one alone. `is_fresh`: the newest version sampled every token.
    """

    stats: list[Stats]
    is_fresh: bool
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    not_applied: list[UpdateNotApplied] = field(default_factory=list)
    routing: Stats = field(default_factory=dict)


class Trainer(PolicyEngine):
    """One rank of the learner. Every rank has the same rows and makes the same calls in the same order.

    The result of a step depends on the weights and moments before it, the rows, the step number and the seed alone.
    """

    def __init__(self, config: Config, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        # Ranks that share lines have the same micro-batches, log-probs and losses; those of the first one count.
        sharing = config.learner.sequence_ranks
        self._share, self._num_shares = self._rank // sharing, self._num_ranks // sharing
        self._counts = self._rank % sharing == 0
        self._algorithm, self._not_finite_in_a_row = config.algorithm, 0
        # Of the present step: the limit of its micro-batches, and the positions of the largest one.
        self._micro_batch_tokens = self._largest = 0
        self._replay = RoutingReplay(self._routers, self._sequence_ranks, self._device)
        # After the base, which waits for rank zero: rank zero copies the file into the run directory before.
        loss = config.algorithm.loss
        self._own_loss = OwnLoss(loss.path, loss.entry) if loss.path is not None else None
        self._model_flops = count_flops(self._model.causal_lm)
        self._probe = MismatchProbe(
            self._kept,
            self._change,
            lambda batch, rows: self._score(self._engine, batch, self._rank_cut(batch, rows)),
            config.algorithm,
            config.learner.mismatch_every,
        )

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
        torch.set_num_threads(self._threads)
        by_branch = self._algorithm.ratio_of == "branch"
        batch = StepBatch.from_rows(rows, by_branch=by_branch, own_temperatures=self._config.several_temperatures)
        self._set_hyperparameters(hyperparameters)
        # Steps differ in their longest rollout, and a limit may be of another step.
        self._micro_batch_tokens = max([hyperparameters.micro_batch_tokens, *map(len, batch.sequences)])
        self._largest = 0
        try:
            return self._train(step, rows, batch, not_applied, hyperparameters)
        except torch.OutOfMemoryError as error:
            raise StepOutOfMemoryError(self._shortage(step, batch, str(error))) from error

    def _train(
        self,
        step: int,
        rows: Sequence[Row],
        batch: StepBatch,
        not_applied: Collection[int],
        hyperparameters: Hyperparameters,
    ) -> TrainResult:
        metrics = row_metrics(rows) | batch_metrics(batch, step - 1) | {"learning_rate": hyperparameters.learning_rate}
        if not len(batch):
            return TrainResult(metrics | {"mini_batches_not_applied": 0.0})
        self._replay.begin(batch)
        recorder = TokenRecorder(batch, is_on=self._config.learner.token_records)
        newest_BT = fresh_tokens(step, batch)
        targets, mismatch = self._targets(batch, newest_BT)
        sums = _StepSums([mismatch, self._probe.measure(step, batch)], bool((newest_BT == batch.mask_BT).all()))
        # Only forwards at the weights that sampled the newest tokens measure the mismatch with the generators.
        fresh_BT = None if mismatch else newest_BT
        mini_batches = sorted(set(batch.mini_batch_B.tolist()))
        cuts = {mini_batch: self._cut(batch, targets, mini_batch) for mini_batch in mini_batches}
        self._replay.share([micro for cut in cuts.values() for micro in cut])
        for update, mini_batch in enumerate(mini_batches * self._algorithm.ppo_epochs):
            if update in not_applied:
                recorded = UpdateNotApplied(update, mini_batch, "the log records it as not applied")
                self._note_not_applied(sums, step, recorded)
                continue
            # A model's dropout depends on seed, step, update and rank, so that a replay draws the same.
            entropy = np.random.SeedSequence((self._config.seed, step, update, self._rank))
            torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
            of_update_B = batch.mini_batch_B == mini_batch
            loss, stats = self._backward(of_update_B, cuts[mini_batch], targets, batch, fresh_BT, recorder)
            routing = self._replay.take_stats()
            grad_norm = self._apply(hyperparameters.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                reason = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
                self._note_not_applied(sums, step, UpdateNotApplied(update, mini_batch, reason))
                continue
            sums.stats.append(stats if sums.losses else {**stats, **at_start(stats)})
            sums.losses.append(loss)
            sums.grad_norms.append(grad_norm)
            sums.routing = routing
            fresh_BT, self._not_finite_in_a_row = None, 0
        computed = [
            number for n, number in enumerate(mini_batches * self._algorithm.ppo_epochs) if n not in not_applied
        ]
        metrics |= self._flop_metrics(batch, targets, computed) | self._update_metrics(batch, targets, sums)
        tokens = recorder.records(lambda value: sum_over_ranks(self._counted(value), self._device))
        return TrainResult(metrics, tuple(sums.not_applied), self._probe.seconds, tokens)

    def _shortage(self, step: int, batch: StepBatch, error: str) -> MemoryShortage:
        """The record of a step that ran out of memory: half of its largest micro-batch, but a whole rollout at least.

        If each rollout is a micro-batch of its own already, it turns gradient checkpointing on.
        """
        causal_lm, used = self._model.causal_lm, self._largest or self._micro_batch_tokens
        smaller = max([used // 2, *(positions_of(batch, row, packing=self._packing) for row in range(len(batch)))])
        is_checkpointing = causal_lm.is_gradient_checkpointing
        turns_on = smaller >= used and not is_checkpointing and causal_lm.supports_gradient_checkpointing
        return MemoryShortage(
            step=step,
            rank=self._rank,
            unix_s=time.time(),
            error=error.partition("\n")[0][:_LONGEST_REASON],
            keys=memory_keys(self._config),
            used_tokens=used,
            micro_batch_tokens=min(used, smaller),
            gradient_checkpointing=is_checkpointing or turns_on,
            is_last=smaller >= used and not turns_on,
        )

    def _flop_metrics(self, batch: StepBatch, targets: StepTargets, computed: Sequence[int]) -> dict[str, float]:
        algorithm = self._algorithm
        scorings = [self._model_flops] * ((algorithm.old_logprobs == "recompute") + algorithm.needs_reference)
        scorings += [self._teacher.flops] if self._teacher else []
        return step_flops(self._model_flops, batch, has_gradient(algorithm, targets), computed, scorings)

    def _update_metrics(self, batch: StepBatch, targets: StepTargets, sums: _StepSums) -> dict[str, float]:
        metrics = {"mini_batches_not_applied": float(len(sums.not_applied))}
        if not sums.losses:
            return metrics
        stats = sum_stats(merge([*sums.stats, sums.routing]), self._device)
        length_B = lengths_of_sequences(targets.mask_BT, targets.branch_BT).flatten()
        mismatch = mismatch_metrics(self._algorithm, stats, length_B)
        return {
            **metrics,
            **correction_metrics(batch, targets),
            **objective_metrics(stats),
            **mismatch,
            **clip_metrics(self._algorithm, stats, length_B, mismatch, is_fresh=sums.is_fresh),
            "loss": fmean(sums.losses),
            "grad_norm": fmean(sums.grad_norms),
        }

    def _note_not_applied(self, sums: _StepSums, step: int, update: UpdateNotApplied) -> None:
        sums.not_applied.append(update)
        self._not_finite_in_a_row += 1
        if self._not_finite_in_a_row >= _MAX_NOT_APPLIED_IN_A_ROW:
            raise NotFiniteError(
                f"step {step}: {_MAX_NOT_APPLIED_IN_A_ROW} mini-batches in a row were not applied; of the last one "
                f"{update.reason}. Look at the rewards of that step in its log, or lower learner.learning_rate and "
                "resume"
            )

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
        self,
        batch: StepBatch,
        rows: Sequence[int],
        *,
        backward: bool = False,
        counted: bool = True,
        packing: bool | None = None,
    ) -> list[MicroBatch]:
        """This rank's micro-batches of these rows, packed as the policy takes them unless `packing` is set."""
        cut = rank_micro_batches(
            batch,
            rows,
            self._micro_batch_tokens,
            rank=self._share,
            num_ranks=self._num_shares,
            packing=self._packing if packing is None else packing,
            backward=backward,
            counted=counted,
        )
        self._largest = max([self._largest, *(micro.input_RS.numel() for micro in cut)])
        return [micro.to(self._device) for micro in cut]

    def _targets(self, batch: StepBatch, newest_BT: Tensor) -> tuple[StepTargets, Stats]:
        """The values that the step's log-probs are compared with; under `recompute` also the newest mismatch."""
        algorithm = self._algorithm
        recompute = algorithm.old_logprobs == "recompute"
        cut = self._rank_cut(batch, range(len(batch))) if recompute or algorithm.needs_reference else []
        reference_BT = None
        if algorithm.needs_reference:
            with self._reference() as reference:
                reference_BT = self._score(reference, batch, cut)
        teacher = self._teacher_kl(batch)
        if not recompute:
            return step_targets(algorithm, batch, batch.behavior_BT, reference_BT, teacher), {}
        old_BT = self._score(self._engine, batch, cut, self._replay.recording)
        mismatch = mismatch_of_step(algorithm, old_BT, batch, newest_BT)
        return step_targets(algorithm, batch, old_BT, reference_BT, teacher), mismatch

    def _teacher_kl(self, batch: StepBatch) -> TeacherKl | None:
        if self._config.teacher.address is not None:
            # Logged before training: a replay asks no server, and has the same bits.
            return TeacherKl(self._config.teacher, batch.teacher_BT)
        if self._teacher is None:
            return None
        cut = self._rank_cut(batch, range(len(batch)), packing=self._teacher.is_packed)
        return TeacherKl(self._config.teacher, self._score(self._teacher.model, batch, cut))

    @torch.no_grad()
    def _score(
        self,
        model: torch.nn.Module,
        batch: StepBatch,
        cut: Sequence[MicroBatch],
        around: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext,
    ) -> Tensor:
        """Log-probs [B, T] of the whole step at the model's present weights, on every rank.

        Args:
            around: Makes the block of each pass.
        """
        logp_BT = torch.zeros_like(batch.behavior_BT)
        model.eval()
        for micro in cut:
            with around(micro):
                logp_N, _ = model(*micro.model_input)
            logp_BT[micro.row_R, : micro.width] += micro.spread(logp_N).cpu()
        model.train()
        return sum_over_ranks(self._counted(logp_BT), self._device)

    def _backward(
        self,
        of_update_B: Tensor,
        cut: Sequence[MicroBatch],
        targets: StepTargets,
        batch: StepBatch,
        fresh_BT: Tensor | None,
        recorder: TokenRecorder,
    ) -> tuple[float, Stats]:
        """Gradients of one optimizer step; returns its loss over all ranks and this rank's sums."""
        counted_BT = targets.mask_BT[of_update_B]
        num_sequences, num_tokens = int(counted_BT.any(-1).sum()), int(counted_BT.sum())
        # Of conversations; every other rollout is one.
        num_turns = int(targets.turns_B[of_update_B][counted_BT.any(-1)].sum())
        losses, sums = [], []
        for micro in cut:
            self._engine.set_gradient_accumulation_boundary(micro is cut[-1])
            with self._replay.replaying(micro):
                with torch.set_grad_enabled(micro.backward):
                    logp_N, entropy_N = self._engine(*micro.model_input)
                    if not self._algorithm.entropy_coef:
                        entropy_N = entropy_N.detach()  # its gradient costs a pass over the logits
                    logp_RT, entropy_RT = micro.spread(logp_N), micro.spread(entropy_N)
                    part, stats = micro_batch_loss(
                        self._algorithm,
                        micro,
                        logp_RT,
                        entropy_RT,
                        targets,
                        num_sequences=num_sequences,
                        num_tokens=num_tokens,
                        num_turns=num_turns,
                        own_loss=self._own_loss,
                    )
                recorder.note(micro, logp_RT, entropy_RT)
                losses.append(part.detach().double())
                sums.append(stats)
                if fresh_BT is not None:
                    sums.append(mismatch_of_micro_batch(self._algorithm, logp_RT.detach(), batch, micro, fresh_BT))
                if micro.backward:
                    # DeepSpeed averages gradients over the ranks; N and M count all ranks, so the sum is needed. A
                    # loss that is not finite may have finite gradients: it makes them NaN, on every rank, in every
                    # ZeRO stage.
                    scale = self._num_ranks * torch.where(part.detach().isfinite(), 1.0, math.nan)
                    self._engine.backward(part * scale)
        loss = sum_over_ranks(self._counted(torch.stack(losses).sum()), self._device)
        return float(loss), {name: self._counted(value) for name, value in merge(sums).items()}

    def _counted(self, value: Tensor) -> Tensor:
        """This rank's part of a sum over all ranks: 0 if another one of its lines' ranks counts the same value."""
        return value if self._counts else torch.zeros_like(value)
