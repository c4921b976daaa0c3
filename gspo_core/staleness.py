"""How old tokens are, in policy versions, and which are too old to count.

Not here: what is done about it; waiting, dropping or masking is the learner's choice.

Ages count from the learner's version, the one that is about to be trained: a token it would sample itself is 0
versions old. Only tokens in the mask count, so an old prompt or tool answer makes nothing stale.
"""

import torch
from torch import Tensor

from gspo_core.shapes import checked_shapes


@checked_shapes
def token_age(version_BT: Tensor, mask_BT: Tensor, learner_version: int) -> Tensor:
    """learner_version - version at each policy token, 0 elsewhere. Integers [B, T] in, [B, T] out.

    ValueError: shapes, or a policy token from a version that the learner has not made yet.
    """
    age_BT = torch.where(mask_BT.bool(), learner_version - version_BT.long(), 0)
    if age_BT.numel() and int(age_BT.min()) < 0:
        newest = learner_version - int(age_BT.min())
        raise ValueError(f"version_BT holds version {newest}; the learner is at {learner_version}, none can be newer")
    return age_BT


def drop_old_tokens(version_BT: Tensor, mask_BT: Tensor, learner_version: int, max_token_age: int) -> Tensor:
    """The mask without tokens older than max_token_age: they leave m_BT, and so L_i. Bool [B, T].

    With max_token_age 0 it keeps the tokens that the learner's own version sampled. Errors as `token_age`.
    """
    return mask_BT.bool() & (token_age(version_BT, mask_BT, learner_version) <= max_token_age)
