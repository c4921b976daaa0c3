"""The KL to the run's teacher: in the advantages of the sampled tokens, or as a term of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gspo.common.config.teacher import TeacherConfig
from gspo_core.kl import kl_divergence


@dataclass(frozen=True)
class TeacherKl:
    """The teacher's log-probs of a step's tokens, and what the section `teacher` makes of them.

    Attributes:
        logp_BT: At the temperature of the sampling; means nothing outside the mask. [B, T]
    """

    config: TeacherConfig
    logp_BT: Tensor

    @property
    def is_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.config.kl_in == "loss"

    def penalty_BT(self, old_BT: Tensor) -> Tensor:
        """The amount by which each token's reward is lowered: coef (old - teacher). [B, T]"""
        return self.config.coef * kl_divergence(old_BT, self.logp_BT, "k1")

    def loss_RT(self, logp_RT: Tensor, teacher_RT: Tensor) -> Tensor:
        """The loss of each token, before the aggregation: coef (logp - teacher)^2 / 2. [R, T]

        Its gradient is k1 times that of logp: over the policy's own samples that of the KL at each token.
        """
        return self.config.coef * kl_divergence(logp_RT, teacher_RT, "k2")
