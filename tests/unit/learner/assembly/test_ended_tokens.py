"""Tokens of ended rollouts by column, counted in their arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gspo.common.streams.inbox import Delivery
from gspo.common.streams.token_counts import NO_TOKENS, EndedTokens
from gspo.learner.assembly.ended_tokens import PendingEntry, dead_tokens, late_tokens, trained_tokens
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.assembly.rows import Row
from gspo.learner.assembly.settlements import GroupEnding
from gspo_proto.rollout_pb2 import GroupFailure, Rollout
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_rows


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """Six tokens, of which the policy sampled five; the first of them is too old."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model"))
    version = np.array([0, 1, -1, 1, 1, 1], np.int32)
    mask = np.array([False, True, False, True, True, True])
    row = make_rows(folder, step=1, num_groups=1)[0]
    return replace(row, group=3, number=2, token_ids=np.arange(6), version=version, mask=mask)


def test_a_logged_row_has_every_sampled_token_in_a_column(row: Row) -> None:
    row = replace(row, skipped=None)
    assert trained_tokens(row) == EndedTokens("3-2", "trained", 4, "masked_stale", 1)
    assert trained_tokens(replace(row, skipped="failed")) == EndedTokens("3-2", "trained", 0, "masked_failed", 5)
    assert trained_tokens(replace(row, skipped="truncated")) == EndedTokens("3-2", "trained", 0, "masked_truncated", 5)


def test_tokens_that_ties_mask_have_a_column_unless_others_are_too_old(row: Row) -> None:
    sizes = np.array([2, 2, 0, 0, 2, 2], np.uint8)
    tied = replace(row, skipped=None, kept_sizes=sizes, mask=row.mask & (sizes > 0))
    assert trained_tokens(tied) == EndedTokens("3-2", "trained", 3, "masked_stale", 2)
    young = replace(tied, mask=(row.version >= 0) & (sizes > 0))
    assert trained_tokens(young) == EndedTokens("3-2", "trained", 4, "masked_tied", 1)
    assert row_metrics([young], 1)["skipped_tokens_tied"] == 1
    assert row_metrics([tied], 1)["skipped_tokens_stale"] == 1
    assert row_metrics([tied], 1)["kept_tokens_mean"] == 2


def test_an_entry_that_waits_keeps_the_number_of_its_tokens() -> None:
    rollout = Rollout(group=3, number=2, version=[0, -1, 1])
    pending = PendingEntry.of(Delivery(b"1-0", b"bytes", 1, rollout), rollout)
    assert (pending.delivery.payload, pending.delivery.message, pending.key) == (b"", None, "3-2")
    assert pending.ended_as(GroupEnding.FILTERED) == EndedTokens("3-2", "filtered", 2)


def test_a_second_entry_and_a_dead_letter_count_what_is_recorded() -> None:
    rollout = Rollout(group=3, number=2, version=[0, -1, 1])
    assert late_tokens(rollout, "superseded") == EndedTokens("3-2", "superseded", 2, if_recorded=True)
    assert dead_tokens(rollout) == EndedTokens("3-2", "dead_letters", 2, if_recorded=True)


def test_a_groups_failure_has_no_tokens() -> None:
    failure = GroupFailure(group=3, reason="given up")
    assert dead_tokens(failure) == NO_TOKENS
    assert PendingEntry.of(Delivery(b"1-0", b"", 1), failure).ended_as(GroupEnding.FAILED).num == 0
