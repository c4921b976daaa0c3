"""Rows keep every bit of a rollout, and a value that is not a number never becomes one."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.learner.assembly.rows import SCHEMA, Row, from_table, row_from_scored, to_table
from gspo_proto.rollout_pb2 import OUTCOME_TRUNCATED, ScoredRollout
from tests.unit.learner.conftest import MakeScored


def assert_same(row: Row, expected: Row) -> None:
    for field in fields(Row):
        a, b = getattr(row, field.name), getattr(expected, field.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype, field.name
            assert a.tobytes() == b.tobytes(), field.name
        else:
            assert (a, type(a)) == (b, type(b)), field.name


def test_a_row_has_what_the_scored_rollout_says(scored: MakeScored) -> None:
    rollout = scored(7, 3, version=[4, -1, 5], logp=[-0.5, 0.0, -0.25], outcome=OUTCOME_TRUNCATED)
    assert row_from_scored(rollout).teacher_logp.tolist() == []
    rollout.score.teacher_logp[:] = [-1.5, -3.0, -2.0]
    row = row_from_scored(rollout)
    assert row.teacher_logp.tolist() == [-1.5, -3.0, -2.0]
    assert (row.step, row.group, row.number, row.attempt, row.num_rollouts) == (0, 7, 3, 1, 2)
    assert row.prompt_token_ids.tolist() == [5, 6, 7]
    assert row.token_ids.tolist() == [10, 11, 12]
    assert row.logp.tolist() == [-0.5, 0.0, -0.25]
    assert row.version.tolist() == [4, -1, 5]
    assert row.mask.tolist() == [True, False, True]
    assert (row.reward, row.failure, row.outcome) == (1.0, None, "truncated")
    assert (row.advantage, row.skipped, row.mini_batch) == (None, None, -1)
    assert row.branch_starts.tolist() == []
    assert json.loads(row.parts_json) == [{"name": "exact", "value": 1.0, "weight": 1.0, "version": "abc"}]
    assert (row.issued_unix_s, row.started_unix_s, row.finished_unix_s, row.scored_unix_s) == (100, 101, 102.5, 103)


def test_a_row_has_the_branches_of_its_rollout(scored: MakeScored) -> None:
    row = row_from_scored(scored(version=[4, -1, 5, -1, 5], branch_starts=[1, 3]))
    assert row.branch_starts.tolist() == [1, 3]
    assert row.branch_starts.dtype == np.int32
    assert row.branch_bounds == [(0, 1), (1, 3), (3, 5)]
    (again,) = from_table(to_table([row]))
    assert_same(again, row)


def test_a_token_whose_set_ties_cut_does_not_count(scored: MakeScored) -> None:
    row = row_from_scored(scored(version=[4, -1, 5, 5], kept_sizes=[2, 0, 0, 1], kept_ids=[10, 2**31 - 1, 13]))
    assert row.mask.tolist() == [True, False, False, True]
    assert (row.num_sampled, row.num_tied) == (3, 1)
    assert (row.kept_sizes.tolist(), row.kept_ids.tolist()) == ([2, 0, 0, 1], [10, 2**31 - 1, 13])
    (again,) = from_table(to_table([row]))
    assert_same(again, row)
    assert row_from_scored(scored()).num_tied == 0


def test_a_step_file_from_before_the_sets_is_read(scored: MakeScored) -> None:
    row = row_from_scored(scored())
    (again,) = from_table(to_table([row]).drop_columns(["kept_sizes", "kept_ids"]))
    assert_same(again, row)
    with pytest.raises(ValueError, match="not those of a step file of this version"):
        from_table(to_table([row]).drop_columns(["logged_json"]))


def test_a_failed_score_has_a_reason_and_no_number(scored: MakeScored) -> None:
    row = row_from_scored(scored(reward=None, failure="timed out after 10 s"))
    assert (row.reward, row.failure) == (None, "timed out after 10 s")


def test_values_that_functions_logged_are_in_the_row(scored: MakeScored) -> None:
    assert row_from_scored(scored()).logged_json == ""
    logged = scored()
    logged.score.logged_json = '{"exact/raw": "4<eos>"}'
    assert row_from_scored(logged).logged_json == '{"exact/raw": "4<eos>"}'


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_a_failure(scored: MakeScored, reward: float) -> None:
    row = row_from_scored(scored(reward=reward))
    assert row.reward is None
    assert row.failure in {"the reward is NaN", "the reward is infinity", "the reward is minus infinity"}
    assert json.loads(row.parts_json)[0]["value"] is None


def test_a_reward_whose_sums_float32_does_not_hold_is_a_failure(scored: MakeScored) -> None:
    assert row_from_scored(scored(reward=1e30)).reward == 1e30
    row = row_from_scored(scored(reward=-1e39))
    assert (row.reward, row.failure) == (None, "the reward is -1e+39, and rewards are from -1e+30 to 1e+30")


def test_arrays_of_unlike_length_are_refused(scored: MakeScored) -> None:
    with pytest.raises(ValueError, match="rollout 7-1: its arrays run over the same tokens"):
        row_from_scored(scored(7, 1, version=[0, 0], logp=[-0.5]))


def test_a_policy_token_without_a_version_is_refused(scored: MakeScored) -> None:
    with pytest.raises(ValueError, match="rollout 0-0: a policy token has no version"):
        row_from_scored(scored(version=[0, -1], mask=b"\x01\x01"))


def test_neither_reward_nor_failure_is_refused(scored: MakeScored) -> None:
    with pytest.raises(ValueError, match="neither a reward nor a failure"):
        row_from_scored(ScoredRollout(rollout=scored().rollout))


def test_the_schema_has_the_fields_of_a_row_and_compact_types() -> None:
    assert SCHEMA.names == [field.name for field in fields(Row)]
    types = {name: str(SCHEMA.field(name).type).replace("element", "item") for name in SCHEMA.names}
    assert types["token_ids"] == types["version"] == "list<item: int32>"
    assert types["logp"] == "list<item: float>"
    assert types["mask"] == "list<item: bool>"
    assert {name for name in SCHEMA.names if SCHEMA.field(name).nullable} == {
        "reward",
        "failure",
        "advantage",
        "skipped",
    }


def test_no_rows_make_a_table_of_no_rows() -> None:
    assert from_table(to_table([])) == []


def test_another_table_is_refused(scored: MakeScored) -> None:
    table = to_table([row_from_scored(scored())])
    with pytest.raises(ValueError, match="not those of a step file"):
        from_table(table.drop_columns(["reward"]))


@given(logps=st.lists(st.lists(st.floats(width=32), max_size=5), min_size=1, max_size=4))
def test_float32_survives_bit_for_bit(
    scored: MakeScored, tmp_path_factory: pytest.TempPathFactory, logps: list[list[float]]
) -> None:
    row = row_from_scored(scored())
    rows = [replace(row, number=i, logp=np.array(logp, dtype=np.float32)) for i, logp in enumerate(logps)]
    path = tmp_path_factory.mktemp("table") / "step.parquet"
    pq.write_table(to_table(rows), path)
    for row, expected in zip(from_table(pq.read_table(path)), rows, strict=True):
        assert_same(row, expected)


@pytest.fixture
def step_file(scored: MakeScored, tmp_path: Path) -> tuple[Path, list[Row]]:
    trained = replace(row_from_scored(scored(3, 0, version=[0, -1, 1], logp=[-0.1, 0, -0.3])), step=2, advantage=0.7)
    failed = replace(row_from_scored(scored(3, 1, version=[], reward=None)), step=2, skipped="failed")
    path = tmp_path / "step-000002.parquet"
    pq.write_table(to_table([trained, failed]), path)
    return path, [trained, failed]


def test_rows_come_back_from_parquet_as_they_were(step_file: tuple[Path, list[Row]]) -> None:
    path, rows = step_file
    for row, expected in zip(from_table(pq.read_table(path)), rows, strict=True):
        assert_same(row, expected)
        assert row.logp.flags.writeable


def test_pandas_reads_a_step_file(step_file: tuple[Path, list[Row]]) -> None:
    frame = pd.read_parquet(step_file[0])
    assert frame["group"].tolist() == [3, 3]
    assert frame["logp"][0].tolist() == np.array([-0.1, 0, -0.3], dtype=np.float32).tolist()
    assert frame["mask"][0].tolist() == [True, False, True]
    assert frame["reward"][0] == 1.0
    assert math.isnan(frame["reward"][1])
    assert frame["failure"].isna().tolist() == [True, False]
    assert frame["failure"][1] == "reward raised ValueError"


def test_duckdb_reads_a_step_file(step_file: tuple[Path, list[Row]]) -> None:
    query = "select number, reward, len(token_ids), list_sum(logp), skipped from read_parquet(?) order by number"
    first, second = duckdb.execute(query, [str(step_file[0])]).fetchall()
    assert first == (0, 1.0, 3, pytest.approx(-0.4), None)
    assert second == (1, None, 0, None, "failed")
