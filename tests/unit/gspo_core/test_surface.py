"""The names, keywords and defaults that others call gspo_core by: a change here breaks them."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from gspo_core.advantage import normalize_rewards, token_advantages
from gspo_core.kl import kl_divergence
from gspo_core.logprobs import token_logprobs
from gspo_core.loss import PolicyLoss, policy_loss, sequence_log_ratio

REQUIRED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("function", "positional", "keywords"),
    [
        (
            normalize_rewards,
            ["rewards_B", "group_B"],
            {
                "reward_norm": REQUIRED,
                "reward_shift": False,
                "reward_scale": False,
                "reward_clip": None,
                "moments": None,
            },
        ),
        (
            token_advantages,
            ["rewards_B", "mask_BT"],
            {"token_penalty_BT": None, "gamma": 1.0, "whiten_advantages": False, "advantage_clip": None},
        ),
        (sequence_log_ratio, ["logp_BT", "old_logp_BT", "mask_BT"], {}),
        (
            policy_loss,
            ["logp_BT", "old_logp_BT", "advantage_BT", "mask_BT"],
            {
                "importance_sampling": "seq",
                "pg_clip_low": 3e-4,
                "pg_clip_high": 4e-4,
                "dual_clip": None,
                "loss_agg_mode": "seq-mean-token-mean",
                "num_sequences": None,
                "num_tokens": None,
                "max_response_length": None,
            },
        ),
        (kl_divergence, ["logp_BT", "ref_logp_BT", "kind"], {}),
        (token_logprobs, ["hidden_BTD", "weight_VD", "target_BT"], {"temperature": 1.0, "chunk_size": 1024}),
    ],
)
def test_signature(function: Callable[..., Any], positional: list[str], keywords: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keywords
    assert PolicyLoss._fields == ("loss", "stats")
