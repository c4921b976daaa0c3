"""The columns in memory against the files: a log that grows, shrinks, is damaged, or is larger than the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from threading import Thread

import duckdb
import pytest

from gspo.learner.assembly.rows import Row, row_from_scored
from gspo.learner.storage.step_log import StepLog
from gspo.view.log_query import SORTS, LogQuery, filter_of
from gspo.view.step_table import _BATCH_FILES
from tests.unit.learner.conftest import MakeScored

GROUP_SIZE = 4
_DEADLINE_S = 60


@pytest.fixture
def log(tmp_path: Path) -> StepLog:
    return StepLog(tmp_path)


@pytest.fixture
def rows_of(scored: MakeScored) -> Callable[..., list[Row]]:
    """The rows of a step: one group, whose rewards and texts tell step and number."""

    def make(step: int, word: str = "answer") -> list[Row]:
        return [
            replace(
                row_from_scored(scored(10 * step, number, reward=number / 4, version=range(step, step + number + 1))),
                step=step,
                advantage=number - 1.5,
                mini_batch=0,
                text=f"{word} {step}-{number}",
            )
            for number in range(GROUP_SIZE)
        ]

    return make


def places(query: LogQuery, **words: str) -> list[tuple[int, int]]:
    """Step and number of the rollouts on a page."""
    return [(row["step"], row["number"]) for row in query.rollouts(filter_of(words))[1]]


def test_new_steps_appear_and_removed_ones_vanish(log: StepLog, rows_of: Callable[..., list[Row]]) -> None:
    query = LogQuery(log.folder)
    assert query.rollouts(filter_of({})) == (0, [])
    for step in (1, 2, 3):
        log.write(step, rows_of(step))
        assert query.rollouts(filter_of({}))[0] == GROUP_SIZE * step
        assert places(query, q=f"answer {step}-2") == [(step, 2)]
    log.remove([1, 2])
    assert query.rollouts(filter_of({}))[0] == GROUP_SIZE
    assert places(query, q="answer 2-2") == []
    assert query.last_steps("1+1") == {"1+1=": 3}


def test_a_file_that_was_replaced_is_read_again(log: StepLog, rows_of: Callable[..., list[Row]]) -> None:
    query = LogQuery(log.folder)
    log.write(1, rows_of(1, "old"))
    assert places(query, q="old 1-1") == [(1, 1)]
    log.remove([1])
    log.write(1, rows_of(1, "new"))
    assert places(query, q="old") == []
    assert places(query, q="new 1-1") == [(1, 1)]


def test_a_damaged_file_is_left_out_and_named_until_it_is_whole(
    log: StepLog, rows_of: Callable[..., list[Row]]
) -> None:
    for step in (1, 2, 3):
        log.write(step, rows_of(step))
    whole = log.path(2).read_bytes()
    log.path(2).write_bytes(whole[: len(whole) // 2])
    query = LogQuery(log.folder)
    assert query.rollouts(filter_of({}))[0] == 2 * GROUP_SIZE
    assert places(query, q="answer 2") == []
    (problem,) = query.unreadable()
    assert problem.startswith("step-000002.parquet: ")
    log.path(2).write_bytes(whole)
    assert query.rollouts(filter_of({}))[0] == 3 * GROUP_SIZE
    assert query.unreadable() == []


def test_rows_of_a_page(log: StepLog, rows_of: Callable[..., list[Row]]) -> None:
    failed = replace(rows_of(7)[3], number=4, reward=None, failure="late " * 100, advantage=None, skipped="failed")
    log.write(7, [*rows_of(7), replace(failed, prompt="long " * 100)])
    _, rows = LogQuery(log.folder).rollouts(filter_of({"sort": "reward", "dir": "asc"}))
    assert [row["number"] for row in rows] == [0, 1, 2, 3, 4], "a missing reward is last"
    assert rows[1]["versions"] == [7, 8]
    assert rows[1]["length"] == 2
    assert rows[1]["parts_json"].startswith('[{"name": "exact"')
    assert (len(rows[4]["prompt"]), len(rows[4]["failure"])) == (160, 200)


def test_answers_are_the_same_within_and_beyond_the_memory(log: StepLog, rows_of: Callable[..., list[Row]]) -> None:
    num_steps = _BATCH_FILES + 6
    for step in range(1, num_steps + 1):
        log.write(step, rows_of(step))
    # The bounds hold all, the newest ten steps, or none.
    queries = [LogQuery(log.folder, share) for share in (1.0, 10 * GROUP_SIZE / 4_000_000, 0.0)]
    for sort, page, text in zip(SORTS, cycle(("1", "3", "9")), cycle(("", "1-2", "nowhere", "")), strict=False):
        words = filter_of({"sort": sort, "page": page, "q": text, "reward_min": "0.25"})
        whole, *others = (query.rollouts(words) for query in queries)
        for other in others:
            assert other == whole, (sort, page, text)
    assert [len(query._rollouts._signatures) for query in queries] == [num_steps, 10, 0]
    assert [query.last_steps("1+1") for query in queries] == [{"1+1=": num_steps}] * 3


def test_beyond_the_memory_the_newest_steps_are_kept(log: StepLog, rows_of: Callable[..., list[Row]]) -> None:
    query = LogQuery(log.folder, 2 * GROUP_SIZE / 4_000_000)
    for step in range(1, 6):
        log.write(step, rows_of(step))
        assert query.rollouts(filter_of({}))[0] == GROUP_SIZE * step
        assert sorted(query._rollouts._signatures) == list(range(max(1, step - 1), step + 1))


def test_a_file_that_vanishes_behind_its_listing_is_no_error(
    log: StepLog, rows_of: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        log.write(step, rows_of(step))
    query = LogQuery(log.folder, 0.0)
    refresh = query._rollouts.refresh

    def refresh_and_lose_a_file(folder: Path) -> None:
        refresh(folder)
        if log.path(1).exists():
            log.remove([1])

    monkeypatch.setattr(query._rollouts, "refresh", refresh_and_lose_a_file)
    assert query.rollouts(filter_of({}))[0] == GROUP_SIZE


def test_a_log_that_changes_under_questions_gives_whole_steps(log: StepLog, rows_of: Callable[..., list[Row]]) -> None:
    query = LogQuery(log.folder)
    problems: list[object] = []
    log.write(1, rows_of(1))

    def ask() -> None:
        while not log.path(30).exists():
            try:
                total, rows = query.rollouts(filter_of({"q": "answer"}))
            except duckdb.Error as error:
                problems.append(error)
                return
            if total % GROUP_SIZE or len(rows) != total:
                problems.append((total, len(rows)))

    threads = [Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(2, 31):
        log.write(step, rows_of(step))
        if step > 4:
            log.remove([step - 4])
    for thread in threads:
        thread.join(_DEADLINE_S)
    assert not problems
    assert query.rollouts(filter_of({}))[0] == 4 * GROUP_SIZE
