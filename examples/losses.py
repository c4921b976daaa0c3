"""Losses of your own, for `algorithm.loss: {path: losses.py, entry: reinforce}`; docs/objectives.md has the rules.

Not part of the package. `gspo` is the built-in loss at its default clip, written again.
"""

import torch

from gspo_core.loss import sequence_log_ratio


def gspo(batch):
    """One clipped ratio for a sequence: arXiv 2507.18071, eq. 5 and 7."""
    log_ratio_B = sequence_log_ratio(batch.logp_BT, batch.old_logp_BT, batch.mask_BT)
    ratio_BT = log_ratio_B[:, None].expand_as(batch.mask_BT).clamp(-20, 20).exp()
    clipped_BT = ratio_BT.clamp(1 - 3e-4, 1 + 4e-4)
    l_BT = -torch.minimum(ratio_BT * batch.advantage_BT, clipped_BT * batch.advantage_BT)
    return l_BT, {"ratio": ratio_BT, "outside": (ratio_BT != clipped_BT).float()}


def reinforce(batch):
    """The score function without a ratio: right only for rollouts of the present policy."""
    return -batch.advantage_BT * batch.logp_BT
