"""Rewards to advantages against the float64 reference, over groups, masks, penalties and every option."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.advantage import RunningMoments, normalize_rewards, token_advantages
from tests.support.training import numpy_reference as reference

# Whole numbers and ones that float32 cannot hold: groups without spread come up often, and must give exactly 0.
rewards = st.lists(st.sampled_from([0.0, 1.0, 0.1, -3.7, 1e3]), min_size=1, max_size=12)
only = st.sampled_from([{}, {"reward_shift": True}, {"reward_scale": True}])
clips = st.sampled_from([None, 0.5, 10.0])


def groups_of(data: st.DataObject, num: int) -> list[int]:
    return data.draw(st.lists(st.sampled_from([-4, 0, 7]), min_size=num, max_size=num))


@given(st.data(), rewards, st.sampled_from(["group", "batch", "leave_one_out", None]), only, clips)
def test_normalised_rewards_equal_the_reference(
    data: st.DataObject, reward: list[float], norm: str | None, option: dict[str, Any], clip: float | None
) -> None:
    group = groups_of(data, len(reward))
    option = option if norm in ("group", "batch") else {}
    found_B = normalize_rewards(
        torch.tensor(reward, dtype=torch.float64), torch.tensor(group), reward_norm=norm, reward_clip=clip, **option
    )
    shift, scale = "reward_shift" in option, "reward_scale" in option
    expected = reference.normalized(reward, group, norm, shift, scale, clip)
    np.testing.assert_allclose(found_B.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert (found_B.numpy()[expected == 0] == 0).all() or not norm


@given(st.lists(rewards, min_size=1, max_size=4), only, clips)
def test_running_moments_equal_those_of_all_rewards_so_far(
    batches: list[list[float]], option: dict[str, Any], clip: float | None
) -> None:
    moments = RunningMoments()
    seen: list[float] = []
    for reward in batches:
        found_B = normalize_rewards(
            torch.tensor(reward, dtype=torch.float64),
            torch.zeros(len(reward), dtype=torch.long),
            reward_norm="running",
            reward_clip=clip,
            moments=moments,
            **option,
        )
        shift, scale = "reward_shift" in option, "reward_scale" in option
        expected = reference.normalized(reward, reward, "running", shift, scale, clip, seen=seen)
        np.testing.assert_allclose(found_B.numpy(), expected, rtol=1e-9, atol=1e-9)
        seen += reward
    assert moments.count == len(seen)


@given(
    B=st.integers(1, 5),
    T=st.integers(0, 8),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    penalised=st.booleans(),
    whiten=st.booleans(),
    clip=clips,
    seed=st.integers(0, 2**32 - 1),
)
def test_advantages_equal_the_reference(
    B: int, T: int, share: float, gamma: float, penalised: bool, whiten: bool, clip: float | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    reward, mask = rng.choice([0.0, 1.0, 0.1], B), rng.random((B, T)) < share
    penalty = rng.normal(0, 0.1, (B, T)) * penalised
    found_BT = token_advantages(
        torch.tensor(reward),
        torch.tensor(mask),
        token_penalty_BT=torch.tensor(penalty) if penalised else None,
        gamma=gamma,
        whiten_advantages=whiten,
        advantage_clip=clip,
    )
    expected = reference.advantages(reward, mask, penalty, gamma, whiten, clip)
    np.testing.assert_allclose(found_BT.numpy(), expected, rtol=1e-8, atol=1e-8)
    assert not found_BT[~torch.tensor(mask)].any()
