"""The objective of a run: the targets of a step, the loss of a micro-batch, and their figures.

The one place where the keys of algorithm and teacher become arguments of gspo_core, which has the formulas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.teacher import TeacherConfig
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo.learner.objective import figures
from gspo.learner.objective.own_loss import LossBatch, OwnLoss
from gspo_core.advantage import rediscounted_penalty, token_advantages
from gspo_core.correction import behavior_stats, behavior_weights
from gspo_core.figures import policy_stats, ratio_stats
from gspo_core.kl import kl_divergence
from gspo_core.loss import aggregate_loss
from gspo_core.stats import Stats, mean_stats
from gspo_core.stats import figures as stats_figures
from gspo_core.token_losses import SampledTokens, TokenLoss, cispo_loss, clip_loss, dppo_loss, lengths_of_sequences

# Columns that scorers make: log-probs [B, T] by the policy at the step's first weights, by the first policy, and by the
# teacher. They are at the temperature of the sampling, and mean nothing outside the mask.
OLD, REFERENCE, TEACHER = "old", "reference", "teacher"


@dataclass(frozen=True)
class StepTargets:
    """The values that a step's log-probs are compared with. All [B, T].

    Attributes:
        old_BT: Denominator of the ratio.
        mask_BT: The tokens that count, without those that the behavior correction excludes.
        turns_B: The turns of each rollout, 1 unless it is a conversation. [B]
        moving_B: Bool: the rollouts with a gradient. [B]
        stats: Those of that correction, over the whole step; empty without one.
        reference_BT, teacher_BT: The columns; None where the objective does not need them.
        branch_BT, turn_BT: As in the batch; None for the turns where no key weighs them.
    """

    old_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    turns_B: Tensor
    moving_B: Tensor
    stats: Stats
    reference_BT: Tensor | None
    teacher_BT: Tensor | None
    branch_BT: Tensor | None
    turn_BT: Tensor | None

    def sizes(self, of_update_B: Tensor) -> dict[str, Any]:
        """N, M and K of an optimizer step with these rollouts, over all ranks and micro-batches."""
        counted_BT, turns_B = self.mask_BT[of_update_B], self.turns_B[of_update_B]
        counted_B = counted_BT.any(-1)
        return {
            "num_sequences": int(counted_B.sum()),
            "num_tokens": int(counted_BT.sum()),
            "num_turns": int(turns_B[counted_B].sum()),
        }


class Objective:
    """The objective of one run.

    Raises:
        InputError: The file of a loss of the user's own cannot be run, or has no such function.
    """

    def __init__(self, algorithm: AlgorithmConfig, teacher: TeacherConfig) -> None:
        self._algorithm, self._teacher = algorithm, teacher
        self._teaches_by_loss = teacher.used and teacher.kl_in == "loss"
        loss = algorithm.loss
        self._own_loss = OwnLoss(loss.path, loss.entry) if loss.path is not None else None
        self._token_loss = _token_loss(algorithm)

    def targets(self, batch: StepBatch, columns: Mapping[str, Tensor]) -> StepTargets:
        """Correct for stale behavior, penalise by KL, and place the advantages, over the whole step."""
        algorithm = self._algorithm
        old_BT, reference_BT = columns.get(OLD, batch.behavior_BT), columns.get(REFERENCE)
        teacher_BT = columns.get(TEACHER)
        weight_BT, keep_BT, stats = self._correction("recompute", old_BT, batch.behavior_BT, batch.mask_BT)
        mask_BT = batch.mask_BT & keep_BT
        penalties, discount = [], self._teacher.kl_discount
        if algorithm.add_token_level_kl and reference_BT is not None:
            penalties.append(algorithm.kl_coef * kl_divergence(old_BT, reference_BT, "k1"))
        if teacher_BT is not None and not self._teaches_by_loss:
            taught_BT = self._teacher.coef * kl_divergence(old_BT, teacher_BT, "k1")
            if discount is not None:
                taught_BT = rediscounted_penalty(taught_BT, mask_BT, own_gamma=discount, gamma=algorithm.gamma)
            penalties.append(taught_BT)
        advantage_BT = token_advantages(
            torch.tensor([row.advantage for row in batch.rows], dtype=torch.float64),
            mask_BT,
            token_penalty_BT=torch.stack(penalties).sum(0) if penalties else None,
            gamma=algorithm.gamma,
            whiten_advantages=algorithm.whiten_advantages,
            advantage_clip=algorithm.advantage_clip,
        )
        turns_B = torch.tensor([row.num_turns for row in batch.rows], dtype=torch.long)
        weighted_BT = (advantage_BT * weight_BT).float()
        return StepTargets(
            old_BT=old_BT,
            advantage_BT=weighted_BT,
            mask_BT=mask_BT,
            turns_B=turns_B,
            moving_B=(mask_BT & (self._always_moves() | (weighted_BT != 0))).any(-1),
            stats=stats,
            reference_BT=reference_BT,
            teacher_BT=teacher_BT,
            branch_BT=batch.branch_BT,
            turn_BT=batch.turn_BT if algorithm.averages_turns else None,
        )

    def _always_moves(self) -> bool:
        """Whether rollouts without an advantage have a gradient, by a KL term, an entropy bonus or an own loss."""
        algorithm = self._algorithm
        has_kl_loss = bool(algorithm.use_kl_loss and algorithm.kl_loss_coef)
        return self._own_loss is not None or self._teaches_by_loss or bool(algorithm.entropy_coef) or has_kl_loss

    def loss(
        self, micro: MicroBatch, logp_RT: Tensor, entropy_RT: Tensor, targets: StepTargets, sizes: Mapping[str, Any]
    ) -> tuple[Tensor, Stats]:
        """The policy's loss, with KL terms and an entropy bonus if the keys ask for them.

        Loss and stats add up over the micro-batches and ranks of the optimizer step.

        Args:
            entropy_RT: That of the policy's distribution at each token.
            sizes: Those of the optimizer step, from StepTargets.sizes.

        Raises:
            InputError: The user's own loss raised, or returned no losses.
        """
        algorithm, mask_RT = self._algorithm, micro.take_mask(targets.mask_BT)
        old_RT, advantage_RT = micro.take(targets.old_BT), micro.take(targets.advantage_BT)
        reference_RT, teacher_RT, branch_RT, turn_RT = (
            None if x_BT is None else micro.take(x_BT)
            for x_BT in (targets.reference_BT, targets.teacher_BT, targets.branch_BT, targets.turn_BT)
        )
        aggregated = {
            "loss_agg_mode": algorithm.loss_agg_mode,
            "max_response_length": algorithm.response_length,
            "turns_B": targets.turns_B[micro.row_R].to(mask_RT.device),
            "turn_BT": turn_RT,
            **sizes,
        }

        def aggregate(l_RT: Tensor) -> Tensor:
            return aggregate_loss(l_RT, mask_RT, **aggregated)

        tokens = SampledTokens.of(logp_RT, old_RT, advantage_RT, mask_RT, branch_RT)
        # This mask is known only after the forward pass, so its tokens stay in L_i, N and M, as clipped ones do.
        _, keep_RT, stats = self._correction("inference", logp_RT.detach(), old_RT, mask_RT)
        tokens = tokens._replace(A_BT=torch.where(keep_RT, tokens.A_BT, 0.0))
        l_RT, policy = self._policy_loss(tokens, entropy_RT, reference_RT)
        # Without a bonus, its gradient would cost a pass over the logits for nothing.
        entropy_RT = entropy_RT if algorithm.entropy_coef else entropy_RT.detach()
        terms, seen = [aggregate(l_RT)], {"entropy": entropy_RT}
        if algorithm.entropy_coef:
            terms.append(-algorithm.entropy_coef * aggregate(entropy_RT))
        if reference_RT is not None:
            seen["reference_kl"] = kl_divergence(logp_RT, reference_RT, algorithm.kl_kind)
            if algorithm.use_kl_loss:
                terms.append(algorithm.kl_loss_coef * aggregate(seen["reference_kl"]))
        if teacher_RT is not None:
            seen["teacher_kl"] = kl_divergence(logp_RT, teacher_RT, "k1")
            if self._teaches_by_loss:
                # Its gradient is k1 times that of logp: over the policy's own samples that of the KL at each token.
                terms.append(aggregate(self._teacher.coef * kl_divergence(logp_RT, teacher_RT, "k2")))
        for name, x_RT in seen.items():
            stats |= mean_stats(name, x_RT, mask_RT)
        return sum(terms[1:], terms[0]), stats | policy

    def ratios(self, micro: MicroBatch, logp_RT: Tensor, targets: StepTargets) -> Stats:
        """The sums of a micro-batch's ratios, and of the sequences outside the clip, without its loss."""
        old_RT, branch_BT = micro.take(targets.old_BT), targets.branch_BT
        branch_RT = None if branch_BT is None else micro.take(branch_BT)
        mask_RT = micro.take_mask(targets.mask_BT)
        tokens = SampledTokens.of(logp_RT, old_RT, torch.zeros_like(old_RT), mask_RT, branch_RT)
        return policy_stats(tokens, self._token_loss(tokens))

    def figures(self, batch: StepBatch, targets: StepTargets, stats: Stats, *, is_fresh: bool) -> dict[str, float]:
        """The figures of a step by their public names.

        Args:
            stats: Over all updates and ranks.
            is_fresh: Whether the newest version sampled every counted token.
        """
        length_B = lengths_of_sequences(targets.mask_BT, targets.branch_BT).flatten()
        seen = stats_figures(targets.stats) | stats_figures(stats)
        mismatch = figures.mismatch_metrics(self._algorithm, stats, seen, length_B)
        return {
            **(figures.correction_metrics(batch, targets.mask_BT) if targets.stats else {}),
            **figures.objective_metrics(seen),
            **mismatch,
            **figures.clip_metrics(self._algorithm, seen, length_B, mismatch, is_fresh=is_fresh),
        }

    def _policy_loss(
        self, tokens: SampledTokens, entropy_RT: Tensor, reference_RT: Tensor | None
    ) -> tuple[Tensor, Stats]:
        """The loss of each token, and the sums of its figures."""
        if self._own_loss is None:
            of_tokens = self._token_loss(tokens)
            return of_tokens.l_BT, policy_stats(tokens, of_tokens)
        inputs = LossBatch(
            tokens.logp_BT, tokens.old_BT, tokens.A_BT, tokens.mask_BT, entropy_RT.detach(), reference_RT
        )
        l_RT, stats = self._own_loss(inputs.counted())
        return l_RT, stats | ratio_stats(tokens)

    def _correction(
        self, old_logprobs: str, logp_BT: Tensor, behavior_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor, Stats]:
        """The behavior correction of a run with these old_logprobs: weights, the tokens that it keeps, and its figures.

        Under `inference` old is behavior, and each update's own log-probs are compared.
        """
        algorithm, bounds = self._algorithm, self._algorithm.behavior_bounds
        if bounds is None or algorithm.old_logprobs != old_logprobs:
            return torch.ones_like(behavior_BT), mask_BT, {}
        compared, level = (logp_BT, behavior_BT, mask_BT), algorithm.behavior_level
        kind, stats = algorithm.behavior_correction, behavior_stats(*compared, behavior_level=level, bounds=bounds)
        return *behavior_weights(*compared, behavior_correction=kind, behavior_level=level, bounds=bounds), stats


def _token_loss(algorithm: AlgorithmConfig) -> Callable[[SampledTokens], TokenLoss]:
    """The objective of gspo_core that the keys select."""
    low, high = algorithm.clip
    if algorithm.bounds_divergence:
        return partial(dppo_loss, low=low, high=high, divergence=algorithm.objective)
    sampling = algorithm.importance_sampling
    if algorithm.objective == "cispo":
        return partial(cispo_loss, low=low, high=high, importance_sampling=sampling)
    return partial(
        clip_loss,
        low=low,
        high=high,
        importance_sampling=sampling,
        dual_clip=algorithm.dual_clip,
        reference_length=algorithm.pg_clip_reference_length,
    )
