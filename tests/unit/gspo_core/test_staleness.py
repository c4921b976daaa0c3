"""Ages count policy tokens alone, from the learner's version."""

import pytest
import torch

from gspo_core.staleness import drop_old_tokens, token_age

VERSION = torch.tensor([[0, 4, 5, 5], [5, 5, 3, 9], [1, 1, 1, 1]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])


def test_ages() -> None:
    assert token_age(VERSION, MASK, 6).tolist() == [[0, 2, 1, 1], [1, 1, 3, 0], [0, 0, 0, 0]]


def test_old_tokens_leave_the_mask() -> None:
    assert drop_old_tokens(VERSION, MASK, 6, 1).int().tolist() == [[0, 0, 1, 1], [1, 1, 0, 0], [0] * 4]
    assert drop_old_tokens(VERSION, MASK, 5, 0).int().tolist() == [[0, 0, 1, 1], [1, 1, 0, 0], [0] * 4]


def test_a_version_not_made_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="holds version 5; the learner is at 4"):
        token_age(VERSION, MASK, 4)
    assert token_age(torch.zeros(2, 0), torch.zeros(2, 0), 4).shape == (2, 0)
