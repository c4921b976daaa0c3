"""The token ledger as its readers see it: sums over accounts, and what a wipe of Redis took."""

from __future__ import annotations

from gspo.runlog.token_ledger import COLUMNS, LedgerRecord, token_ledger


def record(account: str, step: int, **tokens: int) -> LedgerRecord:
    return LedgerRecord(step=step, unix_s=0.0, account=account, tokens=tokens)


def test_the_last_record_of_an_account_counts() -> None:
    ledger = token_ledger([record("a", 1, generated=10, in_flight=10), record("a", 2, generated=30, trained=30)])
    assert ledger is not None
    assert (ledger.tokens["generated"], ledger.tokens["trained"], ledger.tokens["in_flight"]) == (30, 30, 0)
    assert (ledger.step, ledger.difference, ledger.evaluation) == (2, 0, 0)


def test_what_was_in_flight_at_a_wipe_is_lost() -> None:
    records = [
        record("a", 1, generated=30, trained=20, in_flight=10, evaluation=5),
        record("b", 2, generated=12, in_flight=7, unfinished=5, evaluation=1),
    ]
    ledger = token_ledger(records)
    assert ledger is not None
    seen = {name: num for name, num in ledger.tokens.items() if num}
    assert seen == {"generated": 42, "trained": 20, "in_flight": 7, "unfinished": 5, "lost": 10}
    assert (ledger.difference, ledger.evaluation) == (0, 6)


def test_what_no_column_has_is_the_difference() -> None:
    ledger = token_ledger([record("a", 1, generated=30, trained=20, filtered=12)])
    assert ledger is not None
    assert ledger.difference == -2


def test_rows_say_what_each_column_is() -> None:
    ledger = token_ledger([record("a", 1, generated=40, trained=30, masked_failed=10)])
    assert ledger is not None
    names = [(name, num, share) for name, num, share, _ in ledger.rows]
    assert names == [("generated", 40, 1.0), ("in flight", 0, 0.0), ("trained", 30, 0.75), ("masked failed", 10, 0.25)]
    assert all(COLUMNS.values())


def test_a_run_without_a_record_has_no_ledger() -> None:
    assert token_ledger([]) is None
